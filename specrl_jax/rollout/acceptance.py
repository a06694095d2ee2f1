"""Probability that a draft is accepted, from the laws of policy and drafter."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def ratio_acceptance(log_p: Float[Array, "*n v"], log_q: Float[Array, "*n v"]) -> Float[Array, "*n"]:
    """Of a draft drawn from `q` and judged by the ratio test: sum min(p, q) = 1 - TV(p, q).

    For drafts that are not drawn `q` is one-hot, and this is their probability under the policy, under any rule.
    """
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


def match_acceptance(log_p: Float[Array, "*n v"], log_q: Float[Array, "*n v"]) -> Float[Array, "*n"]:
    """Of a draft and a draw that share their Gumbel noise: sum_x 1 / sum_y max(p_y / p_x, q_y / q_x).

    Both pick x when its exponential clock rings first under p and under q (Daliri, Musco and Suresh, arXiv
    2408.07978; at least (1 - TV) / (1 + TV)). With the tokens in order of q / p the inner sum is that of p up to
    x, over p_x, and that of q beyond, over q_x: a sort instead of all pairs.
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    possible = (p > 0) & (q > 0)
    order = jnp.argsort(jnp.where(p > 0, log_q - log_p, jnp.inf), axis=-1)
    p, q, possible = (jnp.take_along_axis(x, order, axis=-1) for x in (p, q, possible))
    upto = jnp.cumsum(p, axis=-1)
    beyond = jnp.sum(q, axis=-1, keepdims=True) - jnp.cumsum(q, axis=-1)
    rate = upto / jnp.where(possible, p, 1.0) + jnp.maximum(beyond, 0.0) / jnp.where(possible, q, 1.0)
    return jnp.sum(jnp.where(possible, 1.0 / rate, 0.0), axis=-1)
