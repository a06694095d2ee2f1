"""Verification rules by exact enumeration in float64, and the bugs that it must catch.

The shipped functions run on every draft sequence at once. Their random draws come
through `Draws`; here each draw is replaced by all of its branches, so that the law
of what is emitted is a finite sum.
"""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from small_laws import FILTERS, along, argmax_law, tables

from specrl_jax.rollout.draws import KeyedDraws
from specrl_jax.rollout.noise import gumbel_noise, round_keys, subkeys, uniform_logs
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.verification import (
    block,
    lenient_law,
    log_excess,
    ratio,
)

pytestmark = pytest.mark.ci
SIZES = [(2, 1), (6, 2), (3, 3)]


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def sampled(law, vocab, k):
    """Drafts drawn from a law of the same filters."""
    return tables(law, vocab, k, 2)


def one_hot(law, vocab, k):
    """The most probable drafts."""
    return [argmax_law(x) for x in sampled(law, vocab, k)]


def subset(law, vocab, k):
    """A drafter whose vocabulary lacks the last token."""
    return tables(replace(law, forbidden=(*law.forbidden, vocab - 1)), vocab, k, 2)


PROPOSALS = {"sampled": sampled, "one-hot": one_hot, "subset": subset}


class Branch:
    """Draws that fall as told in every row, `[r, k]` and `[r]`, with the probability of each fall, `[r]`."""

    def __init__(self, coins, token):
        self.pattern, self.token, self.probability = coins, token, 1.0

    def coins(self, log_prob):
        yes = np.exp(np.asarray(log_prob))
        assert np.all((yes >= 0) & (yes <= 1 + 1e-15))
        self.probability = self.probability * np.where(self.pattern, yes, 1.0 - yes).prod(axis=1)
        return jnp.asarray(self.pattern)

    def tokens(self, log_law):
        weights = np.exp(np.asarray(log_law) - np.max(log_law, axis=1, keepdims=True))
        law = weights / weights.sum(1, keepdims=True)
        self.probability = self.probability * law[np.arange(len(law)), self.token]
        return jnp.asarray(self.token)


def every_branch(drafts, vocab):
    """Each row of drafts with every fall of `k` coins and every token: rows, coins `[r, k]`, tokens `[r]`."""
    falls = list(itertools.product((True, False), repeat=drafts.shape[1]))
    rows, coins, tokens = zip(*itertools.product(range(len(drafts)), falls, range(vocab)), strict=True)
    return np.array(rows), np.array(coins), np.array(tokens, np.int32)


def log_product(tables_, tokens):
    """Log-probability of each row of tokens, `[r]`."""
    total = np.zeros(len(tokens))
    for i in range(tokens.shape[1]):
        total = total + tables_[i][tuple(tokens[:, : i + 1].T)]
    return total


def emitted_law(rule, p, q, told_q=None, kept=None):
    """Joint law of the next k + 1 tokens, `[v] * (k + 1)`: a round of `rule`, then the policy alone.

    p, q: tables of policy and drafter. told_q: what the rule is told of the drafter's law. kept: how many of some
    drafts, `[r, k]`, are shown to it, all by default.
    """
    vocab, k = p[0].shape[-1], len(q)
    told_q = q if told_q is None else told_q
    drafts = np.array(list(itertools.product(range(vocab), repeat=k)), np.int32)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = np.exp(log_product(q, drafts))
    rows, coins, tokens = every_branch(drafts[drawn > 0], vocab)
    drafts, drawn = drafts[drawn > 0][rows], drawn[drawn > 0][rows]
    branch = Branch(coins, tokens)
    shown = drafts if kept is None else np.where(np.arange(k) < kept(drafts)[:, None], drafts, -1)
    out = rule(jnp.asarray(shown), jnp.asarray(along(p, drafts)), jnp.asarray(along(told_q, drafts)), branch)
    law = np.zeros([vocab] * (k + 1))
    for weight, emitted, accepted in zip(
        drawn * branch.probability, *map(np.asarray, (out.tokens, out.accepted)), strict=True
    ):
        if weight > 0:
            prefix = tuple(emitted[: accepted + 1])
            law[prefix] += weight * continuation(p, prefix)
    return law


def continuation(p, prefix):
    """Law of the tokens that follow `prefix`, one axis each, up to the depth of the tables."""
    law = np.ones([p[0].shape[-1]] * (len(p) - len(prefix)))
    for i in range(len(prefix), len(p)):
        table = np.exp(p[i][prefix])
        law = law * table.reshape(*table.shape, *[1] * (len(p) - 1 - i))
    return law


