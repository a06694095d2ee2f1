"""Products of a few tokens with kernels `[out, in]`, on a CPU.

A few tokens cost little more than one does, which is the reading of the kernel. XLA's products pack it first. Here
tiles of a few of its rows and a few tokens stay in registers while both are read once along `in`, and the rows that
come next are asked for meanwhile. Every sum is made in one order, whatever the number of tokens, so that the bits of a
token do not depend on the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from llvmlite import ir

from specrl_jax.kernels.custom_call import Call, Kernel, named, registered
from specrl_jax.kernels.llvm import (
    ADDRESS,
    F32,
    I64,
    LINE,
    NOTHING,
    Pointer,
    Value,
    function,
    lane_sums,
    lanes,
    registers,
)

_BLOCK = 16  # rows of a kernel
_TOKENS = 4  # of a tile
_LITTLE = 100_000  # multiplications that are not worth another thread


def _rows() -> int:
    """Of a tile: as many as registers hold sums of."""
    return 4 if registers().count > 16 else 2


def fits(inputs: int, outputs: int) -> bool:
    """Whether kernels of this shape are multiplied here."""
    return inputs % max(lanes(), LINE) == 0 and outputs % _rows() == 0


def product(x: Float[Array, "n i"], kernels: Sequence[Float[Array, "_ i"]]) -> tuple[Float[Array, "n _"], ...]:
    """`x @ kernel.T` for each of some float32 kernels whose shapes fit."""
    results = [jax.ShapeDtypeStruct((x.shape[0], kernel.shape[0]), jnp.float32) for kernel in kernels]
    return tuple(jax.ffi.ffi_call(registered(Product()), results, vmap_method="sequential")(x, *kernels))


@dataclass(frozen=True)
class Product(Kernel):
    """Operands `x [n, in]` and kernels `[out, in]`, results `[n, out]`, all float32."""

    name: str = field(default_factory=lambda: named("specrl_jax_product"))
    tiles: dict[tuple[int, int], ir.Function] = field(default_factory=dict, compare=False)

    def prepare(self, module: ir.Module) -> None:
        """A function for every number of tokens of a tile, and of places to ask for at each of its steps."""
        for tokens in range(1, _TOKENS + 1):
            for asks in sorted({-(-_rows() * lanes() // groups // lanes()) for groups in range(1, _rows() + 1)} | {0}):
                self.tiles[tokens, asks] = _write_tile(module, tokens, asks)

    def blocks(self, call: Call) -> Value:
        """Blocks of rows, of one kernel after another."""
        total = call.code.variable(call.code.number(0))
        with call.code.loop(1, call.operands) as kernel:
            total[0] = total[0] + _blocks_of(call, kernel)
        return total[0]

    def threads(self, call: Call) -> Value:
        """By the multiplications."""
        total = call.code.variable(call.code.number(0))
        with call.code.loop(1, call.operands) as kernel:
            total[0] = total[0] + call.size(kernel, 0)
        return total[0] * call.size(0, 0) * call.size(0, 1) // _LITTLE + 1

    def block(self, call: Call, index: Value) -> None:
        """Rows of the kernel that the block falls into, a tile's at a time, with all tokens."""
        left, kernel = call.code.variable(index), call.code.variable(call.code.number(1))
        with call.code.while_(lambda: left[0] > _blocks_of(call, kernel[0]) - 1):
            left[0] = left[0] - _blocks_of(call, kernel[0])
            kernel[0] = kernel[0] + 1
        weights, out = call.operand(kernel[0]), call.result(kernel[0] - 1)
        rows, tokens, width = call.size(kernel[0], 0), call.size(0, 0), call.size(0, 1)
        start = left[0] * _BLOCK
        asks, apart = _asking(call, tokens)
        with call.code.loop(start, (start + _BLOCK).least(rows), _rows()) as row:
            ahead = call.code.variable((row + _rows()) * width)
            with call.code.loop(0, tokens, _TOKENS) as token:
                size = (tokens - token).least(_TOKENS)
                here = weights + row * width, call.operand(0) + token * width, out + (token * rows + row)
                self._tile(call, size, asks, [*here, width, rows, weights + ahead[0], apart])
                ahead[0] = ahead[0] + width // lanes() * apart

    def _tile(self, call: Call, size: Value, asks: Value, arguments: Sequence[Value | Pointer]) -> None:
        """The function for a tile of `size` tokens that asks for so many places at a step."""
        for (tokens, places), tile in self.tiles.items():
            with call.code.if_(size.equals(tokens) & asks.equals(places)):
                call.code.call(tile, *arguments)


def _asking(call: Call, tokens: Value) -> tuple[Value, Value]:
    """Places that a tile asks for at a step, and how many floats on it asks at the next.

    The tiles of some rows, one for every group of tokens, ask for as many rows ahead.
    """
    groups = (tokens + (_TOKENS - 1)) // _TOKENS
    apart = call.code.number(_rows() * lanes()) // groups
    return (apart + (lanes() - 1)) // lanes(), apart


def _blocks_of(call: Call, kernel: Value) -> Value:
    return (call.size(kernel, 0) + (_BLOCK - 1)) // _BLOCK


def _write_tile(module: ir.Module, tokens: int, asks: int) -> ir.Function:
    """Sums of a few rows with a few tokens.

    Arguments: rows, tokens, sums, width, size of a token's sums, what to ask for, and how far apart at each step.
    """
    kinds = [ADDRESS, ADDRESS, ADDRESS, I64, I64, ADDRESS, I64]
    with function(module, f"tile_{tokens}_{asks}", NOTHING, kinds) as (tile, code):
        weights, x, y, asked = (code.pointer(i, F32) for i in (0, 1, 2, 5))
        width, across, apart = code.arguments[3], code.arguments[4], code.arguments[6]
        sums = [[code.variable(code.zeros()) for _ in range(_rows())] for _ in range(tokens)]
        with code.loop(0, width, lanes()) as i:
            read = [(weights + width * row).vector(i) for row in range(_rows())]
            for place in range(asks):
                (asked + (i // lanes() * apart + place * lanes())).prefetch()
            for token, of_token in enumerate(sums):
                column = (x + width * token).vector(i)
                for sum_, weight in zip(of_token, read, strict=True):
                    sum_[0] = sum_[0].plus_product(column, weight)
        ended = [sum_[0] for of_token in sums for sum_ in of_token]
        for first in range(0, len(ended), lanes()):
            some = ended[first : first + lanes()]
            together = lane_sums(some + [code.zeros()] * (lanes() - len(some)))
            for place in range(0, len(some), _rows()):
                own = together.shuffled(together, range(place, place + _rows()))
                (y + across * ((first + place) // _rows())).set_vector(0, own)
    return tile
