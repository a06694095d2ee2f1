"""SIGTERM: what schedulers send before they kill. A run saves where it is, and ends."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from specrl_jax.parallel.hosts import any_of


class Stopped(Exception):  # noqa: N818 (no error)
    """The run was asked to end and has saved everything it needs to go on."""


_asked = threading.Event()


@contextlib.contextmanager
def termination_saves() -> Iterator[None]:
    """Inside, SIGTERM is remembered instead of ending the process; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def remember(number: int, frame: FrameType | None) -> None:
        _asked.set()

    before = signal.signal(signal.SIGTERM, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _asked.clear()


def stop_if_asked() -> None:
    """Raise Stopped where SIGTERM has come, to any process; call it after a checkpoint."""
    if any_of(_asked.is_set()):
        raise Stopped
