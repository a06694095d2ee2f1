"""Offline training of the draft head on the policy's own rollouts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from specrl_jax.drafters.heads import HeadParams, shared_with_head
from specrl_jax.models.params import PolicyParams
from specrl_jax.parallel.sharding import ROWS, Layout, over_mesh
from specrl_jax.rl.drafting import DraftTraining
from specrl_jax.rollout.trajectory import Sequences


@struct.dataclass
class DraftState:
    """draft, opt_state: the head and its optimizer. step: updates so far."""

    draft: HeadParams
    opt_state: Any
    step: Int[Array, ""]


@dataclass(frozen=True)
class OfflineDraftTraining:
    """training: loss and optimizer of the head.

    sequences: rollouts per update, per device. seed: of their order.
    """

    training: DraftTraining
    sequences: int
    seed: int

    def init(self, draft: HeadParams) -> DraftState:
        """The state before the first update."""
        return DraftState(draft, self.training.init(draft), jnp.int32(0))

    def program(
        self, mesh: Mesh, steps: int
    ) -> Callable[[DraftState, PolicyParams, Sequences], tuple[DraftState, dict[str, Array]]]:
        """`steps` updates as one compiled scan over `(state, policy, corpus)`; metrics have the step first."""
        compiled, seed = _program(self.training, self.sequences, mesh, steps), jnp.int32(self.seed)
        return lambda state, policy, corpus: compiled(state, policy, corpus, seed)


@lru_cache(maxsize=8)
def _program(training: DraftTraining, sequences: int, mesh: Mesh, steps: int) -> Any:
    """`(state, policy, corpus, seed) -> (state, metrics)`; equal trainings share one, whatever their seeds."""

    head, its_policy = Layout(mesh, training.head.num_kv_heads), Layout(mesh, training.scorer.policy.num_kv_heads)

    def learned_from(policy: PolicyParams, corpus: Sequences, step: Int[Array, ""], seed: Int[Array, ""]) -> Any:
        return training.examples(policy, _batch(corpus, sequences, step, seed))

    on_rows = over_mesh(mesh, learned_from, (P(), P(ROWS), P(), P()), P(ROWS))

    def run(state: DraftState, policy: PolicyParams, corpus: Sequences, seed: Int[Array, ""]) -> Any:
        policy = its_policy.gather(policy)
        shared = shared_with_head(policy)

        def one(state: DraftState, _: None) -> tuple[DraftState, dict[str, Array]]:
            examples = on_rows(policy, corpus, state.step, seed)
            draft, opt_state, metrics = training.update(mesh, state.draft, state.opt_state, shared, examples)
            return head.keep(DraftState(draft, opt_state, state.step + 1)), metrics

        return lax.scan(one, state, None, length=steps)

    return jax.jit(run)


def _batch(corpus: Sequences, sequences: int, step: Int[Array, ""], seed: Int[Array, ""]) -> Sequences:
    """Sequences of an update: each epoch goes through the corpus in an order of its own."""
    count = corpus.lengths.shape[0]
    per_epoch = count // sequences
    key = jax.random.fold_in(jax.random.key(seed), step // per_epoch)
    chosen = lax.dynamic_slice_in_dim(jax.random.permutation(key, count), step % per_epoch * sequences, sequences)
    return jax.tree.map(lambda x: x[chosen], corpus)
