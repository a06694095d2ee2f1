"""Shapes and parameters of a parallel block drafter (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147)."""

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.eagle3_params import chosen_ids
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.params import LayerParams, PolicyParams, init_kernel, layer_shapes
from specrl_jax.models.policy import head_weights


@dataclass(frozen=True)
class BlockConfig:
    """Architecture of a block drafter.

    backbone: its layers, of the Qwen3 kind; width and vocabulary are the policy's, whose embedding it reads.
    draft_vocab_size: the tokens that it can propose.
    boundaries: ascending residual-stream boundaries of the policy (0 is the embedding).
    block_size: slots of a block, all filled in at once: the newest token and mask tokens.
    mask_token_id: the policy's token whose embedding stands in slots to be filled in.
    sample_from_anchor: slot `j` predicts the token after its place, the newest token's slot too, so that a block has as
        many drafts as slots (DSpark); otherwise the token at its place, one draft less (DFlash).
    markov_rank: rank of the correction of a draft's logits by the token before it; 0 for none.
    confidence: whether a head predicts how likely each draft is to be accepted.
    """

    backbone: PolicyConfig
    draft_vocab_size: int
    boundaries: tuple[int, ...]
    block_size: int = 8
    mask_token_id: int = 0
    sample_from_anchor: bool = True
    markov_rank: int = 0
    confidence: bool = False

    def __post_init__(self) -> None:
        for name, least in (("draft_vocab_size", 1), ("block_size", 2), ("markov_rank", 0)):
            if getattr(self, name) < least:
                raise InputError(f"block drafter {name} is {getattr(self, name)}; it must be at least {least}")
        if self.backbone.family != "qwen3":
            raise InputError(f"block drafter layers are of family {self.backbone.family}; only qwen3 is supported")
        if self.draft_vocab_size > self.backbone.vocab_size:
            raise InputError(
                f"draft vocabulary of {self.draft_vocab_size} is larger than the policy's "
                f"{self.backbone.vocab_size}; reduce it"
            )
        ascending = all(low < high for low, high in itertools.pairwise(self.boundaries))
        if not self.boundaries or self.boundaries[0] < 0 or not ascending:
            raise InputError(f"block drafter boundaries are {self.boundaries}; give ascending layer boundaries")
        if not 0 <= self.mask_token_id < self.backbone.vocab_size:
            raise InputError(
                f"block drafter mask_token_id is {self.mask_token_id}, which is not in the policy's vocabulary of "
                f"{self.backbone.vocab_size}; name one of its tokens"
            )

    @property
    def num_heads(self) -> int:
        """Of a layer."""
        return self.backbone.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values of a layer."""
        return self.backbone.num_kv_heads

    @property
    def intermediate_size(self) -> int:
        """Hidden units of a layer."""
        return self.backbone.intermediate_size

    @property
    def drafts(self) -> int:
        """Most drafts of a round."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


@struct.dataclass
class BlockWeights:
    """What training changes. Kernels are stored `[out, in]`; `fd` is the number of features times the width.

    fc, hidden_norm: from the policy's features to what the layers attend to.
    markov_in, markov_out: the correction `markov_out @ markov_in[token]`, of rank `m`.
    confidence_kernel, confidence_bias: of the hidden state and, where there is a correction, the row of `markov_in`.
    """

    fc: Float[Array, "d fd"]
    hidden_norm: Float[Array, "d"]
    layers: tuple[LayerParams, ...]
    final_norm: Float[Array, "d"]
    markov_in: Float[Array, "v m"] | None = None
    markov_out: Float[Array, "dv m"] | None = None
    confidence_kernel: Float[Array, "1 dm"] | None = None
    confidence_bias: Float[Array, "1"] | None = None


@struct.dataclass
class BlockParams:
    """`target_ids[i]` is the policy's token that entry `i` of the draft logits stands for, int32.

    lm_head: the policy's output rows of these tokens, which training leaves alone; None until the policy is known.
    """

    weights: BlockWeights
    lm_head: Float[Array, "dv d"] | None
    target_ids: Int[Array, "dv"]


def weight_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every array of `BlockWeights`; those of layer `i` are `layers.i.` and the name in `LayerParams`."""
    d, rank = config.backbone.hidden_size, config.markov_rank
    features = len(config.boundaries) * d
    shapes: dict[str, tuple[int, ...]] = {"fc": (d, features), "hidden_norm": (d,), "final_norm": (d,)}
    for i in range(config.backbone.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(config.backbone).items()}
    if rank:
        shapes |= {"markov_in": (config.backbone.vocab_size, rank), "markov_out": (config.draft_vocab_size, rank)}
    if config.confidence:
        shapes |= {"confidence_kernel": (1, d + rank), "confidence_bias": (1,)}
    return shapes


def as_weights(arrays: dict[str, Array]) -> BlockWeights:
    """Weights from arrays by the names of `weight_shapes`."""
    own = {name: array for name, array in arrays.items() if not name.startswith("layers.")}
    count = 1 + max(int(name.split(".")[1]) for name in arrays if name.startswith("layers."))
    layers = []
    for i in range(count):
        prefix = f"layers.{i}."
        fields = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        layers.append(LayerParams(**fields))
    return BlockWeights(**own, layers=tuple(layers))


def init_block(
    key: Any, config: BlockConfig, policy: PolicyParams, target_ids: np.ndarray | None = None, feature_rms: float = 1.0
) -> BlockParams:
    """Random layers: kernels by `init_kernel`, norms one, the correction of drafts zero; the policy's output rows.

    Args:
        key: random key.
        config: the drafter.
        policy: whose final norm and output projection it starts with.
        target_ids: from `eagle3_params.select_draft_vocab`; None where it proposes the whole vocabulary.
        feature_rms: root mean square of the policy's features.
    """
    ids = chosen_ids(target_ids, config.draft_vocab_size, config.backbone.vocab_size)
    dtype = jnp.dtype(config.backbone.dtype)
    shapes = weight_shapes(config)
    arrays: dict[str, Array] = {}
    for (name, shape), array_key in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True):
        if name in ("markov_out", "confidence_kernel", "confidence_bias"):
            arrays[name] = jnp.zeros(shape, dtype)
        else:
            arrays[name] = jnp.ones(shape, dtype) if len(shape) == 1 else init_kernel(array_key, shape, dtype)
    arrays["fc"] = arrays["fc"] / feature_rms
    norm, head = head_weights(policy)
    arrays["final_norm"] = norm.astype(dtype)
    return BlockParams(as_weights(arrays), head[ids].astype(dtype), ids)
