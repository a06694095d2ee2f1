"""The policy: a decoder-only transformer as pure functions.

One `forward` serves training and prefill (every row from position 0) and cached
decoding (a few new tokens per row). Steps:

1. embed the new tokens;
2. per layer: project to queries, keys and values; write the keys and values
   into the cache; attend; mix back and apply the MLP;
3. return the residual stream after the last layer, before the final norm, and
   at any other boundary asked for.

`logits` turns hidden states into the policy's law over the next token.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specrl_jax.models.attention import attention, best_apart, paged_attention
from specrl_jax.models.cache import KVCache, init_pool, locate, own_pages, pages_for, write_keys, write_values
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.linear import linear, linears, logits_of, swiglu
from specrl_jax.models.norm import rms_norm
from specrl_jax.models.numerics import Numerics, map_tokens
from specrl_jax.models.params import LayerParams, PolicyParams
from specrl_jax.models.rope import norm_and_rotate, rope_angles
from specrl_jax.models.tree import Tree


@struct.dataclass
class TokenBatch:
    """New tokens, each with its row and its position; position -1 is padding.

    tokens, rows, positions: `[n]`. A row's tokens stand in order of slot.
    num_rows: rows of the cache they belong to.
    max_queries: most new tokens that any row has.
    is_grid: token `n` is query `n % max_queries` of row `n // max_queries`. Otherwise
        tokens are packed: rows may bring different numbers of tokens without padding.
    tree: how the tokens of a row hang together, where they do not follow each other.
    own_slots: cache slot of each token, -1 for padding, where tokens may stand beside others of their position: a
        token reads the slots before its position, and its own.
    """

    tokens: Int[Array, "n"]
    rows: Int[Array, "n"]
    positions: Int[Array, "n"]
    num_rows: int = struct.field(pytree_node=False)
    max_queries: int = struct.field(pytree_node=False)
    is_grid: bool = struct.field(pytree_node=False, default=True)
    tree: Tree | None = struct.field(pytree_node=False, default=None)
    own_slots: Int[Array, "n"] | None = None

    @property
    def slots(self) -> Int[Array, "n"]:
        """Cache slot of every token, -1 for padding; the nodes of a tree lie side by side."""
        if self.own_slots is not None:
            return self.own_slots
        if self.tree is None or self.tree.is_chain:
            return self.positions
        beside = np.arange(self.tree.size, dtype=np.int32) - np.array(self.tree.depths, np.int32)
        return jnp.where(self.positions < 0, -1, self.positions + jnp.tile(jnp.asarray(beside), self.num_rows))


def grid_batch(tokens: Int[Array, "r q"], positions: Int[Array, "r q"], tree: Tree | None = None) -> TokenBatch:
    """`q` new tokens for each of `r` rows, one per node of a tree where there is one; position -1 marks padding."""
    rows, queries = tokens.shape
    row_ids = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), queries)
    return TokenBatch(tokens.reshape(-1), row_ids, positions.reshape(-1), rows, queries, tree=tree)


def sequence_positions(lengths: Int[Array, "b"], width: int) -> Int[Array, "b t"]:
    """Positions `0..length-1` of right-padded sequences, -1 beyond."""
    steps = jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.where(steps < lengths[:, None], steps, -1)


@struct.dataclass
class ForwardOutput:
    """hidden: residual stream after the last layer, before the final norm, `[n, d]`.

    features: residual streams at the requested boundaries, concatenated, `[n, boundaries * d]`.
    cache: the cache with the new tokens written (its `length` is not advanced), or None.
    """

    hidden: Float[Array, "n d"]
    features: Float[Array, "n bd"] | None
    cache: KVCache | None


def project_qkv(
    config: PolicyConfig, layer: LayerParams, normed: Float[Array, "n d"], positions: Int[Array, "n"]
) -> tuple[Float[Array, "n h c"], Float[Array, "n g c"], Float[Array, "n g c"]]:
    """Rotated queries and keys, and values, of normalised hidden states."""
    q, k, v = linears(normed, (layer.q_proj, layer.k_proj, layer.v_proj))
    if layer.q_bias is not None and layer.k_bias is not None and layer.v_bias is not None:
        q, k, v = q + layer.q_bias[None], k + layer.k_bias[None], v + layer.v_bias[None]
    q, k, v = (y.reshape(normed.shape[0], -1, config.head_dim) for y in (q, k, v))
    angles = rope_angles(positions, config.rope, config.head_dim)
    q, k = (norm_and_rotate(x, n, config.rms_norm_eps, *angles) for x, n in ((q, layer.q_norm), (k, layer.k_norm)))
    return q, k, v


def _norm_and_project(
    config: PolicyConfig, layer: LayerParams, x: Float[Array, "n d"], positions: Int[Array, "n"]
) -> tuple[Float[Array, "n h c"], Float[Array, "n g c"], Float[Array, "n g c"]]:
    return project_qkv(config, layer, rms_norm(x, layer.attn_norm, config.rms_norm_eps), positions)


def mix_and_mlp(
    config: PolicyConfig, layer: LayerParams, x: Float[Array, "n d"], attended: Float[Array, "n h c"]
) -> Float[Array, "n d"]:
    """The layer after attention."""
    x = linear(attended.reshape(x.shape[0], -1), layer.o_proj, plus=x)
    normed = rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
    return swiglu(normed, layer.gate_proj, layer.up_proj, layer.down_proj, plus=x)


def _to_grid(x: Array, batch: TokenBatch, queries: Int[Array, "n"], fill: int = 0) -> Array:
    if batch.is_grid:
        return x.reshape(batch.num_rows, batch.max_queries, *x.shape[1:])
    grid = jnp.full((batch.num_rows, batch.max_queries, *x.shape[1:]), fill, x.dtype)
    slots = jnp.where(batch.positions < 0, batch.max_queries, queries)
    return grid.at[batch.rows, slots].set(x, mode="drop")


def _from_grid(grid: Array, batch: TokenBatch, queries: Int[Array, "n"]) -> Array:
    if batch.is_grid:
        return grid.reshape(-1, *grid.shape[2:])
    return grid.at[batch.rows, queries].get(mode="clip")


def _in_scans(
    through: Callable[[LayerParams, Array], Array],
    layers: tuple[LayerParams, ...],
    x: Float[Array, "n d"],
    boundaries: tuple[int, ...],
) -> dict[int, Float[Array, "n d"]]:
    """Residual streams at the boundaries and after the last layer, by boundary.

    The layers between two boundaries are one loop over their stacked weights: one of them is compiled and not all, and
    only what goes into each is kept for the gradient.
    """
    streams, start = {0: x}, 0
    again = jax.checkpoint(through, prevent_cse=False)
    for stop in sorted({*boundaries, len(layers)} - {0}):
        stacked = jax.tree.map(lambda *weights: jnp.stack(weights), *layers[start:stop])
        x, _ = jax.lax.scan(lambda x, layer: (again(layer, x), None), x, stacked)
        streams[stop], start = x, stop
    return streams


def forward(
    params: PolicyParams,
    config: PolicyConfig,
    batch: TokenBatch,
    *,
    numerics: Numerics,
    cache: KVCache | None = None,
    boundaries: tuple[int, ...] = (),
    remat: bool = False,
) -> ForwardOutput:
    """Residual streams of new tokens.

    Args:
        params, config: the policy.
        batch: the new tokens. With a cache, a row's first new token stands at position
            `cache.length[row]`; without one, at position 0, and the batch must be a grid.
        numerics: plain or invariant.
        cache: keys and values of the tokens before these.
        boundaries: residual-stream boundaries to return as features: 0 is the embedding,
            `b` the output of the first `b` layers (`output_hidden_states[b]` in transformers).
        remat: keep only what lies between layers for the gradient and compute the rest again, layer by layer in loops.
    """
    if cache is None and not batch.is_grid:
        raise ValueError("a forward without a cache needs a grid of tokens")
    if any(b < 0 or b > config.num_layers for b in boundaries):
        raise ValueError(f"boundaries {boundaries} must lie in 0..{config.num_layers}, the policy's layers")
    start = jnp.int32(0) if cache is None else cache.length.at[batch.rows].get(mode="clip")
    queries = batch.slots - start
    grid_positions = _to_grid(batch.positions, batch, queries, fill=-1)
    angles_at = jnp.maximum(batch.positions, 0)
    where = None if cache is None else locate(cache.table, cache.page_size, batch.rows, batch.slots)

    x = params.embed[batch.tokens]
    streams = {0: x}
    keys, values = [], []

    def through(layer: LayerParams, x: Float[Array, "n d"], pages: tuple[Array, Array] | None) -> Any:
        q, k, v = map_tokens(functools.partial(_norm_and_project, config), layer, (x, angles_at), numerics)
        if cache is None or where is None or pages is None:
            q, k, v = (_to_grid(y, batch, queries) for y in (q, k, v))
            attended = attention(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), grid_positions, numerics)
            attended = _from_grid(attended, batch, queries)
        else:
            pages = write_keys(pages[0], k, *where), write_values(pages[1], v, *where)
            if not batch.is_grid and best_apart(q, pages[1]):
                table, positions = cache.table[batch.rows], batch.positions[:, None]
                own = None if batch.own_slots is None else batch.own_slots[:, None]
                attended = paged_attention(q[:, None], *pages, table, positions, numerics, own_slots=own)[:, 0]
            else:
                grid, at = _to_grid(q, batch, queries), grid_positions
                own = None if batch.own_slots is None else _to_grid(batch.own_slots, batch, queries, fill=-1)
                attended = paged_attention(grid, *pages, cache.table, at, numerics, batch.tree, own)
                attended = _from_grid(attended, batch, queries)
        return map_tokens(functools.partial(mix_and_mlp, config), layer, (x, attended), numerics), pages

    if remat:
        if cache is not None:
            raise ValueError("remat belongs to a forward without a cache")
        streams = _in_scans(lambda layer, x: through(layer, x, None)[0], params.layers, x, boundaries)
    else:
        for i, layer in enumerate(params.layers):
            x, pages = through(layer, x, None if cache is None else (cache.keys[i], cache.values[i]))
            streams[i + 1] = x
            if pages is not None:
                keys.append(pages[0])
                values.append(pages[1])
    features = jnp.concatenate([streams[b] for b in boundaries], axis=-1) if boundaries else None
    new_cache = None if cache is None else dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))
    return ForwardOutput(streams[config.num_layers], features, new_cache)


def head_weights(params: PolicyParams) -> tuple[Float[Array, "d"], Float[Array, "v d"]]:
    """Final norm and output projection."""
    return params.final_norm, params.embed if params.head is None else params.head


def token_logits(
    config: PolicyConfig, weights: tuple[Array, Array], hidden: Float[Array, "n d"]
) -> Float[Array, "n v"]:
    """Float32 logits of hidden states; a token-wise function for `map_tokens`."""
    norm, head = weights
    return logits_of(rms_norm(hidden, norm, config.rms_norm_eps), head)


def logits(
    params: PolicyParams, config: PolicyConfig, hidden: Float[Array, "n d"], numerics: Numerics
) -> Float[Array, "n v"]:
    """Float32 logits of the next token, from `ForwardOutput.hidden`."""
    return map_tokens(functools.partial(token_logits, config), head_weights(params), (hidden,), numerics)


def policy_pool(config: PolicyConfig, pages: int, numerics: Numerics) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """So many empty pages for this policy's keys and values."""
    return init_pool(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        pages=pages,
        dtype=jnp.dtype(config.dtype),
        numerics=numerics,
    )


def policy_cache(config: PolicyConfig, rows: int, capacity: int, numerics: Numerics) -> KVCache:
    """An empty cache for this policy whose rows have pages of their own for `capacity` slots."""
    pages = pages_for(capacity, numerics)
    keys, values = policy_pool(config, rows * pages, numerics)
    return KVCache(keys, values, own_pages(rows, pages), jnp.zeros((rows,), jnp.int32))
