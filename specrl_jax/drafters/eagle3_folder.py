"""EAGLE-3 heads as folders: config.json and model.safetensors in the layout of SpecForge, which vLLM and SGLang read.

The embedding is the policy's; we do not store it, and a copy in the file is not
read. `d2t` holds for each draft token the offset to its target token, `t2d` which
target tokens are in the draft vocabulary.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_params import (
    Eagle3Config,
    Eagle3Params,
    Eagle3Weights,
    default_boundaries,
    weight_shapes,
)
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.folders import replaced_folder
from specrl_jax.models.huggingface import resolve_folder
from specrl_jax.models.huggingface_config import config_from_hf, config_to_hf
from specrl_jax.models.weights import WEIGHTS_FILE, read_json, tensor_headers, write_tensors

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_NAMES = {
    "fc": "fc.weight",
    "embed_norm": "midlayer.input_layernorm.weight",
    "hidden_norm": "midlayer.hidden_norm.weight",
    "q_proj": "midlayer.self_attn.q_proj.weight",
    "k_proj": "midlayer.self_attn.k_proj.weight",
    "v_proj": "midlayer.self_attn.v_proj.weight",
    "o_proj": "midlayer.self_attn.o_proj.weight",
    "mlp_norm": "midlayer.post_attention_layernorm.weight",
    "gate_proj": "midlayer.mlp.gate_proj.weight",
    "up_proj": "midlayer.mlp.up_proj.weight",
    "down_proj": "midlayer.mlp.down_proj.weight",
    "final_norm": "norm.weight",
    "lm_head": "lm_head.weight",
}
_OFFSETS, _MEMBERS, _EMBED = "d2t", "t2d", "embed_tokens.weight"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_BOUNDARIES = "residual_boundaries"
_TYPES = {_OFFSETS: ("I64", "I32"), _MEMBERS: ("BOOL",)}
_FLOATS = ("F64", "F32", "F16", "BF16")
# Variants of the forward that are not computed here.
_VARIANTS = ("fc_norm", "norm_before_fc", "norm_before_residual")


def _as_llama(config: Eagle3Config) -> PolicyConfig:
    """The head's layer as the Llama that its config.json describes."""
    return PolicyConfig(
        family="llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=1,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope=config.rope,
        dtype=config.dtype,
    )


def config_json(config: Eagle3Config) -> dict[str, Any]:
    """The config.json of a head.

    SpecForge counts layers from 0 and reads their outputs, so its ids are the boundaries less 1. vLLM takes ids as
    boundaries, also those of SpecForge where it finds no others, so that the boundaries stand at the top for it.
    Other engines read ids of their own choice; we read `residual_boundaries`.
    """
    return config_to_hf(_as_llama(config)) | {
        "architectures": [_ARCHITECTURE],
        "draft_vocab_size": config.draft_vocab_size,
        _LAYER_IDS: list(config.boundaries),
        "eagle_config": {
            _LAYER_IDS: [boundary - 1 for boundary in config.boundaries],
            "use_aux_hidden_state": True,
            _BOUNDARIES: list(config.boundaries),
        },
    }


def drafter_tensors(params: Eagle3Params, config: Eagle3Config) -> dict[str, np.ndarray]:
    """The head's tensors by their names in the folder.

    A head of the whole vocabulary is stored in its order and without maps: vLLM refuses them there.
    """
    ids = np.asarray(params.target_ids, np.int64)
    tensors = {name: np.ascontiguousarray(np.asarray(getattr(params.weights, field))) for field, name in _NAMES.items()}
    if len(ids) == config.vocab_size:
        return tensors | {_NAMES["lm_head"]: tensors[_NAMES["lm_head"]][np.argsort(ids)]}
    members = np.zeros((config.vocab_size,), bool)
    members[ids] = True
    return tensors | {_OFFSETS: ids - np.arange(len(ids)), _MEMBERS: members}


