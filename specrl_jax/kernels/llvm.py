"""Machine code for this CPU from Python: a thin layer over llvmlite's builder, with operators, loops and vectors.

What is built here is compiled by LLVM when it is first asked for; no compiler needs to be installed.
"""

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
ADDRESS, NOTHING = ir.PointerType(), ir.VoidType()
LINE = 16
"""Floats of a cache line."""


@dataclass(frozen=True)
class Registers:
    """Vector registers: how many there are, and floats of each."""

    count: int
    lanes: int


_named: ContextVar[Registers | None] = ContextVar("registers", default=None)


@contextmanager
def made_with(registers: Registers) -> Iterator[None]:
    """Code written within is for other registers than this CPU has; LLVM makes it run here all the same.

    A function that JAX has traced before is not written again.
    """
    token = _named.set(registers)
    try:
        yield
    finally:
        _named.reset(token)


@cache
def _own_registers() -> Registers:
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return Registers(32, 16)
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return Registers(16 if x86 else 32, 8 if features.get("avx2") else 4)


def registers() -> Registers:
    """Those that `made_with` names, by default this CPU's."""
    return _named.get() or _own_registers()


def lanes() -> int:
    """Floats of a register."""
    return registers().lanes


@dataclass(frozen=True)
class Value:
    """A number or vector in code that is being written; Python's numbers beside it become constants of its type."""

    builder: ir.IRBuilder
    raw: ir.Value

    @property
    def is_float(self) -> bool:
        """Whether it holds floats."""
        return isinstance(getattr(self.raw.type, "element", self.raw.type), ir.FloatType)

    def like(self, other: "Value | float") -> ir.Value:
        """`other` as a value of this type."""
        if isinstance(other, Value):
            return other.raw
        kind = self.raw.type
        number = float(other) if self.is_float else int(other)
        return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)

    def filled(self, number: int | float) -> "Value":
        """A number, everywhere, as a value of this type."""
        return Value(self.builder, self.like(number))

    def _with(self, name: str, other: "Value | float") -> "Value":
        return Value(self.builder, getattr(self.builder, name)(self.raw, self.like(other)))

    def _compared(self, how: str, other: "Value | float") -> "Value":
        compare = self.builder.fcmp_ordered if self.is_float else self.builder.icmp_signed
        return Value(self.builder, compare(how, self.raw, self.like(other)))

    def __add__(self, other: "Value | float") -> "Value":
        return self._with("fadd" if self.is_float else "add", other)

    def __sub__(self, other: "Value | float") -> "Value":
        return self._with("fsub" if self.is_float else "sub", other)

    def __mul__(self, other: "Value | float") -> "Value":
        return self._with("fmul" if self.is_float else "mul", other)

    def __truediv__(self, other: "Value | float") -> "Value":
        return self._with("fdiv", other)

    def __floordiv__(self, other: "Value | int") -> "Value":
        return self._with("sdiv", other)

    def __mod__(self, other: "Value | int") -> "Value":
        return self._with("srem", other)

    def __and__(self, other: "Value | int") -> "Value":
        return self._with("and_", other)

    def __or__(self, other: "Value | int") -> "Value":
        return self._with("or_", other)

    def __xor__(self, other: "Value | int") -> "Value":
        return self._with("xor", other)

    def __rshift__(self, other: "Value | int") -> "Value":
        return self._with("lshr", other)

    def __lshift__(self, other: "Value | int") -> "Value":
        return self._with("shl", other)

    def __lt__(self, other: "Value | float") -> "Value":
        return self._compared("<", other)

    def __gt__(self, other: "Value | float") -> "Value":
        return self._compared(">", other)

    def differs(self, other: "Value | float") -> "Value":
        """Whether they are not the same."""
        return self._compared("!=", other)

    def equals(self, other: "Value | float") -> "Value":
        """Whether they are the same."""
        return self._compared("==", other)

    def where(self, yes: "Value", no: "Value | float") -> "Value":
        """`yes` where this holds, else `no`."""
        return Value(self.builder, self.builder.select(self.raw, yes.raw, yes.like(no)))

    def where_pointer(self, yes: "Pointer", no: "Pointer") -> "Pointer":
        """One of two places."""
        return Pointer(self.builder, self.builder.select(self.raw, yes.raw, no.raw), yes.kind)

    def least(self, other: "Value | float") -> "Value":
        """The smaller of two; the second where either is none."""
        return (self < other).where(self, other)

    def most(self, other: "Value | float") -> "Value":
        """The larger of two; this one where either is no number."""
        if isinstance(other, Value):
            return (other > self).where(other, self)
        return (self.filled(other) > self).where(self.filled(other), self)

    def as_type(self, kind: ir.Type, how: str) -> "Value":
        """Converted by an instruction of LLVM's: `bitcast`, `sitofp`, `sext`, `trunc`."""
        return Value(self.builder, getattr(self.builder, how)(self.raw, kind))

    def _by(self, name: str, *others: "Value") -> "Value":
        """An intrinsic function of LLVM's."""
        kind = self.raw.type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        called = external(
            self.builder.module, f"llvm.{name}.{suffix}", ir.FunctionType(kind, [kind] * (1 + len(others)))
        )
        return Value(self.builder, self.builder.call(called, [self.raw, *(other.raw for other in others)]))

    def plus_product(self, a: "Value", b: "Value | float") -> "Value":
        """`self + a * b`, rounded once."""
        return a._by("fma", self.filled(b) if not isinstance(b, Value) else b, self)

    def root(self) -> "Value":
        """The square root."""
        return self._by("sqrt")

    def everywhere(self) -> "Value":
        """A register full of this number."""
        kind = ir.VectorType(self.raw.type, lanes())
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), self.raw, ir.Constant(I32, 0))
        return Value(self.builder, one).shuffled(Value(self.builder, one), [0] * kind.count)

    def shuffled(self, other: "Value", places: Sequence[int]) -> "Value":
        """The numbers at these places of two vectors side by side."""
        mask = ir.Constant(ir.VectorType(I32, len(places)), list(places))
        return Value(self.builder, self.builder.shuffle_vector(self.raw, other.raw, mask))

    def first(self) -> "Value":
        """The first number of a vector."""
        return Value(self.builder, self.builder.extract_element(self.raw, ir.Constant(I32, 0)))

    def folded(self, how: Any) -> "Value":
        """All numbers of a vector as one, by halves, always in the same order."""
        vector, count = self, self.raw.type.count
        while count > 1:
            count //= 2
            low, high = (vector.shuffled(vector, range(start, start + count)) for start in (0, count))
            vector = how(low, high)
        return vector.first()


