"""Gumbel noise from a counter: every draw is keyed by what it is for, never by where it runs.

The key of a sequence is 64 bits from (seed, purpose, policy update, dataset row,
sample, attempt). The noise of a token then depends on that key, on the token's
position in the response and on the token's id. Only integer arithmetic precedes
the last two logarithms, so backend, batch, mesh and draft length leave it alone.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from specrl_jax.models.backend import backend

Purpose = Literal["rollout", "evaluation", "draft_data"]
_PURPOSES = {"rollout": 0, "evaluation": 1, "draft_data": 2}

Use = Literal["draft", "coin", "residual"]
_USES = {"draft": 1, "coin": 2, "residual": 3}


def sequence_keys(
    seed: int | Int[Array, ""],
    purpose: Purpose,
    update: int | Int[Array, ""],
    row_ids: UInt32[Array, "b"],
    samples: Int[Array, "b"],
    attempt: int | Int[Array, ""] = 0,
) -> UInt32[Array, "b 2"]:
    """Noise keys of sequences.

    Args:
        seed: of the run.
        purpose: what the sequences are for; purposes never share noise.
        update: policy update index when the prompt was issued.
        row_ids: dataset row (or problem counter) of each sequence, never a batch slot.
        samples: index of each sequence within its group.
        attempt: raised when a prompt is sampled again.
    """
    key = jax.random.key(seed, impl="threefry2x32")
    for word in (_PURPOSES[purpose], update, attempt):
        key = jax.random.fold_in(key, word)

    def one(row_id: UInt32[Array, ""], sample: Int[Array, ""]) -> UInt32[Array, "2"]:
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, row_id), sample))

    return jax.vmap(one)(row_ids, samples)


def round_keys(keys: UInt32[Array, "r 2"], rounds: Int[Array, "r"]) -> UInt32[Array, "r 2"]:
    """Keys of a sequence's round number `rounds[r]`, for rules that need fresh noise in every round."""
    return jax.vmap(lambda key, index: jax.random.key_data(jax.random.fold_in(_wrap(key), index)))(keys, rounds)


def subkeys(keys: UInt32[Array, "r 2"], use: Use) -> UInt32[Array, "r 2"]:
    """Keys of one use within a round; uses never share noise."""
    return jax.vmap(lambda key: jax.random.key_data(jax.random.fold_in(_wrap(key), _USES[use])))(keys)


def _wrap(key: UInt32[Array, "2"]) -> Array:
    return jax.random.wrap_key_data(key, impl="threefry2x32")


def _mix(x: Array) -> Array:
    """Bijective 32-bit finaliser with low bias (the constants of C. Wellons' `lowbias32`)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def random_bits(
    keys: UInt32[Array, "n 2"], positions: Int[Array, "n"], token_ids: Int[Array, "*n v"]
) -> UInt32[Array, "n v"]:
    """32 bits for every (sequence, position, token)."""
    words = noise_words(keys, positions)
    token_ids = token_ids if token_ids.ndim == 2 else token_ids[None]
    ids = token_ids.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
    return _mix(_mix(ids + words[:, :1]) ^ words[:, 1:])


def noise_words(keys: UInt32[Array, "n 2"], positions: Int[Array, "n"]) -> UInt32[Array, "n 2"]:
    """What the noise of every token depends on beside its id."""
    position = _mix(positions.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.uint32(0x85EBCA6B))
    first = _mix(keys[:, 0] + position)
    return jnp.stack([first, _mix(keys[:, 1] ^ _mix(position + first))], axis=1)


def gumbel_noise(
    keys: UInt32[Array, "n 2"], positions: Int[Array, "n"], token_ids: Int[Array, "*n v"]
) -> Float[Array, "n v"]:
    """Standard Gumbel noise `-log(-log(1 - u))` in float32.

    Args:
        keys: from `sequence_keys`.
        positions: index of the drawn token in its response, from 0.
        token_ids: vocabulary entries that take part: all of them, a draft vocabulary, or some for each draw, `[n, v]`.
    """
    # u is fine-grained near 0, where the large draws that decide an argmax come from.
    return -jnp.log(-jnp.log1p(-_uniform(random_bits(keys, positions, token_ids))))


def best(scores: Float[Array, "n v"], count: int = 1) -> Int[Array, "n m"]:
    """Indices of the `count` largest scores, the largest first and the first of equals; a draw, where they hold noise.

    Not an argmax on a CPU: XLA fuses the noise into that and computes it number by number, 4 times slower.
    """
    if count == 1 and backend() != "cpu":
        return jnp.argmax(scores, axis=1, keepdims=True).astype(jnp.int32)
    # A small draft vocabulary may have fewer; the last then fills up.
    found = lax.top_k(scores, min(count, scores.shape[1]))[1]
    return jnp.pad(found, ((0, 0), (0, count - found.shape[1])), mode="edge")


def uniform_logs(keys: UInt32[Array, "r 2"], count: int, first: Int[Array, "r"] | None = None) -> Float[Array, "r k"]:
    """Logarithms of `count` independent uniforms per key, float32, below 0 and finite; of its numbers from `first`."""
    start = jnp.zeros((keys.shape[0],), jnp.int32)
    index = jnp.arange(count, dtype=jnp.int32)
    return jnp.log(_uniform(random_bits(keys, start, index if first is None else first[:, None] + index[None])))


def _uniform(bits: UInt32[Array, "*n"]) -> Float[Array, "*n"]:
    """Numbers above 0 and below 1, the finer the nearer to 0."""
    return jnp.clip((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 2.0**-33, 1.0 - 2.0**-24)
