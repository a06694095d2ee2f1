"""Native multi-token-prediction heads: one for any policy, and their folders in the layout of MiMo-7B.

A head lies beside its policy's tensors in the same folder, as MiMo-7B is published, or in a folder of its own. Its
config.json is the policy's with another architecture; its tensors are `model.mtp_layers.0.*`, the layer's own being
named as in any layer. Embedding and output rows are the policy's and not stored. A head of another family of layers
than MiMo's Qwen2 has the same names, with that family's norms and without the biases.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_dialects import as_policy
from specrl_jax.drafters.eagle3_params import Eagle3Config, Eagle3Params, as_weights, head_config, weight_shapes
from specrl_jax.drafters.head_files import (
    by_name,
    check_fits,
    read_target_ids,
    read_tensors,
    save_head,
    vocab_maps,
    weights_files,
)
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import resolve_folder
from specrl_jax.models.huggingface_config import config_from_hf, config_to_hf
from specrl_jax.models.weights import LAYER_NAMES, MTP_PREFIX, read_json

_WITH_POLICY, _ALONE = "MiMoForCausalLM", "MiMoMTPModel"
_PREFIX = f"{MTP_PREFIX}0."
_LAYERS = "num_nextn_predict_layers"
_POLICY_S = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
_NAMES = LAYER_NAMES | {
    "embed_norm": "token_layernorm.weight",
    "hidden_norm": "hidden_layernorm.weight",
    "input_proj": "input_proj.weight",
    "final_norm": "final_layernorm.weight",
}


def mtp_config(policy: PolicyConfig, draft_vocab_size: int | None = None) -> Eagle3Config:
    """The head of a policy: one more layer of the same kind, over `draft_vocab_size` of its tokens or all."""
    size = policy.vocab_size if draft_vocab_size is None else draft_vocab_size
    flags = {"qk_norm": policy.qk_norm, "qkv_bias": policy.qkv_bias, "mtp": True}
    return head_config(policy, size, (policy.num_layers,), **flags)


def is_mtp_head(hf: dict[str, Any]) -> bool:
    """Whether a config.json is of an MTP head, alone or with its policy."""
    return (hf.get("architectures") or [None])[0] in (_WITH_POLICY, _ALONE)


def save_mtp(folder: str | Path, drafter: Eagle3Drafter, params: Eagle3Params) -> None:
    """Write a head alone; an earlier head in that folder is replaced as a whole, anything else there is refused."""
    config = drafter.config
    policy = replace(as_policy(config), num_layers=config.boundaries[0])
    hf = config_to_hf(policy) | {"architectures": [_ALONE], _LAYERS: 1, "draft_vocab_size": config.draft_vocab_size}
    arrays = {
        _PREFIX + _NAMES[field]: np.ascontiguousarray(np.asarray(x)) for field, x in by_name(params.weights).items()
    }
    save_head(folder, hf, arrays | vocab_maps(np.asarray(params.target_ids), config.vocab_size))


def _config_from_json(hf: dict[str, Any]) -> Eagle3Config:
    if hf.get(_LAYERS) != 1:
        raise InputError(f"mtp head config has {_LAYERS} = {hf.get(_LAYERS)!r}; only heads of 1 layer are supported")
    policy = config_from_hf({name: value for name, value in hf.items() if name != "architectures"})
    size = hf.get("draft_vocab_size")
    if size is not None and type(size) is not int:
        raise InputError(f"mtp head config has draft_vocab_size = {size!r}; it must be an integer")
    return mtp_config(policy, size)


def _canonical(name: str) -> str | None:
    return None if name.startswith(_POLICY_S) else name.removeprefix(_PREFIX)


def load_mtp(source: str | Path, policy: PolicyConfig | None = None) -> tuple[Eagle3Drafter, Eagle3Params]:
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
    try:
        config = _config_from_json(read_json(config_file))
    except InputError as error:
        raise InputError(f"{config_file}: {error}") from None
    if policy is not None:
        check_fits("mtp head", config.hidden_size, config.vocab_size, config.boundaries, policy)
    expected = {_NAMES[field]: shape for field, shape in weight_shapes(config).items()}
    sizes = config.draft_vocab_size, config.vocab_size
    found = read_tensors(weights_files(folder), expected, (), *sizes, _canonical)
    ids, dtype = read_target_ids(folder, found, *sizes), jnp.dtype(config.dtype)
    arrays = {field: jnp.asarray(found[_NAMES[field]].astype(dtype)) for field in weight_shapes(config)}
    return Eagle3Drafter(config), Eagle3Params(as_weights(arrays), jnp.asarray(ids))
