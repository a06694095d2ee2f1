"""EAGLE-3 heads as folders: SpecForge's layout, and what the loader refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_folder import load_eagle3, save_eagle3, with_policy_embedding
from specrl_jax.drafters.eagle3_params import Eagle3Config, init_eagle3
from specrl_jax.drafters.heads import load_drafter
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig, RopeConfig

pytestmark = pytest.mark.ci

SPECFORGE = Path(__file__).parent / "fixtures" / "eagle3" / "head"
POLICY = PolicyConfig(
    family="llama",
    vocab_size=29,
    hidden_size=24,
    intermediate_size=40,
    num_layers=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
CONFIG = Eagle3Config(
    hidden_size=24,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=29,
    draft_vocab_size=11,
    boundaries=(2, 5, 7),
    target_hidden_size=24,
    max_position_embeddings=64,
)
IDS = np.array([28, 0, 7, 3, 12, 11, 5, 9, 20, 21, 1])  # in order of frequency, as some trainers leave them


def edited_config(folder, **fields):
    file = folder / "config.json"
    hf = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in hf.items() if value is not ...}))


def edited_tensors(folder, edit):
    """Rewrite the weights after `edit(tensors)`, which changes the dict in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(SPECFORGE, tmp_path / "head"))


def assert_equal(loaded, expected):
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("boundaries", [(2, 5, 7), (1, 2, 3), (0, 1, 2), (3, 6, 10)])
def test_a_saved_head_comes_back_whole(tmp_path, dtype, boundaries):
    rope = RopeConfig(kind="yarn", theta=5e5, factor=4.0, original_max_position_embeddings=16)
    drafter = Eagle3Drafter(replace(CONFIG, dtype=dtype, boundaries=boundaries, rope=rope))
    params = init_eagle3(jax.random.key(0), drafter.config, IDS)
    save_eagle3(tmp_path / "runs" / "drafter", drafter, params)
    loaded_drafter, loaded = load_eagle3(tmp_path / "runs" / "drafter", POLICY)
    assert loaded_drafter == drafter
    assert_equal(loaded, params)
    assert not list((tmp_path / "runs").glob(".*"))


def test_the_files_are_those_of_specforge(tmp_path, folder):
    """Same names, shapes and element types, less the embedding where a head shares it with its policy."""
    drafter, params = load_eagle3(folder)
    save_eagle3(tmp_path / "ours", *with_policy_embedding(drafter, params, params.embed))
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "ours", folder))
    del theirs["embed_tokens.weight"]
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        np.testing.assert_array_equal(value, theirs[name])
    our_config, their_config = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "ours", folder))
    optional = {"attention_dropout", "initializer_range", "pretraining_tp", "transformers_version", "use_cache"}
    for name in their_config.keys() - optional - {"eagle_config", "bos_token_id", "eos_token_id", "pad_token_id"}:
        assert our_config[name] == their_config[name], name
    assert our_config["eagle_config"].items() >= their_config["eagle_config"].items()


def test_vllm_finds_the_boundaries_at_the_top(tmp_path):
    """It takes ids as boundaries and reads these before the nested ones, which are SpecForge's."""
    save_eagle3(tmp_path / "head", Eagle3Drafter(CONFIG), init_eagle3(jax.random.key(0), CONFIG, IDS))
    hf = json.loads((tmp_path / "head" / "config.json").read_text())
    assert hf["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert hf["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]


def test_a_whole_vocabulary_is_saved_in_order_and_without_maps(tmp_path):
    drafter = Eagle3Drafter(replace(CONFIG, draft_vocab_size=29))
    order = np.random.default_rng(0).permutation(29)
    params = init_eagle3(jax.random.key(0), drafter.config, order)
    save_eagle3(tmp_path / "head", drafter, params)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "head" / "model.safetensors").keys()
    loaded = load_eagle3(tmp_path / "head")[1]
    np.testing.assert_array_equal(loaded.target_ids, np.arange(29))
    np.testing.assert_array_equal(loaded.weights.lm_head[order], params.weights.lm_head)
    assert_equal(loaded.weights.replace(lm_head=None), params.weights.replace(lm_head=None))


def test_saving_again_replaces_the_head_as_a_whole(tmp_path):
    drafter = Eagle3Drafter(CONFIG)
    first, second = (init_eagle3(jax.random.key(seed), CONFIG, IDS) for seed in (0, 1))
    save_eagle3(tmp_path / "drafter", drafter, first)
    (tmp_path / "drafter" / "stale.txt").write_text("from before")
    save_eagle3(tmp_path / "drafter", drafter, second)
    assert_equal(load_eagle3(tmp_path / "drafter")[1], second)
    assert {file.name for file in tmp_path.rglob("*")} == {"drafter", "config.json", "model.safetensors"}


