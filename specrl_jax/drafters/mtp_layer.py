"""The layer of a native multi-token-prediction head, one token at a time.

Policies trained for multi-token prediction (DeepSeek-V3, arXiv 2412.19437; MiMo, arXiv 2505.07608) carry one more layer
of their own kind behind a projection; `h` is the policy's last residual stream, or what the head fed back:

    h0 = input_proj concat(norm(embed[token]), norm(h))    or the hidden state first
    h1 = h0 + attention(norm(h0)) o_proj
    h2 = h1 + feed_forward(norm(h1))                       fed back after the final norm
    logits = norm(h2) lm_head                              the policy's output rows

A policy has one such layer; for more than one draft it reads its own output, as in vLLM and as FastMTP
(arXiv 2509.18362) trains it. The order of the halves, the norms and what `h` is depend on the family
(`mtp_layouts.Layout`), as do attention and feed-forward.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.mtp_experts import mixture
from specrl_jax.drafters.mtp_latent import latent_keys, latent_output, latent_queries
from specrl_jax.drafters.mtp_layouts import Experts, GroupedAttention, LatentAttention, MtpConfig
from specrl_jax.drafters.mtp_params import DenseWeights, ExpertWeights, GroupedWeights, LatentWeights, MtpWeights
from specrl_jax.models.linear import linear, logits_of, swiglu
from specrl_jax.models.norm import rms_norm
from specrl_jax.models.rope import apply_rope, rope_angles


def _norm(config: MtpConfig, x: Float[Array, "*n d"], weight: Float[Array, "d"]) -> Float[Array, "*n d"]:
    if config.layout.zero_centred:
        weight = weight + jnp.ones((), weight.dtype)
    return rms_norm(x, weight, config.rms_norm_eps)


def fuse(config: MtpConfig, weights: MtpWeights, features: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """The policy's last residual stream, after its final norm where heads of this layout read it so."""
    features = features.astype(weights.hidden_norm.dtype)
    if not config.layout.normed_features:
        return features
    assert weights.policy_norm is not None
    return rms_norm(features, weights.policy_norm, config.rms_norm_eps)


