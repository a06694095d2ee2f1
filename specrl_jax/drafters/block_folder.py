"""Block drafters as folders: the layout of speculators' DFlash and DSpark, which vLLM reads, and of DFlash's authors.

The embedding is the policy's and not stored. Output rows are, once they are known; where a folder has none they are
the policy's.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specrl_jax.drafters.block import BlockDrafter
from specrl_jax.drafters.block_params import BlockConfig, BlockParams, as_weights, weight_shapes
from specrl_jax.drafters.head_files import (
    by_name,
    check_fits,
    integers,
    read_target_ids,
    read_tensors,
    save_head,
    vocab_maps,
    weights_files,
    whole_layer,
)
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import resolve_folder
from specrl_jax.models.huggingface_config import config_from_hf, config_to_hf
from specrl_jax.models.weights import LAYER_NAMES, read_json

_NAMES = {
    "fc": "fc.weight",
    "hidden_norm": "hidden_norm.weight",
    "final_norm": "norm.weight",
    "markov_in": "markov_head.markov_w1.weight",
    "markov_out": "markov_head.markov_w2.weight",
    "confidence_kernel": "confidence_head.proj.weight",
    "confidence_bias": "confidence_head.proj.bias",
}
_HEAD, _EMBED = "lm_head.weight", "embed_tokens.weight"
_LAYER_IDS = "aux_hidden_state_layer_ids"


def is_block_drafter(hf: dict[str, Any]) -> bool:
    """Whether a config.json is of a block drafter."""
    architecture = str((hf.get("architectures") or [""])[0])
    return (
        hf.get("speculators_model_type") in ("dflash", "dspark") or "DFlash" in architecture or "DSpark" in architecture
    )


def _name(field: str) -> str:
    """Name in the folder of an array of the weights."""
    if field.startswith("layers."):
        _, index, own = field.split(".")
        return f"layers.{index}.{LAYER_NAMES[own]}"
    return _NAMES[field]


def config_json(config: BlockConfig) -> dict[str, Any]:
    """The config.json of a drafter, as speculators writes it; ids of layers are residual boundaries there."""
    layer = config_to_hf(config.backbone)
    algorithm = "dspark" if config.markov_rank or config.confidence else "dflash"
    hf = {
        "architectures": ["DSparkSpeculator" if algorithm == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.drafts}],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "transformer_layer_config": {name: value for name, value in layer.items() if name != "architectures"},
        "draft_vocab_size": config.draft_vocab_size,
        _LAYER_IDS: list(config.boundaries),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "dtype": config.backbone.dtype,
    }
    if algorithm == "dflash":
        return hf
    return hf | {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and config.markov_rank > 0,
    }


def _flat(hf: dict[str, Any]) -> tuple[dict[str, Any], list[int] | None, dict[str, Any]]:
    """The layers' config, the boundaries, and what is said of the block; for both layouts."""
    if "speculators_model_type" in hf:
        layer = dict(hf.get("transformer_layer_config") or {})
        whole = whole_layer(layer, "qwen3")
        dtype = {name: hf[name] for name in ("dtype", "torch_dtype") if hf.get(name)}
        return whole | dtype, integers(hf, _LAYER_IDS), _checked(hf)
    block = hf.get("dflash_config") or {}
    ids = integers(hf | block, "target_layer_ids")
    said = {name: value for name, value in (hf | block).items() if value is not None}
    anchor = "DSpark" in str(hf.get("architectures"))
    return hf, None if ids is None else [i + 1 for i in ids], _checked({"sample_from_anchor": anchor} | said)


def _checked(block: dict[str, Any]) -> dict[str, Any]:
    """What is said of the block, its numbers being numbers."""
    for name in ("draft_vocab_size", "block_size", "mask_token_id", "markov_rank"):
        if block.get(name) is not None and type(block[name]) is not int:
            raise InputError(f"block drafter config has {name} = {block[name]!r}; it must be an integer")
    return block


