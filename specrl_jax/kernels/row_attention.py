"""Attention of a drafter's queries over the slots of their row, which lie side by side, and a few keys beside them.

XLA makes a dozen operations of it and reads all the slots that there is room for. Here a thread takes one row and one
head of keys at a time, and reads the slots that count.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from llvmlite import ir

from specrl_jax.kernels.attention_tile import LINES, LITTLE, MASKED, MOST_SLOTS, MOST_WIDTH, NODES, Tiles, rounded_up
from specrl_jax.kernels.custom_call import Call, named, registered
from specrl_jax.kernels.llvm import (
    ADDRESS,
    F32,
    I32,
    I64,
    NOTHING,
    Pointer,
    Value,
    function,
    lane_sums,
    lanes,
)

Q, KEYS, VALUES, START, STOP, OWN_KEYS, OWN_VALUES, BITS = range(8)
"""Operands."""


def fits(heads: int, kv_heads: int, head_dim: int, beside: int) -> bool:
    """Whether the kernel takes so many heads of such a width, with so many keys beside the slots."""
    return heads % kv_heads == 0 and head_dim % lanes() == 0 and head_dim <= MOST_WIDTH and beside <= NODES


def row_attention(
    q: Float[Array, "r m h c"],
    keys: Float[Array, "r g s c"],
    values: Float[Array, "r g s c"],
    start: Int[Array, "r"],
    stop: Int[Array, "r"],
    own_keys: Float[Array, "r g e c"],
    own_values: Float[Array, "r g e c"],
    sees: Bool[Array, "m e"],
) -> Float[Array, "r m h c"]:
    """Attention of `m` queries of each row, all float32; of a query that reads nothing it is 0.

    Args:
        q: rotated queries.
        keys, values: of the slots, of which all queries read those from `start` to before `stop`.
        start, stop: of each row. What lies beyond the slots counts as their ends; from `stop` on none is read.
        own_keys, own_values: beside the slots.
        sees: of those beside the slots, the ones that each query reads.
    """
    result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    call = jax.ffi.ffi_call(registered(RowAttention()), result, vmap_method="sequential")
    bit = jnp.left_shift(1, jnp.arange(sees.shape[1], dtype=jnp.int32))
    bits = jnp.sum(jnp.where(sees, bit[None], 0), axis=1, dtype=jnp.int32)
    start, stop = start.astype(jnp.int32), stop.astype(jnp.int32)
    return call(q, keys, values, start, stop, own_keys, own_values, bits)


@dataclass(frozen=True)
class RowAttention(Tiles):
    """`row_attention` as a custom call."""

    name: str = field(default_factory=lambda: named("specrl_jax_row_attention"))

    def prepare(self, module: ir.Module) -> None:
        """Scores of a line too."""
        super().prepare(module)
        self.functions["scores"] = _write_scores(module)

    def blocks(self, call: Call) -> Value:
        """Rows and heads of keys."""
        return call.size(Q, 0) * call.size(KEYS, 1)

    def threads(self, call: Call) -> Value:
        """By the multiplications."""
        slots = call.code.variable(call.code.number(0))
        with call.code.loop(0, call.size(Q, 0)) as row:
            start, stop = _span(call, row)
            slots[0] = slots[0] + (stop - start).most(0)
        return slots[0] * 2 * call.size(Q, 1) * call.size(Q, 2) * call.size(Q, 3) // LITTLE + 1

    def block(self, call: Call, index: Value) -> None:
        """All queries of a row that read one head of keys, some at a time."""
        groups = call.size(KEYS, 1)
        row, group = index // groups, index % groups
        shared = call.size(Q, 2) // groups
        with call.code.loop(0, call.size(Q, 1) * shared, LINES) as first:
            self._tile(call, row, group, first, shared)

    def _tile(self, call: Call, row: Value, group: Value, first: Value, shared: Value) -> None:
        """A few of them. Lines beyond the last write where nobody looks."""
        code, width, count = call.code, call.size(Q, 3), call.size(Q, 1) * shared
        known = [(first + i).least(count - 1) for i in range(LINES)]
        places = [
            ((row * call.size(Q, 1) + line // shared) * call.size(Q, 2) + group * shared + line % shared) * width
            for line in known
        ]
        spare, tops, totals = (code.room(F32, size) for size in (MOST_WIDTH, LINES, LINES))
        queries = [call.operand(Q) + place for place in places]
        outs = [(first + i < count).where_pointer(call.result(0) + place, spare) for i, place in enumerate(places)]
        for i, out in enumerate(outs):
            tops[i], totals[i] = MASKED, 0.0
            self.clear(code, out, width)
        state = [memory + i for memory in (tops, totals) for i in range(LINES)]
        at, (start, stop) = row * call.size(KEYS, 1) + group, _span(call, row)
        with code.loop(start, stop, MOST_SLOTS) as slot:
            read, place = (stop - slot).least(MOST_SLOTS), (at * call.size(KEYS, 2) + slot) * width
            masks = [(stop.as_type(I32, "trunc"), _none(stop))] * LINES
            both = call.operand(KEYS) + place, call.operand(VALUES) + place
            self._read(call, queries, both, (slot, read), masks, state, outs)
        beside, nothing = call.size(OWN_KEYS, 2), code.number(0)
        masks = [(_none(nothing), call.operand(BITS, I32)[line // shared]) for line in known]
        both = call.operand(OWN_KEYS) + at * beside * width, call.operand(OWN_VALUES) + at * beside * width
        self._read(call, queries, both, (nothing, beside), masks, state, outs)
        for i, out in enumerate(outs):
            self.divide(code, out, width, totals[i])

    def _read(
        self,
        call: Call,
        queries: list[Pointer],
        both: tuple[Pointer, Pointer],
        slots: tuple[Value, Value],
        masks: list[tuple[Value, Value]],
        state: list[Pointer],
        outs: list[Pointer],
    ) -> None:
        """The lines read some keys and values that lie side by side; `slots`: the first, and how many."""
        code, width = call.code, call.size(Q, 3)
        (keys, values), (start, read) = both, slots
        scores = code.room(F32, LINES * MOST_SLOTS)
        rows = [scores + MOST_SLOTS * i for i in range(LINES)]
        for query, row in zip(queries, rows, strict=True):
            code.call(self.functions["scores"], query, keys, read, width, row)
        factors = self.weigh(code, scores, (start, rounded_up(read, lanes())), width, masks, state)
        self.products(code, "mix", rows, (values, values), (width, width, read), outs, factors)


def _span(call: Call, row: Value) -> tuple[Value, Value]:
    """The slots that a row reads: the first, and one beyond the last."""
    start, stop = (call.operand(which, I32)[row].as_type(I64, "sext") for which in (START, STOP))
    return start.most(0), stop.least(call.size(KEYS, 2))


def _none(like: Value) -> Value:
    """0, of 32 bits."""
    return Value(like.builder, ir.Constant(I32, 0))


def _write_scores(module: ir.Module) -> ir.Function:
    """Products of a line with keys side by side, as many at a time as a register holds; beyond the last stands its own.

    Arguments: line, keys, how many, numbers of each, and where the scores go.
    """
    with function(module, "scores", NOTHING, [ADDRESS, ADDRESS, I64, I64, ADDRESS]) as (made, code):
        (line, keys, scores), (count, width) = (code.pointer(i, F32) for i in (0, 1, 4)), code.arguments[2:4]
        with code.loop(0, count, lanes()) as first:
            some = [keys + (first + i).least(count - 1) * width for i in range(lanes())]
            sums = [code.variable(code.zeros()) for _ in some]
            with code.loop(0, width, lanes()) as c:
                numbers = line.vector(c)
                for key, own in zip(some, sums, strict=True):
                    own[0] = own[0].plus_product(numbers, key.vector(c))
            scores.set_vector(first, lane_sums([own[0] for own in sums]))
    return made
