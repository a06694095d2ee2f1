"""Rewards computed on the host, from the text of the response."""

import functools
import importlib
import logging
import numbers
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from specrl_jax.data.layouts import Example
from specrl_jax.errors import InputError

Reward = Callable[[str, Example], float]

RIGHT = 1.0
"""A response that is rewarded so much counts as right."""

_TIME_LIMIT_S = 5
# GSM8K's answer line: `#### `, then one number or fraction with or without sign, currency and unit, and nothing more.
_ANSWER_LINE = re.compile(
    r"####[ \t]*(?P<sign>-?)[$€£]?(?P<minus>-?)(?P<number>\d[\d.,/]*)[ \t]*(?P<percent>%?)[A-Za-z \t]*\.?[ \t\r]*$",
    re.MULTILINE,
)


def math_reward(response: str, answer: str) -> float:
    r"""1.0 when the response's final answer equals the reference answer by math-verify's judgement, else 0.0.

    The final answer is GSM8K's `#### ` line, unless a `\boxed` follows it; without such a line, what math-verify
    extracts: a boxed expression or one announced as the final answer, else the last formula or number. A response
    without any is worth 0.0, and so is one that math-verify fails on or does not decide within five seconds. These
    limits rest on an alarm signal, which Python gives to the main thread only: in other threads there is none.
    """
    math_verify = _math_verify()
    limit = _TIME_LIMIT_S if threading.current_thread() is threading.main_thread() else None
    # Python's own compiler warns about expressions such as `2(3)` that sympy hands to it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gold = _parse_answer(answer, limit)
        predicted = math_verify.parse(_final_answer(response), parsing_timeout=limit)
        return float(math_verify.verify(gold, predicted, timeout_seconds=limit))


def answer_reward(response: str, example: Example) -> float:
    """`math_reward` against the example's answer: the reward of a dataset unless another is named.

    Raises:
        InputError: the example has no answer.
    """
    if example.answer is None:
        raise InputError(f"row {example.row_id} has no answer to judge a response by; name a reward of your own")
    return math_reward(response, example.answer)


def load_reward(spec: str) -> Reward:
    """Import the reward `module:function`; it is called as `function(response, example)` and returns a number.

    Raises:
        InputError: the module or the function does not exist, or is not callable.
    """
    module_name, colon, function_name = spec.partition(":")
    if not (module_name and colon and function_name):
        raise InputError(f"reward '{spec}' is not of the form module:function, as in my_rewards:length_reward")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise InputError(
            f"the module of reward '{spec}' cannot be imported ({type(error).__name__}: {error}); "
            "correct it, or run from the folder that holds it"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        state = "is not a function" if hasattr(module, function_name) else "does not exist"
        raise InputError(f"'{function_name}' of reward '{spec}' {state} in module '{module_name}'; correct the name")
    return function


def score(responses: Sequence[str], examples: Sequence[Example], reward: Reward) -> Float32[np.ndarray, "b"]:
    """The reward of each response, given the example that prompted it.

    Raises:
        InputError: a reward is not a finite number; the message names the row.
    """
    pairs = zip(responses, examples, strict=True)
    return np.array([_checked(reward(response, example), example) for response, example in pairs], np.float32)


def _checked(value: Any, example: Example) -> float:
    if not isinstance(value, numbers.Real | np.bool_):
        raise InputError(f"the reward of row {example.row_id} is a {type(value).__name__}; return a number")
    magnitude: Any = abs(value)
    if not magnitude <= float(np.finfo(np.float32).max):  # NaN compares false
        raise InputError(f"the reward of row {example.row_id} is {value}; return a finite number")
    return float(value)


@functools.cache
def _math_verify() -> Any:
    # A time-out is logged with the whole response; the verdict says enough.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import math_verify
    return math_verify


@functools.lru_cache(maxsize=4096)
def _parse_answer(answer: str, limit: int | None) -> list[Any]:
    text = answer if r"\boxed" in answer else rf"\boxed{{{answer}}}"
    return _math_verify().parse(text, parsing_timeout=limit)


def _final_answer(response: str) -> str:
    lines = list(_ANSWER_LINE.finditer(response))
    if not lines or r"\boxed" in response[lines[-1].end() :]:
        return response
    line = lines[-1]
    return f"{line['sign'] or line['minus']}{line['number']}{line['percent']}"
