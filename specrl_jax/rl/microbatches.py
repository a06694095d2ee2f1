"""Sums over microbatches of similar length.

Rollouts have a long tail: padding every sequence to the longest would be most of
the work of an update. Sequences are sorted by length, cut into microbatches, and
each microbatch runs at the smallest of a few compiled widths that holds it.

The loop's trip count is hidden from the compiler (see `models/numerics.py`), so the
body is a computation of its own and its bits do not depend on what stands around it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from specrl_jax.errors import InputError
from specrl_jax.models.linear import wide_dtype
from specrl_jax.models.numerics import opaque_int


@dataclass(frozen=True)
class MicrobatchConfig:
    """rows: sequences per microbatch. widths: fractions of the full width to compile for."""

    rows: int = 32
    widths: tuple[float, ...] = (0.3, 0.45, 1.0)

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise InputError(f"microbatch rows is {self.rows}; it must be at least 1")
        if not self.widths or not all(0.0 < width <= 1.0 for width in self.widths):
            raise InputError(f"microbatch widths are {self.widths}; give fractions above 0 and at most 1")

    def token_widths(self, width: int) -> tuple[int, ...]:
        """Widths in tokens, rounded up to multiples of 8, ascending; the last is `width`."""
        rounded = {min(width, -(-int(width * fraction) // 8) * 8) for fraction in self.widths}
        return tuple(sorted(rounded | {width}))


def slots(lengths: Int[Array, "b"], width: int, config: MicrobatchConfig) -> Int[Array, ""]:
    """Tokens, padding included, that `over_microbatches` computes for sequences of these lengths out of `width`."""
    widths = config.token_widths(width)
    longest = jnp.sort(lengths).reshape(-1, config.rows)[:, -1]
    return config.rows * jnp.sum(jnp.asarray(widths, jnp.int32)[_narrowest(widths, longest)])


def _narrowest(widths: tuple[int, ...], longest: Int[Array, "*m"]) -> Int[Array, "*m"]:
    """Index of the smallest width that holds a sequence of `longest` tokens."""
    return jnp.searchsorted(jnp.asarray(widths, jnp.int32), longest)


def geometric_widths(shortest: float, count: int) -> tuple[float, ...]:
    """So many widths from `shortest` to 1, each the same multiple of the one before."""
    if count == 1:
        return (1.0,)
    return tuple(shortest ** (1 - i / (count - 1)) for i in range(count))


def check_microbatch(config: MicrobatchConfig, sequences: int) -> None:
    """Raise InputError unless `sequences` split into whole microbatches."""
    if sequences % config.rows:
        raise InputError(
            f"{sequences} sequences per device and update do not split into microbatches of {config.rows}; "
            "choose a microbatch that divides them"
        )


def _cut(tree: Any, width: int) -> Any:
    return jax.tree.map(lambda x: x[:, :width] if x.ndim > 1 else x, tree)


def _widen(tree: Any, width: int) -> Any:
    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), (0, width - x.shape[1])] + [(0, 0)] * (x.ndim - 2)) if x.ndim > 1 else x

    return jax.tree.map(pad, tree)


def over_microbatches(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    weights: Any,
    batch: Any,
    lengths: Int[Array, "b"],
    config: MicrobatchConfig,
    leaving: int | None = None,
) -> tuple[Any, Any]:
    """Run `fn(weights, microbatch) -> (sums, outputs)` over a batch.

    Args:
        fn: `sums`, floats, are added over microbatches in at least float32; `outputs` have a row per sequence kept (any
            number, the first rows of the microbatch) and, from two axes on, time second.
        weights: passed through.
        batch: pytree of arrays `[b, ...]` with time second from two axes on.
        lengths: tokens of each sequence.
        config: rows and widths.
        leaving: microbatches whose outputs are kept, spread evenly over the lengths; None: all.

    Returns:
        The sums, and the outputs of the microbatches padded to the full width, one after another; of all of them,
        `sorted_order(lengths)` tells which sequence they belong to, and `in_given_order` puts them back.
    """
    count = lengths.shape[0]
    check_microbatch(config, count)
    microbatches = count // config.rows
    kept = microbatches if leaving is None else min(leaving, microbatches)
    full = max(x.shape[1] for x in jax.tree.leaves(batch) if x.ndim > 1)
    widths = config.token_widths(full)
    order = sorted_order(lengths)
    batch, lengths = jax.tree.map(lambda x: x[order], (batch, lengths))

    def at_width(width: int) -> Callable[[Any, Any], tuple[Any, Any]]:
        def run(weights: Any, micro: Any) -> tuple[Any, Any]:
            sums, outputs = fn(weights, _cut(micro, width))
            return sums, _widen(outputs, full)

        return run

    def take(i: Int[Array, ""]) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * config.rows, config.rows), batch)

    def body(i: Int[Array, ""], carry: tuple[Any, Any]) -> tuple[Any, Any]:
        sums, outputs = carry
        longest = lax.dynamic_slice_in_dim(lengths, i * config.rows, config.rows).max()
        new_sums, new_outputs = lax.switch(_narrowest(widths, longest), [at_width(w) for w in widths], weights, take(i))
        sums = jax.tree.map(lambda total, new: total + new.astype(total.dtype), sums, new_sums)
        place = i * kept // microbatches  # where a later one falls on the same place, it stays
        outputs = jax.tree.map(
            lambda all_, new: lax.dynamic_update_slice_in_dim(all_, new, place * new.shape[0], 0), outputs, new_outputs
        )
        return sums, outputs

    sums, outputs = jax.eval_shape(at_width(full), weights, jax.eval_shape(take, jnp.int32(0)))
    start = (
        jax.tree.map(lambda s: jnp.zeros(s.shape, wide_dtype(s)), sums),
        jax.tree.map(lambda s: jnp.zeros((kept * s.shape[0], *s.shape[1:]), s.dtype), outputs),
    )
    return lax.fori_loop(0, opaque_int(microbatches), body, start)


def in_given_order(ordered: Any, lengths: Int[Array, "b"]) -> Any:
    """Outputs of all microbatches, `[b, ...]`, as their sequences came."""
    order = sorted_order(lengths)
    return jax.tree.map(lambda x: jnp.zeros_like(x).at[order].set(x), ordered)


def sorted_order(lengths: Int[Array, "b"]) -> Int[Array, "b"]:
    """Indices of sequences from the shortest to the longest, ties in order."""
    return jnp.argsort(lengths, stable=True)
