"""What kernels of attention on a CPU share: a few lines (queries) over slots that lie side by side, and their softmax.

Scores become weights with a running softmax (Milakov and Gimelshein, arXiv 1805.02867). The sums of a line are made in
one order, whatever the others are.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from llvmlite import ir

from specrl_jax.kernels.custom_call import Kernel
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

MASKED = -1e30
LINES = 4
"""Lines of a tile."""
MOST_SLOTS, MOST_WIDTH = 256, 512
"""Slots that a tile reads at a time, and channels of a head, that there is room for."""
NODES = 32
"""Slots that a word of bits tells of."""
LITTLE = 100_000
"""Multiplications that are not worth another thread."""


def wide() -> int:
    """Vectors that a tile is wide."""
    return 4 if registers().count > 16 else 2


def rounded_up(size: Value, step: int) -> Value:
    """The next multiple of a step."""
    return (size + (step - 1)) // step * step


@dataclass(frozen=True)
class Tiles(Kernel):
    """A kernel of attention that takes a few lines at a time."""

    functions: dict[str, ir.Function] = field(default_factory=dict, compare=False, kw_only=True)

    def prepare(self, module: ir.Module) -> None:
        """The softmax of a tile's lines, with masks and without, and their products with values."""
        self.write_products(module, "mix", fresh=False)
        for name, masked in (("weigh", True), ("weigh_all", False)):
            self.functions[name] = _write_weigh(module, name, masked)

    def write_products(self, module: ir.Module, name: str, fresh: bool) -> None:
        """What `products` calls, wide and one vector wide."""
        for width, vectors in (("wide", wide()), ("narrow", 1)):
            self.functions[f"{name}_{width}"] = _write_outer(module, f"{name}_{width}", vectors, fresh)

    def clear(self, code: Code, out: Pointer, width: Value) -> None:
        """Zeros in the place of a line's sums."""
        with code.loop(0, width, lanes()) as c:
            out.set_vector(c, code.zeros())

    def divide(self, code: Code, out: Pointer, width: Value, total: Value) -> None:
        """A line's sums over their total; zeros where it is 0."""
        share = (code.float(1.0) / total.most(1e-30)).everywhere()
        with code.loop(0, width, lanes()) as c:
            out.set_vector(c, out.vector(c) * share)

    def products(
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

        others: and what to ask for meanwhile, from its start on, as much as is read: memory in its order comes sooner
        than in that of the products.
        sizes: numbers of `out`, how far apart those of `others` for two numbers of a line begin, and numbers of a line.
        """
        across, apart, along = sizes
        step = wide() * lanes()
        whole = across // step * step
        for width, start, stop in (("wide", 0, whole), ("narrow", whole, across)):
            with code.loop(start, stop, step if width == "wide" else lanes()) as c:
                read, written = [others[0] + c, others[1] + c * along], [place + c for place in outs]
                code.call(self.functions[f"{name}_{width}"], *lines, *read, apart, along, *written, *factors)

    def weigh(
        self,
        code: Code,
        scores: Pointer,
        slots: tuple[Value, Value],
        width: Value,
        masks: Sequence[tuple[Value, Value]],
        state: Sequence[Pointer],
    ) -> list[Value]:
        """Make weights of the lines' scores of some slots; what the lines' sums so far count.

        slots: the first, and how many, a multiple of the lanes. width: of a head. masks: of every line, the slot below
        which it reads all, and the bits of those that it reads from there on. state: every line's top score, then every
        line's total.
        """
        start, read = slots
        factors = code.room(F32, LINES)
        whole = functools.reduce(Value.least, [below for below, _ in masks]).as_type(I64, "sext") > start + read - 1
        for name, wanted in (("weigh_all", whole.equals(1)), ("weigh", whole.equals(0))):
            with code.if_(wanted):
                arguments = [word for mask in masks for word in mask]
                code.call(self.functions[name], scores, read, width, start, *arguments, *state, factors)
        return [factors[i] for i in range(LINES)]


def _write_outer(module: ir.Module, name: str, width: int, fresh: bool) -> ir.Function:
    """`out = factor * out + line @ others` for a few lines and `width` vectors of `others`; fresh: without what it was.

    Arguments: lines, others, what to ask for meanwhile, how far apart others lie, numbers of a line, outs, factors.
    """
    kinds = [ADDRESS] * (LINES + 2) + [I64, I64] + [ADDRESS] * LINES + [F32] * LINES
    with function(module, name, NOTHING, kinds) as (made, code):
        lines = [code.pointer(i, F32) for i in range(LINES)]
        others, ahead = (code.pointer(LINES + i, F32) for i in range(2))
        apart, along = code.arguments[LINES + 2 : LINES + 4]
        outs = [code.pointer(LINES + 4 + i, F32) for i in range(LINES)]
        factors = code.arguments[-LINES:]
        sums = []
        for out, factor in zip(outs, factors, strict=True):
            scale = factor.everywhere()
            starts = [code.zeros() if fresh else out.vector(v * lanes()) * scale for v in range(width)]
            sums.append([code.variable(start) for start in starts])
        with code.loop(0, along) as i:
            read = [(others + i * apart).vector(v * lanes()) for v in range(width)]
            for offset in range(0, width * lanes(), LINE):
                (ahead + (i * (width * lanes()) + offset)).prefetch()
            for line, own in zip(lines, sums, strict=True):
                number = line[i].everywhere()
                for place, vector in zip(own, read, strict=True):
                    place[0] = place[0].plus_product(number, vector)
        for out, own in zip(outs, sums, strict=True):
            for v, place in enumerate(own):
                out.set_vector(v * lanes(), place[0])
    return made


def _write_weigh(module: ir.Module, name: str, masked: bool) -> ir.Function:
    """The softmax of a tile's lines goes on over some slots: scores become weights, and the sums so far count a factor.

    Arguments: scores, slots to read, width of a head, first slot, `below` and `bits` of every line, the lines' top
    scores, their totals, and factors. Unmasked where all lines read all of those slots.
    """
    kinds = [ADDRESS, I64, I64, I64] + [I32, I32] * LINES + [ADDRESS] * (2 * LINES + 1)
    with function(module, name, NOTHING, kinds) as (made, code):
        slots, width, start = code.arguments[1:4]
        rows = [code.pointer(0, F32) + MOST_SLOTS * i for i in range(LINES)]
        masks = [(code.arguments[4 + 2 * i], code.arguments[5 + 2 * i]) for i in range(LINES)]
        tops, sums = ([code.pointer(4 + (2 + n) * LINES + i, F32) for i in range(LINES)] for n in range(2))
        factors = code.pointer(4 + 4 * LINES, F32)
        scale = (code.float(1.0) / width.as_type(F32, "sitofp").root()).everywhere()

        def where_read(line: int, slot: Value, value: Value, other: float) -> Value:
            if not masked:
                return value
            below, bits = masks[line]
            ahead = (start + slot).as_type(I32, "trunc").everywhere() + code.count_up() - below.everywhere()
            own = (bits.everywhere() >> ahead.most(0).least(NODES - 1)) & 1
            return ((ahead < 0) | ((ahead < NODES) & own.equals(1))).where(value, other)

        highest = [code.variable(code.zeros() + MASKED) for _ in rows]
        with code.loop(0, slots, lanes()) as slot:
            for line, scores in enumerate(rows):
                score = where_read(line, slot, scores.vector(slot) * scale, MASKED)
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
