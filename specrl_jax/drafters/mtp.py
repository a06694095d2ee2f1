"""Native multi-token-prediction heads as drafters, and their folders.

A head lies beside its policy's tensors in the same folder, as it is published, or in a folder of its own. Its
config.json is the policy's with another architecture; its tensors have the names that its family gives them
(`mtp_names`). Embedding and output rows are the policy's and not stored. A head that was made for a policy of another
family has the same names, with that family's norms and biases in the layout of MiMo.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specrl_jax.drafters.eagle3 import LayerDrafter
from specrl_jax.drafters.head_files import (
    by_name,
    check_fits,
    has_weights,
    read_target_ids,
    read_tensors,
    save_head,
    vocab_maps,
    weights_files,
)
from specrl_jax.drafters.mtp_dialects import config_from_json, config_json, layout_name, with_policy_fields
from specrl_jax.drafters.mtp_layouts import MtpConfig
from specrl_jax.drafters.mtp_names import NAMES, as_arrays, as_tensors, canonical, has_stacked_experts, tensor_shapes
from specrl_jax.drafters.mtp_params import MtpParams, as_weights, weight_shapes
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import resolve_folder
from specrl_jax.models.weights import read_json, weight_map

# Checkpoints in bfloat16 have these in float32.
_AS_STORED = ("feed_forward.router", "feed_forward.router_bias")


@dataclass(frozen=True)
class MtpDrafter(LayerDrafter):
    """A native multi-token-prediction head."""

    config: MtpConfig


def is_mtp_head(hf: dict[str, Any]) -> bool:
    """Whether a config.json is of an MTP head, alone or with its policy."""
    return layout_name(hf) is not None


def head_tensors(config: MtpConfig, params: MtpParams) -> dict[str, np.ndarray]:
    """The tensors of a head by their names in its folder."""
    arrays = {field: np.ascontiguousarray(np.asarray(x)) for field, x in by_name(params.weights).items()}
    return as_tensors(config, arrays)


def save_mtp(folder: str | Path, drafter: MtpDrafter, params: MtpParams) -> None:
    """Write a head alone; an earlier head in that folder is replaced as a whole, anything else there is refused."""
    config = drafter.config
    maps = vocab_maps(np.asarray(params.target_ids), config.vocab_size)
    save_head(folder, config_json(config), head_tensors(config, params) | maps)


def lies_with_policy(hf: dict[str, Any]) -> bool:
    """Whether a config.json is of a folder that is policy and MTP head."""
    name = layout_name(hf)
    return name is not None and hf["architectures"][0] != NAMES[name].alone


def beside_policy(drafter: MtpDrafter, params: MtpParams) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """What a policy's folder has of the head that lies in it: fields of config.json, and tensors by name.

    None where the head is not like MiMo's, whose policies are the ones implemented, or leaves out tokens.
    """
    config = drafter.config
    is_like_mimo = config.layout.name == "mimo" and getattr(config.attention, "bias", False)
    if not is_like_mimo or config.draft_vocab_size != config.vocab_size:
        return None
    return with_policy_fields(), head_tensors(config, params)


def load_mtp(source: str | Path, policy: PolicyConfig | None = None) -> tuple[MtpDrafter, MtpParams]:
    """A head from a folder or a hub name, its own or one with its policy; output rows come with `heads.for_policy`.

    Args:
        source: folder with config.json and safetensors, or the name of one on the hub.
        policy: where given, the head must fit it.

    Raises:
        InputError: a file is missing or damaged, weights are pickled, a tensor is missing, unknown or of another
            shape than the config's, the head has more layers than one, or it does not fit the policy.
    """
    folder = resolve_folder(source, "draft head")
    config_file = folder / "config.json"
    hf = read_json(config_file)
    stacked = has_weights(folder) and has_stacked_experts(weight_map(folder))
    try:
        config = config_from_json(hf, stacked)
    except InputError as error:
        raise InputError(f"{config_file}: {error}") from None
    if policy is not None:
        check_fits("mtp head", config.hidden_size, config.vocab_size, config.boundaries, policy)
    shapes, sizes = weight_shapes(config), (config.draft_vocab_size, config.vocab_size)
    expected = tensor_shapes(config, shapes)
    found = read_tensors(weights_files(folder), expected, (), *sizes, partial(canonical, config))
    ids, dtype = read_target_ids(folder, found, *sizes), jnp.dtype(config.dtype)
    arrays = {
        field: jnp.asarray(x if field in _AS_STORED and x.dtype == np.float32 else x.astype(dtype))
        for field, x in as_arrays(config, found, shapes).items()
    }
    return MtpDrafter(config), MtpParams(as_weights(config, arrays), jnp.asarray(ids))
