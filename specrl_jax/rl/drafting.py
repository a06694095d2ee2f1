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
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.draft_losses import DraftBatch, DraftLossConfig
from specrl_jax.drafters.heads import HeadConfig, HeadParams, head_counts, head_loss
from specrl_jax.models.numerics import isolated
from specrl_jax.models.params import PolicyParams
from specrl_jax.parallel.mesh import DATA
from specrl_jax.rl.microbatches import MicrobatchConfig, over_microbatches, sorted_order
from specrl_jax.rl.optimizers import OptimizerConfig, apply_gradients, make_optimizer
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.trajectory import Sequences


@struct.dataclass
class DraftExamples:
    """batch: sequences of the policy with what its forward leaves for the head. lengths: their tokens, `[b]`."""

    batch: DraftBatch
    lengths: Int[Array, "b"]


@dataclass(frozen=True)
class DraftTraining:
    """How the head is trained.

    scorer: the policy's forward that supplies features and teacher.
    head: architecture of the head.
    loss: unroll and weights of its steps.
    optimizer: the head's own, clip included.
    microbatch: sequences per microbatch.
    """

    scorer: Scorer
    head: HeadConfig
    loss: DraftLossConfig
    optimizer: OptimizerConfig
    microbatch: MicrobatchConfig

    def init(self, params: HeadParams) -> Any:
        """Optimizer state of a head."""
        return self._optimizer.init(params.weights)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.optimizer)

    def examples(self, policy: PolicyParams, sequences: Sequences) -> DraftExamples:
        """Features and teacher of sequences from a policy forward of their own (offline training)."""

        def read(policy: PolicyParams, micro: Sequences) -> tuple[Any, Any]:
            scores = self.scorer.score(policy, micro, self.head.boundaries)
            return (), (scores.features, scores.log_law)

        _, (features, log_law) = over_microbatches(read, policy, sequences, sequences.lengths, self.microbatch)
        ordered = jax.tree.map(lambda x: x[sorted_order(sequences.lengths)], sequences)
        batch = DraftBatch(ordered.tokens, features, log_law, ordered.mask)
        return DraftExamples(batch, ordered.lengths)

    def update(
        self, params: HeadParams, opt_state: Any, embed: Float[Array, "v d"], examples: DraftExamples
    ) -> tuple[HeadParams, Any, dict[str, Array]]:
        """One optimizer step, gradients summed over the mesh's data axis.

        Returns:
            The head, its optimizer state, and `draft_loss`, `draft_grad_norm`, and per step of the
            unroll `draft_agreement` and `draft_overlap`.
        """
        counts = lax.psum(head_counts(self.head, params, examples.batch, self.loss), DATA)

        def gradients(weights: Any, micro: DraftBatch) -> tuple[Any, Any]:
            value = jax.value_and_grad(head_loss, has_aux=True)
            return value(weights, params, embed, micro, self.head, self.loss, counts), ()

        sums, _ = over_microbatches(gradients, params.weights, examples.batch, examples.lengths, self.microbatch)
        (loss, metrics), grads = lax.psum(sums, DATA)

        def apply(weights: Any, opt_state: Any, grads: Any) -> Any:
            return apply_gradients(self._optimizer, weights, opt_state, grads)

        weights, opt_state, norm = isolated(apply, params.weights, opt_state, grads)
        report = {
            "draft_loss": loss,
            "draft_grad_norm": norm,
            "draft_agreement": metrics.agreement,
            "draft_overlap": metrics.overlap,
        }
        return dataclasses.replace(params, weights=weights), opt_state, jax.tree.map(jnp.asarray, report)
