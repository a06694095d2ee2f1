"""Rotary position embeddings: plain, linear, llama3 and YaRN."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specrl_jax.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequency of each pair of channels `[head_dim / 2]`, and the factor on cos and sin."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    return (1.0 / rope.theta**exponents).astype(np.float32), 1.0


def rope_angles(
    positions: Int[Array, "n"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "n 1 half"], Float[Array, "n 1 half"]]:
    """Cosines and sines of every token's angles, in float32."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(frequencies)[None, None]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
    x: Float[Array, "n h c"], cos: Float[Array, "n 1 half"], sin: Float[Array, "n 1 half"]
) -> Float[Array, "n h c"]:
    """Rotate channel `i` with channel `i + c/2` (the Hugging Face layout)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
