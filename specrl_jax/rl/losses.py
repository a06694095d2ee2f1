"""The policy-gradient loss: a clipped surrogate and an optional KL to a reference policy.

Everything here is a sum over tokens divided by a number that the caller may fix for
the whole minibatch. Losses and gradients of microbatches, or of the shards of a
data-parallel batch, therefore add up to those of the undivided minibatch, and so do
the metrics.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float

from specrl_jax.errors import InputError

# Log-ratios beyond this are held constant: exp(20) = 5e8 is far outside any trust
# region, and exp(89) is infinite in float32. NeMo RL and verl use the same number.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossConfig:
    """Clipped surrogate of PPO with the aggregations in use for language models.

    clip_low, clip_high: the ratio of new to old probability earns nothing more outside
        `[1 - clip_low, 1 + clip_high]`. DAPO (arXiv 2503.14476) uses 0.2 and 0.28.
    kl_coef: weight of the k3 estimate of KL(policy || reference); above 0 the loss
        needs the reference's log-probs.
    aggregation: "token": mean over the tokens of the minibatch (DAPO). "sequence": mean
        over sequences of their token means (GRPO as published).
    importance_cap: above 0, tokens that were not drawn from the old policy's law are weighted by
        min(p_old / p_behaviour, importance_cap) (truncated importance sampling; 2 is usual).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    aggregation: Literal["token", "sequence"] = "token"
    importance_cap: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.clip_low <= 1.0:
            raise InputError(f"loss clip_low is {self.clip_low}; it must be above 0 and at most 1")
        if not 0.0 < self.clip_high < float("inf"):
            raise InputError(f"loss clip_high is {self.clip_high}; it must be a number above 0")
        if not 0.0 <= self.kl_coef < float("inf"):
            raise InputError(f"loss kl_coef is {self.kl_coef}; it must be a number of at least 0")
        if not 0.0 <= self.importance_cap < float("inf"):
            raise InputError(f"loss importance_cap is {self.importance_cap}; it must be a number of at least 0 (none)")
        if self.aggregation not in ("token", "sequence"):
            raise InputError(f"loss aggregation is {self.aggregation!r}; choose token or sequence")


@struct.dataclass
class Mean:
    """A mean in two parts that can be added over microbatches, shards and steps."""

    total: Float[Array, ""]
    count: Float[Array, ""]

    @property
    def value(self) -> Float[Array, ""]:
        """The mean; 0 where nothing was counted."""
        return self.total / jnp.maximum(self.count, 1.0)


def masked_mean(values: Float[Array, "b t"], mask: Bool[Array, "b t"]) -> Mean:
    """Mean of `values` where `mask` holds; what stands elsewhere, NaN included, does not matter."""
    return Mean(jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask, dtype=values.dtype))


def loss_denominator(mask: Bool[Array, "b t"], config: LossConfig) -> Float[Array, ""]:
    """What the loss of a minibatch is divided by: its tokens, or its sequences that have any.

    For a minibatch in parts, sum this over the parts and give the sum to `policy_loss`.
    """
    counted = mask if config.aggregation == "token" else jnp.any(mask, axis=1)
    return jnp.sum(counted, dtype=jnp.float32)


