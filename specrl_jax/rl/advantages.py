"""Group-relative advantages: every response is compared with the others to the same prompt.

Rewards `[b]` are group-major: entry `g * group_size + i` is response `i` to prompt `g`.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

Baseline = Literal["mean", "leave_one_out"]
"""What a reward is compared with: the mean of its group, or of the others in it."""


def _grouped(rewards: Float[Array, "b"], group_size: int) -> Float[Array, "g i"]:
    if group_size < 2 or rewards.shape[0] % group_size:
        raise ValueError(f"{rewards.shape[0]} rewards do not split into groups of {group_size} (at least 2)")
    return rewards.reshape(-1, group_size)


def has_contrast(rewards: Float[Array, "b"], group_size: int) -> Bool[Array, "g"]:
    """Groups whose rewards are not all equal: only they teach something. A reward that is NaN is seen as contrast."""
    grouped = _grouped(rewards, group_size)
    return jnp.max(grouped, axis=1) != jnp.min(grouped, axis=1)


def group_advantages(
    rewards: Float[Array, "b"],
    group_size: int,
    *,
    baseline: Baseline = "mean",
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Float[Array, "b"]:
    """Advantages of GRPO (Shao et al., arXiv 2402.03300): `(R - mean) / (std + eps)` within each group.

    With the baseline "leave_one_out" a reward is compared with the mean of the others, which makes it
    `group_size / (group_size - 1) * (R - mean)`; without the division by the standard deviation that is
    RLOO (Ahmadian et al., arXiv 2402.14740, section 2), whose gradient is unbiased.

    The standard deviation is the unbiased one (divisor `group_size - 1`), as in TRL, verl
    and tunix. A group whose rewards are all equal gets exact zeros, whatever the rounding
    of its mean.

    Args:
        rewards: group-major.
        group_size: responses per prompt, at least 2.
        baseline: mean of the group, or of the others in it.
        normalize_std: False leaves out the division, whatever the baseline: Dr. GRPO (Liu et al.,
            arXiv 2503.20783) with the mean, RLOO without the response itself.
        eps: added to the standard deviation.
    """
    grouped = _grouped(rewards, group_size)
    advantages = grouped - jnp.mean(grouped, axis=1, keepdims=True)
    if baseline == "leave_one_out":
        advantages = advantages * (group_size / (group_size - 1))
    if normalize_std:
        advantages = advantages / (jnp.std(grouped, axis=1, ddof=1, keepdims=True) + eps)
    return jnp.where(has_contrast(rewards, group_size)[:, None], advantages, 0.0).reshape(-1)


def zero_advantage_groups(rewards: Float[Array, "b"], group_size: int) -> Int[Array, ""]:
    """Number of groups whose rewards are all equal: they teach nothing."""
    return jnp.sum(~has_contrast(rewards, group_size), dtype=jnp.int32)


def shuffle_within_groups(
    rewards: Float[Array, "b"], group_size: int, key: Any, row_ids: UInt32[Array, "g"]
) -> Float[Array, "b"]:
    """Hand the rewards of each group to its responses at random: a control that must not learn.

    Args:
        rewards: group-major.
        group_size: responses per prompt.
        key: fresh for every policy update.
        row_ids: identity of each prompt in its dataset; it keys the group's permutation,
            which therefore does not depend on the place of the group in the batch.
    """
    keys = jax.vmap(lambda row_id: jax.random.fold_in(key, row_id))(row_ids)
    return jax.vmap(jax.random.permutation)(keys, _grouped(rewards, group_size)).reshape(-1)
