"""Responses to many prompts outside the GRPO step: evaluation, generation, data for the draft head."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from specrl_jax.data.prompts import Prompts
from specrl_jax.models.params import PolicyParams
from specrl_jax.parallel.hosts import to_host
from specrl_jax.parallel.sharding import ROWS, Layout, over_mesh, row_devices, sum_over_rows
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.noise import Purpose, sequence_keys
from specrl_jax.rollout.trajectory import Trajectory, trajectory_specs

# Fields of a trajectory with a row per response.
_OF_RESPONSES = ("tokens", "log_probs", "thresholds", "lengths", "ended")


@lru_cache(maxsize=16)
def _rollout_program(engine: RolloutEngine, mesh: Mesh, purpose: Purpose) -> Any:
    """`(params, draft, prompts, seed, attempt) -> trajectory`; samplers of equal engines share one."""

    def run(
        params: PolicyParams, draft: Any, prompts: Prompts, seed: Int[Array, ""], attempt: Int[Array, ""]
    ) -> Trajectory:
        samples = engine.config.samples_per_prompt
        index = jnp.tile(jnp.arange(samples, dtype=jnp.int32), prompts.tokens.shape[0])
        keys = sequence_keys(seed, purpose, 0, jnp.repeat(prompts.row_ids, samples), index, attempt)
        trajectory = engine.rollout(params, draft, prompts, keys)
        stats, entropy = sum_over_rows((trajectory.stats, trajectory.entropy_sum))
        return replace(trajectory, stats=stats, entropy_sum=entropy)

    on_rows = over_mesh(mesh, run, (P(), P(), P(ROWS), P(), P()), trajectory_specs(P(ROWS)))

    def program(params: PolicyParams, *others: Any) -> Trajectory:
        return on_rows(Layout(mesh, engine.policy.num_kv_heads).gather(params), *others)

    return jax.jit(program)


@dataclass(frozen=True, eq=False)
class Sampler:
    """One compiled rollout for any number of prompts.

    purpose: what the responses are for; it separates their noise from the training rollouts'.
    seed: of the noise.
    batch: prompts per call over the whole mesh, rounded up to a multiple of its devices.
    attempt: how often these prompts were sampled for the purpose before.
    """

    engine: RolloutEngine
    mesh: Mesh
    purpose: Purpose
    seed: int
    batch: int
    attempt: int = 0

    @property
    def _program(self) -> Any:
        return _rollout_program(self.engine, self.mesh, self.purpose)

    @property
    def _size(self) -> int:
        devices = row_devices(self.mesh)
        return -(-self.batch // devices) * devices

    @property
    def _noise(self) -> tuple[np.int32, np.int32]:
        return np.int32(self.seed), np.int32(self.attempt)

    def check(self, width: int) -> None:
        """Raise InputError unless prompts of `width` tokens fit the policy's context and the engine's cache budget."""
        self.engine.layout(self._size // row_devices(self.mesh), width)

    def _draft(self, draft: Any) -> Any:
        return draft if self.engine.speculative else None

    def _take(self, prompts: Prompts, start: int) -> Prompts:
        """The batch that begins at prompt `start`, filled up with prompts of no tokens."""
        rows, total = start + np.arange(self._size), prompts.lengths.shape[0]
        picked = np.minimum(rows, total - 1)
        batch: Prompts = jax.tree.map(lambda x: np.asarray(x)[picked], prompts)
        return replace(batch, lengths=np.where(rows < total, batch.lengths, 0))  # type: ignore[arg-type]

    def compile(self, params: PolicyParams, draft: Any, prompts: Prompts) -> None:
        """Compile ahead of `batches` with the same arguments, so that its time is that of sampling."""
        self._program.lower(params, self._draft(draft), self._take(prompts, 0), *self._noise).compile()

    def batches(self, params: PolicyParams, draft: Any, prompts: Prompts) -> Iterator[Trajectory]:
        """Responses in batches on the host; a last batch that is not full is filled up and cut again."""
        total = prompts.lengths.shape[0]
        for start in range(0, total, self._size):
            batch = self._take(prompts, start)
            trajectory = to_host(self._program(params, self._draft(draft), batch, *self._noise))
            yield first_prompts(trajectory, min(self._size, total - start))


def first_prompts(trajectory: Trajectory, count: int) -> Trajectory:
    """The responses to the first `count` prompts; counts stay those of all."""
    groups = trajectory.prompts.lengths.shape[0]
    rows = count * (trajectory.lengths.shape[0] // groups)
    return replace(
        trajectory,
        prompts=jax.tree.map(lambda x: x[:count], trajectory.prompts),
        **{name: jax.tree.map(lambda x: x[:rows], getattr(trajectory, name)) for name in _OF_RESPONSES},
    )


def concatenate(trajectories: list[Trajectory]) -> Trajectory:
    """One trajectory from several; counts are added."""
    joined = {
        name: jax.tree.map(lambda *x: np.concatenate(x), *(getattr(t, name) for t in trajectories))
        for name in ("prompts", *_OF_RESPONSES)
    }
    added = {
        name: jax.tree.map(lambda *x: sum(x), *(getattr(t, name) for t in trajectories))
        for name in ("entropy_sum", "stats")
    }
    return Trajectory(**joined, **added)


def sample_all(sampler: Sampler, params: PolicyParams, draft: Any, prompts: Prompts) -> Trajectory:
    """Responses to all prompts, on the host."""
    return concatenate(list(sampler.batches(params, draft, prompts)))
