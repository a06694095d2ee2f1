"""Folders like those of public checkpoints: their config.json, their tensors' names, shapes and types; weights made up.

At full size only the headers of the safetensors are written and the files are holes, so that 16 GB take no room. The
smaller ones keep every field but the sizes, and have random weights.
"""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

# What shrinks, field by field, in a config.json or in the layer that it describes.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_window_layers": 7,
    "draft_vocab_size": 96,
}
SMALL_LAYERS, SMALL_VOCAB = 7, 320

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_0_6B = QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
DFLASH = QWEN3_8B | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "layer_types": ["full_attention"] * 5,
    "max_window_layers": 5,
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.3",
}
_HEAD_LAYER = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "use_cache": True,
    "vocab_size": 151936,
}
ANGELSLIM = _HEAD_LAYER | {
    "architectures": ["Eagle3LlamaForCausalLM"],
    "bos_token_id": 151643,
    "draft_vocab_size": 32000,
    "eos_token_id": 151645,
    "pad_token_id": 151643,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.1",
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 32000,
    "has_no_defaults_at_init": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.2.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformer_layer_config": _HEAD_LAYER,
    "transformers_version": "4.56.1",
}
MIMO_7B = {
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModel": "modeling_mimo.MiMoModel",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    },
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "mimo",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 640000,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151680,
}


def _layer(prefix, hf, *, bias=False, qk_norm=False, inputs=1):
    """Tensors of a decoder layer whose attention reads `inputs` vectors side by side."""
    wide, mlp, width = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    heads, groups = hf["num_attention_heads"] * width, hf["num_key_value_heads"] * width
    attention = {"q": heads, "k": groups, "v": groups}
    shapes = {f"self_attn.{name}_proj.weight": (size, inputs * wide) for name, size in attention.items()}
    if bias:
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in attention.items()}
    if qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (width,) for name in "qk"}
    shapes |= {
        "self_attn.o_proj.weight": (wide, heads),
        "mlp.gate_proj.weight": (mlp, wide),
        "mlp.up_proj.weight": (mlp, wide),
        "mlp.down_proj.weight": (wide, mlp),
        "input_layernorm.weight": (wide,),
        "post_attention_layernorm.weight": (wide,),
    }
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _policy(hf, **layers):
    wide, vocab = hf["hidden_size"], hf["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, wide), "model.norm.weight": (wide,)}
    if not hf["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, wide)
    for i in range(hf["num_hidden_layers"]):
        shapes |= _layer(f"model.layers.{i}", hf, **layers)
    return shapes


def _mimo(hf):
    wide, head = hf["hidden_size"], "model.mtp_layers.0"
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    own = {f"{head}.{name}.weight": (wide,) for name in norms} | {f"{head}.input_proj.weight": (wide, 2 * wide)}
    return _policy(hf, bias=True) | _layer(head, hf, bias=True) | own


def _head(hf, layer, prefix):
    wide, draft = layer["hidden_size"], hf["draft_vocab_size"]
    return _layer(prefix, layer, inputs=2) | {
        f"{prefix}.hidden_norm.weight": (wide,),
        "fc.weight": (wide, 3 * wide),
        "norm.weight": (wide,),
        "lm_head.weight": (draft, wide),
        "d2t": (draft,),
        "t2d": (layer["vocab_size"],),
    }


def _speculators(hf):
    layer = hf["transformer_layer_config"]
    return _head(hf, layer, "layers.0") | {"embed_tokens.weight": (layer["vocab_size"], layer["hidden_size"])}


def _dflash(hf):
    wide = hf["hidden_size"]
    read = len(hf["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (wide, read * wide), "hidden_norm.weight": (wide,), "norm.weight": (wide,)}
    for i in range(hf["num_hidden_layers"]):
        shapes |= _layer(f"layers.{i}", hf, qk_norm=True)
    return shapes


FOLDERS = {
    "Qwen3-0.6B": (QWEN3_0_6B, lambda hf: _policy(hf, qk_norm=True), 1),
    "Qwen3-8B-DFlash-b16": (DFLASH, _dflash, 1),
    "Qwen3-8B": (QWEN3_8B, lambda hf: _policy(hf, qk_norm=True), 5),
    "Qwen3-8B_eagle3": (ANGELSLIM, lambda hf: _head(hf, hf, "midlayer"), 1),
    "Qwen3-8B-speculator.eagle3": (SPECULATORS, _speculators, 1),
    "MiMo-7B-RL": (MIMO_7B, _mimo, 4),
}
"""By name: config.json, shapes by tensor name, and the number of files that the weights come in."""
TYPES = {"d2t": ("I64", np.int64), "t2d": ("BOOL", np.bool_)}


def small(hf):
    """A config.json with all its fields, of a model small enough to run."""
    shrunk = hf | {name: value for name, value in SMALL.items() if name in hf}
    if "vocab_size" in hf:
        shrunk["vocab_size"] = SMALL_VOCAB
    if "dflash_config" in hf:
        shrunk |= {"dflash_config": {"mask_token_id": SMALL_VOCAB - 1, "target_layer_ids": [0, 2, 3, 4, 5]}}
        shrunk["num_target_layers"] = SMALL_LAYERS
    elif hf.get("num_hidden_layers", 1) > 1:
        shrunk["num_hidden_layers"] = SMALL_LAYERS
    if "transformer_layer_config" in hf:
        shrunk["transformer_layer_config"] = small(hf["transformer_layer_config"])
    return shrunk


def random_tensor(name, shape, vocab):
    rng = np.random.default_rng(sum(map(ord, name)))
    if name == "d2t":  # the even tokens
        return np.arange(shape[0])
    if name == "t2d":
        return np.isin(np.arange(vocab), 2 * np.arange(SMALL["draft_vocab_size"]))
    drawn = rng.standard_normal(shape) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.1)
    return (drawn + (len(shape) == 1 and "norm" in name)).astype(ml_dtypes.bfloat16)


def _write_hole(file, shapes):
    """A safetensors file of so many zeros that are nowhere on the disk."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        kind, dtype = TYPES.get(name, ("BF16", ml_dtypes.bfloat16))
        start, end = end, end + int(np.prod(shape)) * np.dtype(dtype).itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return end


def write_folder(folder, name, *, full=False, change=None):
    """The folder of a public checkpoint, small or at full size; `change(shapes)` may spoil it first."""
    hf, shapes_of, files = FOLDERS[name]
    hf = hf if full else small(hf)
    shapes = shapes_of(hf)
    if change is not None:
        change(shapes)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf, indent=2))
    vocab = hf.get("transformer_layer_config", hf)["vocab_size"]
    names, size, listed = list(shapes), 0, {}
    for i in range(files):
        part = {name: shapes[name] for name in names[i::files]}
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors" if files > 1 else "model.safetensors"
        listed |= dict.fromkeys(part, file)
        if full:
            size += _write_hole(folder / file, part)
        else:
            tensors = {name: random_tensor(name, shape, vocab) for name, shape in part.items()}
            save_file(tensors, folder / file, metadata={"format": "pt"})
    if files > 1:
        index = {"metadata": {"total_size": size}, "weight_map": listed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
