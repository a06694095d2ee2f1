"""Exponential and logarithm of vectors, as polynomials (those of Cephes), for the CPU's kernels."""

import math

from llvmlite import ir

from specrl_jax.kernels.llvm import I32, Value

_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""p of exp(r) = 1 + r + r^2 p(r), |r| <= log(2) / 2."""
_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1),
    *(2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
"""p of log(1 + r) = r - r^2 / 2 + r^3 p(r), sqrt(1/2) - 1 <= r <= sqrt(2) - 1."""
_LOG2_HIGH, _LOG2_LOW = 0.693359375, -2.12194440e-4
_WHOLE = 1.5 * 2.0**23
LEAST_EXPONENT = -87.0
"""What exp of it is is still a normal number."""


def exp(x: Value) -> Value:
    """The exponential of numbers of at most 0, to 2 units in the last place; tiny below -87, and of none again none."""
    x = x.most(LEAST_EXPONENT)
    # In the lowest bits of a number so large lies the whole number nearest to what was added to it.
    raised = x * (1.0 / math.log(2.0)) + _WHOLE
    power = raised - _WHOLE
    rest = x.plus_product(power, -_LOG2_HIGH).plus_product(power, -_LOG2_LOW)
    bits = raised.as_type(ir.VectorType(I32, x.raw.type.count), "bitcast")
    scale = ((bits + 127) << 23).as_type(x.raw.type, "bitcast")
    return (rest + 1.0).plus_product(_polynomial(rest, _EXP), rest * rest) * scale


def sigmoid(x: Value) -> Value:
    """`1 / (1 + exp(-x))`, to 3 units in the last place."""
    positive = x > 0.0
    small = exp(positive.where(x * -1.0, x))
    return positive.where(x.filled(1.0), small) / (small + 1.0)


def log(x: Value) -> Value:
    """The logarithm of normal numbers above 0, to 2 units in the last place or 1e-7; of infinity and of none, none."""
    kind = x.raw.type
    bits = x.as_type(ir.VectorType(I32, kind.count), "bitcast")
    half = ((bits & 0x7FFFFF) | 0x3F000000).as_type(kind, "bitcast")  # from 1/2 to below 1
    small = half < math.sqrt(0.5)
    power = ((bits >> 23) - 126).as_type(kind, "sitofp") - small.where(half.filled(1.0), 0.0)
    rest = small.where(half + half, half) - 1.0
    square = rest * rest
    low = (power * _LOG2_LOW).plus_product(_polynomial(rest, _LOG), rest * square).plus_product(square, -0.5)
    return (rest + low).plus_product(power, _LOG2_HIGH) + (x - x)


def _polynomial(x: Value, coefficients: tuple[float, ...]) -> Value:
    series = x.filled(coefficients[0])
    for coefficient in coefficients[1:]:
        series = x.filled(coefficient).plus_product(series, x)
    return series
