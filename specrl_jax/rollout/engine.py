"""Speculative rollouts in one compiled program.

1. Prefill every prompt once; its samples share the result.
2. Rounds, in `lax.while_loop`s without the host: the drafter proposes tokens for
   every row, a chain or a tree; one policy forward scores them; a rule
   (`rollout/rules.py`) decides which are emitted. With draft length 0 the same
   code is plain autoregressive decoding.
3. As sequences end, the live rows move into a smaller batch (the ladder).

By default (`Match`) the emitted token is always the policy's draw with noise keyed
by (sequence, position): neither the drafter, nor the draft length, nor the row a
sequence sits in can change what comes out.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.protocol import Choice, Choose, Drafter
from specrl_jax.errors import InputError
from specrl_jax.models.cache import KVCache, keep_path
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
from specrl_jax.models.tree import Tree
from specrl_jax.rollout.draws import KeyedDraws
from specrl_jax.rollout.noise import best, round_keys
from specrl_jax.rollout.rows import Rows, count_round, emit, is_end
from specrl_jax.rollout.rules import Match, Rule
from specrl_jax.rollout.sampling import Context, SamplingLaw, TokenLaw, sample_tokens, with_tokens
from specrl_jax.rollout.trajectory import RolloutStats, Trajectory
from specrl_jax.rollout.verification import Proposed, cut, one_hot_law


@dataclass(frozen=True)
class RolloutConfig:
    """max_new_tokens: response tokens at most, end token included.

    samples_per_prompt: size of a prompt's group.
    draft_length: drafts per round on the longest path, 0 for autoregressive decoding.
    law: the sampling law; its end tokens close a response.
    rule: how drafts are drawn and judged, in chains or trees.
    ladder: fractions of the batch that the live rows are compacted into, in order.
    smallest_rung: fewer rows than this get no rung of their own: each one is compiled.
    """

    max_new_tokens: int
    samples_per_prompt: int
    draft_length: int
    law: SamplingLaw
    rule: Rule = Match()
    ladder: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    smallest_rung: int = 16

    def __post_init__(self) -> None:
        for name, least in (
            ("max_new_tokens", 1),
            ("samples_per_prompt", 1),
            ("smallest_rung", 1),
        ):
            if getattr(self, name) < least:
                raise InputError(f"rollout {name} is {getattr(self, name)}; it must be at least {least}")
        if not self.law.end_ids:
            raise InputError("rollout end_ids is empty; name at least one end token in the sampling law")
        if not all(0.0 < fraction <= 1.0 for fraction in self.ladder):
            raise InputError(f"rollout ladder is {self.ladder}; give fractions above 0 and at most 1")
        self.rule.tree(self.draft_length)  # refuses what is too large
        if self.law.min_new_tokens > self.max_new_tokens:
            raise InputError(
                f"min_new_tokens is {self.law.min_new_tokens}, above max_new_tokens {self.max_new_tokens}; lower it"
            )
        if set(self.law.end_ids) <= set(self.law.forbidden):
            raise InputError("every end token is forbidden, so that no response could end; allow one of them")

    @property
    def tree(self) -> Tree:
        """The tokens of a round."""
        return self.rule.tree(self.draft_length)

    def rungs(self, rows: int) -> tuple[int, ...]:
        """Batch sizes of the ladder for `rows` sequences, largest first."""
        sizes = {math.ceil(rows * fraction) for fraction in self.ladder}
        return tuple(sorted({size for size in sizes if size >= self.smallest_rung} | {rows}, reverse=True))


def with_drafts(seen: Bool[Array, "r v"], drafts: Int[Array, "r q"]) -> Bool[Array, "r v"]:
    """`seen` and drafts that stand before the token in question."""
    return with_tokens(seen, drafts, jnp.ones(drafts.shape, bool))


def along(path: Int[Array, "r k1"] | None, x: Shaped[Array, "r n1 ..."]) -> Shaped[Array, "r k1 ..."]:
    """`x[r, path[r]]`; a chain is its own path."""
    if path is None:
        return x
    return jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), axis=1)


def _without_siblings(cache: KVCache, first: Int[Array, "r"], path: Int[Array, "r k1"]) -> KVCache:
    """The cache with the accepted path of a tree in consecutive slots."""
    move = functools.partial(keep_path, first=first, path=path)
    return replace(cache, keys=tuple(map(move, cache.keys)), values=tuple(map(move, cache.values)))


def _with_length(cache: KVCache | None, length: Int[Array, "r"]) -> KVCache:
    """The cache that a forward returned, with its tokens up to `length` counting."""
    assert cache is not None
    return replace(cache, length=length)


def _empty_trajectory(prompts: Prompts, config: RolloutConfig) -> Trajectory:
    count = prompts.tokens.shape[0] * config.samples_per_prompt
    zero = jnp.int32(0)
    stats = RolloutStats(zero, zero, zero, zero, jnp.zeros((config.tree.depth,), jnp.int32), zero)
    return Trajectory(
        prompts=prompts,
        tokens=jnp.zeros((count, config.max_new_tokens), jnp.int32),
        log_probs=jnp.zeros((count, config.max_new_tokens), jnp.float32),
        thresholds=jnp.full((count, config.max_new_tokens), -jnp.inf) if config.law.filtered else None,
        lengths=jnp.zeros((count,), jnp.int32),
        ended=jnp.zeros((count,), bool),
        entropy_sum=jnp.float32(0.0),
        stats=stats,
    )


@dataclass(frozen=True)
class Judged:
    """A round before anything is emitted.

    out: the policy's forward over the round's tokens. law: its draws there. log_p: its law, for rules that ask.
    choice: the drafts. proposed: what the rule decided.
    """

    out: ForwardOutput
    law: TokenLaw
    log_p: Float[Array, "r n1 v"] | None
    choice: Choice
    proposed: Proposed


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
        law, size = self.config.law, self.policy.vocab_size
        for kind, tokens in (("end", law.end_ids), ("forbidden", law.forbidden)):
            outside = [token for token in tokens if not 0 <= token < size]
            if outside:
                remedy = "use the end tokens of the policy's tokenizer" if kind == "end" else "leave it out"
                raise InputError(f"{kind} token {outside[0]} is not in the policy's vocabulary of {size}; {remedy}")
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

    def _propose(self, params: PolicyParams, draft_params: Any, rows: Rows) -> Choice:
        """Drafts of the round's tree, from the drafter's law after the policy's filters."""
        if self.drafter is None or not self.speculative:
            return Choice(jnp.zeros((rows.done.shape[0], 0), jnp.int32))
        choose, tree = self._chooser(rows), self.config.tree
        return self.drafter.propose(draft_params, params.embed, rows.drafter, rows.sequence, tree, choose)

    def _chooser(self, rows: Rows) -> Choose:
        """How a drafter's logits become drafts: the policy's filters, the rule's noise."""
        config, law, vocab_size = self.config, self.config.law, self.policy.vocab_size
        keys = config.rule.draft_keys(rows.keys, rows.rounds)

        def choose(logits: Array, target_ids: Array, before: Array, count: int) -> Choice:
            shape, depth = logits.shape[:2], before.shape[2]
            position = jnp.repeat(rows.emitted + depth, shape[1])
            seen = None if rows.seen is None else jnp.repeat(rows.seen, shape[1], axis=0)
            if seen is not None and depth:
                seen = with_drafts(seen, before.reshape(-1, depth))
            log_q = law.log_law(logits.reshape(len(position), -1), Context(position, seen), target_ids)
            scores = log_q
            if not config.rule.argmax_drafts:
                scores = law.perturbed(log_q, jnp.repeat(keys, shape[1], axis=0), position, target_ids)
            token = target_ids[best(scores, count)]
            if not config.rule.needs_laws:
                return Choice(token.reshape(*shape, count))
            if config.rule.argmax_drafts or law.greedy:
                log_law = one_hot_law(token, vocab_size)[:, 0]
            else:
                log_law = jnp.full((len(position), vocab_size), -jnp.inf).at[:, target_ids].set(log_q)
            return Choice(token.reshape(*shape, count), log_law.reshape(*shape, vocab_size))

        return choose

    def judge(self, params: PolicyParams, draft_params: Any, rows: Rows) -> Judged:
        """Draft, verify and decide; nothing is emitted yet."""
        tree = self.config.tree
        choice = self._propose(params, draft_params, rows)
        tokens = jnp.concatenate([rows.last_token[:, None], choice.token], axis=1)
        offsets = jnp.asarray(tree.depths, jnp.int32)[None]
        # A finished row, and drafts beyond the last position, are padding.
        wanted = ~rows.done[:, None] & (rows.emitted[:, None] + offsets < self.config.max_new_tokens)
        positions = jnp.where(wanted, rows.cache.length[:, None] + offsets, -1)
        out, law, log_p = self._forward_and_sample(params, rows, grid_batch(tokens, positions, tree), choice.token)
        own = law.token.reshape(-1, tree.size)
        proposed = Proposed(own, jnp.zeros_like(rows.emitted))
        if self.speculative:
            draws = KeyedDraws(round_keys(rows.keys, rows.rounds))
            proposed = self.config.rule.decide(tree, choice.token, own, log_p, choice.log_law, draws)
        return Judged(out, law, log_p, choice, proposed)

    def conclude(
        self, params: PolicyParams, draft_params: Any, rows: Rows, trajectory: Trajectory, judged: Judged
    ) -> tuple[Rows, Trajectory]:
        """Emit what a round decided and advance every row."""
        tree = self.config.tree
        proposed, cache, live = judged.proposed, judged.out.cache, ~rows.done
        law = self._emitted_law(judged) if self.speculative else judged.law
        verdict = cut(
            proposed,
            ends=is_end(proposed.tokens, self.config.law.end_ids),
            room=jnp.where(live, self.config.max_new_tokens - rows.emitted, 0),
        )
        drafter = rows.drafter
        if self.drafter is not None and self.speculative:
            features = along(proposed.path, self._features(judged.out, live.shape[0], tree.size))
            drafter = self.drafter.commit(
                draft_params, params.embed, drafter, proposed.tokens, features, verdict.counts
            )
        trajectory = replace(trajectory, stats=count_round(trajectory.stats, verdict, live, tree.depth))
        cache = _with_length(cache, rows.cache.length + verdict.counts)
        if proposed.path is not None:
            cache = _without_siblings(cache, rows.cache.length, proposed.path)
        trajectory, rows = emit(trajectory, rows, law, verdict.counts, self.config.law.end_ids)
        return replace(rows, cache=cache, drafter=drafter, rounds=rows.rounds + 1), trajectory

    def _emitted_law(self, judged: Judged) -> TokenLaw:
        """What is kept of the law at the tokens that a rule proposes."""
        proposed, log_p, log_q = judged.proposed, judged.log_p, judged.choice.log_law
        rows = proposed.tokens.shape[0]
        law = jax.tree.map(lambda x: along(proposed.path, x.reshape(rows, -1)), judged.law)
        law = replace(law, token=proposed.tokens)
        # Greedy, the emitted tokens are the policy's own draws, and log-probs those of temperature 1.
        if log_p is not None and log_q is not None and not self.config.law.greedy:
            behaviour = self.config.rule.behaviour(log_p, log_q)
            log_prob = jnp.take_along_axis(behaviour, proposed.tokens[..., None], axis=2)[..., 0]
            law = replace(law, log_prob=log_prob)
        return jax.tree.map(lambda x: x.reshape(-1), law)

    def _forward_and_sample(
        self, params: PolicyParams, rows: Rows, batch: TokenBatch, drafts: Int[Array, "r n"]
    ) -> tuple[ForwardOutput, TokenLaw, Float[Array, "r n1 v"] | None]:
        """The forward over `[last token, drafts]`, the policy's draws, and its law for rules that judge by it."""
        config, tree = self.config, self.config.tree
        out = forward(params, self.policy, batch, numerics=self.numerics, cache=rows.cache, boundaries=self._boundaries)
        keys = jnp.repeat(rows.keys, tree.size, axis=0)
        position = (rows.emitted[:, None] + jnp.asarray(tree.depths, jnp.int32)[None]).reshape(-1)
        seen = None
        if rows.seen is not None:
            # Below a node, everything before the round and the drafts on the path to it have been seen.
            views = [rows.seen]
            for node, parent in enumerate(tree.parents):
                views.append(with_drafts(views[parent], drafts[:, node : node + 1]))
            seen = jnp.stack(views, axis=1).reshape(len(position), -1)
        keep_law = self.speculative and config.rule.needs_laws
        law, log_p = sample_tokens(
            params,
            self.policy,
            config.law,
            out.hidden,
            keys,
            Context(position, seen),
            self.numerics,
            keep_law=keep_law,
        )
        if log_p is not None:
            if config.law.greedy:
                log_p = one_hot_law(law.token[:, None], log_p.shape[-1])[:, 0]
            log_p = log_p.reshape(-1, tree.size, log_p.shape[-1])
        return out, law, log_p

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
        samples = self.config.samples_per_prompt
        # A tree needs more slots than positions.
        capacity = width + self.config.max_new_tokens + self.config.tree.size - 1 - self.config.tree.depth
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
        seen = None
        if self.config.law.reads_history:
            none = jnp.zeros((groups, self.policy.vocab_size), bool)
            seen = share(with_tokens(none, prompts.tokens, batch.positions.reshape(groups, width) >= 0))
        law, _ = sample_tokens(params, self.policy, self.config.law, hidden, keys, Context(first, seen), self.numerics)
        rows = Rows(
            cache=share(_with_length(out.cache, prompts.lengths)),
            drafter=None,
            sequence=jnp.arange(count, dtype=jnp.int32),
            keys=keys,
            last_token=first,
            emitted=first,
            rounds=first,
            seen=seen,
            done=~issued,
        )
        one = issued.astype(jnp.int32)
        trajectory, rows = emit(_empty_trajectory(prompts, self.config), rows, law, one, self.config.law.end_ids)
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
                lambda state: self.conclude(params, draft_params, *state, self.judge(params, draft_params, state[0])),
                (rows, trajectory),
            )
        return trajectory
