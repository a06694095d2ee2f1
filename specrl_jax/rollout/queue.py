"""Sequences that wait for rows and pages of the cache.

While rows and pages allow, prompts are read, once each and without their last token, and their samples take
rows, which share the full pages of the prompt. Everything happens inside the compiled loop of a rollout.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.protocol import read_first
from specrl_jax.errors import InputError
from specrl_jax.models.cache import NO_PAGE, pages_for
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import policy_pool
from specrl_jax.rollout.adaptive import AdaptiveRound
from specrl_jax.rollout.control import Control, Plan, forget
from specrl_jax.rollout.pool import Pool, grant, hold, kept_back
from specrl_jax.rollout.prefill import read_prompts
from specrl_jax.rollout.rows import Rows, Unread
from specrl_jax.rollout.sampling import with_tokens
from specrl_jax.rollout.trajectory import RolloutStats, Trajectory

_PREFILL_TOKENS = 512  # prompts are read together up to so many tokens
_WINDOW = 32  # pairs that wait for an idle drafter, per row


@struct.dataclass
class Waiting:
    """Prompts that have been read and whose samples have not all taken rows.

    first: index of the first of them. count: prompts read so far, of all.
    table: their pages, `[w, mp]`. drafter: the drafter's state after them, or None.
    """

    first: Int[Array, ""]
    count: Int[Array, ""]
    table: Int[Array, "w mp"]
    drafter: Any


@struct.dataclass
class Batch:
    """A rollout in progress.

    rows: those of the rung. pool: the cache. waiting: see there.
    started: sequences that have taken a row so far; they do so in order.
    trajectory: what has been emitted. limits: most response tokens of each sequence, `[b]`.
    control: what chooses the drafts of a round, and plan: of the next one; None where the draft length is fixed.
    """

    rows: Rows
    pool: Pool
    waiting: Waiting
    started: Int[Array, ""]
    trajectory: Trajectory
    limits: Int[Array, "b"]
    control: Control | None = None
    plan: Plan | None = None


@dataclass(frozen=True)
class Layout:
    """Sizes of a rollout: rows, pages of a row, prompts read together, pages of a prompt, pages of the pool."""

    rows: int
    row_pages: int
    prompts: int
    prompt_pages: int
    pool_pages: int


@dataclass(frozen=True)
class SequenceQueue(AdaptiveRound):
    """Rounds, and the sequences that wait for one."""

    def check_prompt_width(self, width: int) -> None:
        """Raise InputError unless prompts of `width` tokens and their responses fit the policy's context."""
        if width + self.config.max_new_tokens > self.policy.max_position_embeddings:
            raise InputError(
                f"prompts of up to {width} tokens with responses of up to {self.config.max_new_tokens} exceed the "
                f"policy's max_position_embeddings of {self.policy.max_position_embeddings}; "
                "shorten the prompts or lower max_new_tokens"
            )

    def _slots(self, width: int) -> int:
        """Cache slots of a row: its tokens, and the nodes of a tree beside its last path."""
        return width + self.config.max_new_tokens + self.config.tree.size - 1 - self.config.tree.depth

    def page_bytes(self) -> int:
        """Bytes of a page in all layers of the policy."""
        policy = self.policy
        slot = 2 * policy.num_layers * policy.num_kv_heads * policy.head_dim * jnp.dtype(policy.dtype).itemsize
        return slot * self.numerics.key_block

    def drafter_bytes(self, rows: int, width: int) -> int:
        """Bytes of the drafter's state for so many rows."""
        if self.drafter is None or not self.speculative:
            return 0
        state = jax.eval_shape(lambda: self.drafter.init_state(rows, self._slots(width)))  # type: ignore[union-attr]
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    def layout(self, groups: int, width: int) -> Layout:
        """Sizes for so many prompts of so many tokens; InputError when these or one row of them do not fit."""
        self.check_prompt_width(width)
        count = groups * self.config.samples_per_prompt
        rows = min(count, self.config.rows or count)
        together = max(1, min(groups, _PREFILL_TOKENS // width, -(-rows // self.config.samples_per_prompt)))
        row_pages = pages_for(self._slots(width), self.numerics)
        prompt_pages = pages_for(max(1, width - 1), self.numerics)
        # Rows of a group share the full pages of their prompt; what follows these may begin at the end of a page.
        page, read = self.numerics.key_block, max(0, width - 1)
        own_pages = pages_for(self._slots(width) - read + page - 1, self.numerics)
        live_groups = min(groups, rows)  # each may have a straggler
        waiting = together * prompt_pages
        least = row_pages + waiting
        full = max(least, min(rows * row_pages, rows * own_pages + live_groups * (read // page)) + waiting)
        budget = self.config.cache_bytes
        if budget is None:
            pages = max(least, full - full // 4) if count > rows else full
        else:
            kept = self.drafter_bytes(rows + together, width)
            pages = min(full, max(0, budget - kept) // self.page_bytes())
            if pages < least:
                raise InputError(
                    f"rollout cache_bytes is {budget}; {rows} rows with prompts of up to {width} tokens need at least "
                    f"{kept + least * self.page_bytes()}: raise it, or lower rows or max_new_tokens"
                )
        return Layout(rows, row_pages, together, prompt_pages, pages)

    def empty_batch(
        self,
        prompts: Prompts,
        control: Control | None = None,
        limits: Int[Array, "b"] | None = None,
        pages: int | None = None,
    ) -> Batch:
        """Before any prompt is read; arguments as for `RolloutEngine.rollout`. pages: of the pool, if not as usual."""
        groups, width = prompts.tokens.shape
        layout = self.layout(groups, width)
        drafts = self.drafter is not None and self.speculative
        none = jnp.zeros((layout.rows,), jnp.int32)

        def drafter_state(rows: int) -> Any:
            return self.drafter.init_state(rows, self._slots(width)) if drafts else None  # type: ignore[union-attr]

        bodies = self.config.bodies_for(layout.rows)
        if (control is None) == bool(bodies) or (control is not None and control.seconds.shape[0] != len(bodies)):
            raise InputError(
                f"this rollout has {len(bodies)} rounds to choose from, and a cost table of "
                f"{0 if control is None else control.seconds.shape[0]}; give one entry for each (`initial_control`)"
            )
        unread = record = None
        if bodies:
            record = jnp.zeros((layout.rows, 4), jnp.float32)
            size = len(self.boundaries) * self.policy.hidden_size
            features = jnp.zeros((layout.rows, _WINDOW, size), jnp.dtype(self.policy.dtype))
            unread = Unread(jnp.zeros((layout.rows, _WINDOW), jnp.int32), features, none)
        rows = Rows(
            unread=unread,
            record=record,
            table=jnp.full((layout.rows, layout.row_pages), NO_PAGE, jnp.int32),
            used=none,
            shared=none,
            length=none,
            drafter=drafter_state(layout.rows),
            sequence=none,
            keys=jnp.zeros((layout.rows, 2), jnp.uint32),
            last_token=none,
            emitted=none,
            limit=none,
            rounds=none,
            seen=jnp.zeros((layout.rows, self.policy.vocab_size), bool) if self.config.law.reads_history else None,
            done=jnp.ones((layout.rows,), bool),
        )
        pages = pages or layout.pool_pages
        keys, values = policy_pool(self.policy, pages, self.numerics)
        table = jnp.full((layout.prompts, layout.prompt_pages), NO_PAGE, jnp.int32)
        zero = jnp.int32(0)
        waiting = Waiting(zero, zero, table, drafter_state(layout.prompts))
        pool = Pool(keys, values, jnp.zeros((pages,), jnp.int32))
        trajectory = self._empty_trajectory(prompts, len(bodies))
        most = jnp.full((trajectory.lengths.shape[0],), self.config.max_new_tokens, jnp.int32)
        limits = most if limits is None else jnp.clip(limits, 1, most)
        control = None if control is None else forget(control)
        plan = None if control is None else Plan(jnp.int32(-1), jnp.float32(0.0), zero, control.seconds)
        return Batch(rows, pool, waiting, zero, trajectory, limits, control, plan)

    def _empty_trajectory(self, prompts: Prompts, bodies: int) -> Trajectory:
        count = prompts.tokens.shape[0] * self.config.samples_per_prompt
        shape, zero = (count, self.config.max_new_tokens), jnp.int32(0)
        at, used = jnp.zeros((self.config.tree.depth,), jnp.int32), jnp.zeros((bodies,), jnp.int32)
        return Trajectory(
            prompts=prompts,
            tokens=jnp.zeros(shape, jnp.int32),
            log_probs=jnp.zeros(shape, jnp.float32),
            thresholds=jnp.full(shape, -jnp.inf) if self.config.law.filtered else None,
            lengths=jnp.zeros((count,), jnp.int32),
            ended=jnp.zeros((count,), bool),
            entropy_sum=jnp.float32(0.0),
            stats=RolloutStats(zero, zero, zero, zero, at, at, zero, used, zero, zero, zero),
        )

    def can_read(self, batch: Batch, spare: bool) -> Bool[Array, ""]:
        """Whether the next prompts should be read: rows are free, nobody else waits, and pages suffice."""
        groups = batch.trajectory.prompts.tokens.shape[0]
        exhausted = batch.started == batch.waiting.count * self.config.samples_per_prompt
        enough = batch.pool.free >= batch.waiting.table.size + kept_back(batch.rows)
        return exhausted & (batch.waiting.count < groups) & (spare | jnp.any(batch.rows.done)) & enough

    def can_start(self, batch: Batch, spare: bool) -> Bool[Array, ""]:
        """Whether the next sequence can take a row."""
        waits = batch.started < batch.waiting.count * self.config.samples_per_prompt
        enough = batch.pool.free > jnp.where(jnp.all(batch.rows.done), 0, kept_back(batch.rows))
        return waits & (spare | jnp.any(batch.rows.done)) & enough

    def _read_prompts(self, params: PolicyParams, draft_params: Any, batch: Batch) -> Batch:
        """Prefill: the next prompts, without their last tokens."""
        prompts, waiting = batch.trajectory.prompts, batch.waiting
        (together, pages), width = waiting.table.shape, prompts.tokens.shape[1]
        index = waiting.count + jnp.arange(together, dtype=jnp.int32)
        lengths = prompts.lengths.at[index].get(mode="fill", fill_value=0)
        tokens = prompts.tokens.at[index].get(mode="fill", fill_value=0)
        read = jnp.maximum(lengths - 1, 0)
        needed = -(-read // batch.pool.page_size)
        table, pool = grant(batch.pool, jnp.arange(pages, dtype=jnp.int32)[None] < needed[:, None])
        drafter = waiting.drafter
        if self.drafter is not None and self.speculative:
            drafter = self.drafter.init_state(together, self._slots(width))
            drafter = read_first(self.drafter, draft_params, params.embed, drafter, tokens[:, 0])
        if width > 1:
            cache = replace(pool.cache(batch.rows), table=table, length=jnp.zeros_like(read))
            cache, features = read_prompts(
                params, self.policy, tokens[:, :-1], read, cache, self.numerics, self.boundaries
            )
            pool = pool.with_cache(cache)
            if self.drafter is not None and self.speculative:
                drafter = self.drafter.commit(draft_params, params.embed, drafter, tokens[:, 1:], features, read)
        count = jnp.minimum(waiting.count + together, prompts.lengths.shape[0])
        return replace(batch, pool=pool, waiting=Waiting(waiting.count, count, table, drafter))

    def _start_one(self, keys: UInt32[Array, "b 2"], batch: Batch) -> Batch:
        """The next sequence takes a free row, shares the full pages of its prompt and copies the last, partial one."""
        rows, waiting, sequence = batch.rows, batch.waiting, batch.started
        prompts, page_size = batch.trajectory.prompts, batch.pool.page_size
        group = sequence // self.config.samples_per_prompt
        place, row = group - waiting.first, jnp.argmax(rows.done)
        length = prompts.lengths[group]
        issued = length > 0
        read = jnp.maximum(length - 1, 0)
        shared = read // page_size
        prompt_table = waiting.table[place]
        column = jnp.arange(rows.table.shape[1], dtype=jnp.int32)
        column_of_prompt = jnp.arange(prompt_table.shape[0], dtype=jnp.int32)
        common = jnp.where(column_of_prompt < shared, prompt_table, NO_PAGE)
        own, pool = grant(hold(batch.pool, common, 1), issued[None])
        source = prompt_table.at[shared].get(mode="fill", fill_value=0)

        # Where the prompt fills its pages, or there is none, nothing is to be copied: what is read is never looked at.
        target = jnp.where(issued, own[0], source)

        def copy(pages: Array) -> Array:
            return lax.dynamic_update_index_in_dim(pages, lax.dynamic_index_in_dim(pages, source, 0), target, 0)

        pool = replace(pool, keys=tuple(map(copy, pool.keys)), values=tuple(map(copy, pool.values)))
        padded = jnp.pad(common, (0, max(0, rows.table.shape[1] - common.shape[0])), constant_values=NO_PAGE)
        table = jnp.where(column < shared, padded[: rows.table.shape[1]], NO_PAGE)
        table = jnp.where(column == shared, own[0], table)
        seen = rows.seen
        if seen is not None:
            none = jnp.zeros_like(seen[:1])
            in_prompt = jnp.arange(prompts.tokens.shape[1], dtype=jnp.int32) < length
            seen = seen.at[row].set(with_tokens(none, prompts.tokens[group][None], in_prompt[None])[0])
        zero = jnp.int32(0)
        rows = replace(
            rows,
            table=rows.table.at[row].set(table),
            used=rows.used.at[row].set(jnp.where(issued, shared + 1, 0)),
            shared=rows.shared.at[row].set(shared),
            length=rows.length.at[row].set(read),
            drafter=jax.tree.map(lambda all_, one: all_.at[row].set(one[place]), rows.drafter, waiting.drafter),
            sequence=rows.sequence.at[row].set(sequence),
            keys=rows.keys.at[row].set(keys[sequence]),
            last_token=rows.last_token.at[row].set(prompts.tokens[group, read]),
            unread=None if rows.unread is None else replace(rows.unread, count=rows.unread.count.at[row].set(zero)),
            record=None if rows.record is None else rows.record.at[row].set(0.0),
            emitted=rows.emitted.at[row].set(zero),
            limit=rows.limit.at[row].set(batch.limits[sequence]),
            rounds=rows.rounds.at[row].set(zero),
            seen=seen,
            done=rows.done.at[row].set(~issued),
        )
        # After the last sample of a prompt nobody waits for its pages.
        last = (sequence + 1) % self.config.samples_per_prompt == 0
        pool = hold(pool, jnp.where(last, prompt_table, NO_PAGE), -1)
        return replace(batch, rows=rows, pool=pool, started=sequence + 1)

    def refill(self, params: PolicyParams, draft_params: Any, keys: UInt32[Array, "b 2"], batch: Batch) -> Batch:
        """Sequences take rows while there are both, and pages."""

        def once(batch: Batch) -> Batch:
            read = lambda batch: self._read_prompts(params, draft_params, batch)  # noqa: E731
            batch = lax.while_loop(lambda b: self.can_read(b, False), read, batch)
            return lax.while_loop(lambda b: self.can_start(b, False), lambda b: self._start_one(keys, b), batch)

        return lax.while_loop(lambda b: self.can_read(b, False) | self.can_start(b, False), once, batch)

    def start(
        self,
        params: PolicyParams,
        draft_params: Any,
        prompts: Prompts,
        keys: UInt32[Array, "b 2"],
        control: Control | None = None,
    ) -> Batch:
        """Read prompts and start sequences until rows or pages are used up."""
        return self.refill(params, draft_params, keys, self.empty_batch(prompts, control))
