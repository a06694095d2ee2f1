"""Kernels as custom calls of XLA on a CPU, spread over its own threads.

XLA calls a handler with a frame that names operands and results (XLA's foreign function interface,
`xla/ffi/api/c_api.h` of jaxlib: the numbers below count the eight-byte words of its structures). A kernel says into how
many blocks its work falls and does one of them; the thread that called takes blocks as other threads of XLA's pool do,
so that nothing waits for a thread that is busy.
"""

import platform
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import jax
from llvmlite import ir

from specrl_jax.kernels.llvm import (
    ADDRESS,
    F32,
    I32,
    I64,
    NOTHING,
    Code,
    Pointer,
    Value,
    compiled,
    external,
    function,
    registers,
)

_VERSION = (0, 3)  # of the interface, as jaxlib 0.10 has it; later ones keep it for a year at least
_EXTENSION, _API, _CONTEXT, _NUM_ARGUMENTS, _ARGUMENTS, _RESULTS = 1, 2, 3, 7, 9, 14  # of a call's frame
_METADATA, _VERSION_OF, _TRAITS, _STATE = 3, 3, 4, 5  # of the extension that asks for the version, and of its answer
_ASKS_METADATA = 1  # its type
_DATA, _DIMS = 3, 5  # of a buffer
_ENTRIES, _SCHEDULE, _NUM_THREADS = 6, 11, 12  # of the API: its first function, and which of them these are
_NEXT, _DONE, _HOLDERS, _BLOCKS, _THREADS, _FRAME, _WORDS = range(7)  # of a job
_SPINS = 2000  # before a thread that waits lets others run


@dataclass(frozen=True)
class Call:
    """Operands and results of a call, for code that is being written."""

    code: Code
    frame: Pointer

    def operand(self, index: Value | int, kind: ir.Type = F32) -> Pointer:
        """Numbers of an operand, row-major."""
        return self._buffer(_ARGUMENTS, index).address(_DATA).of(kind)

    def result(self, index: Value | int) -> Pointer:
        """Floats of a result, row-major."""
        return self._buffer(_RESULTS, index).address(_DATA).of(F32)

    @property
    def operands(self) -> Value:
        """How many there are."""
        return self.frame[_NUM_ARGUMENTS]

    def size(self, operand: Value | int, axis: int) -> Value:
        """Size of an operand's axis."""
        return self._buffer(_ARGUMENTS, operand).address(_DIMS)[axis]

    def _buffer(self, which: int, index: Value | int) -> Pointer:
        return self.frame.address(which).address(index)


class Kernel(ABC):
    """What a custom call does, in blocks that any thread may do in any order."""

    name: str

    @abstractmethod
    def prepare(self, module: ir.Module) -> None:
        """Write the functions that it calls."""

    @abstractmethod
    def blocks(self, call: Call) -> Value:
        """Into how many blocks the work falls."""

    @abstractmethod
    def threads(self, call: Call) -> Value:
        """Threads that the work is worth."""

    @abstractmethod
    def block(self, call: Call, index: Value) -> None:
        """Write block number `index`."""


def named(name: str) -> str:
    """A kernel's name with the registers that it is written for."""
    return f"{name}_{registers().count}x{registers().lanes}"


def registered(kernel: Kernel) -> str:
    """The name by which `jax.ffi.ffi_call` knows a kernel; it is compiled when first asked for."""
    with _one_at_a_time:
        return _registered(kernel)


_one_at_a_time = threading.Lock()


@cache
def _registered(kernel: Kernel) -> str:
    module = ir.Module(kernel.name)
    kernel.prepare(module)
    _write_handler(module, kernel)
    library = compiled(module, kernel.name)
    jax.ffi.register_ffi_target(kernel.name, jax.ffi.pycapsule(library[kernel.name]), platform="cpu")
    _kept.append(library)
    return kernel.name


_kept: list[object] = []
"""Machine code that XLA may call until the process ends."""


def _count(counter: Pointer, by: Value | int) -> Value:
    """Add to what threads share; what it was before."""
    amount = by.raw if isinstance(by, Value) else ir.Constant(I64, by)
    return Value(counter.builder, counter.builder.atomic_rmw("add", counter.raw, amount, "acq_rel"))


def _read(counter: Pointer) -> Value:
    """What threads share, as it is now."""
    return Value(counter.builder, counter.builder.load_atomic(counter.raw, "acquire", 8, typ=I64))


