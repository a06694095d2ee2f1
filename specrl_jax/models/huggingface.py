"""Hugging Face policy folders in and out: config.json, generation_config.json, safetensors, tokenizer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HfHubHTTPError
from jax.sharding import Mesh

from specrl_jax.errors import InputError
from specrl_jax.models.config import Dtype, PolicyConfig
from specrl_jax.models.folders import replaced_folder
from specrl_jax.models.huggingface_config import config_from_hf, config_to_hf
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.weights import policy_tensors, read_json, read_params, write_tensors
from specrl_jax.parallel.hosts import is_first
from specrl_jax.parallel.sharding import check_splits

_SHARD_BYTES = 5 * 10**9
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]


def resolve_folder(source: str | Path, kind: str = "policy", also: tuple[str, ...] = ()) -> Path:
    """The local folder of a model: `source` itself, or the downloaded or cached snapshot of a hub name.

    `kind` is what the error message calls it, `also` names patterns of files to download beside the usual ones.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{source} is a file; give the folder that holds config.json")
    try:
        return Path(huggingface_hub.snapshot_download(str(source), allow_patterns=[*_DOWNLOADED, *also]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = type(error).__name__
        raise InputError(
            f"{kind} {str(source)!r} is neither a folder nor a model that the Hugging Face hub or its local cache "
            f"gives ({reason}); check the name and the connection"
        ) from None


def load_config(source: str | Path) -> PolicyConfig:
    """The architecture of a policy folder or hub name."""
    file = resolve_folder(source) / "config.json"
    hf = read_json(file)
    try:
        return config_from_hf(hf)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def load_policy(
    source: str | Path, dtype: Dtype | None = None, mesh: Mesh | None = None
) -> tuple[PolicyParams, PolicyConfig]:
    """A policy from a folder or a hub name.

    Args:
        source: folder with config.json and safetensors, or the name of a model on the hub.
        dtype: type of the parameters; by default the one that config.json names.
        mesh: where to put the parameters, each device its own part; None: whole on the default device.

    Raises:
        InputError: see `config_from_hf` and `weights.read_params`; names the file and the tensor.
    """
    folder = resolve_folder(source)
    config = load_config(folder)
    if dtype is not None:
        config = replace(config, dtype=dtype)
    if mesh is not None:
        check_splits("policy", config, mesh)
    return read_params(folder, config, mesh), config


def check_tokenizer_fits(tokenizer: Any, config: PolicyConfig) -> None:
    """Refuse a tokenizer (transformers) with ids beyond the policy's embedding, or one lost when saved with it."""
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > config.vocab_size:
        raise InputError(
            f"the tokenizer has ids up to {needed - 1} and the policy's embedding {config.vocab_size} rows; "
            "use the tokenizer that belongs to the policy or a policy with a larger vocab_size"
        )
    # AutoTokenizer rebuilds the tokenizer of every model_type "qwen2" as a Qwen2Tokenizer, whatever its files say.
    kind = type(tokenizer).__name__
    if config.family == "qwen2" and not kind.startswith("Qwen2Tokenizer"):
        raise InputError(
            f"transformers loads the tokenizer of every qwen2 policy as a Qwen2Tokenizer, so a {kind} "
            "would not load as it was saved; use a policy of the qwen3 or llama family with this tokenizer"
        )


def _token_ids(tokenizer: Any) -> dict[str, int | None]:
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_policy(
    folder: str | Path,
    params: PolicyParams,
    config: PolicyConfig,
    tokenizer: Any,
    generation: dict[str, Any] | None = None,
    shard_bytes: int = _SHARD_BYTES,
    head: tuple[dict[str, Any], dict[str, np.ndarray]] | None = None,
) -> None:
    """Write a folder that transformers loads unchanged; an earlier policy there is replaced as a whole.

    Of several processes the first writes.

    Args:
        folder: where to; parents are made.
        params, config: the policy.
        tokenizer: transformers tokenizer; its begin, end and padding ids go into the configs.
        generation: further fields of generation_config.json, such as `temperature`.
        shard_bytes: weights above this size are split.
        head: of a draft head that lies in the same folder, fields of config.json that differ and tensors by name.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / "config.json").exists() and (folder.is_file() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and holds no policy; choose another folder to save the policy in")
    check_tokenizer_fits(tokenizer, config)
    ids = _token_ids(tokenizer)
    fields, beside = head or ({}, {})
    hf = config_to_hf(config, ids) | fields
    tensors = policy_tensors(params, config) | beside
    if not is_first():
        return
    with replaced_folder(folder) as fresh:
        _write_json(fresh / "config.json", hf)
        _write_json(fresh / "generation_config.json", ids | (generation or {}))
        write_tensors(fresh, tensors, shard_bytes)
        tokenizer.save_pretrained(fresh)
