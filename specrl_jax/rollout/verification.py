"""Which drafts are emitted: sample-and-match verification.

The policy draws its own token at every drafted position with that position's
noise. A draft is accepted when it equals the draw, and the draw is what is
emitted, so the law and the very tokens are those of autoregressive sampling
(Daliri, Musco and Suresh, arXiv 2408.07978, for sharing the noise with the drafter).
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int


@struct.dataclass
class Verdict:
    """accepted: drafts of each row that are emitted, `[r]`.

    counts: tokens each row emits: its accepted drafts and one more of the policy's, fewer when cut, `[r]`.
    cut: whether an end token or the maximum length stopped the round before its matching
        drafts were used up, `[r]`.
    """

    accepted: Int[Array, "r"]
    counts: Int[Array, "r"]
    cut: Bool[Array, "r"]


def match(
    drafts: Int[Array, "r k"], draws: Int[Array, "r k1"], *, ends: Bool[Array, "r k1"], room: Int[Array, "r"]
) -> Verdict:
    """Accept drafts while they equal the policy's draws.

    Args:
        drafts: proposed tokens.
        draws: the policy's own draws at the same positions, and one beyond.
        ends: which draws are end tokens; nothing after the first is emitted.
        room: tokens each row may still emit (0 for a finished row).
    """
    matching = jnp.cumprod((drafts == draws[:, :-1]).astype(jnp.int32), axis=1)
    matched = jnp.sum(matching, axis=1)
    until_end = jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1) + 1, draws.shape[1])
    counts = jnp.minimum(jnp.minimum(matched + 1, until_end.astype(jnp.int32)), room)
    return Verdict(accepted=jnp.minimum(matched, counts), counts=counts, cut=counts < matched + 1)