def k3(log_ratio: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Schulman's k3 = exp(d) - d - 1 for d = log(q/p), whose mean under p is KL(p || q); it is never negative."""
    d = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(d) - d


def token_mult_prob_error(
    log_probs: Float[Array, "b t"], other_log_probs: Float[Array, "b t"], mask: Bool[Array, "b t"]
) -> Mean:
    """Mean of exp|difference| of two programs' log-probs of the same tokens: 1 where they agree.

    The figure NeMo RL watches; above 1.02 training and rollout disagree about the policy.
    """
    difference = jnp.where(mask, log_probs - other_log_probs, 0.0)
    return masked_mean(jnp.exp(jnp.minimum(jnp.abs(difference), MAX_LOG_RATIO)), mask)


def _token_weights(
    mask: Bool[Array, "b t"], config: LossConfig, denominator: Float[Array, ""] | float | None
) -> Float[Array, "b t"]:
    if denominator is None:
        denominator = loss_denominator(mask, config)
    tokens = mask.astype(jnp.float32)
    if config.aggregation == "sequence":
        tokens = tokens / jnp.maximum(jnp.sum(tokens, axis=1, keepdims=True), 1.0)
    return tokens / jnp.maximum(denominator, 1.0)


def _surrogate(
    ratio: Float[Array, "b t"], advantages: Float[Array, "b 1"], config: LossConfig
) -> tuple[Float[Array, "b t"], Bool[Array, "b t"]]:
    """-min(r A, clip(r) A), and where the clip decided: only where moving on would raise the objective."""
    clipped = jnp.where(
        advantages > 0.0,
        ratio > 1.0 + config.clip_high,
        (ratio < 1.0 - config.clip_low) & (advantages < 0.0),
    )
    bound = jnp.where(advantages > 0.0, 1.0 + config.clip_high, 1.0 - config.clip_low)
    return -advantages * jnp.where(clipped, bound, ratio), clipped


def policy_loss(
    log_probs: Float[Array, "b t"],
    old_log_probs: Float[Array, "b t"],
    advantages: Float[Array, "b"],
    mask: Bool[Array, "b t"],
    config: LossConfig,
    ref_log_probs: Float[Array, "b t"] | None = None,
    denominator: Float[Array, ""] | float | None = None,
    behaviour_log_probs: Float[Array, "b t"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Mean]]:
    """Clipped surrogate (Schulman et al., arXiv 1707.06347, eq. 7) plus `kl_coef` times k3.

    Only `log_probs` carries a gradient. A token of log-prob -inf, now or when it was
    sampled, lies outside the support kept at rollout: it adds nothing to loss and
    gradient but counts as a token, and the metric `excluded_tokens` tells of it. NaN
    log-probs under the mask stay NaN, so that a broken policy is seen.

    Args:
        log_probs: of the response tokens under the policy being trained, in nats.
        old_log_probs: the same under the policy that sampled them.
        advantages: one per sequence.
        mask: response tokens; the rest is padding and may hold anything.
        config: clip range, KL weight, aggregation.
        ref_log_probs: the same under the reference policy; with them KL is measured
            even where its weight is 0.
        denominator: `loss_denominator` summed over all parts of the minibatch; None when
            this batch is all of it.
        behaviour_log_probs: the same under the law that the tokens were drawn from, where it
            is not that of `old_log_probs`; needs an `importance_cap`.

    Returns:
        The loss, and sums with their token counts: `clip_fraction` (tokens whose gradient
        the clip blocked), `ratio`, `token_mult_prob_error`, `excluded_tokens`, `importance_weight`
        where there is a behaviour law, and, with a reference, `kl`.
    """
    if config.kl_coef > 0.0 and ref_log_probs is None:
        raise ValueError("a kl_coef above 0 needs ref_log_probs")
    if behaviour_log_probs is not None and config.importance_cap == 0.0:
        raise ValueError("behaviour_log_probs need an importance_cap above 0")
    kept = mask & (log_probs != -jnp.inf) & (old_log_probs != -jnp.inf)
    # Replaced before any arithmetic: the gradient of a branch not taken would be 0 * inf.
    new = jnp.where(kept, log_probs, 0.0)
    old = lax.stop_gradient(jnp.where(kept, old_log_probs, 0.0))
    ratio = jnp.exp(jnp.clip(new - old, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    per_token, clipped = _surrogate(ratio, lax.stop_gradient(advantages)[:, None], config)
    metrics = {
        "clip_fraction": masked_mean((clipped & kept).astype(jnp.float32), mask),
        "ratio": masked_mean(ratio, kept),
        "token_mult_prob_error": token_mult_prob_error(new, old, kept),
        "excluded_tokens": masked_mean((mask & ~kept).astype(jnp.float32), mask),
    }
    if behaviour_log_probs is not None:
        drift = old - lax.stop_gradient(jnp.where(kept, behaviour_log_probs, 0.0))
        importance = jnp.minimum(jnp.exp(jnp.clip(drift, -MAX_LOG_RATIO, MAX_LOG_RATIO)), config.importance_cap)
        per_token = per_token * importance
        metrics["importance_weight"] = masked_mean(importance, kept)
    if ref_log_probs is not None:
        kl = k3(lax.stop_gradient(jnp.where(kept, ref_log_probs, 0.0)) - new)
        metrics["kl"] = masked_mean(kl, kept)
        if config.kl_coef > 0.0:
            per_token = per_token + config.kl_coef * kl
    weights = _token_weights(mask, config, denominator)
    return jnp.sum(jnp.where(kept, weights * per_token, 0.0)), metrics
