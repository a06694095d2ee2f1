"""Function-preserving expansion of a policy (Net2Net, Chen, Goodfellow and Shlens, arXiv 1511.05641).

The expanded policy has the cost of its shape and the logits of the small one:

- Residual stream: `d` channels hold the small policy's, channel `d` a constant, the others zero. Norms over `D`
  channels have weights times `sqrt(d / D)`, and an epsilon that makes up for both the zeros and the constant.
- Attention: channel `i` of the half-split rotation stays channel `i` of its half, with the base of the
  rotation raised to `C / c`. Norms of queries and keys make up for the wider mean and for the scale `1 / sqrt(C)`.
  New query heads write nothing; key/value heads are copied where fewer query heads may share one.
- Depth: new layers write nothing to the residual stream. MLP: neither do new units.
- Vocabulary: rows of new ids in the output projection read the constant channel alone, so that their logit is
  `-2**29 * constant / rms`, with the root mean square of the small residual stream before the final norm:
  about -2**20 / rms at width 128.

All of this is exact in real arithmetic. What may have any value is random, so that no product is cheaper than
in a trained policy. In float32 logits agree to about 1e-5. In bfloat16 the weights are rounded anew: the logits are
off by at most twice what rounding costs the small policy, so tokens differ where two were nearly level.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.expansion_shapes import (
    Channels,
    Shape,
    expanded_config,
    head_channels,
    place_layers,
    policy_heads,
    residual_constant,
)
from specrl_jax.models.params import LayerParams, PolicyParams, layer_shapes
from specrl_jax.models.policy import head_weights

# Logit of a new id: normalised constant times both. Each fits float16, in which others may run the policy.
_NORM_OF_CONSTANT, _HEAD_OF_CONSTANT = 2.0**14, -(2.0**15)
_ROWS_AT_ONCE = 64


def random_kernel(key: Any, shape: tuple[int, int], dtype: Any) -> Float[Array, "o i"]:
    """A kernel of variance 1/fan-in."""
    rows, columns = shape

    def row(key: Any) -> Float[Array, "i"]:
        return jax.random.normal(key, (columns,), dtype) * columns**-0.5

    # All at once, the bits would take several times the memory of the kernel.
    return lax.map(row, jax.random.split(key, rows), batch_size=_ROWS_AT_ONCE)


def write_block(
    base: Float[Array, "o i"],
    old: Float[Array, "p j"],
    first_input: int = 0,
    outputs: Channels | None = None,
    scale: float = 1.0,
) -> Float[Array, "o i"]:
    """`base` with `old`, times `scale`, from input `first_input` on: in its first outputs, or where `outputs` says."""
    value = (old.astype(jnp.float32) * scale).astype(base.dtype)
    inputs = slice(first_input, first_input + old.shape[1])
    if outputs is None:
        return base.at[: old.shape[0], inputs].set(value)
    return base.at[outputs.new, inputs].set(value[outputs.old])


def clear_block(
    base: Float[Array, "o i"], inputs: int, outputs: np.ndarray, first_input: int = 0
) -> Float[Array, "o i"]:
    """`base` with zeros at `inputs` inputs from `first_input` on, of the given outputs."""
    return base.at[outputs, first_input : first_input + inputs].set(jnp.zeros((), base.dtype))


def write_inputs(base: Float[Array, "o i"], old: Float[Array, "p j"], inputs: Channels | None) -> Float[Array, "o i"]:
    """A kernel into the residual stream: `old` into its first channels from its inputs' new places, zeros elsewhere."""
    zeros, value = jnp.zeros_like(base), old.astype(base.dtype)
    if inputs is None:
        return zeros.at[: old.shape[0], : old.shape[1]].set(value)
    return zeros.at[: old.shape[0], inputs.new].set(value[:, inputs.old])


def widen_norm(old: Float[Array, "d"], width: int, dtype: Any, *, reads_constant: bool = False) -> Float[Array, "w"]:
    """Weights of a norm over `width` channels; channel `d`, the constant one, is shut out unless it is read."""
    scale = (old.shape[0] / width) ** 0.5
    wide = jnp.ones((width,), jnp.float32).at[: old.shape[0]].set(old.astype(jnp.float32) * scale)
    constant = _NORM_OF_CONSTANT * scale if reads_constant else 0.0
    return wide.at[old.shape[0]].set(constant).astype(dtype)


def widen_output(key: Any, old: Float[Array, "v d"], width: int, vocab_size: int, dtype: Any) -> Float[Array, "x w"]:
    """An output projection whose new ids read the constant channel, and whose old ids do not."""
    v, d = old.shape
    wide = random_kernel(key, (vocab_size, width), dtype)
    wide = wide.at[v:, :d].set(jnp.zeros((), dtype)).at[:v, :d].set(old.astype(dtype))
    constant = jnp.where(jnp.arange(vocab_size) < v, 0.0, _HEAD_OF_CONSTANT)
    return wide.at[:, d].set(constant.astype(dtype))


