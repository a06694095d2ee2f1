"""Native MTP heads of other families: parity with vLLM, planted mistakes, folders, policies that have none."""

import json
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
from tiny import INVARIANT, POLICY, assert_same, no_texts, tiny_params

from specrl_jax.drafters import eagle3_training
from specrl_jax.drafters.draft_losses import DraftBatch, DraftLossConfig, Shared
from specrl_jax.drafters.eagle3_training import ttt_logits
from specrl_jax.drafters.head_files import by_name
from specrl_jax.drafters.heads import (
    for_policy,
    head_counts,
    head_loss,
    load_drafter,
    save_drafter,
    with_rows_of,
)
from specrl_jax.drafters.mtp import MtpDrafter
from specrl_jax.drafters.mtp_attached import attached_config
from specrl_jax.drafters.mtp_layouts import LAYOUTS as ALL
from specrl_jax.drafters.mtp_params import init_mtp
from specrl_jax.errors import InputError
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Match

pytestmark = pytest.mark.ci
FIXTURES = Path(__file__).parent / "fixtures" / "mtp"
LAYOUTS = sorted(file.parent.name for file in FIXTURES.glob("*/expected.npz"))
SLOTS, STEPS = 10, 3


def embedding_name(tensors):
    return next(name for name in ("model.embed_tokens.weight", "backbone.embeddings.weight") if name in tensors)


def load(layout):
    """A head in float32 on what it reads of its policy: drafter, parameters, embedding, and what vLLM computed."""
    drafter, params = load_drafter(FIXTURES / layout)
    drafter = MtpDrafter(replace(drafter.config, dtype="float32"))
    params = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, params)
    tensors = load_file(FIXTURES / layout / "model.safetensors")
    expected = dict(np.load(FIXTURES / layout / "expected.npz"))
    rows, norm = jnp.asarray(tensors["lm_head.weight"].astype(np.float32)), jnp.asarray(expected["final_norm"])
    params = replace(params, lm_head=rows, policy_norm=norm)
    return drafter, params, jnp.asarray(tensors[embedding_name(tensors)].astype(np.float32)), expected


@pytest.fixture(scope="module", params=LAYOUTS)
def case(request):
    return load(request.param)


def unrolled(drafter, params, embed, expected):
    tokens, features = jnp.asarray(expected["tokens"])[None], jnp.asarray(expected["features"])[None]

    @jax.jit
    def run(params):
        weights = params.with_rows(params.weights)
        return ttt_logits(weights, embed, tokens, features, drafter.config, STEPS)[:, 0, :SLOTS]

    return run(params)


def test_trained_heads_equal_vllm(case):
    """Three drafts from every slot in the unroll of the training."""
    np.testing.assert_allclose(unrolled(*case), case[3]["drafts"], rtol=2e-5, atol=1e-4)


def test_served_heads_equal_vllm(case):
    """Three drafts from every slot: by `propose`, and by `begin` with `advance`."""
    drafter, params, embed, expected = case
    tokens, features = jnp.asarray(expected["tokens"]), jnp.asarray(expected["features"])
    chain = served_logits(drafter.config, params, embed, tokens, features, STEPS)[:, :SLOTS]
    np.testing.assert_allclose(chain, expected["drafts"], rtol=2e-5, atol=1e-4)
    np.testing.assert_allclose(
        advanced(drafter, params, embed, tokens, features), expected["drafts"], rtol=2e-5, atol=1e-4
    )


def advanced(drafter, params, embed, tokens, features):
    counts = jnp.arange(1, SLOTS + 1, dtype=jnp.int32)
    padded = jnp.pad(tokens, (0, STEPS))
    following = jnp.stack([padded[counts + 1 + step] for step in range(STEPS)], axis=1)

    @jax.jit
    def run(params):
        pairs = jnp.tile(tokens[None, 1:], (SLOTS, 1)), jnp.tile(features[None, :-1], (SLOTS, 1, 1))
        state = drafter.commit(params, embed, drafter.init_state(SLOTS, SLOTS), *pairs, counts)
        kept: list = []
        choose = forced(following, kept)
        carry, _ = drafter.begin(params, embed, state, no_texts(SLOTS), STEPS, choose)
        for step in range(STEPS - 1):
            carry, _ = drafter.advance(params, embed, state, carry, following[:, step], jnp.int32(step), choose)
        return jnp.stack(kept)

    return run(params)


def other_layout(**flags):
    return lambda config: replace(config, layout=replace(config.layout, **flags))


def other_part(part, **fields):
    return lambda config: replace(config, **{part: replace(getattr(config, part), **fields)})


