"""Drafts chosen while a rollout runs, under rules that judge them by their laws: the policy's law comes out."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import give_prices
from test_sampling import (
    LAWS,
    PLAUSIBLE,
    PROMPT,
    RULES,
    engine_of,
    exact_law,
    goodness_of_fit,
    prompts_of,
    rollout,
    second_scores,
    teacher_forced,
)
from tiny import (
    INVARIANT,
    PLAIN,
    POLICY,
    ChainBigramDrafter,
    bigram_table,
    equal_prices,
    keys_of,
    tiny_params,
    tiny_prompts,
)

from specrl_jax.errors import InputError
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout import drafting
from specrl_jax.rollout.adaptive import AdaptiveRound, Dealt
from specrl_jax.rollout.control import Body, allocate, initial_control
from specrl_jax.rollout.drafting import cheapest_that_holds, who_drafts
from specrl_jax.rollout.rules import Block, Ratio
from specrl_jax.rollout.sampling import Context
from specrl_jax.rollout.trajectory import to_sequences
from specrl_jax.rollout.verification import lenient_law
from specrl_jax.training.costs import costs_at, given_costs, save_costs

pytestmark = pytest.mark.ci
COUNT = 4096


def adaptive_engine(engine, bodies, **settings):
    config = replace(engine.config, adaptive=True, bodies=bodies, ladder=(1.0,), **settings)
    return replace(engine, config=config, drafter=ChainBigramDrafter())


@functools.lru_cache
def guesses():
    """Of the drafter: what the policy says after the prompt and a token, as a poor copy has it."""
    return jnp.asarray(second_scores()) + 0.5 * bigram_table()


def rolled_out(engine, prompts, control, samples=1):
    keys, params = keys_of(prompts, samples), tiny_params()
    program = jax.jit(lambda *a: engine.rollout(*a[:4], control=a[4]))
    return jax.device_get(program(params, guesses(), prompts, keys, control))


def many_samples(name, rule, bodies, k=2, **settings):
    """Three tokens of 4,096 samples of one prompt, in rounds that draft."""
    engine = adaptive_engine(engine_of(PLAIN, LAWS[name], rule, k=k, samples=1, new=3), bodies, **settings)
    # Rounds without drafts are so dear that nobody plans them.
    seconds = [1.0 if body.tokens > body.rows else 1e3 for body in bodies]
    return rolled_out(engine, prompts_of(COUNT), initial_control(np.array(seconds)))


# Room for the first draft of every row and the second of half of them.
HALF = (Body(COUNT, COUNT), Body(COUNT, 2 * COUNT + COUNT // 2))


@pytest.mark.parametrize(
    ("rule", "name"), [("ratio", "plain"), ("block", "all"), ("ratio, argmax", "all"), ("block, argmax", "plain")]
)
def test_rows_that_draft_by_the_drafts_before_have_the_law_of_the_policy(name, rule):
    samples = many_samples(name, RULES[rule], HALF)
    first, second = samples.stats.drafted_at
    assert first > second > 0
    assert samples.stats.accepted_at.min() > 50
    assert goodness_of_fit(samples.tokens, exact_law(name)) > PLAUSIBLE


def test_caught_drafts_dealt_after_they_were_drawn(monkeypatch):
    """As rule match deals them, the surest of all rows first."""

    def deal(self, body, drafted, live):
        taken = allocate(drafted.worth, body.tokens - jnp.sum(live, dtype=jnp.int32))
        return Dealt(drafted.token, drafted.confidence, taken, drafted.log_law)

    monkeypatch.setattr(drafting, "who_drafts", lambda worth, *_: worth > 0.0)
    monkeypatch.setattr(drafting, "cheapest_that_holds", lambda *_: jnp.int32(1))
    monkeypatch.setattr(AdaptiveRound, "deal", deal)
    assert goodness_of_fit(many_samples("plain", Ratio(), HALF).tokens, exact_law("plain")) < 1e-12


def test_rows_that_draft_alike_have_the_law_of_the_policy():
    samples = many_samples("plain", Ratio(), HALF, per_row=False)
    first, second = samples.stats.drafted_at
    assert first > 0
    assert second == 0  # there is no room for all
    assert goodness_of_fit(samples.tokens, exact_law("plain")) > PLAUSIBLE


def test_under_lenience_only_drafted_tokens_have_another_law():
    """One draft, of half of the rows: the first token of the others has the policy's law."""
    samples = many_samples("plain", Ratio(lenience=3.0), (Body(COUNT, COUNT), Body(COUNT, COUNT + COUNT // 2)), k=1)
    context, ids = Context(jnp.zeros((1,), jnp.int32)), jnp.arange(POLICY.vocab_size, dtype=jnp.int32)
    scores = jnp.asarray(teacher_forced()[:1, 2]), guesses()[PROMPT[-1]][None]
    log_p, log_q = (np.asarray(LAWS["plain"].log_law(each, context, ids)) for each in scores)
    lenient = np.asarray(lenient_law(jnp.asarray(log_p), jnp.asarray(log_q), float(np.log(3.0))))
    told, first = samples.log_probs[:, 0], samples.tokens[:, 0]
    drafted = np.isclose(told, lenient[0][first], atol=1e-5)
    assert drafted.sum() == COUNT // 2
    np.testing.assert_allclose(told[~drafted], log_p[0][first][~drafted], atol=1e-5)


def test_a_few_rows_at_prices_have_the_law_of_the_policy():
    """Sequences take rows in turn; rounds of several sizes, and some without drafts."""
    bodies = (Body(64, 64), Body(64, 96), Body(64, 160), Body(16, 16), Body(16, 40))
    engine = adaptive_engine(engine_of(PLAIN, LAWS["plain"], Ratio(), k=2, samples=1, new=3), bodies, rows=64)
    control = initial_control(np.array([1.0, 1.5, 1.75, 0.4, 0.6]), 0.0, 0.05)
    samples = rolled_out(engine, prompts_of(COUNT), control)
    assert np.all(samples.stats.bodies[:3] > 0)
    assert goodness_of_fit(samples.tokens, exact_law("plain")) > PLAUSIBLE


@pytest.mark.parametrize(("rule", "name"), [("ratio", "all"), ("block", "plain")])
def test_log_probs_are_those_of_the_training_forward(name, rule):
    prompts = tiny_prompts()
    engine = adaptive_engine(engine_of(INVARIANT, LAWS[name], RULES[rule]), (Body(15, 15), Body(15, 45), Body(4, 12)))
    ours = rolled_out(engine, prompts, equal_prices(engine.config, 15), samples=3)
    assert ours.stats.rounds > 0
    sequences = to_sequences(jax.tree.map(jnp.asarray, ours))
    scores = Scorer(POLICY, LAWS[name], INVARIANT).score(tiny_params(), sequences)
    np.testing.assert_allclose(sequences.log_probs, np.where(sequences.mask, scores.log_probs, 0.0), atol=1e-6)


def test_greedy_tokens_are_those_without_drafts():
    engine = adaptive_engine(engine_of(INVARIANT, LAWS["greedy"], Block()), (Body(15, 15), Body(15, 45)))
    ours = rolled_out(engine, tiny_prompts(), initial_control(np.array([1.0, 0.5])), samples=3)
    plain = rollout("greedy", Ratio(), 0)
    np.testing.assert_array_equal(ours.tokens, plain.tokens)
    np.testing.assert_array_equal(ours.log_probs, plain.log_probs)
    assert ours.stats.accepted + ours.stats.cut_accepted > 0


def test_who_drafts():
    def drafting(left, price, per_row=True):
        worth = jnp.array([0.3, 0.0, 0.5, 0.1, 0.5])
        return np.flatnonzero(who_drafts(worth, jnp.int32(left), jnp.float32(price), per_row)).tolist()

    assert drafting(5, 0.0) == [0, 2, 3, 4]
    assert drafting(2, 0.0) == [2, 4]
    assert drafting(1, 0.0) == [2]
    assert drafting(0, 0.0) == []
    assert drafting(5, 0.2) == [0, 2, 4]
    assert drafting(4, 0.3, per_row=False) == [0, 2, 3, 4]  # worth 0.35 on average
    assert drafting(3, 0.3, per_row=False) == []
    assert drafting(4, 0.4, per_row=False) == []


def test_the_cheapest_round_that_holds_all_drafts():
    bodies = [(1, Body(2, 3)), (3, Body(2, 6)), (4, Body(2, 16))]
    seconds = jnp.array([0.1, 2.0, 0.1, 3.0, 1.0])

    def found(lengths, seconds=seconds):
        taken = jnp.arange(7)[None, :, None] < jnp.array(lengths)[:, None, None]
        return int(cheapest_that_holds(seconds, bodies, 7, taken, jnp.int32(2)))

    assert found([1, 1]) == 4
    dear = seconds.at[4].set(9.0)
    assert [found(lengths, dear) for lengths in ([1, 0], [1, 1], [4, 0], [3, 2], [0, 0])] == [1, 3, 3, 4, 1]
    assert found([5, 0], dear) == 4  # deeper than a row of the second may be


def test_no_clock_decides_what_is_drawn(tmp_path, monkeypatch):
    give_prices(monkeypatch)
    bodies = (Body(15, 15), Body(15, 45))
    engine = adaptive_engine(engine_of(PLAIN, LAWS["plain"], Block()), bodies)
    params, draft, path = tiny_params(), guesses(), tmp_path / "costs.json"
    with pytest.raises(InputError, match=r"a measured cost table would leave that to a clock; give the table"):
        costs_at(path, engine, params, draft, 15, 4)
    assert not path.exists()
    # The table of a run under rule match serves.
    measured = adaptive_engine(engine_of(PLAIN, LAWS["plain"]), bodies)
    told = tmp_path / "told.json"
    control = costs_at(told, measured, params, draft, 15, 4)
    taken = costs_at(path, engine, params, draft, 15, 4, told)
    np.testing.assert_array_equal(taken.seconds, control.seconds)
    assert path.read_text() == told.read_text()
    # What a run began with stays.
    save_costs(told, initial_control(np.array([1.0, 2.0])), bodies, "something else")
    np.testing.assert_array_equal(costs_at(path, engine, params, draft, 15, 4, told).seconds, control.seconds)
    with pytest.raises(InputError, match="is of another policy, drafter, law or numerics"):
        given_costs(told, engine, 15)
