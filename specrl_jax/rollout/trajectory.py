"""What a rollout returns, and the sequences that training reads."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.data.prompts import Prompts
from specrl_jax.rollout.control import Control


@struct.dataclass
class RolloutStats:
    """Counts of one rollout (int32), summed over rows.

    A round is one verification of one row that had at least one draft. A round is cut when an end
    token or the maximum length stops it before its matching drafts are used up; cut rounds are
    counted apart, so that they do not bias the acceptance length.

    rounds, accepted: rounds that were not cut, and drafts accepted in them.
    cut_rounds, cut_accepted: the same for rounds that were cut.
    drafted_at, accepted_at: uncut rounds that had a draft `i`, and that accepted it, `[k]`.
    steps: forwards of a live row after prefill (rounds, or single-token steps at k = 0).
    bodies: rounds of each body (`rollout/control.py`), `[n]`; none where the draft length is fixed.
    stalled: rounds that a live row sat out for want of cache.
    peak_pages, peak_tokens: most pages of the cache that were held at a time, and most tokens in them, a shared prompt
        counted once.
    """

    rounds: Int[Array, ""]
    accepted: Int[Array, ""]
    cut_rounds: Int[Array, ""]
    cut_accepted: Int[Array, ""]
    drafted_at: Int[Array, "k"]
    accepted_at: Int[Array, "k"]
    steps: Int[Array, ""]
    bodies: Int[Array, "n"]
    stalled: Int[Array, ""]
    peak_pages: Int[Array, ""]
    peak_tokens: Int[Array, ""]


def both_stats(one: RolloutStats, other: RolloutStats) -> RolloutStats:
    """Counts of two rollouts, one after the other."""
    total = jax.tree.map(jnp.add, one, other)
    return dataclasses.replace(
        total,
        peak_pages=jnp.maximum(one.peak_pages, other.peak_pages),
        peak_tokens=jnp.maximum(one.peak_tokens, other.peak_tokens),
    )


@struct.dataclass
class Trajectory:
    """Responses of a batch of prompts; `b` = prompts x samples, the samples of a prompt side by side.

    prompts: as given.
    tokens: response tokens, end token included, 0 beyond `lengths`, `[b, t]`.
    log_probs: of those tokens under the law that they were drawn from, float32, 0 beyond, `[b, t]`.
    thresholds: tempered log-probability above which each token's support lies, float32, `[b, t]`; None where the law
        filters nothing.
    lengths: response tokens, `[b]`.
    ended: whether the response closed with an end token; otherwise it was truncated, `[b]`.
    entropy_sum: entropy of the law in nats, summed over all response tokens, `[]`.
    stats: speculation counts.
    control: the draft-length controller with what it learned, None where the draft length is fixed.
    version: optimizer steps of the policy that wrote each response, `[b]`; None outside of a run.
    """

    prompts: Prompts
    tokens: Int[Array, "b t"]
    log_probs: Float[Array, "b t"]
    thresholds: Float[Array, "b t"] | None
    lengths: Int[Array, "b"]
    ended: Bool[Array, "b"]
    entropy_sum: Float[Array, ""]
    stats: RolloutStats
    control: Control | None = None
    version: Int[Array, "b"] | None = None


@struct.dataclass
class Sequences:
    """Prompt and response in one row, from position 0.

    tokens: `[b, t]`, 0 beyond `lengths`.
    lengths: tokens of prompt and response, `[b]`.
    mask: True where the token is a response token, `[b, t]`.
    log_probs: rollout log-probability of each response token, 0 elsewhere, `[b, t]`.
    thresholds: tempered log-probability above which its support lies, -inf elsewhere, `[b, t]`, or None.
    behaviour: log-probability under the law that it was drawn from, where `log_probs` is another's, `[b, t]`, or None.
    """

    tokens: Int[Array, "b t"]
    lengths: Int[Array, "b"]
    mask: Bool[Array, "b t"]
    log_probs: Float[Array, "b t"]
    thresholds: Float[Array, "b t"] | None = None
    behaviour: Float[Array, "b t"] | None = None


def to_sequences(trajectory: Trajectory) -> Sequences:
    """Join every response to its prompt."""
    samples = trajectory.tokens.shape[0] // trajectory.prompts.tokens.shape[0]
    prompt_tokens = jnp.repeat(trajectory.prompts.tokens, samples, axis=0)
    prompt_lengths = jnp.repeat(trajectory.prompts.lengths, samples, axis=0)
    width = prompt_tokens.shape[1] + trajectory.tokens.shape[1]
    slots = jnp.arange(width, dtype=jnp.int32)[None]
    response_slot = slots - prompt_lengths[:, None]
    in_response = (response_slot >= 0) & (response_slot < trajectory.lengths[:, None])
    from_prompt = jnp.pad(prompt_tokens, ((0, 0), (0, trajectory.tokens.shape[1])))
    reach = jnp.clip(response_slot, 0, trajectory.tokens.shape[1] - 1)
    from_response = jnp.take_along_axis(trajectory.tokens, reach, axis=1)
    log_probs = jnp.take_along_axis(trajectory.log_probs, reach, axis=1)
    thresholds = trajectory.thresholds
    if thresholds is not None:
        thresholds = jnp.where(in_response, jnp.take_along_axis(thresholds, reach, axis=1), -jnp.inf)
    tokens = jnp.where(in_response, from_response, jnp.where(response_slot < 0, from_prompt, 0))
    return Sequences(
        tokens=tokens,
        lengths=prompt_lengths + trajectory.lengths,
        mask=in_response,
        log_probs=jnp.where(in_response, log_probs, 0.0),
        thresholds=thresholds,
    )


def trajectory_specs(rows: P) -> Any:
    """Partition of a trajectory: rows as given, counts replicated."""
    names = ("prompts", "tokens", "log_probs", "thresholds", "lengths", "ended", "version")
    return Trajectory(**dict.fromkeys(names, rows), entropy_sum=P(), stats=P(), control=P())  # type: ignore[arg-type]  # a prefix of specs, not arrays
