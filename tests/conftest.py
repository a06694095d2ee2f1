"""Strict JAX for every test: no silent promotion, eight virtual devices, no hub."""

import atexit
import gc
import os
import shutil
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.struct as struct
import jax
import jaxtyping
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Many tests compile the same programs: all workers, and the commands they start, share them.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="specrl-jax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

# And they compile more than they compute: doing so quickly nearly halves a run. JAX_DISABLE_MOST_OPTIMIZATIONS=0
# compiles as users do; .ci/run does so for the tests of bits, some of which hold only then.
if os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
    jax.config.update("jax_disable_most_optimizations", True)
    if jax.__version_info__ < (0, 11):  # a newer XLA may not know the flag, and would end the process
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"

# Tracing makes so much that Python's collector, at its own pace, takes a tenth of a run.
gc.set_threshold(50_000, 20, 20)

_dataclass = struct.dataclass
_jaxtyped = jaxtyping.jaxtyped


def _shapes_checked(*, typechecker):
    """A function that is made anew at every call is checked only if it names a shape: mypy checks the rest for less."""
    checked = _jaxtyped(typechecker=typechecker)

    def decorate(function):
        inner = "<locals>" in getattr(function, "__qualname__", "")
        return function if inner and "jaxtyping" not in repr(function.__annotations__) else checked(function)

    return decorate


jaxtyping.jaxtyped = _shapes_checked


def _unchecked_dataclass(cls=None, **kwargs):
    """JAX rebuilds pytrees with leaves that are no arrays (shapes, specs): do not type-check the constructor."""
    if cls is None:
        return lambda c: _unchecked_dataclass(c, **kwargs)
    built = _dataclass(cls, **kwargs)
    built.__no_type_check__ = True
    return built


struct.dataclass = _unchecked_dataclass


def pytest_collection_modifyitems(items):
    """A test without one of these marks would run nowhere; what holds only as users compile is left out otherwise."""
    quickly = pytest.mark.skip(reason="holds as users compile: JAX_DISABLE_MOST_OPTIMIZATIONS=0")
    for item in items:
        if item.get_closest_marker("bits") and jax.config.values["jax_disable_most_optimizations"]:
            item.add_marker(quickly)
        if not any(map(item.get_closest_marker, ("ci", "full"))):
            raise pytest.UsageError(f"{item.nodeid} is marked neither ci nor full")


def pytest_collection_finish():
    """What the imports made stays: no collection need look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def compiled_as_users_do():
    """Whether single operations and whole programs round alike."""
    return not jax.config.values["jax_disable_most_optimizations"]


@pytest.fixture(autouse=True, scope="module")
def _give_programs_back():
    """Every compiled program holds memory maps, of which a process may have some 65,000."""
    yield
    jax.clear_caches()


# Those of AVX-512, AVX2, NEON and SSE. LLVM splits what this CPU's registers do not hold.
@pytest.fixture(params=[(32, 16), (16, 8), (32, 4), (16, 4)], ids=lambda r: f"{r[0]}x{r[1]}")
def any_registers(request):
    """Code written within is for so many vector registers of so many floats."""
    from specrl_jax.kernels.llvm import Registers, made_with

    registers = Registers(*request.param)
    with made_with(registers):
        yield registers
