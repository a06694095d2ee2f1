"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with a cache of one short vector per token.

The kernel that would widen that vector to every head's keys goes into the queries instead, and the one for values comes
after attention, so that all heads read the same keys, which are the values too.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.mtp_layouts import LatentAttention
from specrl_jax.drafters.mtp_params import LatentWeights
from specrl_jax.models.config import RopeConfig
from specrl_jax.models.linear import linear
from specrl_jax.models.norm import rms_norm
from specrl_jax.models.rope import apply_rope, rope_angles


def _rotated(x: Float[Array, "n h c"], rope: RopeConfig, positions: Int[Array, "n"]) -> Float[Array, "n h c"]:
    """Neighbouring channels rotated with each other; afterwards the first of all pairs stand before the second."""
    halves = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    return apply_rope(halves, *rope_angles(positions, rope, x.shape[-1]))


def _sharpness(attention: LatentAttention, rope: RopeConfig) -> float:
    """Factor on queries whose products are divided by the root of the cached width, not of a head's.

    YaRN's factor on attention comes on top, for queries and keys.
    """
    widths = math.sqrt(attention.head_dim / (attention.nope_width + attention.rope_width))
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return widths
    return widths * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def _up(attention: LatentAttention, weights: LatentWeights) -> tuple[Float[Array, "h c r"], Float[Array, "h v r"]]:
    """The kernels from the short vector to keys and to values, by head."""
    kernel = weights.kv_up.reshape(attention.num_heads, -1, attention.kv_rank)
    return kernel[:, : attention.nope_width], kernel[:, attention.nope_width :]


def latent_queries(
    attention: LatentAttention,
    weights: LatentWeights,
    x: Float[Array, "n d"],
    positions: Int[Array, "n"],
    rope: RopeConfig,
    eps: float,
) -> Float[Array, "n h c"]:
    """Queries for the short vector, beside rotated ones."""
    if weights.q_down is not None and weights.q_down_norm is not None:
        x = rms_norm(linear(x, weights.q_down), weights.q_down_norm, eps)
    kernel = weights.q_proj if weights.q_up is None else weights.q_up
    assert kernel is not None
    queries = linear(x, kernel).reshape(x.shape[0], attention.num_heads, -1)
    plain, turned = jnp.split(queries, [attention.nope_width], axis=-1)
    absorbed = jnp.einsum("nhc,hcr->nhr", plain, _up(attention, weights)[0])
    both = jnp.concatenate([absorbed, _rotated(turned, rope, positions)], axis=-1)
    return both * jnp.asarray(_sharpness(attention, rope), both.dtype)


def latent_keys(
    attention: LatentAttention,
    weights: LatentWeights,
    x: Float[Array, "n d"],
    positions: Int[Array, "n"],
    rope: RopeConfig,
    eps: float,
) -> Float[Array, "n 1 c"]:
    """The short vector, normalised, beside the rotated channels: keys and values."""
    short, turned = jnp.split(linear(x, weights.kv_down), [attention.kv_rank], axis=-1)
    turned = _rotated(turned[:, None], rope, positions)
    return jnp.concatenate([rms_norm(short, weights.kv_norm, eps)[:, None], turned], axis=-1)


def latent_output(
    attention: LatentAttention, weights: LatentWeights, attended: Float[Array, "n h c"]
) -> Float[Array, "n d"]:
    """The values of what was attended to, mixed by the output projection."""
    values = jnp.einsum("nhr,hvr->nhv", attended[..., : attention.kv_rank], _up(attention, weights)[1])
    return linear(values.reshape(attended.shape[0], -1), weights.o_proj)
