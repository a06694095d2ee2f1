"""Compiled programs of the GRPO step over a mesh.

`scanned` runs several steps as one `lax.scan` in one program; the other programs
are the same pieces one by one, for rewards computed on the host and for timing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from specrl_jax.data.arithmetic import Split
from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.combined import head_of, with_head
from specrl_jax.errors import InputError
from specrl_jax.models.params import PolicyParams
from specrl_jax.parallel.mesh import FSDP
from specrl_jax.parallel.sharding import ROWS, Layout, check_splits, over_mesh, replicated, row_devices
from specrl_jax.rl.advantages import shuffle_within_groups
from specrl_jax.rl.drafting import DraftExamples
from specrl_jax.rl.dynamic_sampling import Drawn, DynamicSampling
from specrl_jax.rl.grpo import GrpoState, GrpoStep, RolloutState
from specrl_jax.rl.microbatches import check_microbatch
from specrl_jax.rl.tasks import InGraphTask, for_every_sample
from specrl_jax.rollout.trajectory import Trajectory, trajectory_specs


@dataclass(frozen=True, eq=False)
class GrpoProgram:
    """A step on a mesh.

    groups: prompts per step, over the whole mesh.
    task: an in-graph task, or None when prompts and rewards come from the host.
    shuffle_rewards: hand out the rewards of a group at random (a control that must not learn).
    learns: whether updates run on this mesh too, or rollouts alone.
    """

    step: GrpoStep
    mesh: Mesh
    groups: int
    task: InGraphTask | None = None
    shuffle_rewards: bool = False
    learns: bool = True

    def on(self, mesh: Mesh) -> "GrpoProgram":
        """The rollouts of the same step on a mesh of their own."""
        return replace(self, mesh=mesh, learns=False)

    @cached_property
    def without_drafts(self) -> "GrpoProgram":
        """The same step with the same state, its rollouts without drafts and its head as it is."""
        engine, update = self.step.engine, replace(self.step.update_config, draft_sequences=0)
        engine = replace(engine, config=replace(engine.config, draft_length=0, adaptive=False))
        return replace(self, step=replace(self.step, engine=engine, update_config=update, drafting=None))

    def __post_init__(self) -> None:
        check_splits("policy", self.step.engine.policy, self.mesh)
        if self._head is not None:
            check_splits("draft head", self._head, self.mesh)
        devices, update = row_devices(self.mesh), self.step.update_config
        if not self.learns:
            if self.groups % devices:
                raise InputError(
                    f"{self.groups} prompts per step do not split over the {devices} devices of the rollouts; "
                    f"choose a multiple of {devices}"
                )
            return
        parts = devices * update.updates_per_rollout
        if self.groups % parts:
            raise InputError(
                f"{self.groups} prompts per step do not split over {devices} devices and "
                f"{update.updates_per_rollout} updates per rollout; choose a multiple of {parts}"
            )
        sequences = self.groups // parts * self.step.samples
        check_microbatch(update.microbatch, sequences)
        if self.step.drafting is not None:
            kept = update.updates_per_rollout * update.leaving(sequences) * update.draft_sequences
            check_microbatch(self.step.drafting.microbatch, kept)

    @property
    def _head(self) -> Any:
        """Architecture of the draft model, or None."""
        drafter = self.step.engine.drafter
        return getattr(getattr(drafter, "head", drafter), "config", None)

    @property
    def _policy_layout(self) -> Layout:
        return Layout(self.mesh, self.step.engine.policy.num_kv_heads)

    @property
    def _head_layout(self) -> Layout:
        return Layout(self.mesh, getattr(self._head, "num_kv_heads", 1))

    def shardings(self, state: GrpoState) -> GrpoState:
        """Where the arrays of a state lie between steps; `state` may hold shapes."""
        policy, head = self._policy_layout, self._head_layout
        rest, weights = jax.tree.map(lambda _: replicated(self.mesh), state), head_of(state.draft)
        return replace(
            rest,
            params=policy.stored(state.params),
            opt_state=policy.stored(state.opt_state),
            reference=policy.stored(state.reference),
            draft=rest.draft if weights is None else with_head(rest.draft, head.stored(weights)),
            draft_opt_state=head.stored(state.draft_opt_state),
        )

    def place(self, state: GrpoState) -> GrpoState:
        """A copy of the state as the programs return it; `scanned` overwrites its argument."""
        return jax.tree.map(lambda x, where: jax.device_put(jnp.copy(x), where), state, self.shardings(state))

    def take_over(self, state: GrpoState) -> GrpoState:
        """The state as the programs return it, made of the given arrays; they are overwritten, so keep none of them."""
        if jax.process_count() > 1:  # whose addresses differ, and with them what each would copy
            return self.place(state)
        taken = set[int]()

        def own(leaf: Any, where: NamedSharding) -> Any:
            # An array that occurs twice (a norm of the policy in the head) cannot be given away twice.
            buffer = leaf.addressable_shards[0].data.unsafe_buffer_pointer()
            leaf = jnp.copy(leaf) if buffer in taken else leaf
            taken.add(buffer)
            return jax.device_put(leaf, where)

        return jax.tree.map(own, jax.tree.map(jnp.asarray, state), self.shardings(state))

    def _kept(self, state: GrpoState) -> GrpoState:
        return lax.with_sharding_constraint(state, self.shardings(state))

    def _on_rows(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """Every device on its own rows, compiled."""
        return jax.jit(over_mesh(self.mesh, fn, in_specs, out_specs))

    def served(self, state: GrpoState, weights: tuple[PolicyParams, Any]) -> RolloutState:
        """What a rollout reads of a state, with policy and drafter in its layout."""
        none = jnp.int32(0)
        return RolloutState(*weights, state.updates, none, none, state.issued, state.control)

    @cached_property
    def gather_weights(self) -> Callable[[PolicyParams, Any], tuple[PolicyParams, Any]]:
        """Policy and drafter in a rollout's layout: the gather of the training's weights, once per step."""

        def run(params: PolicyParams, draft: Any) -> tuple[PolicyParams, Any]:
            weights = head_of(draft)
            if weights is not None:
                draft = with_head(draft, self._head_layout.gather(weights))
            return self._policy_layout.gather(params), draft

        return jax.jit(run)

    def gather(self, state: GrpoState) -> RolloutState:
        """What a rollout reads of a state. Where `fsdp` is 1 the weights lie right and are not copied."""
        whole = self.mesh.shape[FSDP] == 1
        return self.served(
            state, (state.params, state.draft) if whole else self.gather_weights(state.params, state.draft)
        )

    def receive(self, served: RolloutState) -> RolloutState:
        """What `gather` gave on another mesh, on this one."""
        where, weights = jax.tree.map(lambda _: replicated(self.mesh), served), head_of(served.draft)
        draft = where.draft if weights is None else with_head(where.draft, self._head_layout.gathered(weights))
        params = self._policy_layout.gathered(served.params)
        return jax.device_put(served, replace(where, params=params, draft=draft))

    def _issue(self, state: RolloutState, split: Split = "train") -> tuple[Prompts, Any]:
        if self.task is None:
            raise ValueError("this task's prompts come from the host")
        local = self.groups // row_devices(self.mesh)
        first = state.issued + jnp.uint32(local) * lax.axis_index(ROWS).astype(jnp.uint32)
        return self.task.issue(split, first + jnp.arange(local, dtype=jnp.uint32))

    def _reward(self, state: RolloutState, problems: Any, trajectory: Trajectory) -> Float[Array, "b"]:
        if self.task is None:
            raise ValueError("this task's rewards come from the host")
        samples = self.step.samples
        rewards = self.task.reward(for_every_sample(problems, samples), trajectory.tokens, trajectory.lengths)
        return self._handed_out(state, trajectory, rewards)

    def _handed_out(self, state: RolloutState, trajectory: Trajectory, rewards: Float[Array, "b"]) -> Float[Array, "b"]:
        """The rewards as they are given to the responses: their own, or shuffled."""
        if not self.shuffle_rewards:
            return rewards
        key = jax.random.fold_in(jax.random.key(self.step.seed), state.updates + state.behind)
        return shuffle_within_groups(rewards, self.step.samples, key, trajectory.prompts.row_ids)

    @cached_property
    def dynamic_sampling(self) -> DynamicSampling | None:
        """How the batch of a step is filled; None where it is one rollout."""
        most = self.step.update_config.dynamic_sampling
        return DynamicSampling(most, self.groups, self.step.samples, self.mesh) if most else None

    def _sample(self, served: RolloutState) -> tuple[Trajectory, Array]:
        prompts, problems = self.issue(served)
        trajectory = self.rollout(served, prompts)
        return trajectory, self.reward(served, problems, trajectory)

    def _one_step(self, state: GrpoState, _: None) -> tuple[GrpoState, tuple[Any, Trajectory, Array]]:
        served, sampled = self.gather(state), dict[str, Array]()
        if self.dynamic_sampling is None:
            trajectory, rewards = self._sample(served)
        else:
            drawn = self.dynamic_sampling.filled(self._sample, served)
            trajectory, rewards = drawn.trajectory, drawn.rewards
            state, sampled = self.dynamic_sampling.past(state, drawn), self.dynamic_sampling.metrics(drawn)
        state, metrics, examples = self.update(state, trajectory, self.prepare(state, trajectory), rewards)
        state, draft_metrics = self.update_drafter(state, trajectory, examples)
        return state, (metrics | draft_metrics | sampled, trajectory, rewards)

    def scanned(self, steps: int) -> Any:
        """`steps` whole steps in one program: `state -> (state, (metrics, trajectories, rewards))`, steps first.

        The state that goes in is overwritten.
        """

        def run(state: GrpoState) -> Any:
            state, outputs = lax.scan(self._one_step, state, None, length=steps)
            return self._kept(state), outputs

        return jax.jit(run, donate_argnums=0)

    @cached_property
    def issue(self) -> Callable[[RolloutState], tuple[Prompts, Any]]:
        """Next prompts of an in-graph task, and what its reward judges by."""
        return self._on_rows(self._issue, (P(),), (P(ROWS), P(ROWS)))

    @cached_property
    def prefill(self) -> Callable[[RolloutState, Prompts], Any]:
        """The first part of `rollout` alone, for its time."""

        def run(state: RolloutState, prompts: Prompts) -> Any:
            draft = state.draft if self.step.engine.speculative else None
            keys = self.step.noise_keys(state, prompts)
            return self.step.engine.start(state.params, draft, prompts, keys, state.control).rows

        return self._on_rows(run, (P(), P(ROWS)), P(ROWS))

    @cached_property
    def rollout(self) -> Callable[[RolloutState, Prompts], Trajectory]:
        """Responses to prompts; the state comes from `gather`."""
        return self._on_rows(self.step.rollout, (P(), P(ROWS)), trajectory_specs(P(ROWS)))

    @cached_property
    def reward(self) -> Callable[[RolloutState, Any, Trajectory], Array]:
        """Rewards of an in-graph task."""
        specs = (P(), P(ROWS), trajectory_specs(P(ROWS)))
        return self._on_rows(self._reward, specs, P(ROWS))

    @cached_property
    def hand_out(self) -> Callable[[RolloutState, Trajectory, Float[Array, "b"]], Float[Array, "b"]]:
        """Rewards from the host as they are given to the responses."""
        specs = (P(), trajectory_specs(P(ROWS)), P(ROWS))
        return self._on_rows(self._handed_out, specs, P(ROWS))

    @cached_property
    def add(self) -> Callable[[Drawn | None, Trajectory, Float[Array, "b"]], Drawn]:
        """The batch of dynamic sampling with one more rollout."""
        assert self.dynamic_sampling is not None
        return jax.jit(self.dynamic_sampling.added)

    @cached_property
    def prepare(self) -> Callable[[GrpoState, Trajectory], Any]:
        """Old and reference log-probs."""
        on_rows = over_mesh(self.mesh, self.step.prepare, (P(), trajectory_specs(P(ROWS))), P(ROWS))

        def run(state: GrpoState, trajectory: Trajectory) -> Any:
            lean = replace(state, opt_state=None, draft_opt_state=None, draft=None)
            params, reference = self._policy_layout.gather((state.params, state.reference))
            return on_rows(replace(lean, params=params, reference=reference), trajectory)

        return jax.jit(run)

    @cached_property
    def compiled_update(self) -> Any:
        """`update` on `to_update`; the policy and its optimizer's state are overwritten."""

        def run(owned: tuple[PolicyParams, Any], lean: GrpoState, *args: Any) -> Any:
            state = replace(lean, params=owned[0], opt_state=owned[1])
            state, metrics, examples = self.step.update(self.mesh, state, *args)
            return self._kept(state), metrics, examples

        return jax.jit(run, donate_argnums=0)

    def to_update(self, state: GrpoState, *args: Any) -> tuple[Any, ...]:
        """What `compiled_update` takes: without what it leaves alone, which it would copy."""
        lean = replace(state, params=None, opt_state=None, draft_opt_state=None, reference=None)  # type: ignore[arg-type]
        return (state.params, state.opt_state), lean, *args

    def after_update(self, before: GrpoState, after: GrpoState) -> GrpoState:
        """What `compiled_update` returns, with what it left alone."""
        return replace(after, draft_opt_state=before.draft_opt_state, reference=before.reference)

    def update(
        self, state: GrpoState, trajectory: Trajectory, prepared: Any, rewards: Float[Array, "b"]
    ) -> tuple[GrpoState, dict[str, Array], DraftExamples | None]:
        """Policy updates: the new state, metrics, examples for the draft head.

        The old policy and its optimizer's state are overwritten, and so is what `gather` gave where it copied nothing.
        """
        after, metrics, examples = self.compiled_update(*self.to_update(state, trajectory, prepared, rewards))
        return self.after_update(state, after), metrics, examples

    @cached_property
    def compiled_draft_update(self) -> Any:
        """`update_drafter` on `to_update_drafter`: the drafter, its optimizer's state and metrics."""

        def run(*args: Any) -> Any:
            state, metrics = self.step.update_drafter(self.mesh, *args)
            state = self._kept(state)
            return state.draft, state.draft_opt_state, metrics

        return jax.jit(run)

    def to_update_drafter(self, state: GrpoState, *args: Any) -> tuple[Any, ...]:
        """What `compiled_draft_update` takes."""
        return replace(state, opt_state=None, reference=None), *args

    def update_drafter(
        self, state: GrpoState, trajectory: Trajectory, examples: DraftExamples | None
    ) -> tuple[GrpoState, dict[str, Array]]:
        """One step of the draft head."""
        args = self.to_update_drafter(state, trajectory, examples)
        draft, draft_opt_state, metrics = self.compiled_draft_update(*args)
        return replace(state, draft=draft, draft_opt_state=draft_opt_state), metrics
