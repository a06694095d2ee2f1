"""Training of a block drafter (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147): many blocks of a sequence at once.

A block begins at an anchor, a token of the response; its slots read the features of all tokens before the anchor and
each other, as they are served, and the true tokens stand where the correction reads the draft before. Anchors are drawn
anew for every text, from the text itself, so that the loss is a function of its arguments.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.drafters.block import block_tokens, confidence_logits, corrected, fuse
from specrl_jax.drafters.block_params import BlockConfig, BlockParams, BlockWeights
from specrl_jax.drafters.draft_losses import (
    DraftBatch,
    DraftCounts,
    DraftLossConfig,
    DraftMetrics,
    Shared,
    Teacher,
    add_up,
    judge_all,
    teacher,
    top_in_draft_vocab,
    weighted,
)
from specrl_jax.models.linear import logits_of
from specrl_jax.models.norm import rms_norm
from specrl_jax.models.numerics import in_chunks
from specrl_jax.models.policy import mix_and_mlp, project_qkv

_MASKED = -1e30
_AT_ONCE = 512  # slots of a sequence's blocks whose scores exist at a time


def choose_anchors(
    tokens: Int[Array, "b t"], mask: Bool[Array, "b t"], count: int
) -> tuple[Int[Array, "b a"], Bool[Array, "b a"]]:
    """Tokens of responses that another one follows: at most `count` of each sequence, and which places are filled."""
    slots = tokens.shape[1]
    possible = mask & jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    # Neither the seed nor a draw depends on how far the text is padded: microbatches are cut to their longest.
    place = jnp.arange(slots, dtype=jnp.uint32)
    sums = jnp.sum(tokens.astype(jnp.uint32) * (place * jnp.uint32(2654435761) + 1)[None], axis=1, dtype=jnp.uint32)

    def drawn(seed: Array) -> Float[Array, "t"]:
        key = jax.random.fold_in(jax.random.key(0), seed)
        return jax.vmap(lambda at: jax.random.uniform(jax.random.fold_in(key, at)))(place)

    order = jnp.where(possible, jax.vmap(drawn)(sums), -1.0)
    best, anchors = lax.top_k(order, min(count, slots))
    return anchors.astype(jnp.int32), best >= 0.0


def _attend_blocks(
    base: tuple[Float[Array, "b t g c"], Float[Array, "b t g c"]],
    q: Float[Array, "a b s h c"],
    own_keys: Float[Array, "a b s g c"],
    own_values: Float[Array, "a b s g c"],
    anchors: Int[Array, "a b"],
) -> Float[Array, "a b s h c"]:
    """Every slot of a block over the tokens before its anchor (keys and values `base`) and over its own block."""
    keys, values = base
    count, batch, slots, _, width = q.shape
    groups = keys.shape[2]
    grouped = (q * width**-0.5).reshape(count, batch, slots, groups, -1, width)
    scores = jnp.einsum("absgmc,btgc->bagmst", grouped, keys, preferred_element_type=jnp.float32)
    before = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, None] < anchors.T[:, :, None]
    scores = jnp.where(before[:, :, None, None, None], scores, _MASKED)
    own_scores = jnp.einsum("absgmc,abegc->bagmse", grouped, own_keys, preferred_element_type=jnp.float32)
    mix = jax.nn.softmax(jnp.concatenate([scores, own_scores], axis=-1), axis=-1).astype(values.dtype)
    read, own = mix[..., : keys.shape[1]], mix[..., keys.shape[1] :]
    out = jnp.einsum("bagmst,btgc->absgmc", read, values, preferred_element_type=jnp.float32)
    out = out + jnp.einsum("bagmse,abegc->absgmc", own, own_values, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


def block_hidden(
    config: BlockConfig,
    weights: BlockWeights,
    embed: Float[Array, "v d"],
    tokens: Int[Array, "b t"],
    features: Float[Array, "b t fd"],
    anchors: Int[Array, "b a"],
) -> Float[Array, "b a k d"]:
    """Hidden states of all drafts of the blocks at the anchors, as `block.draft_hidden`; none reaches the policy."""
    backbone, slots = config.backbone, config.block_size
    (batch, width), count = tokens.shape, anchors.shape[1]
    embed, features = lax.stop_gradient(embed), lax.stop_gradient(features)
    fused = fuse(config, weights, features.reshape(batch * width, -1))
    base = jnp.tile(jnp.arange(width, dtype=jnp.int32), batch)
    newest = jnp.take_along_axis(tokens, anchors, axis=1)
    x = embed[block_tokens(config, newest).reshape(-1)].astype(weights.fc.dtype)
    positions = (anchors[:, :, None] + jnp.arange(slots, dtype=jnp.int32)[None, None]).reshape(-1)

    @jax.checkpoint
    def layer_of(layer: object, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        _, keys, values = (y.reshape(batch, width, *y.shape[1:]) for y in project_qkv(backbone, layer, fused, base))  # type: ignore[arg-type]
        normed = rms_norm(x, layer.attn_norm, backbone.rms_norm_eps)  # type: ignore[attr-defined]
        own = project_qkv(backbone, layer, normed, positions)  # type: ignore[arg-type]
        blocks = (*(y.reshape(batch, count, slots, *y.shape[1:]).swapaxes(0, 1) for y in own), anchors.T)
        attended = in_chunks(_attend_blocks, (keys, values), blocks, max(1, _AT_ONCE // slots)).swapaxes(0, 1)
        return mix_and_mlp(backbone, layer, x, attended.reshape(x.shape[0], *attended.shape[3:]))  # type: ignore[arg-type]

    for layer in weights.layers:
        x = layer_of(layer, x)
    x = rms_norm(x, weights.final_norm, backbone.rms_norm_eps).reshape(batch, count, slots, -1)
    return x if config.sample_from_anchor else x[:, :, 1:]


def _at(x: Array, places: Int[Array, "b a"]) -> Array:
    """`x[b, places]`, zero (False) beyond the end."""
    return jax.vmap(lambda row, place: row.at[place].get(mode="fill", fill_value=0))(x, places)


def _slots_that_count(
    target_ids: Int[Array, "dv"],
    law: Teacher,
    vocab: int,
    batch: DraftBatch,
    config: BlockConfig,
    loss: DraftLossConfig,
) -> tuple[Int[Array, "b a"], list[Bool[Array, "b a"]], list[Bool[Array, "b a"]]]:
    """Anchors, and at each depth the drafted ones and those of them that are trained."""
    anchors, valid = choose_anchors(batch.tokens, batch.mask, loss.anchors)
    known = top_in_draft_vocab(target_ids, law.top, vocab)
    drafted = [valid & _at(batch.mask, anchors + 1 + depth) for depth in range(config.drafts)]
    trained = [at & _at(known, anchors + depth) for depth, at in enumerate(drafted)]
    return anchors, drafted, trained


def block_counts(
    target_ids: Int[Array, "dv"],
    rows: Float[Array, "v d"],
    batch: DraftBatch,
    config: BlockConfig,
    loss: DraftLossConfig,
) -> DraftCounts:
    """Drafts that count at each depth; add them up over devices or microbatches and give them to `block_loss`."""
    law = teacher(batch, rows, loss.chunk)
    _, drafted, trained = _slots_that_count(target_ids, law, rows.shape[0], batch, config, loss)
    return DraftCounts(*(jnp.stack([at.sum(dtype=jnp.float32) for at in slots]) for slots in (drafted, trained)))


def block_loss(
    weights: BlockWeights,
    params: BlockParams,
    shared: Shared,
    batch: DraftBatch,
    config: BlockConfig,
    loss_config: DraftLossConfig,
    counts: DraftCounts | None = None,
) -> tuple[Float[Array, ""], DraftMetrics]:
    """As `eagle3_training.draft_loss`, a step being a draft of the block; differentiable in `weights` alone.

    A confidence head's cross-entropy with the acceptance of a ratio test counts as much as the drafts.

    Args:
        params: output rows and draft vocabulary.
    """
    target_ids, rows = params.target_ids, shared.head
    counts = block_counts(target_ids, rows, batch, config, loss_config) if counts is None else counts
    law = teacher(batch, rows, loss_config.chunk)
    anchors, drafted, trained = _slots_that_count(target_ids, law, rows.shape[0], batch, config, loss_config)
    hidden = block_hidden(config, weights, shared.embed, batch.tokens, batch.features, anchors)
    assert params.lm_head is not None
    kernel = lax.stop_gradient(params.lm_head)

    def drafts_of(own: tuple[BlockWeights, Array], hidden: Array, before: Array) -> Array:
        return corrected(config, own[0], logits_of(hidden, own[1])[:, None], before[:, None])[:, 0]

    judged, unsure = [], jnp.float32(0.0)
    for depth in range(config.drafts):
        own, before = hidden[:, :, depth], _at(batch.tokens, anchors + depth)
        drafts = (own.reshape(-1, own.shape[2]), before.reshape(-1))
        states, there = jax.tree.map(lambda x, depth=depth: _at(x, anchors + depth), (batch.states, law))
        judged.append(judge_all(loss_config, drafts_of, (weights, kernel), drafts, states, there, rows, target_ids))
        odds = confidence_logits(config, weights, own, before)
        if odds is not None:
            entropy = jax.nn.softplus(odds) - odds * judged[-1].accepted
            share = loss_config.decay**depth / jnp.maximum(counts.drafted[depth], 1.0)
            unsure += share * jnp.where(drafted[depth], entropy, 0.0).sum()
    metrics = add_up(judged, drafted, trained, counts)
    return weighted(loss_config, metrics) + unsure, metrics
