"""Bugs planted in the rollout engine: each must be seen by the comparison that guards against it.

The comparison is always that of `test_rollout.py`: the same tokens and log-probs with speculation as without.
Bugs planted in the verification rules are in `test_verification.py` (`test_caught_...`).
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_grpo import first_state, make_program, scanned
from tiny import INVARIANT, POLICY, BigramDrafter, bigram_table, keys_of, run, take_prompts, tiny_params, tiny_prompts

from specrl_jax.models import policy as policy_module
from specrl_jax.models.cache import NO_PAGE, read_slots
from specrl_jax.rollout import round as round_module
from specrl_jax.rollout import rules
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Match
from specrl_jax.rollout.sampling import SamplingLaw

pytestmark = pytest.mark.ci
SAMPLES, NEW, ENDS = 3, 20, (1, 7)
PROMPTS = tiny_prompts()
LAW = SamplingLaw(repetition_penalty=2.0, end_ids=ENDS)
CHAIN, TREE = Match(), Match(branches=2)


def engine_of(k, rule=CHAIN, numerics=INVARIANT):
    drafter = BigramDrafter() if k else None
    return RolloutEngine(POLICY, RolloutConfig(NEW, SAMPLES, k, LAW, rule, ladder=(1.0,)), numerics, drafter)


def rollout(k, rule=CHAIN, prompts=PROMPTS, keys=None, seed=0, numerics=INVARIANT):
    """Traced anew, so that it sees what is planted."""
    engine = engine_of(k, rule, numerics)
    keys = keys_of(prompts, SAMPLES) if keys is None else keys
    return run(engine, prompts, keys, tiny_params(seed=seed), bigram_table(), jax.jit(lambda *a: engine.rollout(*a)))


@functools.lru_cache
def plain():
    return rollout(0)


def same(ours, expected):
    return all(
        np.array_equal(getattr(ours, field), getattr(expected, field)) for field in ("lengths", "tokens", "log_probs")
    )


@pytest.mark.parametrize("rule", [CHAIN, TREE])
def test_nothing_is_seen_where_nothing_is_planted(rule):
    assert same(rollout(3, rule), plain())


def test_caught_one_sample_matched_and_another_emitted(monkeypatch):
    expected, original = plain(), rules.match

    def redrawn(tree, drafts, draws):
        """After a mismatch the policy draws once more."""
        out = original(tree, drafts, draws)
        again = jnp.roll(draws, 1, axis=0)
        last = jnp.arange(draws.shape[1])[None] == out.accepted[:, None]
        return replace(out, tokens=jnp.where(last, again, out.tokens))

    monkeypatch.setattr(rules, "match", redrawn)
    assert not same(rollout(3), expected)


@pytest.mark.parametrize("rule", [CHAIN, TREE])
def test_caught_rejected_keys_readable_in_the_cache(monkeypatch, rule):
    write_keys, write_values = policy_module.write_keys, policy_module.write_values
    # One page per row, and prompts of at least two tokens: every row starts with a page of zeros behind its prompt.
    settings = {"prompts": take_prompts(PROMPTS, [0, 2, 3, 4]), "numerics": replace(INVARIANT, key_block=32)}
    expected = rollout(0, **settings)

    def unless_held(held, pages):
        """A slot that holds something keeps it."""
        return jnp.where(jnp.all(held == 0, axis=(1, 2)), pages, NO_PAGE)

    def first_keys(pool, new, pages, offsets):
        held, _ = read_slots(pool, pool.swapaxes(2, 3), pages, offsets)
        return write_keys(pool, new, unless_held(held, pages), offsets)

    def first_values(pool, new, pages, offsets):
        _, held = read_slots(pool.swapaxes(2, 3), pool, pages, offsets)
        return write_values(pool, new, unless_held(held, pages), offsets)

    monkeypatch.setattr(policy_module, "write_keys", first_keys)
    monkeypatch.setattr(policy_module, "write_values", first_values)
    assert same(rollout(0, **settings), expected)  # without rejected drafts there is nothing to read
    assert not same(rollout(3, rule, **settings), expected)


def test_caught_siblings_left_in_the_cache(monkeypatch):
    expected = plain()
    monkeypatch.setattr(round_module, "keep_path", lambda cache, first, path: cache)
    assert not same(rollout(3, TREE), expected)


def test_caught_the_bonus_token_one_row_off(monkeypatch):
    expected, original = plain(), rules.match

    def one_off(tree, drafts, draws):
        out = original(tree, drafts, draws)
        bonus = jnp.minimum(out.accepted + 1, drafts.shape[1])
        last = jnp.arange(draws.shape[1])[None] == out.accepted[:, None]
        off = jnp.take_along_axis(draws, bonus[:, None], axis=1)
        return replace(out, tokens=jnp.where(last, off, out.tokens))

    monkeypatch.setattr(rules, "match", one_off)
    assert not same(rollout(3), expected)


def test_caught_noise_keyed_by_batch_row(monkeypatch):
    """Speculation on and off agree about it; a batch in another order does not."""
    order = [3, 0, 4, 2, 1]
    rows = np.concatenate([np.arange(SAMPLES) + SAMPLES * group for group in order])
    shuffled = take_prompts(PROMPTS, order)

    def reordered(ours):
        return jax.tree.map(lambda x: x[np.argsort(rows)], replace(ours, prompts=None, stats=None, entropy_sum=None))

    assert same(reordered(rollout(3, prompts=shuffled)), plain())
    original = RolloutEngine._start_one

    def by_row(self, keys, batch):
        own = jnp.stack([jnp.arange(len(keys), dtype=jnp.uint32)] * 2, axis=1)
        return original(self, own, batch)

    monkeypatch.setattr(RolloutEngine, "_start_one", by_row)
    assert not same(reordered(rollout(3, prompts=shuffled)), rollout(3))


def test_caught_penalties_blind_to_the_drafts_before_them(monkeypatch):
    expected = plain()
    monkeypatch.setattr(round_module, "with_drafts", lambda seen, drafts: seen)
    assert not same(rollout(3), expected)


def test_caught_verification_with_the_last_steps_weights():
    """The rollout of the second step: under the weights of the first, the first update would not be on-policy."""
    program = make_program(3, updates=1)
    first = first_state(program)
    second, _ = scanned(program, 1)(first)
    served = program.gather(second)
    prompts, problems = program.issue(served)
    ratios = []
    for params in (second.params, first.params):
        trajectory = program.rollout(served.replace(params=params), prompts)
        rewards = program.reward(served, problems, trajectory)
        prepared, state = program.prepare(second, trajectory), jax.tree.map(jnp.copy, second)
        _, metrics, _ = program.update(state, trajectory, prepared, rewards)
        ratios.append((float(metrics["ratio"]), float(metrics["token_mult_prob_error"])))
    assert ratios[0] == (1.0, 1.0)
    assert ratios[1][1] > 1.001
