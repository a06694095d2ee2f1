"""Draws from laws over a vocabulary, on a CPU: noise, the best of what it perturbs, log-probability and entropy.

XLA reads and writes the vocabulary about ten times for it. Here logits are read twice, and nothing of their size is
written.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32
from llvmlite import ir

from specrl_jax.kernels.custom_call import Call, Kernel, named, registered
from specrl_jax.kernels.elementary import LEAST_EXPONENT, exp, log
from specrl_jax.kernels.llvm import F32, I32, I64, Code, Pointer, Value, lanes

_LITTLE = 4_000  # numbers that are not worth another thread
_RUN = 64  # vectors summed by themselves: small weights are not lost beside the sum of a large vocabulary
LOGITS, IDS, WORDS = range(3)
"""Operands of a draw."""
_COLUMNS = 1  # operand of a description


def fits(vocab_size: int) -> bool:
    """Whether laws over so many tokens are drawn from here."""
    return vocab_size % lanes() == 0


def draw(
    logits: Float[Array, "n v"], ids: Int[Array, "v"], words: UInt32[Array, "n 2"] | None
) -> tuple[Int[Array, "n"], Float[Array, "n"], Float[Array, "n"]]:
    """Column of the token drawn from softmax(logits), its log-probability, and the law's entropy in nats.

    The first of equals is drawn; where no logit is above -inf, column 0, whose log-probability is then not a number.

    Args:
        logits: float32.
        ids: vocabulary entry of every column.
        words: what the noise of a token depends on beside its id (`rollout.noise.noise_words`); None draws the most
            probable token.
    """
    count = logits.shape[0]
    results = [jax.ShapeDtypeStruct((count,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)]
    noise = () if words is None else (words,)
    call = jax.ffi.ffi_call(registered(Draw(bool(noise))), results, vmap_method="sequential")
    token, log_prob, entropy = call(logits, ids, *noise)
    return token, log_prob, entropy


def describe(logits: Float[Array, "n v"], columns: Int[Array, "n"]) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """Log-probability of given columns under softmax(logits), float32, and the law's entropy: the bits of `draw`."""
    result = jax.ShapeDtypeStruct(columns.shape, jnp.float32)
    call = jax.ffi.ffi_call(registered(Describe()), [result, result], vmap_method="sequential")
    log_prob, entropy = call(logits, columns)
    return log_prob, entropy


class _OfLaws(Kernel):
    """A block is a law."""

    def prepare(self, module: ir.Module) -> None:
        """Nothing is called."""

    def blocks(self, call: Call) -> Value:
        """Laws."""
        return call.size(LOGITS, 0)

    def threads(self, call: Call) -> Value:
        """By the numbers."""
        return call.size(LOGITS, 0) * call.size(LOGITS, 1) // _LITTLE + 1


@dataclass(frozen=True)
class Draw(_OfLaws):
    """Operands as of `draw`, results too."""

    noisy: bool
    name: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", named("specrl_jax_draw" if self.noisy else "specrl_jax_draw_greedy"))

    def block(self, call: Call, index: Value) -> None:
        """One law."""
        words = [call.operand(WORDS, I32)[index * 2 + i].everywhere() for i in range(2 * self.noisy)]
        ids = call.operand(IDS, I32)

        def score(x: Value, column: Value) -> Value:
            return x + gumbel(ids.vector(column), *words) if self.noisy else x

        token, *described = _read(call, index, score)
        call.result(0).of(I32)[index] = token
        for place, number in enumerate(described):
            call.result(1 + place)[index] = number


@dataclass(frozen=True)
class Describe(_OfLaws):
    """Operands and results as of `describe`."""

    name: str = field(default_factory=lambda: named("specrl_jax_describe"))

    def block(self, call: Call, index: Value) -> None:
        """One law."""
        for place, number in enumerate(_read(call, index)[1:]):
            call.result(place)[index] = number


def _read(call: Call, index: Value, score: Callable[[Value, Value], Value] | None = None) -> tuple[Value, Value, Value]:
    """A column of a law, its log-probability and the law's entropy.

    The column is the first of the highest `score(x, i)`, `x` being the logits from column `i` on less the highest one;
    without a score it is an operand.
    """
    code, columns = call.code, call.size(LOGITS, 1)
    logits = call.operand(LOGITS) + index * columns
    top = code.variable(logits.vector(0))
    with code.loop(lanes(), columns, lanes()) as c:
        top[0] = top[0].most(logits.vector(c))
    highest = top[0].folded(Value.most)
    mass, moment = code.variable(code.zeros()), code.variable(code.zeros())
    best, place = code.variable(code.zeros() + -1e30), code.variable(code.count_up())
    with code.loop(0, columns, _RUN * lanes()) as start:
        some_mass, some_moment = code.variable(code.zeros()), code.variable(code.zeros())
        with code.loop(start, (start + _RUN * lanes()).least(columns), lanes()) as c:
            # So improbable a token is never drawn: noise lies between -3 and 23.
            x = (logits.vector(c) - highest.everywhere()).most(LEAST_EXPONENT)
            weight = exp(x)
            some_mass[0] = some_mass[0] + weight
            some_moment[0] = some_moment[0].plus_product(weight, x)
            if score is not None:
                scored = score(x, c)
                better = scored > best[0]
                place[0] = better.where(c.as_type(I32, "trunc").everywhere() + code.count_up(), place[0])
                best[0] = better.where(scored, best[0])
        mass[0], moment[0] = mass[0] + some_mass[0], moment[0] + some_moment[0]
    given = call.operand(_COLUMNS, I32)[index] if score is None else _first_best(code, best, place)
    column = given.as_type(I64, "sext").most(0).least(columns - 1)
    total = mass[0].folded(operator.add)
    log_mass = log(total.everywhere()).first()
    return given, logits[column] - highest - log_mass, log_mass - moment[0].folded(operator.add) / total


def _first_best(code: Code, best: Pointer, place: Pointer) -> Value:
    """The smallest place of the highest score of all lanes."""
    scores, places = best.of(F32), place.of(I32)
    highest = functools.reduce(Value.most, [scores[i] for i in range(lanes())])
    found = code.variable(places[0].filled(0x7FFFFFFF))
    for i in range(lanes()):
        found[0] = scores[i].equals(highest).where(places[i].least(found[0]), found[0])
    return found[0]


def gumbel(ids: Value, first: Value, second: Value) -> Value:
    """`rollout.noise.gumbel_noise` of tokens, from the words of their draw."""
    bits = _mix(_mix(ids * 0x9E3779B9 + first) ^ second)
    uniform = ((bits.as_type(ir.VectorType(F32, lanes()), "uitofp") + 0.5) * 2.0**-32).most(2.0**-33)
    uniform = uniform.least(1.0 - 2.0**-24)
    rest = uniform * -1.0 + 1.0
    lost = rest - 1.0  # what is left of the uniform: log1p(-u) is log(rest) * -u / lost (Kahan)
    exponential = lost.equals(0.0).where(uniform, log(rest) * uniform / lost)
    return log(exponential) * -1.0


def _mix(x: Value) -> Value:
    """`rollout.noise._mix`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
