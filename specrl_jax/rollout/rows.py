"""The rows of a rollout, and what a round adds to them and to the trajectory."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from specrl_jax.rollout.sampling import TokenLaw, with_tokens
from specrl_jax.rollout.trajectory import RolloutStats, Trajectory
from specrl_jax.rollout.verification import Verdict


@struct.dataclass
class Unread:
    """Pairs that an idle drafter has yet to read: the last of them, in a ring by position.

    tokens: `[r, w]`. features: `[r, w, fd]`. count: pairs of each row, more than `w` where the first are lost, `[r]`.
    """

    tokens: Int[Array, "r w"]
    features: Float[Array, "r w fd"]
    count: Int[Array, "r"]


@struct.dataclass
class Rows:
    """State of the rows of one rung; the row is the leading axis of every leaf.

    table: pages of its keys and values, `[r, m]`. used: how many it has, of which the first `shared` are its prompt's,
        held by the whole group, `[r]`.
    length: tokens in the cache, `[r]`.
    drafter: the drafter's state, or None.
    unread: what the drafter has yet to read, and record: what came of drafts of late, `[r, 4]` (`row_acceptance`);
        None where the draft length is fixed.
    sequence: which sequence the row holds, `[r]`.
    keys: its noise key, `[r, 2]`.
    last_token: its newest token, emitted but not yet in the cache, `[r]`.
    emitted: response tokens so far, and limit: how many there may be, `[r]`.
    rounds: rounds so far, `[r]`; the number of the next one.
    seen: vocabulary entries in prompt and response so far, `[r, v]`, or None where the law does not ask.
    done: the row is free: its sequence has ended, or it never had one, `[r]`.
    """

    table: Int[Array, "r m"]
    used: Int[Array, "r"]
    shared: Int[Array, "r"]
    length: Int[Array, "r"]
    drafter: Any
    unread: Unread | None
    record: Float[Array, "r 4"] | None
    sequence: Int[Array, "r"]
    keys: UInt32[Array, "r 2"]
    last_token: Int[Array, "r"]
    emitted: Int[Array, "r"]
    limit: Int[Array, "r"]
    rounds: Int[Array, "r"]
    seen: Bool[Array, "r v"] | None
    done: Bool[Array, "r"]


def is_end(tokens: Array, end_ids: tuple[int, ...]) -> Array:
    """Which tokens close a response."""
    return jnp.isin(tokens, jnp.asarray(end_ids, jnp.int32))


def emit(
    trajectory: Trajectory, rows: Rows, law: TokenLaw, counts: Int[Array, "r"], end_ids: tuple[int, ...]
) -> tuple[Trajectory, Rows]:
    """Append the first `counts[r]` tokens of every row to its sequence and advance the row."""
    law = jax.tree.map(lambda x: x.reshape(counts.shape[0], -1), law)
    token = law.token
    offsets = jnp.arange(token.shape[1], dtype=jnp.int32)[None]
    emitted_here = offsets < counts[:, None]
    slots = jnp.where(emitted_here, rows.emitted[:, None] + offsets, trajectory.tokens.shape[1])
    where = (rows.sequence[:, None], slots)
    emitted = rows.emitted + counts
    ended = jnp.any(is_end(token, end_ids) & emitted_here, axis=1)
    newest = jnp.take_along_axis(token, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    thresholds = trajectory.thresholds
    trajectory = replace(
        trajectory,
        tokens=trajectory.tokens.at[where].set(token, mode="drop"),
        log_probs=trajectory.log_probs.at[where].set(law.log_prob, mode="drop"),
        thresholds=None if thresholds is None else thresholds.at[where].set(law.threshold, mode="drop"),
        lengths=trajectory.lengths.at[rows.sequence].add(counts),
        ended=trajectory.ended.at[rows.sequence].max(ended),
        entropy_sum=trajectory.entropy_sum + jnp.sum(jnp.where(emitted_here, law.entropy, 0.0)),
    )
    rows = replace(
        rows,
        last_token=jnp.where(counts > 0, newest, rows.last_token),
        emitted=emitted,
        seen=None if rows.seen is None else with_tokens(rows.seen, token, emitted_here),
        done=rows.done | ended | (emitted >= rows.limit),
    )
    return trajectory, rows


def count_round(stats: RolloutStats, verdict: Verdict, live: Bool[Array, "r"], drafts: Int[Array, "r"]) -> RolloutStats:
    """The counts with those of one round of every live row; `drafts` is the depth that each row drafted."""
    stats = replace(stats, steps=stats.steps + jnp.sum(live))
    if stats.accepted_at.shape[0] == 0:
        return stats
    took_part = live & (drafts > 0)
    whole, cut = took_part & ~verdict.cut, took_part & verdict.cut
    depth = jnp.arange(stats.accepted_at.shape[0], dtype=jnp.int32)[None]
    reached, drafted = verdict.accepted[:, None] > depth, drafts[:, None] > depth
    return replace(
        stats,
        rounds=stats.rounds + jnp.sum(whole),
        accepted=stats.accepted + jnp.sum(jnp.where(whole, verdict.accepted, 0)),
        cut_rounds=stats.cut_rounds + jnp.sum(cut),
        cut_accepted=stats.cut_accepted + jnp.sum(jnp.where(cut, verdict.accepted, 0)),
        drafted_at=stats.drafted_at + jnp.sum(drafted & whole[:, None], axis=0, dtype=jnp.int32),
        accepted_at=stats.accepted_at + jnp.sum(reached & whole[:, None], axis=0, dtype=jnp.int32),
    )
