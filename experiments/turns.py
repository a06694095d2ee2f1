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


def after_itself(call: Callable[[], float]) -> Callable[[], float]:
    """The call made twice, of which the second counts: right after another program the first products take longer."""
    return lambda: (call(), call())[1]


def in_turn(
    calls: Mapping[str, Callable[[], float]], repeats: int, discard: int = 1
) -> dict[str, Float[np.ndarray, "n"]]:
    """Seconds of every call, made in turn, without the first `discard` turns.

    What a call comes after changes its time: the order is drawn anew for every turn, the same in every run.
    """
    names, seconds, rng = list(calls), {name: list[float]() for name in calls}, np.random.default_rng(0)
    for _ in range(repeats + discard):
        for index in rng.permutation(len(names)):
            seconds[names[index]].append(calls[names[index]]())
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
