"""What a compiled program takes of a device's memory, as its compiler says."""

import ctypes
import gc
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from specrl_jax.training.pieces import Rehearsed

_LARGE = 64 * 2**20
_COMPILED = re.compile(r"= (f32|bf16)\[(\d+(?:,\d+)*)\]")
_TRACED = re.compile(r"tensor<(\d+(?:x\d+)*)x(f32|bf16)>")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes per device. overwritten: results that lie where arguments were.

    peak: what the compiler says of all of it together, where it does (of a CPU it leaves temporaries out).
    copies: of arrays that are bfloat16 in the program as it was written and float32 in what a CPU makes of it, by
        shape; each is counted once, wherever it occurs.
    """

    arguments: int
    results: int
    temporaries: int
    overwritten: int
    peak: int | None
    copies: dict[str, int]

    @property
    def total(self) -> int:
        """All that the program needs while it runs."""
        if self.peak is not None:
            return self.peak
        return self.arguments + self.results - self.overwritten + self.temporaries


def memory_of(program: Rehearsed, *, on_cpu: bool) -> Memory:
    """What the compiler reports of a program; `on_cpu` tells whose compiler it is."""
    memory = program.compiled.memory_analysis()
    assert memory is not None  # every compiler that is asked here reports it
    return Memory(
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        overwritten=memory.alias_size_in_bytes,
        peak=None if on_cpu else memory.peak_memory_in_bytes or None,
        copies=float32_copies(program.lowered.as_text(), program.compiled.as_text() or "") if on_cpu else {},
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


@dataclass(frozen=True)
class Taken:
    """bytes: peak of all devices together. seconds: of the call."""

    bytes: int
    seconds: float


class Peak:
    """Most memory that calls take above what the process had before any of them, all devices together.

    On a CPU it is the process's own, which Linux tells; elsewhere the allocator's, whose peak cannot be set back, so
    that a call below an earlier one's is given that one's.
    """

    def __init__(self) -> None:
        self._on_cpu = jax.default_backend() == "cpu"
        _give_back()
        self._before = self._now()

    def __call__(self, fn: Callable[..., Any], *args: Any) -> tuple[Any, "Taken"]:
        """`fn(*args)`, and what it took."""
        if self._on_cpu:
            _give_back()
            Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        result = jax.block_until_ready(fn(*args))
        return result, Taken(self._peak() - self._before, time.perf_counter() - start)

    def _now(self) -> int:
        return _of_process("VmRSS") if self._on_cpu else sum(_stats("bytes_in_use"))

    def _peak(self) -> int:
        return _of_process("VmHWM") if self._on_cpu else sum(_stats("peak_bytes_in_use"))


def _give_back() -> None:
    """What was freed, which glibc keeps otherwise, goes back to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _of_process(name: str) -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(name))
    return 1024 * int(line.split()[1])


def _stats(name: str) -> list[int]:
    return [(device.memory_stats() or {}).get(name, 0) for device in jax.local_devices()]


def _part_of(shape: Shape, whole: Shape) -> bool:
    return len(shape) == len(whole) and all(big % small == 0 for small, big in zip(shape, whole, strict=True))
