"""Prompts read side by side, against every prompt read by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import INVARIANT, PLAIN, POLICY, VOCAB, tiny_params

from specrl_jax.models.attention import best_apart
from specrl_jax.models.policy import forward, grid_batch, policy_cache, sequence_positions
from specrl_jax.rollout import prefill

pytestmark = pytest.mark.ci
BOUNDARIES = (0, 2)
LENGTHS = [[17], [0, 0, 5, 0, 7, 1, 0], [0, 0], [40, 0, 33, 17], [1, 1, 1], [97], [100, 0, 60]]


def _read(tokens, lengths, numerics):
    params, cache = tiny_params(), policy_cache(POLICY, len(lengths), tokens.shape[1], numerics)
    read = jax.jit(lambda *a: prefill.read_prompts(params, POLICY, *a, cache, numerics, BOUNDARIES))
    return read(tokens, lengths)


@pytest.mark.parametrize("numerics", [PLAIN, INVARIANT], ids=["plain", "invariant"])
@pytest.mark.parametrize("chunks", [None, (7,), (12, 3)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_prompts_side_by_side_are_those_by_themselves(lengths, chunks, numerics, monkeypatch):
    """Keys, values and streams; prompts of nothing, of more than a page, of many chunks of one size or two.

    None for the sizes that the program takes.
    """
    if chunks is not None:
        monkeypatch.setattr(prefill, "chunk_sizes", lambda most: chunks)
    width = max(1, *lengths)
    lengths = jnp.asarray(lengths, jnp.int32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (len(lengths), width)), jnp.int32)
    cache, streams = _read(tokens, lengths, numerics)
    params, empty = tiny_params(), policy_cache(POLICY, len(lengths), width, numerics)
    batch = grid_batch(tokens, sequence_positions(lengths, width))
    wanted = jax.jit(
        lambda batch: forward(params, POLICY, batch, numerics=numerics, cache=empty, boundaries=BOUNDARIES)
    )(batch)
    real = np.arange(width)[None] < np.asarray(lengths)[:, None]
    theirs = np.where(real[..., None], wanted.features.reshape(*real.shape, -1), 0.0)
    tolerance = 0.0 if numerics.invariant else 2e-5
    np.testing.assert_allclose(streams, theirs, rtol=0, atol=tolerance)
    for ours, others in zip(jax.tree.leaves(cache), jax.tree.leaves(wanted.cache), strict=True):
        np.testing.assert_allclose(ours, others, rtol=0, atol=tolerance)


def test_caught_a_chunk_that_does_not_see_those_before(monkeypatch):
    """The planted bug: every chunk is read as if it were the first."""
    monkeypatch.setattr(prefill, "chunk_sizes", lambda most: (8,))
    lengths, tokens = jnp.asarray([17], jnp.int32), jnp.arange(17, dtype=jnp.int32)[None]
    _, right = _read(tokens, lengths, PLAIN)
    alone = policy_cache(POLICY, 1, 17, PLAIN)
    batch = grid_batch(tokens[:, 8:16], jnp.arange(8, dtype=jnp.int32)[None])
    wrong = forward(tiny_params(), POLICY, batch, numerics=PLAIN, cache=alone, boundaries=BOUNDARIES)
    assert np.abs(np.asarray(right[0, 8:16]) - np.asarray(wrong.features)).max() > 1e-2


def test_the_prompts_of_tests_are_read_token_by_token():
    """As are those of users: the kernel for CPUs takes the tiny policy's heads."""
    values = policy_cache(POLICY, 1, 16, PLAIN).values[0]
    assert best_apart(jnp.zeros((4, POLICY.num_heads, POLICY.head_dim)), values)
