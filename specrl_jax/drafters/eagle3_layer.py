"""The layer of an EAGLE-3 head (Li et al., arXiv 2503.01840), one token at a time.

The hidden state of a committed pair is `fc(g_p)`, of a drafted token the head's own output one step earlier:

    x  = concat(norm(embed[token]), norm(h))      embedding first
    h1 = h + attention(x) o_proj                  residual: h itself, not its norm
    h2 = h1 + mlp(norm(h1))                       fed back as it is, not normalised
    logits = norm(h2) lm_head

The flags of `Eagle3Config` are the variants in use, those of EAGLE-3.1 among them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.eagle3_params import Eagle3Config, Eagle3Weights
from specrl_jax.models.linear import linear, linears, logits_of, swiglu
from specrl_jax.models.norm import rms_norm
from specrl_jax.models.rope import norm_and_rotate, rope_angles


def fuse(config: Eagle3Config, weights: Eagle3Weights, features: Float[Array, "n fd"]) -> Float[Array, "n d"]:
    """The policy's features in the head's width."""
    features = features.astype(weights.hidden_norm.dtype)
    if weights.input_norm is not None:
        features = rms_norm(features, weights.input_norm, config.rms_norm_eps)
    if weights.fc_norms is not None:
        chunks = jnp.split(features, len(weights.fc_norms), axis=-1)
        normed = [rms_norm(x, norm, config.rms_norm_eps) for x, norm in zip(chunks, weights.fc_norms, strict=True)]
        features = jnp.concatenate(normed, axis=-1)
    return linear(features, weights.fc)


def fed_back(config: Eagle3Config, weights: Eagle3Weights, hidden: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """What the head reads of its own output, `h2`, one step later."""
    return rms_norm(hidden, weights.final_norm, config.rms_norm_eps) if config.norm_output else hidden


def attention_input(
    config: Eagle3Config,
    weights: Eagle3Weights,
    embed: Float[Array, "v d"],
    tokens: Int[Array, "n"],
    hidden: Float[Array, "n d"],
    positions: Int[Array, "n"],
) -> tuple[Float[Array, "n d"], Float[Array, "n ed"]]:
    """The layer's residual, and what its attention reads, of tokens and hidden states in their slots."""
    embedded = rms_norm(embed[tokens].astype(hidden.dtype), weights.embed_norm, config.rms_norm_eps)
    normed = rms_norm(hidden, weights.hidden_norm, config.rms_norm_eps)
    return normed if config.norm_before_residual else hidden, jnp.concatenate([embedded, normed], axis=-1)


def project_queries(
    config: Eagle3Config, weights: Eagle3Weights, x: Float[Array, "n ed"], positions: Int[Array, "n"]
) -> Float[Array, "n h c"]:
    """Rotated queries."""
    angles = rope_angles(positions, config.rope, config.head_dim)
    queries = linear(x, weights.q_proj).reshape(x.shape[0], -1, config.head_dim)
    return norm_and_rotate(queries, weights.q_norm, config.rms_norm_eps, *angles)


def project_keys(
    config: Eagle3Config, weights: Eagle3Weights, x: Float[Array, "n ed"], positions: Int[Array, "n"]
) -> tuple[Float[Array, "n g c"], Float[Array, "n g c"]]:
    """Rotated keys, and values."""
    angles = rope_angles(positions, config.rope, config.head_dim)
    projected = linears(x, (weights.k_proj, weights.v_proj))
    keys, values = (y.reshape(x.shape[0], -1, config.head_dim) for y in projected)
    return norm_and_rotate(keys, weights.k_norm, config.rms_norm_eps, *angles), values


def mix_and_mlp(
    config: Eagle3Config, weights: Eagle3Weights, residual: Float[Array, "n d"], attended: Float[Array, "n h c"]
) -> Float[Array, "n d"]:
    """The layer after attention: `h2` from the slot's residual and what it attended to."""
    mixed = linear(attended.reshape(residual.shape[0], -1), weights.o_proj, plus=residual)
    normed = rms_norm(mixed, weights.mlp_norm, config.rms_norm_eps)
    return swiglu(normed, weights.gate_proj, weights.up_proj, weights.down_proj, plus=mixed)


def draft_logits(config: Eagle3Config, weights: Eagle3Weights, hidden: Float[Array, "n d"]) -> Float[Array, "n dv"]:
    """Float32 logits over the draft vocabulary, from `h2`."""
    normed = rms_norm(hidden, weights.final_norm, config.rms_norm_eps)
    return logits_of(normed, weights.lm_head)
