"""Teacher-forced log-probabilities of whole sequences: the policy forward of training."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.norm import rms_norm
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import forward, grid_batch, sequence_positions
from specrl_jax.rl.microbatches import MicrobatchConfig, in_given_order, over_microbatches
from specrl_jax.rollout.sampling import SamplingLaw, score_tokens
from specrl_jax.rollout.trajectory import Sequences


@struct.dataclass
class Scores:
    """log_probs: of token `t` given those before it, 0 at `t = 0`, float32 `[b, t]`.

    entropy: of the law that token `t` was scored under, nats, 0 at `t = 0`, `[b, t]`.
    features: residual streams at the requested boundaries, detached, `[b, t, fd]`, or None.
    states: what the policy's output rows read at slot `t` to give its law of token `t + 1`, detached, `[b, t, d]`, or
        None. Drafters learn the law before the sampling law, which rollouts apply to their logits as to the policy's.
    """

    log_probs: Float[Array, "b t"]
    entropy: Float[Array, "b t"]
    features: Float[Array, "b t fd"] | None
    states: Float[Array, "b t d"] | None


@dataclass(frozen=True)
class Scorer:
    """How sequences are scored: the numerics of the rollout, and its law (or that before the filters).

    remat: the gradient computes every layer's insides again instead of keeping them.
    chunk: tokens whose laws over the vocabulary exist at a time.
    """

    policy: PolicyConfig
    law: SamplingLaw
    numerics: Numerics
    remat: bool = False
    chunk: int = 1024

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise InputError(f"chunk of the training forward is {self.chunk}; it must be at least 1 token")

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
            remat=self.remat,
        )
        following = jnp.roll(sequences.tokens, -1, axis=1).reshape(-1)
        law = score_tokens(
            params,
            self.policy,
            self.law,
            out.hidden,
            following,
            self._thresholds(sequences),
            self._position(sequences),
            sequences.tokens,
            self.numerics,
            self.chunk,
        )

        def shifted(x: Float[Array, "n"]) -> Float[Array, "b t"]:
            return jnp.pad(x.reshape(rows, width)[:, :-1], ((0, 0), (1, 0)))

        features = states = None
        if out.features is not None:
            states = rms_norm(out.hidden, params.final_norm, self.policy.rms_norm_eps)
            # The barrier keeps what reads the features from being fused with the policy's own forward.
            features, states = lax.optimization_barrier(lax.stop_gradient((out.features, states)))
            features, states = (x.reshape(rows, width, -1) for x in (features, states))
        return Scores(shifted(law.log_prob), shifted(law.entropy), features, states)

    def _thresholds(self, sequences: Sequences) -> Float[Array, "n"]:
        """Slot `t` holds that of token `t + 1`."""
        if sequences.thresholds is None or not self.law.filtered:
            if self.law.filtered:
                raise ValueError("the law filters, but the sequences carry no thresholds of their rollout")
            return jnp.full((sequences.tokens.size,), -jnp.inf)
        return jnp.roll(sequences.thresholds, -1, axis=1).reshape(-1)

    def _position(self, sequences: Sequences) -> Int[Array, "n"]:
        """Of token `t + 1` in its response, at slot `t`."""
        slots = jnp.arange(sequences.tokens.shape[1], dtype=jnp.int32)[None]
        return (slots + 1 - jnp.argmax(sequences.mask, axis=1).astype(jnp.int32)[:, None]).reshape(-1)

    def log_probs(
        self, params: PolicyParams, sequences: Sequences, microbatch: MicrobatchConfig
    ) -> Float[Array, "b t"]:
        """Log-probs of every token without gradient, in microbatches."""

        def score(params: PolicyParams, micro: Sequences) -> tuple[Any, Any]:
            return (), self.score(params, micro).log_probs

        _, ordered = over_microbatches(score, params, sequences, sequences.lengths, microbatch)
        return in_given_order(ordered, sequences.lengths)
