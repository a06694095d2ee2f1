"""Training-time test of a head of one layer (EAGLE-3, Li et al., arXiv 2503.01840, section 3): unroll and loss.

Serving feeds the head its own hidden states, so training does too. Step `i` of
the unroll stands at every slot `p` at once: it reads the true token `x_{p+1+i}`
with the head's output of step `i - 1` at the same slot (at step 0 with
`fc(g_p)`), at rotary position `p + i`, and predicts `x_{p+2+i}`. It attends to
the step-0 keys of slots `0..p` and to its own slot's keys of steps `1..i`,
which is what a chain drafted from slot `p` has in its cache.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.draft_layer import (
    LayerConfig,
    LayerWeights,
    attention_input,
    draft_logits,
    fed_back,
    fuse,
    mix_and_mlp,
    project_keys,
    project_queries,
)
from specrl_jax.drafters.draft_losses import (
    DraftBatch,
    DraftCounts,
    DraftLossConfig,
    DraftMetrics,
    Judgement,
    Shared,
    Teacher,
    add_up,
    drafted_slots,
    judge_all,
    shift,
    teacher,
    top_in_draft_vocab,
    weighted,
)
from specrl_jax.models.numerics import in_chunks

_MASKED = -1e30
_AT_ONCE, _QUERIES, _SPANS = 512, 128, 8
"""Slots of a span that attend at once; above that, slots whose scores exist at a time; and spans of a sequence."""


def _attend_block(
    q: Float[Array, "b g m q c"],
    keys: Float[Array, "b g s c"],
    values: Float[Array, "b g s c"],
    own_keys: Float[Array, "e b g q c"],
    own_values: Float[Array, "e b g q c"],
    own_slots: Int[Array, "q"],
) -> Float[Array, "b g m q c"]:
    """Slots over step-0 keys up to their own and over the later keys of their own."""
    q = q * q.shape[-1] ** -0.5
    scores = jnp.einsum("bgmqc,bgsc->bgmqs", q, keys, preferred_element_type=jnp.float32)
    visible = jnp.arange(keys.shape[2], dtype=jnp.int32)[None] <= own_slots[:, None]
    scores = jnp.where(visible[None, None, None], scores, _MASKED)
    own_scores = [(q * key[:, :, None]).astype(jnp.float32).sum(-1, keepdims=True) for key in own_keys]
    maximum = scores.max(-1, keepdims=True)
    for own in own_scores:
        maximum = jnp.maximum(maximum, own)
    maximum = lax.stop_gradient(maximum)
    mix = jnp.exp(scores - maximum)
    total = mix.sum(-1, keepdims=True)
    out = jnp.einsum("bgmqs,bgsc->bgmqc", mix.astype(values.dtype), values, preferred_element_type=jnp.float32)
    for own, value in zip(own_scores, own_values, strict=True):
        own_mix = jnp.exp(own - maximum)
        total = total + own_mix
        out = out + own_mix * value[:, :, None].astype(jnp.float32)
    return (out / total).astype(q.dtype)


def _attend(
    q: Float[Array, "b t h c"],
    keys: Float[Array, "b t g c"],
    values: Float[Array, "b t g c"],
    own_keys: list[Array],
    own_values: list[Array],
) -> Float[Array, "b t h c"]:
    """Attention of one step, in spans of queries that skip the keys after them."""
    batch, slots, heads, width = q.shape
    groups = keys.shape[2]
    grouped = q.reshape(batch, slots, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
    empty = jnp.zeros((0, *keys.shape), keys.dtype)
    own_k = jnp.stack([k.transpose(0, 2, 1, 3) for k in own_keys]) if own_keys else empty
    own_v = jnp.stack([v.transpose(0, 2, 1, 3) for v in own_values]) if own_values else empty
    span = -(-max(_QUERIES, -(-slots // _SPANS)) // _QUERIES) * _QUERIES
    outs = []
    for start in range(0, slots, span):
        end = min(start + span, slots)
        own = (own_k[..., start:end, :], own_v[..., start:end, :])
        outs.append(_attend_span(grouped[:, :, :, start:end], keys[:, :, :end], values[:, :, :end], *own, start))
    return jnp.concatenate(outs, axis=3).transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _attend_span(
    q: Float[Array, "b g m q c"],
    keys: Float[Array, "b g s c"],
    values: Float[Array, "b g s c"],
    own_keys: Float[Array, "e b g q c"],
    own_values: Float[Array, "e b g q c"],
    start: int,
) -> Float[Array, "b g m q c"]:
    """Slots from `start` on, at once or in blocks of `_QUERIES`; their scores are computed again backward."""
    slots = start + jnp.arange(q.shape[3], dtype=jnp.int32)
    if q.shape[3] <= _AT_ONCE:
        return jax.checkpoint(_attend_block)(q, keys, values, own_keys, own_values, slots)

    def attend(base: tuple[Array, Array], slots: Int[Array, "q"], *own: Array) -> Array:
        q, own_keys, own_values = (jnp.moveaxis(x, 0, -2) for x in own)
        return jnp.moveaxis(_attend_block(q, *base, own_keys, own_values, slots), -2, 0)

    own = (jnp.moveaxis(x, -2, 0) for x in (q, own_keys, own_values))
    return jnp.moveaxis(in_chunks(attend, (keys, values), (slots, *own), _QUERIES), 0, -2)


def ttt_hidden(
    weights: LayerWeights,
    embed: Float[Array, "v d"],
    tokens: Int[Array, "b t"],
    features: Float[Array, "b t fd"],
    config: LayerConfig,
    steps: int,
) -> list[Float[Array, "n d"]]:
    """The head's output `h2` of every step at every slot, `n = b * t`; no gradient reaches embedding and features."""
    batch, slots = tokens.shape
    embed, features = lax.stop_gradient(embed), lax.stop_gradient(features)
    hidden = fuse(config, weights, features.reshape(batch * slots, -1))
    base: tuple[Array, Array] | None = None
    own_keys: list[Array] = []
    own_values: list[Array] = []
    outputs = []
    for step in range(steps):
        positions = jnp.tile(jnp.arange(slots, dtype=jnp.int32) + step, batch)
        following = shift(tokens, 1 + step).reshape(-1)
        residual, x = attention_input(config, weights, embed, following, hidden, positions)
        q = project_queries(config, weights, x, positions).reshape(batch, slots, -1, config.head_dim)
        key, value = (y.reshape(batch, slots, -1, config.head_dim) for y in project_keys(config, weights, x, positions))
        if base is None:
            base = (key, value)
        else:
            own_keys.append(key)
            own_values.append(value)
        attended = _attend(q, *base, own_keys, own_values)
        output = mix_and_mlp(config, weights, residual, attended.reshape(batch * slots, -1, config.head_dim))
        outputs.append(output)
        hidden = fed_back(config, weights, output)
    return outputs


