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
from specrl_jax.kernels.elementary import sigmoid
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
_MOST_TOKENS = 128  # whose products of a block stay near
_TOKENS = 4  # of a tile
_LITTLE = 100_000  # multiplications that are not worth another thread


def _tile_rows() -> int:
    """Of a tile: as many as registers hold sums of."""
    return 4 if registers().count > 16 else 2


def fits(inputs: int, outputs: int) -> bool:
    """Whether kernels of this shape are multiplied here."""
    return inputs % max(lanes(), LINE) == 0 and outputs % _tile_rows() == 0


def in_blocks(tokens: int, outputs: int) -> bool:
    """Whether something can be done with products while they are near: `product_plus` and `gated_product`."""
    return tokens <= _MOST_TOKENS and outputs % max(_BLOCK, lanes()) == 0


def product(x: Float[Array, "n i"], kernels: Sequence[Float[Array, "_ i"]]) -> tuple[Float[Array, "n _"], ...]:
    """`x @ kernel.T` for each of some float32 kernels whose shapes fit."""
    results = [jax.ShapeDtypeStruct((x.shape[0], kernel.shape[0]), jnp.float32) for kernel in kernels]
    return tuple(jax.ffi.ffi_call(registered(Product()), results, vmap_method="sequential")(x, *kernels))


def product_plus(x: Float[Array, "n i"], kernel: Float[Array, "o i"], more: Float[Array, "n o"]) -> Float[Array, "n o"]:
    """`x @ kernel.T + more`."""
    result = jax.ShapeDtypeStruct(more.shape, jnp.float32)
    return jax.ffi.ffi_call(registered(ProductPlus()), result, vmap_method="sequential")(x, kernel, more)


