"""A policy's tensors under their Hugging Face names, and the safetensors files that hold them."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from jax.sharding import Mesh
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.params import LayerParams, PolicyParams, layer_shapes
from specrl_jax.parallel.hosts import to_host
from specrl_jax.parallel.sharding import Layout

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MTP_PREFIX = "model.mtp_layers."
LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
}
_EMBED, _FINAL_NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_OUTER = {_EMBED: "embed", _FINAL_NORM: "final_norm", _HEAD: "head"}
_FLOATS = ("F64", "F32", "F16", "BF16")


def _layer_name(layer: int, field: str) -> str:
    return f"model.layers.{layer}.{LAYER_NAMES[field]}"


def tensor_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint, by Hugging Face name."""
    embedding = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {_EMBED: embedding, _FINAL_NORM: (config.hidden_size,)}
    if not config.tie_embeddings:
        shapes[_HEAD] = embedding
    for layer in range(config.num_layers):
        shapes |= {_layer_name(layer, field): shape for field, shape in layer_shapes(config).items()}
    return shapes


def _named_tensors(params: PolicyParams) -> Iterator[tuple[str, np.ndarray]]:
    """Name and tensor, one at a time."""
    yield _EMBED, to_host(params.embed)
    yield _FINAL_NORM, to_host(params.final_norm)
    if params.head is not None:
        yield _HEAD, to_host(params.head)
    for i, layer in enumerate(params.layers):
        for field in LAYER_NAMES:
            value = getattr(layer, field)
            if value is not None:
                yield _layer_name(i, field), to_host(value)


def policy_tensors(params: PolicyParams, config: PolicyConfig) -> dict[str, np.ndarray]:
    """The policy's tensors by Hugging Face name, contiguous, in the order of their names."""
    tensors = {name: np.ascontiguousarray(value) for name, value in _named_tensors(params)}
    expected = tensor_shapes(config)
    if {name: value.shape for name, value in tensors.items()} != expected:
        raise ValueError("the parameters do not have the shapes of their config")
    return dict(sorted(tensors.items()))


def params_sha256(params: PolicyParams, config: PolicyConfig) -> str:
    """SHA-256 of the raw bytes of `policy_tensors`, in the order of their names."""
    digest = hashlib.sha256()
    for value in policy_tensors(params, config).values():
        digest.update(value.view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def write_tensors(folder: Path, tensors: dict[str, np.ndarray], shard_bytes: int) -> None:
    """Write `model.safetensors`, or numbered shards of at most `shard_bytes` and their index."""
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; InputError when the file is missing, or is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file} is missing; give a folder that transformers' save_pretrained wrote") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as JSON ({error}); download or write it again") from None
    if not isinstance(value, dict):
        raise InputError(f"{file} holds no JSON object; download or write it again")
    return value


def weight_map(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by the index, or by the header of the single file."""
    if (folder / INDEX_FILE).exists():
        listed = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
            raise InputError(f"{folder / INDEX_FILE} has no weight_map from tensors to files; download it again")
        return {name: folder / file for name, file in listed.items()}
    if not (folder / WEIGHTS_FILE).exists():
        raise InputError(
            f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; save the policy there with safetensors"
        )
    return dict.fromkeys(tensor_headers(folder / WEIGHTS_FILE), folder / WEIGHTS_FILE)


def _first_truncated(file: Path) -> str:
    """What a damaged safetensors file breaks off in: its header, or the first tensor that it does not hold."""
    data_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        data_bytes -= 8 + header_bytes
        if data_bytes < 0:
            return "the header"
        try:
            header = json.loads(stream.read(header_bytes))
            ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError):
            return "the header"
    missing = [name for name, end in sorted(ends.items(), key=lambda item: item[1]) if end > data_bytes]
    return f"tensor {missing[0]}" if missing else "bytes that belong to no tensor"


def tensor_headers(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and element type of every tensor of a file, without reading its data."""
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
            return {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except FileNotFoundError:
        raise InputError(f"{file} is missing though {INDEX_FILE} names it; download it again") from None
    except (SafetensorError, OSError):
        raise InputError(f"{file} is damaged or incomplete at {_first_truncated(file)}; download it again") from None


def _is_ignored(name: str, config: PolicyConfig) -> bool:
    """Tensors that old or tied checkpoints carry and that the model does not read, and those of a draft head in it."""
    old = (config.tie_embeddings and name == _HEAD) or name.endswith(".rotary_emb.inv_freq")
    return old or name.startswith(MTP_PREFIX)


def _check_tensors(folder: Path, config: PolicyConfig, files: dict[str, Path]) -> None:
    """Names, shapes and element types against the config, before any data is read."""
    headers = {file: tensor_headers(file) for file in sorted(set(files.values()))}
    expected = tensor_shapes(config)
    for name, shape in expected.items():
        where = files.get(name)
        if where is None:
            raise InputError(f"{folder} lacks tensor {name}; its weights do not belong to its config.json")
        if name not in headers[where]:
            raise InputError(f"{where} lacks tensor {name}, which {INDEX_FILE} places there; download it again")
        found, kind = headers[where][name]
        if found != shape:
            raise InputError(
                f"{where} has tensor {name} of shape {list(found)} where config.json asks for {list(shape)}; "
                "use the config.json that belongs to these weights"
            )
        if kind not in _FLOATS:
            raise InputError(f"{where} has tensor {name} of type {kind}; only unquantized floats are supported")
    present = {name: file for file, header in headers.items() for name in header}
    for name, file in sorted(present.items()):
        if name not in expected and not _is_ignored(name, config):
            raise InputError(f"{file} has the unexpected tensor {name}; this architecture has no such weight")


def _read(opened: Any, name: str, field: str, dtype: Any, mesh: Mesh | None, kv_heads: int) -> Array:
    """A tensor of an open file; on a mesh every device gets its own part, and only parts are read."""
    if mesh is None:
        return jnp.asarray(opened.get_tensor(name).astype(dtype))
    on_disk = opened.get_slice(name)
    shape = tuple(on_disk.get_shape())
    sharding = Layout(mesh, kv_heads).stored({field: jax.ShapeDtypeStruct(shape, dtype)})[field]
    parts: dict[str, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        key = str(index)
        if key not in parts:
            parts[key] = np.asarray(on_disk[index]).astype(dtype)
        return parts[key]

    return jax.make_array_from_callback(shape, sharding, part)


def read_params(folder: Path, config: PolicyConfig, mesh: Mesh | None = None) -> PolicyParams:
    """The parameters of a checkpoint folder, cast to `config.dtype`; on a mesh as they are stored there.

    Raises:
        InputError: a file or tensor is missing, truncated, unexpected or of another shape than the config's.
    """
    files = weight_map(folder)
    _check_tensors(folder, config, files)
    dtype = jnp.dtype(config.dtype)
    layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
    outer: dict[str, Any] = {}
    fields = {name: field for field, name in LAYER_NAMES.items()}
    for name in tensor_shapes(config):
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        field = _OUTER[name] if match is None else fields[match[2]]
        target = outer if match is None else layers[int(match[1])]
        # Opened anew for each: what was read of a mapped file is the process's memory until it is closed.
        with safe_open(files[name], framework="numpy") as opened:
            target[field] = _read(opened, name, field, dtype, mesh, config.num_kv_heads)
    return PolicyParams(layers=tuple(LayerParams(**layer) for layer in layers), **outer)