def ttt_logits(
    weights: LayerWeights,
    embed: Float[Array, "v d"],
    tokens: Int[Array, "b t"],
    features: Float[Array, "b t fd"],
    config: LayerConfig,
    steps: int,
) -> Float[Array, "i b t dv"]:
    """Float32 draft logits of every step and slot; `[i, :, p]` predicts the token at `p + 2 + i`."""
    outputs = ttt_hidden(weights, embed, tokens, features, config, steps)
    logits = jnp.stack([draft_logits(config, weights, hidden) for hidden in outputs])
    return logits.reshape(steps, *tokens.shape, -1)


def draft_counts(
    target_ids: Int[Array, "dv"], rows: Float[Array, "v d"], batch: DraftBatch, loss: DraftLossConfig
) -> DraftCounts:
    """Slots that count at each step; add them up over devices or microbatches and give them to `draft_loss`."""
    known = top_in_draft_vocab(target_ids, teacher(batch, rows, loss.chunk).top, rows.shape[0])
    drafted = [drafted_slots(batch.mask, step) for step in range(loss.steps)]
    trained = [slots & shift(known, 1 + step) for step, slots in enumerate(drafted)]
    drafted_count, trained_count = (jnp.stack([s.sum(dtype=jnp.float32) for s in x]) for x in (drafted, trained))
    return DraftCounts(drafted_count, trained_count)


def judged_steps(
    weights: LayerWeights,
    target_ids: Int[Array, "dv"],
    shared: Shared,
    batch: DraftBatch,
    config: LayerConfig,
    loss_config: DraftLossConfig,
) -> tuple[Teacher, list[Judgement]]:
    """The policy's law at every slot, and the drafts of every step of the unroll judged by it.

    Arguments are those of `draft_loss`. Slot `p` of step `i` is a draft of the token at `p + 2 + i`.
    """
    law = teacher(batch, shared.head, loss_config.chunk)
    logits_of, judged = functools.partial(draft_logits, config), []
    unroll = ttt_hidden(weights, shared.embed, batch.tokens, batch.features, config, loss_config.steps)
    for step, hidden in enumerate(unroll):
        states, following = jax.tree.map(lambda x, after=1 + step: shift(x, after), (batch.states, law))
        judged.append(judge_all(loss_config, logits_of, weights, (hidden,), states, following, shared.head, target_ids))
    return law, judged


def draft_loss(
    weights: LayerWeights,
    target_ids: Int[Array, "dv"],
    shared: Shared,
    batch: DraftBatch,
    config: LayerConfig,
    loss_config: DraftLossConfig,
    counts: DraftCounts | None = None,
) -> tuple[Float[Array, ""], DraftMetrics]:
    """Sum over steps of `decay ** step` times the step's loss; differentiable in `weights` alone.

    Args:
        weights, target_ids: the head (`Eagle3Params`, `MtpParams`).
        shared: the policy's embedding and output rows.
        batch: sequences of the policy.
        config: the head's architecture.
        loss_config: length of the unroll and weights of its steps.
        counts: slots of the whole batch where `batch` is a part of it (a device, a microbatch); losses, metrics
            and gradients then add up over the parts.
    """
    counts = draft_counts(target_ids, shared.head, batch, loss_config) if counts is None else counts
    law, judged = judged_steps(weights, target_ids, shared, batch, config, loss_config)
    known = top_in_draft_vocab(target_ids, law.top, shared.head.shape[0])
    drafted = [drafted_slots(batch.mask, step) for step in range(loss_config.steps)]
    trained = [at & shift(known, 1 + step) for step, at in enumerate(drafted)]
    metrics = add_up(judged, drafted, trained, counts)
    return weighted(loss_config, metrics), metrics
