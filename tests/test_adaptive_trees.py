"""Candidates beside the drafts of the controller: where a draft is in doubt, and never a change of what is emitted."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_block
import test_mtp
import test_small_policy
from jaxprs import exported_for
from test_adaptive import DRAFTING, KEYS, PROMPTS, adaptive, engine_of, over_mesh, plain
from tiny import INVARIANT, random_eagle3, tiny_params

from specrl_jax.drafters.suffix import SuffixDrafter
from specrl_jax.errors import InputError
from specrl_jax.models import attention as attention_module
from specrl_jax.models.attention import paged_attention
from specrl_jax.models.cache import own_pages
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.tree import Tree
from specrl_jax.rollout import adaptive as adaptive_module
from specrl_jax.rollout import round as round_module
from specrl_jax.rollout.adaptive import Dealt, beside
from specrl_jax.rollout.config import MOST_BESIDE, RolloutConfig
from specrl_jax.rollout.control import (
    BINS,
    Beside,
    Body,
    allocate,
    chances,
    default_bodies,
    forget,
    initial_control,
    learn,
)
from specrl_jax.rollout.rules import Match
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.verification import match
from specrl_jax.training import costs as costs_module

pytestmark = pytest.mark.ci
PLAIN = Numerics(key_block=8)


def trees(branches=2, numerics=PLAIN, **settings):
    return engine_of(numerics=numerics, rule=Match(branches=branches), **({"bodies": DRAFTING} | settings))


def costs_of(engine):
    """Rounds of more tokens are a little dearer."""
    return initial_control(np.linspace(1.0, 1.5, len(engine.config.bodies)))


def learned(control):
    """Candidates that were looked at beside a refused draft, and accepted ones."""
    return control.beside.sum(axis=1) - np.array([4.0 * BINS, BINS])


@pytest.mark.parametrize(
    ("branches", "settings"),
    [
        (2, {}),
        (3, {}),
        (2, {"law": SamplingLaw(repetition_penalty=2.0, end_ids=(1, 7))}),
        (2, {"rows": 1, "bodies": (Body(1, 1), Body(1, 3), Body(1, 9))}),
        (2, {"rows": 4, "bodies": (Body(4, 4), Body(4, 20), Body(1, 7))}),
        # One of two rows is left, and all tokens of the body are its own.
        (2, {"rows": 2, "bodies": (Body(2, 2), Body(2, 6))}),
        # Pages that the kernel for CPUs takes.
        (2, {"numerics": Numerics(key_block=16), "bodies": (Body(15, 15), Body(15, 75))}),
        # Little cache: rows sit rounds out.
        (2, {"rows": 6, "bodies": (Body(6, 30), Body(1, 7)), "cache_bytes": 60_000}),
    ],
)
def test_the_tokens_are_those_without_drafts(branches, settings):
    engine = trees(branches, **settings)
    ours = adaptive(engine, costs_of(engine))
    plainly = {name: settings[name] for name in ("law", "numerics") if name in settings}
    expected = plain(**{"numerics": PLAIN} | plainly)
    np.testing.assert_array_equal(ours.tokens, expected.tokens)
    np.testing.assert_allclose(ours.log_probs, expected.log_probs, atol=2e-5)
    tried, accepted = learned(ours.control)
    assert 0 < accepted < tried
    assert bool(ours.stats.stalled) == ("cache_bytes" in settings)
    assert ours.stats.accepted_at.sum() == ours.stats.accepted
    assert np.all(ours.stats.accepted_at <= ours.stats.drafted_at)


@pytest.mark.parametrize("kind", ["suffix", "small policy", "block", "mtp"])
def test_other_drafters(kind):
    drafter, draft = {
        "suffix": lambda: (SuffixDrafter(shortest=1), None),
        "small policy": lambda: (test_small_policy.DRAFTER, tiny_params(test_small_policy.SMALL)),
        "block": test_block.random_block,
        "mtp": lambda: test_mtp.any_head()[:2],
    }[kind]()
    engine = trees(bodies=(Body(15, 105),))
    engine = replace(engine, drafter=drafter, config=replace(engine.config, draft_length=3))
    program = jax.jit(lambda *a: engine.rollout(*a, PROMPTS, KEYS, control=initial_control(np.ones(1))))
    ours = jax.device_get(program(tiny_params(), draft))
    np.testing.assert_array_equal(ours.tokens, plain(numerics=PLAIN).tokens)
    assert learned(ours.control)[0] > 0


def test_candidates_beside_drafts_save_rounds():
    """The same number of tokens a round, of which some stand beside others."""
    chains = engine_of(numerics=PLAIN, bodies=(Body(15, 75),))
    combs = trees(bodies=(Body(15, 135),))
    control = initial_control(np.ones(1))
    assert adaptive(combs, control).stats.rounds < 0.95 * adaptive(chains, control).stats.rounds


def test_all_rows_alike_get_chains():
    ours = adaptive(trees(per_row=False), costs_of(trees()))
    np.testing.assert_array_equal(ours.tokens, plain(numerics=PLAIN).tokens)
    assert not learned(ours.control).any()


PLANTED = {
    "the path stays where it was": (round_module, "keep_path", lambda cache, first, path: cache),
    "a candidate reads the draft that it stands beside": (
        attention_module,
        "_beside",
        lambda positions, slots, own: slots[None, None] <= own[:, :, None],
    ),
    "one candidate is gone on with for another": (
        adaptive_module,
        "beside",
        lambda chain, dealt, own: beside(chain, replace(dealt, token=dealt.token[..., jnp.array([0, 2, 1])]), own),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_shows_in_the_tokens(name, monkeypatch):
    module, attribute, wrong = PLANTED[name]
    monkeypatch.setattr(attention_module, "_kernel_fits", lambda *_: False)
    monkeypatch.setattr(module, attribute, wrong)
    engine = trees(3)
    assert not np.array_equal(adaptive(engine, costs_of(engine)).tokens, plain(numerics=PLAIN).tokens)


def test_what_has_no_bits_of_its_own_is_refused():
    with pytest.raises(InputError, match="numerics is invariant and branches 2 with an adaptive draft length"):
        engine_of(numerics=INVARIANT, rule=Match(branches=2))
    with pytest.raises(InputError, match="an adaptive draft length needs chains or combs"):
        engine_of(rule=Match(branches=2, shape="full"))
    with pytest.raises(InputError, match="draft length of 4 with 9 branches has 36 drafts; choose at most 32"):
        trees(9)
    q, positions = jnp.zeros((1, 1, 2, 4)), jnp.zeros((1, 1), jnp.int32)
    pages = jnp.zeros((1, 1, 4, 4)), jnp.zeros((1, 1, 4, 4)), own_pages(1, 1)
    with pytest.raises(ValueError, match="belong to plain numerics"):
        paged_attention(q, *pages, positions, INVARIANT, own_slots=positions)


@pytest.mark.parametrize("block", [4, 16], ids=["by the compiler", "in the kernel"])
def test_attention_of_candidates_beside_drafts(block):
    """Against float64, with a row of padding; slots of rows, not of the pool."""
    rng = np.random.default_rng(0)
    rows, queries, heads, groups, width, pages = 3, 7, 4, 2, 16, 48 // block
    keys, values = (rng.normal(size=(rows, pages * block, groups, width)).astype(np.float32) for _ in range(2))
    q = rng.normal(size=(rows, queries, heads, width)).astype(np.float32)
    # The newest token, two drafts, one beside each of them, one as far off as a word has bits, and padding.
    length = np.array([[0], [15], [-1]])
    offsets, slots = np.array([0, 1, 2, 1, 2, 1, -1]), np.array([0, 1, 2, 3, 4, 32, -1])
    there = (length >= 0) & (offsets >= 0)
    positions, own = np.where(there, length + offsets, -1), np.where(there, length + slots, -1)
    slots_last = attention_module.slots_last()
    paged = [x.reshape(rows * pages, block, groups, width) for x in (keys, values)]
    pools = paged[0].transpose(0, 2, 3, 1) if slots_last else paged[0].swapaxes(1, 2), paged[1].swapaxes(1, 2)
    out = paged_attention(
        jnp.asarray(q),
        *(jnp.asarray(x) for x in pools),
        own_pages(rows, pages),
        jnp.asarray(positions, jnp.int32),
        Numerics(key_block=block),
        own_slots=jnp.asarray(own, jnp.int32),
    )
    for r, i in zip(*np.nonzero(there), strict=True):
        reads = [*range(positions[r, i]), own[r, i]]
        for head in range(heads):
            k, v = (x[r, reads, head // 2].astype(np.float64) for x in (keys, values))
            scores = np.exp(k @ q[r, i, head] / np.sqrt(width))
            np.testing.assert_allclose(out[r, i, head], scores @ v / scores.sum(), atol=1e-5)


def dealt_of(rng, rows, depth, candidates):
    """Random drafts of few tokens, some of which are verified, each with the drafts before it."""
    token = rng.permuted(np.tile(np.arange(4), (rows, depth, 1)), axis=2)[..., :candidates]
    lengths = rng.integers(0, depth + 1, rows)
    steps = np.arange(depth)[None]
    taken = rng.random((rows, depth, candidates)) < 0.7
    taken[..., 0] = steps < lengths[:, None]
    taken &= (steps <= lengths[:, None])[..., None]
    return Dealt(jnp.asarray(token, jnp.int32), jnp.zeros((rows, depth)), jnp.asarray(taken))


@pytest.mark.parametrize("candidates", [2, 3])
def test_the_decision_is_that_of_match_on_the_whole_tree(candidates):
    rng = np.random.default_rng(1)
    rows, depth = 400, 3
    dealt, tree = dealt_of(rng, rows, depth, candidates), Tree.comb(depth, candidates)
    drafts = jnp.where(dealt.taken, dealt.token, -1)
    draws = rng.integers(0, 4, (rows, tree.size))  # below every node of the tree
    flat = np.asarray(drafts).reshape(rows, -1)
    # Candidates of a depth are the nodes side by side in the tree; `queries` says where each lies in a round.
    own = np.full((rows, 1 + depth * candidates), -7)
    own[:, 0] = draws[:, 0]
    queries, taken = np.asarray(dealt.queries).reshape(rows, -1), np.asarray(dealt.taken).reshape(rows, -1)
    for r, n in zip(*np.nonzero(taken), strict=True):
        own[r, queries[r, n]] = draws[r, 1 + n]
    own = jnp.asarray(own, jnp.int32)
    chain = match(Tree.chain(depth), drafts[..., 0], own[:, : 1 + depth])
    ours, found = beside(chain, dealt, own)
    theirs = match(tree, jnp.asarray(flat), jnp.asarray(draws, jnp.int32))
    np.testing.assert_array_equal(ours.accepted, theirs.accepted)
    assert set(np.asarray(ours.accepted).tolist()) == set(range(depth + 1))
    kept = np.arange(depth + 1)[None] <= np.asarray(ours.accepted)[:, None]
    np.testing.assert_array_equal(np.where(kept, ours.tokens, 0), np.where(kept, theirs.tokens, 0))
    tried, accepted = np.asarray(found.tried), np.asarray(found.accepted)
    np.testing.assert_array_equal(ours.accepted - chain.accepted, accepted)
    for r, end in enumerate(np.asarray(chain.accepted)):
        others = np.asarray(dealt.taken)[r, end, 1:] if end < np.asarray(dealt.lengths)[r] else np.zeros(1, bool)
        drawn = np.asarray(dealt.token)[r, min(end, depth - 1), 1:] == int(own[r, end])
        expected = others[: 1 + drawn.argmax()].sum() if accepted[r] else others.sum()
        assert tried[r] == expected
    assert np.any(accepted & (tried > 0))
    assert np.any(accepted & (tried == 0))  # beside a draft that was not verified itself


def test_chances_are_those_of_one_path():
    control = initial_control(np.ones(1))
    found = np.asarray(chances(control, jnp.array([0.5, 0.5]), jnp.array([1.0, 0.5]), 3))
    first = float((control.accepted / control.drafted)[BINS // 2])
    expected = [first, (1 - first) / 4, (1 - first) * 3 / 16]
    np.testing.assert_allclose(found, [expected, [0.5 * x for x in expected]], rtol=1e-6)


def test_no_candidate_is_dealt_without_the_drafts_before_it():
    rng = np.random.default_rng(2)
    for _ in range(20):
        first, rest = rng.random((5, 4)), rng.random((5, 4))
        above = np.concatenate([np.ones((5, 1)), np.cumprod(first, axis=1)[:, :-1]], axis=1)
        worth = rng.random((5, 1, 1)) * np.stack([above * first, above * (1 - first) * rest], axis=2)
        taken = np.asarray(allocate(jnp.asarray(worth, jnp.float32), jnp.int32(rng.integers(1, 30))))
        depth = np.arange(4)[None, :, None]
        assert np.all(~taken | (depth <= taken[..., 0].sum(axis=1)[:, None, None]))
    sure = jnp.ones((1, 3, 2))  # equals: the shallower first, the draft before what stands beside it
    assert np.asarray(allocate(sure, jnp.int32(3))).tolist() == [[[True, True], [True, False], [False, False]]]


def test_what_is_learned_of_candidates():
    control, record = initial_control(np.ones(1)), jnp.zeros((3, 4))
    confidence = jnp.full((3, 2), 0.3).at[:, 0].set(0.9)
    lengths, accepted, counted = jnp.array([2, 2, 2]), jnp.array([1, 0, 1]), jnp.array([True, True, False])
    seen = Beside(jnp.array([1, 1, 1]), jnp.array([True, False, True]))
    after, records = learn(control, record, confidence, lengths, accepted, counted, seen)
    changed = np.asarray(after.beside - control.beside)
    assert changed[:, int(0.3 * BINS)].tolist() == [1.0, 1.0]
    assert changed[:, int(0.9 * BINS)].tolist() == [1.0, 0.0]
    assert changed.sum() == 3.0
    assert records[:, 2].tolist() == [3.0, 1.0, 0.0]
    np.testing.assert_allclose(forget(after).beside - control.beside, 0.99 * changed, rtol=1e-5)


def test_a_cost_table_is_of_as_many_candidates():
    one, two = trees(1), trees(2)
    assert costs_module._described(one) == costs_module._described(engine_of(numerics=PLAIN))
    assert costs_module._described(one) != costs_module._described(two)


def test_a_single_row_has_a_round_for_candidates():
    assert default_bodies(1, 7, 2)[-1] == Body(1, 11)
    assert default_bodies(1, 7)[-1] == Body(1, 8)
    for rows, longest, branches in itertools.product(range(1, 70), (1, 2, 3, 7, 10, 16), (2, 3)):
        if longest * branches > MOST_BESIDE:
            continue
        config = RolloutConfig(8, 1, longest, SamplingLaw(end_ids=(1,)), Match(branches=branches), adaptive=True)
        assert len(config.bodies_for(rows)) <= 12


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_loop_lowers_for_every_platform(platform):
    engine = trees()
    arguments = tiny_params(), random_eagle3()[1], PROMPTS, KEYS, costs_of(engine)
    exported = exported_for(platform, over_mesh(engine, 1), *arguments)
    assert "callback" not in exported.mlir_module()
    assert "stablehlo.while" in exported.mlir_module()
