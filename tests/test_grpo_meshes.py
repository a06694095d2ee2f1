"""The GRPO step on every kind of mesh: the tokens and the movement of the parameters of one device."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scripts import COMPILED
from test_grpo import EvenSum
from test_rollout_programs import COLLECTIVE, instructions_in_loops
from tiny import INVARIANT, PLAIN, tiny_params

from specrl_jax.drafters.block_params import BlockConfig
from specrl_jax.drafters.draft_losses import DraftLossConfig
from specrl_jax.drafters.eagle3_params import Eagle3Config, init_eagle3
from specrl_jax.drafters.heads import drafter_for_head, init_head
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.policy import head_weights
from specrl_jax.parallel.mesh import MeshConfig, make_mesh
from specrl_jax.parallel.sharding import ROWS, Layout, over_mesh, sum_over_rows
from specrl_jax.rl import grpo
from specrl_jax.rl.drafting import DraftTraining
from specrl_jax.rl.grpo import GrpoStep, UpdateConfig
from specrl_jax.rl.losses import LossConfig
from specrl_jax.rl.microbatches import MicrobatchConfig
from specrl_jax.rl.optimizers import OptimizerConfig
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.trajectory import Sequences
from specrl_jax.training.checkpoints import CheckpointWriter, restore_checkpoint
from specrl_jax.training.pieces import Clock, StepPieces

pytestmark = pytest.mark.ci

VOCAB = 24
POLICY = PolicyConfig("qwen3", VOCAB, 32, 64, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=8)
HEAD = Eagle3Config(32, 64, 8, 2, 8, VOCAB, VOCAB, (0, 1, 2), 32)
BACKBONE = dataclasses.replace(POLICY, num_layers=1, tie_embeddings=False)
BLOCK = BlockConfig(BACKBONE, VOCAB - 2, (0, 2), block_size=3, mask_token_id=3, markov_rank=3, confidence=True)
LAW = SamplingLaw(1.0, end_ids=(3,))
MESHES = {"8x1x1": (8, 1, 1), "4x2x1": (4, 2, 1), "2x2x2": (2, 2, 2), "1x1x8": (1, 1, 8)}
GROUPS, SAMPLES, STEPS = 8, 4, 3


@functools.lru_cache
def initial():
    params = tiny_params(POLICY)
    return params, init_eagle3(jax.random.key(1), HEAD, policy=params)


def make_program(mesh, *, optimizer=None, remat=False, head=HEAD):
    engine = RolloutEngine(POLICY, RolloutConfig(10, SAMPLES, 2, LAW), PLAIN, drafter_for_head(head))
    scorer = Scorer(POLICY, LAW, PLAIN, remat)
    loss = DraftLossConfig(2)
    drafting = DraftTraining(scorer, head, loss, OptimizerConfig(1e-3), MicrobatchConfig(2, (1.0,)))
    update = UpdateConfig(
        LossConfig(clip_high=0.28),
        optimizer or OptimizerConfig(1e-3),
        MicrobatchConfig(4, (1.0,)),
        draft_sequences=4,
    )
    step = GrpoStep(engine, scorer, update, drafting, seed=0)
    return GrpoProgram(step, make_mesh(MeshConfig(*mesh)), GROUPS, EvenSum(VOCAB))


def first_state(program, draft=None):
    params, own = initial()
    return program.place(program.step.init(params, draft or own))


def run(mesh, steps=STEPS):
    """Parameters of policy and head, metrics and trajectories of some steps."""
    program = make_program(mesh)
    state, (metrics, trajectories, _) = program.scanned(steps)(first_state(program))
    return jax.device_get((state.params, state.draft.weights, metrics, trajectories))


def run_block_head(mesh):
    """A block head, whose output rows are some of the policy's; policy, head and tokens after one step."""
    params, _ = initial()
    ids = np.random.default_rng(0).permutation(VOCAB)[: BLOCK.draft_vocab_size]
    program = make_program(mesh, head=BLOCK)
    before = init_head(jax.random.key(1), BLOCK, params, ids)
    state, (_, trajectories, _) = program.scanned(1)(first_state(program, before))
    return before, *jax.device_get((state.params, state.draft, trajectories.tokens))


@functools.lru_cache
def on_one_device():
    return run((1, 1, 1))


