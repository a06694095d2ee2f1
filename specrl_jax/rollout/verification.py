"""Verification: which drafts of a round are emitted, and what follows them.

Every rule here emits tokens whose law is that of the policy sampling one token
after the other. `p` and `q` are the laws of policy and drafter after every
filter; all arithmetic is on logarithms, and `-inf` stands for probability 0.

`match` compares drafts with the policy's own draws and emits the draws, so the
very tokens are those of autoregressive sampling with the same noise (Daliri,
Musco and Suresh, arXiv 2408.07978, for sharing the noise with the drafter). At
temperature 0 it is greedy verification, and on a tree it compares the candidates
of a node with the one draw made there. `ratio` (Leviathan et al., arXiv
2211.17192; Chen et al., arXiv 2302.01318) and `block` (Sun et al., arXiv
2403.10444) reproduce the law only; they take their random draws through `Draws`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.models.tree import Tree
from specrl_jax.rollout.draws import Draws


@struct.dataclass
class Proposed:
    """What a rule decides: `tokens[r, :accepted[r]]` are drafts, `tokens[r, accepted[r]]` is the policy's.

    tokens: what would be emitted if nothing cut the round; beyond `accepted` only the first counts, `[r, k + 1]`.
    accepted: drafts kept, 0 to k, `[r]`.
    path: node of the round's tree (or query of the row, where drafts were dealt out) below which each token was drawn,
        `[r, k + 1]`; None for a chain, where token `j` follows node `j`.
    """

    tokens: Int[Array, "r k1"]
    accepted: Int[Array, "r"]
    path: Int[Array, "r k1"] | None = None


@struct.dataclass
class Verdict:
    """What a round emits.

    accepted: drafts of each row that are emitted, `[r]`.
    counts: tokens each row emits: its accepted drafts and one more of the policy's, fewer when cut, `[r]`.
    cut: whether an end token or the maximum length stopped the round before its
        accepted drafts were used up, `[r]`.
    """

    accepted: Int[Array, "r"]
    counts: Int[Array, "r"]
    cut: Bool[Array, "r"]


def match(tree: Tree, drafts: Int[Array, "r n"], draws: Int[Array, "r n1"]) -> Proposed:
    """From the root down, go to the candidate that equals the policy's draw, while there is one; the draws are emitted.

    Args:
        tree: of the round.
        drafts: token of every node but the root.
        draws: the policy's draw below every node, root included; nodes of one depth share the noise of their position.
    """
    drawn_there = draws[:, np.array(tree.parents, np.int32)] == drafts
    if tree.is_chain:
        return Proposed(draws, jnp.sum(jnp.cumprod(drawn_there.astype(jnp.int32), axis=1), axis=1))
    drawn_there = jnp.pad(drawn_there, ((0, 0), (1, 0)), constant_values=True)
    reached = jnp.all(drawn_there[:, None] | ~jnp.asarray(tree.sees)[None], axis=2)
    depths = jnp.asarray(tree.depths, jnp.int32)
    deepest = jnp.argmax(jnp.where(reached, depths[None], -1), axis=1)
    path = jnp.asarray(tree.paths)[deepest]
    return Proposed(jnp.take_along_axis(draws, path, axis=1), depths[deepest], path)


def log_excess(log_p: Float[Array, "... v"], log_q: Float[Array, "... v"]) -> Float[Array, "... v"]:
    """Logarithm of max(p - q, 0), without subtracting probabilities."""
    more = log_p > log_q
    gap = jnp.where(more, log_q - log_p, -1.0)
    return jnp.where(more, log_p + jnp.log1p(-jnp.exp(gap)), -jnp.inf)


def one_hot_law(drafts: Int[Array, "r k"], vocab_size: int) -> Float[Array, "r k v"]:
    """Log-law of drafts that are a function of the prefix (argmax, n-gram), not drawn."""
    return jnp.where(jax.nn.one_hot(drafts, vocab_size, dtype=bool), 0.0, -jnp.inf)


def _of_drafts(log_law: Float[Array, "r k v"], drafts: Int[Array, "r k"]) -> Float[Array, "r k"]:
    return jnp.take_along_axis(log_law, drafts[..., None], axis=2)[..., 0]


def _compared(
    drafts: Int[Array, "r k"], log_p: Float[Array, "r k1 v"], log_q: Float[Array, "r k v"]
) -> tuple[Float[Array, "r k v"], Float[Array, "r k"]]:
    """The law that drafts were drawn from, and log(p / q) of each; where there is no draft (-1), both say so: -inf."""
    there = drafts >= 0
    log_ratio = _of_drafts(log_p[:, :-1], drafts) - _of_drafts(log_q, drafts)
    return jnp.where(there[..., None], log_q, -jnp.inf), jnp.where(there, log_ratio, -jnp.inf)


def of_each(x: Array, index: Int[Array, "r"]) -> Array:
    """`x[r, index[r]]`."""
    return jnp.take_along_axis(x, index.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]


def _finish(
    drafts: Int[Array, "r k"],
    accepted: Int[Array, "r"],
    log_p: Float[Array, "r k1 v"],
    log_q: Float[Array, "r k v"],
    log_weight: Float[Array, "r"],
    draws: Draws,
) -> Proposed:
    """After `accepted` drafts, a token of the law max(w p - q, 0); after all of them, where `q` is 0, one of `p`."""
    beyond = jnp.full_like(log_p[:, :1], -jnp.inf)
    log_policy = of_each(log_p, accepted)
    excess = log_excess(log_policy + log_weight[:, None], of_each(jnp.concatenate([log_q, beyond], axis=1), accepted))
    # Where p = q up to rounding nothing is rejected, and nothing would be left to draw from.
    empty = jnp.all(excess == -jnp.inf, axis=1, keepdims=True)
    token = draws.tokens(jnp.where(empty, log_policy, excess))
    slots = jnp.arange(log_p.shape[1], dtype=accepted.dtype)[None]
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    return Proposed(jnp.where(slots < accepted[:, None], padded, token[:, None]), accepted)


def ratio(
    drafts: Int[Array, "r k"],
    log_p: Float[Array, "r k1 v"],
    log_q: Float[Array, "r k v"],
    draws: Draws,
    log_lenience: float = 0.0,
) -> Proposed:
    """Accept each draft with probability min(1, l p / q) until one is refused; then draw from max(p - q, 0).

    Args:
        drafts: drawn from `q`; -1 where a row has no more, which must not depend on what its drafts turned out to be.
        log_p: the policy's law at every drafted position, and at the one beyond.
        log_q: the law that the drafts were really drawn from (`one_hot_law` for drafts that were not drawn).
        draws: fresh in every round.
        log_lenience: above 0 more drafts are accepted and the law is `lenient_law`, no longer the policy's.
    """
    log_q, log_ratio = _compared(drafts, log_p, log_q)
    coins = draws.coins(jnp.minimum(log_ratio + log_lenience, 0.0))
    accepted = jnp.sum(jnp.cumprod(coins.astype(jnp.int32), axis=1), axis=1)
    return _finish(drafts, accepted, log_p, log_q, jnp.zeros_like(log_p[:, 0, 0]), draws)


def lenient_law(
    log_p: Float[Array, "... v"], log_q: Float[Array, "... v"], log_lenience: float
) -> Float[Array, "... v"]:
    """Log-law of the token that `ratio` emits at a drafted position that it reaches.

    e = min(q, l p) + (1 - sum min(q, l p)) max(p - q, 0) / sum max(p - q, 0), whether the token
    is the draft or its replacement. Without lenience it is p.
    """
    kept = jnp.minimum(log_q, log_p + log_lenience)
    # 1 - sum min(q, l p), as the sum of what q has too much: nothing cancels where refusals are rare.
    refused = jax.nn.logsumexp(log_excess(log_q, log_p + log_lenience), axis=-1, keepdims=True)
    excess = log_excess(log_p, log_q)
    total = jax.nn.logsumexp(excess, axis=-1, keepdims=True)
    replaced = jnp.where(total == -jnp.inf, log_p, excess - jnp.where(total == -jnp.inf, 0.0, total))
    return jnp.logaddexp(kept, refused + replaced)


def block(
    drafts: Int[Array, "r k"], log_p: Float[Array, "r k1 v"], log_q: Float[Array, "r k v"], draws: Draws
) -> Proposed:
    """Block verification: the longest prefix whose coin says yes is accepted, however the shorter ones fell.

    Arguments as for `ratio`. With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), prefix i < k is accepted with
    probability h_i = z_i / (z_i + 1 - w_i), z_i = sum max(w_i p - q, 0), and the whole block with w_k
    (Sun et al., Algorithm 2). At least as many drafts are accepted as by `ratio`.
    """
    k = drafts.shape[1]
    log_q, log_ratio = _compared(drafts, log_p, log_q)
    weights = [jnp.zeros_like(log_p[:, 0, 0])]
    for i in range(k):
        weights.append(jnp.minimum(weights[-1] + log_ratio[:, i], 0.0))
    log_w = jnp.stack(weights, axis=1)
    log_z = jax.nn.logsumexp(log_excess(log_p[:, 1:k] + log_w[:, 1:k, None], log_q[:, 1:]), axis=-1)
    log_rest = jnp.logaddexp(log_z, jnp.log1p(-jnp.exp(log_w[:, 1:k])))
    # Nothing left on either side: the prefix is certain.
    log_h = jnp.where(log_rest == -jnp.inf, 0.0, log_z - jnp.where(log_rest == -jnp.inf, 0.0, log_rest))
    coins = draws.coins(jnp.concatenate([log_h, log_w[:, k:]], axis=1))
    accepted = jnp.max(jnp.where(coins, jnp.arange(1, k + 1, dtype=jnp.int32), 0), axis=1)
    # After the whole block the policy's law follows, without its weight.
    log_weight = jnp.where(accepted == k, 0.0, of_each(log_w, accepted))
    return _finish(drafts, accepted, log_p, log_q, log_weight, draws)


def cut(proposed: Proposed, *, ends: Bool[Array, "r k1"], room: Int[Array, "r"]) -> Verdict:
    """What of a decision is emitted: nothing after the first end token, and no more than there is room for.

    Args:
        proposed: from a rule.
        ends: which of its tokens are end tokens.
        room: tokens each row may still emit (0 for a finished row).
    """
    until_end = jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1) + 1, ends.shape[1])
    whole = proposed.accepted + 1
    counts = jnp.minimum(jnp.minimum(whole, until_end.astype(jnp.int32)), room)
    return Verdict(accepted=jnp.minimum(proposed.accepted, counts), counts=counts, cut=counts < whole)