def autoregressive(p):
    return continuation(p, ())


def distance(law, other):
    return 0.5 * np.abs(law - other).sum()


RULES = {"ratio": ratio, "block": block}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(("vocab", "k"), SIZES)
def test_the_emitted_law_is_the_policys(rule, proposal, name, vocab, k, float64):
    if vocab == 2 and (FILTERS[name].forbidden or (name, proposal) == ("minimum", "subset")):
        pytest.skip("nothing would be left to choose from")
    p = tables(FILTERS[name], vocab, k + 1, 1)
    law = emitted_law(RULES[rule], p, PROPOSALS[proposal](FILTERS[name], vocab, k))
    assert np.abs(law - autoregressive(p)).max() <= 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_the_drafter_need_not_filter_as_the_policy_does(rule, float64):
    p, q = tables(FILTERS["all"], 4, 4, 1), tables(SamplingLaw(1.5), 4, 3, 2)
    assert np.abs(emitted_law(RULES[rule], p, q) - autoregressive(p)).max() <= 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_is_the_policy_is_always_accepted(rule, float64):
    p = tables(SamplingLaw(), 3, 4, 1)
    drafts = jnp.asarray(list(itertools.product(range(3), repeat=3)), jnp.int32)
    log_p = jnp.asarray(along(p, np.asarray(drafts)))
    draws = KeyedDraws(jnp.asarray(np.random.default_rng(0).integers(2**32, size=(27, 2), dtype=np.uint32)))
    np.testing.assert_array_equal(RULES[rule](drafts, log_p, log_p[:, :3], draws).accepted, 3)


