"""What a head of one layer computes for one token: EAGLE-3 (`eagle3_layer`), multi-token prediction (`mtp_layer`).

Drafting (`eagle3`) and training (`eagle3_training`) are the same for both kinds and call these functions, which differ
by the head's configuration alone.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from specrl_jax.drafters import eagle3_layer, mtp_layer
from specrl_jax.drafters.eagle3_params import Eagle3Config, Eagle3Params, Eagle3Weights
from specrl_jax.drafters.mtp_layouts import MtpConfig
from specrl_jax.drafters.mtp_params import MtpParams, MtpWeights

LayerConfig = Eagle3Config | MtpConfig
LayerWeights = Eagle3Weights | MtpWeights
LayerParams = Eagle3Params | MtpParams


def _of(config: LayerConfig) -> Any:
    return mtp_layer if isinstance(config, MtpConfig) else eagle3_layer


def fuse(config: LayerConfig, weights: LayerWeights, features: Float[Array, "n fd"]) -> Float[Array, "n d"]:
    """The hidden state of committed pairs, from the policy's features."""
    return _of(config).fuse(config, weights, features)


def fed_back(config: LayerConfig, weights: LayerWeights, hidden: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """What the head reads of its own output, `h2`, one step later."""
    return _of(config).fed_back(config, weights, hidden)


def attention_input(
    config: LayerConfig,
    weights: LayerWeights,
    embed: Float[Array, "v d"],
    tokens: Int[Array, "n"],
    hidden: Float[Array, "n d"],
    positions: Int[Array, "n"],
) -> tuple[Float[Array, "n d"], Float[Array, "n ed"]]:
    """The layer's residual, and what its attention reads, of tokens and hidden states in their slots."""
    return _of(config).attention_input(config, weights, embed, tokens, hidden, positions)


def project_queries(
    config: LayerConfig, weights: LayerWeights, x: Float[Array, "n ed"], positions: Int[Array, "n"]
) -> Float[Array, "n h c"]:
    """Rotated queries, as wide as the keys: `config.head_dim`."""
    return _of(config).project_queries(config, weights, x, positions)


def project_keys(
    config: LayerConfig, weights: LayerWeights, x: Float[Array, "n ed"], positions: Int[Array, "n"]
) -> tuple[Float[Array, "n g c"], Float[Array, "n g c"]]:
    """Rotated keys, and values: what the cache holds of a token, `config.num_kv_heads` heads of each."""
    return _of(config).project_keys(config, weights, x, positions)


def mix_and_mlp(
    config: LayerConfig, weights: LayerWeights, residual: Float[Array, "n d"], attended: Float[Array, "n h c"]
) -> Float[Array, "n d"]:
    """The layer after attention: `h2` from the slot's residual and what it attended to."""
    return _of(config).mix_and_mlp(config, weights, residual, attended)


def draft_logits(config: LayerConfig, weights: LayerWeights, hidden: Float[Array, "n d"]) -> Float[Array, "n dv"]:
    """Float32 logits over the draft vocabulary, from `h2`."""
    return _of(config).draft_logits(config, weights, hidden)
