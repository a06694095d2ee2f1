"""Function-preserving expansion of an EAGLE-3 head, beside that of its policy (`models/expansion.py`).

The head's own residual stream carries the policy's constant channel: `fc` copies it from the first feature, the
layer writes nothing to it, so that it is there again when the hidden state is fed back. Entries of the draft
vocabulary that are new stand for new ids of the policy and read that channel alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specrl_jax.drafters.eagle3_params import (
    Eagle3Config,
    Eagle3Params,
    Eagle3Weights,
    default_boundaries,
    weight_shapes,
)
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.expansion import (
    clear_block,
    expand_policy,
    random_kernel,
    widen_norm,
    widen_output,
    write_block,
    write_inputs,
)
from specrl_jax.models.expansion_shapes import (
    Heads,
    Shape,
    check_room,
    expanded_config,
    head_channels,
    place_layers,
    residual_constant,
    widened_eps,
    widened_rope,
)
from specrl_jax.models.params import PolicyParams


def boundary_pairs(config: Eagle3Config, shape: Shape) -> tuple[tuple[int, int], ...]:
    """The boundaries that a head reads, each with its place in the expanded policy."""
    return tuple(zip(config.boundaries, default_boundaries(shape.num_layers), strict=True))


def expanded_head_config(config: Eagle3Config, policy: PolicyConfig, shape: Shape) -> Eagle3Config:
    """The architecture of a head whose policy is expanded to a shape.

    Raises:
        InputError: the head is another policy's, or a size does not fit the shape; names it.
    """
    target = expanded_config(policy, shape)
    if not config.plain:
        raise InputError("only a plain EAGLE-3 head of three features can be expanded; leave its variants out")
    for name in ("hidden_size", "vocab_size"):
        if getattr(config, name) != getattr(policy, name):
            raise InputError(
                f"draft head has {name} {getattr(config, name)} and the policy {getattr(policy, name)}; "
                "use that policy's head"
            )
    names = ("draft_vocab_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    check_room(*({f"draft head {name}": getattr(sizes, name) for name in names} for sizes in (config, shape)))
    ids, unused = shape.draft_vocab_size - config.draft_vocab_size, shape.vocab_size - policy.vocab_size
    if ids > unused:
        raise InputError(
            f"draft_vocab_size grows by {ids} and vocab_size by {unused}; new draft tokens need new ids of the policy, "
            "so choose a target with a larger vocabulary"
        )
    head_channels(_heads(config), _heads(shape))
    place_layers(policy.num_layers, shape.num_layers, boundary_pairs(config, shape))
    return Eagle3Config(
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        **{name: getattr(shape, name) for name in names},
        boundaries=default_boundaries(shape.num_layers),
        target_hidden_size=shape.hidden_size,
        rms_norm_eps=widened_eps(config.rms_norm_eps, config.hidden_size, shape.hidden_size, residual_constant(policy)),
        rope=widened_rope(config.rope, config.head_dim, shape.head_dim),
        max_position_embeddings=max(config.max_position_embeddings, target.max_position_embeddings),
        dtype=shape.dtype,
    )


def _heads(sizes: Eagle3Config | Shape) -> Heads:
    return Heads(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)


def _expand_fc(base: Float[Array, "o i"], old: Float[Array, "p j"]) -> Float[Array, "o i"]:
    """Channels that hold something write what the old ones wrote; the first feature's constant is copied."""
    width, old_width = base.shape[0], old.shape[0]
    for i, block in enumerate(jnp.split(old, 3, axis=1)):
        base = clear_block(base, old_width + 1, np.arange(width), first_input=i * width)
        base = write_block(base, block, first_input=i * width)
    return base.at[old_width, old_width].set(jnp.ones((), base.dtype))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _expand_weights(key: Any, old: Eagle3Weights, source: Eagle3Config, target: Eagle3Config) -> Eagle3Weights:
    assert old.fc is not None
    assert old.lm_head is not None
    width, old_width, dtype = target.hidden_size, source.hidden_size, jnp.dtype(target.dtype)
    shapes = {name: (shape[0], shape[1]) for name, shape in weight_shapes(target).items() if len(shape) == 2}
    array_keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    new = {name: random_kernel(array_keys[name], shape, dtype) for name, shape in shapes.items() if name != "lm_head"}
    queries, keys = head_channels(_heads(source), _heads(target))

    def reads_both(base: Array, old: Array, channels: Any, scale: float = 1.0) -> Array:
        """A kernel over embedding and hidden state."""
        for i, block in enumerate(jnp.split(old, 2, axis=1)):
            base = write_block(base, block, first_input=i * width, outputs=channels, scale=scale)
        return base

    # Queries are zero where keys are random; nothing normalises them, so they carry the scale of the attention.
    q_proj = new["q_proj"]
    for first_input in (0, width):
        q_proj = clear_block(q_proj, old_width, queries.whole, first_input)
    return Eagle3Weights(
        fc=_expand_fc(new["fc"], old.fc),
        embed_norm=widen_norm(old.embed_norm, width, dtype),
        hidden_norm=widen_norm(old.hidden_norm, width, dtype),
        q_proj=reads_both(q_proj, old.q_proj, queries, (target.head_dim / source.head_dim) ** 0.5),
        k_proj=reads_both(new["k_proj"], old.k_proj, keys),
        v_proj=reads_both(new["v_proj"], old.v_proj, keys),
        o_proj=write_inputs(new["o_proj"], old.o_proj, queries),
        mlp_norm=widen_norm(old.mlp_norm, width, dtype),
        gate_proj=write_block(new["gate_proj"], old.gate_proj),
        up_proj=write_block(new["up_proj"], old.up_proj),
        down_proj=write_inputs(new["down_proj"], old.down_proj, None),
        final_norm=widen_norm(old.final_norm, width, dtype, reads_constant=True),
        lm_head=widen_output(array_keys["lm_head"], old.lm_head, width, target.draft_vocab_size, dtype),
    )


