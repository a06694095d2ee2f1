"""Means over seeds, with their intervals."""

from collections.abc import Sequence

import numpy as np

# 97.5% quantiles of Student's t distribution, by degrees of freedom.
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def mean_over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95% interval by Student's t distribution; NaN for a single seed."""
    count = len(values)
    if count < 2:
        return float(np.mean(values)), float("nan")
    quantile = _T975[count - 2] if count - 2 < len(_T975) else 1.96
    return float(np.mean(values)), float(quantile * np.std(values, ddof=1) / count**0.5)
