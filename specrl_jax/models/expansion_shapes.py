"""Shapes that a small policy and its draft head can be expanded to, and where their parts go in them."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from specrl_jax.errors import InputError
from specrl_jax.models.config import Dtype, PolicyConfig, RopeConfig
from specrl_jax.models.presets import PRESETS
from specrl_jax.models.rope import inverse_frequencies

# Hugging Face models raise the base to powers in float32.
_LARGEST_THETA = 1e38


@dataclass(frozen=True)
class Shape:
    """Sizes of an expanded policy, untied, and of its draft head, whose layer has the sizes of a policy's layer.

    draft_vocab_size: tokens that the draft head can propose. The other fields are those of `PolicyConfig`.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 4096
    dtype: Dtype = "float32"


def _like(preset: str) -> Shape:
    policy = PRESETS[preset]
    return Shape(
        vocab_size=policy.vocab_size,
        draft_vocab_size=32_000,
        hidden_size=policy.hidden_size,
        intermediate_size=policy.intermediate_size,
        num_layers=policy.num_layers,
        num_heads=policy.num_heads,
        num_kv_heads=policy.num_kv_heads,
        head_dim=policy.head_dim,
        max_position_embeddings=policy.max_position_embeddings,
        dtype=policy.dtype,
    )


# A draft head of Qwen3-8B proposes 32,000 of 151,936 tokens, about as many of 16,384 as 3,456. The last is for trying
# things out, with any policy that train_grpo makes from nothing: it compiles quickly, and its times say nothing.
SHAPES: dict[str, Shape] = {
    "25m": Shape(16_384, 3_456, 384, 1024, 8, 8, 4, 64),
    "deep-95m": Shape(16_384, 3_456, 448, 1280, 36, 8, 2, 64),
    "0.6b": _like("qwen3-0.6b"),
    "1.7b": _like("qwen3-1.7b"),
    "4b": _like("qwen3-4b"),
    "8b": _like("qwen3-8b"),
    "toy": Shape(4096, 2048, 288, 800, 4, 8, 4, 32),
}


class Heads(NamedTuple):
    """Query heads, key/value heads and their width."""

    query: int
    kv: int
    width: int


class Channels(NamedTuple):
    """Channels of attention heads: channel `old[i]` of the source becomes channel `new[i]` of the target.

    whole: all channels of the target's heads that hold one of the source.
    """

    old: np.ndarray
    new: np.ndarray
    whole: np.ndarray


