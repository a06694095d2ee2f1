"""One round of draft and verification, for all rows of a rung.

The drafter proposes tokens, a chain or a tree; one policy forward scores them; a rule
(`rollout/rules.py`) decides which are emitted. With draft length 0 the same code is
plain autoregressive decoding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from specrl_jax.drafters.protocol import ChainDrafter, Choice, Choose, Drafter, Texts, most_drafts
from specrl_jax.errors import InputError
from specrl_jax.models.cache import KVCache, keep_path
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import ForwardOutput, TokenBatch, forward, grid_batch
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.draws import PlacedDraws
from specrl_jax.rollout.noise import best
from specrl_jax.rollout.pool import Pool
from specrl_jax.rollout.rows import Rows, count_round, emit, is_end
from specrl_jax.rollout.sampling import Context, TokenLaw, sample_tokens, with_tokens
from specrl_jax.rollout.trajectory import Trajectory
from specrl_jax.rollout.verification import Proposed, cut, one_hot_law


def when(condition: Bool[Array, ""], do: Callable[[Any], Any], state: Any) -> Any:
    """`do(state)` under a condition: a loop of at most one trip keeps the cache in place; of `lax.cond` XLA copies
    it."""
    _, state = lax.while_loop(lambda s: s[0], lambda s: (jnp.bool_(False), do(s[1])), (condition, state))
    return state


def with_drafts(seen: Bool[Array, "r v"], drafts: Int[Array, "r q"]) -> Bool[Array, "r v"]:
    """`seen` and drafts that stand before the token in question."""
    return with_tokens(seen, drafts, jnp.ones(drafts.shape, bool))


def along(path: Int[Array, "r k1"] | None, x: Shaped[Array, "r n1 ..."]) -> Shaped[Array, "r k1 ..."]:
    """`x[r, path[r]]`; a chain is its own path."""
    if path is None:
        return x
    return jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), axis=1)


def _of_drafts(token: Int[Array, "n c"], log_q: Float[Array, "n c"], shape: tuple[int, ...], of_chain: bool) -> Choice:
    """Drafts and how sure the first is; where the law allows none of them, that is drafted all the same, to be
    rejected."""
    if of_chain:
        # Beside a draft of a chain stands nothing that the law forbids, and not the draft again.
        real = (log_q > -jnp.inf) & (token != token[:, :1])
        token = jnp.where(real.at[:, 0].set(True), token, -1)
    confidence = jnp.where(jnp.isnan(log_q[:, 0]), 0.0, log_q[:, 0])
    return Choice(token.reshape(*shape, token.shape[1]), confidence=confidence.reshape(shape))


@dataclass(frozen=True)
class Judged:
    """A round before anything is emitted.

    live: rows that take part, `[r]`.
    out: the policy's forward over the round's tokens.
    law: its draws there. log_p: its law, for rules that ask.
    choice: the drafts. proposed: what the rule decided.
    """

    live: Bool[Array, "r"]
    out: ForwardOutput
    law: TokenLaw
    log_p: Float[Array, "r n1 v"] | None
    choice: Choice
    proposed: Proposed


@dataclass(frozen=True)
class Round:
    """A policy, an optional drafter and how they run; the static part of a round."""

    policy: PolicyConfig
    config: RolloutConfig
    numerics: Numerics
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        if self.config.draft_length > 0 and self.drafter is None:
            raise InputError(f"draft length is {self.config.draft_length} without a drafter; give one or use 0")
        if self.config.adaptive and not isinstance(self.drafter, ChainDrafter):
            raise InputError(
                f"{type(self.drafter).__name__} cannot stop after any draft, as an adaptive draft length asks; "
                "choose a fixed one, or another drafter"
            )
        most = most_drafts(self.drafter)
        if self.speculative and most is not None and self.config.draft_length > most:
            raise InputError(
                f"draft length is {self.config.draft_length}, and the drafter was made for {most}; lower it"
            )
        law, size = self.config.law, self.policy.vocab_size
        for kind, tokens in (("end", law.end_ids), ("forbidden", law.forbidden)):
            outside = [token for token in tokens if not 0 <= token < size]
            if outside:
                remedy = "use the end tokens of the policy's tokenizer" if kind == "end" else "leave it out"
                raise InputError(f"{kind} token {outside[0]} is not in the policy's vocabulary of {size}; {remedy}")
        if self.config.adaptive and self.config.branches > 1 and self.numerics.invariant:
            raise InputError(
                f"numerics is invariant and branches {self.config.branches} with an adaptive draft length; bits of "
                "candidates beside a draft would depend on it: choose 1 branch, plain numerics or a fixed draft length"
            )
        if any(boundary > self.policy.num_layers for boundary in self.boundaries):
            raise InputError(
                f"the drafter reads boundaries {self.boundaries} of a policy with {self.policy.num_layers} layers; "
                "use a drafter made for this policy"
            )

    @property
    def speculative(self) -> bool:
        """Whether rounds have drafts."""
        return self.config.draft_length > 0

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Residual-stream boundaries of the policy that the drafter reads."""
        return self.drafter.boundaries if self.drafter is not None and self.speculative else ()

    def features(self, out: ForwardOutput, rows: int, width: int) -> Float[Array, "r q fd"]:
        """What the drafter reads of a forward; nothing for a drafter without boundaries."""
        if out.features is None:
            return jnp.zeros((rows, width, 0), out.hidden.dtype)
        return out.features.reshape(rows, width, -1)

    def texts(self, rows: Rows, trajectory: Trajectory) -> Texts:
        """What the rollout has read and emitted so far."""
        prompts = trajectory.prompts
        return Texts(
            prompts=prompts.tokens,
            prompt_lengths=prompts.lengths,
            row_ids=prompts.row_ids,
            responses=trajectory.tokens,
            lengths=trajectory.lengths,
            sequence=rows.sequence,
        )

    def _propose(self, params: PolicyParams, draft_params: Any, rows: Rows, trajectory: Trajectory) -> Choice:
        """Drafts of the round's tree, from the drafter's law after the policy's filters."""
        if self.drafter is None or not self.speculative:
            return Choice(jnp.zeros((rows.done.shape[0], 0), jnp.int32))
        choose, tree, texts = self._chooser(rows), self.config.tree, self.texts(rows, trajectory)
        return self.drafter.propose(draft_params, params.embed, rows.drafter, texts, tree, choose)

    def _chooser(self, rows: Rows) -> Choose:
        """How a drafter's logits become drafts: the policy's filters, the rule's noise."""
        config, law, vocab_size = self.config, self.config.law, self.policy.vocab_size
        keys = config.rule.draft_keys(rows.keys, rows.rounds)

        def choose(logits: Array, target_ids: Array, before: Array, count: int, step: Any = None) -> Choice:
            shape, depth = logits.shape[:2], before.shape[2]
            position = jnp.repeat(rows.emitted + (depth if step is None else step), shape[1])
            seen = None if rows.seen is None else jnp.repeat(rows.seen, shape[1], axis=0)
            if seen is not None and depth:
                seen = with_drafts(seen, before.reshape(-1, depth))
            count = count if step is None else self.config.branches
            ids = target_ids if target_ids.ndim == 1 else target_ids.reshape(len(position), -1)
            logits, context = logits.reshape(len(position), -1), Context(position, seen)
            row_keys, noisy = jnp.repeat(keys, shape[1], axis=0), not config.rule.argmax_drafts
            of_chain = step is not None
            if ids.ndim == 1 and not config.rule.needs_laws:
                drawn = law.draw_several(logits, row_keys, context, ids, count, noisy)
                if drawn is not None:
                    return _of_drafts(ids[drawn[0]], drawn[1], shape, of_chain)
            log_q = law.log_law(logits, context, ids)
            # Where the law allows none of the candidates, the first one is drafted, to be rejected.
            only = jnp.where(jnp.arange(log_q.shape[1], dtype=jnp.int32) == 0, 0.0, -jnp.inf)
            log_q = jnp.where(jnp.isnan(log_q), only[None], log_q)
            scores = law.perturbed(log_q, row_keys, position, ids) if noisy else log_q
            found = best(scores, count)
            token = ids[found] if ids.ndim == 1 else jnp.take_along_axis(ids, found, axis=1)
            if not config.rule.needs_laws:
                return _of_drafts(token, jnp.take_along_axis(log_q, found, axis=1), shape, of_chain)
            if config.rule.argmax_drafts or law.greedy:
                log_law = one_hot_law(token, vocab_size)[:, 0]
            else:
                log_law = jnp.full((len(position), vocab_size), -jnp.inf)
                # Of a candidate that a node has twice only one has a law.
                own = jnp.arange(len(position), dtype=jnp.int32)[:, None]
                log_law = log_law.at[:, ids].set(log_q) if ids.ndim == 1 else log_law.at[own, ids].max(log_q)
            # Of one that the law does not allow the confidence is that of a draft to be rejected.
            sure = jnp.take_along_axis(log_q, found[:, :1], axis=1).reshape(shape) if of_chain else None
            return Choice(token.reshape(*shape, count), log_law.reshape(*shape, vocab_size), sure)

        return choose

    def judge(
        self,
        params: PolicyParams,
        draft_params: Any,
        rows: Rows,
        pool: Pool,
        trajectory: Trajectory,
        live: Bool[Array, "r"],
    ) -> Judged:
        """Draft, verify and decide for the live rows; nothing is emitted yet."""
        tree = self.config.tree
        choice = self._propose(params, draft_params, rows, trajectory)
        tokens = jnp.concatenate([rows.last_token[:, None], choice.token], axis=1)
        offsets = jnp.asarray(tree.depths, jnp.int32)[None]
        # A row that is not live, and drafts beyond the last position, are padding.
        wanted = live[:, None] & (rows.emitted[:, None] + offsets < rows.limit[:, None])
        positions = jnp.where(wanted, rows.length[:, None] + offsets, -1)
        out, law, log_p = self._forward_and_sample(
            params, rows, pool, grid_batch(tokens, positions, tree), choice.token
        )
        own = law.token.reshape(-1, tree.size)
        proposed = Proposed(own, jnp.zeros_like(rows.emitted))
        if self.speculative:
            draws = PlacedDraws.of_round(rows.keys, rows.rounds, rows.emitted)
            proposed = self.config.rule.decide(tree, choice.token, own, log_p, choice.log_law, draws)
        return Judged(live, out, law, log_p, choice, proposed)

    def conclude(
        self,
        params: PolicyParams,
        draft_params: Any,
        rows: Rows,
        trajectory: Trajectory,
        judged: Judged,
        drafts: Int[Array, "r"],
    ) -> tuple[Rows, KVCache, Trajectory]:
        """Emit what a round decided and advance every row.

        Args:
            drafts: depth that each row drafted; in a round without drafts the drafter reads nothing.

        Returns:
            Rows, their cache with the round's tokens in it, and the trajectory.
        """
        drafted = judged.choice.token.shape[1] > 0
        proposed, live, cache = judged.proposed, judged.live, judged.out.cache
        assert cache is not None
        law = self._emitted_law(judged) if drafted else judged.law
        verdict = cut(
            proposed,
            ends=is_end(proposed.tokens, self.config.law.end_ids),
            room=jnp.where(live, rows.limit - rows.emitted, 0),
        )
        drafter = rows.drafter
        if self.drafter is not None and drafted:
            queries = judged.choice.token.shape[1] + 1
            features = along(proposed.path, self.features(judged.out, live.shape[0], queries))
            drafter = self.drafter.commit(
                draft_params, params.embed, drafter, proposed.tokens, features, verdict.counts
            )
        trajectory = replace(trajectory, stats=count_round(trajectory.stats, verdict, live, drafts))
        if proposed.path is not None:
            path, steps = proposed.path, jnp.arange(proposed.path.shape[1], dtype=jnp.int32)[None]
            moved = jnp.any(live[:, None] & (steps <= proposed.accepted[:, None]) & (path != steps))
            cache = when(moved, lambda cache: keep_path(cache, rows.length, path), cache)
        trajectory, rows = emit(trajectory, rows, law, verdict.counts, self.config.law.end_ids)
        length = rows.length + verdict.counts
        return (
            replace(rows, length=length, drafter=drafter, rounds=rows.rounds + live.astype(jnp.int32)),
            cache,
            trajectory,
        )

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
        self, params: PolicyParams, rows: Rows, pool: Pool, batch: TokenBatch, drafts: Int[Array, "r n"]
    ) -> tuple[ForwardOutput, TokenLaw, Float[Array, "r n1 v"] | None]:
        """The forward over `[last token, drafts]`, the policy's draws, and its law for rules that judge by it."""
        config, tree = self.config, self.config.tree
        cache = pool.cache(rows)
        out = forward(params, self.policy, batch, numerics=self.numerics, cache=cache, boundaries=self.boundaries)
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
        law, log_p = self.drawn(params, out.hidden, keys, Context(position, seen), keep_law=keep_law)
        if log_p is not None:
            log_p = log_p.reshape(-1, tree.size, log_p.shape[-1])
        return out, law, log_p

    def drawn(
        self,
        params: PolicyParams,
        hidden: Float[Array, "n d"],
        keys: UInt32[Array, "n 2"],
        context: Context,
        *,
        keep_law: bool,
    ) -> tuple[TokenLaw, Float[Array, "n v"] | None]:
        """The policy's draws, and the law that they are of where that is kept."""
        config = self.config
        law, log_p = sample_tokens(
            params, self.policy, config.law, hidden, keys, context, self.numerics, keep_law=keep_law
        )
        if log_p is not None and config.law.greedy:
            log_p = one_hot_law(law.token[:, None], log_p.shape[-1])[:, 0]
        return law, log_p
