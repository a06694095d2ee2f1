"""config.json of transformers to a `PolicyConfig`, and back."""

from typing import Any

from specrl_jax.errors import InputError
from specrl_jax.models.config import Family, PolicyConfig, RopeConfig

# Model type and family. MiMo is a Qwen2 whose folder also holds a draft head (`drafters/mtp.py`).
_ARCHITECTURES: dict[str, tuple[str, Family]] = {
    "Qwen3ForCausalLM": ("qwen3", "qwen3"),
    "Qwen2ForCausalLM": ("qwen2", "qwen2"),
    "LlamaForCausalLM": ("llama", "llama"),
    "MiMoForCausalLM": ("mimo", "qwen2"),
}
_SCALED = ("factor", "original_max_position_embeddings")
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (*_SCALED, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_SCALED, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}


def integer(hf: dict[str, Any], name: str, default: int | None = None) -> int:
    """An integer of a config.json; InputError where it is none, or missing without a default."""
    value = hf.get(name)
    value = default if value is None else value
    if value is None:
        raise InputError(f"policy config lacks {name}; add it")
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"policy config has {name} = {value!r}; it must be an integer")
    return value


def number(values: dict[str, Any], name: str, default: float | None = None) -> float:
    """A number of a config.json; InputError where it is none, or missing without a default."""
    value = values.get(name)
    value = default if value is None else value
    if value is None:
        raise InputError(f"policy config lacks {name} among its rope parameters; add it")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"policy config has {name} = {value!r}; it must be a number")
    return float(value)


def _optional_number(values: dict[str, Any], name: str) -> float | None:
    return None if values.get(name) is None else number(values, name)


def _family(hf: dict[str, Any]) -> Family:
    known = ", ".join(_ARCHITECTURES)
    by_type = {model_type: name for name, (model_type, _) in _ARCHITECTURES.items()}
    architectures = hf.get("architectures") or [by_type.get(hf.get("model_type", ""), hf.get("model_type"))]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if architecture not in _ARCHITECTURES:
        raise InputError(f"policy config names the architecture {architecture!r}; supported are {known}")
    model_type, family = _ARCHITECTURES[architecture]
    if hf.get("model_type", model_type) != model_type:
        raise InputError(
            f"policy config names the architecture {architecture!r} and the model_type {hf['model_type']!r}; "
            "they must belong together"
        )
    return family


def _check_supported(hf: dict[str, Any], family: Family, num_layers: int) -> None:
    """Refuse what would change the computation and is not computed here."""
    refused = {
        "attention_bias": family != "qwen2" and bool(hf.get("attention_bias")),
        "mlp_bias": bool(hf.get("mlp_bias")),
        "quantization_config": hf.get("quantization_config") is not None,
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
    }
    for name, present in refused.items():
        if present:
            raise InputError(f"policy config sets {name} to {hf[name]!r}; policies with it are not supported")
    windowed = bool(hf.get("use_sliding_window")) and hf.get("sliding_window", 4096) is not None
    if hf.get("layer_types") is not None:
        windowed = any(kind != "full_attention" for kind in hf["layer_types"])
    elif windowed:
        windowed = integer(hf, "max_window_layers", 28) < num_layers
    if windowed:
        raise InputError("policy config asks for sliding-window attention; only full attention is supported")


def rope_from_hf(hf: dict[str, Any], max_positions: int) -> RopeConfig:
    """Both the `rope_parameters` of transformers 5 and the older `rope_theta` and `rope_scaling`."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise InputError(f"policy config has rope parameters {rope!r}; they must be an object")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_FIELDS:
        raise InputError(f"policy config asks for rope_type {kind!r}; supported are {', '.join(_ROPE_FIELDS)}")
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise InputError(f"policy config sets partial_rotary_factor to {partial!r}; only whole heads are rotated here")
    theta = number(rope, "rope_theta", number(hf, "rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=number(rope, "factor"))
    context = "original_max_position_embeddings"
    original = integer(hf if context in hf else rope, context, max_positions)  # transformers prefers the outer one
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=number(rope, "factor"),
            original_max_position_embeddings=original,
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
        )
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=number(rope, "factor", max_positions / max(original, 1)),
        original_max_position_embeddings=original,
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_optional_number(rope, "attention_factor"),
        mscale=_optional_number(rope, "mscale"),
        mscale_all_dim=_optional_number(rope, "mscale_all_dim"),
    )


def config_from_hf(hf: dict[str, Any]) -> PolicyConfig:
    """The architecture that a config.json describes; absent fields mean what transformers takes them to mean.

    Raises:
        InputError: unknown architecture, a feature that is not computed here, or a field that is missing,
            of the wrong type or out of range.
    """
    family = _family(hf)
    num_layers, num_heads = integer(hf, "num_hidden_layers"), integer(hf, "num_attention_heads")
    hidden_size = integer(hf, "hidden_size")
    max_positions = integer(hf, "max_position_embeddings", 2048 if family == "llama" else 32768)
    _check_supported(hf, family, num_layers)
    # Only Qwen3 has a head width of its own where config.json gives none.
    default_width = 128 if family == "qwen3" and "head_dim" not in hf else hidden_size // max(num_heads, 1)
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    return PolicyConfig(
        family=family,
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(hf, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(hf, "num_key_value_heads", num_heads),
        head_dim=integer(hf, "head_dim", default_width),
        rms_norm_eps=number(hf, "rms_norm_eps", 1e-6),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        max_position_embeddings=max_positions,
        rope=rope_from_hf(hf, max_positions),
        # float16 has a narrower range than bfloat16; float32 holds it exactly.
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
    )


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The `rope_parameters` of a config.json."""
    names = _ROPE_FIELDS[rope.kind]
    set_fields = {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    return {"rope_type": rope.kind, "rope_theta": rope.theta, **set_fields}


def config_to_hf(config: PolicyConfig, token_ids: dict[str, int | None] | None = None) -> dict[str, Any]:
    """The config.json of a policy.

    Args:
        config: the policy.
        token_ids: `bos_token_id`, `eos_token_id` and `pad_token_id`, where there are any.
    """
    if config.family == "llama" and config.hidden_size % config.num_heads:
        raise InputError(
            f"policy hidden_size {config.hidden_size} is not a multiple of num_heads {config.num_heads}; "
            "transformers loads no Llama of that shape"
        )
    architecture = next(name for name, (kind, _) in _ARCHITECTURES.items() if kind == config.family)
    rope = rope_to_hf(config.rope)
    hf: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        # For readers older than transformers 5, which would silently take another base.
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.kind == "default" else rope,
        "dtype": config.dtype,
    }
    if config.family != "qwen2":
        hf["attention_bias"] = False
    if config.family == "llama":
        hf["mlp_bias"] = False
    return hf | (token_ids or {})
