"""Native MTP heads: parity with vLLM's MiMo, one folder for policy and head, exact in a rollout, trained as served."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_block import forced
from test_eagle3_training import served_logits
from test_suffix import KEYS, LAW, NEW, PROMPTS, SAMPLES
from tiny import INVARIANT, PLAIN, POLICY, assert_same, equal_prices, no_texts, random_eagle3, tiny_params

from specrl_jax.drafters import eagle3_training
from specrl_jax.drafters.draft_losses import DraftBatch, DraftLossConfig, Shared
from specrl_jax.drafters.eagle3_training import ttt_logits
from specrl_jax.drafters.head_files import by_name
from specrl_jax.drafters.heads import (
    beside_its_policy,
    for_policy,
    head_counts,
    head_loss,
    load_drafter,
    save_drafter,
    with_policy_head,
)
from specrl_jax.drafters.mtp import MtpDrafter
from specrl_jax.drafters.mtp_dialects import mtp_config
from specrl_jax.drafters.mtp_params import init_mtp, weight_shapes
from specrl_jax.errors import InputError
from specrl_jax.models.huggingface import load_config, load_policy, save_policy
from specrl_jax.models.policy import forward, grid_batch, logits, sequence_positions
from specrl_jax.models.presets import PRESETS
from specrl_jax.models.weights import tensor_shapes
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Match

pytestmark = pytest.mark.ci
FIXTURES = Path(__file__).parent / "fixtures" / "mtp"
MIMO = FIXTURES / "policy"
HEAD_FILE = "model-00002-of-00002.safetensors"
SLOTS, STEPS = 10, 3


@pytest.fixture(scope="module")
def expected():
    return dict(np.load(FIXTURES / "expected.npz"))


@pytest.fixture(scope="module")
def mimo():
    """Policy and head of one folder: parameters and configuration of the one, drafter and parameters of the other."""
    params, policy = load_policy(MIMO)
    return params, policy, *for_policy(*load_drafter(MIMO, policy), params)


def test_the_policy_of_a_mimo_folder_equals_transformers(mimo, expected):
    params, policy = mimo[:2]
    tokens = jnp.asarray(expected["tokens"])
    batch = grid_batch(tokens, sequence_positions(jnp.array([tokens.shape[1]]), tokens.shape[1]))
    out = forward(params, policy, batch, numerics=PLAIN, boundaries=(policy.num_layers,))
    np.testing.assert_allclose(out.features, expected["features"][0], atol=1e-4)
    np.testing.assert_allclose(logits(params, policy, out.hidden, PLAIN), expected["logits"][0], atol=1e-4)


def unrolled(mimo, expected):
    params, _, drafter, draft = mimo
    weights = draft.with_rows(draft.weights)
    tokens, features = jnp.asarray(expected["tokens"]), jnp.asarray(expected["features"])
    run = jax.jit(lambda weights: ttt_logits(weights, params.embed, tokens, features, drafter.config, STEPS))
    return run(weights)[:, 0, :SLOTS]


def test_served_and_trained_heads_equal_vllm(mimo, expected):
    """Three drafts from every slot: by `propose`, by `begin` with `advance`, and in the unroll of the training."""
    params, _, drafter, draft = mimo
    tokens, features = jnp.asarray(expected["tokens"][0]), jnp.asarray(expected["features"][0])
    chain = served_logits(drafter.config, draft, params.embed, tokens, features, STEPS)[:, :SLOTS]
    np.testing.assert_allclose(chain, expected["drafts"], atol=1e-4)
    np.testing.assert_allclose(unrolled(mimo, expected), expected["drafts"], atol=1e-4)

    counts = jnp.arange(1, SLOTS + 1, dtype=jnp.int32)
    pairs = jnp.tile(tokens[None, 1:], (SLOTS, 1)), jnp.tile(features[None, :-1], (SLOTS, 1, 1))
    state = drafter.commit(draft, params.embed, drafter.init_state(SLOTS, SLOTS), *pairs, counts)
    padded = jnp.pad(tokens, (0, STEPS))
    following = jnp.stack([padded[counts + 1 + step] for step in range(STEPS)], axis=1)
    kept: list = []
    choose = forced(following, kept)
    carry, _ = drafter.begin(draft, params.embed, state, no_texts(SLOTS), STEPS, choose)
    for step in range(STEPS - 1):
        carry, _ = drafter.advance(draft, params.embed, state, carry, following[:, step], jnp.int32(step), choose)
    np.testing.assert_allclose(jnp.stack(kept), expected["drafts"], atol=1e-4)


@pytest.mark.parametrize("planted", ["order", "first embedding", "fed back", "bias"])
def test_a_wrong_layout_is_seen(mimo, expected, monkeypatch, planted):
    params, policy, drafter, draft = mimo
    weights = draft.weights
    if planted == "order":
        weights = replace(weights, input_proj=jnp.roll(weights.input_proj, policy.hidden_size, axis=1))
    if planted == "bias":
        attention = replace(weights.attention, v_bias=jnp.zeros_like(weights.attention.v_bias))
        weights = replace(weights, attention=attention)
    if planted == "first embedding":
        right = eagle3_training.attention_input
        monkeypatch.setattr(eagle3_training, "attention_input", lambda *args: right(*args[:-1], args[-1] + 1))
    if planted == "fed back":
        monkeypatch.setattr(eagle3_training, "fed_back", lambda config, weights, hidden: hidden)
    ours = unrolled((params, policy, drafter, replace(draft, weights=weights)), expected)
    assert np.abs(ours - expected["drafts"]).max() > 1e-2


def test_a_head_comes_back_from_a_folder_of_its_own(mimo, tmp_path):
    params, policy, drafter, draft = mimo
    save_drafter(tmp_path / "head", drafter, draft)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    theirs = load_file(MIMO / HEAD_FILE)
    assert stored.keys() == theirs.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(tensor, theirs[name])
    again, loaded = for_policy(*load_drafter(tmp_path / "head", policy), params)
    assert again == drafter
    jax.tree.map(np.testing.assert_array_equal, loaded, draft)


class Qwen2TokenizerOfTest:
    """What saving a policy asks of a tokenizer."""

    bos_token_id, eos_token_id, pad_token_id = None, 1, 0

    def get_vocab(self):
        return {str(i): i for i in range(29)}

    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer_config.json").write_text("{}")


def test_policy_and_head_come_back_from_one_folder(mimo, tmp_path):
    """As published: every tensor under its name with its bytes, in two files with an index."""
    params, policy, drafter, draft = mimo
    beside = beside_its_policy(MIMO, drafter, draft)
    save_policy(tmp_path / "both", params, policy, Qwen2TokenizerOfTest(), shard_bytes=20_000, head=beside)
    published, ours = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (MIMO, tmp_path / "both")
    )
    assert ours.keys() == published.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.tobytes()) == (published[name].dtype, published[name].tobytes())
    index = json.loads((tmp_path / "both" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == published.keys()
    config, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "both", MIMO))
    for name in ("architectures", "model_type", "attention_bias", "num_nextn_predict_layers"):
        assert config[name] == theirs[name]
    again, same = load_policy(tmp_path / "both")
    loaded = for_policy(*load_drafter(tmp_path / "both", same), again)
    assert (same, loaded[0]) == (policy, drafter)
    jax.tree.map(np.testing.assert_array_equal, (again, loaded[1]), (params, draft))


def test_a_head_stays_apart_from_a_policy_that_came_without(mimo, tmp_path):
    drafter, draft = mimo[2:]
    save_drafter(tmp_path / "head", drafter, draft)
    assert beside_its_policy(None, drafter, draft) is None
    assert beside_its_policy(tmp_path / "head", drafter, draft) is None
    fewer, eight, _ = any_head(8)
    assert beside_its_policy(MIMO, fewer, eight) is None
    assert beside_its_policy(MIMO, *random_eagle3()) is None


def rolled_out(mimo, k, drafter=None, draft=None, **settings):
    params, policy = mimo[:2]
    config = RolloutConfig(NEW, SAMPLES, k, LAW, **{"ladder": (1.0,), "rule": Match()} | settings)
    engine = RolloutEngine(policy, config, INVARIANT, drafter)
    control = None
    if config.adaptive:
        control = equal_prices(config, engine.layout(*PROMPTS.tokens.shape).rows)
    run = jax.jit(lambda params, draft: engine.rollout(params, draft, PROMPTS, KEYS, None, control))
    return jax.device_get(run(params, draft))


@pytest.fixture(scope="module")
def plain(mimo):
    return rolled_out(mimo, 0)


@pytest.mark.parametrize("settings", [{}, {"rule": Match(branches=2)}, {"adaptive": True, "rows": 4}])
def test_the_policy_s_tokens_whatever_is_drafted(mimo, plain, settings):
    assert_same(rolled_out(mimo, 3, *mimo[2:], **settings), plain)


def any_head(draft_vocab_size=None):
    """A head made for a policy of another family, which has none, and the policy."""
    config = mtp_config(POLICY, draft_vocab_size)
    ids = None if draft_vocab_size is None else np.arange(draft_vocab_size) + 2
    return MtpDrafter(config), init_mtp(jax.random.key(0), config, ids, tiny_params()), tiny_params()


def test_a_new_head_starts_as_the_policy_s_last_layer():
    _, draft, policy = any_head(8)
    arrays = by_name(draft.weights)
    for name in ("attn_norm", "attention.q_proj", "attention.k_norm", "attention.o_proj", "feed_forward.down_proj"):
        np.testing.assert_array_equal(arrays[name], getattr(policy.layers[-1], name.rpartition(".")[2]))
    np.testing.assert_array_equal(draft.weights.final_norm, policy.final_norm)
    np.testing.assert_array_equal(draft.lm_head, policy.head[2:10])
    assert draft.weights.attention.q_bias is None
    biased = init_mtp(jax.random.key(0), mtp_config(load_config(MIMO))).weights.attention
    assert not biased.q_bias.any()


def test_a_head_over_fewer_tokens_of_another_family_comes_back(tmp_path):
    drafter, draft, policy = any_head(8)
    save_drafter(tmp_path / "head", drafter, draft)
    again, loaded = for_policy(*load_drafter(tmp_path / "head", POLICY), policy)
    assert again == drafter
    jax.tree.map(np.testing.assert_array_equal, loaded, draft)


def test_training_moves_the_head_and_not_what_it_shares():
    drafter, draft, policy = any_head()
    config, loss = drafter.config, DraftLossConfig(2)
    keys = jax.random.split(jax.random.key(1), 3)
    tokens = jax.random.randint(keys[0], (2, 9), 0, config.vocab_size)
    features = jax.random.normal(keys[1], (2, 9, config.hidden_size))
    teacher = jax.nn.log_softmax(jax.random.normal(keys[2], (2, 9, config.vocab_size)), axis=-1)
    batch = DraftBatch(tokens, features, teacher, jnp.ones((2, 9), bool))
    readout = Shared(policy.embed, jnp.eye(config.vocab_size))
    counts = head_counts(config, draft, readout, batch, loss)

    def run(weights, shared, embed):
        params, policy = replace(draft, lm_head=shared[0], policy_norm=shared[1]), replace(readout, embed=embed)
        return head_loss(weights, params, policy, batch, config, loss, counts)[0]

    weights, *shared = jax.jit(jax.grad(run, argnums=(0, 1, 2)))(
        draft.weights, (draft.lm_head, draft.policy_norm), policy.embed
    )
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(weights))
    assert not any(leaf.any() for leaf in jax.tree.leaves(shared))


def test_mimo_7b_has_its_published_size():
    policy = PRESETS["mimo-7b"]
    shapes = [*tensor_shapes(policy).values(), *weight_shapes(mtp_config(policy)).values()]
    assert sum(map(math.prod, shapes)) == 7_833_409_536


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2; only heads of 1 layer are supported"),
        ({"draft_vocab_size": "all"}, "draft_vocab_size = 'all'; it must be an integer"),
        ({"hidden_size": 32}, r"of shape \[16\] where config.json asks for \[32\]"),
        ({"model_type": "gpt2"}, "names the architecture 'gpt2'"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(tmp_path, fields, sentence):
    folder = Path(shutil.copytree(MIMO, tmp_path / "head"))
    hf = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(hf))
    with pytest.raises(InputError, match=sentence):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda t: t.pop("model.mtp_layers.0.input_proj.weight"), "lacks tensor input_proj.weight"),
        (lambda t: t.update({"model.mtp_layers.1.x": np.zeros(2)}), "unexpected tensor model.mtp_layers.1.x"),
        (lambda t: t.update({"model.mtp_layers.0.x": np.zeros(2)}), "unexpected tensor model.mtp_layers.0.x"),
    ],
)
def test_tensors_that_do_not_belong_are_refused(tmp_path, edit, sentence):
    folder = Path(shutil.copytree(MIMO, tmp_path / "head"))
    tensors = load_file(folder / HEAD_FILE)
    edit(tensors)
    save_file(tensors, folder / HEAD_FILE)
    with pytest.raises(InputError, match=sentence):
        load_drafter(folder)


def test_a_head_of_another_policy_or_with_other_flags_is_refused(mimo):
    _, policy, drafter, draft = mimo
    with pytest.raises(InputError, match="mtp head was made for a policy of vocab_size 29, not 30"):
        load_drafter(MIMO, replace(policy, vocab_size=30))
    with pytest.raises(InputError, match=r"reads an embedding of 29 tokens of width 16, not \(20, 32\)"):
        for_policy(*load_drafter(MIMO), tiny_params())
    with pytest.raises(InputError, match="mtp head boundary is 0; it must be at least 1"):
        replace(drafter.config, boundary=0)
    eagle3 = random_eagle3()[1]
    assert with_policy_head(eagle3, tiny_params()) is eagle3  # it has rows of its own
    with pytest.raises(ValueError, match="no output rows"):
        load_drafter(MIMO)[1].with_rows(draft.weights)
