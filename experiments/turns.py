"""Times of calls that are made in turn, and their ratios turn by turn."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float


def seconds_of(call: Callable[[], Any]) -> Callable[[], float]:
    """A call that tells how long it takes until its results are there."""

    def timed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - start

    return timed


def second_of(call: Callable[[], float]) -> Callable[[], float]:
    """The call made twice; the second counts, since right after a rollout the first products take a quarter longer."""
    return lambda: (call(), call())[1]


def in_turn(
    calls: Mapping[str, Callable[[], float]], repeats: int, discard: int = 1
) -> dict[str, Float[np.ndarray, "n"]]:
    """Seconds of every call, made in turn, forwards and backwards (A B C C B A ...), without the first `discard` turns.

    What a call comes after changes its time by a percent: no call comes after the same one in every turn.
    """
    names, seconds = list(calls), {name: list[float]() for name in calls}
    for turn in range(repeats + discard):
        for name in names[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(calls[name]())
    return {name: np.array(values[discard:]) for name, values in seconds.items()}


def ratio(numerator: Float[np.ndarray, "n"], denominator: Float[np.ndarray, "n"]) -> tuple[float, float, float]:
    """Median of paired ratios, and its 95% interval from order statistics."""
    ratios = np.sort(numerator / denominator)
    count = len(ratios)
    # Ranks that a median lies between with 95%: a binomial of `count` fair coins.
    below = np.cumsum([math.comb(count, i) for i in range(count + 1)]) / 2.0**count
    low = max(0, int(np.searchsorted(below, 0.025)) - 1)
    return float(np.median(ratios)), float(ratios[low]), float(ratios[count - 1 - low])


def ratio_columns(
    name: str, numerator: Float[np.ndarray, "n"], denominator: Float[np.ndarray, "n"]
) -> dict[str, float]:
    """`ratio` as a table has it: `name`, `name_low` and `name_high`."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), ratio(numerator, denominator), strict=True))
