"""The EAGLE-3 head as the rollout uses it: forward, cache, commit and propose."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_eagle3 import Head
from tiny import no_texts

from specrl_jax.drafters import eagle3, eagle3_layer
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_folder import drafter_tensors
from specrl_jax.drafters.eagle3_params import Eagle3Config, default_boundaries, init_eagle3, select_draft_vocab
from specrl_jax.drafters.protocol import Choice, Drafter
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.params import init_params
from specrl_jax.models.tree import Tree

pytestmark = pytest.mark.ci

CONFIG = Eagle3Config(
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=31,
    draft_vocab_size=19,
    boundaries=(1, 2, 3),
    target_hidden_size=16,
)
DRAFTER: Drafter = Eagle3Drafter(CONFIG)
ROWS, WIDTH, DRAFTS = 5, 12, 4


@pytest.fixture(scope="module")
def head():
    """Parameters, embedding, pair tokens `[r, q]` and pair features `[r, q, fd]`."""
    keys = jax.random.split(jax.random.key(3), 5)
    counts = jax.random.randint(keys[0], (CONFIG.vocab_size,), 0, 50)
    params = init_eagle3(keys[1], CONFIG, select_draft_vocab(np.asarray(counts), CONFIG.draft_vocab_size))
    embed = jax.random.normal(keys[2], (CONFIG.vocab_size, CONFIG.hidden_size))
    tokens = jax.random.randint(keys[3], (ROWS, WIDTH), 0, CONFIG.vocab_size)
    features = jax.random.normal(keys[4], (ROWS, WIDTH, 3 * CONFIG.hidden_size))
    return params, embed, tokens, features


class Recorder:
    """Chooses the likeliest token, or forced ones, and keeps the logits."""

    def __init__(self, forced=None):
        self.forced = forced
        self.logits = []

    def __call__(self, logits, target_ids, before, count):
        self.logits.append(logits[:, 0])
        token = target_ids[logits.argmax(-1)] if self.forced is None else self.forced[:, before.shape[2]][:, None]
        return Choice(token[..., None])


def propose(drafter, params, embed, state, drafts, choose):
    """Drafted tokens of a chain, `[r, k]`."""
    return drafter.propose(params, embed, state, no_texts(len(state.length)), Tree.chain(drafts), choose).token


def committed(head, counts, capacity=WIDTH):
    params, embed, tokens, features = head
    state = DRAFTER.init_state(ROWS, capacity)
    return DRAFTER.commit(params, embed, state, tokens, features, jnp.asarray(counts))


def proposed(head, state, drafts=DRAFTS):
    recorder = Recorder()
    tokens = propose(DRAFTER, head[0], head[1], state, drafts, recorder)
    return np.asarray(tokens), np.stack(recorder.logits, 1)


def numpy_head(head):
    return Head(drafter_tensors(head[0], CONFIG), CONFIG, head[1])


def test_drafts_follow_the_float64_forward(head):
    counts = np.array([1, 4, 12, 7, 9])
    tokens, logits = proposed(head, committed(head, counts))
    reference = numpy_head(head)
    for row, count in enumerate(counts):
        pairs = (np.asarray(x[row, :count]) for x in head[2:])
        expected = reference.chain_logits(*pairs, tokens[row, :-1])
        np.testing.assert_allclose(logits[row], expected, atol=1e-5)
        np.testing.assert_array_equal(tokens[row], np.asarray(head[0].target_ids)[expected.argmax(-1)])


def hidden_first(width):
    """`attention_input` with the halves in the wrong order."""
    right = eagle3.attention_input

    def wrong(*args):
        residual, x = right(*args)
        return residual, jnp.roll(x, width, axis=-1)

    return wrong


@pytest.mark.parametrize("planted", ["concat", "feedback", "residual", "position"])
def test_a_wrong_layout_is_seen(head, monkeypatch, planted):
    """The mistakes that implementations made: each must move the logits far outside the tolerance above."""
    if planted == "concat":
        monkeypatch.setattr(eagle3, "attention_input", hidden_first(CONFIG.hidden_size))
    elif planted == "position":
        queries = eagle3.project_queries
        monkeypatch.setattr(eagle3, "project_queries", lambda c, w, x, p: queries(c, w, x, p + 1))
    else:
        layer = eagle3.mix_and_mlp

        def wrong(config, weights, hidden, attended):
            norm = weights.hidden_norm if planted == "residual" else weights.final_norm
            if planted == "residual":
                return layer(config, weights, eagle3_layer.rms_norm(hidden, norm, config.rms_norm_eps), attended)
            return eagle3_layer.rms_norm(layer(config, weights, hidden, attended), norm, config.rms_norm_eps)

        monkeypatch.setattr(eagle3, "mix_and_mlp", wrong)
    tokens, logits = proposed(head, committed(head, [6] * ROWS))
    reference = numpy_head(head)
    pairs = (np.asarray(x[0, :6]) for x in head[2:])
    expected = reference.chain_logits(*pairs, tokens[0, :-1])
    first_wrong = 1 if planted == "feedback" else 0
    assert np.abs(logits[0] - expected)[first_wrong:].max() > 1e-2


def test_rounds_leave_what_one_commit_of_the_accepted_pairs_leaves(head):
    """Counts differ by row and include 0; what lies beyond them is rejected and must not matter."""
    params, embed, tokens, features = head
    rounds = np.array([[3, 4, 1, 2, 4], [0, 2, 3, 0, 4], [2, 0, 0, 1, 4], [1, 3, 4, 0, 0]])
    state = DRAFTER.init_state(ROWS, WIDTH)
    for counts in rounds:
        propose(DRAFTER, params, embed, state, DRAFTS, Recorder())
        slots = np.minimum(np.asarray(state.length)[:, None] + np.arange(4), WIDTH - 1)
        taken = np.arange(4) < counts[:, None]
        rows = np.arange(ROWS)[:, None]
        round_tokens = np.where(taken, np.asarray(tokens)[rows, slots], 7)
        round_features = np.where(taken[..., None], np.asarray(features)[rows, slots], 99.0)
        state = DRAFTER.commit(
            params, embed, state, jnp.asarray(round_tokens), jnp.asarray(round_features), jnp.asarray(counts)
        )
    totals = rounds.sum(0)
    fresh = committed(head, totals)
    np.testing.assert_array_equal(state.length, totals)
    np.testing.assert_allclose(state.hidden, fresh.hidden, atol=1e-5)
    for ours, theirs in ((state.keys, fresh.keys), (state.values, fresh.values)):
        for row, length in enumerate(totals):
            np.testing.assert_allclose(ours[row, :, :length], theirs[row, :, :length], atol=1e-5)
    np.testing.assert_allclose(proposed(head, state)[1], proposed(head, fresh)[1], atol=1e-5)


def test_a_count_of_zero_changes_nothing(head):
    state = committed(head, [3] * ROWS)
    params, embed, tokens, features = head
    same = DRAFTER.commit(params, embed, state, tokens, features, jnp.zeros((ROWS,), jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, state, same)


def test_entries_beyond_the_length_do_not_count(head):
    counts = jnp.array([2, 5, 1, 7, 3])
    state = committed(head, counts)

    def spoil(cached):
        beyond = jnp.arange(cached.shape[2])[None] >= counts[:, None]
        return jnp.where(beyond[:, None, :, None], 1e6, cached)

    spoilt = state.replace(keys=spoil(state.keys), values=spoil(state.values))
    for ours, theirs in zip(proposed(head, state), proposed(head, spoilt), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_rows_are_compacted_by_indexing_every_leaf(head):
    state = committed(head, [2, 5, 1, 7, 3])
    kept = jnp.array([3, 1])
    tokens, logits = proposed(head, jax.tree.map(lambda x: x[kept], state))
    all_tokens, all_logits = proposed(head, state)
    np.testing.assert_array_equal(tokens, all_tokens[kept])
    np.testing.assert_allclose(logits, all_logits[kept], atol=1e-5)


def test_drafting_goes_on_past_the_trained_length():
    """Rotary angles are computed, not looked up in a table of max_position_embeddings."""
    slots = 3000
    config = replace(CONFIG, max_position_embeddings=64)
    drafter = Eagle3Drafter(config)
    keys = jax.random.split(jax.random.key(5), 4)
    params = init_eagle3(keys[0], config, np.arange(config.draft_vocab_size))
    embed = jax.random.normal(keys[1], (config.vocab_size, config.hidden_size))
    tokens = jax.random.randint(keys[2], (1, slots), 0, config.vocab_size)
    features = jax.random.normal(keys[3], (1, slots, 3 * config.hidden_size))
    state = drafter.commit(params, embed, drafter.init_state(1, slots), tokens, features, jnp.array([slots]))
    recorder = Recorder()
    drafts = np.asarray(propose(drafter, params, embed, state, 3, recorder))[0]
    reference = Head(drafter_tensors(params, config), config, embed)
    expected = reference.chain_logits(np.asarray(tokens[0]), np.asarray(features[0]), drafts[:-1])
    np.testing.assert_allclose(np.stack(recorder.logits)[:, 0], expected, atol=1e-3)


def test_bfloat16_runs_and_stays_near(head):
    params, embed, tokens, features = head
    drafter = Eagle3Drafter(replace(CONFIG, dtype="bfloat16"))
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, params)
    state = drafter.init_state(ROWS, WIDTH)
    state = drafter.commit(low, embed, state, tokens, features, jnp.full((ROWS,), WIDTH))
    recorder = Recorder(forced=tokens)
    propose(drafter, low, embed, state, DRAFTS, recorder)
    wide = Recorder(forced=tokens)
    propose(DRAFTER, params, embed, committed(head, [WIDTH] * ROWS), DRAFTS, wide)
    assert recorder.logits[0].dtype == jnp.float32
    np.testing.assert_allclose(np.stack(recorder.logits), np.stack(wide.logits), atol=0.2)


@pytest.mark.parametrize(
    ("layers", "boundaries"), [(36, (2, 18, 33)), (32, (2, 16, 29)), (7, (2, 3, 4)), (4, (1, 2, 3)), (2, (0, 1, 2))]
)
def test_default_boundaries(layers, boundaries):
    assert default_boundaries(layers) == boundaries


def test_every_depth_has_three_boundaries_or_is_refused():
    for layers in range(2, 100):
        first, middle, last = default_boundaries(layers)
        assert 0 <= first < middle < last <= layers
    with pytest.raises(InputError, match="at least 2 layers"):
        default_boundaries(1)


def test_the_draft_vocabulary_is_the_most_frequent_tokens():
    counts = np.array([0, 7, 3, 0, 9, 3, 3, 0])
    np.testing.assert_array_equal(select_draft_vocab(counts, 3), [1, 2, 4])
    np.testing.assert_array_equal(select_draft_vocab(counts, 6), [0, 1, 2, 4, 5, 6])
    with pytest.raises(InputError, match="larger than the policy's 8"):
        select_draft_vocab(counts, 9)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_can_start_from_the_policys_output_rows(tied):
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2}
    policy_config = PolicyConfig(family="llama", **sizes, num_heads=4, num_kv_heads=2, head_dim=4, tie_embeddings=tied)
    policy = init_params(jax.random.key(0), policy_config)
    ids = np.array([3, 5, 30, *range(6, 22)], np.int32)
    weights = init_eagle3(jax.random.key(1), CONFIG, ids, policy).weights
    rows = policy.embed if policy.head is None else policy.head
    np.testing.assert_array_equal(weights.lm_head, rows[ids])


def test_large_features_start_the_head_at_unit_scale():
    keys = jax.random.split(jax.random.key(0), 2)
    features = 40.0 * jax.random.normal(keys[0], (512, 3 * CONFIG.hidden_size))
    ids = np.arange(CONFIG.draft_vocab_size)
    weights = init_eagle3(keys[1], CONFIG, ids, feature_rms=40.0).weights
    assert 0.7 < jnp.sqrt(jnp.mean((features @ weights.fc.T) ** 2)) < 1.1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"boundaries": (1, 1, 2)}, "give ascending"),
        ({"draft_vocab_size": 32}, "larger than the policy's 31"),
        ({"target_hidden_size": 8}, "use equal widths"),
        ({"num_kv_heads": 3}, "must divide"),
        ({"head_dim": 5}, "must be even"),
        ({"hidden_size": 0}, "at least 1"),
    ],
)
def test_bad_shapes_are_refused(change, sentence):
    with pytest.raises(InputError, match=sentence):
        replace(CONFIG, **change)


def test_a_small_draft_vocabulary_needs_its_ids():
    with pytest.raises(InputError, match="needs its target ids"):
        init_eagle3(jax.random.key(0), CONFIG)
