"""Random draws of verification rules, behind an interface so that a test can put every outcome in their place."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from specrl_jax.rollout.noise import best, gumbel_noise, round_keys, subkeys, uniform_logs


@runtime_checkable
class Draws(Protocol):
    """Random draws of one round, every call independent of all others."""

    def coins(self, log_prob: Float[Array, "r k"]) -> Bool[Array, "r k"]:
        """True with the given probabilities, independently."""

    def tokens(self, log_law: Float[Array, "r v"]) -> Int[Array, "r"]:
        """A token of each row from a law known up to a constant."""


@dataclass(frozen=True)
class KeyedDraws:
    """Draws from the noise keys of one round.

    The keys must be fresh in every round: `block` looks at coins beyond the draft at which it
    stops, and coins keyed by position would be seen a second time in the next round.
    """

    keys: UInt32[Array, "r 2"]

    def coins(self, log_prob: Float[Array, "r k"]) -> Bool[Array, "r k"]:
        """Compares the logarithm of a uniform with the log-probability."""
        return uniform_logs(subkeys(self.keys, "coin"), log_prob.shape[1]).astype(log_prob.dtype) < log_prob

    def tokens(self, log_law: Float[Array, "r v"]) -> Int[Array, "r"]:
        """Argmax of the log-law plus Gumbel noise."""
        ids = jnp.arange(log_law.shape[1], dtype=jnp.int32)
        first = jnp.zeros((log_law.shape[0],), jnp.int32)
        noise = gumbel_noise(subkeys(self.keys, "residual"), first, ids)
        return best(log_law + noise.astype(log_law.dtype))[:, 0]


@dataclass(frozen=True)
class PlacedDraws(KeyedDraws):
    """Draws of a round that also knows where it is.

    sequences: keys of the rows' sequences. emitted: tokens that they have.
    """

    sequences: UInt32[Array, "r 2"]
    emitted: Int[Array, "r"]

    @classmethod
    def of_round(
        cls, sequences: UInt32[Array, "r 2"], rounds: Int[Array, "r"], emitted: Int[Array, "r"]
    ) -> "PlacedDraws":
        """Draws of round number `rounds[r]` of each sequence."""
        return cls(round_keys(sequences, rounds), sequences, emitted)

    def coins_by_place(self, log_prob: Float[Array, "r k"]) -> Bool[Array, "r k"]:
        """As `coins`, of a chain's drafts; one that is tried at a place of its sequence again finds the same coin.

        So do drafts of other lengths, as they do where the policy's own tokens decide.
        """
        uniforms = uniform_logs(subkeys(self.sequences, "coin"), log_prob.shape[1], self.emitted)
        return uniforms.astype(log_prob.dtype) < log_prob
