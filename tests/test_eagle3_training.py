"""Training-time test of the EAGLE-3 head: against SpecForge, against served drafting, against NumPy."""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import array_shapes
from safetensors.numpy import load_file
from test_eagle3_decode import hidden_first
from tiny import no_texts

from specrl_jax.drafters import eagle3, eagle3_layer, eagle3_training
from specrl_jax.drafters.draft_losses import DraftBatch, DraftCounts, DraftLossConfig, Shared
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_folder import drafter_tensors, load_eagle3
from specrl_jax.drafters.eagle3_params import Eagle3Config, Eagle3Params, init_eagle3
from specrl_jax.drafters.eagle3_training import draft_counts, draft_loss, ttt_logits
from specrl_jax.drafters.heads import drafter_for_head
from specrl_jax.drafters.protocol import Choice
from specrl_jax.errors import InputError
from specrl_jax.models.tree import Tree

pytestmark = pytest.mark.ci

FIXTURES = Path(__file__).parent / "fixtures" / "eagle3"
STEPS = 5

loss_and_gradient = jax.jit(jax.value_and_grad(draft_loss, has_aux=True), static_argnums=(4, 5))


@pytest.fixture(scope="module")
def specforge():
    """A head that SpecForge made, its embedding, and what SpecForge's trainer computed."""
    drafter, params = load_eagle3(FIXTURES / "head")
    embed = jnp.asarray(load_file(FIXTURES / "head" / "model.safetensors")["embed_tokens.weight"])
    return drafter.config, params, embed, dict(np.load(FIXTURES / "expected.npz"))


def batch_of(expected):
    """The fixture's data, with one more token than SpecForge has, whose embedding it pads with."""
    pad = ((0, 0), (0, 1))
    teacher = jax.nn.log_softmax(jnp.pad(expected["teacher"], (*pad, (0, 0))), axis=-1)
    tokens = jnp.pad(jnp.asarray(expected["tokens"]), pad)
    return DraftBatch(tokens, jnp.pad(expected["features"], (*pad, (0, 0))), teacher, jnp.ones(tokens.shape, bool))


def readout(embed):
    """A policy whose output rows read the law that stands in a batch's states."""
    return Shared(embed, jnp.eye(embed.shape[0], dtype=jnp.float32))


def unroll(case):
    """Logits of every step and slot, compiled anew so that a test may plant a mistake."""
    config, params, embed, expected = case
    batch = batch_of(expected)
    run = jax.jit(lambda weights: ttt_logits(weights, embed, batch.tokens, batch.features, config, STEPS))
    return run(params.weights)[:, :, :-1]


@functools.partial(jax.jit, static_argnums=(0, 5))
def served_logits(config, params, embed, tokens, features, steps):
    """Logits `[i, slots, dv]` of chains drafted with the cache from every slot of one sequence, tokens forced."""
    slots = tokens.shape[0]
    drafter = drafter_for_head(config)
    following = jnp.pad(tokens, (0, steps + 1))
    pairs = jnp.tile(following[None, 1 : slots + 1], (slots, 1)), jnp.tile(features[None], (slots, 1, 1))
    counts = jnp.arange(1, slots + 1, dtype=jnp.int32)
    state = drafter.commit(params, embed, drafter.init_state(slots, slots), *pairs, counts)
    logits = []

    def force(scores, target_ids, before, count):
        logits.append(scores[:, 0])
        return Choice(following[counts + 1 + before.shape[2]][:, None, None])

    drafter.propose(params, embed, state, no_texts(len(counts)), Tree.chain(steps), force)
    return jnp.stack(logits)


def test_unroll_equals_specforge(specforge):
    np.testing.assert_allclose(unroll(specforge), specforge[3]["logits"], atol=1e-5)


def test_served_chains_equal_specforge(specforge):
    """The trained and the served head are one: commit and propose give what another trainer computes."""
    config, params, embed, expected = specforge
    for sequence in range(len(expected["tokens"])):
        tokens, features = (jnp.asarray(expected[name][sequence]) for name in ("tokens", "features"))
        served = served_logits(config, params, embed, tokens, features, STEPS)
        np.testing.assert_allclose(served, expected["logits"][:, sequence], atol=1e-5)


