"""Causal grouped-query attention of new tokens over the keys of their row.

Queries lie on a grid `[row, query]`; a query at position `p` reads slots `0..p`
of its row, a query at position -1 is padding. Queries that form a tree read the
slots before the tree and those of their ancestors. Softmax and accumulation are
in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.models.numerics import Numerics, opaque_int
from specrl_jax.models.tree import Tree

_MASKED = -1e30  # finite, so that a row of padding gives numbers and not NaN


def _group(q: Float[Array, "r q h c"], num_kv_heads: int) -> Float[Array, "r g mq c"]:
    """Put the `m` query heads that share a key head beside their queries: `[r, g, m * q, c]`."""
    rows, queries, heads, width = q.shape
    grouped = q.reshape(rows, queries, num_kv_heads, heads // num_kv_heads, width)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(rows, num_kv_heads, -1, width)


def _ungroup(out: Float[Array, "r g mq c"], queries: int) -> Float[Array, "r q h c"]:
    rows, groups, _, width = out.shape
    split = out.reshape(rows, groups, -1, queries, width)
    return split.transpose(0, 3, 1, 2, 4).reshape(rows, queries, -1, width)


def _scores(
    q: Float[Array, "r g mq c"], k: Float[Array, "r g s c"], allowed: Bool[Array, "r q s"]
) -> Float[Array, "r g mq s"]:
    """Scaled scores, masked where a query may not read."""
    scores = jnp.einsum("rgqc,rgsc->rgqs", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    allowed = jnp.tile(allowed, (1, q.shape[2] // allowed.shape[1], 1))
    return jnp.where(allowed[:, None], scores, _MASKED)


def _causal(positions: Int[Array, "r q"], slots: Int[Array, "s"]) -> Bool[Array, "r q s"]:
    return slots[None, None, :] <= positions[:, :, None]


def _below_ancestors(positions: Int[Array, "r q"], slots: Int[Array, "s"], tree: Tree) -> Bool[Array, "r q s"]:
    """Node `i` of a tree whose root has slot `positions[r, 0]` reads what is before the root, and its ancestors."""
    node = slots[None] - positions[:, :1]
    related = jnp.asarray(tree.sees)[:, jnp.clip(node, 0, tree.size - 1)].transpose(1, 0, 2)
    return (node < 0)[:, None] | ((node < tree.size)[:, None] & related)


def _plain_attention(
    q: Float[Array, "r q h c"],
    k: Float[Array, "r g s c"],
    v: Float[Array, "r g s c"],
    positions: Int[Array, "r q"],
    tree: Tree | None = None,
) -> Float[Array, "r q h c"]:
    slots = jnp.arange(k.shape[2], dtype=jnp.int32)
    allowed = _causal(positions, slots) if tree is None else _below_ancestors(positions, slots, tree)
    weights = jax.nn.softmax(_scores(_group(q, k.shape[1]), k, allowed), axis=-1)
    out = jnp.einsum("rgqs,rgsc->rgqc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return _ungroup(out, q.shape[1]).astype(q.dtype)


def _attend_block(
    q: Float[Array, "r q h c"],
    k: Float[Array, "rows g s c"],
    v: Float[Array, "rows g s c"],
    positions: Int[Array, "r q"],
    first_row: Int[Array, ""],
    key_block: int,
) -> Float[Array, "r q h c"]:
    """Online softmax over as many key blocks as the block's longest query needs."""
    grouped = _group(q, k.shape[1])
    block_shape = (q.shape[0], k.shape[1], key_block, k.shape[3])

    def body(j: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, out = carry
        start = (first_row, jnp.int32(0), j * key_block, jnp.int32(0))
        keys, values = lax.dynamic_slice(k, start, block_shape), lax.dynamic_slice(v, start, block_shape)
        slots = j * key_block + jnp.arange(key_block, dtype=jnp.int32)
        scores = _scores(grouped, keys, _causal(positions, slots))
        new_maximum = jnp.maximum(maximum, scores.max(-1))
        rescale = jnp.exp(maximum - new_maximum)
        weights = jnp.exp(scores - new_maximum[..., None])
        mixed = jnp.einsum("rgqs,rgsc->rgqc", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        return new_maximum, total * rescale + weights.sum(-1), out * rescale[..., None] + mixed

    shape = grouped.shape[:3]
    start = (jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32))
    blocks = jnp.max(positions) // key_block + 1
    _, total, out = lax.fori_loop(0, blocks, body, (*start, jnp.zeros(grouped.shape, jnp.float32)))
    out = out / jnp.maximum(total, 1e-30)[..., None]
    return _ungroup(out, q.shape[1]).astype(q.dtype)


def _pad_to(x: Array, axis: int, size: int, value: int = 0) -> Array:
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, max(0, size - x.shape[axis]))
    return jnp.pad(x, pads, constant_values=value)


