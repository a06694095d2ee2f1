"""Parameters of native multi-token-prediction heads: shapes, random start, and what they share with their policy."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.eagle3_params import chosen_ids
from specrl_jax.drafters.mtp_layouts import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    MtpConfig,
)
from specrl_jax.models.params import PolicyParams, init_kernel
from specrl_jax.models.policy import head_weights


@struct.dataclass
class GroupedWeights:
    """Of `GroupedAttention`; kernels are stored `[out, in]`. `qc`: query heads times their width, twice that with gate,
    where a head's gate follows its queries."""

    q_proj: Float[Array, "qc d"]
    k_proj: Float[Array, "gc d"]
    v_proj: Float[Array, "gc d"]
    o_proj: Float[Array, "d hc"]
    q_norm: Float[Array, "c"] | None = None
    k_norm: Float[Array, "c"] | None = None
    q_bias: Float[Array, "hc"] | None = None
    k_bias: Float[Array, "gc"] | None = None
    v_bias: Float[Array, "gc"] | None = None


@struct.dataclass
class LatentWeights:
    """Of `LatentAttention`. `r`: kv_rank. `n`: q_rank; queries come from q_down, q_down_norm and q_up, or from q_proj.

    kv_down: to the short vector (`r`, normalised by kv_norm) and the rotated channels of the keys, `t`.
    kv_up: from the short vector, for every head its keys and then its values.
    """

    kv_down: Float[Array, "rt d"]
    kv_norm: Float[Array, "r"]
    kv_up: Float[Array, "kv r"]
    o_proj: Float[Array, "d hv"]
    q_proj: Float[Array, "qc d"] | None = None
    q_down: Float[Array, "n d"] | None = None
    q_down_norm: Float[Array, "n"] | None = None
    q_up: Float[Array, "qc n"] | None = None


@struct.dataclass
class DenseWeights:
    """Of `Dense`."""

    gate_proj: Float[Array, "f d"]
    up_proj: Float[Array, "f d"]
    down_proj: Float[Array, "d f"]


@struct.dataclass
class ExpertWeights:
    """Of `Experts`; `e` experts of width `f` over inputs of width `i`, the head's or the latent one.

    router_bias: float32, added to the scores for the choice alone.
    """

    router: Float[Array, "e d"]
    up_proj: Float[Array, "e f i"]
    down_proj: Float[Array, "e i f"]
    shared_up_proj: Float[Array, "s d"]
    shared_down_proj: Float[Array, "d s"]
    gate_proj: Float[Array, "e f i"] | None = None
    shared_gate_proj: Float[Array, "s d"] | None = None
    router_bias: Float[Array, "e"] | None = None
    shared_gate: Float[Array, "1 d"] | None = None
    latent_down: Float[Array, "i d"] | None = None
    latent_up: Float[Array, "d i"] | None = None


@struct.dataclass
class MtpWeights:
    """What training changes, and, while the layer reads them (`MtpParams.with_rows`), the policy's own at the end.

    embed_norm, hidden_norm: of what `input_proj` reads. attn_norm, mlp_norm: of what attention and feed-forward read.
    """

    embed_norm: Float[Array, "d"]
    hidden_norm: Float[Array, "d"]
    input_proj: Float[Array, "d 2*d"]
    attn_norm: Float[Array, "d"]
    attention: GroupedWeights | LatentWeights
    mlp_norm: Float[Array, "d"]
    feed_forward: DenseWeights | ExpertWeights
    final_norm: Float[Array, "d"]
    lm_head: Float[Array, "dv d"] | None = None
    policy_norm: Float[Array, "d"] | None = None


@struct.dataclass
class MtpParams:
    """`target_ids[i]` is the policy's token that entry `i` of the draft logits stands for, int32.

    lm_head, policy_norm: the policy's output rows of these tokens and its final norm, which training of the head
        leaves alone; None until the policy is known (`heads.for_policy`).
    """

    weights: MtpWeights
    target_ids: Int[Array, "dv"]
    lm_head: Float[Array, "dv d"] | None = None
    policy_norm: Float[Array, "d"] | None = None

    def embedding(self, policy: Float[Array, "v d"]) -> Float[Array, "v d"]:
        """The embedding that the head reads: the policy's."""
        return policy

    def with_rows(self, weights: Any) -> Any:
        """Weights of this head with what is the policy's."""
        if self.lm_head is None or self.policy_norm is None:
            raise ValueError("the draft head has no output rows; give it the policy's (`heads.for_policy`)")
        shared = jax.lax.stop_gradient((self.lm_head, self.policy_norm))
        return replace(weights, lm_head=shared[0], policy_norm=shared[1])

    def with_policy(self, policy: PolicyParams) -> "MtpParams":
        """This head on a policy, in the head's element type."""
        norm, head = head_weights(policy)
        dtype = self.weights.final_norm.dtype
        return replace(self, lm_head=head[self.target_ids].astype(dtype), policy_norm=norm.astype(dtype))


_KINDS: dict[type, type] = {
    GroupedAttention: GroupedWeights,
    LatentAttention: LatentWeights,
    Dense: DenseWeights,
    Experts: ExpertWeights,
}


Shapes = dict[str, tuple[int, ...]]


def _latent_shapes(attention: LatentAttention, d: int) -> Shapes:
    heads, rank = attention.num_heads, attention.kv_rank
    shapes: Shapes = {
        "kv_down": (rank + attention.rope_width, d),
        "kv_norm": (rank,),
        "kv_up": (heads * (attention.nope_width + attention.value_width), rank),
        "o_proj": (d, heads * attention.value_width),
    }
    queries, inner = heads * (attention.nope_width + attention.rope_width), attention.q_rank
    if not inner:
        return shapes | {"q_proj": (queries, d)}
    return shapes | {"q_down": (inner, d), "q_down_norm": (inner,), "q_up": (queries, inner)}


