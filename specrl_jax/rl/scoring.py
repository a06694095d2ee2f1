"""Teacher-forced log-probabilities of whole sequences: the policy forward of training."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float

from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import forward, grid_batch, sequence_positions
from specrl_jax.rl.microbatches import MicrobatchConfig, over_microbatches, sorted_order
from specrl_jax.rollout.sampling import SamplingLaw, score_tokens
from specrl_jax.rollout.trajectory import Sequences


@struct.dataclass
class Scores:
    """log_probs: of token `t` given those before it, 0 at `t = 0`, float32 `[b, t]`.

    entropy: of the law that token `t` was scored under, nats, 0 at `t = 0`, `[b, t]`.
    features: residual streams at the requested boundaries, detached, `[b, t, fd]`, or None.
    log_law: the whole law over token `t + 1` at slot `t`, detached, `[b, t, v]`, or None.
    """

    log_probs: Float[Array, "b t"]
    entropy: Float[Array, "b t"]
    features: Float[Array, "b t fd"] | None
    log_law: Float[Array, "b t v"] | None


@dataclass(frozen=True)
class Scorer:
    """How sequences are scored: the same law and numerics as in the rollout."""

    policy: PolicyConfig
    law: SamplingLaw
    numerics: Numerics

    def score(self, params: PolicyParams, sequences: Sequences, boundaries: tuple[int, ...] = ()) -> Scores:
        """Log-probs of every token; with `boundaries` also what a drafter learns from."""
        rows, width = sequences.tokens.shape
        positions = sequence_positions(sequences.lengths, width)
        out = forward(
            params,
            self.policy,
            grid_batch(sequences.tokens, positions),
            numerics=self.numerics,
            boundaries=boundaries,
        )
        following = jnp.roll(sequences.tokens, -1, axis=1).reshape(-1)
        law, log_law = score_tokens(
            params, self.policy, self.law, out.hidden, following, self.numerics, keep_law=bool(boundaries)
        )

        def shifted(x: Float[Array, "n"]) -> Float[Array, "b t"]:
            return jnp.pad(x.reshape(rows, width)[:, :-1], ((0, 0), (1, 0)))

        features = None
        if out.features is not None and log_law is not None:
            # The barrier keeps what reads the features from being fused with the policy's own forward.
            features, log_law = lax.optimization_barrier(lax.stop_gradient((out.features, log_law)))
            features, log_law = (x.reshape(rows, width, -1) for x in (features, log_law))
        return Scores(shifted(law.log_prob), shifted(law.entropy), features, log_law)

    def log_probs(
        self, params: PolicyParams, sequences: Sequences, microbatch: MicrobatchConfig
    ) -> Float[Array, "b t"]:
        """Log-probs of every token without gradient, in microbatches."""

        def score(params: PolicyParams, micro: Sequences) -> tuple[Any, Any]:
            return (), self.score(params, micro).log_probs

        _, ordered = over_microbatches(score, params, sequences, sequences.lengths, microbatch)
        return jnp.zeros_like(ordered).at[sorted_order(sequences.lengths)].set(ordered)