def _round_up(size: int, block: int) -> int:
    return -(-size // block) * block


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _invariant_attention(
    numerics: Numerics,
    q: Float[Array, "r q h c"],
    k: Float[Array, "r g s c"],
    v: Float[Array, "r g s c"],
    positions: Int[Array, "r q"],
) -> Float[Array, "r q h c"]:
    """Blocks of rows x queries x keys of one fixed shape; a last row block overlaps the one before it."""
    rows, queries = positions.shape
    row_block, query_block = numerics.row_block, numerics.query_block
    padded_rows, padded_queries = max(rows, row_block), _round_up(queries, query_block)
    q = _pad_to(_pad_to(q, 1, padded_queries), 0, padded_rows)
    positions = _pad_to(_pad_to(positions, 1, padded_queries, -1), 0, padded_rows, -1)
    slots = _round_up(k.shape[2], numerics.key_block)
    k, v = (_pad_to(_pad_to(x, 2, slots), 0, padded_rows) for x in (k, v))
    query_blocks = padded_queries // query_block

    def body(i: Int[Array, ""], out: Array) -> Array:
        first_row = jnp.minimum((i // query_blocks) * row_block, padded_rows - row_block)
        corner = (first_row, (i % query_blocks) * query_block)
        q_block = lax.dynamic_slice(q, (*corner, jnp.int32(0), jnp.int32(0)), (row_block, query_block, *q.shape[2:]))
        visible = lax.dynamic_slice(positions, corner, (row_block, query_block))
        attended = _attend_block(q_block, k, v, visible, first_row, numerics.key_block)
        return lax.dynamic_update_slice(out, attended, (*corner, jnp.int32(0), jnp.int32(0)))

    blocks = -(-padded_rows // row_block) * query_blocks
    out = lax.fori_loop(0, opaque_int(blocks), body, jnp.zeros_like(q))
    return out[:rows, :queries]


def _invariant_fwd(numerics: Numerics, *inputs: Array) -> tuple[Array, tuple[Array, ...]]:
    return _invariant_attention(numerics, *inputs), inputs


def _invariant_bwd(numerics: Numerics, inputs: tuple[Array, ...], cotangent: Array) -> tuple[Array | None, ...]:
    *arrays, positions = inputs
    _, pullback = jax.vjp(lambda q, k, v: _plain_attention(q, k, v, positions), *arrays)
    return (*pullback(cotangent), None)


_invariant_attention.defvjp(_invariant_fwd, _invariant_bwd)


def _path_by_path(
    q: Float[Array, "r q h c"],
    k: Float[Array, "r g s c"],
    v: Float[Array, "r g s c"],
    positions: Int[Array, "r q"],
    tree: Tree,
    numerics: Numerics,
) -> Float[Array, "r q h c"]:
    """Every path of the tree as the chain that it would be: the same keys in the same slots, the same bits.

    Costs a copy of the layer's cache per path; plain numerics masks instead.
    """
    out = jnp.zeros_like(q)
    slots = jnp.arange(k.shape[2], dtype=jnp.int32)[None]
    for path in tree.leaf_paths:
        step = slots - positions[:, :1]
        on_path = (step >= 0) & (step < len(path)) & (positions[:, :1] >= 0)
        node = jnp.asarray(path, jnp.int32)[jnp.clip(step, 0, len(path) - 1)]
        source = jnp.where(on_path, positions[:, :1] + node, slots)[:, None, :, None]
        chain = (jnp.take_along_axis(x, source, axis=2, mode="clip") for x in (k, v))
        nodes = np.array(path)
        attended = _invariant_attention(numerics, q[:, nodes], *chain, positions[:, nodes])
        out = out.at[:, nodes].set(attended)
    return out


def attention(
    q: Float[Array, "r q h c"],
    k: Float[Array, "r g s c"],
    v: Float[Array, "r g s c"],
    positions: Int[Array, "r q"],
    numerics: Numerics,
    tree: Tree | None = None,
) -> Float[Array, "r q h c"]:
    """Attention of the query at `positions[r, q]` over slots `0..positions[r, q]` of row `r`.

    Args:
        q: rotated queries.
        k, v: rotated keys, and values, of every slot (a cache, or the sequence itself).
        positions: position of each query; -1 for padding, whose output is finite and meaningless.
        numerics: plain or invariant.
        tree: how the queries of a row hang together where they are no chain; the root's slot is its position.
    """
    if tree is not None and not tree.is_chain:
        if numerics.invariant:
            return _path_by_path(q, k, v, positions, tree, numerics)
        return _plain_attention(q, k, v, positions, tree)
    if numerics.invariant:
        return _invariant_attention(numerics, q, k, v, positions)
    return _plain_attention(q, k, v, positions)
