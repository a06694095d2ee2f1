"""The pages of a rollout's cache: who holds them, who gets the next one.

Rows of a group hold the full pages of their prompt together. A row takes a page when its
tokens need one and gives all back when it ends. The pool may be smaller than what all rows
could grow to: then a row without its next page sits rounds out. The oldest row never does,
because what it may still need is kept back from the others; so every row comes to its end.
"""

from dataclasses import replace

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from specrl_jax.models.cache import NO_PAGE, KVCache
from specrl_jax.rollout.rows import Rows


@struct.dataclass
class Pool:
    """keys, values: pages of every layer. holders: rows and waiting prompts that hold each page, `[p]`; 0 is free."""

    keys: tuple[Shaped[Array, "p g _ _"], ...]
    values: tuple[Shaped[Array, "p g s c"], ...]
    holders: Int[Array, "p"]

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.values[0].shape[2]

    @property
    def free(self) -> Int[Array, ""]:
        """Pages that nobody holds."""
        return jnp.sum(self.holders == 0, dtype=jnp.int32)

    def cache(self, rows: Rows) -> KVCache:
        """The cache of some rows."""
        return KVCache(self.keys, self.values, rows.table, rows.length)

    def with_cache(self, cache: KVCache) -> "Pool":
        """The pool after a forward has written into it."""
        return replace(self, keys=cache.keys, values=cache.values)


def grant(pool: Pool, wanted: Bool[Array, "*n"]) -> tuple[Int[Array, "*n"], Pool]:
    """A free page for every one that is wanted, `NO_PAGE` for the others; the caller knows that there are enough."""
    flat = wanted.reshape(-1)
    rank = jnp.cumsum(flat, dtype=jnp.int32)
    free_so_far = jnp.cumsum(pool.holders == 0, dtype=jnp.int32)
    pages = jnp.searchsorted(free_so_far, rank).astype(jnp.int32)
    pages = jnp.where(flat, pages, NO_PAGE)
    return pages.reshape(wanted.shape), replace(pool, holders=pool.holders.at[pages].add(1, mode="drop"))


def hold(pool: Pool, pages: Int[Array, "*n"], change: int) -> Pool:
    """Count one holder of each page more (`change` 1) or less (-1); `NO_PAGE` is passed over."""
    return replace(pool, holders=pool.holders.at[pages].add(change, mode="drop"))


def kept_back(rows: Rows) -> Int[Array, ""]:
    """Pages that the oldest row may still need; those of a whole row when none is live."""
    oldest = jnp.argmin(jnp.where(rows.done, NO_PAGE, rows.sequence))
    return rows.table.shape[1] - jnp.where(rows.done[oldest], 0, rows.used[oldest])


def grow(rows: Rows, pool: Pool, slots: int | Int[Array, ""]) -> tuple[Rows, Pool, Bool[Array, "r"]]:
    """Give the rows pages for `slots` more tokens each, the oldest first.

    Returns:
        Rows, pool, and which live rows sit this round out for want of a page.
    """
    most = rows.table.shape[1]

    def lacking(rows: Rows) -> Bool[Array, "r"]:
        needed = jnp.minimum((rows.length + (slots - 1)) // pool.page_size + 1, most)
        return ~rows.done & (rows.used < needed)

    def granted(rows: Rows, pool: Pool) -> Bool[Array, "r"]:
        """Of the rows that lack a page, the oldest, and others while there is more than it may need."""
        wanting = lacking(rows)
        live = jnp.where(rows.done, NO_PAGE, rows.sequence)
        oldest = live == jnp.min(live)
        older = (live[None] < live[:, None]) & (wanting & ~oldest)[None]
        rank = jnp.sum(older, axis=1, dtype=jnp.int32)
        return wanting & (oldest | (rank < pool.free - kept_back(rows)))

    def give(rows: Rows, pool: Pool) -> tuple[Rows, Pool]:
        wanted = granted(rows, pool)
        pages, pool = grant(pool, wanted)
        column = jnp.where(wanted, rows.used, most)
        row = jnp.arange(wanted.shape[0], dtype=jnp.int32)
        table = rows.table.at[row, column].set(pages, mode="drop")
        return replace(rows, table=table, used=rows.used + wanted.astype(jnp.int32)), pool

    def more(state: tuple[Rows, Int[Array, "p"], Bool[Array, ""]]) -> Bool[Array, ""]:
        return state[2]

    def once(state: tuple[Rows, Int[Array, "p"], Bool[Array, ""]]) -> tuple[Rows, Int[Array, "p"], Bool[Array, ""]]:
        rows, pool_now = give(state[0], replace(pool, holders=state[1]))
        return rows, pool_now.holders, jnp.any(granted(rows, pool_now))

    # In most rounds no row needs a page, and the loop is not entered.
    rows, holders, _ = lax.while_loop(more, once, (rows, pool.holders, jnp.any(lacking(rows))))
    return rows, replace(pool, holders=holders), lacking(rows)


def leave(rows: Rows, pool: Pool, ended: Bool[Array, "r"]) -> tuple[Rows, Pool]:
    """Rows that have ended give their pages back."""
    held = jnp.where(ended[:, None], rows.table, NO_PAGE)
    rows = replace(
        rows,
        table=jnp.where(ended[:, None], NO_PAGE, rows.table),
        used=jnp.where(ended, 0, rows.used),
        shared=jnp.where(ended, 0, rows.shared),
    )
    return rows, hold(pool, held, -1)


def occupancy(rows: Rows, pool: Pool) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Pages that somebody holds, and tokens in them, a shared prompt counted once."""
    held = jnp.sum(pool.holders > 0, dtype=jnp.int32)
    own = jnp.sum(jnp.where(rows.done, 0, rows.used - rows.shared))
    tokens = jnp.sum(jnp.where(rows.done, 0, rows.length - rows.shared * pool.page_size))
    return held, tokens + (held - own) * pool.page_size
