"""Policy folders: configs in both styles, saved form, hashes, presets, and everything that is refused."""

import hashlib
import json
import math
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.models.checkpoints import MODELS, recipe_tensors, small_tokenizer, write_checkpoint
from safetensors import safe_open
from safetensors.numpy import save_file

from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig, RopeConfig
from specrl_jax.models.huggingface import check_tokenizer_fits, load_policy, save_policy
from specrl_jax.models.huggingface_config import config_from_hf, config_to_hf
from specrl_jax.models.params import init_params
from specrl_jax.models.presets import PRESETS
from specrl_jax.models.weights import params_sha256, policy_tensors, tensor_shapes

pytestmark = pytest.mark.ci
TINY = replace(PRESETS["tiny-qwen3"], vocab_size=61, hidden_size=32, intermediate_size=48)
QWEN3 = MODELS["qwen3-yarn-untied"]["config"]
LLAMA = MODELS["llama-llama3-untied"]["config"]


def stored_tensors(folder):
    values = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            values |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return values


@pytest.fixture(scope="module")
def tiny_params():
    return init_params(jax.random.key(1), TINY)


@pytest.mark.parametrize("name", list(MODELS))
def test_a_config_read_and_written_is_that_of_transformers(name):
    theirs = MODELS[name]["config"]
    config = config_from_hf(theirs)
    ours = config_to_hf(config)
    assert config_from_hf(ours) == config
    assert {tensor: list(shape) for tensor, shape in tensor_shapes(config).items()} == MODELS[name]["shapes"]
    common = (set(ours) & set(theirs)) - {"rope_parameters"}
    assert {key: ours[key] for key in common} == {key: theirs[key] for key in common}
    rope = theirs["rope_parameters"]
    assert {key: ours["rope_parameters"][key] for key in rope} == rope
    neutral = {"rope_theta", "rope_scaling", "head_dim"}  # older readers; a field that Qwen2 has not by itself
    assert set(ours) - set(theirs) <= neutral


@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("-tied")])
def test_the_older_rope_fields_mean_the_same(name):
    hf = dict(MODELS[name]["config"])
    rope = dict(hf.pop("rope_parameters"))
    old = hf | {"rope_theta": rope.pop("rope_theta"), "torch_dtype": hf["dtype"]}
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
    del old["dtype"]
    assert config_from_hf(old) == config_from_hf(MODELS[name]["config"])


def test_absent_fields_mean_what_transformers_takes_them_to_mean():
    llama = {key: LLAMA[key] for key in ("architectures", "vocab_size", "hidden_size", "intermediate_size")}
    llama |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = config_from_hf(llama)
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 8, 2048)
    assert (config.rope, config.rms_norm_eps, config.tie_embeddings) == (RopeConfig(theta=10_000.0), 1e-6, False)
    assert config_from_hf(llama | {"architectures": ["Qwen2ForCausalLM"]}).head_dim == 8
    assert config_from_hf(llama | {"architectures": ["Qwen3ForCausalLM"]}).head_dim == 128
    assert config_from_hf({"model_type": "llama"} | {k: v for k, v in llama.items() if k != "architectures"}) == config
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 512}
    assert config_from_hf(llama | {"rope_parameters": yarn}).rope.factor == 4.0
    outer = {"rope_parameters": yarn, "original_max_position_embeddings": 1024}
    assert config_from_hf(llama | outer).rope.original_max_position_embeddings == 1024
    assert config_from_hf(llama | {"rope_parameters": {"type": "linear", "factor": 2}}).rope.kind == "linear"
    assert config_from_hf(QWEN3 | {"dtype": "float16"}).dtype == "float32"
    assert config_from_hf(QWEN3 | {"dtype": "bfloat16"}).dtype == "bfloat16"


