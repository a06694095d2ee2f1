"""Supervised training of a policy on written-out solutions: the warm-up before RL."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from specrl_jax.models.params import PolicyParams
from specrl_jax.parallel.sharding import Layout, over_mesh, sum_over_rows
from specrl_jax.rl.losses import masked_mean
from specrl_jax.rl.microbatches import MicrobatchConfig, over_microbatches
from specrl_jax.rl.optimizers import OptimizerConfig, advance, make_optimizer, skipped_updates
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.trajectory import Sequences


@struct.dataclass
class SupervisedState:
    """params, opt_state: the policy and its optimizer. step: updates so far."""

    params: PolicyParams
    opt_state: Any
    step: Int[Array, ""]


Examples = Callable[[Int[Array, ""], Any], Sequences]
"""`examples(step, corpus)`: this device's training sequences of an update, traced."""


def join(
    prompts: Int[Array, "b p"],
    prompt_lengths: Int[Array, "b"],
    solutions: Int[Array, "b t"],
    solution_lengths: Int[Array, "b"],
) -> Sequences:
    """Prompt and reference solution in one row; the solution is what is learned."""
    width = prompts.shape[1] + solutions.shape[1]
    slots = jnp.arange(width, dtype=jnp.int32)[None]
    reach = jnp.clip(slots - prompt_lengths[:, None], 0, solutions.shape[1] - 1)
    solution = jnp.take_along_axis(solutions, reach, axis=1)
    lengths = prompt_lengths + solution_lengths
    learned: Bool[Array, "b w"] = (slots >= prompt_lengths[:, None]) & (slots < lengths[:, None])
    prompt = jnp.pad(prompts, ((0, 0), (0, solutions.shape[1])))
    tokens = jnp.where(learned, solution, jnp.where(slots < prompt_lengths[:, None], prompt, 0))
    return Sequences(tokens, lengths, learned, jnp.zeros(tokens.shape, jnp.float32))


@dataclass(frozen=True)
class SupervisedTraining:
    """scorer: the policy's forward. optimizer: of the policy. microbatch: sequences per gradient."""

    scorer: Scorer
    optimizer: OptimizerConfig
    microbatch: MicrobatchConfig

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.optimizer)

    def init(self, params: PolicyParams) -> SupervisedState:
        """The state before the first update."""
        return SupervisedState(params, self._optimizer.init(params), jnp.int32(0))

    def _summed_gradients(self, params: PolicyParams, sequences: Sequences) -> tuple[PolicyParams, dict[str, Array]]:
        """Gradient of the mean negative log-likelihood of the masked tokens, summed over the mesh, and metrics."""
        tokens = sum_over_rows(jnp.sum(sequences.mask, dtype=jnp.float32))

        def gradients(params: PolicyParams, micro: Sequences) -> tuple[Any, Any]:
            def loss(params: PolicyParams) -> Array:
                scores = self.scorer.score(params, micro)
                return -masked_mean(scores.log_probs, micro.mask).total / tokens

            return jax.value_and_grad(loss)(params), ()

        sums, _ = over_microbatches(gradients, params, sequences, sequences.lengths, self.microbatch)
        loss, grads = sum_over_rows(sums)
        return grads, {"loss": loss, "tokens": tokens}

    def program(
        self, mesh: Mesh, examples: Examples, steps: int
    ) -> Callable[[SupervisedState, Any], tuple[SupervisedState, dict[str, Array]]]:
        """`steps` updates as one compiled scan over `(state, corpus)`; metrics come back with the step first."""

        layout = Layout(mesh, self.scorer.policy.num_kv_heads)

        def learn(params: PolicyParams, step: Int[Array, ""], corpus: Any) -> Any:
            return self._summed_gradients(params, examples(step, corpus))

        on_rows = over_mesh(mesh, learn, (P(), P(), P()), (P(), P()))

        def run(state: SupervisedState, corpus: Any) -> tuple[SupervisedState, dict[str, Array]]:
            def one(state: SupervisedState, _: None) -> tuple[SupervisedState, dict[str, Array]]:
                grads, metrics = on_rows(layout.gather(state.params), state.step, corpus)
                params, opt_state, norm = advance(self._optimizer, state.params, state.opt_state, layout.keep(grads))
                after = SupervisedState(params, opt_state, state.step + 1)
                skipped = skipped_updates(opt_state)[1]
                return layout.keep(after), metrics | {"grad_norm": norm, "skipped_in_a_row": skipped}

            return lax.scan(one, state, None, length=steps)

        return jax.jit(run)
