"""Paged key/value cache (after Kwon et al., arXiv 2309.06180) with one length per row.

Keys and values lie in a pool of pages; a row's table names the page of every `page_size`
slots of its sequence, so that rows grow, end and share a prompt without moving anything.
Slot `s` of a row holds position `s` of its sequence. Entries at or beyond `length` do not
count: a query at position `p` reads slots `0..p` only, and a token is written before it is
read. Rejected drafts therefore need no rollback; the next round overwrites them.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from specrl_jax.models.backend import backend
from specrl_jax.models.numerics import Numerics

NO_PAGE = 2**30
"""Stands in a table where there is no page: beyond every pool, so that writes are dropped."""


@struct.dataclass
class KVCache:
    """Pages of every layer and the rows that read them.

    keys, values: one pool `[pages, kv_heads, page_size, head_dim]` per layer, of `stored_dtype`; where `slots_last`,
        keys are `[pages, kv_heads, head_dim, page_size]`.
    table: page of every `page_size` slots of a row, `[rows, pages per row]`; entries that no token needs may be stale.
    length: tokens of each row that count, `[rows]`.
    """

    keys: tuple[Shaped[Array, "p g _ _"], ...]
    values: tuple[Shaped[Array, "p g s c"], ...]
    table: Int[Array, "r m"]
    length: Int[Array, "r"]

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.values[0].shape[2]

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return self.table.shape[1] * self.page_size


def pages_for(slots: int, numerics: Numerics) -> int:
    """Pages that hold so many slots; a page is a key block of the attention."""
    return -(-slots // numerics.key_block)


def init_pool(
    *, num_layers: int, num_kv_heads: int, head_dim: int, pages: int, dtype: Any, numerics: Numerics
) -> tuple[tuple[Shaped[Array, "p g _ _"], ...], tuple[Shaped[Array, "p g s c"], ...]]:
    """Empty pages for keys and for values, one array per layer."""
    page = (numerics.key_block, head_dim)
    shapes = ((pages, num_kv_heads, *(page[::-1] if slots_last() else page)), (pages, num_kv_heads, *page))
    keys, values = (tuple(jnp.zeros(shape, stored_dtype(dtype)) for _ in range(num_layers)) for shape in shapes)
    return keys, values


def slots_last() -> bool:
    """Whether keys lie with the slots of a page side by side. A CPU multiplies queries with such keys as they are, in
    0.7 to 0.8 of the time (36 layers of 2 heads of 64, 1 to 16 rows, 1 to 7 queries); elsewhere it is all the same."""
    return backend() == "cpu"


def own_pages(rows: int, pages: int) -> Int[Array, "r m"]:
    """A table that gives every row so many pages of its own."""
    return jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)


def locate(
    table: Int[Array, "r m"], page_size: int, rows: Int[Array, "*n"], slots: Int[Array, "*n"]
) -> tuple[Int[Array, "*n"], Int[Array, "*n"]]:
    """Page and offset of slots; a slot of -1, or beyond the table, lies beyond the pool, where writes are dropped."""
    page = table.at[rows, slots // page_size].get(mode="fill", fill_value=NO_PAGE)
    return jnp.where(slots < 0, NO_PAGE, page), slots % page_size


def write_keys(
    pool: Shaped[Array, "p g _ _"], new: Float[Array, "*n g c"], pages: Int[Array, "*n"], offsets: Int[Array, "*n"]
) -> Shaped[Array, "p g _ _"]:
    """Write the keys of token `n` where `locate` says; padding is dropped."""
    if not slots_last():
        return write_values(pool, new, pages, offsets)
    return pool.at[pages, :, :, offsets].set(_stored(new), mode="drop")


def write_values(
    pool: Shaped[Array, "p g s c"], new: Float[Array, "*n g c"], pages: Int[Array, "*n"], offsets: Int[Array, "*n"]
) -> Shaped[Array, "p g s c"]:
    """`write_keys` for values."""
    return pool.at[pages, :, offsets].set(_stored(new), mode="drop")


def read_pages(
    keys: Shaped[Array, "p g _ _"], values: Shaped[Array, "p g s c"], pages: Int[Array, "r"]
) -> tuple[Float[Array, "r g c s"], Float[Array, "r g s c"]]:
    """A page of keys, slots last, and of values for each row."""
    k, v = (_read(pool.at[pages].get(mode="clip")) for pool in (keys, values))
    return k if slots_last() else k.swapaxes(2, 3), v


def read_slots(
    keys: Shaped[Array, "p g _ _"], values: Shaped[Array, "p g s c"], pages: Int[Array, "*n"], offsets: Int[Array, "*n"]
) -> tuple[Float[Array, "*n g c"], Float[Array, "*n g c"]]:
    """The keys and values of a slot of a page for each token."""
    k = keys.at[pages, :, :, offsets] if slots_last() else keys.at[pages, :, offsets]
    return _read(k.get(mode="clip")), _read(values.at[pages, :, offsets].get(mode="clip"))


def stored_dtype(dtype: Any) -> Any:
    """What pages are made of. A CPU keeps bfloat16 as the integers that it is: XLA would make a float32 copy of a whole
    pool to touch one of its slots."""
    return jnp.uint16 if dtype == jnp.bfloat16 and backend() == "cpu" else dtype


def _stored(x: Array) -> Array:
    dtype = stored_dtype(x.dtype)
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _read(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def keep_path(cache: KVCache, first: Int[Array, "r"], path: Int[Array, "r q"]) -> KVCache:
    """Move slots `first + path[:, j]` of each row to `first + j`: the accepted path of a tree, without its siblings.

    Slots beyond the capacity are left out.
    """
    rows = jnp.broadcast_to(jnp.arange(path.shape[0], dtype=jnp.int32)[:, None], path.shape)
    source = locate(cache.table, cache.page_size, rows, first[:, None] + path)
    target = first[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    pages, offsets = locate(cache.table, cache.page_size, rows, target)

    def move(
        keys: Shaped[Array, "p g _ _"], values: Shaped[Array, "p g s c"]
    ) -> tuple[Shaped[Array, "p g _ _"], Shaped[Array, "p g s c"]]:
        k, v = read_slots(keys, values, *source)
        return write_keys(keys, k, pages, offsets), write_values(values, v, pages, offsets)

    moved = [move(keys, values) for keys, values in zip(cache.keys, cache.values, strict=True)]
    keys, values = zip(*moved, strict=True)
    return replace(cache, keys=keys, values=values)