STOPS = {
    "none": lambda drafts: np.zeros(len(drafts)),
    "one": lambda drafts: np.ones(len(drafts)),
    "by the draft before": lambda drafts: 1 + (drafts[:, 0] % 2) * (1 + (drafts[:, 1] == 0)),
}
PEEKS = {
    "at the draft itself": lambda drafts: 1 + (drafts[:, 1] % 2),
    "at the draft after": lambda drafts: 1 + (drafts[:, 1:].sum(1) % 2),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("stop", STOPS)
def test_rows_may_stop_by_the_drafts_before(rule, proposal, stop, float64):
    p = tables(SamplingLaw(), 3, 4, 1)
    law = emitted_law(RULES[rule], p, PROPOSALS[proposal](SamplingLaw(), 3, 3), kept=STOPS[stop])
    assert np.abs(law - autoregressive(p)).max() <= 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("peek", PEEKS)
def test_caught_drafts_dropped_for_what_they_are(rule, peek, float64):
    p, q = tables(SamplingLaw(), 3, 4, 1), tables(SamplingLaw(), 3, 3, 2)
    assert distance(emitted_law(RULES[rule], p, q, kept=PEEKS[peek]), autoregressive(p)) > 0.01


def expected_accepted(rule, p, q):
    drafts = np.array(list(itertools.product(range(p[0].shape[-1]), repeat=len(q))), np.int32)
    rows, coins, tokens = every_branch(drafts, 1)
    drafts = drafts[rows]

    class CoinsOnly(Branch):
        def tokens(self, log_law):
            return jnp.zeros((log_law.shape[0],), jnp.int32)

    branch = CoinsOnly(coins, tokens)
    out = rule(jnp.asarray(drafts), jnp.asarray(along(p, drafts)), jnp.asarray(along(q, drafts)), branch)
    return (np.exp(log_product(q, drafts)) * branch.probability * np.asarray(out.accepted)).sum()


def test_acceptance_follows_theory(float64):
    p, q = tables(SamplingLaw(), 4, 4, 1), tables(SamplingLaw(), 4, 3, 2)
    # The first draft of `ratio` is accepted with probability 1 - TV.
    assert expected_accepted(ratio, p[:2], q[:1]) == pytest.approx(np.minimum(np.exp(p[0]), np.exp(q[0])).sum())
    # Block verification accepts at least as much, here more, and the same where there is one draft.
    assert expected_accepted(block, p[:2], q[:1]) == pytest.approx(expected_accepted(ratio, p[:2], q[:1]))
    assert expected_accepted(block, p, q) > expected_accepted(ratio, p, q) + 0.01


@pytest.mark.parametrize("lenience", [1.0, 1.3, 2.0, 100.0])
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_the_law_under_lenience_has_its_closed_form(lenience, proposal, float64):
    p, q = tables(SamplingLaw(), 4, 2, 1), PROPOSALS[proposal](SamplingLaw(), 4, 1)

    def lenient(*args):
        return ratio(*args, log_lenience=float(np.log(lenience)))

    law = emitted_law(lenient, p, q).sum(1)
    np.testing.assert_allclose(
        law, np.exp(lenient_law(jnp.asarray(p[0]), jnp.asarray(q[0]), float(np.log(lenience)))), atol=1e-12
    )
    changed = np.abs(law - np.exp(p[0])).max() > 1e-3
    assert changed == (lenience > 1.0)


def test_the_law_under_lenience_is_exact_where_refusals_are_rare():
    """Float32 against float64: 1 - sum min(q, l p) must not cancel."""
    rng = np.random.default_rng(0)
    log_p = np.log(rng.dirichlet(np.ones(400)))
    log_q = log_p + np.where(np.arange(400) < 3, 1e-3, 0.0) + np.log(1.0001)
    log_q[-20:] = -np.inf
    log_q -= np.log(np.exp(log_q).sum())
    wide = [np.float64(x) for x in (log_p, log_q)]
    kept = np.minimum(wide[1], wide[0] + np.log(1.05))
    over, under = np.exp(wide[1]) - np.exp(kept), np.maximum(np.exp(wide[0]) - np.exp(wide[1]), 0)
    assert 0 < over.sum() < 0.05
    expected = np.log(np.exp(kept) + over.sum() * under / under.sum())
    got = lenient_law(jnp.asarray(log_p, jnp.float32), jnp.asarray(log_q, jnp.float32), float(np.log(1.05)))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_log_excess_is_the_logarithm_of_the_difference(float64):
    p, q = np.array([0.5, 0.2, 0.3, 0.0, 0.0]), np.array([0.1, 0.3, 0.3, 0.3, 0.0])
    with np.errstate(divide="ignore"):
        excess = log_excess(jnp.asarray(np.log(p)), jnp.asarray(np.log(q)))
    np.testing.assert_allclose(np.exp(excess), [0.4, 0, 0, 0, 0], atol=1e-15)


# Planted bugs: the enumeration must see each of them.


def test_caught_q_reported_unfiltered(float64):
    p, q = tables(FILTERS["top-k"], 4, 3, 1), tables(FILTERS["top-k"], 4, 2, 2)
    unfiltered = tables(SamplingLaw(1.2), 4, 2, 2)
    assert distance(emitted_law(ratio, p, q, unfiltered), autoregressive(p)) > 0.01


def test_caught_argmax_drafts_judged_with_softmax_q(float64):
    p, q = tables(SamplingLaw(), 4, 3, 1), tables(SamplingLaw(), 4, 2, 2)
    assert distance(emitted_law(ratio, p, [argmax_law(x) for x in q], q), autoregressive(p)) > 0.01


def test_caught_a_draft_dropped_for_its_own_low_q(float64):
    p, q = tables(SamplingLaw(), 4, 2, 1), tables(SamplingLaw(), 4, 1, 2)

    def dropping(drafts, log_p, log_q, draws):
        low = jnp.take_along_axis(log_q[:, 0], drafts, axis=1) < np.log(0.2)

        class NoRound:
            """A dropped draft leaves a round without drafts: the policy's own token."""

            def coins(self, log_prob):
                return draws.coins(jnp.where(low, -jnp.inf, log_prob))

            def tokens(self, log_law):
                return draws.tokens(jnp.where(low, log_p[:, 0], log_law))

        return ratio(drafts, log_p, log_q, NoRound())

    assert distance(emitted_law(dropping, p, q), autoregressive(p)) > 0.01


# Bugs of shared randomness do not show in the law of one draw; they are sampled.
ROWS = 400_000


def keys_of(seed):
    return jnp.asarray(np.random.default_rng(seed).integers(2**32, size=(ROWS, 2), dtype=np.uint32))


def draw(keys, log_law):
    """Tokens of one law for every key."""
    ids = jnp.arange(log_law.shape[-1], dtype=jnp.int32)
    noise = gumbel_noise(keys, jnp.zeros((len(keys),), jnp.int32), ids)
    return jnp.argmax(jnp.broadcast_to(log_law, noise.shape) + noise, axis=-1).astype(jnp.int32)


def for_every_row(*tables_):
    """Laws of a chain whose tokens do not depend on each other, `[rows, k, v]`."""
    laws = jnp.stack([jnp.asarray(t, jnp.float32) for t in tables_])
    return jnp.broadcast_to(laws[None], (ROWS, *laws.shape))


def p_value(counts, law):
    """Chi-square test that counts come from a law."""
    return stats.chisquare(counts, law * counts.sum()).pvalue


def is_plausible(counts, law, right):
    """Right counts pass by far, and planted bugs fail by far."""
    p = p_value(np.asarray(counts), np.asarray(law, np.float64) / np.sum(law, dtype=np.float64))
    return p > 1e-4 if right else p < 1e-12


class SharedNoise(KeyedDraws):
    """The residual is drawn with the noise that drew the draft."""

    def tokens(self, log_law):
        return draw(subkeys(self.keys, "draft"), log_law)


class SharedUniform(KeyedDraws):
    """The residual is drawn by inverting its distribution function at the uniform of the coin."""

    def tokens(self, log_law):
        law = jax.nn.softmax(log_law)
        u = jnp.exp(uniform_logs(subkeys(self.keys, "coin"), 1))
        return jnp.sum(jnp.cumsum(law, axis=1) < u, axis=1).clip(0, law.shape[1] - 1).astype(jnp.int32)


@pytest.mark.parametrize(("draws", "right"), [(KeyedDraws, True), (SharedNoise, False), (SharedUniform, False)])
def test_caught_randomness_shared_between_draft_coin_and_residual(draws, right):
    p, q = (np.asarray(tables(SamplingLaw(), 5, 1, seed)[0]) for seed in (1, 2))
    keys = round_keys(keys_of(0), jnp.zeros((ROWS,), jnp.int32))
    drafts = draw(subkeys(keys, "draft"), jnp.asarray(q))[:, None]
    out = ratio(drafts, for_every_row(p, p), for_every_row(q), draws(keys))
    counts = np.bincount(np.asarray(out.tokens)[:, 0], minlength=5)
    assert is_plausible(counts, np.exp(p), right)


@pytest.mark.parametrize("fresh", [True, False])
def test_caught_coins_keyed_by_position_in_block(fresh):
    """After a round that stopped early, coins of later positions have been seen; a second round must not reuse them."""
    vocab, k = 3, 2
    laws = [tables(SamplingLaw(), vocab, 1, seed)[0] for seed in (1, 2)]
    p, q = (np.asarray(x, np.float32) for x in laws)
    keys = keys_of(0)

    class ByPosition(KeyedDraws):
        first = 0

        def coins(self, log_prob):
            columns = uniform_logs(subkeys(keys, "coin"), 2 * k + 1)
            at = jnp.asarray(self.first)[:, None] + jnp.arange(k)[None]
            return jnp.take_along_axis(columns, at, axis=1) < log_prob

    emitted, length = jnp.zeros((ROWS, 3 * k + 3), jnp.int32), jnp.zeros((ROWS,), jnp.int32)
    for index in range(2):
        fresh_keys = round_keys(keys, jnp.full((ROWS,), index, jnp.int32))
        draws = KeyedDraws(fresh_keys) if fresh else ByPosition(fresh_keys)
        if not fresh:
            object.__setattr__(draws, "first", length)
        drafts = jnp.stack(
            [
                draw(round_keys(subkeys(fresh_keys, "draft"), jnp.full((ROWS,), i, jnp.int32)), jnp.asarray(q))
                for i in range(k)
            ],
            1,
        )
        out = block(drafts, for_every_row(*[p] * (k + 1)), for_every_row(*[q] * k), draws)
        slots = jnp.where(
            jnp.arange(k + 1)[None] <= out.accepted[:, None], length[:, None] + jnp.arange(k + 1)[None], 99
        )
        emitted = emitted.at[jnp.arange(ROWS)[:, None], slots].set(out.tokens, mode="drop")
        length = length + out.accepted + 1
    # Every row has at least two tokens; the law of the second must be p.
    law = np.exp(np.asarray(laws[0]))
    rows = np.asarray(length) >= 2
    counts = np.bincount(np.asarray(emitted[:, 0] * vocab + emitted[:, 1])[rows], minlength=vocab**2)
    assert is_plausible(counts, np.outer(law, law).ravel(), fresh)
