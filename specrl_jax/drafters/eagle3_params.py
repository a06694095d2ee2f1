"""Shapes, parameters and draft vocabulary of EAGLE-3 heads (Li et al., arXiv 2503.01840)."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specrl_jax.errors import InputError
from specrl_jax.models.config import Dtype, PolicyConfig, RopeConfig
from specrl_jax.models.params import PolicyParams, init_kernel
from specrl_jax.models.policy import head_weights

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "max_position_embeddings",
)


def default_boundaries(num_layers: int) -> tuple[int, int, int]:
    """The boundaries `(2, L // 2, L - 3)` that EAGLE-3 trainers use, or three spread ones for a shallow policy.

    Boundary 0 is the embedding, boundary `b` the residual stream after the first `b` layers.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    if num_layers >= 4:
        return (1, num_layers // 2, num_layers - 1)
    if num_layers >= 2:
        return (num_layers - 2, num_layers - 1, num_layers)
    raise InputError(
        f"a policy of {num_layers} layer has no three residual boundaries; EAGLE-3 needs at least 2 layers"
    )


@dataclass(frozen=True)
class Eagle3Config:
    """Architecture of a one-layer EAGLE-3 head.

    vocab_size: the policy's vocabulary. draft_vocab_size: the tokens that the head can propose.
    boundaries: ascending residual-stream boundaries of the policy (0 is the embedding), three by custom.
    target_hidden_size: width of the policy; another than `hidden_size` only with `own_embed`.
    rope: the head's own rotary embedding, which need not be the policy's.
    norm_before_fc: normalise the concatenated features; fc_norm: each of them by itself (EAGLE-3.1).
    norm_before_residual: the layer's residual is the normalised hidden state.
    norm_output: feed back the output after the final norm (EAGLE-3.1).
    qk_norm: normalise queries and keys, as Qwen3 does.
    own_embed: the head has an embedding of its own, which training leaves alone.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    boundaries: tuple[int, ...]
    target_hidden_size: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 4096
    dtype: Dtype = "float32"
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    own_embed: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise InputError(f"draft head {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise InputError(
                f"draft head has {self.num_heads} heads, {self.num_kv_heads} key/value heads of width {self.head_dim}; "
                "the second must divide the first and the width must be even"
            )
        ascending = all(low < high for low, high in itertools.pairwise(self.boundaries))
        if not self.boundaries or self.boundaries[0] < 0 or not ascending:
            raise InputError(f"draft head boundaries are {self.boundaries}; give ascending layer boundaries")
        if self.norm_before_fc and self.fc_norm:
            raise InputError("draft head sets norm_before_fc and fc_norm; its features are normalised once, choose one")
        if self.draft_vocab_size > self.vocab_size:
            raise InputError(
                f"draft vocabulary of {self.draft_vocab_size} is larger than the policy's {self.vocab_size}; reduce it"
            )
        if self.hidden_size != self.target_hidden_size and not self.own_embed:
            raise InputError(
                f"draft head of width {self.hidden_size} cannot read the embedding of a policy of width "
                f"{self.target_hidden_size}; use equal widths"
            )

    @property
    def _variants(self) -> bool:
        return self.norm_before_fc or self.fc_norm or self.norm_before_residual or self.norm_output

    @property
    def plain(self) -> bool:
        """Whether this is the head of the paper: three features, its norms, the policy's embedding."""
        other = (self._variants, self.qk_norm, self.own_embed)
        return not any(other) and len(self.boundaries) == 3


def head_config(
    policy: PolicyConfig, draft_vocab_size: int, boundaries: tuple[int, ...], **others: Any
) -> Eagle3Config:
    """A head whose layer has the policy's sizes; `others` are further fields, or other values of these."""
    fields: dict[str, Any] = {
        "hidden_size": policy.hidden_size,
        "intermediate_size": policy.intermediate_size,
        "num_heads": policy.num_heads,
        "num_kv_heads": policy.num_kv_heads,
        "head_dim": policy.head_dim,
        "vocab_size": policy.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "boundaries": boundaries,
        "target_hidden_size": policy.hidden_size,
        "rms_norm_eps": policy.rms_norm_eps,
        "rope": policy.rope,
        "max_position_embeddings": policy.max_position_embeddings,
        "dtype": policy.dtype,
    }
    return Eagle3Config(**fields | others)


@struct.dataclass
class Eagle3Weights:
    """What training changes. Kernels are stored `[out, in]`; `ed` is embedding beside hidden, `2 * d`.

    fc: maps the concatenated features (`fd` is their number times the policy's width) to the head's width.
    embed_norm, hidden_norm: norms of the two halves of the attention input (`input_layernorm`, `hidden_norm`).
    """

    fc: Float[Array, "d fd"]
    embed_norm: Float[Array, "d"]
    hidden_norm: Float[Array, "d"]
    q_proj: Float[Array, "hc ed"]
    k_proj: Float[Array, "gc ed"]
    v_proj: Float[Array, "gc ed"]
    o_proj: Float[Array, "d hc"]
    mlp_norm: Float[Array, "d"]
    gate_proj: Float[Array, "f d"]
    up_proj: Float[Array, "f d"]
    down_proj: Float[Array, "d f"]
    final_norm: Float[Array, "d"]
    lm_head: Float[Array, "dv d"]
    input_norm: Float[Array, "fd"] | None = None
    fc_norms: tuple[Float[Array, "td"], ...] | None = None
    q_norm: Float[Array, "c"] | None = None
    k_norm: Float[Array, "c"] | None = None


@struct.dataclass
class Eagle3Params:
    """`target_ids[i]` is the policy's token that entry `i` of the draft logits stands for, int32.

    embed: the head's own embedding, or None.
    """

    weights: Eagle3Weights
    target_ids: Int[Array, "dv"]
    embed: Float[Array, "v d"] | None = None

    def embedding(self, policy: Float[Array, "v d2"]) -> Float[Array, "v d"]:
        """The embedding that the head reads: its own, or the policy's."""
        return policy if self.embed is None else self.embed

    def with_rows(self, weights: Any) -> Any:
        """Weights of this head as its layer reads them: as they are, since nothing in them is the policy's."""
        return weights


def weight_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Shape of every array of `Eagle3Weights`, by field name; those of `fc_norms` are `fc_norms.0` and so on."""
    d, f = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    features = len(config.boundaries) * config.target_hidden_size
    norms: dict[str, tuple[int, ...]] = {"input_norm": (features,)} if config.norm_before_fc else {}
    if config.fc_norm:
        norms |= {f"fc_norms.{i}": (config.target_hidden_size,) for i in range(len(config.boundaries))}
    if config.qk_norm:
        norms |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    return norms | {
        "fc": (d, features),
        "embed_norm": (d,),
        "hidden_norm": (d,),
        "q_proj": (heads, 2 * d),
        "k_proj": (kv_heads, 2 * d),
        "v_proj": (kv_heads, 2 * d),
        "o_proj": (d, heads),
        "mlp_norm": (d,),
        "gate_proj": (f, d),
        "up_proj": (f, d),
        "down_proj": (d, f),
        "final_norm": (d,),
        "lm_head": (config.draft_vocab_size, d),
    }


def as_weights(arrays: dict[str, Array]) -> Eagle3Weights:
    """Weights from arrays by the names of `weight_shapes`."""
    single = {name: array for name, array in arrays.items() if not name.startswith("fc_norms.")}
    norms = tuple(arrays[f"fc_norms.{i}"] for i in range(len(arrays) - len(single)))
    return Eagle3Weights(**single, fc_norms=norms or None)


def select_draft_vocab(token_counts: np.ndarray, draft_vocab_size: int) -> np.ndarray:
    """The `draft_vocab_size` most frequent tokens in ascending order, int32; the smaller id wins a tie.

    Args:
        token_counts: how often each token of the policy's vocabulary was seen in responses, `[vocab]`.
        draft_vocab_size: at most the vocabulary. Where fewer tokens were seen, the lowest unseen ids fill it.
    """
    if draft_vocab_size > len(token_counts):
        raise InputError(
            f"draft vocabulary of {draft_vocab_size} is larger than the policy's {len(token_counts)}; reduce it"
        )
    by_frequency = np.argsort(-np.asarray(token_counts, np.int64), kind="stable")
    return np.sort(by_frequency[:draft_vocab_size]).astype(np.int32)


def chosen_ids(target_ids: np.ndarray | None, draft_vocab_size: int, vocab_size: int) -> Int[Array, "dv"]:
    """Target ids as given, or those of the whole vocabulary; InputError where a smaller one has none."""
    if target_ids is None:
        if draft_vocab_size != vocab_size:
            raise InputError("a draft vocabulary smaller than the policy's needs its target ids; select them first")
        target_ids = np.arange(vocab_size)
    return jnp.asarray(target_ids, jnp.int32)


def init_eagle3(
    key: Any,
    config: Eagle3Config,
    target_ids: np.ndarray | None = None,
    policy: PolicyParams | None = None,
    feature_rms: float = 1.0,
) -> Eagle3Params:
    """Random head: kernels by `init_kernel`, norms one.

    Args:
        key: random key.
        config: the head.
        target_ids: from `select_draft_vocab`; None where the head proposes the whole vocabulary.
        policy: where given, the final norm and the output projection start as the policy's.
        feature_rms: root mean square of the policy's features, which grows with depth and training; `fc` starts
            with outputs of unit size, since beside a large residual the layer itself would learn slowly.
    """
    ids = chosen_ids(target_ids, config.draft_vocab_size, config.vocab_size)
    dtype = jnp.dtype(config.dtype)
    shapes = weight_shapes(config)
    arrays: dict[str, Array] = {}
    for (name, shape), array_key in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True):
        arrays[name] = jnp.ones(shape, dtype) if len(shape) == 1 else init_kernel(array_key, shape, dtype)
    if not (config.norm_before_fc or config.fc_norm):
        arrays["fc"] = arrays["fc"] / feature_rms
    if policy is not None:
        final_norm, head = head_weights(policy)
        start = {"final_norm": final_norm, "lm_head": head[ids]}
        arrays |= {name: x.astype(dtype) for name, x in start.items() if x.shape == shapes[name]}
    embed = None
    if config.own_embed:
        drawn = jax.random.normal(jax.random.fold_in(key, 1), (config.vocab_size, config.hidden_size), dtype)
        embed = 0.02 * drawn
    return Eagle3Params(as_weights(arrays), ids, embed)
