"""The policy's sampling law, defined once for rollouts, drafts, log-probs and losses."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.numerics import Numerics, map_tokens
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import head_weights, token_logits
from specrl_jax.rollout.noise import gumbel_noise


@dataclass(frozen=True)
class SamplingLaw:
    """temperature: 1 is the policy itself; 0 is greedy, whose log-probs are reported at temperature 1."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise InputError(f"temperature is {self.temperature}; choose a value from 0 (greedy) to 100")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, without noise."""
        return self.temperature == 0.0

    def log_law(self, logits: Float[Array, "n v"]) -> Float[Array, "n v"]:
        """Log-probabilities of the next token, float32."""
        scale = 1.0 if self.greedy else 1.0 / self.temperature
        return jax.nn.log_softmax(logits * scale, axis=-1)

    def choose(
        self,
        scores: Float[Array, "n v"],
        keys: UInt32[Array, "n 2"],
        positions: Int[Array, "n"],
        token_ids: Int[Array, "v"],
    ) -> Int[Array, "n"]:
        """Index of the drawn token: argmax of log-probabilities (up to a constant) plus noise."""
        if not self.greedy:
            scores = scores + gumbel_noise(keys, positions, token_ids)
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)


@struct.dataclass
class TokenLaw:
    """What is kept of the law at one token.

    token: drawn (or given) token, `[n]`.
    log_prob: its log-probability, `[n]` float32.
    entropy: of the whole law in nats, `[n]` float32.
    """

    token: Int[Array, "n"]
    log_prob: Float[Array, "n"]
    entropy: Float[Array, "n"]


def _describe(log_law: Float[Array, "n v"], token: Int[Array, "n"]) -> TokenLaw:
    log_prob = jnp.take_along_axis(log_law, token[:, None], axis=1)[:, 0]
    entropy = -jnp.sum(jnp.exp(log_law) * jnp.maximum(log_law, -1e30), axis=-1)
    return TokenLaw(token, log_prob, entropy)


def _sample_block(
    config: PolicyConfig,
    tied: bool,
    law: SamplingLaw,
    weights: tuple[Array, Array],
    hidden: Float[Array, "n d"],
    keys: UInt32[Array, "n 2"],
    positions: Int[Array, "n"],
) -> TokenLaw:
    log_law = law.log_law(token_logits(config, tied, weights, hidden))
    ids = jnp.arange(log_law.shape[1], dtype=jnp.int32)
    return _describe(log_law, law.choose(log_law, keys, positions, ids))


def _score_block(
    config: PolicyConfig,
    tied: bool,
    law: SamplingLaw,
    keep_law: bool,
    weights: tuple[Array, Array],
    hidden: Float[Array, "n d"],
    tokens: Int[Array, "n"],
) -> tuple[TokenLaw, Float[Array, "n v"] | None]:
    log_law = law.log_law(token_logits(config, tied, weights, hidden))
    return _describe(log_law, tokens), (log_law if keep_law else None)


def sample_tokens(
    params: PolicyParams,
    config: PolicyConfig,
    law: SamplingLaw,
    hidden: Float[Array, "n d"],
    keys: UInt32[Array, "n 2"],
    positions: Int[Array, "n"],
    numerics: Numerics,
) -> TokenLaw:
    """Draw the next token of every hidden state with the noise of its response position."""
    *weights, tied = head_weights(params)
    block = functools.partial(_sample_block, config, tied, law)
    return map_tokens(block, tuple(weights), (hidden, keys, positions), numerics)


def score_tokens(
    params: PolicyParams,
    config: PolicyConfig,
    law: SamplingLaw,
    hidden: Float[Array, "n d"],
    tokens: Int[Array, "n"],
    numerics: Numerics,
    *,
    keep_law: bool = False,
) -> tuple[TokenLaw, Float[Array, "n v"] | None]:
    """Log-probability of given next tokens under the same law; with `keep_law` the whole law too."""
    *weights, tied = head_weights(params)
    block = functools.partial(_score_block, config, tied, law, keep_law)
    return map_tokens(block, tuple(weights), (hidden, tokens), numerics)