def gated_product(x: Float[Array, "n i"], gate: Float[Array, "o i"], up: Float[Array, "o i"]) -> Float[Array, "n o"]:
    """`silu(x @ gate.T) * (x @ up.T)`."""
    result = jax.ShapeDtypeStruct((x.shape[0], gate.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(registered(GatedProduct()), result, vmap_method="sequential")(x, gate, up)


@dataclass(frozen=True)
class Product(Kernel):
    """Operands `x [n, in]` and kernels `[out, in]`, results `[n, out]`, all float32."""

    name: str = field(default_factory=lambda: named("specrl_jax_product"))
    tiles: dict[tuple[int, int], ir.Function] = field(default_factory=dict, compare=False)

    def prepare(self, module: ir.Module) -> None:
        """A function for every number of tokens of a tile, and of places to ask for at each of its steps."""
        for tokens in range(1, _TOKENS + 1):
            for asks in sorted(
                {-(-_tile_rows() * lanes() // groups // lanes()) for groups in range(1, _tile_rows() + 1)} | {0}
            ):
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
        rows = call.size(kernel[0], 0)
        self._rows(call, kernel[0], left[0] * _BLOCK, call.result(kernel[0] - 1), rows)

    def _rows(self, call: Call, kernel: Value | int, start: Value, out: Pointer, across: Value) -> None:
        """Those of a block, a tile's at a time, with all tokens, whose sums lie `across` apart."""
        weights, rows, tokens, width = call.operand(kernel), call.size(kernel, 0), call.size(0, 0), call.size(0, 1)
        asks, apart = _asking(call, tokens)
        with call.code.loop(start, (start + _BLOCK).least(rows), _tile_rows()) as row:
            ahead = call.code.variable((row + _tile_rows()) * width)
            with call.code.loop(0, tokens, _TOKENS) as token:
                size = (tokens - token).least(_TOKENS)
                here = weights + row * width, call.operand(0) + token * width, out + (token * across + row)
                self._tile(call, size, asks, [*here, width, across, weights + ahead[0], apart])
                ahead[0] = ahead[0] + width // lanes() * apart

    def _tile(self, call: Call, size: Value, asks: Value, arguments: Sequence[Value | Pointer]) -> None:
        """The function for a tile of `size` tokens that asks for so many places at a step."""
        for (tokens, places), tile in self.tiles.items():
            with call.code.if_(size.equals(tokens) & asks.equals(places)):
                call.code.call(tile, *arguments)


@dataclass(frozen=True)
class ProductPlus(Product):
    """Operands `x`, one kernel, and what is added to their product, `[n, out]`."""

    name: str = field(default_factory=lambda: named("specrl_jax_product_plus"))

    def blocks(self, call: Call) -> Value:
        """Of the kernel."""
        return _blocks_of(call, 1)

    def threads(self, call: Call) -> Value:
        """By the multiplications of one kernel."""
        return call.size(1, 0) * call.size(0, 0) * call.size(0, 1) // _LITTLE + 1

    def block(self, call: Call, index: Value) -> None:
        """Products, to which the rest is added while they are near."""
        start, rows, out, more = index * _BLOCK, call.size(1, 0), call.result(0), call.operand(2)
        self._rows(call, 1, start, out, rows)
        with call.code.loop(0, call.size(0, 0)) as token, call.code.loop(0, _BLOCK, lanes()) as row:
            place = token * rows + start + row
            out.set_vector(place, out.vector(place) + more.vector(place))


@dataclass(frozen=True)
class GatedProduct(ProductPlus):
    """Operands `x`, and the kernels of what gates and of what is gated."""

    name: str = field(default_factory=lambda: named("specrl_jax_product_gated"))

    def block(self, call: Call, index: Value) -> None:
        """Both products of a block; the second one waits nearby for the first."""
        start, rows, out = index * _BLOCK, call.size(1, 0), call.result(0)
        raised, across = call.code.room(F32, _MOST_TOKENS * _BLOCK), call.code.number(_BLOCK)
        self._rows(call, 1, start, out, rows)
        self._rows(call, 2, start, raised + start * -1, across)
        with call.code.loop(0, call.size(0, 0)) as token, call.code.loop(0, _BLOCK, lanes()) as row:
            place = token * rows + start + row
            gate = out.vector(place)
            out.set_vector(place, gate * sigmoid(gate) * raised.vector(token * _BLOCK + row))


def _asking(call: Call, tokens: Value) -> tuple[Value, Value]:
    """Places that a tile asks for at a step, and how many floats on it asks at the next.

    The tiles of some rows, one for every group of tokens, ask for as many rows ahead.
    """
    groups = (tokens + (_TOKENS - 1)) // _TOKENS
    apart = call.code.number(_tile_rows() * lanes()) // groups
    return (apart + (lanes() - 1)) // lanes(), apart


def _blocks_of(call: Call, kernel: Value | int) -> Value:
    return (call.size(kernel, 0) + (_BLOCK - 1)) // _BLOCK


def _write_tile(module: ir.Module, tokens: int, asks: int) -> ir.Function:
    """Sums of a few rows with a few tokens.

    Arguments: rows, tokens, sums, width, size of a token's sums, what to ask for, and how far apart at each step.
    """
    kinds = [ADDRESS, ADDRESS, ADDRESS, I64, I64, ADDRESS, I64]
    with function(module, f"tile_{tokens}_{asks}", NOTHING, kinds) as (tile, code):
        weights, x, y, asked = (code.pointer(i, F32) for i in (0, 1, 2, 5))
        width, across, apart = code.arguments[3], code.arguments[4], code.arguments[6]
        sums = [[code.variable(code.zeros()) for _ in range(_tile_rows())] for _ in range(tokens)]
        with code.loop(0, width, lanes()) as i:
            read = [(weights + width * row).vector(i) for row in range(_tile_rows())]
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
            for place in range(0, len(some), _tile_rows()):
                own = together.shuffled(together, range(place, place + _tile_rows()))
                (y + across * ((first + place) // _tile_rows())).set_vector(0, own)
    return tile
