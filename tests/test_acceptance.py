"""Acceptance by theory: against all pairs, against sampling, and in rollouts of a trained drafter's kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats
from tiny import PLAIN, POLICY, BigramDrafter, bigram_table, tiny_params, tiny_prompts

from experiments import acceptance_by_rule
from experiments.acceptance_by_rule import cases, watched_rollout
from specrl_jax.models.policy import head_weights
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.acceptance import match_acceptance, ratio_acceptance
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.noise import gumbel_noise, sequence_keys
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.trajectory import to_sequences

pytestmark = pytest.mark.ci


def laws(vocab=9, seed=0, zeros=True):
    """Pairs of laws, some tokens impossible under one or both."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(vocab, 0.5), (2, 50)).astype(np.float32)
    if zeros:
        p[:, 1], q[:, 2], p[:, 3], q[:, 3] = 0, 0, 0, 0
        p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    return p, q


def log(x):
    with np.errstate(divide="ignore"):
        return jnp.log(jnp.asarray(x))


@pytest.mark.parametrize("zeros", [True, False])
def test_match_acceptance_is_the_formula_over_all_pairs(zeros):
    p, q = laws(zeros=zeros)
    expected = []
    for p_row, q_row in zip(p.astype(np.float64), q.astype(np.float64), strict=True):
        both = np.flatnonzero((p_row > 0) & (q_row > 0))
        expected.append(sum(1 / np.maximum(p_row / p_row[x], q_row / q_row[x]).sum() for x in both))
    np.testing.assert_allclose(match_acceptance(log(p), log(q)), expected, rtol=2e-5)
    overlap = np.asarray(ratio_acceptance(log(p), log(q)))
    np.testing.assert_allclose(overlap, np.minimum(p, q).sum(1), rtol=1e-5)
    # Daliri, Musco and Suresh: at least (1 - TV) / (1 + TV); never more than the ratio test.
    assert (np.asarray(expected) >= overlap / (2 - overlap) - 1e-6).all()
    assert (np.asarray(expected) <= overlap + 1e-6).all()
    np.testing.assert_allclose(match_acceptance(log(p), log(p)), 1.0, rtol=1e-5)


def joint_law(p, q):
    """P(policy draws a, drafter draws b) with shared noise, float64 `[v, v]`.

    With exponential clocks e the policy takes argmin e / p and the drafter argmin e / q. Given t = e_b / e_a between
    p_b / p_a and q_b / q_a, all other clocks must ring later under both: an integral of 1 / S(t)^2.
    """
    vocab = len(p)
    law = np.zeros((vocab, vocab))
    for a in range(vocab):
        law[a, a] = 1 / np.maximum(p / p[a], q / q[a]).sum()
        for b in range(vocab):
            low, high = p[b] / p[a], q[b] / q[a]
            if a == b or low >= high:
                continue
            others = [i for i in range(vocab) if i not in (a, b)]

            def density(t, a=a, b=b, others=others):
                total = 1 + t + np.maximum(p[others] / p[a], q[others] * t / q[b]).sum()
                return total**-2

            kinks = sorted(k for k in (p[others] / p[a] * q[b] / q[others]) if low < k < high)
            law[a, b] = integrate.quad(density, low, high, points=kinks or None)[0]
    return law


