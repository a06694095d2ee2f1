"""Products with kernels as they lie in Hugging Face folders, `[out, in]`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specrl_jax.models.backend import backend
from specrl_jax.models.few_tokens import few_on_a_cpu, with_gradient_of

# Tokens up to which the kernel for CPUs costs less than XLA's product: on two cores of an EPYC (36 layers of width 448)
# 0.5 to 0.7 of the time for 1 to 24 tokens, 0.8 for 32 to 64, 0.9 for 128, as much for 256.
_FEW_TOKENS = 128


def linear(x: Float[Array, "n i"], kernel: Float[Array, "o i"], dtype: Any = None) -> Float[Array, "n o"]:
    """`x @ kernel.T`, accumulated and returned in `dtype`, by default that of `x`.

    On a GPU one token is a sum along the rows of the kernel, which XLA reads faster than its product of one row does.
    """
    return linears(x, (kernel,), dtype)[0]


def linears(
    x: Float[Array, "n i"], kernels: Sequence[Float[Array, "_ i"]], dtype: Any = None
) -> tuple[Float[Array, "n _"], ...]:
    """`linear` with several kernels, which a CPU reads one after the other without a pause."""

    def by_xla(x: Array, kernels: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(_by_xla(x, kernel, dtype) for kernel in kernels)

    few = x.shape[0] <= _FEW_TOKENS and (dtype is None or dtype == jnp.float32)
    if few and few_on_a_cpu(x, *kernels):
        from specrl_jax.kernels.product import fits, product

        if all(fits(kernel.shape[1], kernel.shape[0]) for kernel in kernels):
            return with_gradient_of(by_xla, product, x, tuple(kernels))
    return by_xla(x, kernels)


def _by_xla(x: Float[Array, "n i"], kernel: Float[Array, "o i"], dtype: Any) -> Float[Array, "n o"]:
    if x.shape[0] == 1 and backend() == "gpu":
        wide, narrow = wide_dtype(x), jnp.result_type(x, kernel)
        return jnp.sum(kernel.astype(wide) * x.astype(wide), axis=1, dtype=wide)[None].astype(dtype or narrow)
    return jnp.einsum("ni,oi->no", x, kernel, preferred_element_type=dtype)


def wide_dtype(x: Array | jax.ShapeDtypeStruct) -> Any:
    """What sums over `x` are accumulated in: float32, or float64 where `x` is."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def logits_of(x: Float[Array, "n i"], kernel: Float[Array, "o i"]) -> Float[Array, "n o"]:
    """`linear` in at least float32, as laws over a vocabulary need it."""
    return linear(x, kernel, wide_dtype(x))
