"""pass@k against exact fractions and against the expectation it estimates."""

import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest

from specrl_jax.rl.pass_at_k import pass_at_k

pytestmark = pytest.mark.ci


@pytest.mark.parametrize("n", [1, 4, 7, 200])
def test_matches_exact_binomials(n):
    correct = np.arange(n + 1)
    for k in sorted({1, 2, 3, n // 2, n} & set(range(1, n + 1))):
        exact = [float(1 - Fraction(comb(n - int(c), k), comb(n, k))) for c in correct]
        np.testing.assert_allclose(pass_at_k(n, correct, k), exact, rtol=1e-12, atol=1e-14)


def test_ends_are_exact():
    rates = pass_at_k(64, np.array([0, 32, 57, 64]), 8)
    assert rates[0] == 0.0
    assert 0.0 < rates[1] < 1.0
    assert np.all(rates[2:] == 1.0)


def test_pass_at_1_is_the_accuracy():
    np.testing.assert_allclose(pass_at_k(16, np.arange(17), 1), np.arange(17) / 16, rtol=1e-15)


def test_large_counts_do_not_overflow():
    # C(100000, 5000) has thousands of digits. One right: k / n.
    np.testing.assert_allclose(pass_at_k(100_000, np.array([1]), 5_000), [0.05], rtol=1e-9)
    np.testing.assert_array_equal(pass_at_k(5_000, np.array([2_500, 5_000]), 5_000), 1.0)


def test_is_unbiased():
    """Mean over all outcomes of five responses of chance 0.3 = 1 - 0.7^k."""
    chance, n = 0.3, 5
    for k in range(1, n + 1):
        expected = 0.0
        for outcome in itertools.product([0, 1], repeat=n):
            c = sum(outcome)
            expected += chance**c * (1 - chance) ** (n - c) * pass_at_k(n, np.array([c]), k)[0]
        assert expected == pytest.approx(1 - 0.7**k, abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match="cannot be estimated from 4 responses"):
        pass_at_k(4, np.array([1]), k)


@pytest.mark.parametrize("correct", [-1, 5])
def test_count_out_of_range(correct):
    with pytest.raises(ValueError, match=r"must lie in 0\.\.4"):
        pass_at_k(4, np.array([2, correct]), 2)