def _attention_shapes(attention: Attention, d: int) -> Shapes:
    if isinstance(attention, LatentAttention):
        return _latent_shapes(attention, d)
    c = attention.head_dim
    heads, kv_heads = attention.num_heads * c, attention.num_kv_heads * c
    shapes: Shapes = {
        "q_proj": (heads * 2 if attention.gate else heads, d),
        "k_proj": (kv_heads, d),
        "v_proj": (kv_heads, d),
        "o_proj": (d, heads),
    }
    if attention.qk_norm:
        shapes |= {"q_norm": (c,), "k_norm": (c,)}
    if attention.bias:
        shapes |= {"q_bias": (heads,), "k_bias": (kv_heads,), "v_bias": (kv_heads,)}
    return shapes


def _feed_forward_shapes(kind: FeedForward, d: int) -> Shapes:
    if isinstance(kind, Dense):
        return {"gate_proj": (kind.width, d), "up_proj": (kind.width, d), "down_proj": (d, kind.width)}
    inner, shared = kind.latent_width or d, kind.shared_width
    shapes: Shapes = {
        "router": (kind.count, d),
        "up_proj": (kind.count, kind.width, inner),
        "down_proj": (kind.count, inner, kind.width),
        "shared_up_proj": (shared, d),
        "shared_down_proj": (d, shared),
    }
    if kind.gated:
        shapes |= {"gate_proj": (kind.count, kind.width, inner), "shared_gate_proj": (shared, d)}
    if kind.sigmoid:
        shapes |= {"router_bias": (kind.count,)}
    if kind.shared_gate:
        shapes |= {"shared_gate": (1, d)}
    return shapes | ({"latent_down": (inner, d), "latent_up": (d, inner)} if kind.latent_width else {})


def weight_shapes(config: MtpConfig) -> Shapes:
    """Shape of every array of `MtpWeights` that is the head's own, by field name; fields of parts after a dot."""
    d = config.hidden_size
    parts = {
        "attention": _attention_shapes(config.attention, d),
        "feed_forward": _feed_forward_shapes(config.feed_forward, d),
    }
    norms = ("embed_norm", "hidden_norm", "attn_norm", "mlp_norm", "final_norm")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (d,)) | {"input_proj": (d, 2 * d)}
    return shapes | {f"{part}.{name}": shape for part, found in parts.items() for name, shape in found.items()}


def as_weights(config: MtpConfig, arrays: dict[str, Array]) -> MtpWeights:
    """Weights from arrays by the names of `weight_shapes`."""

    def part(name: str) -> dict[str, Array]:
        prefix = f"{name}."
        return {field.removeprefix(prefix): x for field, x in arrays.items() if field.startswith(prefix)}

    own = {name: x for name, x in arrays.items() if "." not in name}
    attention = _KINDS[type(config.attention)](**part("attention"))
    feed_forward = _KINDS[type(config.feed_forward)](**part("feed_forward"))
    return MtpWeights(**own, attention=attention, feed_forward=feed_forward)


def _start(key: Any, name: str, shape: tuple[int, ...], config: MtpConfig) -> Array:
    """A random kernel, a norm that changes nothing, or a bias of zeros."""
    dtype = jnp.dtype(config.dtype)
    if len(shape) == 1:
        is_one = name.endswith("norm") and not config.layout.zero_centred
        return jnp.full(shape, 1 if is_one else 0, jnp.float32 if name.endswith("router_bias") else dtype)
    if len(shape) == 2:
        return init_kernel(key, shape, dtype)
    return jnp.stack([init_kernel(k, shape[1:], dtype) for k in jax.random.split(key, shape[0])])


_MLP = ("gate_proj", "up_proj", "down_proj")


def _from_policy(config: MtpConfig, policy: PolicyParams) -> dict[str, Array]:
    """The policy's last layer and final norm by our names, norms as the head has them."""
    layer, centre = policy.layers[-1], 1 if config.layout.zero_centred else 0
    found = {"final_norm": policy.final_norm}
    for name, x in vars(layer).items():
        if x is None:
            continue
        part = "" if name in ("attn_norm", "mlp_norm") else "feed_forward." if name in _MLP else "attention."
        found[part + name] = x
    return {name: x - jnp.asarray(centre, x.dtype) if name.endswith("norm") else x for name, x in found.items()}


def init_mtp(
    key: Any, config: MtpConfig, target_ids: np.ndarray | None = None, policy: PolicyParams | None = None
) -> MtpParams:
    """A new head: kernels by `init_kernel`, norms that change nothing, biases zero.

    Args:
        key: random key.
        config: the head.
        target_ids: from `eagle3_params.select_draft_vocab`; None where the head proposes the whole vocabulary.
        policy: where given, all arrays start as those of its last layer that have the same shape, and it lends what
            is its own.
    """
    ids = chosen_ids(target_ids, config.draft_vocab_size, config.vocab_size)
    shapes = weight_shapes(config)
    keys = jax.random.split(key, len(shapes))
    arrays = {name: _start(k, name, shape, config) for (name, shape), k in zip(shapes.items(), keys, strict=True)}
    if policy is None:
        return MtpParams(as_weights(config, arrays), ids)
    start = {name: x for name, x in _from_policy(config, policy).items() if x.shape == shapes.get(name)}
    arrays |= {name: x.astype(arrays[name].dtype) for name, x in start.items()}
    return MtpParams(as_weights(config, arrays), ids).with_policy(policy)
