"""The GRPO step on every kind of mesh: the tokens and the movement of the parameters of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import PLAIN, tiny_params

from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.draft_losses import DraftLossConfig
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_params import Eagle3Config, init_eagle3
from specrl_jax.models.config import PolicyConfig
from specrl_jax.parallel.mesh import MeshConfig, make_mesh
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

pytestmark = pytest.mark.ci

VOCAB = 24
POLICY = PolicyConfig("qwen3", VOCAB, 32, 64, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=8)
HEAD = Eagle3Config(32, 64, 8, 2, 8, VOCAB, VOCAB, (0, 1, 2), 32)
LAW = SamplingLaw(1.0, end_ids=(3,))
MESHES = {"8x1x1": (8, 1, 1), "4x2x1": (4, 2, 1), "2x2x2": (2, 2, 2), "1x1x8": (1, 1, 8)}
GROUPS, SAMPLES, STEPS = 8, 4, 3


@dataclasses.dataclass(frozen=True)
class EvenSum:
    """Random prompts; a response is right when the sum of its tokens is even, so that every group has both kinds."""

    def issue(self, split, counters):
        key = jax.vmap(lambda c: jax.random.fold_in(jax.random.key(5), c))(counters)
        tokens = jax.vmap(lambda k: jax.random.randint(k, (6,), 0, VOCAB, jnp.int32))(key)
        return Prompts(tokens, 2 + (counters % 5).astype(jnp.int32), counters), counters

    def reward(self, problems, tokens, lengths):
        return ((tokens.sum(axis=1) + lengths + problems.astype(jnp.int32)) % 2).astype(jnp.float32)


@functools.lru_cache
def initial():
    params = tiny_params(POLICY)
    return params, init_eagle3(jax.random.key(1), HEAD, policy=params)


def make_program(mesh, *, optimizer=None, remat=False):
    engine = RolloutEngine(POLICY, RolloutConfig(10, SAMPLES, 2, LAW), PLAIN, Eagle3Drafter(HEAD))
    scorer = Scorer(POLICY, LAW, PLAIN, remat)
    loss = DraftLossConfig(2)
    drafting = DraftTraining(scorer, HEAD, loss, OptimizerConfig(1e-3), MicrobatchConfig(2, (1.0,)))
    update = UpdateConfig(
        LossConfig(clip_high=0.28),
        optimizer or OptimizerConfig(1e-3),
        MicrobatchConfig(4, (1.0,)),
        draft_sequences=4,
    )
    step = GrpoStep(engine, scorer, update, drafting, seed=0)
    return GrpoProgram(step, make_mesh(MeshConfig(*mesh)), GROUPS, EvenSum())


def first_state(program):
    params, draft = initial()
    return program.place(program.step.init(params, draft))


@functools.lru_cache
def run(mesh):
    program = make_program(mesh)
    state, (metrics, trajectories, _) = program.scanned(STEPS)(first_state(program))
    return jax.device_get((state.params, state.draft.weights, metrics, trajectories))


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("name", MESHES)
def test_three_steps_move_the_parameters_as_on_one_device(name):
    start, head = initial()
    params, draft, metrics, trajectories = run(MESHES[name])
    expected_params, expected_draft, expected_metrics, expected = run((1, 1, 1))
    np.testing.assert_array_equal(trajectories.tokens, expected.tokens)
    for found, wanted, before in ((params, expected_params, start), (draft, expected_draft, head.weights)):
        moved, should = flat(found) - flat(before), flat(wanted) - flat(before)
        assert np.linalg.norm(moved - should) <= 1e-3 * np.linalg.norm(should)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-4, atol=1e-6)
    assert trajectories.stats.steps.tolist() == expected.stats.steps.tolist()
