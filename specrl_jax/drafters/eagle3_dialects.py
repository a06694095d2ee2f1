"""config.json of EAGLE-3 heads: what SpecForge, EAGLE, AngelSlim, ModelOpt and speculators write, and what we do.

Two conventions of layer ids differ by one, and the same flag stands at the top, under `eagle_config`, or is
another's default. All of it is settled here, once, at load.
"""

import warnings
from typing import Any

from specrl_jax.drafters.eagle3_params import Eagle3Config, default_boundaries, head_config
from specrl_jax.drafters.head_files import check_fits, integers, whole_layer
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface_config import config_from_hf, config_to_hf

_LLAMA, _QWEN3 = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"
_SUPPORTED = (_LLAMA, "Eagle3LlamaForCausalLM", _QWEN3, "Eagle3Speculator", "Eagle3DraftModel")
_AS_POLICY = "LlamaForCausalLM"  # as early heads of EAGLE call themselves; these have a draft vocabulary
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_BOUNDARIES = "residual_boundaries"
_FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
# What ModelOpt can switch; a head with another value computes something else.
_ASSUMED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


def as_policy(config: Eagle3Config) -> PolicyConfig:
    """The head's layer as the policy that its config.json describes."""
    return PolicyConfig(
        family="qwen3" if config.qk_norm else "llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=1,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope=config.rope,
        dtype=config.dtype,
    )


def config_json(config: Eagle3Config) -> dict[str, Any]:
    """The config.json of a head.

    SpecForge counts layers from 0 and reads their outputs, so its ids are the boundaries less 1. vLLM takes ids as
    boundaries, also those of SpecForge where it finds no others, so that the boundaries stand at the top for it.
    Other engines read ids of their own choice; we read `residual_boundaries`.
    """
    hf = config_to_hf(as_policy(config)) | {
        "architectures": [_QWEN3 if config.qk_norm else _LLAMA],
        "draft_vocab_size": config.draft_vocab_size,
        _LAYER_IDS: list(config.boundaries),
        "eagle_config": {
            _LAYER_IDS: [boundary - 1 for boundary in config.boundaries],
            "use_aux_hidden_state": True,
            _BOUNDARIES: list(config.boundaries),
        },
    }
    if config.hidden_size != config.target_hidden_size:
        hf["target_hidden_size"] = config.target_hidden_size
    if len(config.boundaries) != 3:
        hf["num_aux_hidden_states"] = len(config.boundaries)
    return hf | {flag: True for flag in _FLAGS if getattr(config, flag)}


def _boundaries(hf: dict[str, Any], policy: PolicyConfig | None, speculators: bool) -> tuple[int, ...]:
    """Residual boundaries from the ids of a config.json, whose two conventions differ by one.

    Ids of speculators are boundaries. Of the others those that start with 1 are SpecForge's default
    `(1, L // 2 - 1, L - 4)`, layers counted from 0; those that start with 2 are EAGLE's `(2, L // 2, L - 3)`,
    boundaries already.
    """
    nested = hf.get("eagle_config") or {}
    known = integers(nested, _BOUNDARIES)
    if known is not None:
        return tuple(sorted(known))
    ids = integers(hf, _LAYER_IDS)
    ids = integers(nested, _LAYER_IDS) if ids is None else ids
    if ids is None:
        if policy is None:
            raise InputError(f"draft head config lacks {_LAYER_IDS}; give the boundaries that it was trained with")
        return default_boundaries(policy.num_layers)
    ids = sorted(ids)
    if speculators:
        return tuple(ids)
    if ids[0] == 1:
        return tuple(i + 1 for i in ids)
    if ids[0] != 2:
        warnings.warn(f"draft head config has layer ids {ids}, taken as residual boundaries as they are", stacklevel=4)
    return tuple(ids)


