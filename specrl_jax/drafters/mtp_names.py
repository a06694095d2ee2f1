"""Names of native multi-token-prediction heads in checkpoints: architectures, and tensors beside the policy's.

A folder has a tensor for every kernel of every expert, or (Qwen's may) one for the gate and up kernels of all experts
and one for their down kernels.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from dataclasses import field as default

import numpy as np

from specrl_jax.drafters.mtp_layouts import Experts, LayoutName, MtpConfig
from specrl_jax.models.weights import LAYER_NAMES, MTP_PREFIX

_PART_OF = {"gate_proj": "feed_forward", "up_proj": "feed_forward", "down_proj": "feed_forward"}
_GATE, _UP, _DOWN, _BOTH = (f"feed_forward.{name}_proj" for name in ("gate", "up", "down", "gate_up"))


def _layer(prefix: str) -> dict[str, str]:
    """Names of a layer with grouped attention and a gated MLP."""
    names = {}
    for name, tensor in LAYER_NAMES.items():
        part = "" if name in ("attn_norm", "mlp_norm") else _PART_OF.get(name, "attention") + "."
        names[part + name] = prefix + tensor
    return names


def _experts(prefix: str, shared: str) -> dict[str, str]:
    """Names of experts; `{}` is the expert's number."""
    kernels = ("gate_proj", "up_proj", "down_proj")
    names = {f"feed_forward.{kernel}": f"{prefix}experts.{{}}.{kernel}.weight" for kernel in kernels}
    names |= {f"feed_forward.shared_{kernel}": f"{prefix}{shared}.{kernel}.weight" for kernel in kernels}
    return names | {
        "feed_forward.router": f"{prefix}gate.weight",
        "feed_forward.router_bias": f"{prefix}gate.e_score_correction_bias",
        "feed_forward.shared_gate": f"{prefix}shared_expert_gate.weight",
        "feed_forward.latent_down": f"{prefix}fc1_latent_proj.weight",
        "feed_forward.latent_up": f"{prefix}fc2_latent_proj.weight",
    }


@dataclass(frozen=True)
class Names:
    """Of one layout.

    with_policy, alone: architectures of config.json, of a folder that is policy and head, and of a head by itself.
    prefix: of all tensors of the head; `{}` is the number of the policy's layers.
    policy: prefixes of the policy's tensors in the same folder. copies: names, after the prefix, of copies of those.
    fields: name, after the prefix, of every array of `mtp_params.weight_shapes`. experts: of mixtures, whose kernels
        have one for each expert. stacked: of kernels that lie in one tensor.
    """

    with_policy: tuple[str, ...]
    alone: str
    prefix: str
    policy: tuple[str, ...]
    fields: dict[str, str]
    experts: dict[str, str] = default(default_factory=dict)
    stacked: dict[str, str] = default(default_factory=dict)
    copies: tuple[str, ...] = ()


_MIMO = Names(
    with_policy=("MiMoForCausalLM",),
    alone="MiMoMTPModel",
    prefix=f"{MTP_PREFIX}0.",
    policy=("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."),
    fields=_layer("")
    | {
        "embed_norm": "token_layernorm.weight",
        "hidden_norm": "hidden_layernorm.weight",
        "input_proj": "input_proj.weight",
        "final_norm": "final_layernorm.weight",
    },
)
_QWEN3_NEXT = Names(
    with_policy=("Qwen3NextForCausalLM",),
    alone="Qwen3NextMTP",
    prefix="mtp.",
    policy=("model.", "lm_head."),
    fields=_layer("layers.0.")
    | {
        "embed_norm": "pre_fc_norm_embedding.weight",
        "hidden_norm": "pre_fc_norm_hidden.weight",
        "input_proj": "fc.weight",
        "final_norm": "norm.weight",
    },
    experts=_experts("layers.0.mlp.", "shared_expert"),
    stacked={_BOTH: "layers.0.mlp.experts.gate_up_proj", _DOWN: "layers.0.mlp.experts.down_proj"},
)
_NEMOTRON_H = Names(
    with_policy=("NemotronHForCausalLM",),
    alone="NemotronHMTPModel",
    prefix="mtp.layers.",
    policy=("backbone.", "model.", "lm_head."),
    fields={
        "embed_norm": "0.enorm.weight",
        "hidden_norm": "0.hnorm.weight",
        "input_proj": "0.eh_proj.weight",
        "attn_norm": "0.norm.weight",
        **{f"attention.{name}_proj": f"0.mixer.{name}_proj.weight" for name in "qkvo"},
        "mlp_norm": "1.norm.weight",
        "final_norm": "1.final_layernorm.weight",
    },
    experts=_experts("1.mixer.", "shared_experts"),
)
_DEEPSEEK_V3 = Names(
    with_policy=("DeepseekV3ForCausalLM",),
    alone="DeepSeekMTPModel",
    prefix="model.layers.{}.",
    policy=("model.", "lm_head."),
    fields=_layer("")
    | {
        "embed_norm": "enorm.weight",
        "hidden_norm": "hnorm.weight",
        "input_proj": "eh_proj.weight",
        "attention.q_down": "self_attn.q_a_proj.weight",
        "attention.q_up": "self_attn.q_b_proj.weight",
        "attention.q_down_norm": "self_attn.q_a_layernorm.weight",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa.weight",
        "attention.kv_norm": "self_attn.kv_a_layernorm.weight",
        "attention.kv_up": "self_attn.kv_b_proj.weight",
        "final_norm": "shared_head.norm.weight",
    },
    experts=_experts("mlp.", "shared_experts"),
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
NAMES: dict[LayoutName, Names] = {
    "mimo": _MIMO,
    "qwen3_5": replace(
        _QWEN3_NEXT, with_policy=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), alone="Qwen3_5MTP"
    ),
    "qwen3_5_moe": replace(
        _QWEN3_NEXT,
        with_policy=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        alone="Qwen3_5MoeMTP",
    ),
    "qwen3_next": _QWEN3_NEXT,
    "nemotron_h": _NEMOTRON_H,
    "deepseek_v3": _DEEPSEEK_V3,
}