def test_sliding_windows_that_no_layer_uses_are_accepted():
    qwen2 = MODELS["qwen2-default-tied"]["config"]
    qwen2 = {key: value for key, value in qwen2.items() if key != "layer_types"}
    unused = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    assert config_from_hf(qwen2 | unused) == config_from_hf(qwen2)
    assert config_from_hf(qwen2 | {"use_sliding_window": False, "sliding_window": 8}) == config_from_hf(qwen2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "MistralForCausalLM.*supported are"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": None, "model_type": None}, "architecture None"),
        ({"model_type": "llama"}, "belong together"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding-window",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "factor is 0.0"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor"),
        ({"rope_parameters": LLAMA["rope_parameters"] | {"high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"rope_parameters": QWEN3["rope_parameters"] | {"original_max_position_embeddings": 0}}, "original_max"),
        ({"rope_parameters": QWEN3["rope_parameters"] | {"beta_slow": -1}}, "beta_slow"),
        ({"rope_parameters": {"rope_theta": 0.5}}, "theta is 0.5"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta = 'big'.*number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": [1]}, "must be an object"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"hidden_size": "32"}, "hidden_size = '32'.*integer"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 5}, "even"),
    ],
)
def test_a_config_that_is_not_computed_here_is_refused(change, words):
    with pytest.raises(InputError, match=words) as caught:
        config_from_hf(QWEN3 | change)
    assert "\n" not in str(caught.value)


def test_a_llama_that_transformers_would_not_load_is_not_saved():
    config = replace(PRESETS["tiny-llama"], hidden_size=66)
    with pytest.raises(InputError, match="66 is not a multiple of num_heads 4"):
        config_to_hf(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_policy_is_the_folder_that_transformers_writes(tmp_path, dtype):
    name = "qwen2-yarn-untied"
    params, config = load_policy(write_checkpoint(tmp_path / "in", name), dtype=dtype)
    tokenizer = small_tokenizer(family="qwen2")
    save_policy(tmp_path / "deep" / "out", params, config, tokenizer, {"temperature": 0.5})
    folder = tmp_path / "deep" / "out"
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in folder.iterdir()} == files
    assert [file.name for file in folder.parent.iterdir()] == ["out"]
    stored = stored_tensors(folder)
    for tensor, value in recipe_tensors(name).items():
        np.testing.assert_array_equal(stored.pop(tensor), value.astype(jnp.dtype(dtype)))
    assert not stored
    hf = json.loads((folder / "config.json").read_text())
    assert hf["dtype"] == dtype
    assert (hf["eos_token_id"], hf["pad_token_id"], hf["bos_token_id"]) == (1, 0, None)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "temperature": 0.5}
    again, config_again = load_policy(folder)
    assert config_again == config
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_large_weights_are_split_and_read_back(tmp_path, tiny_params):
    save_policy(tmp_path / "p", tiny_params, TINY, small_tokenizer(), shard_bytes=20_000)
    index = json.loads((tmp_path / "p/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensor_shapes(TINY))
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(4 * math.prod(s) for s in tensor_shapes(TINY).values())
    assert not (tmp_path / "p/model.safetensors").exists()
    params, config = load_policy(tmp_path / "p")
    assert params_sha256(params, config) == params_sha256(tiny_params, TINY)


def test_saving_replaces_a_policy_as_a_whole_and_nothing_else(tmp_path, tiny_params):
    save_policy(tmp_path / "p", tiny_params, TINY, small_tokenizer(), shard_bytes=20_000)
    other = init_params(jax.random.key(9), TINY)
    save_policy(tmp_path / "p", other, TINY, small_tokenizer())
    assert not list((tmp_path / "p").glob("*index*"))
    assert params_sha256(load_policy(tmp_path / "p")[0], TINY) == params_sha256(other, TINY)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(InputError, match="thesis exists and holds no policy"):
        save_policy(tmp_path / "thesis", other, TINY, small_tokenizer())
    assert (tmp_path / "thesis" / "chapter.txt").exists()


def test_a_save_that_fails_leaves_the_earlier_policy(tmp_path, tiny_params):
    class Broken(type(small_tokenizer())):
        def save_pretrained(self, *_):
            raise OSError("disk full")

    save_policy(tmp_path / "p", tiny_params, TINY, small_tokenizer())
    tokenizer = Broken(tokenizer_object=small_tokenizer().backend_tokenizer)
    with pytest.raises(OSError, match="disk full"):
        save_policy(tmp_path / "p", init_params(jax.random.key(2), TINY), TINY, tokenizer)
    assert [file.name for file in tmp_path.iterdir()] == ["p"]
    assert params_sha256(load_policy(tmp_path / "p")[0], TINY) == params_sha256(tiny_params, TINY)


def test_the_hash_is_that_of_the_stored_bytes(tmp_path, tiny_params):
    save_policy(tmp_path / "p", tiny_params, TINY, small_tokenizer())
    digest = hashlib.sha256()
    for _, value in sorted(stored_tensors(tmp_path / "p").items()):
        digest.update(value.tobytes())
    assert params_sha256(tiny_params, TINY) == digest.hexdigest()
    nudged = replace(tiny_params, final_norm=tiny_params.final_norm.at[3].add(1e-6))
    assert params_sha256(nudged, TINY) != digest.hexdigest()
    assert list(policy_tensors(tiny_params, TINY)) == sorted(tensor_shapes(TINY))
    with pytest.raises(ValueError, match="shapes"):
        policy_tensors(tiny_params, replace(TINY, vocab_size=60))


def test_old_and_tied_checkpoints_may_carry_tensors_that_nobody_reads(tmp_path):
    name = "llama-linear-tied"
    tensors = recipe_tensors(name)
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    params, config = load_policy(write_checkpoint(tmp_path / "a", name, tensors=tensors | extra))
    assert params.head is None
    assert params_sha256(params, config) == params_sha256(*load_policy(write_checkpoint(tmp_path / "b", name)))


NORM = "model.layers.1.post_attention_layernorm.weight"


def _altered(change):
    tensors = recipe_tensors("qwen3-yarn-untied")
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), f"lacks tensor {NORM}"),
        (lambda t: t.pop("lm_head.weight"), "lacks tensor lm_head.weight"),
        (lambda t: t.update({NORM: np.ones(33, np.float32)}), rf"{NORM} of shape \[33\] where.*\[32\]"),
        (lambda t: t.update({"lm_head.weight": np.ones((32, 61), np.float32)}), r"lm_head.weight of shape \[32, 61\]"),
        (lambda t: t.update({NORM: np.ones(32, np.int32)}), f"{NORM} of type I32"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.ones(2)}), "unexpected tensor model.layers.2.mlp"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(64)}), "unexpected tensor.*q_proj.bias"),
    ],
)
def test_wrong_tensors_are_refused_by_name(tmp_path, change, words):
    folder = write_checkpoint(tmp_path / "p", "qwen3-yarn-untied", tensors=_altered(change))
    with pytest.raises(InputError, match=words) as caught:
        load_policy(folder)
    assert str(folder) in str(caught.value)


