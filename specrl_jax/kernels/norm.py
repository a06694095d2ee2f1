"""Root-mean-square norm and rotary embedding of a few tokens, on a CPU.

XLA makes several small operations of either, each of which costs more to start than to do.
"""

import operator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from llvmlite import ir

from specrl_jax.kernels.custom_call import Call, Kernel, named, registered
from specrl_jax.kernels.llvm import Pointer, Value, lanes

_LITTLE = 100_000  # numbers that are not worth another thread


def fits(width: int, rotates: bool) -> bool:
    """Whether heads of this width are taken."""
    return width % (2 * lanes() if rotates else lanes()) == 0


def norm_and_rotate(
    x: Float[Array, "n h c"],
    norm: tuple[Float[Array, "c"], float] | None,
    angles: tuple[Float[Array, "n 1 half"], Float[Array, "n 1 half"]] | None,
) -> Float[Array, "n h c"]:
    """Heads of every token, float32, normed by a weight with an epsilon and then rotated by cosines and sines.

    Either may be left out. Channel `i` turns with channel `i + c/2`.
    """
    operands = [x]
    if norm is not None:
        operands += [norm[0], jnp.full((1,), norm[1], jnp.float32)]
    kernel = registered(NormAndRotate(norm is not None, angles is not None))
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return jax.ffi.ffi_call(kernel, result, vmap_method="sequential")(*operands, *(angles or ()))


@dataclass(frozen=True)
class NormAndRotate(Kernel):
    """Operands `x [n, h, c]`, then weight `[c]` and epsilon `[1]`, then cosines and sines `[n, 1, c / 2]`."""

    norms: bool
    rotates: bool
    name: str = field(init=False, default="")

    def __post_init__(self) -> None:
        what = ("_norm" if self.norms else "") + ("_rotate" if self.rotates else "")
        object.__setattr__(self, "name", named(f"specrl_jax{what}"))

    def prepare(self, module: ir.Module) -> None:
        """Nothing is called."""

    def blocks(self, call: Call) -> Value:
        """Tokens."""
        return call.size(0, 0)

    def threads(self, call: Call) -> Value:
        """By the numbers."""
        return call.size(0, 0) * call.size(0, 1) * call.size(0, 2) // _LITTLE + 1

    def block(self, call: Call, index: Value) -> None:
        """The heads of a token."""
        heads, width = call.size(0, 1), call.size(0, 2)
        with call.code.loop(0, heads) as head:
            place = (index * heads + head) * width
            x, y = call.operand(0) + place, call.result(0) + place
            if self.norms:
                self._norm(call, x, y, width)
            if self.rotates:
                half = width // 2
                turned = [call.operand(2 * self.norms + i) + index * half for i in (1, 2)]
                self._rotate(call, y if self.norms else x, y, half, *turned)

    def _norm(self, call: Call, x: Pointer, y: Pointer, width: Value) -> None:
        code, weight, epsilon = call.code, call.operand(1), call.operand(2)
        squares = code.variable(code.zeros())
        with code.loop(0, width, lanes()) as c:
            squares[0] = squares[0].plus_product(x.vector(c), x.vector(c))
        mean = squares[0].folded(operator.add) / width.as_type(epsilon.kind, "sitofp")
        scale = (code.float(1.0) / (mean + epsilon[0]).root()).everywhere()
        with code.loop(0, width, lanes()) as c:
            y.set_vector(c, x.vector(c) * scale * weight.vector(c))

    def _rotate(self, call: Call, x: Pointer, y: Pointer, half: Value, cos: Pointer, sin: Pointer) -> None:
        with call.code.loop(0, half, lanes()) as c:
            first, second = x.vector(c), (x + half).vector(c)
            y.set_vector(c, first * cos.vector(c) - second * sin.vector(c))
            (y + half).set_vector(c, second * cos.vector(c) + first * sin.vector(c))
