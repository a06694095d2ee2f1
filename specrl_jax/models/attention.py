"""Causal grouped-query attention of new tokens over the keys of their row.

Queries lie on a grid `[row, query]`; a query at position `p` reads slots `0..p`
of its row, a query at position -1 is padding. Queries that form a tree read the
slots before the tree and those of their ancestors; where queries stand beside others
of their position, each reads the slots before it and its own. Softmax and accumulation
are in float32.

Over a cache, and always in invariant numerics, keys come in blocks with a running
softmax (Milakov and Gimelshein, arXiv 1805.02867), as many blocks as the longest
row needs; a block of a cache is a page. Without a cache, plain numerics attend in blocks
of queries. A kernel whose bits of a query do not depend on the others serves both numerics.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from specrl_jax.kernels import gpu_attention
from specrl_jax.models.backend import backend
from specrl_jax.models.cache import own_pages, read_pages, read_slots, slots_last
from specrl_jax.models.few_tokens import on_a_cpu
from specrl_jax.models.linear import wide_dtype
from specrl_jax.models.numerics import Numerics, in_chunks, opaque_int
from specrl_jax.models.tree import Tree
from specrl_jax.parallel.mesh import TENSOR
from specrl_jax.parallel.sharding import by_hand_too, compiler_split

_AT_ONCE, _QUERIES, _SPANS = 512, 128, 4
"""Of the training forward: queries of a row that attend at once; above that, queries whose scores exist at a time; and
spans of them with keys of their own, the more the fewer scores are masked and the longer it compiles."""

_SIDE_BY_SIDE = 32  # queries of a sequence that a kernel for a few takes

_MASKED = -1e30  # finite, so that a row of padding gives numbers and not NaN

Take = Callable[[Int[Array, ""]], tuple[Float[Array, "r g c s"], Float[Array, "r g s c"]]]
"""`take(j)` gives the keys, slots last, and values of the rows' block `j`."""


