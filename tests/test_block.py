"""Parallel block drafters: parity with speculators, the way to disk and back, exact in a rollout."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_suffix import engine_of, plain, rolled_out
from tiny import POLICY, VOCAB, assert_same, no_texts, tiny_params

from specrl_jax.drafters.block import BlockDrafter, confidence_logits
from specrl_jax.drafters.block_folder import is_block_drafter, load_block, save_block
from specrl_jax.drafters.block_params import BlockConfig, init_block
from specrl_jax.drafters.heads import with_policy_head
from specrl_jax.drafters.protocol import ChainDrafter, Choice
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.params import init_params
from specrl_jax.models.tree import Tree
from specrl_jax.rollout.rules import Match, Ratio

pytestmark = pytest.mark.ci
FIXTURES = Path(__file__).parent / "fixtures" / "block"
BACKBONE = PolicyConfig("qwen3", VOCAB, POLICY.hidden_size, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)
CONFIG = BlockConfig(BACKBONE, VOCAB, (0, 2), block_size=4, mask_token_id=3, markov_rank=3, confidence=True)


@pytest.fixture(scope="module")
def expected():
    return dict(np.load(FIXTURES / "expected.npz"))


def forced(following, kept):
    """A `Choose` that keeps the logits and takes the true tokens."""

    def choose(logits, ids, before, count, step=None):
        kept.append(logits[:, 0])
        place = before.shape[2] if step is None else step
        token = jax.lax.dynamic_index_in_dim(following, place, 1, keepdims=True)
        return Choice(token[:, :, None], confidence=jnp.zeros((len(following), 1)))

    return choose


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_served_blocks_equal_speculators(expected, name):
    """A block after every anchor, its tokens forced: `propose` and `begin` with `advance` give the trained logits."""
    drafter, params = load_block(FIXTURES / name)
    params = replace(params, lm_head=jnp.asarray(expected[f"{name}.head"]))
    config = drafter.config
    assert (config.boundaries, config.block_size, config.mask_token_id) == ((2, 5), 4, 1)
    assert (config.drafts, config.markov_rank) == ((3, 0) if name == "dflash" else (4, 3))
    embed = jnp.asarray(expected[f"{name}.embed"])
    tokens, features = jnp.asarray(expected["tokens"])[0], jnp.asarray(expected["features"])[0]
    for anchor, logits in zip(expected[f"{name}.anchors"], expected[f"{name}.logits"], strict=True):
        anchor = int(anchor)
        if anchor == 0:  # nothing has been read
            continue
        counts = jnp.array([anchor], jnp.int32)
        pairs = jnp.asarray(tokens)[None, 1:], features[None, :-1]
        state = drafter.commit(params, embed, drafter.init_state(1, 16), *pairs, counts)
        assert int(state.newest[0]) == int(tokens[anchor])
        following = jnp.pad(tokens, (0, 4))[None, anchor + 1 : anchor + 5]
        trained = logits if config.sample_from_anchor else logits[1:]
        drafts = config.drafts
        # Markov corrections of the last slot of a sequence read tokens that are not there.
        known = min(drafts, len(tokens) - anchor)
        chain: list = []
        drafter.propose(params, embed, state, no_texts(1), Tree.chain(drafts), forced(following, chain))
        stepwise: list = []
        choose = forced(following, stepwise)
        carry, _ = drafter.begin(params, embed, state, no_texts(1), drafts, choose)
        for step in range(drafts - 1):
            carry, _ = drafter.advance(params, embed, state, carry, following[:, step], jnp.int32(step), choose)
        for ours in (chain, stepwise):
            np.testing.assert_allclose(jnp.concatenate(ours)[:known], trained[:known], atol=1e-5)


def test_confidence_equals_speculators(expected):
    drafter, params = load_block(FIXTURES / "dspark")
    params = replace(params, lm_head=jnp.asarray(expected["dspark.head"]))
    embed = jnp.asarray(expected["dspark.embed"])
    tokens, features = jnp.asarray(expected["tokens"])[0], jnp.asarray(expected["features"])[0]
    for anchor, odds in zip(expected["dspark.anchors"], expected["dspark.odds"], strict=True):
        anchor = int(anchor)
        if anchor == 0:
            continue
        pairs = tokens[None, 1:], features[None, :-1]
        counts = jnp.array([anchor], jnp.int32)
        state = drafter.commit(params, embed, drafter.init_state(1, 16), *pairs, counts)
        block = drafter._filled(params, embed, state, 4)
        before = jnp.pad(tokens, (0, 4))[None, anchor : anchor + 4]
        ours = confidence_logits(drafter.config, params.weights, block.hidden, before)[0]
        known = min(4, len(tokens) - anchor)
        np.testing.assert_allclose(ours[:known], odds[:known], atol=1e-5)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_drafter_comes_back_from_its_folder(tmp_path, name):
    drafter, params = load_block(FIXTURES / name)
    save_block(tmp_path / "ours", drafter, params)
    again, loaded = load_block(tmp_path / "ours")
    assert again == drafter
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "ours", FIXTURES / name))
    assert ours.keys() == theirs.keys()
    for tensor, value in ours.items():
        np.testing.assert_array_equal(value, theirs[tensor])
    assert is_block_drafter(json.loads((tmp_path / "ours" / "config.json").read_text()))


def test_the_layout_of_the_authors_is_read(tmp_path):
    """Ids of layers count from 0 there, and the block's settings stand under `dflash_config`."""
    folder = Path(shutil.copytree(FIXTURES / "dflash", tmp_path / "head"))
    hf = json.loads((folder / "config.json").read_text())
    flat = hf["transformer_layer_config"] | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 4,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 4]},
    }
    (folder / "config.json").write_text(json.dumps(flat))
    drafter, params = load_block(folder)
    expected_drafter, expected = load_block(FIXTURES / "dflash")
    assert drafter == expected_drafter
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def random_block(seed=0, **changes):
    config = replace(CONFIG, **changes)
    params = init_block(jax.random.key(seed), config, tiny_params())
    weights = params.weights
    if weights.markov_out is not None:
        noise = jax.random.normal(jax.random.key(1), weights.markov_out.shape)
        weights = weights.replace(markov_out=noise, confidence_kernel=jnp.ones_like(weights.confidence_kernel))
    return BlockDrafter(config), replace(params, weights=weights)


