"""What native multi-token-prediction heads are made of: layouts, and kinds of attention and of feed-forward."""

from dataclasses import dataclass, field
from typing import Literal

from specrl_jax.errors import InputError
from specrl_jax.models.config import Dtype, RopeConfig

LayoutName = Literal["mimo", "qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h", "deepseek_v3"]


@dataclass(frozen=True)
class Layout:
    """How the heads of a family of policies begin and end, as vLLM runs them.

    embedding_first: the projection reads the embedding before the hidden state, else after it.
    zero_first: slot 0 reads zeros for its embedding.
    normed_features: the hidden state is the policy's last residual stream after the policy's final norm, else before.
    zero_centred: norms multiply by `1 + w`, those of queries and keys too.
    """

    name: LayoutName
    embedding_first: bool = True
    zero_first: bool = False
    normed_features: bool = True
    zero_centred: bool = False


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("mimo", embedding_first=False, zero_first=True, normed_features=False),
        Layout("qwen3_5", zero_centred=True),
        Layout("qwen3_5_moe", zero_centred=True),
        Layout("qwen3_next", zero_centred=True),
        Layout("nemotron_h"),
        Layout("deepseek_v3", zero_first=True),
    )
}


def _check_sizes(kind: str, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"mtp head {kind} {name} is {size}; it must be at least 1")


@dataclass(frozen=True)
class GroupedAttention:
    """Queries over shared keys and values.

    rotary_width: channels of a head that are rotated, its first ones; 0 for none.
    bias: of queries, keys and values (Qwen2). qk_norm: of queries and keys (Qwen3).
    gate: what is attended to is multiplied by a sigmoid of further outputs of the query projection (Qwen3-Next).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_width: int
    bias: bool = False
    qk_norm: bool = False
    gate: bool = False

    def __post_init__(self) -> None:
        _check_sizes("attention", {name: getattr(self, name) for name in ("num_heads", "num_kv_heads", "head_dim")})
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"mtp head has {self.num_heads} heads over {self.num_kv_heads} of keys and values; "
                "choose a number that divides them"
            )
        if self.rotary_width % 2 or not 0 <= self.rotary_width <= self.head_dim:
            raise InputError(
                f"mtp head rotates {self.rotary_width} of {self.head_dim} channels; "
                "rotary embeddings need an even number of them"
            )


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads from one short vector.

    q_rank: width that queries pass through; 0 for none. kv_rank: width of that vector.
    nope_width, rope_width: channels of a query or key without and with rotation, whose pairs lie side by side.
    value_width: channels of a head's values.
    """

    num_heads: int
    q_rank: int
    kv_rank: int
    nope_width: int
    rope_width: int
    value_width: int

    def __post_init__(self) -> None:
        names = ("num_heads", "kv_rank", "nope_width", "rope_width", "value_width")
        _check_sizes("attention", {name: getattr(self, name) for name in names})
        if self.q_rank < 0 or self.rope_width % 2:
            raise InputError(
                f"mtp head has q_rank {self.q_rank} and rotates {self.rope_width} channels; "
                "the first is at least 0, and rotary embeddings need an even number"
            )

    @property
    def num_kv_heads(self) -> int:
        """The cache has the vector that all heads share, and the rotated channels of the keys, which they share too."""
        return 1

    @property
    def head_dim(self) -> int:
        """Width of both."""
        return self.kv_rank + self.rope_width


@dataclass(frozen=True)
class Dense:
    """A gated MLP of this width."""

    width: int

    def __post_init__(self) -> None:
        _check_sizes("MLP", {"width": self.width})


@dataclass(frozen=True)
class Experts:
    """A mixture of MLPs of which every token reads a few, and one that all read.

    count, chosen: experts, and how many a token reads. width, shared_width: of an expert, and of the shared one.
    gated: MLPs are gated by silu, else their activation is the square of relu (Nemotron).
    sigmoid: scores are sigmoids and chosen after a bias is added to them (DeepSeek-V3), else a softmax.
    groups, chosen_groups: experts are chosen from the groups whose two best scores add up to most.
    renormalise: the shares of the chosen ones add up to 1. scale: of what they say.
    shared_gate: what the shared one says is multiplied by a sigmoid (Qwen3-Next).
    latent_width: experts work in this width (Nemotron-3 Super); 0 for that of the head.
    stacked: all experts lie in one tensor of the folder.
    """

    count: int
    chosen: int
    width: int
    shared_width: int
    gated: bool = True
    sigmoid: bool = False
    groups: int = 1
    chosen_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0
    shared_gate: bool = False
    latent_width: int = 0
    stacked: bool = False

    def __post_init__(self) -> None:
        names = ("count", "chosen", "width", "shared_width", "groups", "chosen_groups")
        _check_sizes("experts", {name: getattr(self, name) for name in names})
        if self.count < 2:
            raise InputError("mtp head has 1 expert; give it two at least, or an MLP")
        if self.count % self.groups or self.chosen_groups > self.groups:
            raise InputError(
                f"mtp head has {self.count} experts in {self.groups} groups, {self.chosen_groups} of them chosen; "
                "choose a number of groups that divides the experts, and no more than there are"
            )
        if self.chosen > self.count // self.groups * self.chosen_groups:
            raise InputError(
                f"mtp head reads {self.chosen} of {self.count} experts, more than lie in {self.chosen_groups} of "
                f"{self.groups} groups; lower it"
            )
        if self.sigmoid and self.count // self.groups < 2:
            raise InputError(f"mtp head has {self.groups} groups of 1 expert; groups need two of them at least")


Attention = GroupedAttention | LatentAttention
FeedForward = Dense | Experts


@dataclass(frozen=True)
class MtpConfig:
    """Architecture of a native multi-token-prediction head of one layer.

    vocab_size: the policy's vocabulary. draft_vocab_size: the tokens that the head can propose.
    boundary: the policy's last residual-stream boundary, the number of its layers.
    rms_norm_eps: of the head's norms, and of the policy's final norm.
    """

    layout: Layout
    attention: Attention
    feed_forward: FeedForward
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    boundary: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 4096
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        names = ("hidden_size", "vocab_size", "draft_vocab_size", "boundary", "max_position_embeddings")
        for name in names:
            if getattr(self, name) < 1:
                raise InputError(f"mtp head {name} is {getattr(self, name)}; it must be at least 1")
        if self.draft_vocab_size > self.vocab_size:
            raise InputError(
                f"draft vocabulary of {self.draft_vocab_size} is larger than the policy's {self.vocab_size}; reduce it"
            )

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The one boundary that the head reads."""
        return (self.boundary,)

    @property
    def num_heads(self) -> int:
        """Heads of queries."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values in the cache."""
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head of keys or values in the cache."""
        return self.attention.head_dim