@pytest.mark.parametrize("slots", [9, 300])
def test_unroll_equals_drafting_with_the_cache(specforge, slots):
    """Steps 0 to 4 at every slot; 300 slots are more than one block of queries."""
    config, params, embed, _ = specforge
    keys = jax.random.split(jax.random.key(slots), 2)
    tokens = jax.random.randint(keys[0], (1, slots), 0, config.vocab_size)
    features = jax.random.normal(keys[1], (1, slots, 3 * config.hidden_size))
    unrolled = jax.jit(ttt_logits, static_argnums=(4, 5))(params.weights, embed, tokens, features, config, STEPS)[:, 0]
    served = served_logits(config, params, embed, tokens[0], features[0], STEPS)
    np.testing.assert_allclose(unrolled, served, atol=1e-5)


@pytest.mark.parametrize("planted", ["concat", "feedback", "shift"])
def test_a_wrong_layout_is_seen(specforge, monkeypatch, planted):
    if planted == "concat":
        monkeypatch.setattr(eagle3_training, "attention_input", hidden_first(specforge[0].hidden_size))
    elif planted == "feedback":
        layer = eagle3.mix_and_mlp

        def normalised(config, weights, hidden, attended):
            return eagle3_layer.rms_norm(
                layer(config, weights, hidden, attended), weights.final_norm, config.rms_norm_eps
            )

        monkeypatch.setattr(eagle3_training, "mix_and_mlp", normalised)
    else:
        shift = eagle3_training.shift
        monkeypatch.setattr(eagle3_training, "shift", lambda x, steps: shift(x, steps - 1))
    assert np.abs(unroll(specforge) - specforge[3]["logits"])[1:].max() > 1e-2


def test_loss_accuracy_and_gradient_equal_specforge(specforge):
    """SpecForge divides by all positions of the batch: the counts that `draft_loss` takes from outside."""
    config, params, embed, expected = specforge
    batch = batch_of(expected)
    positions = jnp.full((STEPS,), expected["tokens"].size, jnp.float32)
    counts = DraftCounts(
        draft_counts(params.target_ids, readout(embed).head, batch, DraftLossConfig(STEPS)).drafted, positions
    )
    (loss, metrics), gradient = loss_and_gradient(
        params.weights, params.target_ids, readout(embed), batch, config, DraftLossConfig(STEPS), counts
    )
    np.testing.assert_allclose(loss, expected["total"], rtol=1e-5)
    np.testing.assert_allclose(metrics.loss, expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(metrics.agreement, expected["accuracies"], rtol=1e-5)
    named = drafter_tensors(Eagle3Params(gradient, params.target_ids), config)
    for name in (name for name in named if name not in ("d2t", "t2d")):
        np.testing.assert_allclose(named[name], expected[f"gradient.{name}"], atol=1e-5, err_msg=name)


def example(config, batch=4, slots=14):
    """Prompts of 3 to 5 tokens, responses of different lengths, padding."""
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = jax.random.randint(keys[0], (batch, slots), 0, config.vocab_size)
    features = jax.random.normal(keys[1], (batch, slots, 3 * config.hidden_size))
    logits = 2.0 * jax.random.normal(keys[2], (batch, slots, config.vocab_size))
    prompt, end = 3 + jnp.arange(batch) % 3, slots - 2 * (jnp.arange(batch) % 4)
    slot = jnp.arange(slots)[None]
    mask = (slot >= prompt[:, None]) & (slot < end[:, None])
    return DraftBatch(tokens, features, jax.nn.log_softmax(logits, axis=-1), mask)


@pytest.mark.parametrize("kind", ["kl", "tv", "lk"])
def test_loss_and_metrics_equal_float64_sums(specforge, kind):
    config, params, embed, _ = specforge
    batch = example(config)
    loss_config = DraftLossConfig(steps=4, decay=0.7, kind=kind, eta=2.0)
    (loss, metrics), _ = loss_and_gradient(
        params.weights, params.target_ids, readout(embed), batch, config, loss_config
    )
    logits = jax.jit(ttt_logits, static_argnums=(4, 5))(params.weights, embed, batch.tokens, batch.features, config, 4)
    logits = np.asarray(logits, np.float64)
    teacher, mask = np.exp(np.asarray(batch.states, np.float64)), np.asarray(batch.mask)
    ids = np.asarray(params.target_ids)
    total, counted = 0.0, 0
    for step in range(4):
        entropies, agreements, overlaps, shares = [], [], [], []
        for row, slot in np.ndindex(*mask.shape):
            label = slot + 2 + step
            if label >= mask.shape[1] or not (mask[row, slot + 1] and mask[row, label]):
                continue
            p = teacher[row, label - 1]
            q = np.exp(logits[step, row, slot] - logits[step, row, slot].max())
            q = q / q.sum()
            agreements.append(ids[q.argmax()] == p.argmax())
            overlaps.append(np.minimum(p[ids], q).sum())
            shares.append({"kl": 1.0, "tv": 0.0, "lk": np.exp(-2.0 * overlaps[-1])}[kind])
            if p.argmax() in ids:
                entropies.append(-shares[-1] * (p[ids] / p[ids].sum() * np.log(q)).sum())
        assert 0 < len(entropies) < len(overlaps)
        expected = np.mean(entropies) + np.mean((1.0 - np.array(shares)) * (1.0 - np.array(overlaps)))
        np.testing.assert_allclose(metrics.loss[step], expected, rtol=1e-5)
        np.testing.assert_allclose(metrics.agreement[step], np.mean(agreements), rtol=1e-5)
        np.testing.assert_allclose(metrics.overlap[step], np.mean(overlaps), rtol=1e-5)
        total += 0.7**step * expected
        counted += len(overlaps)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    assert counted == draft_counts(params.target_ids, readout(embed).head, batch, loss_config).drafted.sum()


def test_no_gradient_reaches_the_policy(specforge):
    config, params, embed, _ = specforge
    batch = example(config)

    def loss(weights, embed, features, teacher):
        changed = batch.replace(features=features, states=teacher)
        return draft_loss(weights, params.target_ids, readout(embed), changed, config, DraftLossConfig(3))[0]

    inputs = (params.weights, embed, batch.features, batch.states)
    weights, *policy = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*inputs)
    for gradient in policy:
        assert not np.any(gradient)
    for gradient in jax.tree.leaves(weights):
        assert np.abs(gradient).max() > 0


