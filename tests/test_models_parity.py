"""Our policy against transformers, by fixtures: logits, greedy continuations, residual streams, frequencies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.models.checkpoints import MODELS, reference, write_checkpoint
from fixtures.models.recipe import CASES, CONTINUED, FREQUENCY_CASES, LENGTH, case_name, prompts

from specrl_jax.models.config import RopeConfig
from specrl_jax.models.huggingface import load_policy
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.policy import forward, grid_batch, logits, policy_cache, sequence_positions
from specrl_jax.models.rope import inverse_frequencies

PLAIN, INVARIANT = Numerics("plain"), Numerics("invariant", token_block=8, row_block=2, query_block=4, key_block=16)
NAMES = [case_name(*case) for case in CASES]


@functools.partial(jax.jit, static_argnums=(1, 3, 4))
def run(params, config, tokens, numerics, boundaries=()):
    rows, width = tokens.shape
    batch = grid_batch(tokens, sequence_positions(jnp.full((rows,), width, jnp.int32), width))
    out = forward(params, config, batch, numerics=numerics, boundaries=boundaries)
    return logits(params, config, out.hidden, numerics).reshape(rows, width, -1), out.features


@functools.partial(jax.jit, static_argnums=(1, 4, 5))
def decode_greedily(params, config, tokens, lengths, steps, numerics):
    """Prefill, then `steps` cached single-token steps: the continuation `[rows, steps]`."""
    rows, width = tokens.shape
    cache = policy_cache(config, rows, width + steps, numerics)
    out = forward(
        params, config, grid_batch(tokens, sequence_positions(lengths, width)), numerics=numerics, cache=cache
    )
    last = out.hidden.reshape(rows, width, -1)[jnp.arange(rows), lengths - 1]
    token = jnp.argmax(logits(params, config, last, numerics), -1).astype(jnp.int32)

    def step(carry, _):
        token, cache = carry
        batch = grid_batch(token[:, None], cache.length[:, None])
        out = forward(params, config, batch, numerics=numerics, cache=cache)
        following = jnp.argmax(logits(params, config, out.hidden, numerics), -1).astype(jnp.int32)
        return (following, out.cache.replace(length=cache.length + 1)), token

    carry = (token, out.cache.replace(length=lengths))
    return jax.lax.scan(step, carry, length=steps)[1].T


def _model_runs():
    """Every model with plain numerics; with invariant ones each family, kind and tying at least once in CI."""
    for i, name in enumerate(NAMES):
        yield pytest.param(name, PLAIN, marks=pytest.mark.ci, id=f"{name}-plain")
        half = pytest.mark.ci if (i // 2 + i) % 2 == 0 else pytest.mark.full
        yield pytest.param(name, INVARIANT, marks=half, id=f"{name}-invariant")


@pytest.mark.parametrize(("name", "numerics"), list(_model_runs()))
def test_logits_and_greedy_choices_equal_those_of_transformers(tmp_path, name, numerics):
    params, config = load_policy(write_checkpoint(tmp_path, name))
    assert config.dtype == "float32"
    expected, continuation = reference(f"{name}/logits"), reference(f"{name}/greedy")
    sequences = jnp.asarray(np.concatenate([prompts(), continuation], axis=1))
    ours = np.asarray(run(params, config, sequences, numerics)[0])
    np.testing.assert_allclose(ours[:, :LENGTH], expected, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(ours[:, LENGTH - 1 : -1].argmax(-1), continuation)


@pytest.mark.ci
@pytest.mark.parametrize("numerics", [PLAIN, INVARIANT], ids=["plain", "invariant"])
@pytest.mark.parametrize("name", ["qwen3-yarn-tied", "qwen2-llama3-untied", "llama-linear-untied"])
def test_cached_greedy_decoding_equals_that_of_transformers(tmp_path, name, numerics):
    params, config = load_policy(write_checkpoint(tmp_path, name))
    lengths = jnp.full((2,), LENGTH, jnp.int32)
    ours = decode_greedily(params, config, jnp.asarray(prompts()), lengths, CONTINUED, numerics)
    np.testing.assert_array_equal(ours, reference(f"{name}/greedy"))


@pytest.mark.ci
@pytest.mark.parametrize("numerics", [PLAIN, INVARIANT], ids=["plain", "invariant"])
def test_boundaries_are_the_hidden_states_of_transformers(tmp_path, numerics):
    params, config = load_policy(write_checkpoint(tmp_path, "qwen3-yarn-tied"))
    _, features = run(params, config, jnp.asarray(prompts()), numerics, (0, 1))
    expected = reference("boundaries")
    assert len(expected) == config.num_layers
    ours = np.asarray(features).reshape(2, LENGTH, 2, -1).transpose(2, 0, 1, 3)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.ci
def test_bfloat16_logits_are_near_those_of_transformers_in_bfloat16(tmp_path):
    params, config = load_policy(write_checkpoint(tmp_path, "llama-llama3-untied"), dtype="bfloat16")
    assert params.embed.dtype == jnp.bfloat16
    full, theirs = reference("llama-llama3-untied/logits"), reference("bfloat16")
    ours = np.asarray(run(params, config, jnp.asarray(prompts()), INVARIANT)[0])
    assert np.std(ours - theirs) < 0.05 * np.std(full)
    assert np.std(ours - full) < 1.2 * np.std(theirs - full)  # no less exact than theirs


@pytest.mark.ci
@pytest.mark.parametrize("index", range(len(FREQUENCY_CASES)))
def test_inverse_frequencies_equal_those_of_transformers(index):
    head_dim, fields = FREQUENCY_CASES[index]
    renamed = {"rope_type": "kind", "rope_theta": "theta"}
    rope = RopeConfig(**{renamed.get(name, name): value for name, value in fields.items()})
    frequencies, factor = inverse_frequencies(rope, head_dim)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, reference(f"frequencies/{index}"), rtol=1e-6)
    assert factor == pytest.approx(float(reference(f"frequencies/{index}/factor")), rel=1e-12)


@pytest.mark.ci
def test_every_rope_kind_of_the_fixtures_gives_other_logits():
    for family in ("qwen3", "qwen2", "llama"):
        names = [name for name in MODELS if name.startswith(family) and name.endswith("-tied")]
        assert len(names) == 4
        for i, name in enumerate(names):
            for other in names[:i]:
                assert np.abs(reference(f"{name}/logits") - reference(f"{other}/logits")).max() > 0.05
