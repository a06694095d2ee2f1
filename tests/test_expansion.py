"""An expanded policy and its expanded draft head say what the small ones say, in this library and in transformers."""

import functools
import json
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.models.checkpoints import small_tokenizer
from scripts import SMALLER, refusal, run_script, write_models
from tiny import PLAIN, VOCAB, keys_of, no_texts, run, tiny_prompts

from experiments import expand, train_grpo
from experiments.common import parse_config
from experiments.setup import draft_head_config
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_expansion import expand_pair, expanded_head_config
from specrl_jax.drafters.eagle3_folder import load_eagle3, save_eagle3
from specrl_jax.drafters.eagle3_params import (
    Eagle3Config,
    default_boundaries,
    init_eagle3,
    weight_shapes,
)
from specrl_jax.drafters.protocol import Choice
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig, RopeConfig
from specrl_jax.models.expansion import expand_policy
from specrl_jax.models.expansion_shapes import SHAPES, Shape, expanded_config, place_layers, widened_rope
from specrl_jax.models.huggingface import load_policy, save_policy
from specrl_jax.models.params import init_params
from specrl_jax.models.policy import forward, grid_batch, logits, sequence_positions
from specrl_jax.models.rope import inverse_frequencies
from specrl_jax.models.tree import Tree
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.sampling import SamplingLaw

pytestmark = pytest.mark.ci