def config_from_json(hf: dict[str, Any], policy: PolicyConfig | None) -> BlockConfig:
    """The architecture that a config.json describes; see `load_block`."""
    layer, boundaries, block = _flat(hf)
    if boundaries is None:
        raise InputError(f"block drafter config lacks {_LAYER_IDS}; download it again")
    if list(boundaries) != sorted(boundaries):
        raise InputError(f"block drafter config has layer ids {boundaries}; ascending ones are needed")
    if block.get("mask_token_id") is None:
        raise InputError("block drafter config lacks mask_token_id; add the token that it was trained with")
    if block.get("markov_head_type", "vanilla") != "vanilla":
        kind = block["markov_head_type"]
        raise InputError(f"block drafter config has markov_head_type {kind!r}; only vanilla is supported")
    confidence = bool(block.get("enable_confidence_head", False))
    rank = int(block.get("markov_rank") or 0)
    if confidence and bool(block.get("confidence_head_with_markov", False)) != (rank > 0):
        raise InputError("block drafter config has a confidence head that leaves out its correction; not supported")
    architecture = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False}
    backbone = config_from_hf(layer | architecture)
    config = BlockConfig(
        backbone=backbone,
        draft_vocab_size=block.get("draft_vocab_size") or backbone.vocab_size,
        boundaries=tuple(boundaries),
        block_size=block.get("block_size") or 8,
        mask_token_id=block["mask_token_id"],
        sample_from_anchor=bool(block.get("sample_from_anchor", hf.get("speculators_model_type") == "dspark")),
        markov_rank=rank,
        confidence=confidence,
    )
    if policy is not None:
        check_fits("block drafter", backbone.hidden_size, backbone.vocab_size, config.boundaries, policy)
    return config


def block_tensors(params: BlockParams, config: BlockConfig) -> dict[str, np.ndarray]:
    """The drafter's tensors by their names in the folder."""
    tensors = {_name(field): np.ascontiguousarray(np.asarray(x)) for field, x in by_name(params.weights).items()}
    maps = vocab_maps(np.asarray(params.target_ids), config.backbone.vocab_size)
    order = np.argsort(np.asarray(params.target_ids))
    if params.lm_head is not None:
        tensors[_HEAD] = np.ascontiguousarray(np.asarray(params.lm_head))
    for name in (_HEAD, _NAMES["markov_out"]):
        if not maps and name in tensors:
            tensors[name] = np.ascontiguousarray(tensors[name][order])
    return tensors | maps


def save_block(folder: str | Path, drafter: BlockDrafter, params: BlockParams) -> None:
    """Write a drafter; an earlier one in that folder is replaced as a whole, anything else there is refused."""
    save_head(folder, config_json(drafter.config), block_tensors(params, drafter.config))


def load_block(source: str | Path, policy: PolicyConfig | None = None) -> tuple[BlockDrafter, BlockParams]:
    """A block drafter from a folder or a hub name.

    Args:
        source: folder with config.json and model.safetensors, or the name of one on the hub.
        policy: where given, the drafter must fit it.

    Returns:
        The drafter, and its parameters; without output rows where these are the policy's (`heads.for_policy`).

    Raises:
        InputError: a file is missing or damaged, weights are pickled, a tensor is missing, unknown or of another
            shape than the config's, the variant is not supported, or the drafter does not fit the policy.
    """
    folder = resolve_folder(source, "draft head")
    config_file = folder / "config.json"
    hf = read_json(config_file)
    try:
        config = config_from_json(hf, policy)
    except InputError as error:
        raise InputError(f"{config_file}: {error}") from None
    files, vocab_size = weights_files(folder), config.backbone.vocab_size
    expected = {_name(field): shape for field, shape in weight_shapes(config).items()}
    expected[_HEAD] = (config.draft_vocab_size, config.backbone.hidden_size)
    expected[_EMBED] = (vocab_size, config.backbone.hidden_size)
    whole = config.draft_vocab_size == vocab_size
    optional = (_EMBED, _HEAD) if whole else (_EMBED,)
    sizes = config.draft_vocab_size, vocab_size
    found = read_tensors(files, expected, optional, *sizes, lambda name: name.removeprefix("model."))
    ids, dtype = read_target_ids(folder, found, *sizes), jnp.dtype(config.backbone.dtype)
    arrays = {field: jnp.asarray(found[_name(field)].astype(dtype)) for field in weight_shapes(config)}
    head = jnp.asarray(found[_HEAD].astype(dtype)) if _HEAD in found else None
    return BlockDrafter(config), BlockParams(as_weights(arrays), head, jnp.asarray(ids))
