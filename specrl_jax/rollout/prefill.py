"""Prefill: prompts are read together, their tokens side by side, some at a time, with padding after the last alone."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.models.backend import backend
from specrl_jax.models.cache import KVCache
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import TokenBatch, forward

_MOST_SMALL_CHUNKS = 3  # take less time than a large one, which is four of them


def chunk_sizes(most: int) -> tuple[int, ...]:
    """Tokens read at a time where there are at most so many: as many as the first size says while more than
    `_MOST_SMALL_CHUNKS` of the second are left, then as many as that.

    On a CPU large enough that reading the weights costs little beside computing, and at the end so small that it is not
    mostly padding: on two cores of an EPYC (36 layers of width 448) 496 tokens take 277, 249 and 229 ms by 32, 64 and
    128 at a time, 20 tokens 17, 29 and 53 ms. Elsewhere as many as are read together at all.
    """
    if backend() == "cpu":
        return (128, 32) if most > _MOST_SMALL_CHUNKS * 32 else (min(most, 32),)
    return (min(most, 512),)


def read_prompts(
    params: PolicyParams,
    policy: PolicyConfig,
    tokens: Int[Array, "r t"],
    lengths: Int[Array, "r"],
    cache: KVCache,
    numerics: Numerics,
    boundaries: tuple[int, ...],
) -> tuple[KVCache, Float[Array, "r t fd"]]:
    """Keys and values of prompts, and their residual streams at some boundaries.

    Args:
        tokens, lengths: prompts, right-padded.
        cache: empty pages of theirs.
        boundaries: as in `forward`.

    Returns:
        The cache with the prompts written (its `length` is not advanced), and the streams concatenated, 0 in padding.
    """
    rows, width = tokens.shape
    sizes, on_a_grid = chunk_sizes(rows * width), rows == 1 and backend() != "cpu"
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    starts = ends - lengths
    streams = jnp.zeros((rows, width, len(boundaries) * policy.hidden_size), params.embed.dtype)

    def another(chunk: int, state: tuple[Int[Array, ""], KVCache, Array]) -> tuple[Int[Array, ""], KVCache, Array]:
        first, cache, streams = state
        index = first + jnp.arange(chunk, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, index, side="right").astype(jnp.int32), rows - 1)
        place = jnp.clip(index - starts[row], 0, width - 1)
        positions = jnp.where(index < ends[-1], place, -1)
        batch = TokenBatch(tokens[row, place], row, positions, rows, min(chunk, width), is_grid=on_a_grid)
        before = replace(cache, length=jnp.clip(first - starts, 0, lengths))
        out = forward(params, policy, batch, numerics=numerics, cache=before, boundaries=boundaries)
        assert out.cache is not None
        if out.features is not None:
            streams = streams.at[row, jnp.where(positions < 0, width, place)].set(out.features, mode="drop")
        return first + chunk, replace(out.cache, length=cache.length), streams

    state = jnp.int32(0), cache, streams
    for size, smaller in zip(sizes, (*sizes[1:], 0), strict=True):  # the smallest until nothing is left

        def left(
            state: tuple[Int[Array, ""], KVCache, Array], most: int = _MOST_SMALL_CHUNKS * smaller
        ) -> Bool[Array, ""]:
            return ends[-1] - state[0] > most

        state = lax.while_loop(left, partial(another, size), state)
    _, cache, streams = state
    return cache, streams
