"""A GRPO step in pieces, each timed with its result waited for."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from specrl_jax.data.prompts import Prompts
from specrl_jax.parallel.hosts import of_first, to_host
from specrl_jax.rl.grpo import GrpoState, RolloutState
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rollout.trajectory import Trajectory


@runtime_checkable
class HostTask(Protocol):
    """Prompts and rewards from the host."""

    def issue(self, step: int) -> tuple[Prompts, Any]:
        """Prompts of a step, and what `rewards` judges by."""

    def rewards(self, problems: Any, trajectory: Trajectory) -> np.ndarray:
        """Reward of each response, `[b]` float32; the trajectory is on the host."""


class Clock:
    """Seconds of calls by name, each with its result waited for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)`, its seconds kept as `name`."""
        start = time.perf_counter()
        result = jax.block_until_ready(fn(*args))
        self.seconds[name] = time.perf_counter() - start
        return result


@dataclass(frozen=True, eq=False)
class StepPieces:
    """The pieces of a program; prompts and rewards come from `host_task` where it has no in-graph task."""

    program: GrpoProgram
    host_task: HostTask | None = None

    def issue(self, clock: Clock, served: RolloutState, step: int) -> tuple[Prompts, Any]:
        """Prompts of a step, and what rewards judge by."""
        if self.host_task is None:
            return clock("time_data_s", self.program.issue, served)
        return clock("time_data_s", self.host_task.issue, step)

    def rewards(
        self, clock: Clock, served: RolloutState, problems: Any, trajectory: Trajectory, *, judge: bool = True
    ) -> Any:
        """Rewards as they are handed out; without `judge` no host reward is asked for."""
        if self.host_task is None:
            return clock("time_reward_s", self.program.reward, served, problems, trajectory)
        return clock("time_reward_s", self._host_reward, self.host_task, served, problems, trajectory, judge)

    def _host_reward(
        self, task: HostTask, served: RolloutState, problems: Any, trajectory: Trajectory, judge: bool
    ) -> jax.Array:
        rewards: Any = np.zeros(trajectory.lengths.shape, np.float32)
        if judge:
            # A judge may have a clock: what it says to the first process counts for all.
            rewards = of_first(np.asarray(task.rewards(problems, to_host(trajectory)), np.float32))
        return self.program.hand_out(served, trajectory, rewards)

    def learn(
        self, clock: Clock, state: GrpoState, trajectory: Trajectory, rewards: Any
    ) -> tuple[GrpoState, dict[str, Any]]:
        """Policy and draft head after their updates, and metrics."""
        program = self.program
        prepared = clock("time_logprob_s", program.prepare, state, trajectory)
        state, metrics, examples = clock("time_update_s", program.update, state, trajectory, prepared, rewards)
        state, drafts = clock("time_draft_update_s", program.update_drafter, state, trajectory, examples)
        return state, {name: plain(value) for name, value in (metrics | drafts).items()}


def plain(value: Any) -> Any:
    """A metric as a number, or a list of them."""
    array = np.asarray(value)
    return array.tolist() if array.ndim else float(array)
