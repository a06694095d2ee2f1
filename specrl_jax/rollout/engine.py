"""Speculative rollouts in one compiled program.

1. Sequences wait in order. While rows and cache allow, prompts are read (once each, without
   their last token), and their samples take rows, which share the pages of the prompt.
2. Rounds (`rollout/round.py`), in `lax.while_loop`s without the host. A row starts a round with
   its newest token, which at first is the last of the prompt, not yet in the cache.
3. As sequences end, others take their rows. When none can start, the live rows move into
   a smaller batch: the ladder, one compiled loop per rung. The cache stays where it is.

By default (`Match`) the emitted token is always the policy's draw with noise keyed by
(sequence, position): neither the drafter, nor the draft length, nor the row a sequence
sits in can change what comes out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.protocol import can_draft
from specrl_jax.models.params import PolicyParams
from specrl_jax.rollout.adaptive import Drafted
from specrl_jax.rollout.control import Control, plan_round
from specrl_jax.rollout.pool import Pool, grow, leave, occupancy
from specrl_jax.rollout.queue import Batch, SequenceQueue
from specrl_jax.rollout.round import Judged, when
from specrl_jax.rollout.rows import Rows
from specrl_jax.rollout.trajectory import Trajectory

# Planning takes time with every row, and what many rows need together changes slowly: from twice so many rows on a plan
# is made for several rounds.
_ROWS_A_PLAN = 16
# Rounds without drafts teach nothing, but records fade and caches grow: while no row ends, plans stay the same.
_IDLE_ROUNDS_A_PLAN = 8


@dataclass(frozen=True)
class RolloutEngine(SequenceQueue):
    """Rounds of all sequences until the last has ended."""

    def round(self, params: PolicyParams, draft_params: Any, batch: Batch) -> tuple[Batch, Judged]:
        """One round of fixed draft length, of all rows that have the pages for it, and how it was judged."""
        tree = self.config.tree
        rows, pool, live, batch = self._grown(batch, tree.size)
        judged = self.judge(params, draft_params, rows, pool, batch.trajectory, live)
        # Where a drafter had nothing to propose stands -1.
        depths = jnp.asarray(tree.depths[1:], jnp.int32)[None]
        drafts = jnp.max(jnp.where(judged.choice.token >= 0, depths, 0), axis=1, initial=0)
        after, cache, trajectory = self.conclude(params, draft_params, rows, batch.trajectory, judged, drafts)
        return self._closed(batch, rows, after, pool.with_cache(cache), trajectory), judged

    def planned_round(self, params: PolicyParams, draft_params: Any, batch: Batch, size: int) -> Batch:
        """One round of `size` rows as the controller plans it, and its next plan."""
        assert batch.control is not None
        assert batch.plan is not None
        control, plan, longest = batch.control, batch.plan, self.config.draft_length
        bodies = [(i, b) for i, b in enumerate(self.config.bodies_for(self._all_rows(batch))) if b.rows == size]
        with_drafts = [(index, body) for index, body in bodies if body.depth(longest)]
        drafts = jnp.any(plan.body == jnp.array([index for index, _ in with_drafts], jnp.int32))
        most = max(self.most_of_a_row(body) for _, body in bodies)
        slots = jnp.where(drafts, 1 + most, 1)  # how many are verified is not known yet
        before, pool, live, batch = self._grown(batch, slots)
        rows, drafted, chosen = before, self.no_drafts(size, bodies), plan.body
        if with_drafts:

            def draft(state: tuple[Rows, Drafted, Array]) -> tuple[Rows, Drafted, Array]:
                return self.draft(params, draft_params, state[0], batch.trajectory, control, with_drafts, live, plan)

            rows, drafted, chosen = when(drafts, draft, (rows, drafted, chosen))
        state = rows, pool, batch.trajectory, control
        for index, body in bodies:
            verify = partial(self.verify, params, draft_params, body, drafted, live)
            state = when(chosen == index, verify, state)
        rows, pool, trajectory, control = state
        used = trajectory.stats.bodies.at[chosen].add(1)
        trajectory = replace(trajectory, stats=replace(trajectory.stats, bodies=used))
        after = replace(self._closed(batch, before, rows, pool, trajectory), control=control)
        ended = jnp.any(after.rows.done & ~before.done)
        return self._plan_if_due(draft_params, after, size, drafts | ended)

    def _grown(self, batch: Batch, slots: int | Int[Array, ""]) -> tuple[Rows, Pool, Bool[Array, "r"], Batch]:
        """Rows with pages for a round, the pool, and which of them take part."""
        rows, pool, stalled = grow(batch.rows, batch.pool, slots)
        stats = batch.trajectory.stats
        stats = replace(stats, stalled=stats.stalled + jnp.sum(stalled, dtype=jnp.int32))
        return rows, pool, ~rows.done & ~stalled, replace(batch, trajectory=replace(batch.trajectory, stats=stats))

    def _closed(self, batch: Batch, before: Rows, rows: Rows, pool: Pool, trajectory: Trajectory) -> Batch:
        """After a round: rows that ended give their pages back."""
        pages, tokens = occupancy(rows, pool)
        stats = trajectory.stats
        stats = replace(
            stats,
            peak_pages=jnp.maximum(stats.peak_pages, pages),
            peak_tokens=jnp.maximum(stats.peak_tokens, tokens),
        )
        rows, pool = leave(rows, pool, rows.done & ~before.done)
        return replace(batch, rows=rows, pool=pool, trajectory=replace(trajectory, stats=stats))

    def _plan(self, draft_params: Any, batch: Batch) -> Batch:
        """The controller's plan of the next round."""
        if batch.control is None or batch.plan is None:
            return batch
        rows = batch.rows
        assert rows.record is not None
        slots = jnp.sum(jnp.where(rows.done, 0, rows.length))
        bodies = self.config.bodies_for(self._all_rows(batch))
        longest = self.config.draft_length
        able = can_draft(self.drafter, draft_params, self.texts(rows, batch.trajectory))
        plan = plan_round(batch.control, bodies, longest, ~rows.done, rows.record, slots, batch.plan.body, able)
        return replace(batch, plan=plan)

    def _plan_if_due(self, draft_params: Any, batch: Batch, size: int, changed: Bool[Array, ""]) -> Batch:
        """The next plan after a round of `size` rows: a new one every so many rounds, and where fewer rows would do. Of
        few rows after every round that `changed` what is known, else after some."""
        every = max(1, size // _ROWS_A_PLAN)
        bodies = self.config.bodies_for(self._all_rows(batch))
        smaller = max((body.rows for body in bodies if body.rows < size), default=0)
        # What `can_draft` tells changes with every token.
        idle = _IDLE_ROUNDS_A_PLAN if every == 1 and not hasattr(self.drafter, "can_draft") else every
        due = jnp.sum(batch.trajectory.stats.bodies) % jnp.where(changed, jnp.int32(every), jnp.int32(idle)) == 0
        due |= jnp.sum(~batch.rows.done, dtype=jnp.int32) <= smaller
        return replace(batch, plan=when(due, lambda _: self._plan(draft_params, batch).plan, batch.plan))

    def _all_rows(self, batch: Batch) -> int:
        """Rows of the largest rung."""
        return self.layout(*batch.trajectory.prompts.tokens.shape).rows

    def rollout(
        self,
        params: PolicyParams,
        draft_params: Any,
        prompts: Prompts,
        keys: UInt32[Array, "b 2"],
        limits: Int[Array, "b"] | None = None,
        control: Control | None = None,
    ) -> Trajectory:
        """Sample `samples_per_prompt` responses to every prompt.

        Args:
            params: the policy's.
            draft_params: the drafter's, or None when the draft length is 0.
            prompts: `g` prompts; one of no tokens fills up a batch and gets no response.
            keys: noise key of every sequence, `b = g * samples_per_prompt`, group-major
                (`specrl_jax.rollout.noise.sequence_keys`).
            limits: most response tokens of each sequence, where they differ from `max_new_tokens`.
            control: where the draft length is adaptive, what chooses it; the trajectory has it as it ends.

        Raises:
            InputError: prompts or cache budget do not fit, or the cost table has not an entry for each body.
        """
        batch = self.finish(params, draft_params, self.empty_batch(prompts, control, limits), keys)
        return replace(batch.trajectory, control=batch.control)

    def finish(self, params: PolicyParams, draft_params: Any, batch: Batch, keys: UInt32[Array, "b 2"]) -> Batch:
        """Go on until every sequence has ended."""
        rungs = self.config.rungs(batch.rows.done.shape[0])
        bodies = self.config.bodies_for(batch.rows.done.shape[0])

        def live(batch: Batch) -> Int[Array, ""]:
            return jnp.sum(~batch.rows.done, dtype=jnp.int32)

        def turn(batch: Batch) -> Batch:
            batch = self._plan(draft_params, self.refill(params, draft_params, keys, batch))
            for size, next_size in zip(rungs, (*rungs[1:], 0), strict=True) if not bodies else ():

                def fits(batch: Batch, size: int = size, next_size: int = next_size) -> Bool[Array, ""]:
                    return (live(batch) > next_size) & (live(batch) <= size)

                batch = self._on_rung(batch, size, fits, lambda b: self.round(params, draft_params, b)[0])
            for size in sorted({body.rows for body in bodies}, reverse=True):
                of_size = jnp.array([index for index, body in enumerate(bodies) if body.rows == size], jnp.int32)

                def planned(batch: Batch, of_size: Int[Array, "n"] = of_size) -> Bool[Array, ""]:
                    assert batch.plan is not None
                    return (live(batch) > 0) & jnp.any(batch.plan.body == of_size)

                def step(batch: Batch, size: int = size) -> Batch:
                    return self.planned_round(params, draft_params, batch, size)

                batch = self._on_rung(batch, size, planned, step)
            return batch

        return lax.while_loop(lambda b: (live(b) > 0) | (b.started < keys.shape[0]), turn, batch)

    def _on_rung(
        self, batch: Batch, size: int, fits: Callable[[Batch], Bool[Array, ""]], step: Callable[[Batch], Batch]
    ) -> Batch:
        """Rounds of `size` rows while they fit and no waiting sequence can start.

        A loop that is not entered costs nothing, and loops in a row keep the cache in place; of a `lax.switch`
        XLA copies it.
        """
        spare = size < batch.rows.done.shape[0]

        def goes_on(batch: Batch, spare: bool) -> Bool[Array, ""]:
            return fits(batch) & ~self.can_read(batch, spare) & ~self.can_start(batch, spare)

        def rounds(batch: Batch) -> Batch:
            return lax.while_loop(lambda b: goes_on(b, spare), step, batch)

        def on_some(batch: Batch) -> Batch:
            live_first = jnp.argsort(batch.rows.done, stable=True)[:size]
            some = jax.tree.map(lambda x: x[live_first], batch.rows)
            after = rounds(replace(batch, rows=some))
            rows = jax.tree.map(lambda all_, x: all_.at[live_first].set(x), batch.rows, after.rows)
            return replace(after, rows=rows)

        return lax.while_loop(lambda b: goes_on(b, False), on_some, batch) if spare else rounds(batch)