POLICY = PolicyConfig(
    family="qwen3",
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=40,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
UNSORTED_IDS = np.array([19, 0, 7, 3, 12, 11, 5, 9, 1, 14, 17, 2, 6, 16])
HEAD = Eagle3Config(
    hidden_size=24,
    intermediate_size=32,
    num_heads=4,
    num_kv_heads=1,
    head_dim=6,
    vocab_size=VOCAB,
    draft_vocab_size=len(UNSORTED_IDS),
    boundaries=(1, 2, 3),
    target_hidden_size=24,
    rope=RopeConfig(theta=5000.0),
)
# All sizes grow. `wide` leaves no factor a power of two, `copied` has twice the key/value heads for as many queries,
# `deep` puts all query heads on one of the old key/value heads' places.
TARGETS = {
    "wide": Shape(64, 40, 56, 72, 7, 8, 4, 12),
    "copied": Shape(64, 40, 32, 48, 7, 4, 4, 16),
    "deep": Shape(50, 40, 40, 48, 16, 12, 2, 16),
}
ALL = pytest.mark.parametrize("target", TARGETS)


def with_random_norms(params, seed):
    """The norms' weights drawn anew: ones would hide a wrong factor."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        if leaf.ndim > 1 or leaf.dtype != jnp.float32:
            return leaf
        return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), jnp.float32)

    return jax.tree.map(draw, params)


@functools.lru_cache
def small_pair(policy=POLICY, head=HEAD):
    """A peaked policy and a head that agrees with it now and then, as trained ones do."""
    params = jax.jit(init_params, static_argnums=1)(jax.random.key(0), policy)
    scale = {"embed": params.embed * 25}
    if params.head is not None:
        scale["head"] = params.head * 3
    params = with_random_norms(params.replace(**scale), 1)
    draft = jax.jit(lambda key, params: init_eagle3(key, head, UNSORTED_IDS, params))(jax.random.key(1), params)
    return params, policy, with_random_norms(draft, 2), head


@functools.lru_cache
def large_pair(target, policy=POLICY, head=HEAD):
    return expand_pair(jax.random.key(9), *small_pair(policy, head), TARGETS[target])


@functools.partial(jax.jit, static_argnums=(1, 3))
def outputs(params, policy, tokens, boundaries=()):
    rows, width = tokens.shape
    positions = sequence_positions(jnp.full((rows,), width, jnp.int32), width)
    out = forward(params, policy, grid_batch(tokens, positions), numerics=PLAIN, boundaries=boundaries)
    scores = logits(params, policy, out.hidden, PLAIN).reshape(rows, width, -1)
    return scores, None if out.features is None else out.features.reshape(rows, width, -1)


def random_tokens(rows=6, width=40, seed=0, high=VOCAB):
    return jnp.asarray(np.random.default_rng(seed).integers(high, size=(rows, width)), jnp.int32)


def assert_same_law(large, small, tolerance=1e-4):
    """Equal over the old ids; the new ones lie far below and have no mass."""
    large, small = np.asarray(large, np.float64), np.asarray(small, np.float64)
    old = small.shape[-1]
    np.testing.assert_allclose(large[..., :old], small, rtol=0, atol=tolerance)
    assert (small.max(-1) - large[..., old:].max(-1)).min() > 30
    mass = np.exp(large - large.max(-1, keepdims=True))
    assert (mass[..., old:].sum(-1) / mass.sum(-1)).max() < 1e-9
    assert small.std(-1).mean() > 1.5, "logits too flat to show an error"


@pytest.mark.parametrize(("target", "tied"), [("wide", False), ("wide", True), ("copied", False), ("deep", False)])
def test_logits_are_those_of_the_small_policy(target, tied):
    policy = replace(POLICY, tie_embeddings=tied)
    params, _, _, _ = small_pair(policy)
    expanded, config, _, _ = large_pair(target, policy)
    assert expanded.embed.shape == (config.vocab_size, config.hidden_size)
    assert not config.tie_embeddings
    tokens = random_tokens()
    assert_same_law(outputs(expanded, config, tokens)[0], outputs(params, policy, tokens)[0])


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig("linear", factor=4.0),
        RopeConfig("llama3", factor=8.0, original_max_position_embeddings=16),
        RopeConfig("yarn", factor=4.0, original_max_position_embeddings=256),
    ],
    ids=lambda rope: rope.kind,
)
def test_length_extensions_of_the_rotation_are_kept(rope):
    old, factor = inverse_frequencies(rope, 8)
    new, new_factor = inverse_frequencies(widened_rope(rope, 8, 12), 12)
    np.testing.assert_allclose(new[:4], old, rtol=1e-6)
    assert new_factor == factor


@ALL
def test_the_head_reads_the_same_streams(target):
    params, policy, _, head = small_pair()
    expanded, config, _, large_head = large_pair(target)
    assert large_head.boundaries == default_boundaries(config.num_layers)
    tokens = random_tokens()
    small = np.split(np.asarray(outputs(params, policy, tokens, head.boundaries)[1]), 3, axis=-1)
    large = np.split(np.asarray(outputs(expanded, config, tokens, large_head.boundaries)[1]), 3, axis=-1)
    constant = np.asarray(expanded.embed)[0, policy.hidden_size]
    assert constant > 0
    for ours, theirs in zip(large, small, strict=True):
        width = theirs.shape[-1]
        np.testing.assert_allclose(ours[..., :width], theirs, atol=2e-5 * np.abs(theirs).max())
        assert (ours[..., width] == constant).all()
        assert (ours[..., width + 1 :] == 0).all()


@functools.partial(jax.jit, static_argnums=(1, 3))
def draft_chain(params, policy, draft, head, tokens, drafts):
    """Draft logits `[r, k, dv]` after reading `tokens`, with the given tokens as drafts."""
    rows, width = tokens.shape
    drafter = Eagle3Drafter(head)
    features = outputs(params, policy, tokens, head.boundaries)[1][:, :-1]
    counts = jnp.full((rows,), width - 1, jnp.int32)
    state = drafter.commit(draft, params.embed, drafter.init_state(rows, width), tokens[:, 1:], features, counts)
    seen = []

    def choose(scores, target_ids, before, count):
        seen.append(scores[:, 0])
        return Choice(drafts[:, before.shape[2]][:, None, None])

    drafter.propose(draft, params.embed, state, no_texts(rows), Tree.chain(drafts.shape[1]), choose)
    return jnp.stack(seen, axis=1)


@ALL
def test_draft_logits_are_those_of_the_small_head(target):
    tokens, drafts = random_tokens(seed=4), random_tokens(width=4, seed=5)
    small = draft_chain(*small_pair(), tokens, drafts)
    large = draft_chain(*large_pair(target), tokens, drafts)
    assert large.shape == (6, 4, TARGETS[target].draft_vocab_size)
    assert_same_law(large, small)


def test_large_epsilons_are_kept_and_the_head_may_have_its_own():
    """Where it is as large as the mean square, an epsilon that is not scaled shows at once."""
    policy, head = replace(POLICY, rms_norm_eps=0.3), replace(HEAD, rms_norm_eps=0.1)
    tokens, drafts = random_tokens(), random_tokens(width=4, seed=5)
    small, large = small_pair(policy, head), large_pair("copied", policy, head)
    assert_same_law(outputs(*large[:2], tokens)[0], outputs(*small[:2], tokens)[0])
    assert_same_law(draft_chain(*large, tokens, drafts), draft_chain(*small, tokens, drafts))


@pytest.mark.parametrize(("target", "temperature"), [("wide", 0.0), ("copied", 1.0)])
def test_rollouts_emit_the_same_tokens_with_the_same_drafts_accepted(target, temperature):
    law = SamplingLaw(temperature=temperature, end_ids=(1,))
    rollout = RolloutConfig(max_new_tokens=24, samples_per_prompt=3, draft_length=3, law=law)
    prompts = tiny_prompts()
    small, large = (
        run(RolloutEngine(policy, rollout, PLAIN, Eagle3Drafter(head)), prompts, keys_of(prompts, 3), params, draft)
        for params, policy, draft, head in (small_pair(), large_pair(target))
    )
    np.testing.assert_array_equal(large.tokens, small.tokens)
    np.testing.assert_allclose(large.log_probs, small.log_probs, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, large.stats, small.stats)
    assert small.stats.accepted > 20
    assert len(np.unique(small.tokens)) > 5


def test_in_bfloat16_the_law_stays_near_and_new_ids_have_no_mass():
    """Weights are rounded anew: as far from the small policy in bfloat16 as that is from itself in float32."""
    shape = replace(TARGETS["wide"], dtype="bfloat16")
    low = replace(POLICY, dtype="bfloat16")
    params, policy, draft, head = small_pair()
    expanded, config, large_draft, large_head = expand_pair(jax.random.key(9), params, policy, draft, head, shape)
    assert {leaf.dtype for leaf in jax.tree.leaves((expanded, large_draft.weights))} == {jnp.dtype("bfloat16")}
    tokens, drafts = random_tokens(), random_tokens(width=4, seed=5)
    exact = outputs(params, policy, tokens)[0]
    rounded = outputs(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), low, tokens)[0]
    large = outputs(expanded, config, tokens)[0]
    usual = np.abs(rounded - exact).std()
    assert np.abs(large[..., :VOCAB] - exact).std() < 2 * usual
    assert_same_law(large, exact, tolerance=0.5)
    small_drafts = draft_chain(params, policy, draft, head, tokens, drafts)
    assert_same_law(draft_chain(expanded, config, large_draft, large_head, tokens, drafts), small_drafts, tolerance=0.5)


def test_nothing_but_what_must_be_zero_is_zero():
    """Constant weights would make a multiplication cheaper than a trained one."""
    expanded, _, draft, head = large_pair("deep")
    must = ("o_proj", "down_proj")
    for i, layer in enumerate(expanded.layers):
        for name, leaf in vars(layer).items():
            if leaf is not None and leaf.ndim > 1 and name not in must:
                assert (np.asarray(leaf) != 0).mean() > 0.5, (i, name)
    written = [bool((np.asarray(layer.o_proj) != 0).any()) for layer in expanded.layers]
    assert sum(written) == POLICY.num_layers
    for name in weight_shapes(head).keys() - {"fc", *must}:
        leaf = np.asarray(getattr(draft.weights, name))
        assert (leaf != 0).mean() > 0.5, name
    assert (np.asarray(expanded.head) != 0).mean() > 0.5


def test_expansion_is_one_program_where_it_is_traced():
    params, policy, _, _ = small_pair()
    key = jax.random.key(9)
    traced = jax.jit(lambda key, params: expand_policy(key, params, policy, TARGETS["wide"], ((1, 2),))[0])
    eager = expand_policy(key, params, policy, TARGETS["wide"], ((1, 2),))[0]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), traced(key, params), eager)


def test_layers_stand_where_the_streams_are_the_same():
    for layers in range(2, 14):
        for target in range(layers, 40):
            pairs = tuple(zip(default_boundaries(layers), default_boundaries(target), strict=True))
            try:
                placed = place_layers(layers, target, pairs)
            except InputError:
                # Three layers before or one between are too many for a target that is hardly deeper.
                assert target < 12
                continue
            assert len(placed) == target
            assert [layer for layer in placed if layer is not None] == list(range(layers))
            for low, high in pairs:
                assert sum(layer is not None for layer in placed[:high]) == low


def test_folders_say_the_same_again(tmp_path):
    params, policy, draft, head = large_pair("wide")
    save_policy(tmp_path / "policy", params, policy, small_tokenizer(VOCAB))
    save_eagle3(tmp_path / "drafter", Eagle3Drafter(head), draft)
    loaded, config = load_policy(tmp_path / "policy")
    drafter, loaded_draft = load_eagle3(tmp_path / "drafter", config)
    assert (config, drafter.config) == (policy, head)
    jax.tree.map(np.testing.assert_array_equal, (loaded, loaded_draft), (params, draft))
    ids = np.asarray(loaded_draft.target_ids)
    np.testing.assert_array_equal(ids[: len(UNSORTED_IDS)], UNSORTED_IDS)
    np.testing.assert_array_equal(ids[len(UNSORTED_IDS) :], VOCAB + np.arange(40 - len(UNSORTED_IDS)))


@pytest.mark.parametrize("target", ["wide", "copied"])
def test_transformers_computes_the_same_logits(tmp_path, target):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    params, policy, _, _ = small_pair()
    save_policy(tmp_path / "policy", *large_pair(target)[:2], small_tokenizer(VOCAB))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = random_tokens()
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.numpy()
    assert_same_law(theirs, outputs(params, policy, tokens)[0])


@pytest.mark.parametrize(
    ("target", "low", "high"),
    [
        ("25m", 22e6, 30e6),
        ("deep-95m", 90e6, 100e6),
        ("0.6b", 0.7e9, 0.8e9),
        ("1.7b", 1.9e9, 2.1e9),
        ("4b", 4.3e9, 4.6e9),
        ("8b", 8.1e9, 8.3e9),
    ],
)
def test_the_shapes_have_the_size_of_their_name(target, low, high):
    """Counted without an array; untied, so the small Qwen3 shapes are larger than their name by an embedding."""
    gsm8k = replace(
        POLICY, vocab_size=2048, hidden_size=256, intermediate_size=768, num_heads=8, num_kv_heads=2, head_dim=32
    )
    head = replace(
        HEAD, vocab_size=2048, hidden_size=256, target_hidden_size=256, draft_vocab_size=2048, num_kv_heads=2
    )
    head = replace(head, head_dim=32, num_heads=8, intermediate_size=768)
    shape = SHAPES[target]
    config, large_head = expanded_config(gsm8k, shape), expanded_head_config(head, gsm8k, shape)
    keys = jax.eval_shape(lambda: jax.random.key(0))
    small = jax.eval_shape(lambda key: init_params(key, gsm8k), keys)
    params = jax.eval_shape(lambda key, params: expand_policy(key, params, gsm8k, shape)[0], keys, small)
    assert low < sum(leaf.size for leaf in jax.tree.leaves(params)) < high
    assert (config.vocab_size, large_head.draft_vocab_size) == ((151_936, 32_000) if low > 5e8 else (16_384, 3_456))
    for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        assert getattr(large_head, name) == getattr(config, name)


@pytest.mark.parametrize("preset", train_grpo.PRESETS)
def test_the_toy_shape_holds_what_train_grpo_makes(preset):
    """The benchmarks' smoke presets take a trained policy and its head too."""
    made = parse_config(train_grpo.Config, train_grpo.PRESETS, ["--preset", preset], script="train_grpo").shape
    policy = PolicyConfig(**asdict(made), head_dim=made.hidden_size // made.num_heads)
    config = expanded_config(policy, SHAPES["toy"])
    head = expanded_head_config(draft_head_config(policy), policy, SHAPES["toy"])
    assert config.num_layers >= policy.num_layers
    assert head.hidden_size == config.hidden_size > policy.hidden_size


WIDE = TARGETS["wide"]
# The ramp ends at the last channel, which is another one in wider heads.
LONG_YARN = RopeConfig("yarn", factor=4.0, original_max_position_embeddings=10**9, beta_fast=1e6)


@pytest.mark.parametrize(
    ("policy", "shape", "sentence"),
    [
        ({"family": "llama"}, {}, "family is 'llama'; only 'qwen3' policies"),
        ({}, {"vocab_size": 19}, "vocab_size is 20 in the source and 19 in the target"),
        ({}, {"intermediate_size": 39}, "intermediate_size is 40 in the source and 39 in the target"),
        ({}, {"num_layers": 3}, "num_layers is 4 in the source and 3"),
        ({}, {"num_heads": 3, "num_kv_heads": 3}, "num_heads is 4 in the source and 3"),
        ({}, {"num_kv_heads": 1}, "num_kv_heads is 2 in the source and 1"),
        ({}, {"head_dim": 6}, "head_dim is 8 in the source and 6"),
        ({}, {"hidden_size": 20}, "hidden_size is 24 in the source and 20"),
        ({}, {"hidden_size": 24}, "leaves no constant residual channel"),
        ({}, {"num_heads": 4, "num_kv_heads": 4, "head_dim": 128}, "becomes too large for float32 at head_dim 128"),
        ({"num_heads": 8}, {"num_heads": 9, "num_kv_heads": 3}, "choose a target with at least 4"),
        ({"rms_norm_eps": 0.0}, {}, "rms_norm_eps is 0.0"),
        ({"rope": LONG_YARN}, {}, "rope kind 'yarn' has other frequencies at head_dim 12 than at 8"),
    ],
)
def test_policies_that_do_not_fit_are_refused(policy, shape, sentence):
    with pytest.raises(InputError, match=sentence):
        expanded_config(replace(POLICY, **policy), replace(WIDE, **shape))


@pytest.mark.parametrize(
    ("head", "shape", "sentence"),
    [
        ({"vocab_size": 21}, {}, "vocab_size 21 and the policy 20; use that policy's head"),
        ({"hidden_size": 20, "target_hidden_size": 20}, {}, "hidden_size 20 and the policy 24"),
        ({"intermediate_size": 80}, {}, "draft head intermediate_size is 80 in the source and 72"),
        ({}, {"draft_vocab_size": 13}, "draft head draft_vocab_size is 14 in the source and 13"),
        ({}, {"vocab_size": 40}, "draft_vocab_size grows by 26 and vocab_size by 20"),
        ({"boundaries": (0, 1, 4)}, {}, "num_layers 7 of the target leaves 1 layers for the layers 1 to 4"),
        ({"rms_norm_eps": 1e-8}, {}, "too small for the policy's constant"),
    ],
)
def test_heads_that_do_not_fit_are_refused(head, shape, sentence):
    with pytest.raises(InputError, match=sentence):
        expanded_head_config(replace(HEAD, **head), POLICY, replace(WIDE, **shape))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def tiny_shape(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", Shape(64, 40, 48, 64, 8, 4, 2, 32))


def test_the_script_writes_both_folders(monkeypatch, tmp_path, models, tiny_shape):
    options = ("--policy", models / "policy", "--drafter", models / "drafter", "--target", "tiny")
    run_script(monkeypatch, expand, *options, "--out", tmp_path / "out")
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert row["logit_difference"] < 1e-4
    assert row["draft_logit_difference"] < 1e-4
    assert min(row["padded_margin"], row["draft_padded_margin"]) > 30
    params, config = load_policy(tmp_path / "out" / "policy")
    drafter, _ = load_eagle3(tmp_path / "out" / "drafter", config)
    assert (config.hidden_size, drafter.config.boundaries) == (48, (2, 4, 5))
    small, small_config = load_policy(models / "policy")
    tokens = random_tokens(high=small_config.vocab_size)
    ours, theirs = outputs(params, config, tokens)[0], outputs(small, small_config, tokens)[0]
    np.testing.assert_allclose(ours[..., : small_config.vocab_size], theirs, atol=1e-4)
    assert (tmp_path / "out" / "policy" / "tokenizer.json").is_file()


def test_the_script_expands_a_policy_alone(monkeypatch, tmp_path, models, tiny_shape):
    options = ("--policy", models / "policy", "--target", "tiny", "--dtype", "bfloat16")
    run_script(monkeypatch, expand, *options, "--out", tmp_path / "out")
    assert load_policy(tmp_path / "out" / "policy")[1].dtype == "bfloat16"
    assert not (tmp_path / "out" / "drafter").exists()


def test_bad_input_is_refused(monkeypatch, capsys, tmp_path, models, tiny_shape):
    other = write_models(tmp_path / "other", *SMALLER)
    policy = ("--policy", models / "policy")
    for sentence, *argv in (
        ("--policy is missing; give the folder",),
        ("--target is 9b; choose one of 25m, deep-95m, ", *policy, "--target", "9b"),
        ("--check-tokens is 0", *policy, "--check-tokens", 0),
        ("no/such", *policy, "--drafter", "no/such/folder"),
        ("draft head was made for a policy of hidden_size 16, not 32", *policy, "--drafter", other / "drafter"),
        ("hidden_size is 32 in the source and 30 in the target", *policy, "--target", "narrow"),
    ):
        monkeypatch.setitem(SHAPES, "narrow", replace(SHAPES["tiny"], hidden_size=30))
        out = tmp_path / "out"
        assert sentence in refusal(monkeypatch, capsys, expand, *argv, "--out", out)
        assert not out.exists()


def test_a_policy_whose_stream_is_too_large_is_refused():
    """New ids read a constant that the norm divides by the size of the stream."""
    params, policy, _, _ = small_pair()
    huge = params.replace(embed=params.embed * 1e8)
    large = expand.Pair(*expand_policy(jax.random.key(0), huge, policy, WIDE))
    with pytest.raises(InputError, match="residual stream is too large"):
        expand.compare(expand.Pair(huge, policy), large, np.asarray(random_tokens()))