def lane_sums(vectors: Sequence[Value]) -> Value:
    """A vector of the sums over as many vectors as it has lanes; every sum is made in the same order."""
    count, half = len(vectors), len(vectors) // 2
    while half:
        low = [i // half % 2 * count + i // (2 * half) * 2 * half + i % half for i in range(count)]
        high = [place + half for place in low]
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [u.shuffled(v, low) + u.shuffled(v, high) for u, v in pairs]
        half //= 2
    return vectors[0]


@dataclass(frozen=True)
class Pointer:
    """Where numbers of one type lie side by side."""

    builder: ir.IRBuilder
    raw: ir.Value
    kind: ir.Type

    def __add__(self, index: Value | int) -> "Pointer":
        place = index.raw if isinstance(index, Value) else ir.Constant(I64, index)
        return Pointer(self.builder, self.builder.gep(self.raw, [place], source_etype=self.kind), self.kind)

    def __getitem__(self, index: Value | int) -> Value:
        return Value(self.builder, self.builder.load((self + index).raw, typ=self.kind))

    def __setitem__(self, index: Value | int, value: "Value | Pointer | float") -> None:
        raw = value.raw if isinstance(value, Value | Pointer) else ir.Constant(self.kind, value)
        self.builder.store(raw, (self + index).raw)

    def of(self, kind: ir.Type) -> "Pointer":
        """The same place, seen as numbers of another type."""
        return Pointer(self.builder, self.raw, kind)

    def address(self, index: Value | int) -> "Pointer":
        """What lies there, read as an address."""
        return Pointer(self.builder, self.builder.load((self + index).raw, typ=ADDRESS), self.kind)

    def vector(self, index: Value | int) -> Value:
        """A register's numbers from there on."""
        kind = ir.VectorType(self.kind, lanes())
        return Value(self.builder, self.builder.load((self + index).raw, typ=kind, align=4))

    def set_vector(self, index: Value | int, value: Value) -> None:
        """Write a vector there."""
        self.builder.store(value.raw, (self + index).raw, align=4)

    def prefetch(self) -> None:
        """Ask for the cache line of this place."""
        kind = ir.FunctionType(NOTHING, [ADDRESS, I32, I32, I32])
        call = external(self.builder.module, "llvm.prefetch.p0", kind)
        self.builder.call(call, [self.raw, *(ir.Constant(I32, n) for n in (0, 3, 1))])  # to be read, kept, data


def external(module: ir.Module, name: str, kind: ir.FunctionType) -> ir.Function:
    """A function of LLVM's or of this process."""
    known = module.globals.get(name)
    return ir.Function(module, kind, name) if known is None else known


@dataclass(frozen=True)
class Code:
    """The body of a function that is being written."""

    builder: ir.IRBuilder
    arguments: tuple[Value, ...]

    def number(self, value: int) -> Value:
        """A constant integer."""
        return Value(self.builder, ir.Constant(I64, value))

    def float(self, value: float) -> Value:
        """A constant float."""
        return Value(self.builder, ir.Constant(F32, value))

    def count_up(self) -> Value:
        """The vector 0, 1, 2, ... of integers of 32 bits."""
        return Value(self.builder, ir.Constant(ir.VectorType(I32, lanes()), list(range(lanes()))))

    def zeros(self) -> Value:
        """A vector of zeros."""
        return Value(self.builder, ir.Constant(ir.VectorType(F32, lanes()), [0.0] * lanes()))

    def pointer(self, argument: int, kind: ir.Type) -> Pointer:
        """An argument that is an address."""
        return Pointer(self.builder, self.arguments[argument].raw, kind)

    def room(self, kind: ir.Type, count: int = 1) -> Pointer:
        """Memory of this function's own."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(kind, count)
        place.type = ADDRESS  # the builder would remember `kind`, which `Pointer` does
        return Pointer(self.builder, place, kind)

    def variable(self, value: Value) -> Pointer:
        """A value that changes."""
        place = self.room(value.raw.type)
        place[0] = value
        return place

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """For `i` from `start` to before `stop`."""
        i = self.variable(start if isinstance(start, Value) else self.number(start))
        with self.while_(lambda: i[0] < stop):
            yield i[0]
            i[0] = i[0] + step

    @contextmanager
    def while_(self, condition: Any) -> Iterator[None]:
        """As long as the condition, written at the top, holds."""
        top, body, after = (self.builder.append_basic_block(name) for name in ("top", "body", "after"))
        self.builder.branch(top)
        self.builder.position_at_end(top)
        self.builder.cbranch(condition().raw, body, after)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(top)
        self.builder.position_at_end(after)

    @contextmanager
    def if_(self, condition: Value) -> Iterator[None]:
        """Only where the condition holds."""
        with self.builder.if_then(condition.raw):
            yield

    def call(self, function: ir.Function, *arguments: Value | Pointer) -> Value:
        """The result of a function."""
        return Value(self.builder, self.builder.call(function, [argument.raw for argument in arguments]))


@contextmanager
def function(
    module: ir.Module, name: str, returns: ir.Type, arguments: Sequence[ir.Type], inside: bool = True
) -> Iterator[tuple[ir.Function, Code]]:
    """Write a function; one that returns something returns what `Code.builder` was told to, else zero."""
    made = ir.Function(module, ir.FunctionType(returns, arguments), name)
    made.linkage = "internal" if inside else "external"
    builder = ir.IRBuilder(made.append_basic_block("entry"))
    yield made, Code(builder, tuple(Value(builder, argument) for argument in made.args))
    if not builder.block.is_terminated:
        if returns is NOTHING:
            builder.ret_void()
        else:
            builder.ret(ir.Constant(returns, None if returns is ADDRESS else 0))


@cache
def _machine() -> tuple[llvm.TargetMachine, Any]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, reloc="pic")
    return machine, llvm.create_lljit_compiler(machine)


def compiled(module: ir.Module, name: str) -> Any:
    """Optimise and compile a module for this CPU; keeps it alive as long as what it returns: `library[name]`."""
    machine, jit = _machine()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(parsed, builder)
    library = llvm.JITLibraryBuilder().add_ir(parsed).add_current_process().export_symbol(name)
    return library.link(jit, name)
