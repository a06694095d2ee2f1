"""Training of block drafters: trained as served, a float64 loss, gradients that stay where they belong, learning."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import array_shapes
from test_block import random_block
from tiny import VOCAB, no_texts

from specrl_jax.drafters.block import BlockDrafter, corrected
from specrl_jax.drafters.block_training import block_counts, block_hidden, block_loss, choose_anchors
from specrl_jax.drafters.draft_losses import DraftBatch, DraftCounts, DraftLossConfig, Shared
from specrl_jax.drafters.protocol import Choice
from specrl_jax.models.tree import Tree

pytestmark = pytest.mark.ci
BATCH, SLOTS = 3, 15
LOSS = DraftLossConfig(decay=0.7, anchors=4)


def readout(embed):
    """A policy whose output rows read the law that stands in a batch's states."""
    return Shared(embed, jnp.eye(embed.shape[0]))


def example(seed=0, width=None):
    keys = jax.random.split(jax.random.key(seed), 3)
    tokens = jax.random.randint(keys[0], (BATCH, SLOTS), 0, VOCAB)
    features = jax.random.normal(keys[1], (BATCH, SLOTS, width))
    logits = 2.0 * jax.random.normal(keys[2], (BATCH, SLOTS, VOCAB))
    slot = jnp.arange(SLOTS)[None]
    start, end = 3 + jnp.arange(BATCH)[:, None], SLOTS - 2 * jnp.arange(BATCH)[:, None]
    return DraftBatch(tokens, features, jax.nn.log_softmax(logits, axis=-1), (slot >= start) & (slot < end))


def case(**changes):
    drafter, params = random_block(**changes)
    config = drafter.config
    batch = example(width=len(config.boundaries) * config.backbone.hidden_size)
    embed = jax.random.normal(jax.random.key(9), (VOCAB, config.backbone.hidden_size))
    return config, params, embed, batch


@pytest.mark.parametrize("changes", [{}, {"sample_from_anchor": False, "markov_rank": 0, "confidence": False}])
def test_the_blocks_that_are_trained_are_those_that_are_served(changes):
    config, params, embed, batch = case(**changes)
    anchors = jnp.asarray([[1, 5, 9]] * BATCH, jnp.int32)
    hidden = jax.jit(block_hidden, static_argnums=0)(
        config, params.weights, embed, batch.tokens, batch.features, anchors
    )
    drafter = BlockDrafter(config)
    following = jnp.pad(batch.tokens, ((0, 0), (0, 8)))
    for column, anchor in enumerate((1, 5, 9)):
        counts = jnp.full((BATCH,), anchor, jnp.int32)
        pairs = batch.tokens[:, 1:], batch.features[:, :-1]
        state = drafter.commit(params, embed, drafter.init_state(BATCH, 16), *pairs, counts)
        kept = []

        def choose(logits, ids, before, count, step=None, kept=kept, anchor=anchor):
            kept.append(logits[:, 0])
            return Choice(following[:, anchor + 1 + before.shape[2]][:, None, None])

        drafter.propose(params, embed, state, no_texts(BATCH), Tree.chain(config.drafts), choose)
        for depth, served in enumerate(kept):
            own = hidden[:, column, depth]
            before = following[:, anchor + depth]
            trained = corrected(config, params.weights, own @ params.lm_head.T, before)
            np.testing.assert_allclose(trained, served, atol=1e-5)


@pytest.mark.parametrize("kind", ["kl", "tv", "lk"])
def test_loss_and_metrics_equal_float64_sums(kind):
    config, params, embed, batch = case()
    loss_config = replace(LOSS, kind=kind, eta=2.0)
    value = jax.jit(block_loss, static_argnums=(4, 5))
    loss, metrics = value(params.weights, params, readout(embed), batch, config, loss_config)
    anchors, valid = choose_anchors(batch.tokens, batch.mask, loss_config.anchors)
    hidden = np.asarray(block_hidden(config, params.weights, embed, batch.tokens, batch.features, anchors), np.float64)
    named = {name: np.asarray(x, np.float64) for name, x in vars(params.weights).items() if isinstance(x, jax.Array)}
    head, teacher, mask = (
        np.asarray(params.lm_head, np.float64),
        np.exp(np.asarray(batch.states, np.float64)),
        np.asarray(batch.mask),
    )
    total = 0.0
    for depth in range(config.drafts):
        terms, overlaps, agreements, unsure = [], [], [], []
        for (row, place), anchor in np.ndenumerate(np.asarray(anchors)):
            label = anchor + 1 + depth
            if not valid[row, place] or label >= SLOTS or not mask[row, label]:
                continue
            token = int(batch.tokens[row, anchor + depth])
            own = hidden[row, place, depth]
            logits = head @ own + named["markov_out"] @ named["markov_in"][token]
            q = np.exp(logits - logits.max())
            q /= q.sum()
            p = teacher[row, label - 1]
            overlaps.append(np.minimum(p, q).sum())
            agreements.append(q.argmax() == p.argmax())
            share = {"kl": 1.0, "tv": 0.0, "lk": np.exp(-2.0 * overlaps[-1])}[kind]
            terms.append(-share * (p * np.log(q)).sum() + (1.0 - share) * (1.0 - overlaps[-1]))
            odds = (
                np.concatenate([own, named["markov_in"][token]]) @ named["confidence_kernel"][0]
                + named["confidence_bias"][0]
            )
            unsure.append(np.log1p(np.exp(-abs(odds))) + max(odds, 0.0) - odds * overlaps[-1])
        np.testing.assert_allclose(metrics.loss[depth], np.mean(terms), rtol=1e-4)
        np.testing.assert_allclose(metrics.overlap[depth], np.mean(overlaps), rtol=1e-4)
        np.testing.assert_allclose(metrics.agreement[depth], np.mean(agreements), rtol=1e-5)
        total += 0.7**depth * (np.mean(terms) + np.mean(unsure))
    np.testing.assert_allclose(loss, total, rtol=1e-4)


