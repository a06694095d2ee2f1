"""Compiled programs of the GRPO step over a mesh.

`scanned` runs several steps as one `lax.scan` in one program; the other programs
are the same pieces one by one, for rewards computed on the host and for timing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from specrl_jax.data.arithmetic import Split
from specrl_jax.data.prompts import Prompts
from specrl_jax.errors import InputError
from specrl_jax.parallel.mesh import DATA
from specrl_jax.rl.advantages import shuffle_within_groups
from specrl_jax.rl.drafting import DraftExamples
from specrl_jax.rl.grpo import GrpoState, GrpoStep
from specrl_jax.rl.microbatches import check_microbatch
from specrl_jax.rl.tasks import InGraphTask, for_every_sample
from specrl_jax.rollout.trajectory import Trajectory


def trajectory_specs(rows: P) -> Any:
    """Partition of a trajectory: rows as given, counts replicated."""
    names = ("prompts", "tokens", "log_probs", "thresholds", "lengths", "ended")
    return Trajectory(**dict.fromkeys(names, rows), entropy_sum=P(), stats=P(), control=P())  # type: ignore[arg-type]  # a prefix of specs, not arrays


def over_mesh(mesh: Mesh, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """`fn` compiled with its arguments split over the mesh.

    Replication is not checked: loops whose trip counts differ between devices defeat the
    checker. Every replicated output is a sum over the mesh or computed from such sums.
    """
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


@dataclass(frozen=True, eq=False)
class GrpoProgram:
    """A step on a mesh.

    groups: prompts per step, over the whole mesh.
    task: an in-graph task, or None when prompts and rewards come from the host.
    shuffle_rewards: hand out the rewards of a group at random (a control that must not learn).
    """

    step: GrpoStep
    mesh: Mesh
    groups: int
    task: InGraphTask | None = None
    shuffle_rewards: bool = False

    def __post_init__(self) -> None:
        devices, update = self.mesh.shape[DATA], self.step.update_config
        parts = devices * update.updates_per_rollout
        if self.groups % parts:
            raise InputError(
                f"{self.groups} prompts per step do not split over {devices} devices and "
                f"{update.updates_per_rollout} updates per rollout; choose a multiple of {parts}"
            )
        sequences = self.groups // parts * self.step.samples
        check_microbatch(update.microbatch, sequences)
        if self.step.drafting is not None:
            kept = update.updates_per_rollout * (sequences // update.microbatch.rows) * update.draft_sequences
            check_microbatch(self.step.drafting.microbatch, kept)

    def _issue(self, state: GrpoState, split: Split = "train") -> tuple[Prompts, Any]:
        if self.task is None:
            raise ValueError("this task's prompts come from the host")
        local = self.groups // self.mesh.shape[DATA]
        first = state.issued + jnp.uint32(local) * lax.axis_index(DATA).astype(jnp.uint32)
        return self.task.issue(split, first + jnp.arange(local, dtype=jnp.uint32))

    def _reward(self, state: GrpoState, problems: Any, trajectory: Trajectory) -> Float[Array, "b"]:
        if self.task is None:
            raise ValueError("this task's rewards come from the host")
        samples = self.step.samples
        rewards = self.task.reward(for_every_sample(problems, samples), trajectory.tokens, trajectory.lengths)
        return self._handed_out(state, trajectory, rewards)

    def _handed_out(self, state: GrpoState, trajectory: Trajectory, rewards: Float[Array, "b"]) -> Float[Array, "b"]:
        """The rewards as they are given to the responses: their own, or shuffled."""
        if not self.shuffle_rewards:
            return rewards
        key = jax.random.fold_in(jax.random.key(self.step.seed), state.updates)
        return shuffle_within_groups(rewards, self.step.samples, key, trajectory.prompts.row_ids)

    def _one_step(self, state: GrpoState, _: None) -> tuple[GrpoState, tuple[Any, Trajectory, Array]]:
        prompts, problems = self._issue(state)
        trajectory = self.step.rollout(state, prompts)
        rewards = self._reward(state, problems, trajectory)
        state, metrics, examples = self.step.update(state, trajectory, self.step.prepare(state, trajectory), rewards)
        state, draft_metrics = self.step.update_drafter(state, trajectory, examples)
        return state, (metrics | draft_metrics, trajectory, rewards)

    def scanned(self, steps: int) -> Any:
        """`steps` whole steps in one program: `state -> (state, (metrics, trajectories, rewards))`, steps first."""

        def run(state: GrpoState) -> Any:
            return lax.scan(self._one_step, state, None, length=steps)

        rows = P(None, DATA)
        return over_mesh(self.mesh, run, (P(),), (P(), (P(), trajectory_specs(rows), rows)))

    @cached_property
    def issue(self) -> Callable[[GrpoState], tuple[Prompts, Any]]:
        """Next prompts of an in-graph task, and what its reward judges by."""
        return over_mesh(self.mesh, self._issue, (P(),), (P(DATA), P(DATA)))

    @cached_property
    def prefill(self) -> Callable[[GrpoState, Prompts], Any]:
        """The first part of `rollout` alone, for its time."""

        def run(state: GrpoState, prompts: Prompts) -> Any:
            draft = state.draft if self.step.engine.speculative else None
            keys = self.step.noise_keys(state, prompts)
            return self.step.engine.start(state.params, draft, prompts, keys, state.control).rows

        return over_mesh(self.mesh, run, (P(), P(DATA)), P(DATA))

    @cached_property
    def rollout(self) -> Callable[[GrpoState, Prompts], Trajectory]:
        """Responses to prompts."""
        return over_mesh(self.mesh, self.step.rollout, (P(), P(DATA)), trajectory_specs(P(DATA)))

    @cached_property
    def reward(self) -> Callable[[GrpoState, Any, Trajectory], Array]:
        """Rewards of an in-graph task."""
        specs = (P(), P(DATA), trajectory_specs(P(DATA)))
        return over_mesh(self.mesh, self._reward, specs, P(DATA))

    @cached_property
    def hand_out(self) -> Callable[[GrpoState, Trajectory, Float[Array, "b"]], Float[Array, "b"]]:
        """Rewards from the host as they are given to the responses."""
        specs = (P(), trajectory_specs(P(DATA)), P(DATA))
        return over_mesh(self.mesh, self._handed_out, specs, P(DATA))

    @cached_property
    def prepare(self) -> Callable[[GrpoState, Trajectory], Any]:
        """Old and reference log-probs."""
        return over_mesh(self.mesh, self.step.prepare, (P(), trajectory_specs(P(DATA))), P(DATA))

    @cached_property
    def update(self) -> Callable[..., tuple[GrpoState, dict[str, Array], DraftExamples | None]]:
        """Policy updates: `(state, trajectory, prepared, rewards) -> (state, metrics, examples)`."""
        specs = (P(), trajectory_specs(P(DATA)), P(DATA), P(DATA))
        return over_mesh(self.mesh, self.step.update, specs, (P(), P(), P(DATA)))

    @cached_property
    def update_drafter(
        self,
    ) -> Callable[[GrpoState, Trajectory, DraftExamples | None], tuple[GrpoState, dict[str, Array]]]:
        """One step of the draft head."""
        specs = (P(), trajectory_specs(P(DATA)), P(DATA))
        return over_mesh(self.mesh, self.step.update_drafter, specs, (P(), P()))
