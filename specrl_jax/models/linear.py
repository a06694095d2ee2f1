"""Products with kernels as they lie in Hugging Face folders, `[out, in]`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specrl_jax.models.backend import backend
from specrl_jax.models.few_tokens import by_compiler, few_on_a_cpu, in_kernels_alone, with_gradient_of

# Tokens up to which the kernel for CPUs costs less than XLA's product: on two cores of an EPYC (36 layers of width 448)
# 0.5 to 0.7 of the time for 1 to 24 tokens, 0.8 for 32 to 64, 0.9 for 128, as much for 256.
_FEW_TOKENS = 128


def linear(
    x: Float[Array, "n i"], kernel: Float[Array, "o i"], dtype: Any = None, plus: Float[Array, "n o"] | None = None
) -> Float[Array, "n o"]:
    """`x @ kernel.T`, accumulated and returned in `dtype`, by default that of `x`; `plus` is added to it.

    On a GPU one token is a sum along the rows of the kernel, which XLA reads faster than its product of one row does.
    """
    if plus is None:
        return linears(x, (kernel,), dtype)[0]

    def by_xla(x: Array, kernel: Array, plus: Array) -> Array:
        return plus + _by_xla(x, kernel, dtype)

    if _by_hand(x, kernel, dtype=dtype) and plus.dtype == jnp.float32:
        from specrl_jax.kernels.product import in_blocks, product_plus

        if plus.shape == (x.shape[0], kernel.shape[0]) and in_blocks(*plus.shape):
            return with_gradient_of(by_xla, product_plus, x, kernel, plus)
    return plus + linears(x, (kernel,), dtype)[0]


def swiglu(
    x: Float[Array, "n d"],
    gate: Float[Array, "f d"],
    up: Float[Array, "f d"],
    down: Float[Array, "d f"],
    plus: Float[Array, "n d"] | None = None,
) -> Float[Array, "n d"]:
    """Gated MLP (Shazeer, arXiv 2002.05202); `plus` is added to it."""
    return linear(_gated(x, gate, up), down, plus=plus)


def _gated(x: Float[Array, "n d"], gate: Float[Array, "f d"], up: Float[Array, "f d"]) -> Float[Array, "n f"]:
    def by_xla(x: Array, gate: Array, up: Array) -> Array:
        return jax.nn.silu(_by_xla(x, gate, None)) * _by_xla(x, up, None)

    if _by_hand(x, gate, up):
        from specrl_jax.kernels.product import gated_product, in_blocks

        if in_blocks(x.shape[0], gate.shape[0]):
            return with_gradient_of(by_xla, gated_product, x, gate, up)
    by_compiler()
    gated, raised = linears(x, (gate, up))
    return jax.nn.silu(gated) * raised


def linears(
    x: Float[Array, "n i"], kernels: Sequence[Float[Array, "_ i"]], dtype: Any = None
) -> tuple[Float[Array, "n _"], ...]:
    """`linear` with several kernels, which a CPU reads one after the other without a pause."""

    def by_xla(x: Array, kernels: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(_by_xla(x, kernel, dtype) for kernel in kernels)

    if _by_hand(x, *kernels, dtype=dtype):
        from specrl_jax.kernels.product import product

        return with_gradient_of(by_xla, product, x, tuple(kernels))
    by_compiler()
    return by_xla(x, kernels)


def _by_hand(x: Array, *kernels: Array, dtype: Any = None) -> bool:
    """Whether the kernel for CPUs takes so many tokens, and kernels of such shapes."""
    few = x.shape[0] <= _FEW_TOKENS or in_kernels_alone()
    if not few or dtype not in (None, jnp.float32) or not few_on_a_cpu(x, *kernels):
        return False
    from specrl_jax.kernels.product import fits

    return all(fits(kernel.shape[1], kernel.shape[0]) for kernel in kernels)


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
