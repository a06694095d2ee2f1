"""Attention of a few queries over the pages of a cache, on a GPU.

Every program reads a share of the pages of one row and one head of keys, for all queries that read that head; the
shares are put together afterwards (Dao et al., "Flash-Decoding for long-context inference", 2023). Pages are read where
they lie, and only those that a row has.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int, Shaped

_MASKED = -1e30
_LEAST_QUERIES, _MOST_QUERIES = 16, 128  # of a program: what a matrix unit takes, and what its registers hold
_PROGRAMS = 256  # about so many at a time fill a GPU
_NODES = 32  # of a tree, as the bits of a word
_SHARED_BYTES = 160 * 1024  # that a program may keep close by, on an A100 or later
_MOST_STAGES = 3  # pages on their way at a time


def kernel_fits(queries: int, page_size: int, head_dim: int, itemsize: int, nodes: int) -> bool:
    """Whether the kernel takes so many queries of each head of keys, pages of that shape and trees of that size."""
    powers = all(size >= 16 and size == _next_power(size) for size in (page_size, head_dim))
    few = queries <= _MOST_QUERIES and nodes <= _NODES
    return few and powers and _stages(queries, page_size, head_dim, itemsize) > 0


def _stages(queries: int, page_size: int, head_dim: int, itemsize: int) -> int:
    """Pages of keys and values that there is room for beside the queries."""
    beside = _padded(queries) * head_dim * itemsize
    return min(_MOST_STAGES, (_SHARED_BYTES - beside) // (2 * page_size * head_dim * itemsize))


def _padded(queries: int) -> int:
    return max(_LEAST_QUERIES, _next_power(queries))


def _next_power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _read_share(
    q_ref: Any,
    below_ref: Any,
    bits_ref: Any,
    ends_ref: Any,
    table_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    *,
    queries: int,
    padded: int,
) -> None:
    """A running softmax over one share of a row's pages."""
    row, group, split = (pl.program_id(axis) for axis in range(3))
    splits, groups, page_size = out_ref.shape[1], keys_ref.shape[1], keys_ref.shape[2]
    heads = q_ref.shape[1] // queries
    shared = heads // groups
    pages = lax.div(ends_ref[row] + jnp.int32(page_size - 1), jnp.int32(page_size))
    share = lax.div(pages + jnp.int32(splits - 1), jnp.int32(splits))
    first = split * share
    # Query `i` of head `group * shared + j` is number `i * shared + j` of this program.
    number = lax.iota(jnp.int32, padded)
    query = lax.div(number, jnp.int32(shared))
    there = number < queries * shared
    index = query * heads + group * shared + lax.rem(number, jnp.int32(shared))
    lines = jnp.broadcast_to(index[:, None], (padded, q_ref.shape[2]))
    columns = lax.broadcasted_iota(jnp.int32, lines.shape, 1)
    everywhere = jnp.broadcast_to(there[:, None], lines.shape)
    q = triton.load(q_ref.at[row, lines, columns], mask=everywhere, other=0)
    below = triton.load(below_ref.at[row, query], mask=there, other=0)
    bits = triton.load(bits_ref.at[row, query], mask=there, other=0)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def page(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, top, total = carry
        where = table_ref[row, j]
        keys, values = keys_ref[where, group], values_ref[where, group]
        scores = triton.dot(q, keys, trans_b=True, precision=precision) * q.shape[1] ** -0.5
        ahead = (j * page_size + lax.broadcasted_iota(jnp.int32, scores.shape, 1)) - below[:, None]
        own = lax.shift_right_logical(jnp.broadcast_to(bits[:, None], ahead.shape), jnp.clip(ahead, 0, _NODES - 1)) & 1
        reads = (ahead < 0) | ((ahead < _NODES) & (own == 1))
        scores = jnp.where(reads, scores, _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        rescale = jnp.exp(top - new_top)
        weights = jnp.where(reads, jnp.exp(scores - new_top[:, None]), 0.0)
        mixed = triton.dot(weights.astype(values.dtype), values, precision=precision)
        return out * rescale[:, None] + mixed, new_top, total * rescale + jnp.sum(weights, axis=1)

    nothing = jnp.zeros((padded,), jnp.float32)
    start = jnp.zeros(q.shape, jnp.float32), nothing + _MASKED, nothing
    out, top, total = lax.fori_loop(first, jnp.minimum(first + share, pages), page, start)
    triton.store(out_ref.at[row, split, lines, columns], out, mask=everywhere)
    triton.store(top_ref.at[row, split, index], top, mask=there)
    triton.store(total_ref.at[row, split, index], total, mask=there)


def _join_shares(out_ref: Any, top_ref: Any, total_ref: Any, joined_ref: Any) -> None:
    """The shares of one query as one."""
    row, index = pl.program_id(0), pl.program_id(1)
    top = top_ref[row, :, index]
    scale = jnp.exp(top - jnp.max(top))
    total = jnp.maximum(jnp.sum(total_ref[row, :, index] * scale), 1e-30)
    out = jnp.sum(out_ref[row, :, index] * scale[:, None], axis=0) / total
    joined_ref[row, index] = out.astype(joined_ref.dtype)


def few_queries_attention(
    q: Float[Array, "r q h c"],
    keys: Shaped[Array, "p g s c"],
    values: Shaped[Array, "p g s c"],
    table: Int[Array, "r m"],
    below: Int[Array, "r q"],
    bits: Int[Array, "r q"],
    ends: Int[Array, "r"],
    interpret: bool = False,
) -> Float[Array, "r q h c"]:
    """Attention of a few queries of each row; of a query that reads nothing it is 0.

    Args:
        q: rotated queries.
        keys, values: pools of one layer.
        table: pages of every row; every page that holds one of the `ends` slots is in the pool.
        below: slots before this one are read.
        bits: of the slots from there on, those that are read.
        ends: slots of each row that any of its queries may read.
        interpret: run the kernels as XLA operations, on any backend.
    """
    rows, queries, heads, width = q.shape
    groups, lines = keys.shape[1], queries * heads
    padded, sizes = _padded(lines // groups), (*keys.shape[2:], keys.dtype.itemsize)
    splits = _next_power(max(1, min(table.shape[1], -(-_PROGRAMS // (rows * groups)))))
    shares = [jax.ShapeDtypeStruct((rows, splits, lines, *tail), jnp.float32) for tail in ((width,), (), ())]
    out, top, total = pl.pallas_call(
        functools.partial(_read_share, queries=queries, padded=padded),
        out_shape=shares,
        grid=(rows, groups, splits),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=_stages(padded, *sizes)),
        interpret=interpret,
        name="few_queries_attention",
    )(q.reshape(rows, lines, width), below, bits, ends, table, keys, values)
    joined = pl.pallas_call(
        _join_shares,
        out_shape=jax.ShapeDtypeStruct((rows, lines, width), q.dtype),
        grid=(rows, lines),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="join_shares",
    )(out, top, total)
    return joined.reshape(q.shape)
