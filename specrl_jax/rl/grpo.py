"""The GRPO step: rollout, verification and policy update in one pure function.

1. Roll out a group of responses to every prompt (`rollout/engine.py`).
2. Reward them and compare each with its group.
3. Update the policy on disjoint minibatches of groups, one or more epochs.
4. Update the draft head on what the policy's forwards of step 3 left behind.

Rollouts and gradients run under `shard_map` (`parallel/sharding.py`): every device
has rows of its own, and the only communication by hand is the sum of gradients and
counts. Optimizers run between them on parameters as they are stored. `GrpoProgram`
composes the pieces for `lax.scan`; a host reward, or a timed step, runs the same
pieces in turn. Every piece computes inside loops of its own, so both ways give the
same bits.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt32

from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.combined import head_of, history_of, with_head, with_history
from specrl_jax.drafters.draft_losses import DraftBatch
from specrl_jax.drafters.heads import shared_with_head, with_rows_of
from specrl_jax.drafters.suffix import remember
from specrl_jax.errors import InputError
from specrl_jax.models.numerics import isolated, opaque_int
from specrl_jax.models.params import PolicyParams
from specrl_jax.parallel.sharding import ROWS, Layout, over_mesh, replicated, sum_over_rows
from specrl_jax.rl.advantages import Baseline, group_advantages, has_contrast, zero_advantage_groups
from specrl_jax.rl.drafting import DraftExamples, DraftTraining
from specrl_jax.rl.losses import LossConfig, loss_denominator, policy_loss
from specrl_jax.rl.microbatches import MicrobatchConfig, over_microbatches, slots
from specrl_jax.rl.optimizers import OptimizerConfig, advance, make_optimizer, skipped_updates
from specrl_jax.rl.overlong import Truncated, overlong_penalty
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.control import Control, merge
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.noise import sequence_keys
from specrl_jax.rollout.trajectory import Sequences, Trajectory, to_sequences, trajectory_specs


@dataclass(frozen=True)
class UpdateConfig:
    """loss: clip range, KL weight, aggregation.

    optimizer: the policy's.
    microbatch: sequences per gradient accumulation step, per device.
    updates_per_rollout: disjoint minibatches of groups, each with an optimizer step.
    epochs: passes over them.
    baseline, normalize_std: of the advantages (`rl/advantages.py`).
    overlong_buffer: tokens before the most there may be in which a penalty joins the reward (`rl/overlong.py`), 0
        for none.
    truncated: "mask" leaves the tokens of truncated responses out of the loss and its denominator (overlong filtering
        of DAPO). Their rewards count in the baseline of their group all the same: they are draws of the policy like
        the others, and a baseline of those that ended would not be its mean.
    dynamic_sampling: rollouts per step at most, to fill the batch with groups whose rewards differ
        (`rl/dynamic_sampling.py`); the other groups then are no part of the loss and its denominator. 0 keeps them.
    recompute_logprobs: take old log-probs from a training forward instead of the rollout.
    draft_sequences: sequences per microbatch that also train the draft head, 0 for none.
    draft_microbatches: microbatches of an update that leave such sequences, spread evenly over their lengths; what they
        leave is kept until the head's update, `(features + 1) * width` numbers a token. 0: all.
    """

    loss: LossConfig
    optimizer: OptimizerConfig
    microbatch: MicrobatchConfig
    updates_per_rollout: int = 1
    epochs: int = 1
    baseline: Baseline = "mean"
    normalize_std: bool = True
    overlong_buffer: int = 0
    truncated: Truncated = "keep"
    dynamic_sampling: int = 0
    recompute_logprobs: bool = False
    draft_sequences: int = 0
    draft_microbatches: int = 0

    def __post_init__(self) -> None:
        for name in ("updates_per_rollout", "epochs"):
            if getattr(self, name) < 1:
                raise InputError(f"update {name} is {getattr(self, name)}; it must be at least 1")
        for name in ("overlong_buffer", "dynamic_sampling"):
            if getattr(self, name) < 0:
                raise InputError(f"update {name} is {getattr(self, name)}; it must be at least 0 (none)")
        for name, choices in (("baseline", get_args(Baseline)), ("truncated", get_args(Truncated))):
            if getattr(self, name) not in choices:
                raise InputError(f"update {name} is {getattr(self, name)!r}; choose {' or '.join(choices)}")
        if not 0 <= self.draft_sequences <= self.microbatch.rows:
            raise InputError(
                f"update draft_sequences is {self.draft_sequences}; choose 0 to {self.microbatch.rows}, the microbatch"
            )
        if self.draft_microbatches < 0:
            raise InputError(f"update draft_microbatches is {self.draft_microbatches}; it must be at least 0 (all)")

    def leaving(self, sequences: int) -> int:
        """Microbatches of an update of so many sequences that leave examples for the draft head."""
        return min(self.draft_microbatches or sequences, sequences // self.microbatch.rows)


@struct.dataclass
class GrpoState:
    """Everything a run carries from step to step.

    params, opt_state: the policy and its optimizer.
    draft, draft_opt_state: the drafter's parameters (head, earlier responses, both or None), and the head's optimizer.
    reference: the policy of the KL penalty, or None.
    updates: optimizer steps of the policy so far; part of the noise key of the next rollout.
    issued: prompts that it has learned from so far, or dropped, the global problem counter.
    control: the draft-length controller, its cost table included; None where the draft length is fixed.
    """

    params: PolicyParams
    opt_state: Any
    draft: Any
    draft_opt_state: Any
    reference: PolicyParams | None
    updates: Int[Array, ""]
    issued: Array
    control: Control | None = None


@struct.dataclass
class RolloutState:
    """What a rollout reads of a run.

    params, draft: policy and drafter in a rollout's layout.
    updates: optimizer steps of that policy so far, its version.
    behind: optimizer steps that it lacks of the policy that will learn from the rollout; 0 in a synchronous run.
    attempt: rollouts of the same step before this one.
    issued: prompts issued before.
    control: as in `GrpoState`.
    """

    params: PolicyParams
    draft: Any
    updates: Int[Array, ""]
    behind: Int[Array, ""]
    attempt: Int[Array, ""]
    issued: Array
    control: Control | None = None


Prepared = tuple[Sequences, Float[Array, "b t"] | None]
"""Sequences with their old log-probs, and those of the reference where there is one."""


@struct.dataclass
class Minibatch:
    """Sequences with what the loss reads besides the policy.

    counted: sequences whose tokens are part of the loss; the draft head learns from the others too.
    """

    sequences: Sequences
    counted: Bool[Array, "b"]
    advantages: Float[Array, "b"]
    ref_log_probs: Float[Array, "b t"] | None

    @property
    def mask(self) -> Bool[Array, "b t"]:
        """Tokens of the loss."""
        return self.sequences.mask & self.counted[:, None]


@dataclass(frozen=True)
class GrpoStep:
    """The static part of a step. All methods are pure; all but those that take the mesh run inside `shard_map`.

    engine, scorer: rollout and training forward. They share the sampling law, unless the loss is on the full law.
    seed: of the rollout noise.
    couple_epochs: leave the update index out of the noise key, so that a prompt has the same noise in every epoch.
    """

    engine: RolloutEngine
    scorer: Scorer
    update_config: UpdateConfig
    drafting: DraftTraining | None
    seed: int
    couple_epochs: bool = False

    def __post_init__(self) -> None:
        exact = self.engine.config.rule.exact
        if self.couple_epochs and self.engine.config.rule.needs_laws:
            raise InputError(
                "couple_epochs belongs to match verification: other rules would judge a response "
                "by the very coins that made it; leave it out"
            )
        if self.couple_epochs and self.update_config.dynamic_sampling:
            raise InputError(
                "couple_epochs gives a prompt one noise whenever it comes, and dynamic_sampling may bring it twice "
                "in a step; leave one of them out"
            )
        buffer, longest = self.update_config.overlong_buffer, self.engine.config.max_new_tokens
        if buffer > longest:
            raise InputError(f"overlong_buffer is {buffer}, above max_new_tokens {longest}; lower it")
        if not exact and self.update_config.loss.importance_cap == 0:
            raise InputError(
                "lenience changes the law of the responses; correct for it with loss importance_cap (2 is usual)"
            )
        if self.scorer.law.filtered != self.engine.config.law.filtered and self.update_config.loss.importance_cap == 0:
            raise InputError(
                "the loss is on the full law but responses are drawn from a filtered one; "
                "correct for it with loss importance_cap (2 is usual)"
            )

    def init(
        self,
        params: PolicyParams,
        draft: Any = None,
        reference: PolicyParams | None = None,
        control: Control | None = None,
    ) -> GrpoState:
        """The state before the first step."""
        draft_opt_state = None
        if head_of(draft) is not None and self.drafting is not None:
            draft_opt_state = self.drafting.init(head_of(draft))
        return GrpoState(
            params=params,
            opt_state=self._optimizer.init(params),
            draft=draft,
            draft_opt_state=draft_opt_state,
            reference=reference,
            updates=jnp.int32(0),
            issued=jnp.uint32(0),
            control=control,
        )

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.update_config.optimizer)

    @property
    def samples(self) -> int:
        """Responses per prompt."""
        return self.engine.config.samples_per_prompt

    def noise_keys(self, state: RolloutState, prompts: Prompts) -> UInt32[Array, "b 2"]:
        """Noise key of every sequence of the next rollout."""
        samples = jnp.tile(jnp.arange(self.samples, dtype=jnp.int32), prompts.tokens.shape[0])
        row_ids = jnp.repeat(prompts.row_ids, self.samples)
        update = jnp.int32(0) if self.couple_epochs else state.updates + state.behind
        return sequence_keys(self.seed, "rollout", update, row_ids, samples, state.attempt)

    def rollout(self, state: RolloutState, prompts: Prompts) -> Trajectory:
        """Responses to the prompts of this device; speculation counts are summed over the mesh."""
        keys = self.noise_keys(state, prompts)
        draft = state.draft if self.engine.speculative else None
        trajectory = self.engine.rollout(state.params, draft, prompts, keys, control=state.control)
        totals = sum_over_rows((trajectory.stats, trajectory.entropy_sum))
        control = trajectory.control
        if control is not None and state.control is not None:
            control = merge(state.control, control)
        version = jnp.full(trajectory.lengths.shape, state.updates)
        return dataclasses.replace(trajectory, stats=totals[0], entropy_sum=totals[1], control=control, version=version)

    def prepare(self, state: GrpoState, trajectory: Trajectory) -> Prepared:
        """Sequences with their old log-probs as configured, and the reference's where there is one."""
        sequences, microbatch = to_sequences(trajectory), self.update_config.microbatch
        corrected = self.update_config.loss.importance_cap > 0
        if self.update_config.recompute_logprobs or corrected:
            old = self.scorer.log_probs(state.params, sequences, microbatch)
            behaviour = sequences.log_probs if corrected else None
            old = jnp.where(sequences.mask, old, 0.0)
            sequences = dataclasses.replace(sequences, log_probs=old, behaviour=behaviour)
        if state.reference is None:
            return sequences, None
        return sequences, self.scorer.log_probs(state.reference, sequences, microbatch)

    def _gradients(self, params: PolicyParams, micro: Minibatch, denominator: Float[Array, ""]) -> tuple[Any, Any]:
        """Gradient and metrics of one microbatch, and what its first sequences leave for the draft head."""
        kept = self.update_config.draft_sequences
        boundaries = self.drafting.head.boundaries if self.drafting is not None and kept else ()

        def loss(params: PolicyParams) -> tuple[Array, tuple[Any, Any]]:
            scores = self.scorer.score(params, micro.sequences, boundaries)
            value, metrics = policy_loss(
                scores.log_probs,
                micro.sequences.log_probs,
                micro.advantages,
                micro.mask,
                self.update_config.loss,
                micro.ref_log_probs,
                denominator,
                micro.sequences.behaviour,
            )
            return value, (metrics, (scores.features, scores.states))

        (value, (metrics, taught)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        left = None
        if self.drafting is not None and boundaries:
            sequences, (features, states) = jax.tree.map(lambda x: x[:kept], (micro.sequences, taught))
            batch = DraftBatch(sequences.tokens, features, states, sequences.mask)
            left = DraftExamples(batch, sequences.lengths)
        return (grads, value, metrics), left

    def _begin(
        self, params: PolicyParams, trajectory: Trajectory, prepared: Prepared, rewards: Float[Array, "b"]
    ) -> tuple[Minibatch, Any, dict[str, Array], dict[str, Array]]:
        """What the updates read; room for the draft head's examples of all of them; zero metrics; those of rewards."""
        sequences, ref_log_probs = prepared
        shaped, advantages = isolated(self._credit, rewards, trajectory.lengths, trajectory.ended)
        counted = self._counted(trajectory, rewards)
        whole, config = Minibatch(sequences, counted, advantages, ref_log_probs), self.update_config
        micro = jax.tree.map(lambda x: x[: config.microbatch.rows], whole)
        (_, _, means), left = jax.eval_shape(self._gradients, params, micro, jnp.float32(1.0))
        metrics = {name: jnp.float32(0.0) for name in (*means, "loss", "grad_norm", "padding_fraction")}
        count = config.updates_per_rollout * config.leaving(rewards.shape[0] // config.updates_per_rollout)
        room = jax.tree.map(lambda s: jnp.zeros((count * s.shape[0], *s.shape[1:]), s.dtype), left)
        return whole, room, metrics, self._reward_metrics(trajectory, rewards, shaped)

    def _credit(
        self, rewards: Float[Array, "b"], lengths: Int[Array, "b"], ended: Bool[Array, "b"]
    ) -> tuple[Float[Array, "b"], Float[Array, "b"]]:
        """Rewards with the overlong penalty, and advantages."""
        config = self.update_config
        if config.overlong_buffer:
            longest = self.engine.config.max_new_tokens
            rewards = rewards + overlong_penalty(lengths, ended, longest, config.overlong_buffer)
        advantages = group_advantages(
            rewards, self.samples, baseline=config.baseline, normalize_std=config.normalize_std
        )
        return rewards, advantages

    def _counted(self, trajectory: Trajectory, rewards: Float[Array, "b"]) -> Bool[Array, "b"]:
        """Responses whose tokens are part of the loss.

        Whether a group is dropped is decided by the task's rewards alone (DAPO, eq. 11).
        """
        counted = jnp.ones_like(trajectory.ended)
        if self.update_config.truncated == "mask":
            counted &= trajectory.ended
        if self.update_config.dynamic_sampling:
            counted &= jnp.repeat(has_contrast(rewards, self.samples), self.samples)
        return counted

    def _summed_gradients(
        self, params: PolicyParams, whole: Minibatch, left: Any, i: Int[Array, ""]
    ) -> tuple[PolicyParams, dict[str, Array], Any]:
        """Gradient and metrics of an update over the mesh, and the draft head's examples with those of this update."""
        part = i % self.update_config.updates_per_rollout
        size = whole.advantages.shape[0] // self.update_config.updates_per_rollout
        mini = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, part * size, size), whole)
        denominator = sum_over_rows(loss_denominator(mini.mask, self.update_config.loss))
        sums, new_left = over_microbatches(
            lambda params, micro: self._gradients(params, micro, denominator),
            params,
            mini,
            mini.sequences.lengths,
            self.update_config.microbatch,
            self.update_config.leaving(size),
        )
        grads, value, means = sum_over_rows(sums)
        left = jax.tree.map(
            lambda all_, x: lax.dynamic_update_slice_in_dim(all_, x, part * x.shape[0], 0), left, new_left
        )
        lengths = mini.sequences.lengths
        computed = slots(lengths, mini.sequences.tokens.shape[1], self.update_config.microbatch).astype(jnp.float32)
        computed, needed = sum_over_rows((computed, jnp.sum(lengths, dtype=jnp.float32)))
        metrics = {name: mean.value for name, mean in means.items()}
        return grads, metrics | {"loss": value, "padding_fraction": 1.0 - needed / computed}, left

    def over_rows(self, mesh: Mesh) -> tuple[Any, Any]:
        """The parts of an update that every device computes on its own rows: what comes first, and gradients."""
        rows = P(ROWS)
        begin = over_mesh(mesh, self._begin, (P(), trajectory_specs(rows), rows, rows), (rows, rows, P(), P()))
        return begin, over_mesh(mesh, self._summed_gradients, (P(), rows, rows, P()), (P(), P(), rows))

    def update(
        self, mesh: Mesh, state: GrpoState, trajectory: Trajectory, prepared: Prepared, rewards: Float[Array, "b"]
    ) -> tuple[GrpoState, dict[str, Array], DraftExamples | None]:
        """Policy updates on one rollout; `prepared` comes from `prepare`.

        Returns:
            The new state, metrics averaged over the updates, and the draft head's examples from
            the last epoch (None where it is not trained).
        """
        layout = Layout(mesh, self.engine.policy.num_kv_heads)
        begin, gradients = self.over_rows(mesh)
        whole, left, metrics, earned = begin(layout.gather(state.params), trajectory, prepared, rewards)

        def one_update(i: Int[Array, ""], carry: Any) -> Any:
            params, opt_state, metrics, left = carry
            grads, new, left = gradients(layout.gather(params), whole, left, i)
            params, opt_state, norm = advance(self._optimizer, params, opt_state, layout.keep(grads))
            metrics = jax.tree.map(jnp.add, metrics, new | {"grad_norm": norm})
            return layout.keep(params), layout.keep(opt_state), metrics, left

        count = self.update_config.updates_per_rollout * self.update_config.epochs
        start = (state.params, state.opt_state, metrics, left)
        params, opt_state, metrics, left = lax.fori_loop(0, opaque_int(count), one_update, start)
        metrics = {name: total / count for name, total in metrics.items()}
        new_state = dataclasses.replace(
            state,
            params=params,
            opt_state=opt_state,
            draft=self._draft_after(mesh, state.draft, params, trajectory),
            updates=state.updates + count,
            control=trajectory.control,
            issued=state.issued + jnp.uint32(trajectory.prompts.lengths.shape[0]),
        )
        in_all, in_a_row = skipped_updates(opt_state)
        skipped = {"skipped_updates": in_all, "skipped_in_a_row": in_a_row}
        return new_state, metrics | earned | skipped, left

    def _draft_after(self, mesh: Mesh, draft: Any, params: PolicyParams, trajectory: Trajectory) -> Any:
        """The drafter's parameters after the policy's update.

        With what it shares with the policy, and with the responses of all devices among the earlier ones.
        """
        head = head_of(draft)
        if head is not None:
            draft = with_head(draft, with_rows_of(head, params))
        history = history_of(draft)
        if history is None:
            return draft
        newest = (trajectory.prompts.row_ids, trajectory.tokens, trajectory.lengths)
        return with_history(draft, remember(history, *lax.with_sharding_constraint(newest, replicated(mesh))))

    def _reward_metrics(
        self, trajectory: Trajectory, rewards: Float[Array, "b"], shaped: Float[Array, "b"]
    ) -> dict[str, Array]:
        """Means over the whole batch of what the rollout earned."""
        sums = {
            "reward_mean": jnp.sum(rewards),
            "truncated_fraction": jnp.sum(~trajectory.ended, dtype=jnp.float32),
            "response_length": jnp.sum(trajectory.lengths, dtype=jnp.float32),
            "zero_advantage_groups": zero_advantage_groups(shaped, self.samples).astype(jnp.float32),
        }
        if self.update_config.overlong_buffer:
            sums["reward_shaped_mean"] = jnp.sum(shaped)
            sums["overlong_fraction"] = jnp.sum(shaped < rewards, dtype=jnp.float32)
        count = jnp.float32(rewards.shape[0])
        sums, count = sum_over_rows((sums, count))
        groups = sums.pop("zero_advantage_groups")
        return {name: total / count for name, total in sums.items()} | {"zero_advantage_groups": groups}

    def update_drafter(
        self, mesh: Mesh, state: GrpoState, trajectory: Trajectory, examples: DraftExamples | None
    ) -> tuple[GrpoState, dict[str, Array]]:
        """One optimizer step of the draft head; the state as it is where the head is not trained."""
        head = head_of(state.draft)
        if self.drafting is None or examples is None or head is None:
            return state, {}
        stats = trajectory.stats
        accepted = 1.0 + stats.accepted.astype(jnp.float32) / jnp.maximum(stats.rounds, 1).astype(jnp.float32)
        shared = Layout(mesh, self.engine.policy.num_kv_heads).gather(shared_with_head(state.params))
        head, opt_state, metrics = self.drafting.update(mesh, head, state.draft_opt_state, shared, examples, accepted)
        return dataclasses.replace(state, draft=with_head(state.draft, head), draft_opt_state=opt_state), metrics
