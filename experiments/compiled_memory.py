"""What a compiled program takes of a device's memory, as its compiler says."""

import math
import re
from dataclasses import dataclass

from specrl_jax.training.pieces import Rehearsed

_LARGE = 64 * 2**20
_COMPILED = re.compile(r"= (f32|bf16)\[(\d+(?:,\d+)*)\]")
_TRACED = re.compile(r"tensor<(\d+(?:x\d+)*)x(f32|bf16)>")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes per device. overwritten: results that lie where arguments were.

    copies: of arrays that are bfloat16 in the program as it was written and float32 in what a CPU makes of it, by
        shape; each is counted once, wherever it occurs.
    """

    arguments: int
    results: int
    temporaries: int
    overwritten: int
    copies: dict[str, int]

    @property
    def total(self) -> int:
        """All that the program needs while it runs."""
        return self.arguments + self.results - self.overwritten + self.temporaries


def memory_of(program: Rehearsed) -> Memory:
    """What the compiler reports of a program."""
    memory = program.compiled.memory_analysis()
    assert memory is not None  # every compiler that is asked here reports it
    return Memory(
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        overwritten=memory.alias_size_in_bytes,
        copies=float32_copies(program.lowered.as_text(), program.compiled.as_text() or ""),
    )


def float32_copies(traced: str, compiled: str) -> dict[str, int]:
    """Bytes of large float32 arrays that only the compiler made, out of bfloat16 ones of their shape.

    Args:
        traced: StableHLO, whose shapes are of the whole mesh where the compiler splits them.
        compiled: optimised HLO of one device.
    """
    written = {tuple(map(int, shape.split("x"))) for shape, dtype in _TRACED.findall(traced) if dtype == "f32"}
    made: dict[str, set[Shape]] = {"f32": set(), "bf16": set()}
    for dtype, shape in _COMPILED.findall(compiled):
        made[dtype].add(tuple(map(int, shape.split(","))))
    found = {}
    for shape in sorted(made["f32"] & made["bf16"]):
        if 4 * math.prod(shape) >= _LARGE and not any(_part_of(shape, whole) for whole in written):
            found[f"f32{list(shape)}"] = 4 * math.prod(shape)
    return found


def _part_of(shape: Shape, whole: Shape) -> bool:
    return len(shape) == len(whole) and all(big % small == 0 for small, big in zip(shape, whole, strict=True))
