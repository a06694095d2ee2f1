"""Trees of drafts: each path has the logits of its chain, and the emitted tokens are those of k = 0."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    INVARIANT,
    PLAIN,
    POLICY,
    VOCAB,
    BigramDrafter,
    bigram_table,
    keys_of,
    random_eagle3,
    run,
    tiny_params,
    tiny_prompts,
)

from specrl_jax.drafters.replay import Replay, ReplayDrafter
from specrl_jax.errors import InputError
from specrl_jax.models.backend import made_for
from specrl_jax.models.cache import keep_path, read_slots
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.policy import forward, grid_batch, logits, policy_cache, sequence_positions
from specrl_jax.models.tree import Tree
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Match
from specrl_jax.rollout.sampling import SamplingLaw

pytestmark = pytest.mark.ci
SAMPLES, NEW, ENDS = 3, 28, (1, 7)
PROMPTS = tiny_prompts()
BF16 = replace(POLICY, dtype="bfloat16")
LAWS = {
    "plain": SamplingLaw(end_ids=ENDS),
    "all": SamplingLaw(0.9, top_k=6, top_p=0.9, repetition_penalty=1.7, min_new_tokens=2, end_ids=ENDS),
    "greedy": SamplingLaw(0.0, repetition_penalty=1.2, end_ids=ENDS),
}
SHAPES = {"comb": (3, Match(branches=2)), "wide comb": (2, Match(branches=3)), "full": (2, Match(2, "full"))}


def engine_of(law, k, rule, drafter, policy=POLICY, numerics=INVARIANT):
    return RolloutEngine(policy, RolloutConfig(NEW, SAMPLES, k, law, rule, ladder=(1.0,)), numerics, drafter)


@functools.lru_cache
def rollout(name, kind="bigram", k=0, rule=None, bf16=False):
    rule = rule or Match()
    policy, numerics = (BF16, Numerics("invariant")) if bf16 else (POLICY, INVARIANT)
    drafter, draft = random_eagle3(policy) if kind == "eagle" else (BigramDrafter(), bigram_table())
    engine = engine_of(LAWS[name], k, rule, drafter if k else None, policy, numerics)
    return run(engine, PROMPTS, keys_of(PROMPTS, SAMPLES), tiny_params(policy), draft)


@pytest.mark.parametrize(
    ("name", "kind", "shape", "bf16"),
    [
        ("plain", "bigram", "comb", False),
        ("plain", "eagle", "full", False),
        ("plain", "eagle", "wide comb", True),
        ("all", "bigram", "full", False),
        ("all", "eagle", "wide comb", False),
        ("greedy", "bigram", "full", False),
    ],
)
def test_trees_emit_the_tokens_of_the_plain_run(name, kind, shape, bf16):
    k, rule = SHAPES[shape]
    plain, ours = rollout(name, bf16=bf16), rollout(name, kind, k, rule, bf16)
    for field in ("tokens", "lengths", "ended", "log_probs", "thresholds"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(plain, field), err_msg=field)
    assert ours.stats.accepted + ours.stats.cut_accepted > 0


def test_more_candidates_are_accepted_more_often():
    counts = [rollout("plain", "bigram", 2, Match(branches=b)).stats.accepted_at for b in (1, 2, 3)]
    rounds = [rollout("plain", "bigram", 2, Match(branches=b)).stats.rounds for b in (1, 2, 3)]
    first = [count[0] / total for count, total in zip(counts, rounds, strict=True)]
    assert first[0] < first[1] < first[2]
    full = rollout("plain", "bigram", 2, Match(2, "full"))
    assert full.stats.accepted_at[1] / full.stats.rounds > counts[1][1] / rounds[1]


def test_a_drafter_that_replays_the_plain_run_is_always_accepted():
    plain, k = rollout("plain"), 3
    replay = Replay(jnp.asarray(plain.tokens))
    engine = engine_of(LAWS["plain"], k, Match(), ReplayDrafter(VOCAB))
    ours = run(engine, PROMPTS, keys_of(PROMPTS, SAMPLES), tiny_params(), replay)
    np.testing.assert_array_equal(ours.tokens, plain.tokens)
    assert ours.stats.accepted == k * ours.stats.rounds
    assert ours.stats.steps == sum(-(-n // (k + 1)) for n in plain.lengths)


@pytest.fixture(params=["cpu", "tpu"])
def layout(request):
    """Keys as a CPU keeps them and as others do, whose programs run here all the same."""
    with made_for(request.param):
        yield


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("numerics", [PLAIN, INVARIANT])
@pytest.mark.parametrize("tree", [Tree.full(2, 2), Tree.comb(3, 3), Tree((0, 0, 0, 2, 2, 4))])
def test_every_path_has_the_logits_of_the_sequence_that_it_is(numerics, tree):
    params, rng = tiny_params(), np.random.default_rng(0)
    lengths = np.array([5, 3, 8], np.int32)
    prefix = jnp.asarray(rng.integers(0, VOCAB, (3, 8)), jnp.int32)
    nodes = rng.integers(0, VOCAB, (3, tree.size)).astype(np.int32)

    @functools.partial(jax.jit, static_argnums=2)
    def cached(params, tokens, tree):
        cache = policy_cache(POLICY, 3, 32, numerics)
        out = forward(
            params,
            POLICY,
            grid_batch(prefix, sequence_positions(jnp.asarray(lengths), 8)),
            numerics=numerics,
            cache=cache,
        )
        cache = out.cache.replace(length=jnp.asarray(lengths))
        positions = jnp.asarray(lengths)[:, None] + jnp.asarray(tree.depths, jnp.int32)[None]
        out = forward(params, POLICY, grid_batch(tokens, positions, tree), numerics=numerics, cache=cache)
        return logits(params, POLICY, out.hidden, numerics).reshape(3, tree.size, VOCAB), out.cache

    ours, cache = cached(params, jnp.asarray(nodes), tree)
    for path in tree.leaf_paths:
        chain, chain_cache = cached(params, jnp.asarray(nodes[:, list(path)]), Tree.chain(len(path) - 1))
        if numerics.invariant:
            np.testing.assert_array_equal(np.asarray(ours)[:, list(path)], chain)
        else:
            np.testing.assert_allclose(np.asarray(ours)[:, list(path)], chain, atol=2e-5)
        # The accepted path, moved together, is the cache that the chain left.
        whole = jnp.broadcast_to(jnp.asarray(path, jnp.int32)[None], (3, len(path)))
        moved = keep_path(cache, jnp.asarray(lengths), whole)
        pools = zip(moved.keys, moved.values, chain_cache.keys, chain_cache.values, strict=True)
        for keys, values, chain_keys, chain_values in pools:
            for row, length in enumerate(lengths):
                slots = jnp.arange(length + len(path), dtype=jnp.int32)
                where = (cache.table[row, slots // cache.page_size], slots % cache.page_size)
                kept, chained = read_slots(keys, values, *where), read_slots(chain_keys, chain_values, *where)
                np.testing.assert_allclose(kept, chained, atol=2e-5)


def test_trees_out_of_range_are_refused():
    with pytest.raises(InputError, match="branches is 0; it must be at least 1"):
        Match(branches=0)
    with pytest.raises(InputError, match="tree of 3 branches and depth 7 has 3279 drafts; choose at most 64"):
        engine_of(LAWS["plain"], 7, Match(3, "full"), BigramDrafter())