def save_drafter(folder: str | Path, drafter: Eagle3Drafter, params: Eagle3Params) -> None:
    """Write a head; an earlier head in that folder is replaced as a whole, anything else there is refused."""
    folder = Path(folder)
    if folder.exists() and not (folder / "config.json").exists() and (folder.is_file() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and holds no draft head; choose another folder to save the head in")
    hf = config_json(drafter.config)
    with replaced_folder(folder) as fresh:
        (fresh / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
        tensors = drafter_tensors(params, drafter.config)
        write_tensors(fresh, tensors, shard_bytes=1 + sum(tensor.nbytes for tensor in tensors.values()))


def _three_layers(ids: Any) -> list[int]:
    if not isinstance(ids, list) or len(ids) != 3 or not all(type(i) is int for i in ids):
        raise InputError(f"draft head config has layer ids {ids!r}; three integers are needed")
    return sorted(ids)


def _boundaries(hf: dict[str, Any], policy: PolicyConfig | None) -> tuple[int, int, int]:
    """Residual boundaries from the ids of a config.json, whose two conventions differ by one.

    Ids that start with 1 are SpecForge's default `(1, L // 2 - 1, L - 4)`, layers counted from 0; ids that start
    with 2 are EAGLE's `(2, L // 2, L - 3)`, boundaries already.
    """
    nested = hf.get("eagle_config") or {}
    if nested.get(_BOUNDARIES) is not None:
        first, middle, last = _three_layers(nested[_BOUNDARIES])
        return first, middle, last
    ids = hf.get(_LAYER_IDS, nested.get(_LAYER_IDS))
    if ids is None:
        if policy is None:
            raise InputError(f"draft head config lacks {_LAYER_IDS}; give the boundaries that it was trained with")
        return default_boundaries(policy.num_layers)
    first, middle, last = _three_layers(ids)
    if first == 1:
        return first + 1, middle + 1, last + 1
    if first != 2:
        warnings.warn(f"draft head config has layer ids {ids}, taken as residual boundaries as they are", stacklevel=4)
    return first, middle, last


def _check_variant(hf: dict[str, Any]) -> None:
    architecture = (hf.get("architectures") or [None])[0]
    if architecture != _ARCHITECTURE or "speculators_model_type" in hf:
        raise InputError(f"draft head config names the architecture {architecture!r}; supported is {_ARCHITECTURE}")
    nested = hf.get("eagle_config") or {}
    for name in _VARIANTS:
        if hf.get(name) or nested.get(name):
            raise InputError(f"draft head config sets {name}; heads with it are not supported")
    if hf.get("num_hidden_layers", 1) != 1:
        raise InputError(f"draft head has {hf['num_hidden_layers']} layers; only heads of one layer are supported")


def config_from_json(
    hf: dict[str, Any], policy: PolicyConfig | None, boundaries: tuple[int, int, int] | None
) -> Eagle3Config:
    """The architecture that a head's config.json describes; see `load_drafter`."""
    _check_variant(hf)
    llama = config_from_hf(hf | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1})
    draft_vocab_size = hf.get("draft_vocab_size") or llama.vocab_size
    if type(draft_vocab_size) is not int:
        raise InputError(f"draft head config has draft_vocab_size = {draft_vocab_size!r}; it must be an integer")
    config = Eagle3Config(
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_heads=llama.num_heads,
        num_kv_heads=llama.num_kv_heads,
        head_dim=llama.head_dim,
        vocab_size=llama.vocab_size,
        draft_vocab_size=draft_vocab_size,
        boundaries=_boundaries(hf, policy) if boundaries is None else boundaries,
        target_hidden_size=hf.get("target_hidden_size") or llama.hidden_size,
        rms_norm_eps=llama.rms_norm_eps,
        rope=llama.rope,
        max_position_embeddings=llama.max_position_embeddings,
        dtype=llama.dtype,
    )
    if policy is not None:
        _check_policy(config, policy)
    return config


def _check_policy(config: Eagle3Config, policy: PolicyConfig) -> None:
    for name, ours, theirs in (
        ("hidden_size", config.target_hidden_size, policy.hidden_size),
        ("vocab_size", config.vocab_size, policy.vocab_size),
    ):
        if ours != theirs:
            raise InputError(f"draft head was made for a policy of {name} {ours}, not {theirs}; use that policy's head")
    if config.boundaries[-1] > policy.num_layers:
        raise InputError(
            f"draft head reads boundaries {config.boundaries} of a policy with {policy.num_layers} layers; "
            "give the boundaries that it was trained with"
        )


def _canonical(name: str) -> str:
    """SpecForge's name of a tensor; others prefix `model.` or call the layer `layers.0`."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _stored_names(file: Path, config: Eagle3Config) -> dict[str, str]:
    """The name in the file of every tensor, by canonical name, after checks of names, shapes and element types."""
    expected = {_NAMES[field]: shape for field, shape in weight_shapes(config).items()}
    expected |= {_OFFSETS: (config.draft_vocab_size,), _MEMBERS: (config.vocab_size,)}
    expected[_EMBED] = (config.vocab_size, config.hidden_size)
    stored: dict[str, str] = {}
    for name, (shape, kind) in tensor_headers(file).items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        canonical = _canonical(name)
        if canonical not in expected or canonical in stored:
            raise InputError(f"{file} has the unexpected tensor {name}; a plain EAGLE-3 head has no such weight")
        if shape != expected[canonical]:
            raise InputError(
                f"{file} has tensor {name} of shape {list(shape)} where config.json asks for "
                f"{list(expected[canonical])}; use the config.json that belongs to these weights"
            )
        if kind not in _TYPES.get(canonical, _FLOATS):
            raise InputError(f"{file} has tensor {name} of type {kind}; only unquantized heads are supported")
        stored[canonical] = name
    optional = {_MEMBERS, _EMBED}
    if config.draft_vocab_size == config.vocab_size:
        optional.add(_OFFSETS)
    for name in expected:
        if name not in stored and name not in optional:
            raise InputError(f"{file} lacks tensor {name}; its weights do not belong to its config.json")
    return stored


def _target_ids(file: Path, config: Eagle3Config, offsets: np.ndarray | None, members: np.ndarray | None) -> np.ndarray:
    """Target token of every draft token. `d2t` decides: it may be in any order, so `t2d` can only be checked."""
    ids = np.arange(config.draft_vocab_size)
    if offsets is not None:
        ids = ids + offsets.astype(np.int64)
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) != len(ids):
        raise InputError(f"{file} has a d2t that names a token twice or outside the vocabulary; download it again")
    if members is not None and not (members.sum() == len(ids) and members[ids].all()):
        raise InputError(f"{file} has a t2d that does not belong to its d2t; download it again")
    return ids.astype(np.int32)


def _weights_file(folder: Path) -> Path:
    file = folder / WEIGHTS_FILE
    if file.exists():
        return file
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt")):
        raise InputError(f"{folder} holds pickled weights, which can run code; convert them to {WEIGHTS_FILE}")
    raise InputError(f"{folder} lacks {WEIGHTS_FILE}; give the folder of an EAGLE-3 head")


def load_drafter(
    source: str | Path, policy: PolicyConfig | None = None, boundaries: tuple[int, int, int] | None = None
) -> tuple[Eagle3Drafter, Eagle3Params]:
    """A head from a folder or a hub name, in the element type that its config.json names.

    Args:
        source: folder with config.json and model.safetensors, or the name of a head on the hub.
        policy: where given, the head must fit it; it also supplies the default boundaries.
        boundaries: residual boundaries that the head was trained with, where its config.json is wrong or silent.

    Raises:
        InputError: a file is missing or damaged, weights are pickled, a tensor is missing, unknown or of another
            shape than the config's, the variant is not supported, or the head does not fit the policy.
    """
    folder = resolve_folder(source, "draft head")
    file = folder / "config.json"
    hf = read_json(file)
    try:
        config = config_from_json(hf, policy, boundaries)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    file = _weights_file(folder)
    stored = _stored_names(file, config)
    dtype = jnp.dtype(config.dtype)
    with safe_open(file, framework="numpy") as opened:
        found = {name: opened.get_tensor(original) for name, original in stored.items() if name != _EMBED}
    ids = _target_ids(file, config, found.get(_OFFSETS), found.get(_MEMBERS))
    arrays = {field: jnp.asarray(found[name].astype(dtype)) for field, name in _NAMES.items()}
    return Eagle3Drafter(config), Eagle3Params(Eagle3Weights(**arrays), jnp.asarray(ids))