def test_tensors_are_checked_before_any_is_read(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "p", "qwen3-yarn-untied", tensors=_altered(lambda t: t.pop(NORM)))
    monkeypatch.setattr(jnp, "asarray", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(InputError):
        load_policy(folder)


@pytest.mark.parametrize("lost", [1, 3000, 20_000])
def test_a_truncated_file_is_refused_with_the_tensor_that_breaks_off(tmp_path, lost):
    folder = write_checkpoint(tmp_path / "p", "qwen3-yarn-untied")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-lost])
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    del header["__metadata__"]
    left = len(data) - 8 - int.from_bytes(data[:8], "little") - lost
    broken = min((e["data_offsets"][1], name) for name, e in header.items() if e["data_offsets"][1] > left)[1]
    with pytest.raises(InputError, match=f"model.safetensors is damaged or incomplete at tensor {broken};"):
        load_policy(folder)


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "the header"), (b"\x10\x00", "the header"), (b"\x08" + bytes(7) + b"not json", "the header")],
)
def test_a_file_without_a_header_is_refused(tmp_path, data, words):
    folder = write_checkpoint(tmp_path / "p", "qwen3-yarn-untied")
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(InputError, match=f"damaged or incomplete at {words}"):
        load_policy(folder)


def _sharded(folder):
    """Two shards and their index."""
    write_checkpoint(folder, "qwen3-yarn-untied")
    tensors = recipe_tensors("qwen3-yarn-untied")
    halves = {"a.safetensors": sorted(tensors)[:9], "b.safetensors": sorted(tensors)[9:]}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f, _: (f / "b.safetensors").unlink(), "b.safetensors is missing"),
        (lambda f, _: shutil.copy(f / "a.safetensors", f / "b.safetensors"), "b.safetensors lacks tensor"),
        (lambda f, i: (f / "model.safetensors.index.json").write_text("{"), "index.json cannot be read as JSON"),
        (lambda f, i: (f / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
        (lambda f, i: (f / "model.safetensors.index.json").unlink(), "neither model.safetensors nor"),
        (lambda f, i: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f, i: (f / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda f, i: (f / "config.json").write_text('{"architectures": ["X"]}'), "config.json: .*'X'"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, damage, words):
    index = _sharded(tmp_path)
    assert load_policy(tmp_path)[1].family == "qwen3"
    damage(tmp_path, index)
    with pytest.raises(InputError, match=words) as caught:
        load_policy(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("source", ["no-such-owner/no-such-policy", "/no/such/folder", "not a name"])
def test_a_source_that_is_nowhere_is_refused(source):
    with pytest.raises(InputError, match=f"policy '{source}' is neither a folder nor"):
        load_policy(source)


def test_a_file_as_source_is_refused(tmp_path):
    (tmp_path / "weights").write_text("")
    with pytest.raises(InputError, match="is a file"):
        load_policy(tmp_path / "weights")


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path, tiny_params):
    check_tokenizer_fits(small_tokenizer(61), TINY)
    with pytest.raises(InputError, match="ids up to 61 and the policy's embedding 61 rows"):
        check_tokenizer_fits(small_tokenizer(62), TINY)
    with pytest.raises(InputError, match="ids up to 61"):
        save_policy(tmp_path / "p", tiny_params, TINY, small_tokenizer(62))
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_transformers_would_replace_is_refused():
    qwen2 = replace(PRESETS["tiny-qwen2"], vocab_size=61)
    check_tokenizer_fits(small_tokenizer(family="qwen2"), qwen2)
    with pytest.raises(InputError, match="every qwen2 policy"):
        check_tokenizer_fits(small_tokenizer(), qwen2)


def test_presets_have_the_published_sizes():
    published = {
        "qwen3-0.6b": 596_049_920,
        "qwen3-1.7b": 1_720_574_976,
        "qwen3-4b": 4_022_468_096,
        "qwen3-8b": 8_190_735_360,
        "qwen3-14b": 14_768_307_200,
        "qwen3-32b": 32_762_123_264,
        "llama-3.1-8b": 8_030_261_248,
        "mimo-7b": 7_833_409_536 - 210_790_400,  # less its MTP layer
    }
    sizes = {name: sum(math.prod(s) for s in tensor_shapes(c).values()) for name, c in PRESETS.items()}
    assert {name: sizes[name] for name in published} == published
    assert {name for name in PRESETS if name not in published} == {"tiny-qwen3", "tiny-qwen2", "tiny-llama"}
    assert all(sizes[name] < 200_000 for name in sizes if name not in published)


@pytest.mark.parametrize("fields", [{"hidden_size": 0}, {"num_kv_heads": 3}, {"head_dim": 7}])
def test_impossible_shapes_are_refused(fields):
    with pytest.raises(InputError):
        replace(PRESETS["tiny-llama"], **fields)
    assert isinstance(PRESETS["tiny-llama"], PolicyConfig)
