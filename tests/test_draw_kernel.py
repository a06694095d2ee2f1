"""Draws by the CPU's kernel against float64, and rollouts with and without it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_inputs import fresh, normal
from numpy_noise import bits, uniform
from tiny import INVARIANT, PLAIN, POLICY, keys_of, random_eagle3, tiny_params, tiny_prompts

from specrl_jax.kernels import draw
from specrl_jax.rollout import sampling
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.noise import best, noise_words
from specrl_jax.rollout.rules import Match, Ratio
from specrl_jax.rollout.sampling import Context, SamplingLaw

pytestmark = pytest.mark.ci


def _laws(tokens, vocab_size=160):
    rng = np.random.default_rng(tokens)
    logits = 4 * normal(rng, tokens, vocab_size)
    keys = jnp.asarray(rng.integers(0, 2**32, (tokens, 2), dtype=np.uint32))
    ids = jnp.asarray(rng.permutation(1000)[:vocab_size], jnp.int32)
    return logits.at[:, 5].set(-jnp.inf), keys, jnp.arange(tokens, dtype=jnp.int32), ids


@pytest.mark.parametrize("noisy", [True, False])
def test_draws_are_those_of_float64(noisy, any_registers):
    """Token, log-probability and entropy, with the noise of `rollout/noise.py` as NumPy makes it."""
    logits, keys, positions, ids = _laws(33)
    words = noise_words(keys, positions) if noisy else None
    tokens, log_probs, entropies = fresh(draw.draw)(logits, ids, words)
    for row in range(len(logits)):
        law = np.float64(logits[row]) - np.log(np.sum(np.exp(np.float64(logits[row]))))
        key = tuple(int(word) for word in keys[row])
        noise = [-np.log(-np.log1p(-uniform(bits(key, row, int(token))))) for token in ids]
        assert tokens[row] == np.argmax(law + np.array(noise) * noisy)
        np.testing.assert_allclose(log_probs[row], law[tokens[row]], rtol=0, atol=2e-6)
        shown = law[np.isfinite(law)]
        np.testing.assert_allclose(entropies[row], -np.sum(np.exp(shown) * shown), rtol=0, atol=5e-6)


def test_given_columns_are_described_with_the_bits_of_draws(any_registers):
    logits, keys, positions, ids = _laws(33)
    tokens, *expected = fresh(draw.draw)(logits, ids, noise_words(keys, positions))
    described = fresh(draw.describe)(logits, tokens)
    jax.tree.map(np.testing.assert_array_equal, described, tuple(expected))
    others = fresh(draw.describe)(logits, (tokens + 1) % logits.shape[1])
    assert not np.array_equal(others[0], expected[0])
    # A column beyond the vocabulary is nobody's memory.
    assert np.isfinite(fresh(draw.describe)(logits, jnp.full_like(tokens, 2**30))[0]).all()


def test_draws_of_many_keys_have_the_law():
    """Ten thousand draws from one law; the bound is that of a chi-squared variable of 15 degrees, once in 10^5."""
    logits = jnp.tile(normal(np.random.default_rng(0), 1, 16), (10_000, 1))
    keys = jnp.stack([jnp.arange(10_000, dtype=jnp.uint32), jnp.full((10_000,), 7, jnp.uint32)], axis=1)
    words = noise_words(keys, jnp.zeros((10_000,), jnp.int32))

    def distance(words):
        tokens = draw.draw(logits, jnp.arange(16, dtype=jnp.int32), words)[0]
        wanted = 10_000 * np.asarray(jax.nn.softmax(logits[0]))
        return np.sum((np.bincount(tokens, minlength=16) - wanted) ** 2 / wanted)

    assert distance(words) < 50
    assert distance(words & jnp.uint32(7)) > 50  # a planted bug: most bits are gone


def test_laws_without_a_token_draw_the_first_and_none_is_no_number(any_registers):
    logits = jnp.stack([jnp.full((32,), -jnp.inf), jnp.zeros((32,)).at[3].set(jnp.nan), jnp.zeros((32,))])
    ids, words = jnp.arange(32, dtype=jnp.int32), jnp.ones((3, 2), jnp.uint32)
    tokens, log_probs, _ = fresh(draw.draw)(logits, ids, words)
    assert tokens[0] == 0
    assert 0 <= tokens[1] < 32
    np.testing.assert_array_equal(jnp.isnan(log_probs), [True, True, False])


def test_the_kernel_draws_what_other_backends_draw():
    """With a temperature, penalties and bans; and it stays out where the law is filtered."""
    logits, keys, positions, ids = _laws(40)
    banned, end = (int(ids[i]) for i in (9, 11))
    logits = logits.at[:, 9].set(20.0).at[:3, 11].set(19.0)  # what would be drawn without a ban
    law = SamplingLaw(0.8, repetition_penalty=1.3, forbidden=(banned,), min_new_tokens=3, end_ids=(end,))
    context = Context(positions, jnp.asarray(np.random.default_rng(1).random((40, 1000)) < 0.3))
    tokens, log_probs, entropies = law.draw(logits, keys, context, ids)
    assert not np.isin([9, 11], tokens[:3]).any()
    log_law = law.log_law(logits, context, ids)
    np.testing.assert_array_equal(tokens, best(law.perturbed(log_law, keys, positions, ids))[:, 0])
    np.testing.assert_allclose(log_probs, log_law[jnp.arange(40), tokens], rtol=0, atol=2e-6)
    np.testing.assert_allclose(entropies, -jnp.nansum(jnp.exp(log_law) * log_law, axis=1), rtol=0, atol=5e-6)
    assert replace(law, top_k=3).draw(logits, keys, context, ids) is None


def test_the_best_of_a_draw_are_those_of_the_whole_law():
    """The best first, each once; and of a law with two tokens the third is none that it allows."""
    logits, keys, positions, ids = _laws(40)
    logits = logits.at[-1].set(-jnp.inf).at[-1, jnp.array([3, 8])].set(1.0)
    law, context = SamplingLaw(0.8), Context(positions)
    columns, log_probs = law.draw_several(logits, keys, context, ids, 3)
    log_law = law.log_law(logits, context, ids)
    scores = law.perturbed(log_law, keys, positions, ids)
    np.testing.assert_array_equal(columns[:-1], best(scores, 3)[:-1])
    np.testing.assert_array_equal(columns[-1, :2], best(scores, 2)[-1])
    before = jnp.cumsum(jnp.exp(log_law[jnp.arange(40)[:, None], columns]), axis=1)
    expected = log_law[jnp.arange(40), columns[:, 1]] - jnp.log1p(-before[:, 0])
    np.testing.assert_allclose(log_probs[:-1, 1], expected[:-1], rtol=0, atol=1e-5)
    assert not log_probs[-1, 2] > -jnp.inf
    assert replace(law, top_k=3).draw_several(logits, keys, context, ids, 3) is None


def test_a_large_vocabulary_keeps_its_small_weights():
    """Sixteen large weights come first: what follows, in sum, must not be lost beside them."""
    logits = jnp.zeros((1, 151_936)).at[0, :16].set(17.0)
    _, log_probs, entropies = draw.draw(logits, jnp.arange(151_936, dtype=jnp.int32), None)
    law = np.float64(logits[0]) - np.log(np.sum(np.exp(np.float64(logits[0]))))
    np.testing.assert_allclose(log_probs[0], law[0], rtol=0, atol=2e-5)
    np.testing.assert_allclose(entropies[0], -np.sum(np.exp(law) * law), rtol=0, atol=2e-5)


WIDE = replace(POLICY, vocab_size=32)


def _rollout(k, numerics=PLAIN, rule=None):
    """An engine with a vocabulary of a few registers, its arguments, and its program."""
    params, prompts, (drafter, draft) = tiny_params(WIDE), tiny_prompts(), random_eagle3(WIDE, draft_vocab=16)
    config = RolloutConfig(12, 2, k, SamplingLaw(end_ids=(1,)), *(() if rule is None else (rule,)))
    engine = RolloutEngine(WIDE, config, numerics, drafter if k else None)
    arguments = (params, draft if k else None, prompts, keys_of(prompts, 2))
    return jax.jit(lambda *arguments: engine.rollout(*arguments)), arguments


def _draws(k, numerics=PLAIN, rule=None):
    program, arguments = _rollout(k, numerics, rule)
    return program.lower(*arguments).as_text().count("@specrl_jax_draw_")


def test_where_the_kernel_draws():
    """The policy's tokens and drafts; where a rule needs whole laws only for bits that training has too."""
    assert 0 < _draws(0) < _draws(3) < _draws(3, rule=Match(branches=2))
    assert 0 < _draws(0, numerics=INVARIANT) < _draws(3, numerics=INVARIANT)
    assert _draws(3, rule=Ratio()) == 0
    assert _draws(3, numerics=INVARIANT, rule=Ratio()) > 0


def test_rollouts_are_those_without_the_kernel(monkeypatch):
    """Drafts or none, kernel or none: the same tokens."""
    tokens = []
    for k, by_hand in ((0, False), (0, True), (3, False), (3, True)):
        monkeypatch.setattr(sampling, "on_a_cpu", lambda by_hand=by_hand: by_hand)
        program, arguments = _rollout(k)
        assert (_draws(k) > 0) == by_hand
        tokens.append(program(*arguments).tokens)
    for others in tokens[1:]:
        np.testing.assert_array_equal(others, tokens[0])
