"""EAGLE-3 heads as folders: config.json and model.safetensors in the layout of SpecForge, which vLLM and SGLang read.

The embedding is the policy's and not stored, unless the head has one of its own.
"""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_dialects import config_from_json, config_json
from specrl_jax.drafters.eagle3_params import Eagle3Config, Eagle3Params, as_weights, weight_shapes
from specrl_jax.drafters.head_files import (
    by_name,
    has_weights,
    read_target_ids,
    read_tensors,
    save_head,
    vocab_maps,
    weights_files,
)
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import resolve_folder
from specrl_jax.models.weights import read_json, weight_map

_NAMES = {
    "fc": "fc.weight",
    "embed_norm": "midlayer.input_layernorm.weight",
    "hidden_norm": "midlayer.hidden_norm.weight",
    "q_proj": "midlayer.self_attn.q_proj.weight",
    "k_proj": "midlayer.self_attn.k_proj.weight",
    "v_proj": "midlayer.self_attn.v_proj.weight",
    "o_proj": "midlayer.self_attn.o_proj.weight",
    "mlp_norm": "midlayer.post_attention_layernorm.weight",
    "gate_proj": "midlayer.mlp.gate_proj.weight",
    "up_proj": "midlayer.mlp.up_proj.weight",
    "down_proj": "midlayer.mlp.down_proj.weight",
    "final_norm": "norm.weight",
    "lm_head": "lm_head.weight",
    "input_norm": "input_norm.weight",
    "q_norm": "midlayer.self_attn.q_norm.weight",
    "k_norm": "midlayer.self_attn.k_norm.weight",
}
_EMBED = "embed_tokens.weight"


def _name(field: str) -> str:
    """Name in the folder of an array of the weights."""
    return f"fc_norm.{field.removeprefix('fc_norms.')}.weight" if field.startswith("fc_norms.") else _NAMES[field]


def drafter_tensors(params: Eagle3Params, config: Eagle3Config) -> dict[str, np.ndarray]:
    """The head's tensors by their names in the folder.

    A head of the whole vocabulary is stored in its order and without maps: vLLM refuses them there.
    """
    tensors = {_name(field): np.ascontiguousarray(np.asarray(x)) for field, x in by_name(params.weights).items()}
    if params.embed is not None:
        tensors[_EMBED] = np.ascontiguousarray(np.asarray(params.embed))
    maps = vocab_maps(np.asarray(params.target_ids), config.vocab_size)
    if not maps:
        head = _NAMES["lm_head"]
        tensors[head] = tensors[head][np.argsort(np.asarray(params.target_ids))]
    return tensors | maps


def save_eagle3(folder: str | Path, drafter: Eagle3Drafter, params: Eagle3Params) -> None:
    """Write a head; an earlier head in that folder is replaced as a whole, anything else there is refused."""
    save_head(folder, config_json(drafter.config), drafter_tensors(params, drafter.config))


def _canonical(name: str) -> str:
    """SpecForge's name of a tensor; others prefix `model.` or call the layer `layers.0`."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def load_eagle3(
    source: str | Path, policy: PolicyConfig | None = None, boundaries: tuple[int, ...] | None = None
) -> tuple[Eagle3Drafter, Eagle3Params]:
    """A head from a folder or a hub name, in the element type that its config.json names.

    Args:
        source: folder with config.json and model.safetensors, or the name of a head on the hub.
        policy: where given, the head must fit it; it also supplies the default boundaries.
        boundaries: residual boundaries that the head was trained with, where its config.json is wrong or silent.

    Raises:
        InputError: a file is missing or damaged, weights are pickled, a tensor is missing, unknown or of another
            shape than the config's, the variant is not supported, or the head does not fit the policy.
    """
    folder = resolve_folder(source, "draft head")
    config_file = folder / "config.json"
    hf = read_json(config_file)
    # What is in the file is needed to understand the config, and a config that cannot be used is refused first.
    own_embed = has_weights(folder) and any(_canonical(name) == _EMBED for name in weight_map(folder))
    try:
        config = config_from_json(hf, policy, boundaries, own_embed)
    except InputError as error:
        raise InputError(f"{config_file}: {error}") from None
    files = weights_files(folder)
    expected = {_name(field): shape for field, shape in weight_shapes(config).items()}
    expected[_EMBED] = (config.vocab_size, config.hidden_size)
    sizes = config.draft_vocab_size, config.vocab_size
    found = read_tensors(files, expected, (_EMBED,), *sizes, _canonical)
    ids, dtype = read_target_ids(folder, found, *sizes), jnp.dtype(config.dtype)
    arrays = {field: jnp.asarray(found[_name(field)].astype(dtype)) for field in weight_shapes(config)}
    embed = jnp.asarray(found[_EMBED].astype(dtype)) if own_embed else None
    return Eagle3Drafter(config), Eagle3Params(as_weights(arrays), jnp.asarray(ids), embed)


def with_policy_embedding(
    drafter: Eagle3Drafter, params: Eagle3Params, embed: Float[Array, "v d"]
) -> tuple[Eagle3Drafter, Eagle3Params]:
    """The head without an embedding of its own where that is the policy's, `embed`; else as it is."""
    own = params.embed
    if own is None or own.shape != embed.shape or not bool(jnp.all(own == embed.astype(own.dtype))):
        return drafter, params
    config = dataclasses.replace(drafter.config, own_embed=False)
    return dataclasses.replace(drafter, config=config), dataclasses.replace(params, embed=None)