def _channels(pairs: Sequence[tuple[int, int]], width: int, wide: int) -> Channels:
    """Channels of `(source head, target head)` pairs; rotation pairs channel `i` with channel `i + width / 2`."""
    channels = np.concatenate([np.arange(width // 2), wide // 2 + np.arange(width // 2)])
    return Channels(
        old=np.concatenate([old * width + np.arange(width) for old, _ in pairs]),
        new=np.concatenate([new * wide + channels for _, new in pairs]),
        whole=np.concatenate([new * wide + np.arange(wide) for _, new in pairs]),
    )


def head_channels(source: Heads, target: Heads) -> tuple[Channels, Channels]:
    """Where query heads go, and where key/value heads go.

    A key/value head is copied where the target lets fewer query heads share one than the source.

    Raises:
        InputError: the target has too few key/value heads for that.
    """
    shared, room = source.query // source.kv, target.query // target.kv
    copies = -(-shared // room)
    if source.kv * copies > target.kv:
        raise InputError(
            f"num_kv_heads {target.kv} of the target cannot serve {source.query} query heads of the source, which read "
            f"{source.kv} key/value heads; choose a target with at least {source.kv * copies}"
        )
    queries = [
        (kv * shared + i, (kv * copies + i // room) * room + i % room) for kv in range(source.kv) for i in range(shared)
    ]
    keys = [(kv, kv * copies + copy) for kv in range(source.kv) for copy in range(copies)]
    return _channels(queries, source.width, target.width), _channels(keys, source.width, target.width)


def place_layers(
    num_layers: int, target_layers: int, boundaries: Sequence[tuple[int, int]] = ()
) -> tuple[int | None, ...]:
    """The layer of the source that stands at every layer of the target, None for one that changes nothing.

    Args:
        num_layers, target_layers: depths of source and target.
        boundaries: pairs `(b, c)`, ascending: the residual stream at boundary `c` of the target is that at `b`.

    Raises:
        InputError: more layers lie between two boundaries of the source than between those of the target.
    """
    placed: list[int | None] = []
    ends = [(0, 0), *boundaries, (num_layers, target_layers)]
    for (low, new_low), (high, new_high) in itertools.pairwise(ends):
        fresh = new_high - new_low - (high - low)
        if fresh < 0:
            raise InputError(
                f"num_layers {target_layers} of the target leaves {new_high - new_low} layers for the layers {low} to "
                f"{high} of the source, between boundaries that the draft head reads; choose a deeper target"
            )
        placed += [*range(low, high), *[None] * fresh]
    return tuple(placed)


def widened_rope(rope: RopeConfig, width: int, wide: int) -> RopeConfig:
    """The rotary embedding of heads of width `wide` whose first `width / 2` frequencies are those of `rope`.

    Frequency `i` is `theta ** (-2 i / width)`, so `theta` is raised to `wide / width`.

    Raises:
        InputError: the base becomes too large for float32, or a length extension depends on the width.
    """
    exponent = wide / width
    if exponent * math.log(rope.theta) > math.log(_LARGEST_THETA):
        raise InputError(
            f"rope theta {rope.theta:g} at head_dim {width} becomes too large for float32 at head_dim {wide}; "
            "choose a source with wider heads"
        )
    widened = replace(rope, theta=rope.theta**exponent)
    old, factor = inverse_frequencies(rope, width)
    new, new_factor = inverse_frequencies(widened, wide)
    if factor != new_factor or not np.allclose(new[: width // 2], old, rtol=1e-6, atol=0.0):
        raise InputError(
            f"rope kind {rope.kind!r} has other frequencies at head_dim {wide} than at {width}; "
            "choose a source without that length extension"
        )
    return widened


def residual_constant(config: PolicyConfig) -> float:
    """What the constant residual channel holds: a power of two whose square `rms_norm_eps` can give up.

    Its square is at most a sixteenth of `hidden_size * rms_norm_eps`, so that the epsilon stays positive
    also for a draft head with a smaller one.
    """
    if config.rms_norm_eps <= 0.0:
        raise InputError(
            f"policy rms_norm_eps is {config.rms_norm_eps}; the constant residual channel takes its place in every "
            "norm, so choose a source where it is positive"
        )
    return 2.0 ** math.floor(math.log2(math.sqrt(config.hidden_size * config.rms_norm_eps) / 4.0))


def widened_eps(eps: float, width: int, wide: int, constant: float) -> float:
    """Epsilon of a norm over `wide` channels, of which all but `width` are zero and one is `constant`.

    With it the sum of squares and epsilons is that of the source: `wide * widened_eps + constant**2 = width * eps`.
    """
    widened = (width * eps - constant**2) / wide
    if widened <= 0.0:
        raise InputError(
            f"rms_norm_eps {eps} of the draft head is too small for the policy's constant residual channel of "
            f"{constant}; choose a head with the policy's rms_norm_eps"
        )
    return widened


def check_room(source: dict[str, int], target: dict[str, int]) -> None:
    """Raise InputError where a size of the source exceeds the target's, by name."""
    for name, size in source.items():
        if size > target[name]:
            raise InputError(f"{name} is {size} in the source and {target[name]} in the target; choose a larger target")


def expanded_config(config: PolicyConfig, shape: Shape) -> PolicyConfig:
    """The architecture of a policy expanded to a shape.

    Raises:
        InputError: the policy is no Qwen3, or a size does not fit the shape; names it.
    """
    if config.family != "qwen3":
        raise InputError(f"policy family is {config.family!r}; only 'qwen3' policies can be expanded")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    check_room(*({name: getattr(sizes, name) for name in names} for sizes in (config, shape)))
    if config.hidden_size == shape.hidden_size:
        raise InputError(
            f"hidden_size is {config.hidden_size} in the source and in the target, which leaves no constant residual "
            "channel; choose a wider target"
        )
    head_channels(policy_heads(config), policy_heads(shape))
    return PolicyConfig(
        family=config.family,
        **{name: getattr(shape, name) for name in names},
        rms_norm_eps=widened_eps(config.rms_norm_eps, config.hidden_size, shape.hidden_size, residual_constant(config)),
        tie_embeddings=False,
        max_position_embeddings=max(config.max_position_embeddings, shape.max_position_embeddings),
        rope=widened_rope(config.rope, config.head_dim, shape.head_dim),
        dtype=shape.dtype,
    )


def policy_heads(sizes: PolicyConfig | Shape) -> Heads:
    """Head counts and width."""
    return Heads(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
