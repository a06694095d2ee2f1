"""The sampling law against a plain NumPy reading of its definition, and rollouts under every rule against that law."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny import INVARIANT, PLAIN, POLICY, VOCAB, BigramDrafter, bigram_table, keys_of, run, tiny_params, tiny_prompts

from specrl_jax.data.prompts import Prompts
from specrl_jax.errors import InputError
from specrl_jax.models.policy import forward, grid_batch, logits, sequence_positions
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Block, Match, Ratio
from specrl_jax.rollout.sampling import Context, SamplingLaw
from specrl_jax.rollout.trajectory import to_sequences
from specrl_jax.rollout.verification import lenient_law

pytestmark = pytest.mark.ci
PLAUSIBLE = 1e-4
PROMPT, ENDS = [4, 17, 9], (1, 7)
LAWS = {
    "plain": SamplingLaw(end_ids=ENDS),
    "cool": SamplingLaw(0.6, end_ids=ENDS),
    "top-k": SamplingLaw(1.3, top_k=3, end_ids=ENDS),
    "top-p": SamplingLaw(top_p=0.8, end_ids=ENDS),
    "min-p": SamplingLaw(min_p=0.2, end_ids=ENDS),
    "forbidden": SamplingLaw(forbidden=(3, 5, 9), end_ids=ENDS),
    "penalty": SamplingLaw(repetition_penalty=3.0, end_ids=ENDS),
    "minimum": SamplingLaw(min_new_tokens=6, end_ids=ENDS),
    "all": SamplingLaw(
        0.9,
        top_k=6,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.7,
        forbidden=(3,),
        min_new_tokens=2,
        end_ids=ENDS,
    ),
    "greedy": SamplingLaw(0.0, repetition_penalty=2.0, min_new_tokens=3, end_ids=ENDS),
}


def reference(law, scores, seen, position):
    """The law of one token, float64 `[v]`: sets of kept tokens instead of thresholds."""
    scores = np.array(scores, np.float64)
    for token in set(seen):
        scores[token] *= law.repetition_penalty ** (-1.0 if scores[token] > 0 else 1.0)
    kept = set(range(len(scores))) - set(law.forbidden)
    if position < law.min_new_tokens:
        kept -= set(law.end_ids)
    weights = {token: np.exp((scores[token] - scores.max()) / (law.temperature or 1.0)) for token in kept}
    ranked = sorted(kept, key=lambda token: -weights[token])
    ranked = ranked[: law.top_k or None]
    total, mass, nucleus = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if mass < law.top_p * total:
            nucleus.append(token)
        mass += weights[token]
    nucleus = [token for token in nucleus if weights[token] >= law.min_p * weights[ranked[0]]]
    p = np.zeros(len(scores))
    for token in nucleus:
        p[token] = weights[token]
    return p / p.sum()


@pytest.mark.parametrize("name", LAWS)
def test_the_law_is_that_of_its_definition(name):
    law, rng = LAWS[name], np.random.default_rng(0)
    scores = rng.normal(scale=2.0, size=(40, VOCAB)).astype(np.float32)
    position = np.arange(40, dtype=np.int32) % 8
    seen = rng.random((40, VOCAB)) < 0.3
    got = law.log_law(jnp.asarray(scores), Context(jnp.asarray(position), jnp.asarray(seen)), jnp.arange(VOCAB))
    expected = [reference(law, s, np.flatnonzero(row), i) for s, row, i in zip(scores, seen, position, strict=True)]
    np.testing.assert_allclose(np.exp(got), expected, atol=2e-6)
    np.testing.assert_array_equal(np.isfinite(got), np.array(expected) > 0)


def test_ties_at_a_threshold_stay():
    scores = jnp.asarray([[2.0, 1.0, 1.0, 0.0]])
    got = SamplingLaw(top_k=2).log_law(scores, Context(jnp.zeros((1,), jnp.int32)), jnp.arange(4))
    assert np.isfinite(got).tolist() == [[True, True, True, False]]


def test_laws_out_of_range_are_refused():
    for options, sentence in (
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0; choose a mass above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 1.0}, "min_p is 1.0; choose a share of at least 0 and below 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be a number above 0"),
        ({"min_new_tokens": 2}, "min_new_tokens is 2 without end tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
    ):
        with pytest.raises(InputError, match=sentence):
            SamplingLaw(**options)
    with pytest.raises(InputError, match=r"lenience is 0\.5; choose a number of at least 1"):
        Ratio(lenience=0.5)


def engine_of(numerics, law, rule=None, *, k=3, new=20, samples=3):
    rule = rule or Match()
    drafter = BigramDrafter() if k else None
    return RolloutEngine(POLICY, RolloutConfig(new, samples, k, law, rule, ladder=(1.0,)), numerics, drafter)


@functools.lru_cache
def rollout(name, rule, k):
    prompts = tiny_prompts()
    engine = engine_of(INVARIANT, LAWS[name], rule, k=k)
    return run(engine, prompts, keys_of(prompts, 3), tiny_params(), bigram_table() if k else None)


@pytest.mark.parametrize("argmax", [False, True])
@pytest.mark.parametrize("name", LAWS)
def test_match_emits_the_tokens_of_the_plain_run_under_every_law(name, argmax):
    if argmax and name not in ("all", "cool"):
        pytest.skip("the drafts' origin does not touch the law")
    plain, ours = rollout(name, Match(), 0), rollout(name, Match(argmax_drafts=argmax), 3)
    for field in ("tokens", "lengths", "ended", "log_probs", "thresholds"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(plain, field), err_msg=field)
    assert ours.stats.accepted + ours.stats.cut_accepted > 0
    assert (ours.thresholds is not None) == LAWS[name].filtered


@pytest.mark.parametrize("name", ["top-k", "top-p", "min-p", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_support_of_the_rollout_survives_another_program(name, dtype):
    """Plain numerics: the training forward rounds otherwise than the rollout, and the support must not move for it."""
    policy = replace(POLICY, dtype=dtype)
    prompts, params = tiny_prompts(groups=40), tiny_params(policy)
    law = LAWS[name]
    engine = RolloutEngine(policy, RolloutConfig(20, 3, 0, law, ladder=(1.0,)), PLAIN)
    sequences = to_sequences(jax.tree.map(jnp.asarray, run(engine, prompts, keys_of(prompts, 3), params)))
    mask = np.asarray(sequences.mask)

    def drift(params):
        scores = jax.jit(Scorer(policy, law, PLAIN).score)(params, sequences)
        return np.abs(np.asarray(scores.log_probs) - np.asarray(sequences.log_probs))[mask]

    moved = drift(params)
    assert len(moved) > 500
    if dtype == "float32":
        assert moved.max() < 1e-5
        # A thousandth of a change in the weights changes the law by about as much, not by whole tokens.
        moved = drift(jax.tree.map(lambda x: x * (1 + 1e-3 * jnp.cos(jnp.arange(x.size).reshape(x.shape))), params))
    assert np.median(moved) < 0.02
    assert (moved > 0.1).mean() < 0.05


@pytest.mark.parametrize("rule", [Ratio(), Block()])
def test_greedy_runs_report_the_same_log_probs_under_every_rule(rule):
    plain, ours = rollout("greedy", Match(), 0), rollout("greedy", rule, 3)
    np.testing.assert_array_equal(ours.tokens, plain.tokens)
    np.testing.assert_array_equal(ours.log_probs, plain.log_probs)


@pytest.mark.parametrize(("name", "rule"), [("all", Match(branches=2)), ("all", Ratio()), ("plain", Block())])
def test_rows_may_move_into_smaller_batches(name, rule):
    """Everything that a row carries moves with it: seen tokens, rounds, thresholds, the caches of trees."""
    prompts = tiny_prompts()
    engine = engine_of(INVARIANT, LAWS[name], rule)
    config = replace(engine.config, ladder=(1.0, 0.6, 0.2), smallest_rung=1)
    keys = keys_of(prompts, 3)
    ours = run(replace(engine, config=config), prompts, keys, tiny_params(), bigram_table())
    expected = rollout(name, rule, 3)
    for field in ("tokens", "lengths", "ended", "log_probs", "thresholds"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(expected, field), err_msg=field)


RULES = {
    "match": Match(),
    "ratio": Ratio(),
    "ratio, argmax": Ratio(argmax_drafts=True),
    "block": Block(),
    "block, argmax": Block(argmax_drafts=True),
}


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("rule", RULES)
def test_behaviour_log_probs_are_those_of_the_training_forward(name, rule):
    trajectory = rollout(name, RULES[rule], 3)
    sequences = to_sequences(jax.tree.map(jnp.asarray, trajectory))
    scores = Scorer(POLICY, LAWS[name], INVARIANT).score(tiny_params(), sequences)
    trained = np.where(sequences.mask, scores.log_probs, 0.0)
    np.testing.assert_allclose(sequences.log_probs, trained, atol=1e-6)
    assert np.isfinite(trained).all()


def prompts_of(count):
    """One prompt, of so many rows of a dataset."""
    return Prompts(
        tokens=jnp.broadcast_to(jnp.array(PROMPT, jnp.int32), (count, 3)),
        lengths=jnp.full((count,), 3, jnp.int32),
        row_ids=jnp.arange(count, dtype=jnp.uint32),
    )


@functools.lru_cache
def many_samples(name, rule, k=2):
    """Three tokens of 4,096 samples of one prompt."""
    prompts = prompts_of(4096)
    engine = engine_of(PLAIN, LAWS[name], rule, k=k, samples=1, new=3)
    return run(engine, prompts, keys_of(prompts, 1), tiny_params(), bigram_table())


@functools.lru_cache
def teacher_forced():
    """Logits after the prompt and any one token, `[v, 4, v]`."""
    tokens = jnp.array([[*PROMPT, token] for token in range(VOCAB)], jnp.int32)
    batch = grid_batch(tokens, sequence_positions(jnp.full((VOCAB,), 4, jnp.int32), 4))

    @jax.jit
    def score(params):
        return logits(params, POLICY, forward(params, POLICY, batch, numerics=PLAIN).hidden, PLAIN)

    return np.asarray(score(tiny_params())).reshape(VOCAB, 4, VOCAB)


def second_scores():
    """Logits of the second token after each first one."""
    return teacher_forced()[:, 3]


@functools.lru_cache
def exact_law(name):
    """Joint law of the first two tokens, float64 `[v, v]`; after an end token there is padding, token 0."""
    scores = teacher_forced()
    first = reference(LAWS[name], scores[0, 2], PROMPT, 0)
    joint = np.array([p * reference(LAWS[name], scores[t, 3], [*PROMPT, t], 1) for t, p in enumerate(first)])
    for end in ENDS:
        joint[end] = first[end] * np.eye(VOCAB)[0]
    return joint


def goodness_of_fit(tokens, joint):
    """p-value of the chi-square test that pairs of tokens have a joint law; rare pairs are put together."""
    p = joint.reshape(-1)
    counts, expected = np.bincount(VOCAB * tokens[:, 0] + tokens[:, 1], minlength=len(p)), p * len(tokens)
    assert counts[p == 0].sum() == 0
    counts, expected = counts[p > 0], expected[p > 0]
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "match"])
def test_sampled_rules_have_the_law_of_the_policy(name, rule):
    samples = many_samples(name, RULES[rule])
    assert samples.stats.accepted + samples.stats.cut_accepted > 200
    assert goodness_of_fit(samples.tokens, exact_law(name)) > PLAUSIBLE


def test_the_law_test_sees_lenience():
    samples = many_samples("plain", Ratio(lenience=20.0))
    exact = many_samples("plain", Ratio())
    assert samples.stats.accepted + samples.stats.cut_accepted > exact.stats.accepted + exact.stats.cut_accepted
    assert goodness_of_fit(samples.tokens, exact_law("plain")) < 1e-12


@pytest.mark.parametrize("lenience", [1.0, 3.0])
def test_behaviour_log_probs_under_lenience_are_those_of_the_closed_form(lenience):
    """The first draft of every row: its law is known from the policy's and the drafter's."""
    samples = many_samples("plain", Ratio(lenience=lenience))
    first, second = samples.tokens[:, 0], samples.tokens[:, 1]
    going_on = samples.lengths > 1
    context = Context(jnp.ones((VOCAB,), jnp.int32))
    ids = jnp.arange(VOCAB, dtype=jnp.int32)
    log_p, log_q = (
        np.asarray(LAWS["plain"].log_law(jnp.asarray(scores), context, ids))
        for scores in (second_scores(), bigram_table())
    )
    expected = np.asarray(lenient_law(jnp.asarray(log_p), jnp.asarray(log_q), math.log(lenience)))
    np.testing.assert_allclose(samples.log_probs[going_on, 1], expected[first, second][going_on], atol=1e-5)
    # The emitted tokens have that law.
    for token in np.argsort(-np.bincount(first[going_on]))[:3]:
        counts = np.bincount(second[going_on & (first == token)], minlength=VOCAB)
        law = np.exp(np.float64(expected[token]))
        assert stats.chisquare(counts, law / law.sum() * counts.sum()).pvalue > PLAUSIBLE


def test_penalties_that_miss_the_drafts_before_are_caught(monkeypatch):
    """Positive control: blind to the round's own drafts, a penalised run no longer equals the plain one."""
    plain = rollout("penalty", Match(), 0)
    monkeypatch.setattr("specrl_jax.rollout.round.with_drafts", lambda seen, drafts: seen)
    prompts = tiny_prompts()
    engine = engine_of(INVARIANT, replace(LAWS["penalty"], min_p=1e-9))
    blind = run(engine, prompts, keys_of(prompts, 3), tiny_params(), bigram_table())
    assert not np.array_equal(blind.tokens, plain.tokens)
