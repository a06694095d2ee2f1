"""Attention of a few queries over the pages of a cache, on a CPU.

A thread takes one row and one head of keys at a time, with all queries that read that head. Pages are read where they
lie, and only those that a row has, with a running softmax over them (Milakov and Gimelshein, arXiv 1805.02867). Queries
are taken four at a time, so that what is read of a page is used four times. The sums of a query are made in one order,
whatever else is computed: its bits do not depend on the batch.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from llvmlite import ir

from specrl_jax.kernels.custom_call import Call, Kernel, named, registered
from specrl_jax.kernels.elementary import exp
from specrl_jax.kernels.llvm import (
    ADDRESS,
    F32,
    I32,
    I64,
    LINE,
    NOTHING,
    Code,
    Pointer,
    Value,
    function,
    lanes,
    registers,
)

_MASKED = -1e30
_LINES = 4  # queries of a tile
_MOST_LINES, _MOST_SLOTS, _MOST_WIDTH = 256, 256, 512  # that there is room for
_LITTLE = 100_000  # multiplications that are not worth another thread
_NODES = 32  # of a tree, as the bits of a word

Q, KEYS, VALUES, TABLE, BELOW, BITS, ENDS = range(7)
"""Operands."""


def _wide() -> int:
    """Vectors that a tile is wide."""
    return 4 if registers().count > 16 else 2


def kernel_fits(queries: int, page_size: int, head_dim: int, nodes: int) -> bool:
    """Whether the kernel takes so many queries of each head of keys, pages of that shape and trees of that size."""
    sizes = page_size % lanes() == 0 and head_dim % lanes() == 0
    return sizes and queries <= _MOST_LINES and page_size <= _MOST_SLOTS and head_dim <= _MOST_WIDTH and nodes <= _NODES


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
class Attention(Kernel):
    """`few_queries_attention` as a custom call."""

    name: str = field(default_factory=lambda: named("specrl_jax_attention"))
    functions: dict[str, ir.Function] = field(default_factory=dict, compare=False)

    def prepare(self, module: ir.Module) -> None:
        """Products of a tile, wide and one vector wide, and the softmax of its lines, with masks and without."""
        for name, width in (("wide", _wide()), ("narrow", 1)):
            self.functions[f"scores_{name}"] = _write_outer(module, f"scores_{name}", width, fresh=True)
            self.functions[f"mix_{name}"] = _write_outer(module, f"mix_{name}", width, fresh=False)
        for name, masked in (("weigh", True), ("weigh_all", False)):
            self.functions[name] = _write_weigh(module, name, masked)

    def blocks(self, call: Call) -> Value:
        """Rows and heads of keys."""
        return call.size(Q, 0) * call.size(KEYS, 1)

    def threads(self, call: Call) -> Value:
        """By the multiplications."""
        slots = call.code.variable(call.code.number(0))
        with call.code.loop(0, call.size(Q, 0)) as row:
            slots[0] = slots[0] + call.operand(ENDS, I32)[row].as_type(I64, "sext")
        return slots[0] * 2 * call.size(Q, 1) * call.size(Q, 2) * call.size(Q, 3) // _LITTLE + 1

    def block(self, call: Call, index: Value) -> None:
        """All queries of a row that read one head of keys."""
        code, lines = call.code, _Lines.of_block(call, index)
        slots, width, result = call.size(VALUES, 2), call.size(Q, 3), call.result(0)
        tops, totals = (code.room(F32, _MOST_LINES + _LINES) for _ in range(2))
        with code.loop(0, lines.count) as line:
            tops[line], totals[line] = _MASKED, 0.0
            with code.loop(0, width, lanes()) as c:
                (result + lines.place(line)).set_vector(c, code.zeros())
        end = call.operand(ENDS, I32)[lines.row].as_type(I64, "sext")
        pages = (end + slots - 1) // slots
        with code.loop(0, pages) as j:
            here, next_ = lines.page(j), lines.page((j + 1).least(pages - 1))
            with code.loop(0, lines.count, _LINES) as first, code.if_(j * slots < lines.reach(first)):
                # The first lines ask for the next page, the others for what is there.
                ahead = [first.equals(0).where_pointer(*both) for both in zip(next_, here, strict=True)]
                self._tile(call, lines, first, j * slots, (here, ahead), (tops, totals))
        with code.loop(0, lines.count) as line:
            share = (code.float(1.0) / totals[line].most(1e-30)).everywhere()
            out = result + lines.place(line)
            with code.loop(0, width, lanes()) as c:
                out.set_vector(c, out.vector(c) * share)

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
        read = _rounded_up(lines.reach(first) - start, lanes()).least(slots)
        scored = read.equals(lanes()).where(read, _rounded_up(read, _wide() * lanes())).least(slots)
        spare, scores = code.room(F32, _MOST_WIDTH), code.room(F32, _LINES * _MOST_SLOTS)
        known = lines.tile(first)
        asking = [call.operand(Q) + lines.place(line) for line in known]
        rows = [scores + _MOST_SLOTS * i for i in range(_LINES)]
        outs = [
            (first + i < lines.count).where_pointer(call.result(0) + lines.place(line), spare)
            for i, line in enumerate(known)
        ]
        (keys, values), (more_keys, more_values) = pages
        nothing = [code.float(0.0)] * _LINES
        self._products(code, "scores", asking, (keys, more_keys), (scored, slots, width), rows, nothing)
        factors = code.room(F32, _LINES)
        state_of_lines = [memory + (first + i) for memory in state for i in range(_LINES)]
        masks = [lines.mask(line) for line in known]
        whole = functools.reduce(Value.least, [below for below, _ in masks]).as_type(I64, "sext") > start + read - 1
        for name, wanted in (("weigh_all", whole.equals(1)), ("weigh", whole.equals(0))):
            with code.if_(wanted):
                arguments = [word for mask in masks for word in mask] + state_of_lines
                code.call(self.functions[name], scores, read, width, start, *arguments, factors)
        counted = [factors[i] for i in range(_LINES)]
        self._products(code, "mix", rows, (values, more_values), (width, width, read), outs, counted)

    def _products(
        self,
        code: Code,
        name: str,
        lines: list[Pointer],
        others: tuple[Pointer, Pointer],
        sizes: tuple[Value, Value, Value],
        outs: list[Pointer],
        factors: list[Value],
    ) -> None:
        """`out = factor * out + line @ others`, a few vectors at a time and then one.

        sizes: numbers of `out`, how far apart those of `others` for two numbers of a line begin, and numbers of a line.
        """
        across, apart, along = sizes
        step = _wide() * lanes()
        whole = across // step * step
        for width, start, stop in (("wide", 0, whole), ("narrow", whole, across)):
            with code.loop(start, stop, step if width == "wide" else lanes()) as c:
                read, written = ([place + c for place in places] for places in (others, outs))
                code.call(self.functions[f"{name}_{width}"], *lines, *read, apart, along, *written, *factors)


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
        return [(first + i).least(self.count - 1) for i in range(_LINES)]

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
            ends.append(bits.equals(0).where(below, below + _NODES))
        return functools.reduce(Value.most, ends).as_type(I64, "sext")


def _rounded_up(size: Value, step: int) -> Value:
    return (size + (step - 1)) // step * step


def _write_outer(module: ir.Module, name: str, width: int, fresh: bool) -> ir.Function:
    """`out = factor * out + line @ others` for a few lines and `width` vectors of `others`; fresh: without what it was.

    Arguments: lines, others, what to ask for meanwhile, how far apart others lie, numbers of a line, outs, factors.
    """
    kinds = [ADDRESS] * (_LINES + 2) + [I64, I64] + [ADDRESS] * _LINES + [F32] * _LINES
    with function(module, name, NOTHING, kinds) as (made, code):
        lines = [code.pointer(i, F32) for i in range(_LINES)]
        others, ahead = (code.pointer(_LINES + i, F32) for i in range(2))
        apart, along = code.arguments[_LINES + 2 : _LINES + 4]
        outs = [code.pointer(_LINES + 4 + i, F32) for i in range(_LINES)]
        factors = code.arguments[-_LINES:]
        sums = []
        for out, factor in zip(outs, factors, strict=True):
            scale = factor.everywhere()
            starts = [code.zeros() if fresh else out.vector(v * lanes()) * scale for v in range(width)]
            sums.append([code.variable(start) for start in starts])
        with code.loop(0, along) as i:
            read = [(others + i * apart).vector(v * lanes()) for v in range(width)]
            for offset in range(0, width * lanes(), LINE):
                (ahead + (i * apart + offset)).prefetch()
            for line, own in zip(lines, sums, strict=True):
                number = line[i].everywhere()
                for place, vector in zip(own, read, strict=True):
                    place[0] = place[0].plus_product(number, vector)
        for out, own in zip(outs, sums, strict=True):
            for v, place in enumerate(own):
                out.set_vector(v * lanes(), place[0])
    return made


def _write_weigh(module: ir.Module, name: str, masked: bool) -> ir.Function:
    """The softmax of a tile's lines goes on over a page: scores become weights, and the sums so far count a factor.

    Arguments: scores, slots to read, width of a head, first slot, `below` and `bits` of every line, the lines' top
    scores, their totals, and factors. Unmasked where all lines read all of those slots.
    """
    kinds = [ADDRESS, I64, I64, I64] + [I32, I32] * _LINES + [ADDRESS] * (2 * _LINES + 1)
    with function(module, name, NOTHING, kinds) as (made, code):
        slots, width, start = code.arguments[1:4]
        rows = [code.pointer(0, F32) + _MOST_SLOTS * i for i in range(_LINES)]
        masks = [(code.arguments[4 + 2 * i], code.arguments[5 + 2 * i]) for i in range(_LINES)]
        tops, sums = ([code.pointer(4 + (2 + n) * _LINES + i, F32) for i in range(_LINES)] for n in range(2))
        factors = code.pointer(4 + 4 * _LINES, F32)
        scale = (code.float(1.0) / width.as_type(F32, "sitofp").root()).everywhere()

        def where_read(line: int, slot: Value, value: Value, other: float) -> Value:
            if not masked:
                return value
            below, bits = masks[line]
            ahead = (start + slot).as_type(I32, "trunc").everywhere() + code.count_up() - below.everywhere()
            own = (bits.everywhere() >> ahead.most(0).least(_NODES - 1)) & 1
            return ((ahead < 0) | ((ahead < _NODES) & own.equals(1))).where(value, other)

        highest = [code.variable(code.zeros() + _MASKED) for _ in rows]
        with code.loop(0, slots, lanes()) as slot:
            for line, scores in enumerate(rows):
                score = where_read(line, slot, scores.vector(slot) * scale, _MASKED)
                scores.set_vector(slot, score)
                highest[line][0] = highest[line][0].most(score)
        new_tops = [top[0].most(own[0].folded(Value.most)) for top, own in zip(tops, highest, strict=True)]
        weights = [code.variable(code.zeros()) for _ in rows]
        with code.loop(0, slots, lanes()) as slot:
            for line, (scores, top) in enumerate(zip(rows, new_tops, strict=True)):
                weight = where_read(line, slot, exp(scores.vector(slot) - top.everywhere()), 0.0)
                scores.set_vector(slot, weight)
                weights[line][0] = weights[line][0] + weight
        for line, new in enumerate(new_tops):
            factor = exp((tops[line][0] - new).everywhere()).first()
            tops[line][0] = new
            sums[line][0] = sums[line][0] * factor + weights[line][0].folded(operator.add)
            factors[line] = factor
    return made
