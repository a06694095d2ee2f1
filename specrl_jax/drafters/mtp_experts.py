"""Mixtures of experts in native multi-token-prediction heads: which experts a token reads, and what they say."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.mtp_layouts import Experts
from specrl_jax.drafters.mtp_params import ExpertWeights
from specrl_jax.models.linear import linear, swiglu

_LEAST = 1e-20


def _scores(experts: Experts, weights: ExpertWeights, x: Float[Array, "n d"]) -> Float[Array, "n e"]:
    """Float32 scores of all experts."""
    logits = linear(x.astype(jnp.float32), weights.router.astype(jnp.float32))
    return jax.nn.sigmoid(logits) if experts.sigmoid else jax.nn.softmax(logits, axis=-1)


def _within_groups(experts: Experts, scores: Float[Array, "n e"]) -> Float[Array, "n e"]:
    """The scores, those outside the chosen groups minus infinity."""
    grouped = scores.reshape(scores.shape[0], experts.groups, -1)
    best_two = lax.top_k(grouped, 2)[0].sum(-1)
    kept = lax.top_k(best_two, experts.chosen_groups)[1]
    is_kept = (kept[:, :, None] == jnp.arange(experts.groups, dtype=kept.dtype)[None, None]).any(1)
    return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def route(
    experts: Experts, weights: ExpertWeights, x: Float[Array, "n d"]
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """The experts of every token, and the float32 shares of what they say.

    The bias of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) balances the experts: it takes part in the choice and not
    in the shares, and has no gradient.
    """
    scores = _scores(experts, weights, x)
    ranked = lax.stop_gradient(scores)
    if weights.router_bias is not None:
        ranked = ranked + lax.stop_gradient(weights.router_bias.astype(jnp.float32))[None]
    if experts.groups > 1:
        ranked = _within_groups(experts, ranked)
    chosen = lax.top_k(ranked, experts.chosen)[1]
    shares = jnp.take_along_axis(scores, chosen, axis=1)
    if experts.renormalise:
        shares = shares / (shares.sum(-1, keepdims=True) + _LEAST)
    return chosen, shares * experts.scale


def _mlp(
    x: Float[Array, "n i"], gate: Float[Array, "f i"] | None, up: Float[Array, "f i"], down: Float[Array, "i f"]
) -> Float[Array, "n i"]:
    if gate is not None:
        return swiglu(x, gate, up, down)
    return linear(jnp.square(jax.nn.relu(linear(x, up))), down)


def _routed(
    weights: ExpertWeights, x: Float[Array, "n i"], chosen: Int[Array, "n k"], shares: Float[Array, "n k"]
) -> Float[Array, "n i"]:
    """What the chosen experts say: tokens sorted by expert, one product per kind of kernel."""
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    token = order // chosen.shape[1]
    sizes = jnp.bincount(chosen.reshape(-1), length=weights.up_proj.shape[0]).astype(jnp.int32)

    def product(rows: Float[Array, "nk i"], kernels: Float[Array, "e o i"]) -> Float[Array, "nk o"]:
        return lax.ragged_dot(rows, kernels.swapaxes(1, 2), sizes)

    sorted_x = x[token]
    hidden = product(sorted_x, weights.up_proj)
    if weights.gate_proj is None:
        hidden = jnp.square(jax.nn.relu(hidden))
    else:
        hidden = jax.nn.silu(product(sorted_x, weights.gate_proj)) * hidden
    said = product(hidden, weights.down_proj).astype(jnp.float32) * shares.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[token].add(said).astype(x.dtype)


def mixture(experts: Experts, weights: ExpertWeights, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """What the chosen experts and the shared one say to every token."""
    inner = x if weights.latent_down is None else linear(x, weights.latent_down)
    routed = _routed(weights, inner, *route(experts, weights, x))
    if weights.latent_up is not None:
        routed = linear(routed, weights.latent_up)
    shared = _mlp(x, weights.shared_gate_proj, weights.shared_up_proj, weights.shared_down_proj)
    if weights.shared_gate is not None:
        shared = shared * jax.nn.sigmoid(linear(x, weights.shared_gate))
    return routed + shared
