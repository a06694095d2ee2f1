"""config.json of native multi-token-prediction heads: the policy's, read for its head, and what we write."""

from dataclasses import replace
from typing import Any

from specrl_jax.drafters.mtp_layouts import LAYOUTS, Dense, GroupedAttention, MtpConfig
from specrl_jax.drafters.mtp_names import NAMES
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface_config import config_from_hf, config_to_hf

_LAYERS = "num_nextn_predict_layers"
_LAYOUT_OF = {name: layout for layout, names in NAMES.items() for name in (*names.with_policy, names.alone)}


def layout_name(hf: dict[str, Any]) -> str | None:
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
    attention = config.attention
    policy = PolicyConfig(
        family="qwen3" if attention.qk_norm else "qwen2" if attention.bias else "llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.feed_forward.width,
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


_FROM = {"mimo": _mimo_from_json}
_TO = {"mimo": _mimo_to_json}


def config_json(config: MtpConfig) -> dict[str, Any]:
    """The config.json of a head by itself."""
    name = config.layout.name
    own = {"architectures": [NAMES[name].alone], _LAYERS: 1, "draft_vocab_size": config.draft_vocab_size}
    return _TO[name](config) | own


def config_from_json(hf: dict[str, Any]) -> MtpConfig:
    """The architecture of the head that a config.json describes, by itself or with its policy."""
    name = layout_name(hf)
    assert name is not None
    if hf.get(_LAYERS) != 1:
        raise InputError(f"mtp head config has {_LAYERS} = {hf.get(_LAYERS)!r}; only heads of 1 layer are supported")
    config = _FROM[name](hf)
    size = hf.get("draft_vocab_size")
    if size is None:
        return config
    if type(size) is not int:
        raise InputError(f"mtp head config has draft_vocab_size = {size!r}; it must be an integer")
    return replace(config, draft_vocab_size=size)
