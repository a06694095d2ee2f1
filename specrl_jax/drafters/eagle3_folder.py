"""EAGLE-3 heads as folders: config.json and model.safetensors in the layout of SpecForge, which vLLM and SGLang read.

The embedding is the policy's and not stored, unless the head has one of its own. `d2t` holds for each draft token
the offset to its target token, `t2d` which target tokens are in the draft vocabulary.
"""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from safetensors import safe_open

from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_dialects import config_from_json, config_json
from specrl_jax.drafters.eagle3_params import Eagle3Config, Eagle3Params, as_weights, by_name, weight_shapes
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.folders import replaced_folder
from specrl_jax.models.huggingface import resolve_folder
from specrl_jax.models.weights import WEIGHTS_FILE, read_json, tensor_headers, write_tensors

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
    "input_norm": "input_norm.weight",
    "q_norm": "midlayer.self_attn.q_norm.weight",
    "k_norm": "midlayer.self_attn.k_norm.weight",
}
_OFFSETS, _MEMBERS, _EMBED = "d2t", "t2d", "embed_tokens.weight"
_TYPES = {_OFFSETS: ("I64", "I32"), _MEMBERS: ("BOOL",)}
_FLOATS = ("F64", "F32", "F16", "BF16")

_IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")  # copies of the policy's


def _name(field: str) -> str:
    """Name in the folder of an array of the weights."""
    return f"fc_norm.{field.removeprefix('fc_norms.')}.weight" if field.startswith("fc_norms.") else _NAMES[field]


def drafter_tensors(params: Eagle3Params, config: Eagle3Config) -> dict[str, np.ndarray]:
    """The head's tensors by their names in the folder.

    A head of the whole vocabulary is stored in its order and without maps: vLLM refuses them there.
    """
    ids = np.asarray(params.target_ids, np.int64)
    tensors = {_name(field): np.ascontiguousarray(np.asarray(x)) for field, x in by_name(params.weights).items()}
    if params.embed is not None:
        tensors[_EMBED] = np.ascontiguousarray(np.asarray(params.embed))
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


def _canonical(name: str) -> str:
    """SpecForge's name of a tensor; others prefix `model.` or call the layer `layers.0`."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _stored_names(file: Path, config: Eagle3Config) -> dict[str, str]:
    """The name in the file of every tensor, by canonical name, after checks of names, shapes and element types."""
    expected = {_name(field): shape for field, shape in weight_shapes(config).items()}
    expected |= {_OFFSETS: (config.draft_vocab_size,), _MEMBERS: (config.vocab_size,)}
    expected[_EMBED] = (config.vocab_size, config.hidden_size)
    stored: dict[str, str] = {}
    for name, (shape, kind) in tensor_headers(file).items():
        if name.endswith(_IGNORED):
            continue
        canonical = _canonical(name)
        if canonical not in expected or canonical in stored:
            raise InputError(f"{file} has the unexpected tensor {name}; its config.json asks for no such weight")
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
        raise InputError(
            f"{folder} holds pickled weights, which can run code; convert them with "
            f"`python -m experiments.convert --source {folder} --out FOLDER`"
        )
    raise InputError(f"{folder} lacks {WEIGHTS_FILE}; give the folder of an EAGLE-3 head")


def load_drafter(
    source: str | Path, policy: PolicyConfig | None = None, boundaries: tuple[int, ...] | None = None
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
    config_file = folder / "config.json"
    hf = read_json(config_file)
    # What is in the file is needed to understand the config, and a config that cannot be used is refused first.
    weights = folder / WEIGHTS_FILE
    own_embed = weights.exists() and any(_canonical(name) == _EMBED for name in tensor_headers(weights))
    try:
        config = config_from_json(hf, policy, boundaries, own_embed)
    except InputError as error:
        raise InputError(f"{config_file}: {error}") from None
    file = _weights_file(folder)
    stored = _stored_names(file, config)
    dtype = jnp.dtype(config.dtype)
    with safe_open(file, framework="numpy") as opened:
        found = {name: opened.get_tensor(original) for name, original in stored.items()}
    ids = _target_ids(file, config, found.get(_OFFSETS), found.get(_MEMBERS))
    arrays = {field: jnp.asarray(found[_name(field)].astype(dtype)) for field in weight_shapes(config)}
    embed = jnp.asarray(found[_EMBED].astype(dtype)) if own_embed else None
    return Eagle3Drafter(config), Eagle3Params(as_weights(arrays), jnp.asarray(ids), embed)


def with_policy_embedding(
    drafter: Eagle3Drafter, params: Eagle3Params, embed: Float[Array, "v d"]
) -> tuple[Eagle3Drafter, Eagle3Params]:
    """The head without an embedding of its own where that is the policy's, `embed`; else as it is."""
    own = params.embed
    if own is None or own.shape != embed.shape or not bool(jnp.all(own == embed.astype(own.dtype))):
        return drafter, params
    config = dataclasses.replace(drafter.config, own_embed=False)
    return dataclasses.replace(drafter, config=config), dataclasses.replace(params, embed=None)