def has_stacked_experts(names: Iterable[str]) -> bool:
    """Whether a folder with tensors of these names has one for all experts."""
    return any(name.startswith("mtp.") and name.endswith(".experts.gate_up_proj") for name in names)


def _is_stacked(config: MtpConfig) -> bool:
    return isinstance(config.feed_forward, Experts) and config.feed_forward.stacked


def _names_of(config: MtpConfig, field: str, shape: tuple[int, ...]) -> list[str]:
    """The tensors, after the prefix, of an array as the folder has it: one, or one for every expert."""
    names = NAMES[config.layout.name]
    if len(shape) == 3:
        if _is_stacked(config):
            return [names.stacked[field]]
        return [names.experts[field].format(i) for i in range(shape[0])]
    return [
        (names.experts if isinstance(config.feed_forward, Experts) and field in names.experts else names.fields)[field]
    ]


def tensor_shapes(config: MtpConfig, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a head, by its name after the prefix, from those of its arrays."""
    shapes = dict(shapes)
    if _is_stacked(config):
        count, width, inner = shapes.pop(_GATE)
        shapes[_BOTH] = (count, width + shapes.pop(_UP)[1], inner)
    found: dict[str, tuple[int, ...]] = {}
    for field, shape in shapes.items():
        names = _names_of(config, field, shape)
        found |= dict.fromkeys(names, shape if len(names) == 1 else shape[1:])
    return found


def as_tensors(config: MtpConfig, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a head by their whole names, from its arrays by field name."""
    arrays = dict(arrays)
    if _is_stacked(config):
        arrays[_BOTH] = np.concatenate([arrays.pop(_GATE), arrays.pop(_UP)], axis=1)
    prefix = _prefix(config)
    found: dict[str, np.ndarray] = {}
    for field, x in arrays.items():
        names = _names_of(config, field, x.shape)
        found |= {prefix + name: part for name, part in zip(names, [x] if len(names) == 1 else x, strict=True)}
    return found


def as_arrays(
    config: MtpConfig, tensors: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """The arrays of a head by field name, from its tensors by their names after the prefix."""
    found: dict[str, np.ndarray] = {}
    halves: dict[str, np.ndarray] = {}
    if _is_stacked(config):
        gate, up = np.split(tensors[NAMES[config.layout.name].stacked[_BOTH]], 2, axis=1)
        halves = {_GATE: gate, _UP: up}
    for field, shape in shapes.items():
        if field in halves:
            found[field] = halves[field]
            continue
        parts = [tensors[name] for name in _names_of(config, field, shape)]
        found[field] = parts[0] if len(parts) == 1 else np.stack(parts)
    return found


def _prefix(config: MtpConfig) -> str:
    return NAMES[config.layout.name].prefix.format(config.boundary)


def canonical(config: MtpConfig, name: str) -> str | None:
    """A tensor's name after the prefix; None for one of the policy's, or a copy of it."""
    names, prefix = NAMES[config.layout.name], _prefix(config)
    if name.startswith(prefix):
        own = name.removeprefix(prefix)
        return None if own in names.copies else own
    return None if name.startswith(names.policy) else name