@pytest.mark.parametrize("case", ["chain", "tree", "ratio", "few rows", "adaptive", "dflash"])
def test_the_policy_s_tokens_whatever_is_drafted(case):
    settings = {}
    if case == "tree":
        settings = {"rule": Match(branches=2)}
    if case == "few rows":
        settings = {"rows": 2}
    if case == "adaptive":
        settings = {"adaptive": True, "rows": 4}
    changes = {"sample_from_anchor": False, "markov_rank": 0, "confidence": False} if case == "dflash" else {}
    drafter, params = random_block(**changes)
    assert isinstance(drafter, ChainDrafter)
    if case == "ratio":
        trajectory = rolled_out(engine_of(3, drafter, Ratio()), params)
        assert np.isfinite(trajectory.log_probs).all()
        return
    assert_same(rolled_out(engine_of(3, drafter, **settings), params), plain())


def test_more_drafts_than_slots_are_refused():
    drafter, params = random_block(sample_from_anchor=False)
    with pytest.raises(InputError, match="draft length is 4, and the drafter was made for 3; lower it"):
        rolled_out(engine_of(4, drafter), params)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"block_size": 1}, "block_size is 1; it must be at least 2"),
        ({"mask_token_id": VOCAB}, "mask_token_id is .* not in the policy's vocabulary"),
        ({"boundaries": (2, 1)}, "give ascending layer boundaries"),
        ({"draft_vocab_size": VOCAB + 1}, "larger than the policy's"),
        ({"backbone": replace(BACKBONE, family="llama")}, "family llama; only qwen3"),
    ],
)
def test_bad_shapes_are_refused(changes, sentence):
    with pytest.raises(InputError, match=sentence):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"aux_hidden_state_layer_ids": None}, "lacks aux_hidden_state_layer_ids"),
        ({"markov_head_type": "rnn"}, "markov_head_type 'rnn'; only vanilla"),
        ({"confidence_head_with_markov": False}, "not supported"),
        ({"markov_rank": 5}, r"of shape \[.*\] where config.json asks for"),
    ],
)
def test_folders_that_cannot_be_used_are_refused(tmp_path, fields, sentence):
    folder = Path(shutil.copytree(FIXTURES / "dspark", tmp_path / "head"))
    hf = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(hf))
    with pytest.raises(InputError, match=sentence):
        load_block(folder)


def test_a_drafter_of_another_policy_or_with_other_tensors_is_refused(tmp_path):
    policy = PolicyConfig("qwen3", 29, 24, 40, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=8)
    load_block(FIXTURES / "dspark", policy)
    for change, sentence in (
        ({"hidden_size": 32}, "hidden_size 24, not 32"),
        ({"vocab_size": 30}, "vocab_size 29, not 30"),
        ({"num_layers": 4}, "with 4 layers"),
    ):
        with pytest.raises(InputError, match=sentence):
            load_block(FIXTURES / "dspark", replace(policy, **change))
    folder = Path(shutil.copytree(FIXTURES / "dspark", tmp_path / "head"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"extra.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"unexpected tensor extra\.weight"):
        load_block(folder)


def test_the_policy_s_output_rows_are_taken_where_there_are_none():
    drafter, params = load_block(FIXTURES / "dflash")
    assert params.lm_head is None
    policy = PolicyConfig("qwen3", 29, 24, 40, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=8)

    weights = init_params(jax.random.key(0), policy)
    np.testing.assert_array_equal(with_policy_head(params, weights).lm_head, weights.head)
    assert drafter.config.drafts == 3
