"""pass@k: the chance that at least one of k responses to a problem is right."""

import numpy as np
from jaxtyping import Float, Int


def pass_at_k(num_samples: int, num_correct: Int[np.ndarray, "p"], k: int) -> Float[np.ndarray, "p"]:
    """Unbiased estimate per problem, `1 - C(n - c, k) / C(n, k)` (Chen et al., arXiv 2107.03374, eq. 1).

    The quotient of binomials is evaluated as a product of k factors in [0, 1], so that
    nothing overflows; the rate of a data set is the mean over its problems.

    Args:
        num_samples: responses to each problem, n.
        num_correct: right ones among them, c, in 0..n.
        k: between 1 and n.

    Returns:
        float64 in [0, 1]; exactly 0 where none is right, exactly 1 where fewer than k are wrong.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_samples} responses to a problem")
    if np.any((num_correct < 0) | (num_correct > num_samples)):
        raise ValueError(f"numbers of right responses must lie in 0..{num_samples}")
    # Chance that the draws 0..k-1, without replacement, all miss.
    draws = np.arange(k)
    wrong_left = np.maximum(num_samples - num_correct[:, None] - draws[None], 0)
    return 1.0 - np.prod(wrong_left / (num_samples - draws)[None], axis=1)


def mean_ci95(values: Float[np.ndarray, "p"]) -> tuple[float, float]:
    """Mean over problems, and the half-width of its 95% interval by the normal approximation.

    The half-width is 1.96 standard errors, from the variance with the divisor p - 1: NaN for a single problem.
    """
    if len(values) == 1:
        return float(values[0]), float("nan")
    return float(np.mean(values)), float(1.96 * np.std(values, ddof=1) / len(values) ** 0.5)
