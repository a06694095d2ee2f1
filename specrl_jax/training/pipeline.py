"""Rollouts that run ahead of the policy.

Step t learns from what the policy of step t - lag wrote; the first steps share the first policy's. Which policy writes
which rollout is a matter of counting, never of time: a run has the same bits however fast its parts are, and wherever
it is cut and resumed. With a lag of 0 it is the synchronous run.

Rollouts run in a thread. On devices of their own they overlap with the training; on the same ones the two take turns,
and rollouts overlap with what the host does (rewards). Several processes take turns without a thread, for all of them
must call their programs in one order.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.errors import InputError
from specrl_jax.parallel.hosts import to_host
from specrl_jax.parallel.mesh import FSDP
from specrl_jax.rl.grpo import GrpoState, RolloutState
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rollout.control import Control
from specrl_jax.rollout.trajectory import Trajectory
from specrl_jax.training.pieces import Clock, HostTask, StepPieces


class RolloutFailedError(RuntimeError):
    """A rollout that ran ahead of the policy has failed; what made it fail is its cause."""


@dataclass(frozen=True)
class _Written:
    """A rollout that is done, on the host, with what its rewards judge by and its seconds."""

    problems: Any
    trajectory: Trajectory
    seconds: dict[str, float]


@dataclass(frozen=True)
class _Ahead:
    """A rollout of a step to come, under way or done. `counts`: the state it is made from, without its weights."""

    step: int
    counts: RolloutState
    written: "Future[_Written]"


class Pipeline:
    """Steps of a run whose rollouts are made `lag` steps ahead; begin with `resume`.

    Use it as a context; at its end the rollout under way is waited for.

    Args:
        program: the training's.
        roller: the rollouts', of the same step on another mesh; the training's where they share their devices.
        host_task: prompts and rewards, where the program has no in-graph task.
        lag: steps between the policy that writes and the one that learns.
        steps: of the run; no rollout is made beyond.
    """

    def __init__(
        self, program: GrpoProgram, roller: GrpoProgram, host_task: HostTask | None, lag: int, steps: int
    ) -> None:
        self._learner, self._roller = StepPieces(program, host_task), StepPieces(roller, host_task)
        self._in_graph = host_task is None
        self._lag, self._steps = lag, steps
        config = program.step.update_config
        self._updates = config.updates_per_rollout * config.epochs
        self._apart = not set(program.mesh.devices.flat) & set(roller.mesh.devices.flat)
        # Two programs with collectives on the same devices, called from two threads, may wait for each other for ever.
        self._turn: Any = contextlib.nullcontext() if self._apart else threading.Lock()
        self._worker = ThreadPoolExecutor(1, "rollout") if jax.process_count() == 1 else None
        self._ahead: deque[_Ahead] = deque()
        # Of the newest rollout; the one rollout after another that the worker makes hand it on.
        self._control: Control | None = None

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)

    def pending(self) -> tuple[Trajectory, ...]:
        """Rollouts that nothing was learned from yet, part of a checkpoint. Those under way are waited for."""
        return tuple(ahead.written.result().trajectory for ahead in self._ahead)

    def pending_like(self, state: GrpoState, step: int) -> tuple[Trajectory, ...]:
        """What `pending` is after `step` steps, with nothing in it."""
        served = jax.eval_shape(self._roller.program.gather, state)
        if self._in_graph:
            prompts = jax.eval_shape(self._roller.program.issue, served)[0]
        else:
            prompts = self._roller.issue(Clock(), served, step)[0]
        shapes = jax.eval_shape(self._roller.program.rollout, served, prompts)
        host = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
        return (host,) * min(self._lag, self._steps - step)

    def resume(self, state: GrpoState, step: int, pending: Sequence[Trajectory] = ()) -> None:
        """Go on after `step` steps, with the rollouts that were pending then; the programs of a step are compiled.

        Their results are thrown away: the steps' times are their own.
        """
        self._control = to_host(state.control)
        served = self._serve(state, Clock())
        for i, trajectory in enumerate(pending):
            counts = _counts(self._at(served, i))
            problems = self._roller.issue(Clock(), counts, step + i)[1]
            written: Future[_Written] = Future()
            written.set_result(_Written(self._problems(problems), trajectory, {}))
            self._ahead.append(_Ahead(step + i, counts, written))
            self._control = trajectory.control
        if step < self._steps:
            control, own = self._control, self._at(served, 0)
            done = self._roll_out(own, step)
            self._learner.rehearse_learning(state, _counts(own), done.problems, done.trajectory)
            self._control = control

    def step(self, state: GrpoState, step: int) -> tuple[GrpoState, dict[str, Any], Trajectory, Any]:
        """One step: the new state, a row, and trajectory and rewards on the host."""
        start, clock = time.perf_counter(), Clock()
        self._launch(state, step, clock)
        ahead = self._ahead.popleft()
        done: _Written = clock("time_exposed_rollout_s", ahead.written.result)
        judged = self._learner.judge(clock, done.problems, done.trajectory)
        with self._my_turn(clock):
            rewards = self._learner.rewards(clock, ahead.counts, done.problems, done.trajectory, judged)
            state, row = self._learner.learn(clock, state, done.trajectory, rewards)
        whole, version = time.perf_counter() - start, int(np.asarray(done.trajectory.version).min())
        row |= clock.seconds | done.seconds
        row |= {
            "timing": "pipelined",
            "time_step_s": whole,
            "policy_lag": step - version // self._updates,
            "exposed_rollout_share": clock.seconds["time_exposed_rollout_s"] / whole,
        }
        if "time_rollout_s" in done.seconds:
            row["tokens_per_second"] = int(done.trajectory.lengths.sum()) / done.seconds["time_rollout_s"]
        return state, row, done.trajectory, to_host(rewards)

    def _launch(self, state: GrpoState, step: int, clock: Clock) -> None:
        """Begin the rollouts that the policy of this step writes: one, but at the start as many as the lag asks for."""
        first = self._ahead[-1].step + 1 if self._ahead else step
        last = min(step + self._lag, self._steps - 1)
        if first > last:
            return
        with self._my_turn(clock):
            served = self._serve(state, clock)
        for to_come in range(first, last + 1):
            own = self._at(served, to_come - step)
            self._ahead.append(_Ahead(to_come, _counts(own), self._submit(own, to_come, clock)))

    @contextlib.contextmanager
    def _my_turn(self, clock: Clock) -> Iterator[None]:
        """The devices, after the rollout that may have them; the wait is exposed rollout."""
        waited = time.perf_counter()
        with self._turn:
            clock.add("time_exposed_rollout_s", waited)
            yield

    def _submit(self, served: RolloutState, step: int, clock: Clock) -> "Future[_Written]":
        if self._worker is not None:
            return self._worker.submit(self._checked, served, step)
        written: Future[_Written] = Future()
        written.set_result(clock("time_exposed_rollout_s", self._checked, served, step))
        return written

    def _checked(self, served: RolloutState, step: int) -> _Written:
        try:
            return self._roll_out(served, step)
        except InputError:
            raise
        except Exception as error:
            raise RolloutFailedError(
                f"the rollout of step {step + 1} failed ({type(error).__name__}: {error}); mend the cause, and go on "
                "from the last checkpoint, where there is one, with --resume"
            ) from error

    def _roll_out(self, served: RolloutState, step: int) -> _Written:
        clock = Clock()
        with self._turn:
            prompts, problems = self._roller.issue(clock, _counts(served), step)
            served = replace(served, control=self._control)
            trajectory = to_host(clock("time_rollout_s", self._roller.program.rollout, served, prompts))
            self._control = trajectory.control
            return _Written(self._problems(problems), trajectory, clock.seconds)

    def _problems(self, problems: Any) -> Any:
        return to_host(problems) if self._in_graph else problems

    def _serve(self, state: GrpoState, clock: Clock) -> RolloutState:
        """The policy in the rollouts' layout, on their devices."""

        def move() -> RolloutState:
            served = self._learner.program.gather(state)
            if self._apart:
                return self._roller.program.receive(served)
            # Updates overwrite the policy that rollouts to come read, where it was not gathered into another.
            copied = self._lag and self._learner.program.mesh.shape[FSDP] == 1
            return replace(served, params=jax.tree.map(jnp.copy, served.params)) if copied else served

        return clock("time_weight_sync_s", move)

    def _at(self, served: RolloutState, ahead: int) -> RolloutState:
        """The state as a rollout `ahead` steps later reads it."""
        issued = np.uint32(ahead * self._learner.program.groups)
        return replace(served, behind=jnp.int32(ahead * self._updates), issued=to_host(served.issued) + issued)


def _counts(served: RolloutState) -> RolloutState:
    """What prompts and rewards read; the weights may go."""
    return to_host(replace(served, params=None, draft=None, control=None))  # type: ignore[arg-type]
