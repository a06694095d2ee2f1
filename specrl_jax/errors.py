"""The one exception for bad input."""


class InputError(Exception):
    """Bad input from the user; the message is one sentence that says what, where and the remedy.

    Scripts print it and exit with status 2, without a traceback. It is no
    `ValueError`, which the parser of the command line would catch and box.
    """
