"""A round whose drafts are dealt out while it runs.

The plan (`rollout/control.py`) says whether to draft. The drafter proposes chains, one token of every row at a time,
until another is not worth its time; a body is chosen that the drafts are worth, its tokens go to those that save most,
and the policy reads them packed, rows of different lengths side by side.

Where the rule has several candidates (`Match.branches`), the next best ones stand beside each draft of a chain, each a
leaf, and are dealt tokens like drafts: a small tree where a draft is in doubt, a chain where it is sure. Their slots
come after the chain's, and the one that is accepted is moved to its place.

Rules that judge a draft by the law it was drawn from decide before it is drawn who drafts, and verify every draft
(`rollout/drafting.py`).

Without drafts the drafter does nothing: features of tokens that it has not read wait in a ring per row and
are read when drafting resumes; of a row that has fallen behind further, the drafter starts anew at the ring's first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from specrl_jax.drafters.protocol import ChainDrafter, Choice, Texts, can_draft
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import ForwardOutput, TokenBatch, forward, grid_batch
from specrl_jax.models.tree import Tree
from specrl_jax.rollout.control import (
    Beside,
    Body,
    Control,
    Plan,
    allocate,
    chances,
    fade,
    learn,
    seconds_per_token,
    share,
    worth_of_tokens,
)
from specrl_jax.rollout.drafting import ByConfidence, ByDraftsBefore, Drafting, path_survival
from specrl_jax.rollout.draws import PlacedDraws
from specrl_jax.rollout.pool import Pool
from specrl_jax.rollout.round import Judged, Round, with_drafts
from specrl_jax.rollout.rows import Rows, Unread
from specrl_jax.rollout.sampling import Context, TokenLaw, sample_tokens
from specrl_jax.rollout.trajectory import Trajectory
from specrl_jax.rollout.verification import Proposed, of_each

_CHUNK = 8  # unread pairs are read so many at a time


def _chain_first(x: Shaped[Array, "r k c"]) -> Shaped[Array, "r ck"]:
    """Drafts of a row in the order of its queries: the chain's, then what stands beside them."""
    return x.swapaxes(1, 2).reshape(x.shape[0], -1)


@struct.dataclass
class Drafted:
    """Drafts of a round: at every depth that of the chain, and the candidates beside it.

    token, confidence, log_law: as the drafter gave them; laws where the rule reads them. worth: what each would save, 0
    where none is.
    """

    token: Int[Array, "r k c"]
    confidence: Float[Array, "r k"]
    worth: Float[Array, "r k c"]
    log_law: Float[Array, "r k v"] | None = None


@dataclass(frozen=True)
class Dealt:
    """Drafts that a body has room for.

    token, confidence, log_law: of all of them. taken: which are verified. lengths: how many of a row's chain are.
    """

    token: Int[Array, "r k c"]
    confidence: Float[Array, "r k"]
    taken: Bool[Array, "r k c"]
    log_law: Float[Array, "r k v"] | None = None

    @property
    def lengths(self) -> Int[Array, "r"]:
        """Drafts of each row's chain that are verified."""
        return jnp.sum(self.taken[..., 0], axis=1, dtype=jnp.int32)

    @property
    def depths(self) -> Int[Array, "r"]:
        """Depth that each row's verified drafts reach."""
        depth = jnp.arange(1, self.taken.shape[1] + 1, dtype=jnp.int32)[None, :, None]
        return jnp.max(jnp.where(self.taken, depth, 0), axis=(1, 2))

    @property
    def queries(self) -> Int[Array, "r k c"]:
        """Which query of its row each verified draft is: the newest token is query 0, then come the chain's."""
        rows, depth, candidates = self.taken.shape
        order = jnp.cumsum(_chain_first(self.taken), axis=1, dtype=jnp.int32)
        return order.reshape(rows, candidates, depth).swapaxes(1, 2)


@dataclass(frozen=True)
class Packed:
    """The tokens of a round side by side.

    batch: for the forward. drafts: tokens of each row's queries but the first, `[r, q - 1]`.
    offsets: depth of each token, 0 of a row's newest one, `[n]`. where: where each query of a row lies, `[r, q]`.
    """

    batch: TokenBatch
    drafts: Int[Array, "r _"]
    offsets: Int[Array, "n"]
    where: Int[Array, "r q"]


