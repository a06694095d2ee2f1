"""Products with kernels as they lie in Hugging Face folders, `[out, in]`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from specrl_jax.models.backend import backend

# Measured on two cores of a Xeon, widths 448 and 1280, against kernels `[in, out]` beside rows of tokens: for 4 to 64
# tokens 0.78 to 0.87 of the time, the same from 128 on. On an EPYC 1.18 at 4 and 8, 1.02 at 16, 1.12 at 32.
_FEW_TOKENS = 64
# Columns that fill no vectors: from so many on, so many more of zeros cost less (on the EPYC 5 to 7 tokens take 0.92 of
# the time, 10 to 14 0.75 to 0.85, 28 and 56 to 60 0.75; 20, 36 and 40 are cheaper as they are).
_FULL_COLUMNS = {8: 5, 16: 9, 32: 25, 64: 49}


def linear(x: Float[Array, "n i"], kernel: Float[Array, "o i"], dtype: Any = None) -> Float[Array, "n o"]:
    """`x @ kernel.T`, accumulated and returned in `dtype`, by default that of `x`.

    On a CPU a few tokens stand as columns beside the kernel: XLA's product then reads the kernel along its rows,
    without packing it first; columns that would leave vectors half empty are filled up with zeros. The barriers keep
    the compiler from turning this back. On a GPU one token is a sum along the rows of the kernel, which XLA reads
    faster than its product of one row does.
    """
    if x.shape[0] == 1 and backend() == "gpu":
        wide, narrow = wide_dtype(x), jnp.result_type(x, kernel)
        return jnp.sum(kernel.astype(wide) * x.astype(wide), axis=1, dtype=wide)[None].astype(dtype or narrow)
    if not 1 < x.shape[0] <= _FEW_TOKENS or backend() != "cpu":
        return jnp.einsum("ni,oi->no", x, kernel, preferred_element_type=dtype)
    n = x.shape[0]
    width = next((full for full, fewest in _FULL_COLUMNS.items() if fewest <= n <= full), n)
    columns = lax.optimization_barrier(jnp.pad(x.T, [(0, 0), (0, width - n)]))
    product = lax.optimization_barrier(jnp.einsum("oi,in->on", kernel, columns, preferred_element_type=dtype))
    return product[:, :n].T


def wide_dtype(x: Array | jax.ShapeDtypeStruct) -> Any:
    """What sums over `x` are accumulated in: float32, or float64 where `x` is."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def logits_of(x: Float[Array, "n i"], kernel: Float[Array, "o i"]) -> Float[Array, "n o"]:
    """`linear` in at least float32, as laws over a vocabulary need it."""
    return linear(x, kernel, wide_dtype(x))
