"""Training of the draft head: one optimizer step on sequences of the policy.

The head has its own optimizer and its own clip; nothing of it reaches the policy's gradient.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.drafters.draft_losses import DraftBatch, DraftLossConfig, Shared, teacher
from specrl_jax.drafters.heads import HeadConfig, HeadParams, head_counts, head_loss
from specrl_jax.errors import InputError
from specrl_jax.models.numerics import isolated
from specrl_jax.models.params import PolicyParams
from specrl_jax.parallel.sharding import ROWS, Layout, over_mesh, sum_over_rows
from specrl_jax.rl.microbatches import MicrobatchConfig, in_given_order, over_microbatches, sorted_order
from specrl_jax.rl.optimizers import OptimizerConfig, advance, make_optimizer, skipped_updates
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.trajectory import Sequences


@struct.dataclass
class DraftExamples:
    """batch: sequences of the policy with what its forward leaves for the head. lengths: their tokens, `[b]`."""

    batch: DraftBatch
    lengths: Int[Array, "b"]


@struct.dataclass
class DraftOptState:
    """What the training of a head carries besides the weights that draft.

    optimizer: its own state.
    weights, mean: those that are trained, where an average drafts, and that average in float32, which a small step must
        not be rounded out of; else None.
    best, recent: acceptance lengths, by which a stale head is found; 0 before there are any.
    """

    optimizer: Any
    weights: Any
    mean: Any
    best: Float[Array, ""]
    recent: Float[Array, ""]


@dataclass(frozen=True)
class DraftTraining:
    """How the head is trained.

    scorer: the policy's forward that supplies features and teacher.
    head: architecture of the head.
    loss: unroll and weights of its steps.
    optimizer: the head's own, clip included.
    microbatch: sequences per microbatch.
    average: share that the served weights keep of themselves at every update, an exponential moving average of the
        trained ones; 0 to serve the trained ones.
    tolerance: train only while the acceptance length is below its best by more than this share; 0 to train always.
    """

    scorer: Scorer
    head: HeadConfig
    loss: DraftLossConfig
    optimizer: OptimizerConfig
    microbatch: MicrobatchConfig
    average: float = 0.0
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        for name in ("average", "tolerance"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"draft {name} is {getattr(self, name)}; choose a share from 0 to below 1")

    def init(self, params: HeadParams) -> DraftOptState:
        """The state of a head before its first update."""
        weights, mean = None, None
        if self.average:
            weights, mean = params.weights, jax.tree.map(lambda x: x.astype(jnp.float32), params.weights)
        none = jnp.float32(0.0)
        return DraftOptState(self._optimizer.init(params.weights), weights, mean, none, none)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.optimizer)

    def examples(self, policy: PolicyParams, sequences: Sequences) -> DraftExamples:
        """Features and teacher of sequences from a policy forward of their own (offline training)."""

        def read(policy: PolicyParams, micro: Sequences) -> tuple[Any, Any]:
            scores = self.scorer.score(policy, micro, self.head.boundaries)
            return (), (scores.features, scores.states)

        _, (features, states) = over_microbatches(read, policy, sequences, sequences.lengths, self.microbatch)
        ordered = jax.tree.map(lambda x: x[sorted_order(sequences.lengths)], sequences)
        batch = DraftBatch(ordered.tokens, features, states, ordered.mask)
        return DraftExamples(batch, ordered.lengths)

    def noted(self, state: DraftOptState, accepted: Float[Array, ""]) -> tuple[DraftOptState, Bool[Array, ""]]:
        """The state after a rollout of such acceptance length, and whether the head has gone stale."""
        recent = jnp.where(state.best > 0.0, 0.5 * (state.recent + accepted), accepted)
        stale = recent < (1.0 - self.tolerance) * state.best
        # What was best fades while the head learns: a policy that has become less certain allows no more than it
        # allows. It stays while the head rests, or a slow decline would never be seen.
        best = jnp.maximum(recent, jnp.where(stale, 0.99, 1.0) * state.best)
        return dataclasses.replace(state, best=best, recent=recent), stale

    def update(
        self,
        mesh: Mesh,
        params: HeadParams,
        state: DraftOptState,
        shared: Shared,
        examples: DraftExamples,
        accepted: Float[Array, ""] | None = None,
    ) -> tuple[HeadParams, DraftOptState, dict[str, Array]]:
        """One optimizer step, gradients summed over the mesh; none where the head drafts well enough.

        Args:
            mesh: over which the examples are split.
            params, state: of the head.
            shared: the policy's embedding and output rows.
            examples: what the head learns from.
            accepted: acceptance length of the newest rollout, the same on all devices; None offline.

        Returns:
            The head, its state, and `draft_loss`, `draft_grad_norm`, `draft_skipped_updates` (in all) and
            `draft_skipped_in_a_row`, per step of the unroll `draft_agreement` and `draft_overlap`, and where it may be
            left out whether there was an update, `draft_updated` (the others are NaN where there was none).
        """
        if accepted is None or not self.tolerance:
            return self._update(mesh, params, state, shared, examples)
        state, stale = self.noted(state, accepted)

        def train(params: HeadParams, state: DraftOptState) -> Any:
            return self._update(mesh, params, state, shared, examples)

        def leave(params: HeadParams, state: DraftOptState) -> Any:
            shapes = jax.eval_shape(train, params, state)[2]
            return params, state, jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)

        params, state, report = lax.cond(stale, train, leave, params, state)
        return params, state, report | {"draft_updated": stale.astype(jnp.float32)}

    def _update(
        self, mesh: Mesh, params: HeadParams, state: DraftOptState, shared: Shared, examples: DraftExamples
    ) -> tuple[HeadParams, DraftOptState, dict[str, Array]]:
        layout = Layout(mesh, self.head.num_kv_heads)
        weights = state.weights if self.average else params.weights
        gradients = over_mesh(mesh, self._summed_gradients, (P(), P(), P(), P(ROWS)), P())
        (loss, metrics), grads = gradients(*layout.gather((weights, params)), shared, examples)

        weights, optimizer, norm = advance(self._optimizer, weights, state.optimizer, layout.keep(grads))
        weights, optimizer = layout.keep((weights, optimizer))
        state = dataclasses.replace(state, optimizer=optimizer)
        if self.average:
            mean = layout.keep(isolated(self._averaged, state.mean, weights))
            state = dataclasses.replace(state, weights=weights, mean=mean)
            weights = jax.tree.map(lambda x, like: x.astype(like.dtype), mean, weights)
        skipped = skipped_updates(optimizer)
        report = {
            "draft_loss": loss,
            "draft_grad_norm": norm,
            "draft_skipped_updates": skipped[0].astype(jnp.float32),
            "draft_skipped_in_a_row": skipped[1].astype(jnp.float32),
            "draft_agreement": metrics.agreement,
            "draft_overlap": metrics.overlap,
        }
        return dataclasses.replace(params, weights=weights), state, jax.tree.map(jnp.asarray, report)

    def _summed_gradients(self, weights: Any, params: HeadParams, shared: Shared, examples: DraftExamples) -> Any:
        """Loss with its metrics, and gradient, over the mesh."""

        def read(shared: Shared, micro: DraftBatch) -> tuple[Any, Any]:
            law = teacher(micro, shared.head, self.loss.chunk)
            return head_counts(self.head, params, shared, dataclasses.replace(micro, law=law), self.loss), law

        def over(fn: Any, weights: Any, batch: DraftBatch) -> tuple[Any, Any]:
            return over_microbatches(fn, weights, batch, examples.lengths, self.microbatch)

        counts, law = over(read, shared, examples.batch)
        counts = sum_over_rows(counts)
        batch = dataclasses.replace(examples.batch, law=in_given_order(law, examples.lengths))

        def gradients(weights: Any, micro: DraftBatch) -> tuple[Any, Any]:
            value = jax.value_and_grad(head_loss, has_aux=True)
            return value(weights, params, shared, micro, self.head, self.loss, counts), ()

        return sum_over_rows(over(gradients, weights, batch)[0])

    def _averaged(self, mean: Any, weights: Any) -> Any:
        keep = self.average
        return jax.tree.map(lambda m, x: keep * m + (1.0 - keep) * x.astype(jnp.float32), mean, weights)
