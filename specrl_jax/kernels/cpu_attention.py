"""Attention of a few queries over the pages of a cache, on a CPU.

A thread takes one row and one head of keys at a time, with all queries that read that head. Pages are read where they
lie, and only those that a row has, with a running softmax over them (Milakov and Gimelshein, arXiv 1805.02867). Queries
are taken four at a time, so that what is read of a page is used four times. The sums of a query are made in one order,
whatever else is computed: its bits do not depend on the batch.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from llvmlite import ir

from specrl_jax.kernels.attention_tile import (
    LINES,
    LITTLE,
    MASKED,
    MOST_SLOTS,
    MOST_WIDTH,
    NODES,
    Tiles,
    rounded_up,
    wide,
)
from specrl_jax.kernels.custom_call import Call, named, registered
from specrl_jax.kernels.llvm import F32, I32, I64, Pointer, Value, lanes

_MOST_LINES = 256  # that there is room for

Q, KEYS, VALUES, TABLE, BELOW, BITS, ENDS = range(7)
"""Operands."""


def kernel_fits(queries: int, page_size: int, head_dim: int, nodes: int) -> bool:
    """Whether the kernel takes so many queries of each head of keys, pages of that shape and trees of that size."""
    sizes = page_size % lanes() == 0 and head_dim % lanes() == 0
    return sizes and queries <= _MOST_LINES and page_size <= MOST_SLOTS and head_dim <= MOST_WIDTH and nodes <= NODES


def few_queries_attention(
    q: Float[Array, "r q h c"],
    keys: Float[Array, "p g c s"],
    values: Float[Array, "p g s c"],
    table: Int[Array, "r m"],
    below: Int[Array, "r q"],
    bits: Int[Array, "r q"],
    ends: Int[Array, "r"],
) -> Float[Array, "r q h c"]:
    """Attention of a few queries of each row, all float32; of a query that reads nothing it is 0.

    Args:
        q: rotated queries.
        keys, values: pools of one layer; keys with the slots of a page side by side.
        table: pages of every row; every page that holds one of the `ends` slots is in the pool.
        below: slots before this one are read.
        bits: of the slots from there on, those that are read.
        ends: slots of each row that any of its queries may read.
    """
    result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    call = jax.ffi.ffi_call(registered(Attention()), result, vmap_method="sequential")
    return call(q, keys, values, table, below, bits, ends)


@dataclass(frozen=True)
class Attention(Tiles):
    """`few_queries_attention` as a custom call."""

    name: str = field(default_factory=lambda: named("specrl_jax_attention"))

    def prepare(self, module: ir.Module) -> None:
        """Products with keys of a page too."""
        super().prepare(module)
        self.write_products(module, "scores", fresh=True)

    def blocks(self, call: Call) -> Value:
        """Rows and heads of keys."""
        return call.size(Q, 0) * call.size(KEYS, 1)

    def threads(self, call: Call) -> Value:
        """By the multiplications."""
        slots = call.code.variable(call.code.number(0))
        with call.code.loop(0, call.size(Q, 0)) as row:
            slots[0] = slots[0] + call.operand(ENDS, I32)[row].as_type(I64, "sext")
        return slots[0] * 2 * call.size(Q, 1) * call.size(Q, 2) * call.size(Q, 3) // LITTLE + 1

    def block(self, call: Call, index: Value) -> None:
        """All queries of a row that read one head of keys."""
        code, lines = call.code, _Lines.of_block(call, index)
        slots, width, result = call.size(VALUES, 2), call.size(Q, 3), call.result(0)
        tops, totals = (code.room(F32, _MOST_LINES + LINES) for _ in range(2))
        with code.loop(0, lines.count) as line:
            tops[line], totals[line] = MASKED, 0.0
            self.clear(code, result + lines.place(line), width)
        end = call.operand(ENDS, I32)[lines.row].as_type(I64, "sext")
        pages = (end + slots - 1) // slots
        with code.loop(0, pages) as j:
            here, next_ = lines.page(j), lines.page((j + 1).least(pages - 1))
            with code.loop(0, lines.count, LINES) as first, code.if_(j * slots < lines.reach(first)):
                # The first lines ask for the next page, the others for what is there.
                ahead = [first.equals(0).where_pointer(*both) for both in zip(next_, here, strict=True)]
                self._tile(call, lines, first, j * slots, (here, ahead), (tops, totals))
        with code.loop(0, lines.count) as line:
            self.divide(code, result + lines.place(line), width, totals[line])

    def _tile(
        self,
        call: Call,
        lines: "_Lines",
        first: Value,
        start: Value,
        pages: tuple[Sequence[Pointer], Sequence[Pointer]],
        state: tuple[Pointer, Pointer],
    ) -> None:
        """A few lines read a page whose first slot is `start`. Lines beyond the last write where nobody looks.

        pages: keys and values of this page, and of one to ask for.
        """
        code, slots, width = call.code, call.size(VALUES, 2), call.size(Q, 3)
        # What no line of the tile reads is left out, of which a weight would be 0.
        read = rounded_up(lines.reach(first) - start, lanes()).least(slots)
        scored = read.equals(lanes()).where(read, rounded_up(read, wide() * lanes())).least(slots)
        spare, scores = code.room(F32, MOST_WIDTH), code.room(F32, LINES * MOST_SLOTS)
        known = lines.tile(first)
        asking = [call.operand(Q) + lines.place(line) for line in known]
        rows = [scores + MOST_SLOTS * i for i in range(LINES)]
        outs = [
            (first + i < lines.count).where_pointer(call.result(0) + lines.place(line), spare)
            for i, line in enumerate(known)
        ]
        (keys, values), (more_keys, more_values) = pages
        nothing = [code.float(0.0)] * LINES
        self.products(code, "scores", asking, (keys, more_keys), (scored, slots, width), rows, nothing)
        state_of_lines = [memory + (first + i) for memory in state for i in range(LINES)]
        masks = [lines.mask(line) for line in known]
        factors = self.weigh(code, scores, (start, read), width, masks, state_of_lines)
        self.products(code, "mix", rows, (values, more_values), (width, width, read), outs, factors)


@dataclass(frozen=True)
class _Lines:
    """Queries of a row that read one head of keys, those of a token side by side; `shared` heads of queries read it."""

    call: Call
    row: Value
    group: Value
    shared: Value

    @classmethod
    def of_block(cls, call: Call, index: Value) -> "_Lines":
        """Those of a block."""
        groups = call.size(KEYS, 1)
        return cls(call, index // groups, index % groups, call.size(Q, 2) // groups)

    @property
    def count(self) -> Value:
        """How many there are."""
        return self.call.size(Q, 1) * self.shared

    def tile(self, first: Value) -> list[Value]:
        """A few from `first` on; the last again where there are no more."""
        return [(first + i).least(self.count - 1) for i in range(LINES)]

    def _query(self, line: Value) -> Value:
        return self.row * self.call.size(Q, 1) + line // self.shared

    def place(self, line: Value) -> Value:
        """Where it lies among the queries, and its result among the results."""
        head = self.group * self.shared + line % self.shared
        return (self._query(line) * self.call.size(Q, 2) + head) * self.call.size(Q, 3)

    def page(self, number: Value) -> tuple[Pointer, Pointer]:
        """Keys and values of a page of the row; of one beyond the pool, those of the last."""
        call = self.call
        page = call.operand(TABLE, I32)[self.row * call.size(TABLE, 1) + number].as_type(I64, "sext")
        page = page.least(call.size(KEYS, 0) - 1).most(0)
        at = (page * call.size(KEYS, 1) + self.group) * call.size(VALUES, 2) * call.size(VALUES, 3)
        return call.operand(KEYS) + at, call.operand(VALUES) + at

    def mask(self, line: Value) -> tuple[Value, Value]:
        """Its `below` and `bits`."""
        return self.call.operand(BELOW, I32)[self._query(line)], self.call.operand(BITS, I32)[self._query(line)]

    def reach(self, first: Value) -> Value:
        """The slots before which those of a tile read."""
        ends = []
        for line in self.tile(first):
            below, bits = self.mask(line)
            ends.append(bits.equals(0).where(below, below + NODES))
        return functools.reduce(Value.most, ends).as_type(I64, "sext")