def test_a_failed_save_leaves_the_old_head(tmp_path, monkeypatch):
    drafter = Eagle3Drafter(CONFIG)
    params = init_eagle3(jax.random.key(0), CONFIG, IDS)
    save_eagle3(tmp_path / "drafter", drafter, params)

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("specrl_jax.drafters.head_files.write_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        save_eagle3(tmp_path / "drafter", drafter, init_eagle3(jax.random.key(1), CONFIG, IDS))
    assert_equal(load_eagle3(tmp_path / "drafter")[1], params)
    assert [file.name for file in tmp_path.iterdir()] == ["drafter"]


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds no draft head"):
        save_eagle3(tmp_path, Eagle3Drafter(CONFIG), init_eagle3(jax.random.key(0), CONFIG, IDS))


def test_names_of_other_writers_are_understood(folder):
    """`model.` before a name, `layers.0.` for the layer, and no t2d."""
    expected = load_eagle3(folder)[1]

    def rename(tensors):
        for name in list(tensors):
            tensors["model." + name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
        del tensors["model.t2d"]

    edited_tensors(folder, rename)
    assert_equal(load_eagle3(folder)[1], expected)


def test_draft_tokens_may_stand_in_any_order(folder):
    """An inverse built from t2d would give sorted ids; d2t alone says which column is which token."""

    def reorder(tensors):
        tensors["d2t"] = IDS - np.arange(len(IDS))
        tensors["t2d"] = np.isin(np.arange(29), IDS)

    edited_tensors(folder, reorder)
    np.testing.assert_array_equal(load_eagle3(folder)[1].target_ids, IDS)


def test_a_whole_vocabulary_needs_no_map(folder):
    def widen(tensors):
        del tensors["d2t"], tensors["t2d"]
        tensors["lm_head.weight"] = np.ones((29, 24), np.float32)

    edited_tensors(folder, widen)
    edited_config(folder, draft_vocab_size=...)
    drafter, params = load_eagle3(folder)
    assert drafter.config.draft_vocab_size == 29
    np.testing.assert_array_equal(params.target_ids, np.arange(29))


@pytest.mark.parametrize(
    ("ids", "boundaries"),
    [([1, 4, 6], (2, 5, 7)), ([6, 1, 4], (2, 5, 7)), ([2, 5, 7], (2, 5, 7)), ([1, 2, 3], (2, 3, 4))],
)
@pytest.mark.parametrize("nested", [True, False])
def test_both_conventions_of_layer_ids_are_read(folder, ids, boundaries, nested):
    named = {"eagle_aux_hidden_state_layer_ids": ids}
    edited_config(folder, **({"eagle_config": named} if nested else {"eagle_config": {}, **named}))
    assert load_eagle3(folder)[0].boundaries == boundaries


def test_unusual_layer_ids_are_read_with_a_warning(folder):
    edited_config(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 6, 9]})
    with pytest.warns(UserWarning, match="as they are"):
        assert load_eagle3(folder)[0].boundaries == (3, 6, 9)


def test_boundaries_can_be_given(folder):
    assert load_eagle3(folder, boundaries=(1, 5, 9))[0].boundaries == (1, 5, 9)


def test_silent_configs_take_the_policys_default(folder):
    edited_config(folder, eagle_config=...)
    assert load_eagle3(folder, POLICY)[0].boundaries == (2, 5, 7)
    with pytest.raises(InputError, match="give the boundaries"):
        load_eagle3(folder)


def test_half_precision_is_widened(folder):
    def narrow(tensors):
        for name, value in tensors.items():
            if value.dtype == np.float32:
                tensors[name] = value.astype(np.float16)

    expected = load_eagle3(folder)[1]
    edited_tensors(folder, narrow)
    edited_config(folder, dtype="float16")
    drafter, params = load_eagle3(folder)
    assert drafter.config.dtype == "float32"
    np.testing.assert_allclose(params.weights.fc, expected.weights.fc, atol=1e-3)
    edited_config(folder, dtype="bfloat16")
    assert load_eagle3(folder)[1].weights.fc.dtype == ml_dtypes.bfloat16


