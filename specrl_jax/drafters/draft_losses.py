"""Losses of draft heads: what they learn from, and how a step of drafts is scored against the policy's law."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.errors import InputError


@struct.dataclass
class DraftBatch:
    """What the policy's training forward leaves for the draft head; sequences start at slot 0, right-padded.

    tokens: prompt and response, `[b, t]`.
    features: the policy's residual streams at the head's boundaries, concatenated, `[b, t, fd]`.
    teacher_log_probs: float32 log-law of the policy over the token after slot `p`, `[b, t, v]`.
    mask: True where a token belongs to a response, `[b, t]`.
    """

    tokens: Int[Array, "b t"]
    features: Float[Array, "b t fd"]
    teacher_log_probs: Float[Array, "b t v"]
    mask: Bool[Array, "b t"]


@dataclass(frozen=True)
class DraftLossConfig:
    """steps: length of the unroll, the longest draft to train for. decay: weight of step `i` is `decay ** i`.

    kind: "kl": cross-entropy against the policy's law restricted to the draft vocabulary. "tv": total variation,
        1 minus the acceptance `a` of a ratio test. "lk": the one where drafts are bad, the other where they are good, a
        slot's weight of the first being `exp(-eta * a)`, without gradient (LK losses, arXiv 2602.23881).
    anchors: blocks of a sequence that train a block drafter, which drafts as many tokens as it was made for.
    """

    steps: int = 3
    decay: float = 0.8
    kind: Literal["kl", "tv", "lk"] = "kl"
    eta: float = 3.0
    anchors: int = 32

    def __post_init__(self) -> None:
        if self.kind not in ("kl", "tv", "lk"):
            raise InputError(f"draft loss kind is {self.kind!r}; choose kl, tv or lk")
        if self.anchors < 1:
            raise InputError(f"draft loss anchors is {self.anchors}; it must be at least 1")
        if not 0.0 <= self.eta < float("inf"):
            raise InputError(f"draft loss eta is {self.eta}; it must be a number of at least 0")
        if self.steps < 1:
            raise InputError(f"draft loss steps is {self.steps}; it must be at least 1")
        if not 0.0 < self.decay <= 1.0:
            raise InputError(f"draft loss decay is {self.decay}; it must lie above 0 and be at most 1")


@struct.dataclass
class DraftCounts:
    """Slots that count at each step, float32.

    drafted: slots whose step a round could draft (see `drafted_slots`).
    trained: those of them where the policy's likeliest token lies in the draft vocabulary.
    """

    drafted: Float[Array, "i"]
    trained: Float[Array, "i"]


@struct.dataclass
class DraftMetrics:
    """Means per step. With `counts` of a larger batch given to `draft_loss`, shares that add up over its parts.

    loss: as `DraftLossConfig` says; cross-entropy over the trained slots, total variation over the drafted ones.
    agreement: how often the head's likeliest token is the policy's, over the drafted slots.
    overlap: sum over tokens of min(p, q), p not renormalised, over the drafted slots: the acceptance of a ratio test.
    """

    loss: Float[Array, "i"]
    agreement: Float[Array, "i"]
    overlap: Float[Array, "i"]


def shift(x: Array, steps: int) -> Array:
    """`x[:, p + steps]` at slot `p`, zero (False) where that lies beyond the end."""
    kept = x[:, steps:]
    return jnp.pad(kept, [(0, 0), (0, x.shape[1] - kept.shape[1])] + [(0, 0)] * (x.ndim - 2))


def drafted_slots(mask: Bool[Array, "b t"], step: int) -> Bool[Array, "b t"]:
    """Slots whose step a round could draft: it starts from an emitted token, and the predicted token was emitted."""
    return shift(mask, 1) & shift(mask, 2 + step)


def top_in_draft_vocab(target_ids: Int[Array, "dv"], top: Int[Array, "b t"], vocab_size: int) -> Bool[Array, "b t"]:
    """Where the policy's likeliest token can be drafted."""
    return jnp.zeros((vocab_size,), bool).at[target_ids].set(True)[top]


@struct.dataclass
class Judgement:
    """One draft of every slot: what is trained where it is known, what wherever it is drafted, and two figures."""

    known: Float[Array, "b t"]
    everywhere: Float[Array, "b t"] | None
    agrees: Bool[Array, "b t"]
    accepted: Float[Array, "b t"]


def judge(
    config: DraftLossConfig,
    logits: Float[Array, "b t dv"],
    log_p: Float[Array, "b t dv"],
    top: Int[Array, "b t"],
    target_ids: Int[Array, "dv"],
) -> Judgement:
    """Score drafts.

    Args:
        logits: of the head. log_p: the policy's log-law over the draft vocabulary, not renormalised.
        top: the policy's likeliest token. target_ids: of the draft vocabulary.
    """
    log_q = jax.nn.log_softmax(logits, axis=-1)
    cross_entropy = -(jax.nn.softmax(log_p, axis=-1) * log_q).sum(-1)
    accepted = jnp.exp(jnp.minimum(log_p, log_q)).sum(-1)
    agrees = target_ids[jnp.argmax(logits, axis=-1)] == top
    figures = {"agrees": agrees, "accepted": lax.stop_gradient(accepted)}
    if config.kind == "kl":
        return Judgement(cross_entropy, None, **figures)
    if config.kind == "tv":
        return Judgement(jnp.zeros_like(cross_entropy), 1.0 - accepted, **figures)
    share = jnp.exp(-config.eta * lax.stop_gradient(accepted))
    return Judgement(share * cross_entropy, (1.0 - share) * (1.0 - accepted), **figures)


def add_up(
    judged: list[Judgement], drafted: list[Bool[Array, "b t"]], trained: list[Bool[Array, "b t"]], counts: DraftCounts
) -> DraftMetrics:
    """Means over the slots that count at each step, as shares of `counts`."""
    loss, agreement, overlap = [], [], []
    for step, (one, at, known) in enumerate(zip(judged, drafted, trained, strict=True)):
        drafted_count, trained_count = (jnp.maximum(n[step], 1.0) for n in (counts.drafted, counts.trained))
        total = jnp.where(known, one.known, 0.0).sum() / trained_count
        if one.everywhere is not None:
            total += jnp.where(at, one.everywhere, 0.0).sum() / drafted_count
        loss.append(total)
        agreement.append((one.agrees & at).sum(dtype=jnp.float32) / drafted_count)
        overlap.append(jnp.where(at, one.accepted, 0.0).sum() / drafted_count)
    return DraftMetrics(jnp.stack(loss), jnp.stack(agreement), jnp.stack(overlap))


def weighted(config: DraftLossConfig, metrics: DraftMetrics) -> Float[Array, ""]:
    """The loss of all steps together."""
    decay = config.decay ** jnp.arange(metrics.loss.shape[0], dtype=jnp.float32)
    return (decay * metrics.loss).sum()
