"""Names of native multi-token-prediction heads in checkpoints: architectures, and tensors beside the policy's."""

from dataclasses import dataclass

import numpy as np

from specrl_jax.drafters.mtp_layouts import LayoutName, MtpConfig
from specrl_jax.models.weights import LAYER_NAMES, MTP_PREFIX

_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Names:
    """Of one layout.

    with_policy, alone: architectures of config.json, of a folder that is policy and head, and of a head by itself.
    prefix: of all tensors of the head. policy: prefixes of the policy's tensors in the same folder.
    top: names of the arrays around the layer. layer: what stands before the names of the layer's arrays.
    """

    with_policy: tuple[str, ...]
    alone: str
    prefix: str
    policy: tuple[str, ...]
    top: dict[str, str]
    layer: str = ""


_MIMO = Names(
    with_policy=("MiMoForCausalLM",),
    alone="MiMoMTPModel",
    prefix=f"{MTP_PREFIX}0.",
    policy=("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."),
    top={
        "embed_norm": "token_layernorm.weight",
        "hidden_norm": "hidden_layernorm.weight",
        "input_proj": "input_proj.weight",
        "final_norm": "final_layernorm.weight",
    },
)
NAMES: dict[LayoutName, Names] = {"mimo": _MIMO}


def tensor_name(config: MtpConfig, field: str) -> str:
    """The name, after the prefix, of the tensor that holds an array of `mtp_params.weight_shapes`."""
    names = NAMES[config.layout.name]
    if field in names.top:
        return names.top[field]
    return names.layer + LAYER_NAMES[field.rpartition(".")[2]]


def tensor_shapes(config: MtpConfig, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a head, by its name after the prefix, from those of its arrays."""
    return {tensor_name(config, field): shape for field, shape in shapes.items()}


def as_tensors(config: MtpConfig, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a head by their whole names, from its arrays by field name."""
    prefix = NAMES[config.layout.name].prefix
    return {prefix + tensor_name(config, field): x for field, x in arrays.items()}


def as_arrays(config: MtpConfig, tensors: dict[str, np.ndarray], fields: list[str]) -> dict[str, np.ndarray]:
    """The arrays of a head by field name, from its tensors by their names after the prefix."""
    return {field: tensors[tensor_name(config, field)] for field in fields}


def canonical(config: MtpConfig, name: str) -> str | None:
    """A tensor's name after the prefix; None for one of the policy's."""
    names = NAMES[config.layout.name]
    if name.startswith(names.prefix):
        return name.removeprefix(names.prefix)
    return None if name.startswith(names.policy) else name