def remove(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (remove("fc.weight"), "lacks tensor fc.weight"),
        (remove("d2t"), "lacks tensor d2t"),
        (
            put("midlayer.self_attn.q_norm.weight", np.ones(8, np.float32)),
            "unexpected tensor midlayer.self_attn.q_norm",
        ),
        (put("model.norm.weight", np.ones(24, np.float32)), "unexpected tensor"),
        (put("norm.weight", np.ones(23, np.float32)), r"norm.weight of shape \[23\] .* asks for \[24\]"),
        (put("norm.weight", np.ones(24, np.int8)), "norm.weight of type I8"),
        (put("d2t", np.zeros(11, np.float32)), "d2t of type F32"),
        (put("d2t", np.full(11, 28)), "outside the vocabulary"),
        (put("d2t", -np.arange(11)), "names a token twice"),
        (put("t2d", np.ones(29, bool)), "t2d that does not belong"),
    ],
)
def test_wrong_tensors_are_refused(folder, edit, sentence):
    edited_tensors(folder, edit)
    with pytest.raises(InputError, match=sentence):
        load_eagle3(folder)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"architectures": ["PEagleDraftModel"]}, "'PEagleDraftModel'; supported are LlamaForCausalLMEagle3, "),
        ({"speculators_model_type": "peagle"}, "speculators_model_type 'peagle'; supported is eagle3"),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "gpt2"}},
            "model_type 'gpt2'; supported are llama and qwen3",
        ),
        ({"fc_norm": True}, r"lacks tensor fc_norm\.0\.weight"),
        ({"eagle_config": {"norm_before_fc": True}, "eagle_aux_hidden_state_layer_ids": [2, 5, 7]}, "lacks tensor inp"),
        ({"fc_norm": True, "norm_before_fc": True}, "choose one"),
        ({"eagle_config": {"use_last_layernorm": False}}, "sets use_last_layernorm to False"),
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"num_hidden_layers": 2}, "has 2 layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": ...}, "lacks hidden_size"),
        ({"hidden_size": 32}, "of shape"),
        ({"target_hidden_size": 32}, r"fc.weight of shape \[24, 72\] where config.json asks for \[24, 96\]"),
        ({"draft_vocab_size": "11"}, "must be an integer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["1", 4]}}, "a list of integers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 4]}}, "ascending"),
    ],
)
def test_wrong_configs_are_refused(folder, fields, sentence):
    edited_config(folder, **fields)
    with pytest.raises(InputError, match=sentence) as raised:
        load_eagle3(folder)
    assert str(folder) in str(raised.value)


def test_a_head_of_another_width_needs_an_embedding_of_its_own(folder):
    edited_tensors(folder, remove("embed_tokens.weight"))
    edited_config(folder, target_hidden_size=32)
    with pytest.raises(InputError, match="use equal widths"):
        load_eagle3(folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vocab_size": 30}, "vocab_size 29, not 30"),
        ({"hidden_size": 32}, "hidden_size 24, not 32"),
        ({"num_layers": 6}, "with 6 layers"),
    ],
)
def test_a_head_of_another_policy_is_refused(folder, change, sentence):
    load_eagle3(folder, POLICY)
    with pytest.raises(InputError, match=sentence):
        load_eagle3(folder, replace(POLICY, **change))


def test_an_early_head_goes_by_the_architecture_of_a_policy(folder):
    file, expected = folder / "config.json", load_drafter(folder, POLICY)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["LlamaForCausalLM"]}))
    jax.tree.map(np.testing.assert_array_equal, load_drafter(folder, POLICY), expected)


def test_a_pickled_head_on_the_hub_is_refused_with_the_command_that_converts_it(folder, monkeypatch):
    """What the hub has pickled is not downloaded."""
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr("specrl_jax.drafters.heads.resolve_folder", lambda source, kind: folder)
    with pytest.raises(InputError, match=r"pickled.*`python -m experiments.convert --source someone/head --out"):
        load_drafter("someone/head")


def test_damaged_and_missing_files_are_refused(folder, tmp_path):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="damaged or incomplete at tensor"):
        load_eagle3(folder)
    for name in ("pytorch_model.bin", "head.pt", "head.pth"):
        pickled = weights.rename(folder / name)
        with pytest.raises(InputError, match=r"pickled.*convert them with `python -m experiments.convert --source"):
            load_eagle3(folder)
        pickled.rename(weights)
    weights.unlink()
    with pytest.raises(InputError, match=r"lacks model\.safetensors"):
        load_eagle3(folder)
    with pytest.raises(InputError, match=r"draft head .* is neither"):
        load_eagle3(tmp_path / "nowhere")
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json is missing"):
        load_eagle3(folder)


def test_the_embedding_of_a_self_contained_head_is_not_needed(folder):
    drafter, expected = load_eagle3(folder)
    assert drafter.config.own_embed
    embed = expected.embed
    edited_tensors(folder, remove("embed_tokens.weight"))
    without = load_eagle3(folder)
    assert_equal(without[1], expected.replace(embed=None))
    # The policy's is shared, another is kept.
    shared = with_policy_embedding(drafter, expected, embed)
    assert shared[0] == without[0]
    assert_equal(shared[1], without[1])
    assert with_policy_embedding(drafter, expected, embed + 1)[1].embed is embed
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(expected.weights))
