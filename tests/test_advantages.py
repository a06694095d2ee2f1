"""Group-relative advantages against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.rl.advantages import group_advantages, has_contrast, shuffle_within_groups, zero_advantage_groups

pytestmark = pytest.mark.ci


def reference_advantages(rewards, group_size, normalize_std, baseline="mean", eps=1e-6):
    """One response at a time, in float64."""
    rewards = np.asarray(rewards, np.float64)
    advantages = np.zeros_like(rewards)
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        mean = sum(group) / group_size
        std = (sum((r - mean) ** 2 for r in group) / (group_size - 1)) ** 0.5
        for i, reward in enumerate(group):
            others = [r for j, r in enumerate(group) if j != i]
            compared = mean if baseline == "mean" else sum(others) / len(others)
            advantages[start + i] = (reward - compared) / (std + eps if normalize_std else 1.0)
    return advantages


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_matches_numpy(normalize_std, baseline):
    rewards = np.random.default_rng(0).normal(size=24).astype(np.float32)
    advantages = jax.jit(group_advantages, static_argnames=("group_size", "normalize_std", "baseline"))(
        jnp.asarray(rewards), group_size=6, normalize_std=normalize_std, baseline=baseline
    )
    np.testing.assert_allclose(advantages, reference_advantages(rewards, 6, normalize_std, baseline), atol=2e-6)


def test_known_values():
    # One right answer in four: mean 1/4, unbiased standard deviation 1/2. Then [1..3]: mean 2, deviation 1.
    np.testing.assert_allclose(
        group_advantages(jnp.float32([1, 0, 0, 0]), 4), np.array([1.5, -0.5, -0.5, -0.5]) / (1 + 2e-6), rtol=1e-6
    )
    np.testing.assert_allclose(
        group_advantages(jnp.float32([1, 2, 3, 4, 5, 6]), 3, eps=0.0), [-1, 0, 1, -1, 0, 1], atol=1e-6
    )
    # RLOO: 1 against the mean of 2 and 3, and so on.
    left_out = group_advantages(jnp.float32([1, 2, 3, 4, 5, 6]), 3, baseline="leave_one_out", normalize_std=False)
    np.testing.assert_allclose(left_out, [-1.5, 0, 1.5, -1.5, 0, 1.5], atol=1e-6)


def test_groups_do_not_mix():
    rewards = jnp.float32([0, 1, 0, 1, 1, 0])
    moved = rewards.at[3:].add(100.0)
    np.testing.assert_allclose(group_advantages(rewards, 3), group_advantages(moved, 3), atol=2e-5)


def test_groups_without_contrast_are_zero_and_counted():
    # In float32 the mean of three times 0.1 is not 0.1; divided by eps the rest would be an advantage.
    rewards = jnp.float32([0.1] * 3 + [0, 0, 1] + [1, 1, 1])
    advantages = group_advantages(rewards, 3, eps=0.0)
    left_out = group_advantages(rewards, 3, baseline="leave_one_out", normalize_std=False)
    np.testing.assert_array_equal(left_out == 0.0, advantages == 0.0)
    assert has_contrast(rewards, 3).tolist() == [False, True, False]
    assert np.all(np.asarray(advantages)[[0, 1, 2, 6, 7, 8]] == 0.0)
    assert np.all(np.asarray(advantages)[3:6] != 0.0)
    assert int(zero_advantage_groups(rewards, 3)) == 2


@pytest.mark.parametrize(("size", "group_size"), [(6, 4), (4, 1)])
def test_sizes_that_do_not_split(size, group_size):
    with pytest.raises(ValueError, match="do not split into groups"):
        group_advantages(jnp.zeros(size), group_size)


def test_shuffle_stays_in_the_group_and_follows_the_row_id():
    rewards = jnp.arange(32, dtype=jnp.float32)
    row_ids = jnp.uint32([7, 3, 11, 4_000_000_000])
    key = jax.random.key(0)
    shuffled = np.asarray(shuffle_within_groups(rewards, 8, key, row_ids)).reshape(4, 8)
    grouped = np.asarray(rewards).reshape(4, 8)
    np.testing.assert_array_equal(np.sort(shuffled, axis=1), grouped)
    offsets = shuffled - grouped[:, :1]
    assert len({tuple(row) for row in offsets}) == 4, "groups are permuted alike"

    # The same groups in another order, and another key.
    order = np.array([2, 0, 3, 1])
    again = shuffle_within_groups(jnp.asarray(grouped[order].reshape(-1)), 8, key, row_ids[order])
    np.testing.assert_array_equal(np.asarray(again).reshape(4, 8), shuffled[order])
    other = shuffle_within_groups(rewards, 8, jax.random.key(1), row_ids)
    assert np.any(np.asarray(other).reshape(4, 8) != shuffled)


def test_shuffled_rewards_carry_no_signal():
    # Expected advantage of the best response over many updates is 0 after shuffling, 1.5 before.
    rewards = jnp.float32([1, 0, 0, 0])
    keys = jax.random.split(jax.random.key(2), 2000)
    shuffled = jax.vmap(lambda key: shuffle_within_groups(rewards, 4, key, jnp.uint32([5])))(keys)
    advantages = jax.vmap(lambda r: group_advantages(r, 4))(shuffled)
    standard_error = 0.87 / 2000**0.5
    assert np.all(np.abs(np.mean(np.asarray(advantages), axis=0)) < 4 * standard_error)