def _write_job(module: ir.Module, kernel: Kernel) -> tuple[ir.Function, ir.Function, ir.Function]:
    """Functions of a job: take its blocks as long as there are any; leave it, the last one frees it; and both."""
    with function(module, "take", NOTHING, [ADDRESS]) as (take, code):
        job = code.pointer(0, I64)
        blocks, call = job[_BLOCKS], Call(code, job.address(_FRAME))
        start, some = code.variable(code.number(0)), code.variable(code.number(0))

        def some_left() -> Value:
            """Take the next ones: blocks side by side, fewer and fewer, so that all threads end together."""
            some[0] = ((blocks - _read(job + _NEXT)) // (job[_THREADS] * 2)).most(1)
            start[0] = _count(job + _NEXT, some[0])
            return start[0] < blocks

        with code.while_(some_left):
            stop = (start[0] + some[0]).least(blocks)
            with code.loop(start[0], stop) as index:
                kernel.block(call, index)
            _count(job + _DONE, stop - start[0])
    with function(module, "leave", NOTHING, [ADDRESS]) as (leave, code):
        job = code.pointer(0, I64)
        with code.if_(_count(job + _HOLDERS, -1).equals(1)):
            code.call(external(module, "free", ir.FunctionType(NOTHING, [ADDRESS])), job)
    with function(module, "help", NOTHING, [ADDRESS]) as (help_, code):
        code.call(take, code.pointer(0, I64))
        code.call(leave, code.pointer(0, I64))
    return take, leave, help_


def _write_handler(module: ir.Module, kernel: Kernel) -> None:
    take, leave, help_ = _write_job(module, kernel)
    malloc = external(module, "malloc", ir.FunctionType(ADDRESS, [I64]))
    with function(module, kernel.name, ADDRESS, [ADDRESS], inside=False) as (_, code):
        frame = code.pointer(0, I64)
        with code.if_(frame[_EXTENSION].differs(0)):
            extension = frame.address(_EXTENSION)
            with code.if_((extension + 1).of(I32)[0].equals(_ASKS_METADATA)):
                answer = extension.address(_METADATA)
                for place, number in enumerate(_VERSION):
                    (answer + _VERSION_OF).of(I32)[place] = number
                (answer + _TRAITS).of(I32)[0] = 0
                answer[_STATE] = 0
                code.builder.ret(ir.Constant(ADDRESS, None))
        call = Call(code, frame)
        blocks, worth = kernel.blocks(call), kernel.threads(call)
        helpers = _threads(code, frame).least(blocks).least(worth).most(1) - 1
        job = Pointer(code.builder, code.call(malloc, code.number(8 * _WORDS)).raw, I64)
        job[_NEXT], job[_DONE], job[_HOLDERS] = code.number(0), code.number(0), helpers + 1
        job[_BLOCKS], job[_THREADS] = blocks, helpers + 1
        job.of(ADDRESS)[_FRAME] = frame
        with code.loop(0, helpers):
            _schedule(code, frame, help_, job)
        code.call(take, job)
        _wait(code, job + _DONE, blocks)
        code.call(leave, job)


def _api(code: Code, frame: Pointer, entry: int, words: list[Value | Pointer | int]) -> None:
    """Call the API with a structure of such words after its size and an extension that it does not have."""
    structure = code.room(I64, len(words) + 2)
    for place, word in enumerate([8 * (len(words) + 2), 0, *words]):
        structure.of(ADDRESS if isinstance(word, Pointer) else I64)[place] = word
    kind = ir.FunctionType(ADDRESS, [ADDRESS]).as_pointer()
    called = code.builder.load((frame.address(_API) + (_ENTRIES + entry)).raw, typ=kind)
    code.builder.call(called, [structure.raw])


def _threads(code: Code, frame: Pointer) -> Value:
    """Threads of the pool."""
    found = code.variable(code.number(1))
    _api(code, frame, _NUM_THREADS, [frame.address(_CONTEXT), found])
    return found[0].most(1)


def _schedule(code: Code, frame: Pointer, task: ir.Function, job: Pointer) -> None:
    """Let a thread of the pool do a task."""
    _api(code, frame, _SCHEDULE, [frame.address(_CONTEXT), Pointer(code.builder, task, I64), job])


def _wait(code: Code, done: Pointer, blocks: Value) -> None:
    """Until other threads have done the blocks that they took."""
    spins = code.variable(code.number(0))
    nothing = ir.FunctionType(NOTHING, [])
    switch = ir.FunctionType(I32, [])

    with code.while_(lambda: _read(done) < blocks):
        if platform.machine().lower() in ("x86_64", "amd64"):
            code.builder.call(external(code.builder.module, "llvm.x86.sse2.pause", nothing), [])
        spins[0] = spins[0] + 1
        with code.if_(spins[0] > _SPINS):
            name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
            code.builder.call(external(code.builder.module, name, switch), [])