@functools.lru_cache
def first_gradient(mesh):
    """Of the first step, and the program that computes it."""
    program = make_program(mesh)
    state = first_state(program)
    served = program.gather(state)
    prompts, problems = program.issue(served)
    trajectory = program.rollout(served, prompts)
    rewards = program.reward(served, problems, trajectory)
    prepared = program.prepare(state, trajectory)
    begin, gradients = (jax.jit(part) for part in program.step.over_rows(program.mesh))
    whole, left, _, _ = begin(served.params, trajectory, prepared, rewards)
    return jax.device_get(gradients(served.params, whole, left, jnp.int32(0))[0])


def moved_apart(found, expected, before):
    """Distance of two movements from the same parameters, as a share of the second."""
    moved, should = flat(found) - flat(before), flat(expected) - flat(before)
    return np.linalg.norm(moved - should) / np.linalg.norm(should)


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("name", MESHES)
def test_three_steps_move_the_parameters_as_on_one_device(name):
    start, head = initial()
    params, draft, metrics, trajectories = run(MESHES[name])
    expected_params, expected_draft, expected_metrics, expected = on_one_device()
    np.testing.assert_array_equal(trajectories.tokens, expected.tokens)
    assert moved_apart(params, expected_params, start) <= 1e-3
    assert moved_apart(draft, expected_draft, head.weights) <= 1e-3
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-4, atol=1e-6)
    assert trajectories.stats.steps.tolist() == expected.stats.steps.tolist()


def test_the_output_rows_of_a_head_follow_a_policy_that_is_split():
    before, params, draft, tokens = run_block_head(MESHES["2x2x2"])
    _, _, expected, alone = run_block_head((1, 1, 1))
    np.testing.assert_array_equal(tokens, alone)
    np.testing.assert_array_equal(draft.lm_head, head_weights(jax.tree.map(jnp.asarray, params))[1][draft.target_ids])
    np.testing.assert_allclose(draft.lm_head, expected.lm_head, rtol=0, atol=2e-5)
    assert np.abs(draft.lm_head - before.lm_head).max() > 1e-4
    assert moved_apart(draft.weights, expected.weights, before.weights) <= 1e-3


