"""Speculative rollouts in one compiled program.

1. Prefill every prompt once; its samples share the result.
2. Rounds, in `lax.while_loop`s without the host: the drafter proposes `k` tokens
   per row, one policy forward scores them, and `match` verification emits the
   policy's own samples for as long as the drafts equal them. With `k = 0` the
   same code is plain autoregressive decoding.
3. As sequences end, the live rows move into a smaller batch (the ladder).

Because the emitted token is always the policy's draw with noise keyed by
(sequence, position), neither the drafter, nor the draft length, nor the row a
sequence sits in can change what comes out.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.protocol import Drafter
from specrl_jax.errors import InputError
from specrl_jax.models.cache import KVCache
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import (
    ForwardOutput,
    TokenBatch,
    forward,
    grid_batch,
    policy_cache,
    sequence_positions,
)
from specrl_jax.rollout.sampling import SamplingLaw, TokenLaw, sample_tokens
from specrl_jax.rollout.trajectory import RolloutStats, Trajectory
from specrl_jax.rollout.verification import Verdict, match


@dataclass(frozen=True)
class RolloutConfig:
    """max_new_tokens: response tokens at most, end token included.

    samples_per_prompt: size of a prompt's group.
    draft_length: drafts per round, 0 for autoregressive decoding.
    end_ids: tokens that close a response.
    law: the sampling law.
    ladder: fractions of the batch that the live rows are compacted into, in order.
    smallest_rung: fewer rows than this get no rung of their own: each one is compiled.
    """

    max_new_tokens: int
    samples_per_prompt: int
    draft_length: int
    end_ids: tuple[int, ...]
    law: SamplingLaw = SamplingLaw()
    ladder: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    smallest_rung: int = 16

    def __post_init__(self) -> None:
        for name, least in (
            ("max_new_tokens", 1),
            ("samples_per_prompt", 1),
            ("draft_length", 0),
            ("smallest_rung", 1),
        ):
            if getattr(self, name) < least:
                raise InputError(f"rollout {name} is {getattr(self, name)}; it must be at least {least}")
        if not self.end_ids:
            raise InputError("rollout end_ids is empty; name at least one end token")
        if not all(0.0 < fraction <= 1.0 for fraction in self.ladder):
            raise InputError(f"rollout ladder is {self.ladder}; give fractions above 0 and at most 1")

    def rungs(self, rows: int) -> tuple[int, ...]:
        """Batch sizes of the ladder for `rows` sequences, largest first."""
        sizes = {math.ceil(rows * fraction) for fraction in self.ladder}
        return tuple(sorted({size for size in sizes if size >= self.smallest_rung} | {rows}, reverse=True))


@struct.dataclass
class Rows:
    """State of the rows of one rung; the row is the leading axis of every leaf.

    cache: the policy's keys and values; `cache.length` tokens count.
    drafter: the drafter's state, or None.
    sequence: which sequence the row holds, `[r]`.
    keys: its noise key, `[r, 2]`.
    last_token: its newest token, emitted but not yet in the cache, `[r]`.
    emitted: response tokens so far, `[r]`.
    done: `[r]`.
    """

    cache: KVCache
    drafter: Any
    sequence: Int[Array, "r"]
    keys: UInt32[Array, "r 2"]
    last_token: Int[Array, "r"]
    emitted: Int[Array, "r"]
    done: Bool[Array, "r"]


def _is_end(tokens: Array, end_ids: tuple[int, ...]) -> Array:
    return jnp.isin(tokens, jnp.asarray(end_ids, jnp.int32))


def _with_length(cache: KVCache | None, length: Int[Array, "r"]) -> KVCache:
    """The cache that a forward returned, with its tokens up to `length` counting."""
    assert cache is not None
    return replace(cache, length=length)


def _empty_trajectory(prompts: Prompts, config: RolloutConfig) -> Trajectory:
    count = prompts.tokens.shape[0] * config.samples_per_prompt
    zero = jnp.int32(0)
    stats = RolloutStats(zero, zero, zero, zero, jnp.zeros((config.draft_length,), jnp.int32), zero)
    return Trajectory(
        prompts=prompts,
        tokens=jnp.zeros((count, config.max_new_tokens), jnp.int32),
        log_probs=jnp.zeros((count, config.max_new_tokens), jnp.float32),
        lengths=jnp.zeros((count,), jnp.int32),
        ended=jnp.zeros((count,), bool),
        entropy_sum=jnp.float32(0.0),
        stats=stats,
    )


def _emit(
    trajectory: Trajectory, rows: Rows, law: TokenLaw, counts: Int[Array, "r"], end_ids: tuple[int, ...]
) -> tuple[Trajectory, Rows]:
    """Append the first `counts[r]` tokens of every row to its sequence and advance the row."""
    width = law.token.shape[0] // counts.shape[0]
    token, log_prob, entropy = (x.reshape(-1, width) for x in (law.token, law.log_prob, law.entropy))
    offsets = jnp.arange(width, dtype=jnp.int32)[None]
    emitted_here = offsets < counts[:, None]
    slots = jnp.where(emitted_here, rows.emitted[:, None] + offsets, trajectory.tokens.shape[1])
    where = (rows.sequence[:, None], slots)
    emitted = rows.emitted + counts
    ended = jnp.any(_is_end(token, end_ids) & emitted_here, axis=1)
    newest = jnp.take_along_axis(token, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    trajectory = replace(
        trajectory,
        tokens=trajectory.tokens.at[where].set(token, mode="drop"),
        log_probs=trajectory.log_probs.at[where].set(log_prob, mode="drop"),
        lengths=trajectory.lengths.at[rows.sequence].add(counts),
        ended=trajectory.ended.at[rows.sequence].max(ended),
        entropy_sum=trajectory.entropy_sum + jnp.sum(jnp.where(emitted_here, entropy, 0.0)),
    )
    rows = replace(
        rows,
        last_token=jnp.where(counts > 0, newest, rows.last_token),
        emitted=emitted,
        done=rows.done | ended | (emitted >= trajectory.tokens.shape[1]),
    )
    return trajectory, rows


def _count_round(stats: RolloutStats, verdict: Verdict, live: Bool[Array, "r"], drafts: int) -> RolloutStats:
    stats = replace(stats, steps=stats.steps + jnp.sum(live))
    if drafts == 0:
        return stats
    whole, cut = live & ~verdict.cut, live & verdict.cut
    reached = verdict.accepted[:, None] > jnp.arange(drafts, dtype=jnp.int32)[None]
    return replace(
        stats,
        rounds=stats.rounds + jnp.sum(whole),
        accepted=stats.accepted + jnp.sum(jnp.where(whole, verdict.accepted, 0)),
        cut_rounds=stats.cut_rounds + jnp.sum(cut),
        cut_accepted=stats.cut_accepted + jnp.sum(jnp.where(cut, verdict.accepted, 0)),
        accepted_at=stats.accepted_at + jnp.sum(reached & whole[:, None], axis=0, dtype=jnp.int32),
    )


@dataclass(frozen=True)
class RolloutEngine:
    """A policy, an optional drafter and how they run; the static part of a rollout."""

    policy: PolicyConfig
    config: RolloutConfig
    numerics: Numerics
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        if self.config.draft_length > 0 and self.drafter is None:
            raise InputError(f"draft length is {self.config.draft_length} without a drafter; give one or use 0")
        outside = [token for token in self.config.end_ids if not 0 <= token < self.policy.vocab_size]
        if outside:
            raise InputError(
                f"end token {outside[0]} is not in the policy's vocabulary of {self.policy.vocab_size}; "
                "use the end tokens of the policy's tokenizer"
            )
        if any(boundary > self.policy.num_layers for boundary in self._boundaries):
            raise InputError(
                f"the drafter reads boundaries {self._boundaries} of a policy with {self.policy.num_layers} layers; "
                "use a drafter made for this policy"
            )

    @property
    def speculative(self) -> bool:
        """Whether rounds have drafts."""
        return self.config.draft_length > 0

    @property
    def _boundaries(self) -> tuple[int, ...]:
        return self.drafter.boundaries if self.drafter is not None and self.speculative else ()

    def _features(self, out: ForwardOutput, rows: int, width: int) -> Float[Array, "r q fd"]:
        """What the drafter reads of a forward; nothing for a drafter without boundaries."""
        if out.features is None:
            return jnp.zeros((rows, width, 0), out.hidden.dtype)
        return out.features.reshape(rows, width, -1)

    def _propose(self, params: PolicyParams, draft_params: Any, rows: Rows) -> Int[Array, "r k"]:
        """Drafts for the next `k` response positions, drawn with the policy's noise at those positions."""
        law = self.config.law
        if self.drafter is None or not self.speculative:
            return jnp.zeros((rows.done.shape[0], 0), jnp.int32)

        def choose(logits: Array, target_ids: Array, step: int | Array) -> Array:
            position = rows.emitted + jnp.asarray(step, jnp.int32)
            return target_ids[law.choose(law.log_law(logits), rows.keys, position, target_ids)]

        return self.drafter.propose(draft_params, params.embed, rows.drafter, self.config.draft_length, choose)

    def _round(
        self, params: PolicyParams, draft_params: Any, rows: Rows, trajectory: Trajectory
    ) -> tuple[Rows, Trajectory]:
        width = self.config.draft_length + 1
        drafts = self._propose(params, draft_params, rows)
        tokens = jnp.concatenate([rows.last_token[:, None], drafts], axis=1)
        offsets = jnp.arange(width, dtype=jnp.int32)[None]
        # A finished row, and drafts beyond the last position, are padding.
        wanted = ~rows.done[:, None] & (rows.emitted[:, None] + offsets < self.config.max_new_tokens)
        positions = jnp.where(wanted, rows.cache.length[:, None] + offsets, -1)
        out, law = self._forward_and_sample(params, rows, grid_batch(tokens, positions), width)
        live = ~rows.done
        verdict = match(
            drafts,
            law.token.reshape(-1, width),
            ends=_is_end(law.token, self.config.end_ids).reshape(-1, width),
            room=jnp.where(live, self.config.max_new_tokens - rows.emitted, 0),
        )
        drafter = rows.drafter
        if self.drafter is not None and self.speculative:
            features = self._features(out, *tokens.shape)
            emitted = law.token.reshape(-1, width)
            drafter = self.drafter.commit(draft_params, params.embed, drafter, emitted, features, verdict.counts)
        trajectory = replace(trajectory, stats=_count_round(trajectory.stats, verdict, live, self.config.draft_length))
        trajectory, rows = _emit(trajectory, rows, law, verdict.counts, self.config.end_ids)
        cache = _with_length(out.cache, rows.cache.length + verdict.counts)
        return replace(rows, cache=cache, drafter=drafter), trajectory

    def _forward_and_sample(
        self, params: PolicyParams, rows: Rows, batch: TokenBatch, width: int
    ) -> tuple[ForwardOutput, TokenLaw]:
        out = forward(params, self.policy, batch, numerics=self.numerics, cache=rows.cache, boundaries=self._boundaries)
        keys = jnp.repeat(rows.keys, width, axis=0)
        draws = (rows.emitted[:, None] + jnp.arange(width, dtype=jnp.int32)[None]).reshape(-1)
        law = sample_tokens(params, self.policy, self.config.law, out.hidden, keys, draws, self.numerics)
        return out, law

    def check_prompt_width(self, width: int) -> None:
        """Raise InputError unless prompts of `width` tokens and their responses fit the policy's context."""
        if width + self.config.max_new_tokens > self.policy.max_position_embeddings:
            raise InputError(
                f"prompts of up to {width} tokens with responses of up to {self.config.max_new_tokens} exceed the "
                f"policy's max_position_embeddings of {self.policy.max_position_embeddings}; "
                "shorten the prompts or lower max_new_tokens"
            )

    def prefill(
        self, params: PolicyParams, draft_params: Any, prompts: Prompts, keys: UInt32[Array, "b 2"]
    ) -> tuple[Rows, Trajectory]:
        """Read every prompt once, hand the result to its samples, and draw their first tokens."""
        groups, width = prompts.tokens.shape
        self.check_prompt_width(width)
        samples, capacity = self.config.samples_per_prompt, width + self.config.max_new_tokens
        cache = policy_cache(self.policy, groups, capacity, self.numerics)
        batch = grid_batch(prompts.tokens, sequence_positions(prompts.lengths, width))
        out = forward(params, self.policy, batch, numerics=self.numerics, cache=cache, boundaries=self._boundaries)

        read = jnp.maximum(prompts.lengths - 1, 0)  # tokens whose successor is known

        def last(grid: Array) -> Array:
            return jnp.take_along_axis(grid, read[:, None, None], axis=1)

        def share(tree: Any) -> Any:
            return jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), tree)

        count = groups * samples
        issued = share(prompts.lengths > 0)
        first = jnp.zeros((count,), jnp.int32)
        hidden = share(last(out.hidden.reshape(groups, width, -1))[:, 0])
        law = sample_tokens(params, self.policy, self.config.law, hidden, keys, first, self.numerics)
        rows = Rows(
            cache=share(_with_length(out.cache, prompts.lengths)),
            drafter=None,
            sequence=jnp.arange(count, dtype=jnp.int32),
            keys=keys,
            last_token=first,
            emitted=first,
            done=~issued,
        )
        one = issued.astype(jnp.int32)
        trajectory, rows = _emit(_empty_trajectory(prompts, self.config), rows, law, one, self.config.end_ids)
        if self.drafter is not None and self.speculative:
            state = self.drafter.init_state(groups, capacity)
            features = self._features(out, groups, width)
            if width > 1:
                shifted = prompts.tokens[:, 1:]
                state = self.drafter.commit(draft_params, params.embed, state, shifted, features[:, :-1], read)
            newest = (law.token[:, None], share(last(features)), one)
            state = self.drafter.commit(draft_params, params.embed, share(state), *newest)
            rows = replace(rows, drafter=state)
        return rows, trajectory

    def rollout(
        self, params: PolicyParams, draft_params: Any, prompts: Prompts, keys: UInt32[Array, "b 2"]
    ) -> Trajectory:
        """Sample `samples_per_prompt` responses to every prompt.

        Args:
            params: the policy's.
            draft_params: the drafter's, or None when the draft length is 0.
            prompts: `g` prompts; one of no tokens fills up a batch and gets no response.
            keys: noise key of every sequence, `b = g * samples_per_prompt`, group-major
                (`specrl_jax.rollout.noise.sequence_keys`).
        """
        rows, trajectory = self.prefill(params, draft_params, prompts, keys)
        rungs = self.config.rungs(rows.done.shape[0])
        for size, next_size in zip(rungs, (*rungs[1:], 0), strict=True):
            live_first = jnp.argsort(rows.done, stable=True)[:size]
            rows = jax.tree.map(lambda x, order=live_first: x[order], rows) if size != rungs[0] else rows

            def more_live_than_next_rung(state: tuple[Rows, Trajectory], threshold: int = next_size) -> Bool[Array, ""]:
                return jnp.sum(~state[0].done) > threshold

            rows, trajectory = lax.while_loop(
                more_live_than_next_rung,
                lambda state: self._round(params, draft_params, *state),
                (rows, trajectory),
            )
        return trajectory
