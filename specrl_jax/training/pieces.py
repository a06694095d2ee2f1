"""A GRPO step in pieces, each timed with its result waited for."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled, Lowered

from specrl_jax.data.prompts import Prompts
from specrl_jax.parallel.hosts import of_first, to_host
from specrl_jax.rl.dynamic_sampling import Drawn
from specrl_jax.rl.grpo import GrpoState, RolloutState
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rollout.trajectory import Trajectory


@runtime_checkable
class HostTask(Protocol):
    """Prompts and rewards from the host."""

    def issue(self, step: int) -> tuple[Prompts, Any]:
        """Prompts of a step, and what `rewards` judges by.

        With dynamic sampling a step may take several rollouts: `step` then counts these.
        """

    def rewards(self, problems: Any, trajectory: Trajectory) -> np.ndarray:
        """Reward of each response, `[b]` float32; the trajectory is on the host."""


class Clock:
    """Seconds of calls by name, added up, each with its result waited for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)`, its seconds kept as `name`."""
        start = time.perf_counter()
        result = jax.block_until_ready(fn(*args))
        self.add(name, start)
        return result

    def add(self, name: str, start: float) -> None:
        """Count the time since `start` as `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Sampled:
    """The batch of a step.

    trajectory, rewards: on the device. host: the trajectory on the host.
    rollouts: what each of them read. drawn: what dynamic sampling drew, None without it.
    """

    trajectory: Trajectory
    rewards: Any
    host: Trajectory
    rollouts: list[tuple[RolloutState, Prompts]]
    drawn: Drawn | None = None


@dataclass(frozen=True, eq=False)
class Rehearsed:
    """A program as it was traced, and compiled."""

    lowered: Lowered
    compiled: Compiled


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

    def judge(self, clock: Clock, problems: Any, trajectory: Trajectory) -> np.ndarray | None:
        """What the host task says of responses on the host, without a device; None where the task is in the graph."""
        if self.host_task is None:
            return None
        return np.asarray(clock("time_reward_s", self.host_task.rewards, problems, trajectory), np.float32)

    def rewards(
        self, clock: Clock, served: RolloutState, problems: Any, trajectory: Trajectory, judged: np.ndarray | None
    ) -> Any:
        """Rewards as they are handed out."""
        if judged is None:
            return clock("time_reward_s", self.program.reward, served, problems, trajectory)
        # A judge may have a clock: what it says to the first process counts for all.
        return clock("time_reward_s", self.program.hand_out, served, trajectory, of_first(judged))

    def sample(self, clock: Clock, served: RolloutState, step: int) -> Sampled:
        """The batch of a step."""
        dynamic = self.program.dynamic_sampling
        if dynamic is None:
            return self._sample(clock, served, step)
        drawn, rollouts = None, list[tuple[RolloutState, Prompts]]()
        while drawn is None or dynamic.goes_on(drawn):
            # A number of this process, as in the first rollout: one that a program returned would be compiled for anew.
            attempt = jnp.int32(len(rollouts))
            own = served if drawn is None else replace(dynamic.upcoming(served, drawn), attempt=attempt)
            one = self._sample(clock, own, int(to_host(own.issued)) // self.program.groups)
            rollouts += one.rollouts
            drawn = clock("time_data_s", self.program.add, drawn, one.trajectory, one.rewards)
        return Sampled(drawn.trajectory, drawn.rewards, to_host(drawn.trajectory), rollouts, drawn)

    def _sample(self, clock: Clock, served: RolloutState, position: int) -> Sampled:
        prompts, problems = self.issue(clock, served, position)
        trajectory = clock("time_rollout_s", self.program.rollout, served, prompts)
        host = to_host(trajectory)
        judged = self.judge(clock, problems, host)
        rewards = self.rewards(clock, served, problems, trajectory, judged)
        return Sampled(trajectory, rewards, host, [(served, prompts)])

    def learn(
        self, clock: Clock, state: GrpoState, trajectory: Trajectory, rewards: Any
    ) -> tuple[GrpoState, dict[str, Any]]:
        """Policy and draft head after their updates, and metrics."""
        program = self.program
        prepared = clock("time_logprob_s", program.prepare, state, trajectory)
        state, metrics, examples = clock("time_update_s", program.update, state, trajectory, prepared, rewards)
        state, drafts = clock("time_draft_update_s", program.update_drafter, state, trajectory, examples)
        return state, {name: plain(value) for name, value in (metrics | drafts).items()}

    def rehearse(self, state: GrpoState, served: RolloutState, prompts: Prompts, problems: Any) -> dict[str, Rehearsed]:
        """The programs of a step by the name of their time, compiled but not run; arrays may be shapes with shardings.

        A call of a program with such arguments finds it compiled.
        """
        rollout, trajectory = rehearsed(self.program.rollout, served, prompts)
        done = {"time_prefill_s": rehearsed(self.program.prefill, served, prompts)[0], "time_rollout_s": rollout}
        return done | self.rehearse_learning(state, served, problems, trajectory)

    def rehearse_learning(
        self, state: GrpoState, served: RolloutState, problems: Any, trajectory: Trajectory
    ) -> dict[str, Rehearsed]:
        """Those of them that come after the rollout."""
        program = self.program
        if program.task is not None:
            reward, rewards = rehearsed(program.reward, served, problems, trajectory)
        else:
            judged = np.zeros(trajectory.lengths.shape, np.float32)
            reward, rewards = rehearsed(program.hand_out, served, trajectory, judged)
        if program.dynamic_sampling is not None:
            _, drawn = rehearsed(program.add, None, trajectory, rewards)
            _, drawn = rehearsed(program.add, drawn, trajectory, rewards)
            trajectory, rewards = drawn.trajectory, drawn.rewards
        prepare, prepared = rehearsed(program.prepare, state, trajectory)
        learn = program.to_update(state, trajectory, prepared, rewards)
        update, (after, _, examples) = rehearsed(program.compiled_update, *learn)
        learn = program.to_update_drafter(program.after_update(state, after), trajectory, examples)
        return {
            "time_reward_s": reward,
            "time_logprob_s": prepare,
            "time_update_s": update,
            "time_draft_update_s": rehearsed(program.compiled_draft_update, *learn)[0],
        }


def rehearsed(program: Any, *args: Any) -> tuple[Rehearsed, Any]:
    """A jitted function compiled for arguments that may be shapes, and the shapes of its results."""
    lowered = program.lower(*args)
    executable = lowered.compile()

    def shape(info: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)

    return Rehearsed(lowered, executable), jax.tree.map(shape, lowered.out_info, executable.output_shardings)


def plain(value: Any) -> Any:
    """A metric as a number, or a list of them."""
    array = np.asarray(value)
    return array.tolist() if array.ndim else float(array)