def test_invariant_scores_on_heads_that_are_split():
    """A device's kernel attends with its own heads, in every layer of a training forward; to one device's gradient."""
    policy, rng = dataclasses.replace(POLICY, hidden_size=64, head_dim=16), np.random.default_rng(0)
    scorer, params = Scorer(policy, LAW, INVARIANT, remat=True), tiny_params(policy)
    tokens, lengths = rng.integers(0, VOCAB, (8, 20)), rng.integers(2, 21, 8)
    mask = np.arange(20)[None] < lengths[:, None]
    sequences = Sequences(*map(jnp.asarray, (np.int32(tokens), np.int32(lengths), mask, np.zeros((8, 20), np.float32))))

    def summed(params, sequences):
        def total(params):
            return jnp.sum(jnp.where(sequences.mask, scorer.score(params, sequences).log_probs, 0.0))

        return sum_over_rows(jax.value_and_grad(total)(params))

    found = []
    for sizes in ((1, 1, 1), MESHES["2x2x2"]):
        mesh = make_mesh(MeshConfig(*sizes))
        program = jax.jit(over_mesh(mesh, summed, (P(), P(ROWS)), P()))
        arguments = Layout(mesh, policy.num_kv_heads).place(params), sequences
        assert "specrl_jax_attention" in program.lower(*arguments).as_text()
        found.append(jax.device_get(program(*arguments)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(found[1][1]), jax.tree.leaves(found[0][1]), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-4 * np.linalg.norm(theirs)


@pytest.mark.parametrize("name", MESHES)
def test_every_leaf_of_the_gradient_is_that_of_one_device(name):
    found, expected = first_gradient(MESHES[name]), first_gradient((1, 1, 1))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


def test_caught_a_gradient_without_that_of_one_device(monkeypatch):
    """The first of eight devices keeps its gradient for itself."""
    whole = grpo.sum_over_rows

    def without_the_first(tree):
        present = (jax.lax.axis_index(ROWS) > 0).astype(jnp.float32)
        is_gradients = isinstance(tree, tuple) and len(tree) == 3
        return whole(jax.tree.map(lambda x: x * present, tree) if is_gradients else tree)

    start, _ = initial()
    first = run((1, 1, 1), steps=1)[0]
    monkeypatch.setattr(grpo, "sum_over_rows", without_the_first)
    assert moved_apart(run((8, 1, 1), steps=1)[0], first, start) > 1e-2


def test_no_device_waits_for_another_replica_in_the_token_loop():
    """Collectives in the loops of a rollout are those of heads and hidden units, among the devices of one replica."""
    program = make_program(MESHES["2x2x2"])
    served = program.gather(first_state(program))
    hlo = program.rollout.lower(served, program.issue(served)[0]).compile().as_text()
    loops, inside = instructions_in_loops(hlo)
    assert loops > 0
    replica = {device.id: where[:2] for where, device in np.ndenumerate(program.mesh.devices)}
    found = groups_of(inside)
    assert found
    assert all(len({replica[device] for device in group}) == 1 for group in found)
    assert any(len({replica[device] for device in group}) > 1 for group in groups_of(hlo)), "counts, after the loops"


def groups_of(hlo):
    """Devices of every group of every collective."""
    groups = []
    for line in hlo.splitlines():
        if not COLLECTIVE.search(line):
            continue
        listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
        iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
        assert listed or iota, line
        if listed:
            groups += [[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
        else:
            ids = np.arange(np.prod([int(i) for i in iota[3].split(",")])).reshape([int(i) for i in iota[3].split(",")])
            if iota[4]:
                ids = ids.transpose([int(i) for i in iota[4].split(",")])
            groups += ids.reshape(int(iota[1]), int(iota[2])).tolist()
    return groups


def test_devices_end_their_rollouts_when_they_are_done():
    """Forwards of every device: each goes through as many rounds as its own rows take."""
    program = make_program(MESHES["4x2x1"])
    step, served = program.step, program.gather(first_state(program))

    def rounds(state, prompts):
        keys = step.noise_keys(state, prompts)
        trajectory = step.engine.rollout(state.params, state.draft, prompts, keys)
        return trajectory.stats.steps[None]

    counts = jax.jit(over_mesh(program.mesh, rounds, (P(), P(ROWS)), P(ROWS)))(served, program.issue(served)[0])
    assert len(set(counts.tolist())) > 1, counts


@pytest.mark.parametrize("axes", [(2, 2, 2), (1, 1, 1)])
def test_a_checkpoint_is_restored_on_another_mesh(tmp_path, axes):
    saving, restoring = make_program(MESHES["4x2x1"]), make_program(axes)
    state = first_state(saving)
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, state, {})
    restored, _ = restore_checkpoint(tmp_path, first_state(restoring))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))
    q_proj = restored.params.layers[0].q_proj
    assert q_proj.addressable_shards[0].data.size == q_proj.size // (axes[1] * axes[2])
    lies_right(restoring, restored)


def lies_right(program, state):
    """Check that the arrays of a state are where its program keeps them."""
    for x, where in zip(jax.tree.leaves(state), jax.tree.leaves(program.shardings(state)), strict=True):
        assert x.sharding.is_equivalent_to(where, x.ndim), (x.sharding, where)


def test_a_compiled_step_takes_the_state_that_it_returns():
    program = make_program(MESHES["2x2x2"])
    state = first_state(program)
    step = program.scanned(1).lower(state).compile()
    for _ in range(2):
        state, _ = step(state)
        lies_right(program, state)


def test_recomputing_layers_changes_no_gradient():
    kept, again = make_program((1, 1, 1)), make_program((1, 1, 1), remat=True)
    outputs = [program.scanned(1)(first_state(program)) for program in (kept, again)]
    (state, _), (other, _) = outputs
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=["1x1x1", "2x2x2"])
def test_a_rehearsed_step_compiles_nothing_more(mesh):
    program = make_program(mesh)
    state, pieces = first_state(program), StepPieces(program)
    served = program.gather(state)
    prompts, problems = program.issue(served)
    programs = pieces.rehearse(state, served, prompts, problems)
    COMPILED.clear()
    trajectory = program.rollout(served, prompts)
    program.prefill(served, prompts)
    rewards = pieces.rewards(Clock(), served, problems, trajectory, None)
    state, _ = pieces.learn(Clock(), state, trajectory, rewards)
    assert COMPILED == []
    lies_right(program, state)
    assert set(programs) == {
        "time_prefill_s", "time_rollout_s", "time_reward_s", "time_logprob_s", "time_update_s", "time_draft_update_s",
    }  # fmt: skip
    memory = programs["time_update_s"].compiled.memory_analysis()
    owned = jax.tree.leaves((state.params, state.opt_state))
    shards = sum(x.addressable_shards[0].data.nbytes for x in owned)
    assert memory.alias_size_in_bytes >= shards  # policy and moments are overwritten
