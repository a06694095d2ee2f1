"""Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specrl_jax.kernels import norm
from specrl_jax.kernels.custom_call import with_gradient_of
from specrl_jax.models.backend import few_on_a_cpu
from specrl_jax.models.linear import wide_dtype


def rms_norm(x: Float[Array, "*n d"], weight: Float[Array, "d"], eps: float) -> Float[Array, "*n d"]:
    """Numbers of every token, or head, over the root of their mean square, which is made in float32, times a weight."""

    def by_xla(x: Array, weight: Array) -> Array:
        wide = x.astype(wide_dtype(x))
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return (wide * scale).astype(x.dtype) * jnp.expand_dims(weight, range(x.ndim - 1))

    def in_kernel(x: Array, weight: Array) -> Array:
        heads = x.reshape(-1, 1, x.shape[-1])
        return norm.norm_and_rotate(heads, (weight, eps), None).reshape(x.shape)

    if norm.fits(x.shape[-1], rotates=False) and few_on_a_cpu(x, weight):
        return with_gradient_of(by_xla, in_kernel, x, weight)
    return by_xla(x, weight)
