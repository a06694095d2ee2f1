"""Rollouts that run ahead of the policy: the same bits on any devices, cut anywhere, and by hand."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_grpo
from test_grpo import EvenSum
from tiny import PLAIN, POLICY, VOCAB, random_eagle3, tiny_params

from specrl_jax.drafters.draft_losses import DraftLossConfig
from specrl_jax.errors import InputError
from specrl_jax.parallel.mesh import MeshConfig, make_mesh
from specrl_jax.rl.drafting import DraftTraining
from specrl_jax.rl.grpo import GrpoStep, UpdateConfig
from specrl_jax.rl.losses import LossConfig
from specrl_jax.rl.microbatches import MicrobatchConfig
from specrl_jax.rl.optimizers import OptimizerConfig
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rl.tasks import for_every_sample
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.control import Body, initial_control
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.training.checkpoints import latest_step
from specrl_jax.training.grpo_run import GrpoRun, RunConfig, grpo_checkpoints
from specrl_jax.training.metrics import read_metrics
from specrl_jax.training.pipeline import RolloutFailedError

pytestmark = pytest.mark.ci

GROUPS, SAMPLES, STEPS = 4, 4, 4
LAW = SamplingLaw(1.0, end_ids=(3,))


@functools.lru_cache
def program(cap=2.0, host=False):
    drafter, _ = random_eagle3()
    engine = RolloutEngine(POLICY, RolloutConfig(6, SAMPLES, 2, LAW), PLAIN, drafter)
    scorer = Scorer(POLICY, LAW, PLAIN)
    drafting = DraftTraining(
        scorer, drafter.config, DraftLossConfig(1), OptimizerConfig(1e-3), MicrobatchConfig(2, (1.0,))
    )
    update = UpdateConfig(
        LossConfig(importance_cap=cap),
        OptimizerConfig(1e-2),
        MicrobatchConfig(4, (1.0,)),
        updates_per_rollout=2,
        draft_sequences=2,
    )
    task = None if host else EvenSum(VOCAB)
    return GrpoProgram(GrpoStep(engine, scorer, update, drafting, seed=0), make_mesh(MeshConfig(2)), GROUPS, task)


class OnHost:
    """The in-graph task, from the host."""

    def issue(self, step):
        return EvenSum(VOCAB).issue("train", step * GROUPS + jnp.arange(GROUPS, dtype=jnp.uint32))

    def rewards(self, problems, trajectory):
        rows = for_every_sample(problems, SAMPLES)
        return np.asarray(EvenSum(VOCAB).reward(rows, jnp.asarray(trajectory.tokens), jnp.asarray(trajectory.lengths)))


def first_state():
    own = program()
    return own.place(own.step.init(tiny_params(), random_eagle3()[1]))


def run(folder, lag=0, *, apart=False, host=False, on_step=lambda *_: None, cap=2.0):
    folder.mkdir(exist_ok=True)
    own = program(cap, host)
    return GrpoRun(
        own,
        RunConfig(STEPS, scan_steps=1, lag=lag, measured_every=1),
        folder,
        evaluate=lambda state: {},
        on_step=on_step,
        host_task=OnHost() if host else None,
        roller=own.on(make_mesh(MeshConfig(2), taken=2)) if apart else None,
    ).run(first_state())


def same(a, b):
    assert a.trajectory_sha256 == b.trajectory_sha256
    for x, y in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@functools.lru_cache
def by_hand(lag):
    """Final parameters, and the tokens of every step, of a run whose rollouts come from `lag` steps before."""
    own = program()
    states, tokens = [first_state()], []
    for step in range(STEPS):
        writer = max(0, step - lag)
        served = own.gather(states[writer]).replace(behind=jnp.int32(2 * (step - writer)), issued=jnp.uint32(4 * step))
        prompts, problems = own.issue(served)
        trajectory = own.rollout(served, prompts)
        rewards = own.reward(served, problems, trajectory)
        prepared, owned = own.prepare(states[step], trajectory), jax.tree.map(jnp.copy, states[step])
        state, _, examples = own.update(owned, trajectory, prepared, rewards)
        states.append(own.update_drafter(state, trajectory, examples)[0])
        tokens.append(np.asarray(trajectory.tokens))
    return jax.device_get(states[-1].params), tokens


@pytest.mark.parametrize("lag", [1, 2])
def test_step_learns_from_the_policy_of_lag_steps_before(tmp_path, lag):
    seen = []
    report = run(tmp_path / "run", lag, on_step=lambda step, row, trajectory, rewards: seen.append(trajectory))
    params, tokens = by_hand(lag)
    for trajectory, expected in zip(seen, tokens, strict=True):
        np.testing.assert_array_equal(trajectory.tokens, expected)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(report.state.params), params)
    versions = [int(trajectory.version.min()) for trajectory in seen]
    assert versions == [2 * max(0, step - lag) for step in range(STEPS)]
    rows = read_metrics(tmp_path / "run")
    assert [row["policy_lag"] for row in rows] == [min(step, lag) for step in range(STEPS)]
    assert all(row["time_exposed_rollout_s"] >= 0 and row["time_rollout_s"] > 0 for row in rows)


def test_lag_changes_what_is_learned():
    assert any(np.any(a != b) for a, b in zip(by_hand(0)[1], by_hand(1)[1], strict=True))


def test_lag_of_0_is_the_synchronous_run(tmp_path):
    same(run(tmp_path / "apart", apart=True), run(tmp_path / "together"))


@pytest.mark.parametrize("host", [False, True], ids=["in-graph", "host"])
def test_devices_of_the_rollouts_change_nothing(tmp_path, host):
    same(run(tmp_path / "apart", 1, apart=True, host=host), run(tmp_path / "turns", 1, host=host))


@pytest.mark.parametrize("apart", [False, True], ids=["turns", "apart"])
def test_a_run_that_is_cut_goes_on_with_the_rollouts_that_were_pending(tmp_path, apart):
    def cut(step, *_):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", 2, apart=apart, on_step=cut)
    assert latest_step(grpo_checkpoints(tmp_path / "cut")) == 2
    same(run(tmp_path / "cut", 2, apart=apart), run(tmp_path / "whole", 2))


def test_a_rollout_that_fails_says_so_and_leaves_a_checkpoint(tmp_path):
    class Broken(OnHost):
        def issue(self, step):
            if step == 3:
                raise OSError("the disk is gone")
            return super().issue(step)

    own = program(host=True)
    (tmp_path / "run").mkdir()
    broken = GrpoRun(
        own, RunConfig(STEPS, scan_steps=1, lag=1), tmp_path / "run", lambda state: {}, lambda *_: None, Broken()
    )
    with pytest.raises(RolloutFailedError, match=r"rollout of step 4 failed \(OSError: the disk is gone\).*--resume"):
        broken.run(first_state())
    assert latest_step(grpo_checkpoints(tmp_path / "run")) == 2
    same(run(tmp_path / "run", 1, host=True), run(tmp_path / "whole", 1, host=True))


def test_old_responses_must_be_corrected_for(tmp_path):
    with pytest.raises(InputError, match="lag is 1 but loss importance_cap is 0\\.0"):
        run(tmp_path / "run", 1, cap=0.0)


def test_the_controller_goes_along(tmp_path):
    """Adaptive draft lengths, apart and in turn: what the controller learns passes from rollout to rollout."""
    rows = test_grpo.GROUPS * test_grpo.SAMPLES
    bodies = (Body(rows, rows), Body(rows, 3 * rows))
    adaptive = test_grpo.make_program(3, updates=1, bodies=bodies, loss=test_grpo.CORRECTED)
    state = test_grpo.first_state(adaptive, control=initial_control(np.array([1.0, 1.5])))
    found = []
    for name, roller in (("turns", None), ("apart", adaptive.on(make_mesh(MeshConfig(1), taken=1)))):
        (tmp_path / name).mkdir()
        config = RunConfig(3, scan_steps=3, lag=1)
        run = GrpoRun(adaptive, config, tmp_path / name, lambda state: {}, lambda *_: None, roller=roller)
        found.append(run.run(adaptive.place(state)))
    same(*found)
    assert float(found[0].state.control.accepted.sum()) > 0


def test_what_waits_for_a_rollout_is_counted(tmp_path):
    """A rollout whose prompts take a second is exposed at the first step, where nothing hides it."""

    class Slow(OnHost):
        def issue(self, step):
            if step == 1:
                time.sleep(1.0)
            return super().issue(step)

    (tmp_path / "run").mkdir()
    config = RunConfig(2, scan_steps=1, lag=1)
    GrpoRun(program(host=True), config, tmp_path / "run", lambda state: {}, lambda *_: None, Slow()).run(first_state())
    first, second = read_metrics(tmp_path / "run")
    assert first["time_exposed_rollout_s"] + second["time_exposed_rollout_s"] > 0.5
    assert first["time_step_s"] > first["time_exposed_rollout_s"]