PLANTED = {
    ("qwen3_5", "plain norms"): other_layout(zero_centred=False),
    ("qwen3_5", "hidden state first"): other_layout(embedding_first=False),
    ("qwen3_5", "hidden state before the policy's norm"): other_layout(normed_features=False),
    ("qwen3_5", "zeros first"): other_layout(zero_first=True),
    ("qwen3_5", "whole heads rotated"): other_part("attention", rotary_width=8),
    ("qwen3_next", "shares that add up to less"): other_part("feed_forward", renormalise=False),
    ("qwen3_next", "hidden state first"): other_layout(embedding_first=False),
    ("nemotron_h", "rotated"): other_part("attention", rotary_width=8),
    ("nemotron_h", "hidden state first"): other_layout(embedding_first=False),
    ("nemotron_h", "hidden state before the policy's norm"): other_layout(normed_features=False),
    ("nemotron_h", "one group"): other_part("feed_forward", groups=1, chosen_groups=1),
    ("deepseek_v3", "hidden state first"): other_layout(embedding_first=False),
    ("deepseek_v3", "hidden state before the policy's norm"): other_layout(normed_features=False),
    ("deepseek_v3", "no zeros first"): other_layout(zero_first=False),
    ("deepseek_v3", "one group"): other_part("feed_forward", groups=1, chosen_groups=1),
    ("deepseek_v3", "not scaled"): other_part("feed_forward", scale=1.0),
}


@pytest.mark.parametrize(("layout", "planted"), PLANTED, ids=" ".join)
def test_a_wrong_layout_is_seen(layout, planted):
    drafter, params, embed, expected = load(layout)
    wrong = MtpDrafter(PLANTED[layout, planted](drafter.config))
    assert np.abs(unrolled(wrong, params, embed, expected) - expected["drafts"]).max() > 1e-2


@pytest.mark.parametrize("layout", ["nemotron_h", "deepseek_v3"])
def test_a_wrong_bias_of_the_routing_is_seen(layout):
    drafter, params, embed, expected = load(layout)
    kind = params.weights.feed_forward
    weights = replace(params.weights, feed_forward=replace(kind, router_bias=jnp.zeros_like(kind.router_bias)))
    ours = unrolled(drafter, replace(params, weights=weights), embed, expected)
    assert np.abs(ours - expected["drafts"]).max() > 1e-2