def _of_speculators(hf: dict[str, Any]) -> dict[str, Any]:
    """A config.json of speculators in the shape of the others, what it leaves out filled in."""
    kind = hf["speculators_model_type"]
    if kind != "eagle3":
        raise InputError(f"draft head config names the speculators_model_type {kind!r}; supported is eagle3")
    layer = dict(hf.get("transformer_layer_config") or {})
    model_type = layer.get("model_type", "llama")
    if model_type not in ("llama", "qwen3"):
        raise InputError(f"draft head config has a layer of model_type {model_type!r}; supported are llama and qwen3")
    whole = whole_layer(layer, "llama")
    names = ("draft_vocab_size", "target_hidden_size", _LAYER_IDS, *_FLAGS)
    given = {name: hf[name] for name in names if hf.get(name) is not None}
    architecture = _QWEN3 if model_type == "qwen3" else _LLAMA
    dtype = {name: hf[name] for name in ("dtype", "torch_dtype") if hf.get(name)}
    return whole | dtype | {"norm_before_residual": True} | given | {"architectures": [architecture]}


def _flags(hf: dict[str, Any]) -> dict[str, bool]:
    """The variants that a config.json asks for; ModelOpt writes them under `eagle_config`."""
    nested = hf.get("eagle_config") or {}
    return {name: bool(nested.get(name, hf.get(name, False))) for name in _FLAGS}


def _check_variant(hf: dict[str, Any]) -> str:
    """The architecture, after everything that would change the computation was refused."""
    architecture = (hf.get("architectures") or [None])[0]
    if architecture not in _SUPPORTED and not (architecture == _AS_POLICY and "draft_vocab_size" in hf):
        known = ", ".join(_SUPPORTED)
        raise InputError(
            f"draft head config names the architecture {architecture!r}; supported are {known}, and "
            f"{_AS_POLICY} with a draft_vocab_size"
        )
    nested = hf.get("eagle_config") or {}
    for name, value in _ASSUMED.items():
        if nested.get(name, value) != value:
            raise InputError(f"draft head config sets {name} to {nested[name]!r}; heads with it are not supported")
    if hf.get("logit_scale", 1.0) not in (None, 1, 1.0):
        raise InputError(f"draft head config sets logit_scale to {hf['logit_scale']!r}; only 1 is supported")
    if hf.get("num_hidden_layers", 1) != 1:
        raise InputError(f"draft head has {hf['num_hidden_layers']} layers; only heads of one layer are supported")
    return str(architecture)


def config_from_json(
    hf: dict[str, Any], policy: PolicyConfig | None, boundaries: tuple[int, ...] | None, own_embed: bool
) -> Eagle3Config:
    """The architecture that a head's config.json describes; see `eagle3_folder.load_eagle3`.

    Args:
        own_embed: whether the file holds an embedding that is not known to be the policy's.
    """
    speculators = "speculators_model_type" in hf
    hf = _of_speculators(hf) if speculators else hf
    architecture = _check_variant(hf)
    family = "Qwen3ForCausalLM" if architecture == _QWEN3 else _AS_POLICY
    model_type = {"Qwen3ForCausalLM": "qwen3", _AS_POLICY: "llama"}[family]
    layer = config_from_hf(hf | {"architectures": [family], "model_type": model_type, "num_hidden_layers": 1})
    draft_vocab_size = hf.get("draft_vocab_size") or layer.vocab_size
    if type(draft_vocab_size) is not int:
        raise InputError(f"draft head config has draft_vocab_size = {draft_vocab_size!r}; it must be an integer")
    config = head_config(
        layer,
        draft_vocab_size,
        _boundaries(hf, policy, speculators) if boundaries is None else boundaries,
        target_hidden_size=hf.get("target_hidden_size") or layer.hidden_size,
        qk_norm=family == "Qwen3ForCausalLM",
        own_embed=own_embed,
        **_flags(hf),
    )
    if policy is not None:
        check_fits("draft head", config.target_hidden_size, config.vocab_size, config.boundaries, policy)
    return config
