"""Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specrl_jax.models.few_tokens import by_compiler, few_on_a_cpu, with_gradient_of
from specrl_jax.models.linear import wide_dtype


def rms_norm(x: Float[Array, "*n d"], weight: Float[Array, "d"], eps: float) -> Float[Array, "*n d"]:
    """Numbers of every token, or head, over the root of their mean square, which is made in float32, times a weight."""

    def by_xla(x: Array, weight: Array) -> Array:
        wide = x.astype(wide_dtype(x))
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return (wide * scale).astype(x.dtype) * jnp.expand_dims(weight, range(x.ndim - 1))

    if few_on_a_cpu(x, weight):
        from specrl_jax.kernels.norm import fits, norm_and_rotate

        def in_kernel(x: Array, weight: Array) -> Array:
            return norm_and_rotate(x.reshape(-1, 1, x.shape[-1]), (weight, eps), None).reshape(x.shape)

        if fits(x.shape[-1], rotates=False):
            return with_gradient_of(by_xla, in_kernel, x, weight)
    by_compiler()
    return by_xla(x, weight)
