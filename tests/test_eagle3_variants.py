"""Variants of the EAGLE-3 forward: parity with speculators, trained = served, and the way to disk and back."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_eagle3_folder import CONFIG, IDS, POLICY
from test_eagle3_training import served_logits
from tiny import no_texts

from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_folder import load_eagle3, save_eagle3
from specrl_jax.drafters.eagle3_params import init_eagle3
from specrl_jax.drafters.eagle3_training import ttt_logits
from specrl_jax.drafters.protocol import Choice
from specrl_jax.models.tree import Tree

pytestmark = pytest.mark.ci
FIXTURES = Path(__file__).parent / "fixtures" / "eagle3"
STEPS = 4
VARIANTS = {
    "plain": {},
    "eagle31": {"fc_norm": True, "norm_output": True},
    "speculators": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "qwen3": {"qk_norm": True},
    "five features": {"boundaries": (1, 3, 5, 7, 9)},
    "own embedding": {"own_embed": True, "target_hidden_size": 32},
}


def likeliest(logits, ids, before, count, step=None):
    best = jax.lax.top_k(logits, count)[1]
    return Choice(ids[best], confidence=jnp.max(logits, axis=-1))


unroll = jax.jit(ttt_logits, static_argnums=(4, 5))


def head_of(variant):
    """A head whose norms are not one, so that each of them shows."""
    config = replace(CONFIG, **VARIANTS[variant])
    params = init_eagle3(jax.random.key(0), config, IDS)
    key = jax.random.key(1)
    leaves, tree = jax.tree.flatten(params.weights)
    moved = [x + 0.2 * jax.random.normal(jax.random.fold_in(key, i), x.shape) for i, x in enumerate(leaves)]
    weights = jax.tree.unflatten(tree, moved)
    return config, replace(params, weights=weights)


@pytest.mark.parametrize("name", ["eagle31", "qwen3"])
def test_trained_and_served_equal_speculators(name):
    drafter, params = load_eagle3(FIXTURES / "speculators" / name)
    expected = np.load(FIXTURES / "speculators.npz")
    config = drafter.config
    assert config.boundaries == (2, 5, 7)
    assert (config.qk_norm, config.fc_norm) == (name == "qwen3", name == "eagle31")
    tokens, features = jnp.asarray(expected["tokens"]), jnp.asarray(expected["features"])
    embed = params.embedding(jnp.zeros((29, 24)))
    unrolled = unroll(params.weights, embed, tokens, features, config, STEPS)
    np.testing.assert_allclose(unrolled, expected[name], atol=1e-5, rtol=1e-5)
    served = served_logits(config, params, embed, tokens[0], features[0], STEPS)
    np.testing.assert_allclose(served, expected[name][:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("flag", ["fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm"])
def test_a_flag_that_is_not_read_is_seen(flag):
    """Every variant changes what speculators computes: without it the fixture is missed."""
    name = "eagle31" if flag in ("fc_norm", "norm_output") else "qwen3"
    drafter, params = load_eagle3(FIXTURES / "speculators" / name)
    expected = np.load(FIXTURES / "speculators.npz")
    without = {"fc_norm": "fc_norms", "norm_before_fc": "input_norm", "qk_norm": "q_norm"}.get(flag)
    config = replace(drafter.config, **{flag: False})
    weights = params.weights if without is None else params.weights.replace(**{without: None})
    tokens, features = jnp.asarray(expected["tokens"]), jnp.asarray(expected["features"])
    logits = unroll(weights, params.embed, tokens, features, config, STEPS)
    assert np.abs(logits - expected[name]).max() > 1e-2


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_unroll_is_what_is_served(variant):
    config, params = head_of(variant)
    slots = 9
    tokens = jax.random.randint(jax.random.key(2), (slots,), 0, config.vocab_size)
    width = len(config.boundaries) * config.target_hidden_size
    features = jax.random.normal(jax.random.key(3), (slots, width))
    embed = jax.random.normal(jax.random.key(4), (config.vocab_size, config.target_hidden_size))
    own = params.embedding(embed)
    unrolled = unroll(params.weights, own, tokens[None], features[None], config, STEPS)[:, 0]
    np.testing.assert_allclose(unrolled, served_logits(config, params, embed, tokens, features, STEPS), atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_comes_back_from_its_folder(variant, tmp_path):
    config, params = head_of(variant)
    save_eagle3(tmp_path / "head", Eagle3Drafter(config), params)
    policy = replace(POLICY, hidden_size=config.target_hidden_size)
    drafter, loaded = load_eagle3(tmp_path / "head", policy)
    assert drafter.config == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    hf = json.loads((tmp_path / "head" / "config.json").read_text())
    for flag in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"):
        assert hf.get(flag, False) == VARIANTS[variant].get(flag, False)
    assert hf["architectures"] == ["Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"]


def test_steps_and_chains_of_a_variant_agree():
    """`begin` and `advance`, which the controller calls, draft what `propose` does."""
    config, params = head_of("eagle31")
    drafter = Eagle3Drafter(config)
    rows, slots = 2, 5
    tokens = jax.random.randint(jax.random.key(2), (rows, slots), 0, config.vocab_size)
    features = jax.random.normal(jax.random.key(3), (rows, slots, 72))
    embed = jax.random.normal(jax.random.key(4), (config.vocab_size, 24))
    state = drafter.commit(params, embed, drafter.init_state(rows, 16), tokens, features, jnp.full((rows,), slots))
    chain = drafter.propose(params, embed, state, no_texts(rows), Tree.chain(3), likeliest).token
    carry, choice = drafter.begin(params, embed, state, no_texts(rows), 3, likeliest)
    stepwise = [choice.token]
    for step in range(2):
        carry, choice = drafter.advance(params, embed, state, carry, stepwise[-1], jnp.int32(step), likeliest)
        stepwise.append(choice.token)
    np.testing.assert_array_equal(chain, jnp.stack(stepwise, axis=1))
