"""A GRPO run: dispatches of the compiled step, with metrics, checkpoints and held-out accuracy.

With an in-graph reward, `scan_steps` steps are one dispatch of one compiled program. Every so many dispatches the same
pieces run one by one instead, timed; both give the same bits. With a host reward every step runs in pieces.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specrl_jax.errors import InputError
from specrl_jax.parallel.hosts import is_first, shared_folder, to_host
from specrl_jax.rl.grpo import GrpoState
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rollout.trajectory import Trajectory
from specrl_jax.training.checkpoints import CheckpointWriter, check_room, latest_step, restore_checkpoint
from specrl_jax.training.metrics import MetricsWriter
from specrl_jax.training.pieces import Clock, HostTask, StepPieces, plain
from specrl_jax.training.pipeline import Pipeline
from specrl_jax.training.speculation import response_metrics
from specrl_jax.training.termination import stop_if_asked, termination_saves
from specrl_jax.training.trajectory_log import TrajectoryLog


@dataclass(frozen=True)
class RunConfig:
    """steps: GRPO steps in all. scan_steps: steps per dispatch. measured_every: dispatches of which one runs in pieces.

    eval_every: steps between evaluations, 0 for never.

    most_skipped: updates in a row whose gradients were not finite, at which the run ends.
    lag: steps between the policy that writes a rollout and the one that learns from it (`training/pipeline.py`).
    acceptance_floor: a dispatch whose mean acceptance length is below it ends drafting for the rest of the run.
    """

    steps: int
    scan_steps: int = 5
    measured_every: int = 10
    eval_every: int = 0
    most_skipped: int = 10
    lag: int = 0
    acceptance_floor: float = 0.0


@dataclass
class RunReport:
    """What a finished run leaves in memory; everything else is in its folder.

    last: the last rollout, None where a resumed run had no step left to do.
    """

    state: GrpoState
    trajectory_sha256: str
    last: Trajectory | None


def grpo_checkpoints(folder: Path) -> Path:
    """Where the run in `folder` keeps its checkpoints."""
    return shared_folder(folder) / "checkpoints" / "grpo"


Evaluate = Callable[[GrpoState], Mapping[str, Any]]
OnStep = Callable[[int, Mapping[str, Any], Trajectory, np.ndarray], None]


@dataclass(eq=False)
class GrpoRun:
    """Runs a program in a folder.

    folder: receives metrics.jsonl, trajectories.bin and checkpoints/.
    evaluate: held-out figures of a state; they join the row of the step they follow.
    on_step: called with the number of the step (from 1), its row, trajectory and rewards.
    host_task: prompts and rewards, where the program has no in-graph task.
    roller: the step on the mesh of the rollouts, where they have devices of their own.
    """

    program: GrpoProgram
    config: RunConfig
    folder: Path
    evaluate: Evaluate
    on_step: OnStep
    host_task: HostTask | None = None
    roller: GrpoProgram | None = None
    tensorboard: bool = False
    wandb: bool = False
    _scans: dict[tuple[int, bool], Any] = field(default_factory=dict)
    _compiled: bool = False
    _drafting: bool = True

    @property
    def _now(self) -> GrpoProgram:
        """The program of the next step."""
        return self.program if self._drafting else self.program.without_drafts

    def run(self, state: GrpoState) -> RunReport:
        """Run to the last step, from the folder's last checkpoint where there is one.

        Args:
            state: the first one; its arrays are overwritten.

        Raises:
            InputError: the disk has no room, too many updates in a row were not finite, or rollouts run ahead while
                the loss does not correct for it.
        """
        pipeline, folder = self._pipeline(), grpo_checkpoints(self.folder)
        done, dispatches, size = latest_step(folder) or 0, 0, 0
        state, pending = self.program.take_over(state), tuple[Trajectory, ...]()
        if done:
            waiting = () if pipeline is None else pipeline.pending_like(state, done)
            like = jax.tree.map(_shape_of, state), waiting
            del state  # it makes room for the one on disk
            (state, pending), meta = restore_checkpoint(folder, like)
            dispatches, size, self._drafting = meta["dispatches"], meta["trajectory_bytes"], meta["drafting"]
        if done < self.config.steps:
            check_room(folder, state, keep=3 if self.config.eval_every else 2)  # the best besides
        last = None
        with (
            termination_saves(),
            pipeline or contextlib.nullcontext(),
            CheckpointWriter(folder) as checkpoints,
            TrajectoryLog(self.folder, size) as log,
            MetricsWriter(
                self.folder,
                resume_step=done + 1 if done else None,
                tensorboard=self.tensorboard and is_first(),
                wandb=self.wandb and is_first(),
            ) as writer,
        ):
            if pipeline is not None:
                pipeline.resume(state, done, pending)
            if done == 0:
                self._baseline_row(writer, state)
            while done < self.config.steps:
                count = min(self._until_stop(done), self.config.steps - done)
                if pipeline is None:
                    state, rows, trajectories, rewards = self._dispatch(state, done, count, dispatches)
                else:
                    state, rows, trajectories, rewards = _one_by_one(pipeline.step, state, done, count)
                done, dispatches = done + count, dispatches + 1
                if pipeline is not None:
                    pending = self._waited_for(pipeline, rows[-1])
                if self.config.eval_every and (done % self.config.eval_every == 0 or done == self.config.steps):
                    rows[-1] |= self.evaluate(state)
                for i, row in enumerate(rows):
                    last = jax.tree.map(lambda x, i=i: x[i], trajectories)
                    step = done - count + i + 1
                    row |= response_metrics(last, *_rolled_out(row, last)) | self._what_differs()
                    log.append(last)
                    writer.write(step, row)
                    self.on_step(step, row, last, rewards[i])
                self._check_skipped(rows)
                self._end_drafting_below_floor(rows)
                meta = {"step": done, "dispatches": dispatches, "trajectory_bytes": log.size}
                meta |= {"drafting": self._drafting}
                checkpoints.save(done, (state, pending), meta, rows[-1].get("accuracy"))
                stop_if_asked()
        return RunReport(state, log.close(), last)

    def _waited_for(self, pipeline: Pipeline, row: dict[str, Any]) -> tuple[Trajectory, ...]:
        """What is pending at the end of a dispatch, so that an evaluation finds the devices idle.

        The wait is the last step's.
        """
        start = time.perf_counter()
        pending = pipeline.pending()
        for name in ("time_exposed_rollout_s", "time_step_s"):
            row[name] += time.perf_counter() - start
        return pending

    def _pipeline(self) -> Pipeline | None:
        """Rollouts ahead of the policy, or on devices of their own; None for a run without either."""
        config = self.config
        if not config.lag and self.roller is None:
            return None
        if config.lag < 0:
            raise InputError(f"lag is {config.lag}; it must be at least 0")
        if self.roller is not None:
            both = set(self.program.mesh.devices.flat) & set(self.roller.mesh.devices.flat)
            if both and self.roller.mesh != self.program.mesh:
                raise InputError(
                    f"the meshes of rollouts and training share {len(both)} devices; give them none or all"
                )
        if self.program.dynamic_sampling is not None:
            raise InputError(
                f"dynamic_sampling is {self.program.dynamic_sampling.most} and rollouts run ahead or apart, which must "
                "know how many prompts a step takes; leave one of them out"
            )
        cap = self.program.step.update_config.loss.importance_cap
        if config.lag and not cap:
            raise InputError(
                f"lag is {config.lag} but loss importance_cap is {cap}: responses come from an older policy than the "
                "one that learns; correct for it with a cap (2 is usual)"
            )
        if config.acceptance_floor:
            raise InputError(
                f"acceptance_floor is {config.acceptance_floor} and rollouts run ahead or apart; leave one of them out"
            )
        return Pipeline(self.program, self.roller or self.program, self.host_task, config.lag, config.steps)

    def _end_drafting_below_floor(self, rows: list[dict[str, Any]]) -> None:
        lengths = [row["acceptance_length"] for row in rows if "acceptance_length" in row]
        if self._drafting and lengths and float(np.mean(lengths)) < self.config.acceptance_floor:
            self._drafting = self._compiled = False

    def _check_skipped(self, rows: list[dict[str, Any]]) -> None:
        """Raise InputError where too many updates in a row had gradients that are not finite."""
        skipped = max(int(row["skipped_in_a_row"]) for row in rows)
        if skipped >= self.config.most_skipped:
            raise InputError(
                f"the gradients of {skipped} updates in a row were not finite (--most-skipped "
                f"{self.config.most_skipped}), and none was applied; start again with a lower --optimizer.learning-rate"
            )

    def _what_differs(self) -> dict[str, Any]:
        """How drafts are made, and what makes this run another one than plain GRPO."""
        step = self._now.step
        rule = step.engine.config.rule
        row: dict[str, Any] = {"draft_length": step.engine.config.draft_length}
        if not rule.exact and step.engine.speculative:
            row["lenience"] = getattr(rule, "lenience", None)
        return row | ({"couple_epochs": True} if step.couple_epochs else {})

    def _baseline_row(self, writer: MetricsWriter, state: GrpoState) -> None:
        if self.config.eval_every:
            writer.write(0, dict(self.evaluate(state)))

    def _until_stop(self, done: int) -> int:
        """Steps to the next dispatch boundary or evaluation."""
        until = self.config.scan_steps
        if self.config.eval_every:
            until = min(until, self.config.eval_every - done % self.config.eval_every)
        return until

    def _dispatch(
        self, state: GrpoState, done: int, count: int, dispatch: int
    ) -> tuple[GrpoState, list[dict[str, Any]], Any, np.ndarray]:
        """Some steps: the state, a row per step, and trajectories and rewards on the host, steps first."""
        if self.host_task is None and dispatch % self.config.measured_every:
            return self._scanned(state, count)
        if not self._compiled:
            self._rehearse(state, done)
            self._compiled = True
        return _one_by_one(self._piecewise, state, done, count)

    def _scanned(self, state: GrpoState, count: int) -> tuple[GrpoState, list[dict[str, Any]], Any, np.ndarray]:
        key = count, self._drafting
        if key not in self._scans:
            self._scans[key] = self._now.scanned(count).lower(state).compile()
        start = time.perf_counter()
        state, outputs = jax.block_until_ready(self._scans[key](state))
        seconds = (time.perf_counter() - start) / count
        metrics, trajectories, rewards = to_host(outputs)
        rows = [{name: plain(value[i]) for name, value in metrics.items()} for i in range(count)]
        for i, row in enumerate(rows):
            own = jax.tree.map(lambda x, i=i: x[i], trajectories)
            tokens = _rolled_out(row, own)[1]
            row |= {"timing": "scanned", "time_step_s": seconds, "tokens_per_second_step": tokens / seconds}
        return state, rows, trajectories, rewards

    def _rehearse(self, state: GrpoState, step: int) -> None:
        """Compile the pieces of a step, so that their times are their own."""
        pieces = StepPieces(self._now, self.host_task)
        served = self._now.gather(state)
        pieces.rehearse(state, served, *pieces.issue(Clock(), served, step))

    def _piecewise(self, state: GrpoState, step: int) -> tuple[GrpoState, dict[str, Any], Trajectory, np.ndarray]:
        """One step in pieces, each timed."""
        program, clock = self._now, Clock()
        pieces = StepPieces(program, self.host_task)
        served = clock("time_weight_sync_s", program.gather, state)
        sampled, figures = pieces.sample(clock, served, step), dict[str, Any]()
        if program.dynamic_sampling is not None and sampled.drawn is not None:
            figures = program.dynamic_sampling.metrics(sampled.drawn)
            state = program.dynamic_sampling.past(state, sampled.drawn)
        # Prefill is part of the rollout; alone it is timed beside the step.
        aside = Clock()
        for read in sampled.rollouts:
            aside("time_prefill_s", program.prefill, *read)
        # What rollouts read need not lie beside the updates.
        del served, read
        sampled.rollouts.clear()
        state, row = pieces.learn(clock, state, sampled.trajectory, sampled.rewards)
        row |= {name: plain(value) for name, value in figures.items()}
        times = clock.seconds | {"time_step_s": sum(clock.seconds.values())} | aside.seconds
        row |= times | {
            "timing": "measured",
            "rollout_share": times["time_rollout_s"] / times["time_step_s"],
            "tokens_per_second": _rolled_out(row, sampled.host)[1] / times["time_rollout_s"],
        }
        return state, row, sampled.host, to_host(sampled.rewards)


def _shape_of(leaf: Any) -> Any:
    """What is restored, and where to; empty arrays are not written to disk."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if leaf.size else leaf


def _rolled_out(row: Mapping[str, Any], batch: Trajectory) -> tuple[int, int]:
    """Responses and tokens that a step rolled out; with dynamic sampling the batch is only part of them."""
    responses = len(batch.lengths)
    if "sampled_groups" not in row:
        return responses, int(batch.lengths.sum())
    return int(row["sampled_groups"]) * responses // len(batch.prompts.lengths), int(row["sampled_tokens"])


def _one_by_one(
    one: Callable[..., Any], state: GrpoState, done: int, count: int
) -> tuple[GrpoState, list[dict[str, Any]], Any, np.ndarray]:
    """Steps by `one(state, step) -> (state, row, trajectory, rewards)`, as a dispatch returns them."""
    rows, trajectories, rewards = [], [], []
    for step in range(done, done + count):
        state, row, trajectory, reward = one(state, step)
        rows.append(row)
        trajectories.append(trajectory)
        rewards.append(reward)
    return state, rows, jax.tree.map(lambda *x: np.stack(x), *trajectories), np.stack(rewards)