def test_output_fed_back_before_the_norm_is_seen(monkeypatch):
    monkeypatch.setattr(eagle3_training, "fed_back", lambda config, weights, hidden: hidden)
    case = load("qwen3_5")
    assert np.abs(unrolled(*case) - case[3]["drafts"])[1:].max() > 1e-2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_comes_back_from_a_folder_of_its_own(tmp_path, layout):
    """Every tensor of the head under its name, in its element type, with its bytes."""
    drafter, params = load_drafter(FIXTURES / layout)
    save_drafter(tmp_path / "head", drafter, params)
    stored, published = (load_file(folder / "model.safetensors") for folder in (tmp_path / "head", FIXTURES / layout))
    shared = {name for name in published if name.endswith(("embed_tokens.weight", "embeddings.weight", "head.weight"))}
    assert stored.keys() == published.keys() - shared
    for name, tensor in stored.items():
        assert (tensor.dtype, tensor.tobytes()) == (published[name].dtype, published[name].tobytes())
    again, loaded = load_drafter(tmp_path / "head")
    assert again == drafter
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_experts_in_one_tensor_come_back_as_such(tmp_path):
    drafter, params = load_drafter(FIXTURES / "qwen3_5_moe")
    stacked = MtpDrafter(replace(drafter.config, feed_forward=replace(drafter.config.feed_forward, stacked=True)))
    save_drafter(tmp_path / "head", stacked, params)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors["mtp.layers.0.mlp.experts.gate_up_proj"].shape == (8, 16, 32)
    again, loaded = load_drafter(tmp_path / "head")
    assert again == stacked
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize(
    ("layout", "fields", "sentence"),
    [
        ("qwen3_5", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers = 2; only heads of 1 layer are supported"),
        ("qwen3_5", {"attn_output_gate": False}, "sets attn_output_gate to False; only True is supported"),
        ("qwen3_5", {"head_dim": 4}, r"of shape \[8\] where config.json asks for \[4\]"),
        (
            "qwen3_5",
            {"rope_parameters": {"partial_rotary_factor": 2}},
            "partial_rotary_factor to 2; it must be above 0",
        ),
        ("qwen3_next", {"num_experts": 7}, "unexpected tensor mtp.layers.0.mlp.experts.7"),
        ("qwen3_next", {"num_experts_per_tok": 9}, "reads 9 of 8 experts, more than lie in 1 of 1 groups; lower it"),
        ("nemotron_h", {"mtp_hybrid_override_pattern": "*EE"}, "= '[*]EE'; only '[*]E' is supported"),
        ("nemotron_h", {"mtp_layers_block_type": ["moe"]}, "only attention and then moe is supported"),
        ("nemotron_h", {"hidden_size": 16}, "where config.json asks for"),
        ("deepseek_v3", {"topk_method": "greedy"}, "sets topk_method to 'greedy'; only 'noaux_tc' is supported"),
        ("deepseek_v3", {"index_topk": 2048}, "sets index_topk to 2048; only None is supported"),
        ("deepseek_v3", {"n_group": 3}, "8 experts in 3 groups, 2 of them chosen; choose a number of groups"),
        (
            "deepseek_v3",
            {"n_group": 8, "num_experts_per_tok": 2},
            "has 8 groups of 1 expert; groups need two of them at least",
        ),
        ("deepseek_v3", {"num_nextn_predict_layers": None}, "= None; only heads of 1 layer are supported"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(tmp_path, layout, fields, sentence):
    folder = Path(shutil.copytree(FIXTURES / layout, tmp_path / "head"))
    hf = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(hf))
    with pytest.raises(InputError, match=sentence):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("layout", "lost", "sentence"),
    [
        (
            "qwen3_next",
            "mtp.layers.0.mlp.experts.3.up_proj.weight",
            "lacks tensor layers.0.mlp.experts.3",
        ),
        (
            "deepseek_v3",
            "model.layers.2.mlp.gate.e_score_correction_bias",
            "lacks tensor mlp.gate.e_score",
        ),
        ("nemotron_h", "mtp.layers.1.final_layernorm.weight", "lacks tensor 1.final_layernorm.weight"),
    ],
)
def test_tensors_that_do_not_belong_are_refused(tmp_path, layout, lost, sentence):
    folder = Path(shutil.copytree(FIXTURES / layout, tmp_path / "head"))
    tensors = load_file(folder / "model.safetensors")
    taken = tensors.pop(lost)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=sentence):
        load_drafter(folder)
    save_file(tensors | {lost: taken, lost + "s": taken}, folder / "model.safetensors")
    with pytest.raises(InputError, match=f"unexpected tensor {lost}s"):
        load_drafter(folder)


ATTACHED = ("qwen3_5", "qwen3_next", "nemotron_h", "deepseek_v3")


def attached(layout, draft_vocab_size=None):
    """A new head in the layout of another family for a policy that has none, and the policy."""
    config = attached_config(POLICY, layout, draft_vocab_size, experts=4)
    ids = None if draft_vocab_size is None else np.arange(draft_vocab_size) + 2
    return MtpDrafter(config), init_mtp(jax.random.key(0), config, ids, tiny_params()), tiny_params()


@pytest.mark.parametrize("layout", ALL)
def test_a_new_head_comes_back(tmp_path, layout):
    drafter, draft, policy = attached(layout, 8)
    save_drafter(tmp_path / "head", drafter, draft)
    again, loaded = for_policy(*load_drafter(tmp_path / "head", POLICY), policy)
    assert again == drafter
    jax.tree.map(np.testing.assert_array_equal, loaded, draft)


@pytest.mark.parametrize("layout", ATTACHED)
def test_training_moves_the_head_and_not_what_it_shares(layout):
    drafter, draft, policy = attached(layout)
    config, loss = drafter.config, DraftLossConfig(2)
    keys = jax.random.split(jax.random.key(1), 3)
    tokens = jax.random.randint(keys[0], (2, 9), 0, config.vocab_size)
    features = jax.random.normal(keys[1], (2, 9, config.hidden_size))
    teacher = jax.nn.log_softmax(jax.random.normal(keys[2], (2, 9, config.vocab_size)), axis=-1)
    batch = DraftBatch(tokens, features, teacher, jnp.ones((2, 9), bool))
    readout = Shared(policy.embed, jnp.eye(config.vocab_size))
    counts = head_counts(config, draft, readout, batch, loss)

    def run(weights, shared):
        params = replace(draft, lm_head=shared[0], policy_norm=shared[1])
        return head_loss(weights, params, readout, batch, config, loss, counts)[0]

    weights, shared = jax.jit(jax.grad(run, argnums=(0, 1)))(draft.weights, (draft.lm_head, draft.policy_norm))
    for name, gradient in by_name(weights).items():
        assert bool(np.abs(gradient).max() > 0) != name.endswith("router_bias"), name
    assert not any(leaf.any() for leaf in shared)


@pytest.mark.parametrize("layout", ATTACHED)
def test_the_policy_s_tokens_whatever_is_drafted(layout):
    drafter, draft, policy = attached(layout)
    rolled = []
    for length, head in ((0, (None, None)), (3, (drafter, draft))):
        config = RolloutConfig(NEW, SAMPLES, length, LAW, ladder=(1.0,), rule=Match())
        engine = RolloutEngine(POLICY, config, INVARIANT, head[0])
        run = jax.jit(lambda params, draft, engine=engine: engine.rollout(params, draft, PROMPTS, KEYS, None, None))
        rolled.append(jax.device_get(run(policy, head[1])))
    assert_same(rolled[1], rolled[0])
    assert rolled[1].stats.accepted.sum() > 0


def test_a_policy_that_learns_takes_its_norm_along():
    _, draft, policy = attached("qwen3_5")
    learned = replace(policy, final_norm=policy.final_norm * 2)
    np.testing.assert_array_equal(with_rows_of(draft, learned).policy_norm, learned.final_norm)
    with pytest.raises(ValueError, match="no output rows"):
        load_drafter(FIXTURES / "qwen3_5")[1].with_rows(draft.weights)
