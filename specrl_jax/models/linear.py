"""Products with kernels as they lie in Hugging Face folders, `[out, in]`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from specrl_jax.models.backend import backend

# Measured on two cores, widths 448 and 1280: for 4 to 64 tokens 0.78 to 0.87 of the time, the same from 128 on.
_FEW_TOKENS = 64


def linear(x: Float[Array, "n i"], kernel: Float[Array, "o i"], dtype: Any = None) -> Float[Array, "n o"]:
    """`x @ kernel.T`, accumulated and returned in `dtype`, by default that of `x`.

    On a CPU a few tokens stand as columns beside the kernel: XLA's product then reads the kernel along its rows,
    without packing it first. The barriers keep the compiler from turning this back. On a GPU one token is a sum
    along the rows of the kernel, which XLA reads faster than its product of one row does.
    """
    if x.shape[0] == 1 and backend() == "gpu":
        wide, narrow = wide_dtype(x), jnp.result_type(x, kernel)
        return jnp.sum(kernel.astype(wide) * x.astype(wide), axis=1, dtype=wide)[None].astype(dtype or narrow)
    if not 1 < x.shape[0] <= _FEW_TOKENS or backend() != "cpu":
        return jnp.einsum("ni,oi->no", x, kernel, preferred_element_type=dtype)
    columns = lax.optimization_barrier(x.T)
    return lax.optimization_barrier(jnp.einsum("oi,in->on", kernel, columns, preferred_element_type=dtype)).T


def wide_dtype(x: Array | jax.ShapeDtypeStruct) -> Any:
    """What sums over `x` are accumulated in: float32, or float64 where `x` is."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def logits_of(x: Float[Array, "n i"], kernel: Float[Array, "o i"]) -> Float[Array, "n o"]:
    """`linear` in at least float32, as laws over a vocabulary need it."""
    return linear(x, kernel, wide_dtype(x))