def test_parts_of_a_batch_add_up_to_it(specforge):
    config, params, embed, _ = specforge
    batch = example(config)
    loss_config = DraftLossConfig(3)
    counts = draft_counts(params.target_ids, readout(embed).head, batch, loss_config)

    def run(part):
        return loss_and_gradient(params.weights, params.target_ids, readout(embed), part, config, loss_config, counts)

    halves = [run(jax.tree.map(lambda x, start=start: x[start : start + 2], batch)) for start in (0, 2)]
    added = jax.tree.map(jnp.add, *halves)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), added, run(batch))


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_chunks_change_nothing(specforge, kind):
    """Loss, metrics and gradient in chunks of 5 of 56 slots are those at once (float64); no law is ever whole."""
    config, params, embed, _ = specforge
    batch = example(config)

    def run(chunk):
        loss = DraftLossConfig(3, kind=kind, chunk=chunk)
        value = jax.value_and_grad(draft_loss, has_aux=True)
        wide = jax.tree.map(
            lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, (params.weights, readout(embed), batch)
        )
        return jax.jit(lambda w, r, b: value(w, params.target_ids, r, b, config, loss)), wide

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        at_once, inputs = run(1024)
        chunked, _ = run(5)
        ours, theirs = chunked(*inputs), at_once(*inputs)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10), ours, theirs)
        shapes = [array_shapes(fn, *inputs) for fn in (chunked, at_once)]
    draft_vocab = params.target_ids.shape[0]  # the policy's own is the width of the states here
    laws = [[shape for shape in some if shape and shape[-1] == draft_vocab] for some in shapes]
    assert any(np.prod(shape[:-1]) >= 56 for shape in laws[1])
    assert not any(np.prod(shape[:-1]) >= 56 for shape in laws[0])


def test_padding_and_later_tokens_do_not_count(specforge):
    """What stands beyond a sequence changes neither loss nor gradient."""
    config, params, embed, _ = specforge
    batch = example(config)
    beyond = jnp.arange(14)[None] >= (jnp.max(jnp.where(batch.mask, jnp.arange(14)[None], 0), axis=1) + 1)[:, None]
    spoiled = DraftBatch(
        jnp.where(beyond, 1, batch.tokens),
        jnp.where(beyond[..., None], 50.0, batch.features),
        jnp.where(beyond[..., None], -3.0, batch.states),
        batch.mask,
    )
    ours, theirs = (
        loss_and_gradient(params.weights, params.target_ids, readout(embed), b, config, DraftLossConfig(3))
        for b in (batch, spoiled)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), ours, theirs)


def test_bfloat16_trains(specforge):
    config, params, embed, _ = specforge
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params.weights)
    batch = example(config)
    inputs = (params.target_ids, readout(embed), batch)
    (loss, _), gradient = loss_and_gradient(low, *inputs, replace(config, dtype="bfloat16"), DraftLossConfig(3))
    (wide, _), _ = loss_and_gradient(params.weights, *inputs, config, DraftLossConfig(3))
    assert gradient.fc.dtype == jnp.bfloat16
    np.testing.assert_allclose(loss, wide, rtol=0.03)