def _group(q: Float[Array, "r q h c"], num_kv_heads: int) -> Float[Array, "r g mq c"]:
    """Put the `m` query heads that share a key head beside their queries: `[r, g, m * q, c]`."""
    rows, queries, heads, width = q.shape
    grouped = q.reshape(rows, queries, num_kv_heads, heads // num_kv_heads, width)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(rows, num_kv_heads, -1, width)


def _ungroup(out: Float[Array, "r g mq c"], queries: int) -> Float[Array, "r q h c"]:
    rows, groups, _, width = out.shape
    split = out.reshape(rows, groups, -1, queries, width)
    return split.transpose(0, 3, 1, 2, 4).reshape(rows, queries, -1, width)


def _masked(scores: Float[Array, "r g mq s"], allowed: Bool[Array, "r q s"]) -> Float[Array, "r g mq s"]:
    """Scores where a query may read, nothing where it may not."""
    allowed = jnp.tile(allowed, (1, scores.shape[2] // allowed.shape[1], 1))
    return jnp.where(allowed[:, None], scores, _MASKED)


def _causal(positions: Int[Array, "r q"], slots: Int[Array, "s"]) -> Bool[Array, "r q s"]:
    return slots[None, None, :] <= positions[:, :, None]


def _beside(positions: Int[Array, "r q"], slots: Int[Array, "s"], own: Int[Array, "r q"]) -> Bool[Array, "r q s"]:
    """A query reads what is before its position, and its own slot."""
    return (slots[None, None] < positions[:, :, None]) | (slots[None, None] == own[:, :, None])


def _below_ancestors(positions: Int[Array, "r q"], slots: Int[Array, "s"], tree: Tree) -> Bool[Array, "r q s"]:
    """Node `i` of a tree whose root has slot `positions[r, 0]` reads what is before the root, and its ancestors."""
    node = slots[None] - positions[:, :1]
    related = jnp.asarray(tree.sees)[:, jnp.clip(node, 0, tree.size - 1)].transpose(1, 0, 2)
    return (node < 0)[:, None] | ((node < tree.size)[:, None] & related)


def _at_once(
    q: Float[Array, "r q h c"],
    k: Float[Array, "r g s c"],
    v: Float[Array, "r g s c"],
    positions: Int[Array, "r q"],
) -> Float[Array, "r q h c"]:
    """Attention without a cache; of long sequences the scores of a block of queries exist at a time, also backward.

    Queries stand in order of their slots, so that a span of blocks reads the keys up to its own end alone.
    """
    queries = q.shape[1]
    if queries <= _AT_ONCE:
        return _attend_all(q, k, v, positions)
    span = _round_up(-(-queries // _SPANS), _QUERIES)
    outs = []
    for start in range(0, queries, span):
        end = min(start + span, queries)
        keys_and_values = k[:, :, :end], v[:, :, :end]
        own = (jnp.moveaxis(x[:, start:end], 1, 0) for x in (q, positions))
        outs.append(in_chunks(_attend_queries, keys_and_values, tuple(own), _QUERIES))
    return jnp.moveaxis(jnp.concatenate(outs), 0, 1)


def _attend_queries(
    keys_and_values: tuple[Array, Array], q: Float[Array, "q r h c"], positions: Int[Array, "q r"]
) -> Float[Array, "q r h c"]:
    """`_attend_all` with the queries first."""
    out = _attend_all(jnp.moveaxis(q, 0, 1), *keys_and_values, positions.T)
    return jnp.moveaxis(out, 1, 0)


def _attend_all(
    q: Float[Array, "r q h c"],
    k: Float[Array, "r g s c"],
    v: Float[Array, "r g s c"],
    positions: Int[Array, "r q"],
) -> Float[Array, "r q h c"]:
    allowed = _causal(positions, jnp.arange(k.shape[2], dtype=jnp.int32))
    scores = jnp.einsum("rgqc,rgsc->rgqs", _group(q, k.shape[1]), k, preferred_element_type=wide_dtype(q))
    weights = jax.nn.softmax(_masked(scores * q.shape[-1] ** -0.5, allowed), axis=-1)
    out = jnp.einsum("rgqs,rgsc->rgqc", weights.astype(v.dtype), v, preferred_element_type=wide_dtype(q))
    return _ungroup(out, q.shape[1]).astype(q.dtype)


def _in_blocks(
    q: Float[Array, "r q h c"],
    positions: Int[Array, "r q"],
    take: Take,
    num_kv_heads: int,
    block: int,
    allowed_in: Callable[[Int[Array, "s"]], Bool[Array, "r q s"]],
    last_slot: Int[Array, ""],
) -> Float[Array, "r q h c"]:
    """A running softmax over the blocks up to that of `last_slot`."""
    grouped = _group(q, num_kv_heads) * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)

    def body(j: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, out = carry
        keys, values = take(j)
        # The barrier keeps the product apart from what follows, whatever that is in a program: the same bits in all.
        scores = jnp.einsum("rgmc,rgcs->rgms", grouped, keys, preferred_element_type=jnp.float32)
        scores = _masked(lax.optimization_barrier(scores), allowed_in(j * block + jnp.arange(block, dtype=jnp.int32)))
        new_maximum = jnp.maximum(maximum, scores.max(-1))
        rescale = jnp.exp(maximum - new_maximum)
        weights = jnp.exp(scores - new_maximum[..., None])
        mixed = jnp.einsum("rgqs,rgsc->rgqc", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return new_maximum, total * rescale + weights.sum(-1), out * rescale[..., None] + mixed

    shape = grouped.shape[:3]
    start = (jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32))
    blocks = last_slot // block + 1
    _, total, out = lax.fori_loop(0, blocks, body, (*start, jnp.zeros(grouped.shape, jnp.float32)))
    out = out / jnp.maximum(total, 1e-30)[..., None]
    return _ungroup(out, q.shape[1]).astype(q.dtype)


def _pad_to(x: Array, axis: int, size: int, value: int = 0) -> Array:
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, max(0, size - x.shape[axis]))
    return jnp.pad(x, pads, constant_values=value)


def _round_up(size: int, block: int) -> int:
    return -(-size // block) * block


def _invariant(
    numerics: Numerics,
    q: Float[Array, "r q h c"],
    positions: Int[Array, "r q"],
    take_rows: Callable[[Int[Array, ""], Int[Array, ""]], tuple[Array, Array]],
    num_kv_heads: int,
) -> Float[Array, "r q h c"]:
    """Blocks of rows x queries x keys of one fixed shape; a last row block overlaps the one before it.

    `take_rows(first, j)` are the keys and values in block `j` of `row_block` rows from `first` on.
    """
    rows, queries = positions.shape
    row_block, query_block = numerics.row_block, numerics.query_block
    padded_rows, padded_queries = max(rows, row_block), _round_up(queries, query_block)
    q = _pad_to(_pad_to(q, 1, padded_queries), 0, padded_rows)
    positions = _pad_to(_pad_to(positions, 1, padded_queries, -1), 0, padded_rows, -1)
    query_blocks = padded_queries // query_block

    def body(i: Int[Array, ""], out: Array) -> Array:
        first_row = jnp.minimum((i // query_blocks) * row_block, padded_rows - row_block)
        corner = (first_row, (i % query_blocks) * query_block)
        q_block = lax.dynamic_slice(q, (*corner, jnp.int32(0), jnp.int32(0)), (row_block, query_block, *q.shape[2:]))
        visible = lax.dynamic_slice(positions, corner, (row_block, query_block))
        attended = _in_blocks(
            q_block,
            visible,
            functools.partial(take_rows, first_row),
            num_kv_heads,
            numerics.key_block,
            functools.partial(_causal, visible),
            jnp.max(visible),
        )
        return lax.dynamic_update_slice(out, attended, (*corner, jnp.int32(0), jnp.int32(0)))

    blocks = -(-padded_rows // row_block) * query_blocks
    out = lax.fori_loop(0, opaque_int(blocks), body, jnp.zeros_like(q))
    return out[:rows, :queries]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _invariant_at_once(
    numerics: Numerics,
    q: Float[Array, "r q h c"],
    k: Float[Array, "r g s c"],
    v: Float[Array, "r g s c"],
    positions: Int[Array, "r q"],
) -> Float[Array, "r q h c"]:
    """Invariant attention to the sequence itself; its gradient is that of the plain one."""
    rows, kv_heads, slots, width = k.shape
    padded = _round_up(slots, numerics.key_block)
    if slots_last():
        pages = _as_pages(_pad_to(k, 2, padded), _pad_to(v, 2, padded), numerics.key_block)
        if _bits_of_its_own(q, pages[1]):
            return _some_at_a_time(q, *pages, own_pages(rows, padded // numerics.key_block), positions)
    k, v = (_pad_to(_pad_to(x, 2, padded), 0, max(rows, numerics.row_block)) for x in (k, v))
    row_block, block, none = numerics.row_block, numerics.key_block, jnp.int32(0)
    # As keys of a cache lie, so that the products are the same operations.
    k = lax.optimization_barrier(k.swapaxes(2, 3)) if slots_last() else k

    def take_rows(first: Int[Array, ""], j: Int[Array, ""]) -> tuple[Array, Array]:
        start, shape = (first, none, j * block, none), (row_block, kv_heads, block, width)
        if slots_last():
            keys = lax.dynamic_slice(k, (first, none, none, j * block), (row_block, kv_heads, width, block))
        else:
            keys = lax.dynamic_slice(k, start, shape).swapaxes(2, 3)
        return keys, lax.dynamic_slice(v, start, shape)

    return _invariant(numerics, q, positions, take_rows, kv_heads)


def _invariant_fwd(numerics: Numerics, *inputs: Array) -> tuple[Array, tuple[Array, ...]]:
    return _invariant_at_once(numerics, *inputs), inputs


def _invariant_bwd(numerics: Numerics, inputs: tuple[Array, ...], cotangent: Array) -> tuple[Array | None, ...]:
    *arrays, positions = inputs
    _, pullback = jax.vjp(lambda q, k, v: _at_once(q, k, v, positions), *arrays)
    return (*pullback(cotangent), None)


_invariant_at_once.defvjp(_invariant_fwd, _invariant_bwd)


def _invariant_paged(
    q: Float[Array, "r q h c"],
    keys: Shaped[Array, "p g _ _"],
    values: Shaped[Array, "p g s c"],
    table: Int[Array, "r m"],
    positions: Int[Array, "r q"],
    numerics: Numerics,
    path: tuple[int, ...] | None = None,
) -> Float[Array, "r q h c"]:
    """Invariant attention over pages; with `path`, as if the nodes of a tree on it followed each other.

    On a path the queries are its nodes, and slot `root + j` is read from that of the `j`-th node.
    """
    page_size = values.shape[2]
    if _bits_of_its_own(q, values):
        if path is None:
            return _some_at_a_time(q, keys, values, table, positions)
        slots = jnp.arange(table.shape[1] * page_size, dtype=jnp.int32)[None]
        k, v = _read_along(path, keys, values, table, positions[:, :1], slots)
        pages = _as_pages(k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), page_size)
        return _some_at_a_time(q, *pages, own_pages(*table.shape), positions)
    table = _pad_to(table, 0, numerics.row_block)
    roots = _pad_to(positions[:, :1], 0, numerics.row_block, -1)

    def take_rows(first: Int[Array, ""], j: Int[Array, ""]) -> tuple[Array, Array]:
        pages = lax.dynamic_slice_in_dim(table, first, numerics.row_block)
        if path is None:
            page = lax.dynamic_index_in_dim(pages, j, 1, keepdims=False)
            return read_pages(keys, values, page)
        root = lax.dynamic_slice_in_dim(roots, first, numerics.row_block)
        slots = j * page_size + jnp.arange(page_size, dtype=jnp.int32)[None]
        k, v = _read_along(path, keys, values, pages, root, slots)
        return k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)

    return _invariant(numerics, q, positions, take_rows, keys.shape[1])


def _read_along(
    path: tuple[int, ...],
    keys: Shaped[Array, "p g _ _"],
    values: Shaped[Array, "p g s c"],
    table: Int[Array, "r m"],
    root: Int[Array, "r 1"],
    slots: Int[Array, "1 n"],
) -> tuple[Float[Array, "r n g c"], Float[Array, "r n g c"]]:
    """Keys and values of slots, where the nodes on a path of a tree with such roots are said to follow each other."""
    page_size, step = values.shape[2], slots - root
    on_path = (step >= 0) & (step < len(path)) & (root >= 0)
    node = jnp.asarray(path, jnp.int32)[jnp.clip(step, 0, len(path) - 1)]
    source = jnp.where(on_path, root + node, slots)
    page = jnp.take_along_axis(table, source // page_size, axis=1, mode="clip")
    return read_slots(keys, values, page, source % page_size)


def _as_pages(
    k: Float[Array, "r g s c"], v: Float[Array, "r g s c"], page_size: int
) -> tuple[Float[Array, "p g c z"], Float[Array, "p g z c"]]:
    """A pool of a CPU's with the pages of one row after another; their size divides the slots."""
    rows, heads, slots, width = k.shape
    k, v = (x.reshape(rows, heads, slots // page_size, page_size, width).swapaxes(1, 2) for x in (k, v))
    return k.swapaxes(3, 4).reshape(-1, heads, width, page_size), v.reshape(-1, heads, page_size, width)


def _bits_of_its_own(q: Float[Array, "r q h c"], values: Shaped[Array, "p g s c"]) -> bool:
    """Whether the kernel for such heads and pages is one whose bits of a query do not depend on the others."""
    return backend() == "cpu" and _kernel_fits(q[:, :1], values, None)


def _some_at_a_time(
    q: Float[Array, "r q h c"],
    keys: Shaped[Array, "p g _ _"],
    values: Shaped[Array, "p g s c"],
    table: Int[Array, "r m"],
    positions: Int[Array, "r q"],
) -> Float[Array, "r q h c"]:
    """The kernel for CPUs with any number of queries, some of a row as if they were a row."""
    rows, queries = positions.shape
    count = max(1, min(queries, _SIDE_BY_SIDE))
    while not _kernel_fits(q[:, :count], values, None):
        count //= 2
    parts = -(-queries // count)
    q, positions = _pad_to(q, 1, parts * count), _pad_to(positions, 1, parts * count, -1)
    some = q.reshape(rows * parts, count, *q.shape[2:]), positions.reshape(rows * parts, count)
    out = _in_kernel(some[0], keys, values, jnp.repeat(table, parts, axis=0), some[1], None)
    return out.reshape(rows, parts * count, *q.shape[2:])[:, :queries]


def _kernel_fits(q: Float[Array, "r q h c"], values: Shaped[Array, "p g s c"], tree: Tree | None) -> bool:
    """Whether there is a kernel for such queries and pages on this backend."""
    heads, page_size, width = values.shape[1:]
    if heads % compiler_split(TENSOR):  # heads of keys and values are whole on every device
        return False
    sharing, nodes = q.shape[1] * q.shape[2] // heads, 0 if tree is None else tree.size
    if backend() == "gpu":
        return gpu_attention.kernel_fits(sharing, page_size, width, values.dtype.itemsize, nodes)
    if not on_a_cpu() or not q.dtype == values.dtype == jnp.float32:
        return False
    from specrl_jax.kernels import cpu_attention

    return cpu_attention.kernel_fits(sharing, page_size, width, nodes)


def best_apart(q: Float[Array, "n h c"], values: Shaped[Array, "p g s c"]) -> bool:
    """Whether tokens that are packed are read as rows of one query each: by the kernel for CPUs, which takes the heads
    of a token together anyhow. Laying them on a grid and picking them up again costs more."""
    return _bits_of_its_own(q[:, None], values)


def _in_kernel(
    q: Float[Array, "r q h c"],
    keys: Shaped[Array, "p g _ _"],
    values: Shaped[Array, "p g s c"],
    table: Int[Array, "r m"],
    positions: Int[Array, "r q"],
    tree: Tree | None,
    own_slots: Int[Array, "r q"] | None = None,
) -> Float[Array, "r q h c"]:
    """Attention of a few queries over pages, in a kernel written by hand."""
    slots = table.shape[1] * values.shape[2]
    below, bits, ends = positions + 1, jnp.zeros_like(positions), jnp.minimum(jnp.max(positions, axis=1) + 1, slots)
    if tree is not None:
        live, root = positions[:, :1] >= 0, jnp.maximum(positions[:, :1], 0)
        words = np.asarray(tree.sees).astype(np.uint32) @ (np.uint32(1) << np.arange(tree.size, dtype=np.uint32))
        below = jnp.broadcast_to(root, positions.shape)
        bits = jnp.where(live, jnp.asarray(words.astype(np.int32))[None], 0)
        # A row that is not live has no pages: nothing of it may be read.
        ends = jnp.where(live, jnp.minimum(root + tree.size, slots), 0)[:, 0]
    elif own_slots is not None:
        ahead = own_slots - positions
        below = jnp.where(ahead > 0, positions, below)
        bits = jnp.where(ahead > 0, jnp.left_shift(1, ahead), 0)
        ends = jnp.minimum(jnp.max(own_slots, axis=1) + 1, slots)
    # A kernel is not the compiler's to split over `tensor`.
    heads, pages, whole = P(None, None, TENSOR), P(None, TENSOR), P()
    kernel: Callable[..., Array] = gpu_attention.few_queries_attention
    if backend() == "cpu":
        from specrl_jax.kernels import cpu_attention

        kernel = cpu_attention.few_queries_attention
    split = by_hand_too(TENSOR, kernel, (heads, pages, pages, whole, whole, whole, whole), heads)
    return split(q, keys, values, table, below, bits, ends)


def attention(
    q: Float[Array, "r q h c"],
    k: Float[Array, "r g s c"],
    v: Float[Array, "r g s c"],
    positions: Int[Array, "r q"],
    numerics: Numerics,
) -> Float[Array, "r q h c"]:
    """Attention of the query at `positions[r, q]` over slots `0..positions[r, q]` of row `r`.

    Args:
        q: rotated queries.
        k, v: rotated keys, and values, of the sequence itself.
        positions: position of each query; -1 for padding, whose output is finite and meaningless.
        numerics: plain or invariant.
    """
    return (functools.partial(_invariant_at_once, numerics) if numerics.invariant else _at_once)(q, k, v, positions)


def paged_attention(
    q: Float[Array, "r q h c"],
    keys: Shaped[Array, "p g _ _"],
    values: Shaped[Array, "p g s c"],
    table: Int[Array, "r m"],
    positions: Int[Array, "r q"],
    numerics: Numerics,
    tree: Tree | None = None,
    own_slots: Int[Array, "r q"] | None = None,
) -> Float[Array, "r q h c"]:
    """`attention` over the pages of a cache.

    Args:
        q, positions, numerics: as in `attention`.
        keys, values: pools of one layer.
        table: pages of every row.
        tree: how the queries of a row hang together where they are no chain; the root's slot is its position.
        own_slots: of each query, less than 32 beyond its position, where it reads the slots before its position and
            this one; of plain numerics alone, and without a tree.
    """
    chain = tree is None or tree.is_chain
    if own_slots is not None and (numerics.invariant or not chain):
        raise ValueError("queries beside others of their position belong to plain numerics without a tree")
    if numerics.invariant:
        if chain:
            return _invariant_paged(q, keys, values, table, positions, numerics)
        assert tree is not None
        out = jnp.zeros_like(q)
        for path in tree.leaf_paths:
            nodes = np.array(path)
            arguments = (keys, values, table, positions[:, nodes], numerics, path)
            out = out.at[:, nodes].set(_invariant_paged(q[:, nodes], *arguments))
        return out

    if _kernel_fits(q, values, None if chain else tree):
        return _in_kernel(q, keys, values, table, positions, None if chain else tree, own_slots)

    page_size = values.shape[2]

    def take(j: Int[Array, ""]) -> tuple[Array, Array]:
        page = lax.dynamic_index_in_dim(table, j, 1, keepdims=False)
        return read_pages(keys, values, page)

    allowed = functools.partial(_causal, positions)
    last = jnp.max(positions)
    if tree is not None and not chain:
        allowed = functools.partial(_below_ancestors, positions, tree=tree)
        last = jnp.max(jnp.where(positions[:, 0] < 0, -1, positions[:, 0] + tree.size - 1))
    elif own_slots is not None:
        allowed, last = functools.partial(_beside, positions, own=own_slots), jnp.max(own_slots)
    return _in_blocks(q, positions, take, keys.shape[1], page_size, allowed, last)