def beside(chain: Proposed, dealt: Dealt, own: Int[Array, "r q"]) -> tuple[Proposed, Beside]:
    """What rule match decides of a chain, gone on to the candidate beside its first refused draft that was drawn.

    Args:
        chain: what it decides without them. dealt: what is verified.
        own: the policy's draw at every query of a row.

    Returns:
        The decision, whose path names queries, and what it says of candidates: nothing where the draft that they stand
        beside was not verified itself, since nobody knows whether it would have been refused.
    """
    depth = dealt.token.shape[1]
    end = jnp.minimum(chain.accepted, depth - 1)
    tokens, taken, queries = (of_each(x, end) for x in (dealt.token, dealt.taken, dealt.queries))
    looked = taken[:, 1:] & (chain.accepted < depth)[:, None]
    drawn = looked & (tokens[:, 1:] == of_each(chain.tokens, end)[:, None])
    found, which = jnp.any(drawn, axis=1), jnp.argmax(drawn, axis=1).astype(jnp.int32)
    steps = jnp.arange(depth + 1, dtype=jnp.int32)[None]
    leaf = found[:, None] & (steps > chain.accepted[:, None])
    path = jnp.where(leaf, of_each(queries[:, 1:], which)[:, None], steps)
    accepted = chain.accepted + found.astype(jnp.int32)
    tried = looked & taken[:, :1] & (~found[:, None] | (jnp.arange(looked.shape[1])[None] <= which[:, None]))
    decision = Proposed(jnp.take_along_axis(own, path, axis=1), accepted, path)
    return decision, Beside(jnp.sum(tried, axis=1, dtype=jnp.int32), found)