@pytest.mark.full
def test_ten_million_draws_have_the_law_of_the_coupling():
    """Chi-square of the joint law of draw and draft; and it sees noise that is not shared, or shared by column."""
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(6), 2)
    total, chunk = 10_000_000, 500_000
    ids = jnp.arange(6, dtype=jnp.int32)

    @jax.jit
    def draw(start, other):
        rows = (start + jnp.arange(chunk)).astype(jnp.uint32)
        keys = sequence_keys(0, "rollout", 0, rows // 1000, (rows % 1000).astype(jnp.int32))
        positions = (rows % 7).astype(jnp.int32)
        noise = gumbel_noise(keys, positions, ids)
        apart = gumbel_noise(keys, positions + 1, ids)
        draws = jnp.argmax(jnp.log(jnp.asarray(p, jnp.float32))[None] + noise, axis=1)
        drafts = jnp.argmax(jnp.log(jnp.asarray(q, jnp.float32))[None] + jnp.where(other, apart, noise), axis=1)
        return jnp.bincount(draws * 6 + drafts, length=36)

    shared = sum(np.asarray(draw(start, False), np.int64) for start in range(0, total, chunk))
    law = joint_law(p, q).ravel()
    assert law.sum() == pytest.approx(1.0, abs=1e-7)
    np.testing.assert_allclose(law.reshape(6, 6).sum(1), p, atol=1e-7)
    assert shared[law == 0].sum() == 0
    expected = law[law > 0] / law.sum() * total
    assert stats.chisquare(shared[law > 0], expected).pvalue > 1e-4
    assert stats.chisquare(shared.reshape(6, 6).sum(1), p * total).pvalue > 1e-4
    assert np.asarray(draw(0, True), np.int64)[law == 0].sum() > 0


def test_acceptance_in_rollouts_agrees_with_theory():
    """Per position, over every draft that was reached, within 3 standard errors; and a wrong theory is seen."""
    prompts = tiny_prompts(groups=400)
    keys = sequence_keys(0, "rollout", 0, prompts.row_ids, jnp.zeros_like(prompts.lengths))
    measured = {}
    for case in cases(6):
        if case.theory is None:
            continue
        config = RolloutConfig(16, 1, case.draft_length, SamplingLaw(end_ids=(1, 7)), case.rule, ladder=(1.0,))
        engine = RolloutEngine(POLICY, config, PLAIN, BigramDrafter())
        _, sums = watched_rollout(case, engine)(tiny_params(), bigram_table(), prompts, keys)
        sums = jax.tree.map(np.asarray, sums)
        seen = sums.count >= 30
        z = (sums.accepted - sums.expected)[seen] / np.sqrt(sums.variance[seen])
        assert seen[0]
        assert np.abs(z).max() < 3, (case.label, z)
        measured[case.label] = sums
    # The match rule is not the ratio test, and both differ from argmax drafts.
    match, ratio = measured["match"], measured["ratio"]
    rate = ratio.expected[0] / ratio.count[0]
    wrong = (match.accepted[0] - rate * match.count[0]) / np.sqrt(match.variance[0])
    assert abs(wrong) > 3


def test_an_earlier_rollout_is_accepted_as_the_coupling_of_old_and_new_policy_says():
    """With the same noise in every epoch, token by token up to the first that differs; with other noise, far less."""
    prompts = tiny_prompts(groups=300)
    none = jnp.zeros_like(prompts.lengths)
    old, new = tiny_params(), jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, tiny_params(), tiny_params(seed=1))
    config = RolloutConfig(12, 1, 0, SamplingLaw(end_ids=(1, 7)), ladder=(1.0,))
    rollout = jax.jit(RolloutEngine(POLICY, config, PLAIN).rollout)
    keys, others = (sequence_keys(0, "rollout", update, prompts.row_ids, none) for update in (0, 1))
    first, second, third = (rollout(p, None, prompts, k) for p, k in ((old, keys), (new, keys), (new, others)))
    sequences = to_sequences(first)

    @jax.jit
    def acceptance(old, new):
        scored = [(Scorer(POLICY, SamplingLaw(), PLAIN).score(p, sequences, (0,)).states, p) for p in (old, new)]
        laws = [jax.nn.log_softmax(states @ head_weights(p)[1].T) for states, p in scored]
        return jnp.pad(match_acceptance(laws[1], laws[0])[:, :-1], ((0, 0), (1, 0)))

    expected, mask = np.asarray(acceptance(old, new), np.float64), np.asarray(sequences.mask)

    def of(later):
        same = np.asarray(to_sequences(later).tokens == sequences.tokens) | ~mask
        reached = mask & (np.cumsum(~same, axis=1) - ~same == 0)
        return same[reached], expected[reached]

    same, rates = of(second)
    z = (same.sum() - rates.sum()) / np.sqrt((rates * (1 - rates)).sum())
    assert 0.3 < rates.mean() < 0.97
    assert abs(z) < 3
    same, rates = of(third)
    assert same.mean() < rates.mean() - 0.2


def test_rules_are_compared_at_equal_drafted_tokens():
    for case in cases(6):
        assert case.rule.tree(case.draft_length).size - 1 == 6
    assert acceptance_by_rule.cases(12)[4].rule.tree(6).size - 1 == 12
