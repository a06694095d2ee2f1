"""The rollout as a program: its law, plain numerics, `shard_map`, what its loops contain, export."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxprs import exported_for
from scipy import stats
from tiny import (
    INVARIANT,
    PLAIN,
    POLICY,
    VOCAB,
    BigramDrafter,
    assert_same,
    bigram_table,
    keys_of,
    random_eagle3,
    run,
    take_prompts,
    tiny_params,
    tiny_prompts,
)

from specrl_jax.data.prompts import Prompts
from specrl_jax.models.policy import forward, grid_batch, logits, sequence_positions
from specrl_jax.parallel.mesh import DATA, MeshConfig, make_mesh
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Block, Match
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.trajectory import Trajectory

pytestmark = pytest.mark.ci
PLAUSIBLE = 1e-4
PROMPT, ENDS = [4, 17, 9], (1, 7)
LAW = SamplingLaw(0.8, end_ids=ENDS)


def engine_of(numerics, draft_length, drafter=None, *, samples=3, new=28, law=LAW, ladder=(1.0,)):
    return RolloutEngine(POLICY, RolloutConfig(new, samples, draft_length, law, ladder=ladder), numerics, drafter)


# The law.


@functools.lru_cache
def many_samples(update=0):
    """Three tokens of 2,048 groups of two samples of one prompt, drawn with speculation."""
    groups = 2048
    prompts = Prompts(
        tokens=jnp.broadcast_to(jnp.array(PROMPT, jnp.int32), (groups, 3)),
        lengths=jnp.full((groups,), 3, jnp.int32),
        row_ids=jnp.arange(groups, dtype=jnp.uint32),
    )
    engine = engine_of(PLAIN, 2, BigramDrafter(), samples=2, new=3)
    return run(engine, prompts, keys_of(prompts, 2, update=update), tiny_params(), bigram_table())


@functools.lru_cache
def exact_law():
    """The tempered law of the first token `[v]`, and of the second after each first one `[v, v]`, float64.

    Logits come from the teacher-forced forward. After an end token there is padding, token 0.
    """
    tokens = jnp.array([[*PROMPT, token] for token in range(VOCAB)], jnp.int32)

    @jax.jit
    def teacher_forced(params):
        batch = grid_batch(tokens, sequence_positions(jnp.full((VOCAB,), 4, jnp.int32), 4))
        out = forward(params, POLICY, batch, numerics=PLAIN)
        return logits(params, POLICY, out.hidden, PLAIN).reshape(VOCAB, 4, VOCAB)

    weights = np.exp(np.asarray(teacher_forced(tiny_params()), np.float64) / LAW.temperature)
    laws = weights / weights.sum(axis=-1, keepdims=True)
    first, second = laws[0, 2], laws[:, 3]
    second[list(ENDS)] = np.eye(VOCAB)[0]
    return first, second


def goodness_of_fit(cells, p):
    """p-value of the chi-square test that cells have law `p`; rare cells are put together."""
    counts, expected = np.bincount(cells, minlength=len(p)), p * len(cells)
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


def test_speculative_samples_have_the_law_of_the_policy():
    samples, (law, law_given_first) = many_samples(), exact_law()
    first, second = samples.tokens[:, 0], samples.tokens[:, 1]
    assert samples.stats.accepted + samples.stats.cut_accepted > 500
    assert goodness_of_fit(first, law) > PLAUSIBLE
    assert goodness_of_fit(VOCAB * first + second, (law[:, None] * law_given_first).reshape(-1)) > PLAUSIBLE
    # The test tells this law from the one that forgets the first token.
    assert goodness_of_fit(second, law) < 1e-12


def independence(x, y):
    """p-value of the chi-square test of independence, over the tokens that are frequent in both."""
    table = np.zeros((VOCAB, VOCAB))
    np.add.at(table, (x, y), 1)
    often = (table.sum(axis=0) > 100) & (table.sum(axis=1) > 100)
    assert often.sum() >= 4
    return stats.chi2_contingency(table[often][:, often]).pvalue


def test_members_of_a_group_and_steps_are_independent():
    tokens = many_samples().tokens.reshape(-1, 2, 3)
    later = many_samples(update=1).tokens.reshape(-1, 2, 3)
    for other in (tokens[:, 1], later[:, 0], np.roll(tokens[:, 0], 1, axis=0)):
        assert independence(tokens[:, 0, 0], other[:, 0]) > PLAUSIBLE
    assert independence(tokens[:, 0, 0], tokens[:, 0, 0]) < 1e-12
    assert not (tokens == later).all(axis=2).all()


# Plain numerics.


def test_plain_numerics_differ_by_rounding_ties_at_most():
    """About one token per million flips in float32; here are a few thousand."""
    prompts = tiny_prompts(groups=40)
    keys, params = keys_of(prompts, 4), tiny_params()
    plain = run(engine_of(PLAIN, 0, samples=4), prompts, keys, params)
    engine = engine_of(PLAIN, 3, BigramDrafter(), samples=4, ladder=(1.0, 0.3))
    ours = run(engine, prompts, keys, params, bigram_table())
    same = (ours.tokens == plain.tokens).all(axis=1)
    assert plain.lengths.sum() > 2000
    assert (~same).sum() <= 1
    np.testing.assert_allclose(ours.log_probs[same], plain.log_probs[same], rtol=0, atol=1e-4)


# Over a mesh.


def over_mesh(engine, devices):
    """The rollout under `shard_map` over the data axis, its counts summed over the mesh after the loops."""

    def rollout(params, draft, prompts, keys):
        trajectory = engine.rollout(params, draft, prompts, keys)
        return trajectory.replace(stats=jax.lax.psum(trajectory.stats, DATA), entropy_sum=jnp.float32(0.0))

    rows = P(DATA)
    names = ("prompts", "tokens", "log_probs", "thresholds", "lengths", "ended")
    out = Trajectory(**dict.fromkeys(names, rows), entropy_sum=P(), stats=P())
    mesh = make_mesh(MeshConfig(data=devices))
    specs = (P(), P(), rows, rows)
    return jax.jit(jax.shard_map(rollout, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))


COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast|send|recv"
    r"|infeed|outfeed)(-start)?\("
)
CALLED = re.compile(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")


def instructions_in_loops(hlo):
    """Text of every computation that a while loop of a compiled module reaches."""
    heads = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
    computations = dict(heads.findall(hlo))

    def called(text):
        branches = re.findall(r"branch_computations=\{(.*?)\}", text)
        return CALLED.findall(text) + [name.strip().lstrip("%") for b in branches for name in b.split(",")]

    loops = re.findall(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)", hlo)
    waiting, seen = [name for pair in loops for name in pair], set()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += called(computations[name])
    return len(loops), "\n".join(computations[name] for name in sorted(seen))


def test_four_devices_give_the_tokens_of_one_without_talking_in_the_loops():
    prompts = take_prompts(tiny_prompts(), [0, 1, 2, 3])
    drafter, draft = random_eagle3()
    keys, params = keys_of(prompts, 3), tiny_params()
    engine = engine_of(INVARIANT, 1, drafter, law=SamplingLaw(end_ids=ENDS), ladder=(1.0, 0.34))
    compiled = over_mesh(engine, 4).lower(params, draft, prompts, keys).compile()
    ours = run(engine, prompts, keys, params, draft, program=compiled)
    alone = run(engine_of(INVARIANT, 0, law=SamplingLaw(end_ids=ENDS)), prompts, keys, params)
    assert_same(ours, alone)
    counts = ours.stats
    assert counts.rounds + counts.cut_rounds == counts.steps > 0
    assert counts.accepted + counts.rounds + counts.cut_accepted == ours.lengths.sum()

    hlo = compiled.as_text()
    loops, inside = instructions_in_loops(hlo)
    # Two rungs, and the blocks of the invariant forward inside each.
    assert loops > 10
    assert COLLECTIVE.search(hlo), "the sum of the counts after the loops"
    assert not COLLECTIVE.search(inside)
    assert "callback" not in hlo


def test_a_sum_or_a_host_call_in_a_loop_would_be_seen():
    def talking(x):
        return jax.lax.while_loop(lambda x: x[0] < 100.0, lambda x: jax.lax.psum(x, DATA) + 1.0, x)

    def calling(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.lax.while_loop(lambda x: x[0] < 100.0, lambda x: jax.pure_callback(lambda x: x + 1, shape, x), x)

    mesh = make_mesh(MeshConfig(data=2))
    for fn, sign in ((talking, COLLECTIVE), (calling, re.compile("callback"))):
        sharded = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(DATA), out_specs=P(DATA), check_vma=False))
        loops, inside = instructions_in_loops(sharded.lower(jnp.ones((2,))).compile().as_text())
        assert loops == 1
        assert sign.search(inside)


@pytest.mark.parametrize(
    ("numerics", "rule"),
    [(PLAIN, Match()), (INVARIANT, Match()), (PLAIN, Match(branches=2)), (PLAIN, Block())],
    ids=["plain", "invariant", "tree", "block"],
)
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_loop_lowers_for_every_platform(numerics, rule, platform):
    drafter, draft = random_eagle3()
    prompts = tiny_prompts()
    engine = engine_of(numerics, 3, drafter, ladder=(1.0, 0.5))
    engine = replace(engine, config=replace(engine.config, rule=rule))
    program = over_mesh(engine, 1)
    exported = exported_for(platform, program, tiny_params(), draft, prompts, keys_of(prompts, 3))
    assert exported.out_avals[1].shape
    assert "stablehlo.while" in exported.mlir_module()
    assert "callback" not in exported.mlir_module()
