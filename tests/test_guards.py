"""What ends a run, or must not: gradients that are not finite, SIGTERM, a full disk."""

import dataclasses
import os
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import run_script, write_models
from test_grpo import EvenSum, first_state, make_program, sha

from experiments import train_grpo
from specrl_jax.errors import InputError
from specrl_jax.rl.optimizers import OptimizerConfig, apply_gradients, make_optimizer, skipped_updates
from specrl_jax.training import checkpoints
from specrl_jax.training.checkpoints import CheckpointWriter, check_room
from specrl_jax.training.grpo_run import GrpoRun, RunConfig
from specrl_jax.training.metrics import read_metrics
from specrl_jax.training.stages import run_stage
from specrl_jax.training.termination import Stopped, stop_if_asked, termination_saves

pytestmark = pytest.mark.ci


@dataclasses.dataclass(frozen=True)
class Poisoned(EvenSum):
    """Rewards that are no numbers for the prompts before `until`, four of which make a step."""

    until: int = 4

    def reward(self, problems, tokens, lengths):
        return jnp.where(problems < self.until, jnp.nan, super().reward(problems, tokens, lengths))


def poisoned_run(folder, until, **config):
    program = dataclasses.replace(make_program(0, updates=1), task=Poisoned(until=until))
    config = RunConfig(steps=3, scan_steps=1, **config)
    return program, GrpoRun(program, config, folder, evaluate=lambda state: {}, on_step=lambda *args: None)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_moves_nothing(name):
    optimizer = make_optimizer(OptimizerConfig(0.1, name=name))
    params = {"q_proj": jnp.ones((4, 3)), "norm": jnp.ones((3,))}
    state = optimizer.init(params)
    good = jax.tree.map(jnp.ones_like, params)
    bad = good | {"norm": jnp.array([1.0, jnp.inf, 1.0])}
    params, state, _ = apply_gradients(optimizer, params, state, good)
    same, after, norm = apply_gradients(optimizer, params, state, bad)
    assert not np.isfinite(norm)
    assert sha(same) == sha(params)
    assert sha(after.rule.inner_state) == sha(state.rule.inner_state)
    assert [int(x) for x in skipped_updates(after)] == [1, 1]
    moved, after, _ = apply_gradients(optimizer, same, after, good)
    assert sha(moved) != sha(params)
    assert [int(x) for x in skipped_updates(after)] == [1, 0]


def test_a_poisoned_step_is_left_out_and_counted(tmp_path):
    program, run = poisoned_run(tmp_path, until=4)
    start = sha(first_state(program).params)
    report = run.run(first_state(program))
    rows = read_metrics(tmp_path)
    assert [row["skipped_updates"] for row in rows] == [1, 1, 1]
    assert [row["skipped_in_a_row"] for row in rows] == [1, 0, 0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(report.state.params))
    assert sha(report.state.params) != start


def test_a_run_that_only_skips_ends(tmp_path):
    program, run = poisoned_run(tmp_path, until=100, most_skipped=2)
    with pytest.raises(InputError, match=r"gradients of 2 updates in a row were not finite \(--most-skipped 2\)"):
        run.run(first_state(program))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_a_stage_that_only_skips_ends(tmp_path):
    def program(steps):
        return lambda state: (state + steps, {"loss": np.zeros(steps), "skipped_in_a_row": np.arange(1, steps + 1)})

    common = {"total": 12, "program": program, "on_chunk": lambda *_: False}
    run_stage(tmp_path / "nine", jnp.int32(0), chunk=9, **common)
    with pytest.raises(InputError, match="gradients of 12 updates in a row were not finite"):
        run_stage(tmp_path / "twelve", jnp.int32(0), chunk=12, **common)


def test_sigterm_saves_and_a_resumed_run_ends_in_the_same_bits(tmp_path, monkeypatch, capsys):
    models = write_models(tmp_path)
    options = ["--preset", "smoke", "--no-compare", "--steps", 2, "--scan-steps", 1, "--eval-every", 0]
    options += ["--policy", models / "policy", "--draft-length", 0, "--optimizer.name", "adamw", "--max-new-tokens", 12]
    run_script(monkeypatch, train_grpo, *options, "--out", tmp_path / "whole")
    keep = CheckpointWriter.save

    def save_and_be_asked(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        keep(*args)

    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "save", save_and_be_asked)
        capsys.readouterr()
        run_script(patch, train_grpo, *options, "--out", out)  # returns, so that the process exits with 0
        assert capsys.readouterr().err.endswith("stopped by SIGTERM; go on with --resume\n")
    assert [path.name for path in (out / "checkpoints" / "grpo").iterdir()] == ["1"]
    assert not (out / "policy").exists()
    run_script(monkeypatch, train_grpo, *options, "--out", out, "--resume")
    whole, ours = tmp_path / "whole" / "policy", out / "policy"
    assert (ours / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_sigterm_is_as_before_outside_of_a_run():
    before = signal.getsignal(signal.SIGTERM)
    with termination_saves():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped):
            stop_if_asked()
    stop_if_asked()
    assert signal.getsignal(signal.SIGTERM) is before
    thread = threading.Thread(target=lambda: termination_saves().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_full_disk_is_noticed_before_the_first_step(tmp_path, monkeypatch):
    state = {"a": np.zeros(1000, np.float32)}
    check_room(tmp_path / "not" / "there", state)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: usage._replace(free=11_000))
    with pytest.raises(InputError, match=r"has 0.00 GB free and checkpoints take 0.00 GB; make room"):
        check_room(tmp_path, state)
    check_room(tmp_path, state, keep=1)
    (tmp_path / "3").mkdir()
    check_room(tmp_path, state)  # one checkpoint is there already


def test_below_the_acceptance_floor_drafting_ends_and_nothing_else_changes(tmp_path):
    """In a run that is cut and resumed too."""
    program = make_program(2, updates=1)

    def cut(step, *_):
        if step == 3:
            raise KeyboardInterrupt

    def run(name, floor, on_step=lambda *_: None):
        config = RunConfig(steps=4, scan_steps=1, acceptance_floor=floor)
        (tmp_path / name).mkdir(exist_ok=True)
        report = GrpoRun(program, config, tmp_path / name, lambda state: {}, on_step).run(first_state(program))
        return report, [row["draft_length"] for row in read_metrics(tmp_path / name)]

    drafted, lengths = run("drafted", 1.0)
    assert lengths == [2, 2, 2, 2]
    ended, lengths = run("ended", 2.9)
    assert lengths == [2, 0, 0, 0]
    assert ended.trajectory_sha256 == drafted.trajectory_sha256
    assert sha(ended.state.params) == sha(drafted.state.params)
    with pytest.raises(KeyboardInterrupt):
        run("cut", 2.9, cut)
    resumed, lengths = run("cut", 2.9)
    assert lengths == [2, 0, 0, 0]
    assert resumed.trajectory_sha256 == ended.trajectory_sha256
    assert sha(resumed.state) == sha(ended.state)