def expand_head(
    key: Any, params: Eagle3Params, config: Eagle3Config, policy: PolicyConfig, shape: Shape
) -> tuple[Eagle3Params, Eagle3Config]:
    """A head of a larger shape with the same draft logits over the old draft tokens.

    Args:
        key: random key of the weights that change nothing.
        params, config: the head.
        policy: the small policy. Its expansion must be that of `expand_policy` with `boundary_pairs`.
        shape: sizes, none below the head's; its layer gets those of the policy's.

    Raises:
        InputError: see `expanded_head_config`.
    """
    target = expanded_head_config(config, policy, shape)
    fresh = policy.vocab_size + jnp.arange(target.draft_vocab_size - config.draft_vocab_size, dtype=jnp.int32)
    ids = jnp.concatenate([params.target_ids, fresh])
    return Eagle3Params(_expand_weights(key, params.weights, config, target), ids), target


def expand_pair(
    key: Any,
    params: PolicyParams,
    policy: PolicyConfig,
    draft: Eagle3Params,
    head: Eagle3Config,
    shape: Shape,
) -> tuple[PolicyParams, PolicyConfig, Eagle3Params, Eagle3Config]:
    """A policy and its draft head, expanded so that they emit the same tokens with the same drafts accepted.

    Args:
        key: random key of the weights that change nothing.
        params, policy: the policy.
        draft, head: its head.
        shape: sizes of both.

    Raises:
        InputError: one of them does not fit the shape; see `expand_policy` and `expanded_head_config`.
    """
    policy_key, head_key = jax.random.split(key)
    expanded_draft, expanded_head = expand_head(head_key, draft, head, policy, shape)
    expanded, config = expand_policy(policy_key, params, policy, shape, boundary_pairs(head, shape))
    return expanded, config, expanded_draft, expanded_head
