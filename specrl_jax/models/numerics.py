"""How a forward is cut into programs, and what that does to the bits.

XLA chooses the order of a sum from the shape of the whole operation, so the same
token gives different bits in a batch of 1 and a batch of 8. In `mode="invariant"` the
bits of a token depend neither on its batch, nor on how many tokens are
drafted, nor on whether it is decoded from a cache or teacher-forced: every matmul
and every reduction is a kernel of ours, which sums a token in one order whatever
else is computed (`specrl_jax/kernels`, for float32 on a CPU and sizes that fill its registers), or runs inside
a loop body of one fixed shape. `mode="plain"` computes all tokens at once.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from specrl_jax.models.few_tokens import NoKernelError, in_kernels_alone, kernels_alone, on_a_cpu

_AT_ONCE = 128  # tokens that kernels take together
_LAWS = 8  # of the blocks of what is left to the compiler beside them


@dataclass(frozen=True)
class Numerics:
    """Block shapes of the invariant forward (unused when `mode` is "plain", and where kernels do without).

    One run must use one `Numerics` everywhere: two block shapes are two sets of bits.

    token_block: tokens per matmul block.
    row_block, query_block, key_block: rows, queries of a row and keys per attention block.
    """

    mode: Literal["plain", "invariant"] = "plain"
    token_block: int = 64
    row_block: int = 16
    query_block: int = 4
    key_block: int = 64

    @property
    def invariant(self) -> bool:
        """Whether bits must not depend on the batch."""
        return self.mode == "invariant"


def opaque_int(value: int) -> Int[Array, ""]:
    """`value` as a number that the compiler cannot see.

    A loop whose trip count is known may be inlined into, and fused with, the
    program around it. With a count known only at run time its body is compiled
    by itself.
    """
    return lax.optimization_barrier(jnp.int32(value))


def isolated(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` compiled as a computation of its own, so that its bits do not depend on its surroundings."""
    shapes = jax.eval_shape(fn, *args)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return lax.fori_loop(0, opaque_int(1), lambda _, __: fn(*args), empty)


def _leading(inputs: tuple[Array, ...]) -> int:
    return inputs[0].shape[0]


def _loop_over_blocks(fn: Callable[..., Any], block: int, weights: Any, inputs: tuple[Array, ...]) -> Any:
    """Apply `fn` to blocks of `block` tokens; a last block that does not fit overlaps the one before it."""
    count = _leading(inputs)
    if count < block:
        padded = tuple(jnp.pad(x, [(0, block - count)] + [(0, 0)] * (x.ndim - 1)) for x in inputs)
        outputs = _loop_over_blocks(fn, block, weights, padded)
        return jax.tree.map(lambda y: y[:count], outputs)

    def take(start: Int[Array, ""]) -> tuple[Array, ...]:
        return tuple(lax.dynamic_slice_in_dim(x, start, block) for x in inputs)

    shapes = jax.eval_shape(fn, weights, *jax.eval_shape(take, jnp.int32(0)))
    outputs = jax.tree.map(lambda s: jnp.zeros((count, *s.shape[1:]), s.dtype), shapes)

    def body(i: Int[Array, ""], outputs: Any) -> Any:
        start = jnp.minimum(i * block, count - block)
        blocks = fn(weights, *take(start))
        return jax.tree.map(lambda y, b: lax.dynamic_update_slice_in_dim(y, b, start, 0), outputs, blocks)

    return lax.fori_loop(0, opaque_int(-(-count // block)), body, outputs)


def _kernels_suffice(fn: Callable[..., Any], weights: Any, inputs: tuple[Array, ...]) -> bool:
    """Whether kernels do all of `fn` that has an order, for `_AT_ONCE` tokens; with any number the answer is that."""

    def most(x: Array) -> Array:
        return jnp.broadcast_to(x[:1], (_AT_ONCE, *x.shape[1:]))

    if not on_a_cpu() or not _leading(inputs):
        return False
    try:
        with kernels_alone():
            jax.eval_shape(lambda weights, *inputs: fn(weights, *map(most, inputs)), weights, *inputs)
    except NoKernelError:
        return False
    return True


def _invariantly(fn: Callable[..., Any], block: int, weights: Any, inputs: tuple[Array, ...]) -> Any:
    if not _kernels_suffice(fn, weights, inputs):
        return _loop_over_blocks(fn, block, weights, inputs)
    with kernels_alone():
        if _leading(inputs) <= _AT_ONCE:
            return fn(weights, *inputs)
        return _loop_over_blocks(fn, _AT_ONCE, weights, inputs)


def beside_kernels(fn: Callable[..., Any], inputs: tuple[Array, ...]) -> Any:
    """`fn(*inputs)`, within a function for `map_tokens`: the part of it that is the compiler's, whatever does the rest.

    Where kernels do the rest, it runs in blocks of a few tokens; what goes into it is computed before, and not fused.
    `fn` treats every token (leading axis) by itself and closes over no traced array.
    """
    if not in_kernels_alone():
        return fn(*inputs)
    return _loop_over_blocks(lambda _, *inputs: fn(*inputs), _LAWS, (), inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blocked(fn: Callable[..., Any], block: int, weights: Any, inputs: tuple[Array, ...]) -> Any:
    return _invariantly(fn, block, weights, inputs)


def _blocked_fwd(fn: Callable[..., Any], block: int, weights: Any, inputs: tuple[Array, ...]) -> Any:
    return _invariantly(fn, block, weights, inputs), (weights, inputs)


def _blocked_bwd(fn: Callable[..., Any], block: int, residuals: Any, cotangents: Any) -> Any:
    # The gradient need not be invariant, so it is that of the plain function,
    # recomputed from the block's inputs.
    weights, inputs = residuals
    _, pullback = jax.vjp(lambda w, x: fn(w, *x), weights, inputs)
    return pullback(cotangents)


_blocked.defvjp(_blocked_fwd, _blocked_bwd)


def in_chunks(fn: Callable[..., Any], weights: Any, inputs: tuple[Array, ...], chunk: int) -> Any:
    """As `map_tokens`, `chunk` tokens after another; the gradient computes every chunk's insides again.

    For functions whose insides are much larger than what they take and return: laws over a vocabulary, attention.
    """
    count = _leading(inputs)
    if count <= chunk:
        return fn(weights, *inputs)
    chunks = -(-count // chunk)

    def cut(x: Array) -> Array:
        return jnp.pad(x, [(0, chunks * chunk - count)] + [(0, 0)] * (x.ndim - 1)).reshape(chunks, chunk, *x.shape[1:])

    one = jax.checkpoint(lambda weights, x: fn(weights, *x))
    outputs = lax.map(lambda x: one(weights, x), tuple(map(cut, inputs)))
    return jax.tree.map(lambda y: y.reshape(chunks * chunk, *y.shape[2:])[:count], outputs)


def map_tokens(fn: Callable[..., Any], weights: Any, inputs: tuple[Array, ...], numerics: Numerics) -> Any:
    """`fn(weights, *inputs)` for a function that treats every token (leading axis) by itself.

    Args:
        fn: token-wise function; it may not close over traced arrays.
        weights: pytree shared by all tokens.
        inputs: arrays whose leading axis is the token.
        numerics: plain, or by kernels, or in blocks of `token_block` tokens.

    Returns:
        What `fn` returns; every leaf has the token as its leading axis.
    """
    if not numerics.invariant:
        return fn(weights, *inputs)
    return _blocked(fn, numerics.token_block, weights, inputs)
