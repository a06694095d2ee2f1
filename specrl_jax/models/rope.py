"""Rotary position embeddings: plain, linear, llama3 and YaRN."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from specrl_jax.models.config import RopeConfig
from specrl_jax.models.few_tokens import by_compiler, few_on_a_cpu, with_gradient_of
from specrl_jax.models.norm import rms_norm


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Factor on cos and sin: `0.1 ln(factor) + 1`, or the ratio of two such terms when both mscales are set."""

    def term(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return term(rope.mscale) / term(rope.mscale_all_dim)
    return term(1.0)


def _yarn_extrapolated_share(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Share of each frequency that is left as trained: 1 for fast channels, 0 for slow ones, a ramp between."""

    def channel(rotations: float) -> float:
        """The channel pair that turns `rotations` times within the original context (YaRN, section 3.2)."""
        turns = rope.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = 0.001 if low == high else high - low
    return 1.0 - np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)


def _interpolate(plain: np.ndarray, factor: float, kept: np.ndarray) -> np.ndarray:
    return plain / factor * (1.0 - kept) + plain * kept


def _llama3_frequencies(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Long wavelengths divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    turns = rope.original_context * plain / (2 * math.pi)
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return _interpolate(plain, rope.factor, kept)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequency of each pair of channels `[head_dim / 2]`, float32, and the factor on cos and sin.

    The formulas are those of transformers' `modeling_rope_utils`, computed in float64 and rounded once,
    so that every platform has the same bits.
    """
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    attention_factor = 1.0
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3_frequencies(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _interpolate(frequencies, rope.factor, _yarn_extrapolated_share(rope, head_dim))
        attention_factor = _yarn_attention_factor(rope)
    return frequencies.astype(np.float32), attention_factor


def rope_angles(
    positions: Int[Array, "n"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "n 1 half"], Float[Array, "n 1 half"]]:
    """Cosines and sines of every token's angles, in float32."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(frequencies)[None, None]
    # Neither folded with positions that are known nor fused with what follows: the same bits in every program.
    angles = lax.optimization_barrier(angles)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
    x: Float[Array, "n h c"], cos: Float[Array, "n 1 half"], sin: Float[Array, "n 1 half"]
) -> Float[Array, "n h c"]:
    """Rotate channel `i` with channel `i + c/2` (the Hugging Face layout)."""
    return norm_and_rotate(x, None, 0.0, cos, sin)


def norm_and_rotate(
    x: Float[Array, "n h c"],
    weight: Float[Array, "c"] | None,
    eps: float,
    cos: Float[Array, "n 1 half"],
    sin: Float[Array, "n 1 half"],
) -> Float[Array, "n h c"]:
    """`apply_rope` of heads, normed before where there is a weight."""

    def by_xla(x: Array, weight: Array | None, cos: Array, sin: Array) -> Array:
        return _rotated(x if weight is None else rms_norm(x, weight, eps), cos, sin)

    weights = () if weight is None else (weight,)
    if cos.shape == (x.shape[0], 1, x.shape[2] // 2) and few_on_a_cpu(x, cos, *weights):
        from specrl_jax.kernels import norm

        def in_kernel(x: Array, weight: Array | None, cos: Array, sin: Array) -> Array:
            return norm.norm_and_rotate(x, None if weight is None else (weight, eps), (cos, sin))

        if norm.fits(x.shape[2], rotates=True):
            return with_gradient_of(by_xla, in_kernel, x, weight, cos, sin)
    by_compiler()
    return by_xla(x, weight, cos, sin)


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
