"""Keys and values of a drafter, side by side in memory for every row, and layers that attend to them."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.few_tokens import few_on_a_cpu, with_gradient_of
from specrl_jax.models.norm import rms_norm
from specrl_jax.models.params import LayerParams
from specrl_jax.models.policy import mix_and_mlp, project_qkv

_MASKED = -1e30

Cached = tuple[Float[Array, "r g s c"], ...]
"""Keys or values of every layer."""
AttendIn = Callable[[int, Array, Array, Array], Array]
"""`attend_in(i, q, k, v)` is what new tokens attend to in layer `i`, `[r, m, h, c]`, given their queries, keys and
values there."""


def empty_cache(config: PolicyConfig, rows: int, slots: int) -> tuple[Cached, Cached]:
    """Keys and values of no tokens, with room for at least `slots`."""
    shape = (rows, config.num_kv_heads, -(-slots // 8) * 8, config.head_dim)
    keys, values = (
        tuple(jnp.zeros(shape, jnp.dtype(config.dtype)) for _ in range(config.num_layers)) for _ in range(2)
    )
    return keys, values


def write(
    cached: Float[Array, "r g s c"], new: Float[Array, "n g c"], positions: Int[Array, "r q"]
) -> Float[Array, "r g s c"]:
    """Write tokens into slots of their rows; padding (position -1) is dropped."""
    rows = jnp.broadcast_to(jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None], positions.shape)
    slots = jnp.where(positions < 0, cached.shape[2], positions)
    return cached.at[rows, :, slots].set(new.reshape(*positions.shape, *new.shape[1:]), mode="drop")


def attend(
    q: Float[Array, "r m h c"],
    keys: Float[Array, "r g s c"],
    values: Float[Array, "r g s c"],
    start: Int[Array, "r"],
    visible: Int[Array, "r"],
    own_keys: Float[Array, "r g e c"],
    own_values: Float[Array, "r g e c"],
    sees: Bool[Array, "m e"],
) -> Float[Array, "r m h c"]:
    """Attention of `m` queries per row over cached slots `start` to `visible - 1` and over `e` keys beside them.

    `sees[m, e]` tells which of those beside them a query reads. What a query that reads nothing gets means nothing.
    """
    inputs = q, keys, values, start, visible, own_keys, own_values, sees
    if few_on_a_cpu(q, keys, values, own_keys, own_values) and sees.shape[0] == q.shape[1]:
        from specrl_jax.kernels import row_attention

        if row_attention.fits(q.shape[2], keys.shape[1], q.shape[3], sees.shape[1]):
            return with_gradient_of(_by_xla, row_attention.row_attention, *inputs)
    return _by_xla(*inputs)


def _by_xla(
    q: Float[Array, "r m h c"],
    keys: Float[Array, "r g s c"],
    values: Float[Array, "r g s c"],
    start: Int[Array, "r"],
    visible: Int[Array, "r"],
    own_keys: Float[Array, "r g e c"],
    own_values: Float[Array, "r g e c"],
    sees: Bool[Array, "m e"],
) -> Float[Array, "r m h c"]:
    rows, kv_heads, slots, width = keys.shape
    count = q.shape[1]
    # Keys times a column of queries, not queries times transposed keys: on XLA:CPU, where no kernel fits, 3 to 10 times
    # faster for few queries. The barriers keep the compiler from turning one into the other.
    grouped = q.reshape(rows, count, kv_heads, -1, width).transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, width)
    columns = lax.optimization_barrier((grouped * width**-0.5).transpose(0, 1, 3, 2))
    scores = jnp.einsum("rgsc,rgcm->rgsm", keys, columns, preferred_element_type=jnp.float32)
    scores = lax.optimization_barrier(scores).transpose(0, 1, 3, 2)
    own_scores = jnp.einsum("rgcm,rgec->rgme", columns, own_keys, preferred_element_type=jnp.float32)
    own_sees = jnp.tile(sees, (grouped.shape[2] // count, 1))
    own_scores = jnp.where(own_sees[None, None], own_scores, _MASKED)
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    is_visible = (slot >= start[:, None]) & (slot < visible[:, None])
    scores = jnp.where(is_visible[:, None, None], scores, _MASKED)
    maximum = jnp.maximum(scores.max(-1, keepdims=True), own_scores.max(-1, keepdims=True))
    mix, own_mix = jnp.exp(scores - maximum), jnp.exp(own_scores - maximum)
    total = mix.sum(-1, keepdims=True) + own_mix.sum(-1, keepdims=True)
    out = jnp.einsum("rgms,rgsc->rgmc", mix.astype(values.dtype), values, preferred_element_type=jnp.float32)
    own = jnp.einsum("rgme,rgec->rgmc", own_mix.astype(values.dtype), own_values, preferred_element_type=jnp.float32)
    mixed = ((out + own) / total).reshape(rows, kv_heads, -1, count, width).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(q.shape).astype(q.dtype)


def heads_first(x: Float[Array, "r m g c"]) -> Float[Array, "r g m c"]:
    """Keys or values of new tokens, as `attend` takes those beside the cache."""
    return x.transpose(0, 2, 1, 3)


def run_layers(
    config: PolicyConfig,
    layers: tuple[LayerParams, ...],
    x: Float[Array, "n d"],
    positions: Int[Array, "r m"],
    attend_in: AttendIn,
) -> Float[Array, "n d"]:
    """Residual stream of `m` tokens per row after all layers.

    Args:
        config, layers: of the transformer.
        x: embeddings, row by row.
        positions: of the tokens.
        attend_in: how they attend.
    """
    for i, layer in enumerate(layers):
        normed = rms_norm(x, layer.attn_norm, config.rms_norm_eps)
        projected = project_qkv(config, layer, normed, positions.reshape(-1))
        attended = attend_in(i, *(y.reshape(*positions.shape, *y.shape[1:]) for y in projected))
        x = mix_and_mlp(config, layer, x, attended.reshape(-1, *attended.shape[2:]))
    return x