@functools.partial(jax.jit, static_argnums=(1,))
def _identity_layer(key: Any, config: PolicyConfig) -> LayerParams:
    """A layer that writes nothing to the residual stream and costs what any layer costs."""
    dtype, shapes = jnp.dtype(config.dtype), layer_shapes(config)
    arrays = {}
    for array_key, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True):
        if len(shape) == 1:
            arrays[name] = jnp.ones(shape, dtype)
        elif name in ("o_proj", "down_proj"):
            arrays[name] = jnp.zeros(shape, dtype)
        else:
            arrays[name] = random_kernel(array_key, (shape[0], shape[1]), dtype)
    return LayerParams(**arrays)


def _widen_head_norm(old: Float[Array, "c"], width: int, scale: float, dtype: Any) -> Float[Array, "w"]:
    half = old.shape[0] // 2
    value = old.astype(jnp.float32) * scale
    wide = jnp.ones((width,), jnp.float32).at[:half].set(value[:half])
    return wide.at[width // 2 : width // 2 + half].set(value[half:]).astype(dtype)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _expand_layer(key: Any, layer: LayerParams, source: PolicyConfig, target: PolicyConfig) -> LayerParams:
    new = _identity_layer(key, target)
    assert layer.q_norm is not None
    assert layer.k_norm is not None
    width, dtype = target.hidden_size, jnp.dtype(target.dtype)
    queries, keys = head_channels(policy_heads(source), policy_heads(target))
    share = source.head_dim / target.head_dim
    # A norm of heads is blind to their scale but for its epsilon, which is the residual stream's in every config.
    scale = (target.rms_norm_eps / source.rms_norm_eps / share) ** 0.5

    def normalised(base: Array, old: Array, channels: Channels) -> Array:
        return write_block(clear_block(base, source.hidden_size, channels.whole), old, outputs=channels, scale=scale)

    return LayerParams(
        attn_norm=widen_norm(layer.attn_norm, width, dtype),
        q_proj=normalised(new.q_proj, layer.q_proj, queries),
        k_proj=normalised(new.k_proj, layer.k_proj, keys),
        v_proj=write_block(new.v_proj, layer.v_proj, outputs=keys),
        o_proj=write_inputs(new.o_proj, layer.o_proj, queries),
        mlp_norm=widen_norm(layer.mlp_norm, width, dtype),
        gate_proj=write_block(new.gate_proj, layer.gate_proj),
        up_proj=write_block(new.up_proj, layer.up_proj),
        down_proj=write_inputs(new.down_proj, layer.down_proj, None),
        # The mean over more channels wants sqrt(share) in both; 1 / sqrt(head_dim) takes it back in one of them.
        q_norm=_widen_head_norm(layer.q_norm, target.head_dim, 1.0, dtype),
        k_norm=_widen_head_norm(layer.k_norm, target.head_dim, share**0.5, dtype),
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _expand_embedding(embed: Float[Array, "v d"], target: PolicyConfig, constant: float) -> Float[Array, "x w"]:
    """New ids repeat the old ones, so that a prompt of any ids has a residual stream of usual size."""
    v, d = embed.shape
    dtype = jnp.dtype(target.dtype)
    rows = embed.astype(dtype)[jnp.arange(target.vocab_size, dtype=jnp.int32) % v]
    wide = jnp.zeros((target.vocab_size, target.hidden_size), dtype).at[:, :d].set(rows)
    return wide.at[:, d].set(jnp.asarray(constant, dtype))


@functools.partial(jax.jit, static_argnums=(3,))
def _expand_head(
    key: Any, head: Float[Array, "v d"], final_norm: Float[Array, "d"], target: PolicyConfig
) -> tuple[Float[Array, "w"], Float[Array, "x w"]]:
    dtype = jnp.dtype(target.dtype)
    wide = widen_output(key, head, target.hidden_size, target.vocab_size, dtype)
    return widen_norm(final_norm, target.hidden_size, dtype, reads_constant=True), wide


def expand_policy(
    key: Any,
    params: PolicyParams,
    config: PolicyConfig,
    shape: Shape,
    boundaries: Sequence[tuple[int, int]] = (),
) -> tuple[PolicyParams, PolicyConfig]:
    """A policy of a larger shape with the same logits over the old ids and none to speak of over the new ones.

    Every layer is made by a jitted function, on the device and in the type of the target: beside the result it takes
    about twice the memory of the largest array. The whole may be traced as well.

    Args:
        key: random key of the weights that change nothing.
        params, config: a Qwen3 policy, tied or untied.
        shape: sizes, none below the policy's; see `expansion_shapes.SHAPES`.
        boundaries: pairs of residual boundaries `(small, large)` at which both streams are to be the same.

    Returns:
        Parameters and architecture of the expanded policy, untied.

    Raises:
        InputError: the policy is of another family, or does not fit; see `expanded_config` and `place_layers`.
    """
    target = expanded_config(config, shape)
    placed = place_layers(config.num_layers, target.num_layers, boundaries)
    head_key, *layer_keys = jax.random.split(key, 1 + target.num_layers)
    final_norm, head = head_weights(params)
    final_norm, head = _expand_head(head_key, head, final_norm, target)
    layers = tuple(
        _identity_layer(layer_key, target)
        if layer is None
        else _expand_layer(layer_key, params.layers[layer], config, target)
        for layer_key, layer in zip(layer_keys, placed, strict=True)
    )
    embed = _expand_embedding(params.embed, target, residual_constant(config))
    return PolicyParams(embed=embed, layers=layers, final_norm=final_norm, head=head), target
