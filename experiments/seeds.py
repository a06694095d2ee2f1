"""The same measurement for several seeds: made one after the other, gathered, and its means with their intervals."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.common import progress

# 97.5% quantiles of Student's t distribution, by degrees of freedom.
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def mean_over_seeds(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean, and half of its 95% interval by Student's t distribution; NaN for a single seed."""
    count = len(values)
    if count < 2:
        return float(np.mean(values)), float("nan")
    quantile = _T975[count - 2] if count - 2 < len(_T975) else 1.96
    return float(np.mean(values)), float(quantile * np.std(values, ddof=1) / count**0.5)


def over_seeds(
    first: int, count: int, measure: Callable[[int], list[dict[str, Any]]], note: Callable[[list[dict[str, Any]]], str]
) -> list[dict[str, Any]]:
    """The rows that `measure` finds for every seed from `first` on; `note` says something about those of a seed."""
    found: list[dict[str, Any]] = []
    with progress("seeds", count) as advance:
        for seed in range(first, first + count):
            rows = measure(seed)
            found += rows
            advance(1, note(rows))
    return found


def acceptance_over_seeds(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of `acceptance_figures` of several seeds; `ci95` is of the mean over them, of one seed that over rounds.

    How many drafts of a depth are accepted is the mean over the seeds that came so far.
    """
    length, half_width = mean_over_seeds([row["acceptance_length"] for row in rows])
    survival = np.array([row["survival_per_position"] for row in rows])
    reached = np.pad(survival, ((0, 0), (1, 0)), constant_values=1.0)[:, :-1] > 0.0
    accepted = np.array([row["conditional_acceptance"] for row in rows])
    depths = [
        mean_over_seeds(accepted[reached[:, d], d] if reached[:, d].any() else [0.0]) for d in range(len(accepted[0]))
    ]
    return {
        "acceptance_length": length,
        "ci95": half_width if len(rows) > 1 else rows[0]["ci95"],
        "tokens_per_forward": float(np.mean([row["tokens_per_forward"] for row in rows])),
        "survival_per_position": survival.mean(axis=0).tolist(),
        "conditional_acceptance": [mean for mean, _ in depths],
        "conditional_acceptance_ci95": [half for _, half in depths],
        "entropy": float(np.mean([row["entropy"] for row in rows])),
        "seeds": len(rows),
    }


def grouped(rows: Sequence[dict[str, Any]], *fields: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by their values of some fields, in order of appearance."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in fields), []).append(row)
    return groups
