"""Losses of draft heads: what they learn from, and how a step of drafts is scored against the policy's law."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.errors import InputError
from specrl_jax.models.linear import logits_of
from specrl_jax.models.numerics import in_chunks


@struct.dataclass
class Teacher:
    """The policy's law of the token after every slot, in short: likeliest token and logarithm of its normaliser."""

    top: Int[Array, "b t"]
    log_total: Float[Array, "b t"]


@struct.dataclass
class DraftBatch:
    """What the policy's training forward leaves for the draft head; sequences start at slot 0, right-padded.

    tokens: prompt and response, `[b, t]`.
    features: the policy's residual streams at the head's boundaries, concatenated, `[b, t, fd]`.
    states: what the policy's output rows read at slot `p`; `teacher` makes its law of the token after `p`, `[b, t, d]`.
    mask: True where a token belongs to a response, `[b, t]`.
    law: what `teacher` made of the states, where it is kept, as it costs a product with the whole vocabulary; None: it
        is made anew where it is read.
    """

    tokens: Int[Array, "b t"]
    features: Float[Array, "b t fd"]
    states: Float[Array, "b t d"]
    mask: Bool[Array, "b t"]
    law: Teacher | None = None


@struct.dataclass
class Shared:
    """What the training of a head reads of the policy, detached: embedding and output rows, `[v, d]`."""

    embed: Float[Array, "v d"]
    head: Float[Array, "v d"]


@dataclass(frozen=True)
class DraftLossConfig:
    """steps: length of the unroll, the longest draft to train for. decay: weight of step `i` is `decay ** i`.

    kind: "kl": cross-entropy against the policy's law restricted to the draft vocabulary. "tv": total variation,
        1 minus the acceptance `a` of a ratio test. "lk": the one where drafts are bad, the other where they are good, a
        slot's weight of the first being `exp(-eta * a)`, without gradient (LK losses, arXiv 2602.23881).
    anchors: blocks of a sequence that train a block drafter, which drafts as many tokens as it was made for.
    chunk: slots whose laws over a vocabulary exist at a time.
    """

    steps: int = 3
    decay: float = 0.8
    kind: Literal["kl", "tv", "lk"] = "kl"
    eta: float = 3.0
    anchors: int = 32
    chunk: int = 1024

    def __post_init__(self) -> None:
        if self.kind not in ("kl", "tv", "lk"):
            raise InputError(f"draft loss kind is {self.kind!r}; choose kl, tv or lk")
        for name in ("anchors", "chunk"):
            if getattr(self, name) < 1:
                raise InputError(f"draft loss {name} is {getattr(self, name)}; it must be at least 1")
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

    known: Float[Array, "*n"]
    everywhere: Float[Array, "*n"] | None
    agrees: Bool[Array, "*n"]
    accepted: Float[Array, "*n"]


def teacher(batch: DraftBatch, rows: Float[Array, "v d"], chunk: int) -> Teacher:
    """The policy's law at every slot, made `chunk` slots at a time where it is not kept; no gradient reaches it."""
    if batch.law is not None:
        return batch.law
    states, rows = lax.stop_gradient((batch.states, rows))

    def read(rows: Array, states: Float[Array, "n d"]) -> tuple[Array, Array]:
        logits = logits_of(states, rows)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), jax.nn.logsumexp(logits, axis=-1)

    top, log_total = in_chunks(read, rows, (states.reshape(-1, states.shape[-1]),), chunk)
    shape = states.shape[:2]
    return Teacher(top.reshape(shape), log_total.reshape(shape))


def judge_all(
    config: DraftLossConfig,
    drafts_of: Callable[..., Float[Array, "n dv"]],
    weights: Any,
    inputs: tuple[Array, ...],
    states: Float[Array, "b t d"],
    known: Teacher,
    rows: Float[Array, "v d"],
    target_ids: Int[Array, "dv"],
) -> Judgement:
    """`judge` for drafts `[b, t]` whose laws are made `config.chunk` at a time, in the gradient too.

    Args:
        drafts_of: `(weights, *inputs) -> logits` of the head at some slots.
        inputs: arrays `[b * t, ...]`.
        states, known: the policy's, of the tokens that are drafted; no gradient reaches them.
        rows: the policy's output rows.
    """

    def one(weights: Any, states: Array, top: Array, log_total: Array, *x: Array) -> Judgement:
        own, restricted = weights
        log_p = logits_of(states, restricted) - log_total[:, None]
        return judge(config, drafts_of(own, *x), log_p, top, target_ids)

    states, restricted = lax.stop_gradient((states, rows[target_ids]))
    flat = (states.reshape(-1, states.shape[-1]), known.top.reshape(-1), known.log_total.reshape(-1))
    judged = in_chunks(one, (weights, restricted), (*flat, *inputs), config.chunk)
    return jax.tree.map(lambda x: x.reshape(known.top.shape), judged)


def judge(
    config: DraftLossConfig,
    logits: Float[Array, "n dv"],
    log_p: Float[Array, "n dv"],
    top: Int[Array, "n"],
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