def fed_back(config: MtpConfig, weights: MtpWeights, hidden: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """What the head reads of its own output, `h2`, one step later."""
    return _norm(config, hidden, weights.final_norm)


def attention_input(
    config: MtpConfig,
    weights: MtpWeights,
    embed: Float[Array, "v d"],
    tokens: Int[Array, "n"],
    hidden: Float[Array, "n d"],
    positions: Int[Array, "n"],
) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """The layer's residual, `h0`, and what its attention reads, of tokens and hidden states in their slots."""
    embedded = embed[tokens].astype(hidden.dtype)
    if config.layout.zero_first:
        embedded = jnp.where(positions[:, None] == 0, jnp.zeros((), hidden.dtype), embedded)
    halves = [_norm(config, embedded, weights.embed_norm), _norm(config, hidden, weights.hidden_norm)]
    if not config.layout.embedding_first:
        halves.reverse()
    residual = linear(jnp.concatenate(halves, axis=-1), weights.input_proj)
    return residual, _norm(config, residual, weights.attn_norm)


def _biased(x: Float[Array, "n i"], kernel: Float[Array, "o i"], bias: Float[Array, "o"] | None) -> Float[Array, "n o"]:
    return linear(x, kernel) if bias is None else linear(x, kernel) + bias[None]


def _rotated(
    config: MtpConfig, attention: GroupedAttention, x: Float[Array, "n h c"], positions: Int[Array, "n"]
) -> Float[Array, "n h c"]:
    """The first channels of every head rotated."""
    width = attention.rotary_width
    if width == 0:
        return x
    turned = apply_rope(x[..., :width], *rope_angles(positions, config.rope, width))
    return turned if width == x.shape[-1] else jnp.concatenate([turned, x[..., width:]], axis=-1)


def _queries_and_gate(
    attention: GroupedAttention, weights: GroupedWeights, x: Float[Array, "n d"]
) -> tuple[Float[Array, "n h c"], Float[Array, "n h c"] | None]:
    projected = _biased(x, weights.q_proj, weights.q_bias).reshape(x.shape[0], attention.num_heads, -1)
    if not attention.gate:
        return projected, None
    queries, gate = jnp.split(projected, 2, axis=-1)
    return queries, gate


def project_queries(
    config: MtpConfig, weights: MtpWeights, x: Float[Array, "n d"], positions: Int[Array, "n"]
) -> Float[Array, "n h c"]:
    """Rotated queries."""
    attention, own = config.attention, weights.attention
    if isinstance(attention, LatentAttention):
        assert isinstance(own, LatentWeights)
        return latent_queries(attention, own, x, positions, config.rope, config.rms_norm_eps)
    assert isinstance(own, GroupedWeights)
    queries, _ = _queries_and_gate(attention, own, x)
    if own.q_norm is not None:
        queries = _norm(config, queries, own.q_norm)
    return _rotated(config, attention, queries, positions)


def project_keys(
    config: MtpConfig, weights: MtpWeights, x: Float[Array, "n d"], positions: Int[Array, "n"]
) -> tuple[Float[Array, "n g c"], Float[Array, "n g c"]]:
    """Rotated keys, and values."""
    attention, own = config.attention, weights.attention
    if isinstance(attention, LatentAttention):
        assert isinstance(own, LatentWeights)
        both = latent_keys(attention, own, x, positions, config.rope, config.rms_norm_eps)
        return both, both
    assert isinstance(own, GroupedWeights)
    keys = _biased(x, own.k_proj, own.k_bias).reshape(x.shape[0], -1, attention.head_dim)
    values = _biased(x, own.v_proj, own.v_bias).reshape(keys.shape)
    if own.k_norm is not None:
        keys = _norm(config, keys, own.k_norm)
    return _rotated(config, attention, keys, positions), values


def _mixed(
    config: MtpConfig, weights: MtpWeights, residual: Float[Array, "n d"], attended: Float[Array, "n h c"]
) -> Float[Array, "n d"]:
    """`attention(norm(h0)) o_proj`."""
    attention, own = config.attention, weights.attention
    if isinstance(attention, LatentAttention):
        assert isinstance(own, LatentWeights)
        return latent_output(attention, own, attended)
    assert isinstance(own, GroupedWeights)
    if attention.gate:
        _, gate = _queries_and_gate(attention, own, _norm(config, residual, weights.attn_norm))
        assert gate is not None
        attended = attended * jax.nn.sigmoid(gate)
    return linear(attended.reshape(residual.shape[0], -1), own.o_proj)


def _feed_forward(
    config: MtpConfig, weights: DenseWeights | ExpertWeights, x: Float[Array, "n d"]
) -> Float[Array, "n d"]:
    if isinstance(config.feed_forward, Experts):
        assert isinstance(weights, ExpertWeights)
        return mixture(config.feed_forward, weights, x)
    assert isinstance(weights, DenseWeights)
    return swiglu(x, weights.gate_proj, weights.up_proj, weights.down_proj)


def mix_and_mlp(
    config: MtpConfig, weights: MtpWeights, residual: Float[Array, "n d"], attended: Float[Array, "n h c"]
) -> Float[Array, "n d"]:
    """The layer after attention: `h2` from the slot's residual and what it attended to."""
    mixed = residual + _mixed(config, weights, residual, attended)
    return mixed + _feed_forward(config, weights.feed_forward, _norm(config, mixed, weights.mlp_norm))


def draft_logits(config: MtpConfig, weights: MtpWeights, hidden: Float[Array, "n d"]) -> Float[Array, "n dv"]:
    """Float32 logits over the draft vocabulary, from `h2`."""
    assert weights.lm_head is not None
    return logits_of(_norm(config, hidden, weights.final_norm), weights.lm_head)