@dataclass(frozen=True)
class AdaptiveRound(Round):
    """Rounds whose number of drafts is chosen while they run; `config.draft_length` bounds their depth."""

    @property
    def chain_drafter(self) -> ChainDrafter:
        """The drafter."""
        assert isinstance(self.drafter, ChainDrafter)
        return self.drafter

    def catch_up(self, params: PolicyParams, draft_params: Any, rows: Rows) -> Rows:
        """Let the drafter read what was emitted while nothing was drafted."""
        unread = rows.unread
        assert unread is not None
        window = unread.tokens.shape[1]
        drafter = self.chain_drafter.skip(rows.drafter, jnp.maximum(unread.count - window, 0))
        left = jnp.minimum(unread.count, window)

        def chunk(state: tuple[Any, Int[Array, "r"]]) -> tuple[Any, Int[Array, "r"]]:
            drafter, left = state
            slots = (drafter.length[:, None] + jnp.arange(_CHUNK, dtype=jnp.int32)[None]) % window
            tokens = jnp.take_along_axis(unread.tokens, slots, axis=1)
            features = jnp.take_along_axis(unread.features, slots[..., None], axis=1)
            counts = jnp.minimum(left, _CHUNK)
            drafter = self.chain_drafter.commit(draft_params, params.embed, drafter, tokens, features, counts)
            return drafter, left - counts

        drafter, _ = lax.while_loop(lambda state: jnp.any(state[1] > 0), chunk, (drafter, left))
        return replace(rows, drafter=drafter, unread=replace(unread, count=jnp.zeros_like(unread.count)))

    def depth(self, bodies: Sequence[tuple[int, Body]]) -> int:
        """Depth of drafts at most, in any of these bodies."""
        return max(body.depth(self.config.draft_length) for _, body in bodies)

    def most_of_a_row(self, body: Body) -> int:
        """Drafts of a row at most, with what stands beside them: all of a body's may be one row's."""
        return min(body.depth(self.config.draft_length) * self.config.branches, body.tokens - 1)

    def no_drafts(self, rows: int, bodies: Sequence[tuple[int, Body]]) -> Drafted:
        """Room for the drafts of a round."""
        none = jnp.zeros((rows, self.depth(bodies), self.config.branches), jnp.float32)
        laws = jnp.zeros((*none.shape[:2], self.policy.vocab_size)) if self.config.rule.needs_laws else None
        return Drafted(none.astype(jnp.int32), none[..., 0], none, laws)

    def _drafting(
        self,
        draft_params: Any,
        rows: Rows,
        texts: Texts,
        control: Control,
        bodies: Sequence[tuple[int, Body]],
        live: Bool[Array, "r"],
        plan: Plan,
    ) -> Drafting:
        """What decides how many drafts there are; arguments as of `draft`."""
        room, needs_laws = jnp.where(live, rows.limit - 1 - rows.emitted, 0), self.config.rule.needs_laws
        if needs_laws:
            # Rows without drafts would draft something to be refused.
            able = can_draft(self.drafter, draft_params, texts)
            room = room if able is None else jnp.where(able, room, 0)
        assert rows.record is not None
        return (ByDraftsBefore if needs_laws else ByConfidence)(
            control,
            plan,
            bodies,
            self.config.draft_length,
            worth=worth_of_tokens(control, self.depth(bodies), plan.steps, live, rows.record),
            room=room,
            count=jnp.sum(live, dtype=jnp.int32),
            step_price=plan.per_second * control.per_step[bodies[0][0]],
            token_price=plan.per_second * seconds_per_token(plan.seconds, bodies),
            per_row=self.config.per_row,
        )

    def draft(
        self,
        params: PolicyParams,
        draft_params: Any,
        rows: Rows,
        trajectory: Trajectory,
        control: Control,
        bodies: Sequence[tuple[int, Body]],
        live: Bool[Array, "r"],
        plan: Plan,
    ) -> tuple[Rows, Drafted, Int[Array, ""]]:
        """Draft until another is not worth it, and choose the body that reads the drafts.

        `bodies` are those with drafts for so many rows, numbered.
        """
        rows = self.catch_up(params, draft_params, rows)
        drafter, embed, depth = self.chain_drafter, params.embed, self.depth(bodies)
        choose, begun, texts = self._chooser(rows), self.no_drafts(live.shape[0], bodies), self.texts(rows, trajectory)
        drafting = self._drafting(draft_params, rows, texts, control, bodies, live, plan)
        carry, choice = drafter.begin(draft_params, embed, rows.drafter, texts, depth, choose)

        def drafted(step: Int[Array, ""], choice: Choice, made: Drafted) -> Drafted:
            """With the drafts of another depth; of `worth` how often each survives."""
            token, sure = self._candidates(choice), jnp.exp(choice.confidence)  # type: ignore[arg-type]
            found = chances(control, sure, path_survival(made.worth, step), token.shape[1])
            survival = jnp.where(token >= 0, drafting.survival_of(found, made.worth, step), 0.0)
            return Drafted(
                token=made.token.at[:, step].set(token),
                confidence=made.confidence.at[:, step].set(sure),
                worth=made.worth.at[:, step].set(survival),
                log_law=None if made.log_law is None else made.log_law.at[:, step].set(choice.log_law),
            )

        def more(state: Any) -> Bool[Array, ""]:
            step, _, made = state
            return (step < depth) & drafting.goes_on(made.worth, step)

        def another(state: Any) -> Any:
            step, carry, made = state
            newest = made.token[:, step - 1, 0]
            carry, choice = drafter.advance(draft_params, embed, rows.drafter, carry, newest, step - 1, choose)
            return step + 1, carry, drafted(step, choice, made)

        first = drafted(jnp.int32(0), choice, begun)
        _, _, made = lax.while_loop(more, another, (jnp.int32(1), carry, first))
        made = replace(made, worth=drafting.worth[:, None, None] * made.worth)
        return rows, made, drafting.body_for(made.worth)

    def _candidates(self, choice: Choice) -> Int[Array, "r c"]:
        """A draft and what stands beside it, -1 where a drafter has no more."""
        found = choice.token[:, None]
        if choice.others is not None:
            found = jnp.concatenate([found, choice.others], axis=1)
        return jnp.pad(found, ((0, 0), (0, self.config.branches - found.shape[1])), constant_values=-1)

    def deal(self, body: Body, drafted: Drafted, live: Bool[Array, "r"]) -> Dealt:
        """The drafts that a body verifies."""
        depth = body.depth(self.config.draft_length)
        worth, budget = drafted.worth[:, :depth], body.tokens - jnp.sum(live, dtype=jnp.int32)
        laws, taken = None, (allocate if self.config.per_row else share)(worth, budget)
        if drafted.log_law is not None:
            laws, taken = drafted.log_law[:, :depth], worth > 0.0  # all drafts
        return Dealt(drafted.token[:, :depth], drafted.confidence[:, :depth], taken, laws)

    def _packed(self, rows: Rows, body: Body, dealt: Dealt, live: Bool[Array, "r"]) -> Packed:
        """The tokens of a round side by side."""
        most, (_, depth, candidates) = self.most_of_a_row(body), dealt.token.shape
        count = jnp.where(live, 1 + jnp.sum(dealt.taken, axis=(1, 2), dtype=jnp.int32), 0)
        ends = jnp.cumsum(count, dtype=jnp.int32)
        index = jnp.arange(body.tokens, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, index, side="right").astype(jnp.int32), live.shape[0] - 1)
        query = jnp.clip(index - (ends - count)[row], 0, most)
        there, slots, own_slots = index < ends[-1], rows.length[row] + query, None
        offset, drafts = query, dealt.token[..., 0]
        if candidates > 1:
            first = jnp.argsort(~_chain_first(dealt.taken), axis=1, stable=True)[:, :most]
            drafts = jnp.take_along_axis(_chain_first(dealt.token), first, axis=1)
            offset = jnp.where(query > 0, 1 + (first % depth)[row, jnp.maximum(query - 1, 0)].astype(jnp.int32), 0)
            own_slots = jnp.where(there, slots, -1)
        tokens = jnp.concatenate([rows.last_token[:, None], drafts], axis=1)[row, query]
        positions = jnp.where(there, rows.length[row] + offset, -1)
        steps = jnp.arange(1 + most, dtype=jnp.int32)[None]
        where = jnp.minimum((ends - count)[:, None] + steps, body.tokens - 1)
        one = live.shape[0] == 1
        batch = TokenBatch(tokens, row, positions, live.shape[0], 1 + most, is_grid=one, own_slots=own_slots)
        return Packed(batch, drafts, offset, where)

    def judge_dealt(
        self, params: PolicyParams, rows: Rows, pool: Pool, body: Body, dealt: Dealt, live: Bool[Array, "r"]
    ) -> tuple[Judged, Beside | None]:
        """Verify what was dealt; and what came of candidates beside drafts, where there can be any."""
        config, depth, packed = self.config, dealt.token.shape[1], self._packed(rows, body, dealt, live)
        batch, row, where = packed.batch, packed.batch.rows, packed.where
        out = forward(
            params, self.policy, batch, numerics=self.numerics, cache=pool.cache(rows), boundaries=self.boundaries
        )
        seen = None
        if rows.seen is not None:
            views = [rows.seen]
            for step in range(depth - 1):
                views.append(with_drafts(views[-1], dealt.token[:, step : step + 1, 0]))
            # What stands beside a draft has not seen it.
            above = jnp.stack(views, axis=1)[row, jnp.maximum(packed.offsets - 1, 0)]
            seen = jnp.where((packed.offsets > 0)[:, None], with_drafts(above, batch.tokens[:, None]), above)
        context = Context(rows.emitted[row] + packed.offsets, seen)
        law, log_p = self.drawn(params, out.hidden, rows.keys[row], context, keep_law=config.rule.needs_laws)
        grid: TokenLaw = jax.tree.map(lambda x: x[where], law)
        # Of what is not verified no token, so that it is never drawn.
        drafts = jnp.where(dealt.taken[..., 0], dealt.token[..., 0], -1)
        draws, own = PlacedDraws.of_round(rows.keys, rows.rounds, rows.emitted), grid.token[:, : 1 + depth]
        log_q = None
        if log_p is not None:
            assert dealt.log_law is not None
            log_p = log_p[where]
            # What follows the last draft is the policy's, whatever a rule makes of drafted tokens.
            log_q = jnp.where(drafts[..., None] >= 0, dealt.log_law, log_p[:, :-1])
        proposed, tried = config.rule.decide(Tree.chain(depth), drafts, own, log_p, log_q, draws), None
        if config.branches > 1:
            proposed, tried = beside(proposed, dealt, grid.token)
        features = None if out.features is None else out.features[where].reshape(-1, out.features.shape[1])
        laws = jax.tree.map(lambda x: x.reshape(-1), grid)
        out = ForwardOutput(out.hidden, features, out.cache)
        return Judged(live, out, laws, log_p, Choice(packed.drafts, log_q), proposed), tried

    def judge_alone(self, params: PolicyParams, rows: Rows, pool: Pool, live: Bool[Array, "r"]) -> Judged:
        """One token of every row, without drafts."""
        positions = jnp.where(live, rows.length, -1)[:, None]
        batch = grid_batch(rows.last_token[:, None], positions)
        out = forward(
            params, self.policy, batch, numerics=self.numerics, cache=pool.cache(rows), boundaries=self.boundaries
        )
        context = Context(rows.emitted, rows.seen)
        law, _ = sample_tokens(params, self.policy, self.config.law, out.hidden, rows.keys, context, self.numerics)
        proposed = Proposed(law.token[:, None], jnp.zeros_like(rows.emitted))
        return Judged(live, out, law, None, Choice(jnp.zeros((live.shape[0], 0), jnp.int32)), proposed)

    def wait(self, rows: Rows, judged: Judged, before: Rows) -> Rows:
        """After a round without drafts: its pair waits in the ring, and what drafts were worth grows old."""
        unread = rows.unread
        assert unread is not None
        assert rows.record is not None
        advanced = rows.length > before.length
        index = jnp.arange(advanced.shape[0], dtype=jnp.int32)
        window = unread.tokens.shape[1]
        slot = jnp.where(advanced, before.length % window, window)
        features = self.features(judged.out, advanced.shape[0], 1)[:, 0]
        unread = Unread(
            tokens=unread.tokens.at[index, slot].set(rows.last_token, mode="drop"),
            features=unread.features.at[index, slot].set(features, mode="drop"),
            count=unread.count + advanced.astype(jnp.int32),
        )
        return replace(rows, unread=unread, record=fade(rows.record))

    def verify(
        self,
        params: PolicyParams,
        draft_params: Any,
        body: Body,
        drafted: Drafted,
        live: Bool[Array, "r"],
        state: tuple[Rows, Pool, Trajectory, Control],
    ) -> tuple[Rows, Pool, Trajectory, Control]:
        """Let the policy read the tokens of a body, emit what it decides and learn from it."""
        rows, pool, trajectory, control = state
        if body.tokens == body.rows:
            judged = self.judge_alone(params, rows, pool, live)
            none = jnp.zeros_like(rows.emitted)
            after, cache, trajectory = self.conclude(params, draft_params, rows, trajectory, judged, none)
            return self.wait(after, judged, rows), pool.with_cache(cache), trajectory, control
        dealt = self.deal(body, drafted, live)
        judged, tried = self.judge_dealt(params, rows, pool, body, dealt, live)
        after, cache, trajectory = self.conclude(params, draft_params, rows, trajectory, judged, dealt.depths)
        emitted = after.length - rows.length
        assert rows.record is not None
        counted = live & (emitted == judged.proposed.accepted + 1)
        lengths, accepted = dealt.lengths, judged.proposed.accepted
        if tried is not None:
            accepted = accepted - tried.accepted.astype(jnp.int32)
        if not hasattr(self.drafter, "can_draft"):
            # That there was nothing to propose counts like a draft that was refused.
            lengths = jnp.where(live & (dealt.token[:, 0, 0] < 0), 1, lengths)
        control, record = learn(control, rows.record, dealt.confidence, lengths, accepted, counted, tried)
        return replace(after, record=record), pool.with_cache(cache), trajectory, control
