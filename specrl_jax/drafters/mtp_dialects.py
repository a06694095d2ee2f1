"""config.json of native multi-token-prediction heads: the policy's, read for its head, and what we write."""

from dataclasses import replace
from typing import Any

from specrl_jax.drafters.mtp_families import (
    deepseek_from_json,
    deepseek_to_json,
    nemotron_from_json,
    nemotron_to_json,
    qwen_from_json,
    qwen_to_json,
)
from specrl_jax.drafters.mtp_layouts import LAYOUTS, Dense, GroupedAttention, LayoutName, MtpConfig
from specrl_jax.drafters.mtp_names import NAMES
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface_config import config_from_hf, config_to_hf

# The field that counts the head's layers, and their number where it is absent, as vLLM has it.
_LAYERS = "num_nextn_predict_layers"
_LAYERS_QWEN3_5 = "mtp_num_hidden_layers"
_LAYOUT_OF = {name: layout for layout, names in NAMES.items() for name in (*names.with_policy, names.alone)}


def layout_name(hf: dict[str, Any]) -> LayoutName | None:
    """The layout of the MTP head that a config.json is of, alone or with its policy; None where there is none."""
    return _LAYOUT_OF.get((hf.get("architectures") or [None])[0])


def mtp_config(policy: PolicyConfig, draft_vocab_size: int | None = None) -> MtpConfig:
    """The head of a policy in the layout of MiMo: one more layer of the same kind.

    It proposes `draft_vocab_size` of the policy's tokens, or all.
    """
    attention = GroupedAttention(
        num_heads=policy.num_heads,
        num_kv_heads=policy.num_kv_heads,
        head_dim=policy.head_dim,
        rotary_width=policy.head_dim,
        bias=policy.qkv_bias,
        qk_norm=policy.qk_norm,
    )
    return MtpConfig(
        layout=LAYOUTS["mimo"],
        attention=attention,
        feed_forward=Dense(policy.intermediate_size),
        hidden_size=policy.hidden_size,
        vocab_size=policy.vocab_size,
        draft_vocab_size=policy.vocab_size if draft_vocab_size is None else draft_vocab_size,
        boundary=policy.num_layers,
        rms_norm_eps=policy.rms_norm_eps,
        rope=policy.rope,
        max_position_embeddings=policy.max_position_embeddings,
        dtype=policy.dtype,
    )


def _mimo_from_json(hf: dict[str, Any]) -> MtpConfig:
    return mtp_config(config_from_hf({name: value for name, value in hf.items() if name != "architectures"}))


def _mimo_to_json(config: MtpConfig) -> dict[str, Any]:
    attention, kind = config.attention, config.feed_forward
    assert isinstance(attention, GroupedAttention)
    assert isinstance(kind, Dense)
    policy = PolicyConfig(
        family="qwen3" if attention.qk_norm else "qwen2" if attention.bias else "llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=kind.width,
        num_layers=config.boundary,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope=config.rope,
        dtype=config.dtype,
    )
    return config_to_hf(policy)


def _layers_field(name: LayoutName) -> str:
    return _LAYERS_QWEN3_5 if name in ("qwen3_5", "qwen3_5_moe") else _LAYERS


def with_policy_fields() -> dict[str, Any]:
    """How the config.json of a policy differs that has its head, of the layout of MiMo, in the same folder."""
    return {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True, _LAYERS: 1}


def config_json(config: MtpConfig) -> dict[str, Any]:
    """The config.json of a head by itself."""
    name = config.layout.name
    own = {"architectures": [NAMES[name].alone], _layers_field(name): 1, "draft_vocab_size": config.draft_vocab_size}
    if name == "mimo":
        return _mimo_to_json(config) | own
    if name == "nemotron_h":
        return nemotron_to_json(config) | own
    return (deepseek_to_json(config) if name == "deepseek_v3" else qwen_to_json(config)) | own


def _read(hf: dict[str, Any], name: LayoutName, stacked: bool) -> MtpConfig:
    if name == "mimo":
        return _mimo_from_json(hf)
    if name == "nemotron_h":
        return nemotron_from_json(hf)
    return deepseek_from_json(hf) if name == "deepseek_v3" else qwen_from_json(hf, name, stacked)


def config_from_json(hf: dict[str, Any], stacked: bool = False) -> MtpConfig:
    """The architecture of the head that a config.json describes, by itself or with its policy.

    `stacked` tells whether the folder has one tensor for all experts (`mtp_names.has_stacked_experts`).
    """
    name = layout_name(hf)
    assert name is not None
    if isinstance(hf.get("text_config"), dict):  # of a policy that also sees
        hf = hf | hf["text_config"]
    field = _layers_field(name)
    default = None if name in ("mimo", "deepseek_v3") else 1
    if hf.get(field, default) != 1:
        raise InputError(f"mtp head config has {field} = {hf.get(field)!r}; only heads of 1 layer are supported")
    config = _read(hf, name, stacked)
    size = hf.get("draft_vocab_size")
    if size is None:
        return config
    if type(size) is not int:
        raise InputError(f"mtp head config has draft_vocab_size = {size!r}; it must be an integer")
    return replace(config, draft_vocab_size=size)