@pytest.mark.parametrize("change", [{"steps": 0}, {"decay": 0.0}, {"decay": 1.1}])
def test_bad_loss_settings_are_refused(change):
    with pytest.raises(InputError, match="draft loss"):
        DraftLossConfig(**change)


TOY = Eagle3Config(
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=12,
    draft_vocab_size=12,
    boundaries=(1, 2, 3),
    target_hidden_size=32,
)


def toy_sequences(key, batch, slots):
    """A language whose next token depends on the last two; the features show the one before the newest."""
    law_key, feature_key, first_key, sample_key = jax.random.split(jax.random.key(0), 4)
    law = jax.nn.log_softmax(4.0 * jax.random.normal(law_key, (12, 12, 12)), axis=-1)
    shown = jax.random.normal(feature_key, (12, 96))
    first_key, sample_key = jax.random.split(key)

    def step(pair, key):
        token = jax.random.categorical(key, law[pair[0], pair[1]])
        return (pair[1], token), token

    start = jax.random.randint(first_key, (2, batch), 0, 12)
    _, tokens = jax.lax.scan(step, (start[0], start[1]), jax.random.split(sample_key, slots))
    tokens = jnp.concatenate([start.T, tokens.T[:, 2:]], axis=1)
    before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    mask = jnp.broadcast_to(jnp.arange(slots)[None] >= 2, tokens.shape)
    return DraftBatch(tokens, shown[tokens], law[before, tokens], mask), law


def test_training_raises_agreement_and_served_acceptance():
    params = init_eagle3(jax.random.key(1), TOY)
    embed = jax.random.normal(jax.random.key(2), (12, 32))
    optimizer = optax.adam(3e-3)
    loss_config = DraftLossConfig(3)
    value = jax.value_and_grad(draft_loss, has_aux=True)

    @jax.jit
    def train(weights):
        def step(carry, key):
            weights, state = carry
            batch, _ = toy_sequences(key, 32, 24)
            _, gradient = value(weights, params.target_ids, readout(embed), batch, TOY, loss_config)
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(weights, updates), state), None

        keys = jax.random.split(jax.random.key(3), 400)
        return jax.lax.scan(step, (weights, optimizer.init(weights)), keys)[0][0]

    held_out, law = toy_sequences(jax.random.key(4), 64, 24)

    @jax.jit
    def judge(weights):
        """Agreement and overlap per step, and the drafts that a greedy policy accepts of 3."""
        _, metrics = draft_loss(weights, params.target_ids, readout(embed), held_out, TOY, loss_config)
        drafter = Eagle3Drafter(TOY)
        rows = held_out.tokens.shape[0]
        pairs = held_out.tokens[:, 1:], held_out.features[:, :-1]
        head = Eagle3Params(weights, params.target_ids)
        state = drafter.commit(head, embed, drafter.init_state(rows, 24), *pairs, jnp.full((rows,), 23))

        def best(logits, ids, before, count):
            return Choice(ids[logits.argmax(-1)][..., None])

        drafts = drafter.propose(head, embed, state, no_texts(rows), Tree.chain(3), best).token
        known = jnp.concatenate([held_out.tokens[:, -2:], drafts], axis=1)
        equal = law[known[:, :-2], known[:, 1:-1]].argmax(-1) == drafts
        return metrics, jnp.cumprod(equal.astype(jnp.int32), axis=1).sum(1).mean()

    before, accepted_before = judge(params.weights)
    after, accepted_after = judge(train(params.weights))
    assert before.agreement.max() < 0.3
    assert accepted_before < 0.5
    assert after.agreement.min() > 0.8, after.agreement
    assert after.overlap.min() > 0.8, after.overlap
    assert accepted_after > 2.3, accepted_after


def test_long_sequences_attend_in_blocks(specforge, monkeypatch):
    """Loss and gradient are those of attention at once, whatever the sequence's length."""
    config, params, embed, _ = specforge
    batch = example(config, batch=2, slots=19)
    loss_config = DraftLossConfig(3)

    def run():
        value = jax.jit(jax.value_and_grad(lambda w: draft_loss(w, *arguments)[0]))
        arguments = (params.target_ids, readout(embed), batch, config, loss_config)
        return value(params.weights)

    expected = run()
    for at_once, queries, spans in ((4, 4, 2), (2, 3, 1)):
        monkeypatch.setattr(eagle3_training, "_AT_ONCE", at_once)
        monkeypatch.setattr(eagle3_training, "_QUERIES", queries)
        monkeypatch.setattr(eagle3_training, "_SPANS", spans)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), run(), expected)
