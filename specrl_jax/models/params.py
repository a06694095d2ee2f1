"""The policy's parameters as a pytree: one entry per layer, kernels stored `[out, in]` as by Hugging Face.

Layers are a tuple, not a stack: XLA copies every layer's slice of a stacked
array before each matmul of a decode step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specrl_jax.models.config import PolicyConfig


@struct.dataclass
class LayerParams:
    """One decoder layer. `hc`, `gc`: query heads and key/value heads times the head width `c`."""

    attn_norm: Float[Array, "d"]
    q_proj: Float[Array, "hc d"]
    k_proj: Float[Array, "gc d"]
    v_proj: Float[Array, "gc d"]
    o_proj: Float[Array, "d hc"]
    mlp_norm: Float[Array, "d"]
    gate_proj: Float[Array, "f d"]
    up_proj: Float[Array, "f d"]
    down_proj: Float[Array, "d f"]
    q_norm: Float[Array, "c"] | None = None
    k_norm: Float[Array, "c"] | None = None
    q_bias: Float[Array, "hc"] | None = None
    k_bias: Float[Array, "gc"] | None = None
    v_bias: Float[Array, "gc"] | None = None


@struct.dataclass
class PolicyParams:
    """`head` is None when the output projection is the embedding."""

    embed: Float[Array, "v d"]
    layers: tuple[LayerParams, ...]
    final_norm: Float[Array, "d"]
    head: Float[Array, "v d"] | None = None


def layer_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every array of one layer, by field name of `LayerParams`."""
    d, f, c = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads * c, config.num_kv_heads * c
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (d,),
        "q_proj": (heads, d),
        "k_proj": (kv_heads, d),
        "v_proj": (kv_heads, d),
        "o_proj": (d, heads),
        "mlp_norm": (d,),
        "gate_proj": (f, d),
        "up_proj": (f, d),
        "down_proj": (d, f),
    }
    if config.qk_norm:
        shapes |= {"q_norm": (c,), "k_norm": (c,)}
    if config.qkv_bias:
        shapes |= {"q_bias": (heads,), "k_bias": (kv_heads,), "v_bias": (kv_heads,)}
    return shapes


def _init_array(key: Any, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    if name.endswith("norm"):
        return jnp.ones(shape, dtype)
    if name.endswith("bias"):
        return jnp.zeros(shape, dtype)
    return init_kernel(key, shape, dtype)


def init_kernel(key: Any, shape: tuple[int, ...], dtype: Any) -> Float[Array, "o i"]:
    """A kernel of standard deviation 0.88 / sqrt(fan-in): a normal cut off at two deviations, drawn `[in, out]`."""
    drawn = jax.random.truncated_normal(key, -2.0, 2.0, shape[::-1], jnp.float32)
    return (drawn * shape[1] ** -0.5).astype(dtype).T


def init_params(key: Any, config: PolicyConfig) -> PolicyParams:
    """Random parameters: kernels by `init_kernel`, embedding of standard deviation 0.02, norms one."""
    dtype = jnp.dtype(config.dtype)
    embed_key, head_key, *layer_keys = jax.random.split(key, 2 + config.num_layers)

    def init_layer(layer_key: Any) -> LayerParams:
        shapes = layer_shapes(config)
        keys = jax.random.split(layer_key, len(shapes))
        items = zip(shapes.items(), keys, strict=True)
        return LayerParams(**{name: _init_array(k, name, shape, dtype) for (name, shape), k in items})

    embed = jax.random.normal(embed_key, (config.vocab_size, config.hidden_size), jnp.float32) * 0.02
    head = None
    if not config.tie_embeddings:
        head = _init_array(head_key, "head", (config.vocab_size, config.hidden_size), dtype)
    return PolicyParams(
        embed=embed.astype(dtype),
        layers=tuple(init_layer(k) for k in layer_keys),
        final_norm=jnp.ones((config.hidden_size,), dtype),
        head=head,
    )
