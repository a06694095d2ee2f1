"""config.json of the policies whose native heads have layouts of their own: read for the head, and what we write.

Their policies are not implemented here; what does not concern the head is left alone.
"""

from typing import Any

from specrl_jax.drafters.mtp_layouts import (
    LAYOUTS,
    Dense,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    MtpConfig,
)
from specrl_jax.errors import InputError
from specrl_jax.models.huggingface_config import integer, number, rope_from_hf, rope_to_hf

_PARTIAL = "partial_rotary_factor"
_QWEN_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "qwen3_next": "qwen3_next"}
_PATTERN = "mtp_hybrid_override_pattern"
_KINDS = {"*": ("attention", "full_attention"), "E": ("moe",)}


def _refuse(hf: dict[str, Any], expected: dict[str, tuple[Any, ...]]) -> None:
    """InputError where a field, if it is there, has another value than those."""
    for name, values in expected.items():
        if hf.get(name, values[0]) not in values:
            known = " or ".join(repr(value) for value in values)
            raise InputError(f"mtp head config sets {name} to {hf[name]!r}; only {known} is supported")


def _whole_rope(hf: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The config.json as if whole heads were rotated, and the share of a head that is."""
    found = dict(hf)
    share = found.pop(_PARTIAL, None)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(found.get(name), dict):
            found[name] = dict(found[name])
            share = found[name].pop(_PARTIAL, share)
    share = 0.25 if share is None else share
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise InputError(f"mtp head config sets {_PARTIAL} to {share!r}; it must be above 0 and at most 1")
    return found, float(share)


def _common(hf: dict[str, Any], layout: str, layers: int, eps: str = "rms_norm_eps") -> dict[str, Any]:
    """Fields that all families share."""
    positions = integer(hf, "max_position_embeddings", 32768)
    vocab_size = integer(hf, "vocab_size")
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    return {
        "layout": LAYOUTS[layout],
        "hidden_size": integer(hf, "hidden_size"),
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "boundary": layers,
        "rms_norm_eps": number(hf, eps, 1e-5 if layout == "nemotron_h" else 1e-6),
        "rope": rope_from_hf(hf, positions),
        "max_position_embeddings": positions,
        "dtype": "bfloat16" if dtype == "bfloat16" else "float32",
    }


def _common_json(config: MtpConfig, eps: str = "rms_norm_eps") -> dict[str, Any]:
    rope = rope_to_hf(config.rope)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.boundary,
        eps: config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "rope_parameters": rope,
        "rope_scaling": None if config.rope.kind == "default" else rope,
        "tie_word_embeddings": False,
        "dtype": config.dtype,
    }


def qwen_from_json(hf: dict[str, Any], layout: str, stacked: bool) -> MtpConfig:
    """A head of Qwen3-Next or Qwen3.5."""
    hf, share = _whole_rope(hf)
    refused = {"attention_bias": (False,), "qkv_bias": (False,), "hidden_act": ("silu",), "attn_output_gate": (True,)}
    _refuse(hf, refused | {"layer_scale": (False,), "quantization_config": (None,)})
    heads, width = integer(hf, "num_attention_heads"), integer(hf, "head_dim", 256)
    attention = GroupedAttention(
        num_heads=heads,
        num_kv_heads=integer(hf, "num_key_value_heads", heads),
        head_dim=width,
        rotary_width=int(width * share),
        qk_norm=True,
        gate=True,
    )
    is_dense = layout == "qwen3_5"
    feed_forward = Dense(integer(hf, "intermediate_size")) if is_dense else _qwen_experts(hf, stacked)
    common = _common(hf, layout, integer(hf, "num_hidden_layers"))
    return MtpConfig(attention=attention, feed_forward=feed_forward, **common)


def _qwen_experts(hf: dict[str, Any], stacked: bool) -> Experts:
    return Experts(
        count=integer(hf, "num_experts"),
        chosen=integer(hf, "num_experts_per_tok"),
        width=integer(hf, "moe_intermediate_size"),
        shared_width=integer(hf, "shared_expert_intermediate_size"),
        renormalise=bool(hf.get("norm_topk_prob", True)),
        shared_gate=True,
        stacked=stacked,
    )


def qwen_to_json(config: MtpConfig) -> dict[str, Any]:
    """What `qwen_from_json` reads."""
    attention, kind = config.attention, config.feed_forward
    assert isinstance(attention, GroupedAttention)
    share = attention.rotary_width / attention.head_dim
    hf = _common_json(config) | {"model_type": _QWEN_TYPES[config.layout.name]}
    hf["rope_parameters"] = hf["rope_parameters"] | {_PARTIAL: share}
    if hf["rope_scaling"] is not None:
        hf["rope_scaling"] = hf["rope_parameters"]
    hf |= {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        _PARTIAL: share,
        "attn_output_gate": True,
        "attention_bias": False,
        "hidden_act": "silu",
    }
    if isinstance(kind, Dense):
        return hf | {"intermediate_size": kind.width}
    return hf | {
        "num_experts": kind.count,
        "num_experts_per_tok": kind.chosen,
        "moe_intermediate_size": kind.width,
        "shared_expert_intermediate_size": kind.shared_width,
        "norm_topk_prob": kind.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _routing(hf: dict[str, Any]) -> dict[str, Any]:
    """Routing as DeepSeek-V3 has it, and Nemotron-3 after it."""
    return {
        "count": integer(hf, "n_routed_experts"),
        "chosen": integer(hf, "num_experts_per_tok"),
        "width": integer(hf, "moe_intermediate_size"),
        "sigmoid": True,
        "groups": integer(hf, "n_group", 1),
        "chosen_groups": integer(hf, "topk_group", 1),
        "renormalise": bool(hf.get("norm_topk_prob", True)),
        "scale": number(hf, "routed_scaling_factor", 1.0),
    }


def _routing_json(kind: Experts) -> dict[str, Any]:
    return {
        "n_routed_experts": kind.count,
        "n_shared_experts": 1,
        "num_experts_per_tok": kind.chosen,
        "moe_intermediate_size": kind.width,
        "n_group": kind.groups,
        "topk_group": kind.chosen_groups,
        "norm_topk_prob": kind.renormalise,
        "routed_scaling_factor": kind.scale,
    }


def _check_pattern(hf: dict[str, Any]) -> None:
    """Refuse heads of Nemotron that are not an attention layer and a layer of experts."""
    pattern, kinds = hf.get(_PATTERN), hf.get("mtp_layers_block_type")
    if pattern not in (None, "*E"):
        raise InputError(f"mtp head config has {_PATTERN} = {pattern!r}; only '*E' is supported")
    wanted = [_KINDS[letter] for letter in "*E"]
    if kinds is None:
        return
    is_known = isinstance(kinds, list) and len(kinds) == len(wanted)
    if not is_known or any(kind not in names for kind, names in zip(kinds, wanted, strict=True)):
        raise InputError(
            f"mtp head config has mtp_layers_block_type = {kinds!r}; only attention and then moe is supported"
        )


def nemotron_from_json(hf: dict[str, Any]) -> MtpConfig:
    """A head of Nemotron-H or Nemotron-3: its attention rotates nothing."""
    _check_pattern(hf)
    refused = {"attention_bias": (False,), "mlp_bias": (False,), "mlp_hidden_act": ("relu2",)}
    _refuse(hf, refused | {"sliding_window": (None,), "quantization_config": (None,)})
    heads = integer(hf, "num_attention_heads")
    width = integer(hf, "head_dim", integer(hf, "hidden_size") // max(heads, 1))
    shared = integer(hf, "moe_shared_expert_intermediate_size") * integer(hf, "n_shared_experts", 1)
    latent = 0 if hf.get("moe_latent_size") is None else integer(hf, "moe_latent_size")
    kinds = hf.get("hybrid_override_pattern") or hf.get("layers_block_type") or hf.get("layer_types")
    layers = integer(hf, "num_hidden_layers", len(kinds) if kinds else None)
    return MtpConfig(
        attention=GroupedAttention(heads, integer(hf, "num_key_value_heads", heads), width, rotary_width=0),
        feed_forward=Experts(**_routing(hf), shared_width=shared, gated=False, latent_width=latent),
        **_common(hf, "nemotron_h", layers, "layer_norm_epsilon"),
    )


def nemotron_to_json(config: MtpConfig) -> dict[str, Any]:
    """What `nemotron_from_json` reads."""
    attention, kind = config.attention, config.feed_forward
    assert isinstance(attention, GroupedAttention)
    assert isinstance(kind, Experts)
    hf = _common_json(config, "layer_norm_epsilon") | _routing_json(kind)
    return hf | {
        "model_type": "nemotron_h",
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "moe_shared_expert_intermediate_size": kind.shared_width,
        "moe_latent_size": kind.latent_width or None,
        "mlp_hidden_act": "relu2",
        "attention_bias": False,
        "mlp_bias": False,
        _PATTERN: "*E",
    }


def deepseek_from_json(hf: dict[str, Any]) -> MtpConfig:
    """A head of DeepSeek-V3 or R1: its layer is the one after the policy's last."""
    refused: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "hidden_act": ("silu",)}
    refused |= {"scoring_func": ("sigmoid",)}
    refused |= {"topk_method": ("noaux_tc",), "index_topk": (None,), "rope_interleave": (True, None)}
    _refuse(hf, refused | {"quantization_config": (None,)})
    layers = integer(hf, "num_hidden_layers")
    attention = LatentAttention(
        num_heads=integer(hf, "num_attention_heads"),
        q_rank=0 if hf.get("q_lora_rank") is None else integer(hf, "q_lora_rank"),
        kv_rank=integer(hf, "kv_lora_rank"),
        nope_width=integer(hf, "qk_nope_head_dim"),
        rope_width=integer(hf, "qk_rope_head_dim"),
        value_width=integer(hf, "v_head_dim"),
    )
    feed_forward: FeedForward = Dense(integer(hf, "intermediate_size", 1))
    if layers >= integer(hf, "first_k_dense_replace", 0) and layers % integer(hf, "moe_layer_freq", 1) == 0:
        shared = integer(hf, "n_shared_experts", 1) * integer(hf, "moe_intermediate_size")
        feed_forward = Experts(**_routing(hf), shared_width=shared)
    return MtpConfig(attention=attention, feed_forward=feed_forward, **_common(hf, "deepseek_v3", layers))


def deepseek_to_json(config: MtpConfig) -> dict[str, Any]:
    """What `deepseek_from_json` reads."""
    attention, kind = config.attention, config.feed_forward
    assert isinstance(attention, LatentAttention)
    hf = _common_json(config) | {
        "model_type": "deepseek_v3",
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "q_lora_rank": attention.q_rank or None,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_width,
        "qk_rope_head_dim": attention.rope_width,
        "v_head_dim": attention.value_width,
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "attention_bias": False,
        "moe_layer_freq": 1,
    }
    if isinstance(kind, Dense):
        return hf | {"intermediate_size": kind.width, "first_k_dense_replace": config.boundary + 1}
    shared = {"n_shared_experts": kind.shared_width // kind.width}
    return hf | _routing_json(kind) | shared | {"first_k_dense_replace": 0}
