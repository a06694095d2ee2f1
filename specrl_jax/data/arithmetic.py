"""The arithmetic task: sums and differences of several terms, with written-out working.

Prompt `18+29+99=`, response `47+99=146` and the end token: every step rewrites
what remains of the expression after its leftmost operation. A few long problems
give the responses a long tail.

Problems are drawn in the graph from (seed, split, counter) alone. The split of a
problem is a hash of its signed terms and of nothing else, so that no seed can
bring a test problem into training. Running values are never negative: a term is
subtracted only where that much is there, which leaves one kind of subtraction
to learn.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from specrl_jax.data.symbols import END, EQUALS, MINUS, PLUS, SYMBOLS, SymbolTable, compact, detokenise
from specrl_jax.errors import InputError

Split = Literal["train", "dev", "test"]

HASH_CLASSES = 8
"""Hash classes of problems; class 0 is the development set, class 1 the test set, the rest is for training."""

MAX_ATTEMPTS = 1024
"""Candidates per problem; a split of 1/8 is missed by all of them with probability 4e-60."""


@dataclass(frozen=True)
class ArithmeticConfig:
    """Law of the problems.

    min_terms: terms of the shortest problems.
    term_weights: weights of min_terms, min_terms + 1, ... terms, any sum.
    digit_weights: weights of terms with 1, 2, ... digits, any sum.
    """

    min_terms: int = 3
    term_weights: tuple[float, ...] = (0.06, 0.10, 0.18, 0.48, 0.05, 0.03, 0.03, 0.03, 0.04)
    digit_weights: tuple[float, ...] = (0.15, 0.70, 0.15)

    def __post_init__(self) -> None:
        if self.min_terms < 2:
            raise InputError(f"arithmetic min_terms is {self.min_terms}; a problem needs at least 2 terms")
        for name in ("term_weights", "digit_weights"):
            weights = getattr(self, name)
            if not weights or not all(0 <= w < math.inf for w in weights) or weights[-1] <= 0:
                raise InputError(
                    f"arithmetic {name} is {weights}; give finite weights of at least 0, the last of them above 0"
                )
        if self.max_value >= 2**31:
            raise InputError(
                f"arithmetic problems of {self.max_terms} terms with {self.max_digits} digits exceed 32-bit integers; "
                "shorten digit_weights"
            )

    @property
    def max_terms(self) -> int:
        """Terms of the longest problems."""
        return self.min_terms + len(self.term_weights) - 1

    @property
    def max_digits(self) -> int:
        """Digits of the largest terms."""
        return len(self.digit_weights)

    @property
    def max_value(self) -> int:
        """Largest value that any problem can have."""
        return self.max_terms * (10**self.max_digits - 1)

    @property
    def prompt_width(self) -> int:
        """Most tokens of a prompt."""
        return self.max_terms * (self.max_digits + 1)

    @property
    def solution_width(self) -> int:
        """Most tokens of a reference response, end token included."""
        largest = 10**self.max_digits - 1
        steps = range(1, self.max_terms)
        running = sum(len(str((i + 1) * largest)) for i in steps)
        remaining = sum((self.max_terms - 1 - i) * (1 + self.max_digits) for i in steps)
        return running + remaining + len(steps)


@struct.dataclass
class Problems:
    """Problems drawn by `sample_problems`.

    terms: signed terms, the first positive, 0 beyond the last, `[n, m]` int32.
    num_terms: terms of each problem, `[n]` int32.
    config: the law they come from; it fixes the widths of their texts.
    """

    terms: Int[Array, "n m"]
    num_terms: Int[Array, "n"]
    config: ArithmeticConfig = struct.field(pytree_node=False)

    @property
    def values(self) -> Int[Array, "n"]:
        """The right answers, `[n]` int32, never negative."""
        return jnp.sum(self.terms, axis=1, dtype=jnp.int32)


def sample_problems(config: ArithmeticConfig, split: Split, seed: Any, counters: UInt32[Array, "n"]) -> Problems:
    """Problem `counters[i]` of a split, for every `i`; it depends on (seed, split, counter) only.

    seed: an integer below 2**32, or such a scalar. Candidates are redrawn until their
    hash falls into the split. Only integers are computed: the same on every backend.
    """
    wanted = get_args(Split).index(split)
    base = jax.random.fold_in(jax.random.key(seed), wanted)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(base, counters)
    m = config.max_terms

    def draw(attempt: Array, problems: Problems, found: Array) -> tuple[Array, Problems, Array]:
        bits = jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, attempt), (m + 1,)))(keys)
        new = _candidates(config, bits)
        problems = Problems(
            terms=jnp.where(found[:, None], problems.terms, new.terms),
            num_terms=jnp.where(found, problems.num_terms, new.num_terms),
            config=config,
        )
        return attempt + 1, problems, found | (split_index(new.terms) == wanted)

    attempt, problems, found = draw(jnp.int32(0), _no_problems(config, counters), jnp.zeros_like(counters, bool))
    *_, problems, _ = jax.lax.while_loop(
        lambda carry: (carry[0] < MAX_ATTEMPTS) & ~jnp.all(carry[2]),
        lambda carry: draw(*carry),
        (attempt, problems, found),
    )
    return problems


def split_index(terms: Int[Array, "n m"]) -> Int[Array, "n"]:
    """Split of each problem, 0 train, 1 dev, 2 test, from its signed terms; zeros do not count.

    A multiply-xorshift hash (the 32-bit finaliser of Appleby's MurmurHash3) of the terms in order.
    """
    words = jax.lax.bitcast_convert_type(terms, jnp.uint32)
    state = jnp.full(terms.shape[:1], 0x9E3779B9, jnp.uint32)
    for word in words.T:
        state = jnp.where(word == 0, state, _mix(state * jnp.uint32(5) + word))
    # Classes 0 and 1 are dev and test.
    group = (state % jnp.uint32(HASH_CLASSES)).astype(jnp.int32)
    return jnp.where(group < 2, group + 1, 0)


def _mix(x: UInt32[Array, "*n"]) -> UInt32[Array, "*n"]:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _no_problems(config: ArithmeticConfig, counters: UInt32[Array, "n"]) -> Problems:
    n = counters.shape[0]
    return Problems(jnp.zeros((n, config.max_terms), jnp.int32), jnp.zeros((n,), jnp.int32), config)


def _choose(weights: tuple[float, ...], bits: UInt32[Array, "*n"]) -> Int[Array, "*n"]:
    """Index drawn with the given weights from uniform 32-bit words, by integer thresholds."""
    total, below = sum(weights), 0.0
    index = jnp.zeros(bits.shape, jnp.int32)
    for weight in weights[:-1]:
        below += weight
        index += (bits >= jnp.uint32(min(int(below / total * 2**32), 2**32 - 1))).astype(jnp.int32)
    return index


def _candidates(config: ArithmeticConfig, bits: UInt32[Array, "n w"]) -> Problems:
    """One problem per row of random words, of any split: a word for the number of terms, then one for each term."""
    num_terms = config.min_terms + _choose(config.term_weights, bits[:, 0])
    digits = _choose(config.digit_weights, bits[:, 1:])
    lowest = jnp.asarray([10**d for d in range(config.max_digits)], jnp.uint32)[digits]
    # The word's size chose the number of digits; hashed, it is uniform again whatever that choice was.
    hashed = _mix(bits[:, 1:])
    sizes = (lowest + hashed % (lowest * 9)).astype(jnp.int32)
    minus = hashed >= jnp.uint32(2**31)
    value = jnp.zeros_like(num_terms)
    terms = []
    for j in range(config.max_terms):
        size = jnp.where(j < num_terms, sizes[:, j], 0)
        terms.append(jnp.where(minus[:, j] & (size <= value), -size, size))
        value += terms[-1]
    return Problems(jnp.stack(terms, axis=1), num_terms, config)


def _digits(values: Int[Array, "n m"], width: int) -> tuple[Int[Array, "n m w"], Bool[Array, "n m w"]]:
    """Decimal digits, right-aligned, and which of them are written (no leading zeros)."""
    powers = jnp.asarray([10**k for k in reversed(range(width))], jnp.int32)[None, None]
    wide = values[:, :, None]
    written = (wide >= powers) | (powers == 1)
    return wide // powers % 10, written


def _steps(problems: Problems, first: int, last: int) -> tuple[list[Array], list[Array]]:
    """Symbols of expressions `first..last-1` of the working, with gaps, and which of them are written.

    Expression `i` is what remains after `i` operations. `=` stands after every one but the value itself.
    """
    config, n = problems.config, problems.terms.shape[0]
    signs = jnp.where(problems.terms < 0, MINUS, PLUS)[:, :, None]
    digits, written = _digits(jnp.abs(problems.terms), config.max_digits)
    values, values_written = _digits(jnp.cumsum(problems.terms, axis=1), len(str(config.max_value)))
    tail = jnp.concatenate([signs, digits], axis=2)
    present = (problems.terms != 0)[:, :, None]
    tail_written = present & jnp.concatenate([jnp.ones_like(written[:, :, :1]), written], axis=2)
    equals = jnp.full((n, 1), EQUALS, jnp.int32)
    symbols, keep = [], []
    for i in range(first, last):
        symbols += [values[:, i], tail[:, i + 1 :].reshape(n, -1), equals]
        keep += [values_written[:, i] & present[:, i], tail_written[:, i + 1 :].reshape(n, -1)]
        keep += [(i < problems.num_terms - 1)[:, None]]
    return symbols, keep


def _tokens(
    table: SymbolTable, symbols: list[Array], keep: list[Array], width: int
) -> tuple[Int[Array, "n t"], Int[Array, "n"]]:
    tokens = table.token_ids[jnp.concatenate(symbols, axis=1)]
    return compact(tokens, jnp.concatenate(keep, axis=1), width)


def encode_prompts(table: SymbolTable, problems: Problems) -> tuple[Int[Array, "n p"], Int[Array, "n"]]:
    """Prompts such as `18+29+99=`: tokens `[n, prompt_width]` int32, right-padded with 0, and lengths `[n]`."""
    return _tokens(table, *_steps(problems, 0, 1), problems.config.prompt_width)


def encode_solutions(table: SymbolTable, problems: Problems) -> tuple[Int[Array, "n t"], Int[Array, "n"]]:
    """Reference responses with their end token: tokens `[n, solution_width]` int32, right-padded with 0, lengths."""
    symbols, keep = _steps(problems, 1, problems.config.max_terms)
    end = jnp.full_like(problems.num_terms, END)[:, None]
    return _tokens(table, [*symbols, end], [*keep, jnp.ones_like(end, bool)], problems.config.solution_width)


def reward(
    table: SymbolTable, problems: Problems, tokens: Int[Array, "n t"], lengths: Int[Array, "n"]
) -> Float[Array, "n"]:
    """1.0 for a right response, 0.0 for any other, `[n]` float32.

    Right: the last of the `lengths` tokens is the end token, and the bytes after the
    last `=` (all bytes where there is none) are the decimal numeral of the value:
    no leading zero, sign, space or anything else.
    """
    text, text_lengths = detokenise(table, tokens, lengths)
    slots = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    is_equals = (text == ord("=")) & (slots < text_lengths[:, None])
    start = jnp.max(jnp.where(is_equals, slots + 1, 0), axis=1)
    digits, written = _digits(problems.values[:, None], len(str(problems.config.max_value)))
    answer, answer_lengths = compact(digits[:, 0], written[:, 0], digits.shape[2])
    offsets = jnp.arange(answer.shape[1], dtype=jnp.int32)[None]
    said = jnp.take_along_axis(text, start[:, None] + offsets, axis=1, mode="fill", fill_value=0)
    same = (said.astype(jnp.int32) == answer + ord("0")) | (offsets >= answer_lengths[:, None])
    last = jnp.take_along_axis(tokens, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
    ended = (lengths > 0) & (last == table.end_id)
    right = ended & jnp.all(same, axis=1) & (text_lengths - start == answer_lengths)
    return right.astype(jnp.float32)


def problem_text(problems: Problems, index: int) -> str:
    """The prompt of one problem as text, for display on the host."""
    terms = [int(term) for term in problems.terms[index, : int(problems.num_terms[index])]]
    return str(terms[0]) + "".join(f"{term:+d}" for term in terms[1:]) + SYMBOLS[EQUALS]