def test_parts_of_a_batch_add_up():
    config, params, embed, batch = case()
    counts = block_counts(params.target_ids, readout(embed).head, batch, config, LOSS)
    value = jax.jit(jax.value_and_grad(block_loss, has_aux=True), static_argnums=(4, 5))
    (whole, _), gradient = value(params.weights, params, readout(embed), batch, config, LOSS, counts)
    total, summed = 0.0, None
    for row in range(BATCH):
        part = jax.tree.map(lambda x, row=row: x[row : row + 1], batch)
        (loss, _), grads = value(params.weights, params, readout(embed), part, config, LOSS, counts)
        total += float(loss)
        summed = grads if summed is None else jax.tree.map(jnp.add, summed, grads)
    np.testing.assert_allclose(total, whole, rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), summed, gradient)


def test_many_blocks_attend_some_at_a_time(monkeypatch):
    """The loss and its gradient are those of all at once, and no array has the scores of all."""
    config, params, embed, batch = case()
    loss_config = replace(LOSS, anchors=6)

    def value_and_shapes():
        def loss(weights):
            return block_loss(weights, params, readout(embed), batch, config, loss_config)[0]

        return jax.jit(jax.value_and_grad(loss))(params.weights), array_shapes(jax.grad(loss), params.weights)

    def most_scores(shapes):
        """Blocks, of those whose scores over the tokens of a text stand in one array."""
        backbone = config.backbone
        shared = backbone.num_heads // backbone.num_kv_heads
        tail = (backbone.num_kv_heads, shared, config.block_size, SLOTS)
        return max(shape[1] for shape in shapes if len(shape) == 6 and shape[2:] == tail)

    (whole, gradient), shapes = value_and_shapes()
    assert most_scores(shapes) == 6
    monkeypatch.setattr("specrl_jax.drafters.block_training._AT_ONCE", 4 * config.block_size)
    (some, some_gradient), shapes = value_and_shapes()
    assert most_scores(shapes) == 4
    np.testing.assert_allclose(some, whole, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(some_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_no_gradient_leaves_the_drafter():
    config, params, embed, batch = case()

    def loss(features, embed, head):
        return block_loss(
            params.weights,
            replace(params, lm_head=head),
            readout(embed),
            replace(batch, features=features),
            config,
            LOSS,
        )[0]

    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(batch.features, embed, params.lm_head):
        assert not np.asarray(gradient).any()


def test_anchors_are_tokens_of_the_response_that_another_follows():
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 5)
    mask = jnp.asarray([[False] * 4 + [True] * 5 + [False] * 3, [False] * 11 + [True]])
    anchors, valid = choose_anchors(tokens, mask, 6)
    assert sorted(anchors[0][valid[0]].tolist()) == [4, 5, 6, 7]
    assert not valid[1].any()
    again, _ = choose_anchors(tokens, mask, 6)
    np.testing.assert_array_equal(anchors, again)
    others = [choose_anchors(tokens.at[0, 0].add(change), mask, 6)[0][0] for change in range(1, 6)]
    assert any((other != anchors[0]).any() for other in others)


def test_it_learns_a_chain_of_tokens():
    """A policy whose next token is a function of the last: drafts are learned, and their confidence with them."""
    config, params, embed, _ = case()
    table = np.random.default_rng(0).permutation(VOCAB)
    walks = [np.arange(BATCH * 4) % VOCAB]
    for _ in range(SLOTS - 1):
        walks.append(table[walks[-1]])
    tokens = jnp.asarray(np.stack(walks, axis=1), jnp.int32)
    law = jnp.log(0.99 * jax.nn.one_hot(jnp.asarray(table)[tokens], VOCAB) + 0.01 / VOCAB)
    features = jnp.tile(embed[tokens], (1, 1, len(config.boundaries)))
    batch = DraftBatch(tokens, features, law, jnp.ones(tokens.shape, bool))
    optimizer = optax.adam(0.01)

    @jax.jit
    def step(weights, state):
        (_, metrics), gradient = jax.value_and_grad(block_loss, has_aux=True)(
            weights, params, readout(embed), batch, config, replace(LOSS, anchors=8)
        )
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, metrics

    weights, first = params.weights, None
    with jax.numpy_dtype_promotion("standard"):  # optax adds Python numbers
        state = optimizer.init(weights)
        for _ in range(150):
            weights, state, metrics = step(weights, state)
            first = metrics if first is None else first
    assert (np.asarray(metrics.overlap) > np.asarray(first.overlap) + 0.3).all()
    assert isinstance(block_counts(params.target_ids, readout(embed).head, batch, config, LOSS), DraftCounts)
