"""Exponential, sigmoid and logarithm of the CPU's kernels against float64, in units in the last place."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_inputs import fresh

from specrl_jax.kernels import elementary
from specrl_jax.kernels.custom_call import Kernel, named, registered
from specrl_jax.kernels.llvm import lanes

pytestmark = pytest.mark.ci
HALF = 0.5 * np.log(2.0)


@dataclass(frozen=True)
class Elementwise(Kernel):
    """A function of `elementary` of a vector's numbers, or what a test puts in its place."""

    function: str
    planted: str = ""
    name: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", named(f"test_{self.function}{self.planted}"))

    def prepare(self, module):
        """Nothing is called."""

    def blocks(self, call):
        """All at once."""
        return call.code.number(1)

    threads = blocks

    def block(self, call, index):
        """Register by register."""
        with call.code.loop(0, call.size(0, 0), lanes()) as place:
            x = call.operand(0).vector(place)
            call.result(0).set_vector(place, getattr(elementary, self.function)(x))


def _of(function, x, planted=""):
    """`function` of numbers, and how far each is from float64's in units in the last place."""
    x = np.resize(np.asarray(x, np.float32), (len(x) + 15) // 16 * 16)
    kernel = registered(Elementwise(function, planted))
    call = fresh(lambda x: jax.ffi.ffi_call(kernel, jax.ShapeDtypeStruct(x.shape, jnp.float32))(x))
    found, wide = np.asarray(call(x)), np.float64(x)
    exact = {"exp": np.exp, "log": np.log, "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x))}[function](wide)
    return found, np.abs(found - exact) / np.spacing(np.abs(np.float32(exact)))


def _exponents():
    """From the least one to 0, with the numbers next to where the whole number of powers of two changes."""
    turns = -HALF * np.arange(1, 250, 2, dtype=np.float32)
    near = [np.nextafter(turns, np.float32(side)) for side in (-np.inf, np.inf)]
    some = np.random.default_rng(0).uniform(elementary.LEAST_EXPONENT, 0.0, 20_000)
    return np.concatenate([some, turns, *near, -np.geomspace(1e-30, 1.0, 500), [0.0, elementary.LEAST_EXPONENT]])


def test_exponentials(any_registers):
    _, units = _of("exp", _exponents())
    assert units.max() <= 2.0


def test_a_wrong_coefficient_is_caught(monkeypatch):
    """By a ten-thousandth of the last one: 15 units in the last place."""
    wrong = (*elementary._EXP[:-1], elementary._EXP[-1] * (1.0 + 1e-4))
    monkeypatch.setattr(elementary, "_EXP", wrong)
    _, units = _of("exp", _exponents(), planted="_wrong")
    assert units.max() > 10.0


def test_exponentials_at_the_ends(any_registers):
    found, _ = _of("exp", [-np.inf, -1e30, -88.0, -87.0, np.nan, -0.0])
    assert (found[:3] == found[3]).all()
    assert 0.0 < found[3] < 2e-38
    assert np.isnan(found[4])
    assert found[5] == 1.0


def test_sigmoids(any_registers):
    x = _exponents()
    _, units = _of("sigmoid", np.concatenate([x, -x]))
    assert units.max() <= 3.0


def test_logarithms(any_registers):
    rng = np.random.default_rng(0)
    x = np.concatenate([np.exp(rng.uniform(-87.0, 88.0, 20_000)), rng.uniform(0.5, 2.0, 20_000), [1.0, 2.0, 3e38]])
    found, units = _of("log", x)
    error = units * np.spacing(np.abs(found))
    assert (np.minimum(units / 2.0, error / 1e-7) <= 1.0).all()
    ends, _ = _of("log", [np.inf, np.nan])
    assert np.isnan(ends).all()
