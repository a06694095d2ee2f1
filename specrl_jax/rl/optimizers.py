"""Optimizers by configuration: AdamW and Muon from optax, with warm-up, decay and a global-norm clip."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from specrl_jax.errors import InputError
from specrl_jax.models.numerics import opaque_int
from specrl_jax.parallel.sharding import field_name

# Tables of tokens are no linear maps of activations; Muon leaves them, norms and biases to Adam.
NOT_MUON = ("embed", "head", "norm", "bias", "markov_in", "markov_out", "confidence_kernel")

_NEVER = 2**31 - 1  # updates that are not finite until one is applied nevertheless


@dataclass(frozen=True)
class OptimizerConfig:
    """One optimizer; the policy and the draft head have one each.

    learning_rate: rate at the end of the warm-up.
    name: "adamw" (Loshchilov and Hutter, arXiv 1711.05101) or "muon" (Jordan et al. 2024: matrices move
        along the orthogonalised momentum, scaled by sqrt(max(1, out / in)); embedding, output head,
        norms and biases take Adam steps with Nesterov momentum).
    schedule: what follows the warm-up: "constant", or down to 0 at `total_steps` along a "cosine" or a line.
    warmup_steps: updates over which the rate rises in equal steps; the first already moves.
    total_steps: updates until the rate is 0, warm-up included; read by "cosine" and "linear". None: those of
        the run, see `for_updates`.
    weight_decay: decoupled decay, times the rate; of the matrices only (under "muon", of those it moves).
    clip_norm: gradients of a larger global norm are scaled down to it.
    b1, b2, eps: Adam's moments and the term that keeps its division finite.
    muon_momentum: decay of Muon's momentum.
    adam_learning_rate: rate of what Muon leaves to Adam; None means `learning_rate`.
    """

    learning_rate: float
    name: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    muon_momentum: float = 0.95
    adam_learning_rate: float | None = None

    def __post_init__(self) -> None:
        _check_choice("name", self.name, ("adamw", "muon"))
        _check_choice("schedule", self.schedule, ("constant", "cosine", "linear"))
        for field in ("learning_rate", "clip_norm", "eps", "adam_learning_rate"):
            value = getattr(self, field)
            if value is not None and not 0.0 < value < math.inf:
                raise InputError(f"optimizer {field} is {value}; it must be a number above 0")
        for field in ("b1", "b2", "muon_momentum"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise InputError(f"optimizer {field} is {getattr(self, field)}; it must be at least 0 and below 1")
        for field in ("weight_decay", "warmup_steps"):
            if not 0 <= getattr(self, field) < math.inf:
                raise InputError(f"optimizer {field} is {getattr(self, field)}; it must be a number of at least 0")
        if self.schedule != "constant" and self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise InputError(
                f"optimizer total_steps is {self.total_steps}; schedule {self.schedule} needs more of them "
                f"than the {self.warmup_steps} of the warm-up"
            )

    def for_updates(self, updates: int) -> "OptimizerConfig":
        """This optimizer for a run of so many updates: a rate that decays comes close to 0 at the last one."""
        if self.schedule == "constant" or self.total_steps is not None:
            return self
        return replace(self, total_steps=max(updates, self.warmup_steps) + 1)


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"optimizer {field} is {value!r}; choose one of {', '.join(choices)}")


def learning_rate_schedule(config: OptimizerConfig, peak: float | None = None) -> optax.Schedule:
    """Learning rate of update 0, 1, ...; `peak` replaces the configuration's rate."""
    rate = config.learning_rate if peak is None else peak
    after: optax.Schedule = optax.constant_schedule(rate)
    if config.schedule != "constant":
        if config.total_steps is None:
            raise ValueError(f"schedule {config.schedule} without total_steps; call for_updates first")
        decay_steps = config.total_steps - config.warmup_steps
        if config.schedule == "cosine":
            after = optax.cosine_decay_schedule(rate, decay_steps)
        else:
            after = optax.linear_schedule(rate, 0.0, decay_steps)
    joined = after
    if config.warmup_steps > 1:
        rise = optax.linear_schedule(rate / config.warmup_steps, rate, config.warmup_steps - 1)
        joined = optax.join_schedules([rise, after], [config.warmup_steps])
    # optax's schedules mix integer steps with floats, which strict promotion refuses.
    return lambda step: joined(jnp.asarray(step, jnp.float32))


def muon_parameters(params: Any) -> Any:
    """True for the matrices that Muon moves, by the name of their field; the same structure as `params`."""

    def is_muon(path: tuple[Any, ...], leaf: Array) -> bool:
        name = field_name(path)
        return leaf.ndim == 2 and not name.endswith(NOT_MUON)

    return jax.tree_util.tree_map_with_path(is_muon, params)


def _muon_axes(params: Any) -> Any:
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)  # kernels are `[out, in]`
    return jax.tree.map(lambda is_muon: axes if is_muon else None, muon_parameters(params))


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def _update_rule(config: OptimizerConfig) -> optax.GradientTransformation:
    rate = learning_rate_schedule(config)
    if config.name == "adamw":
        return optax.adamw(
            rate, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=_matrices
        )
    return optax.contrib.muon(
        rate,
        beta=config.muon_momentum,
        eps=config.eps,
        weight_decay=config.weight_decay,
        adam_b1=config.b1,
        adam_b2=config.b2,
        adam_learning_rate=learning_rate_schedule(config, config.adam_learning_rate),
        muon_weight_dimension_numbers=_muon_axes,
    )


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


@struct.dataclass
class OptimizerState:
    """rule: of clip, optimizer and the count of updates left out. master: the parameters in float32 where they
    themselves are narrower, else None."""

    rule: Any
    master: Any


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW or Muon, as an optax transformation that needs `params` in `update`.

    An update whose gradients are not finite is left out and counted (`skipped_updates`).

    Moments and arithmetic are float32 whatever the parameters are (in bfloat16 a second moment with b2 = 0.999 would
    stand still). Of narrower parameters a float32 master moves, which `init` copies from them, and they follow it
    rounded (Micikevicius et al., arXiv 1710.03740, section 3.1): steps far below their last bit add up. Updates are
    float32, and `apply_gradients` adds them.
    """
    rule = optax.chain(optax.clip_by_global_norm(config.clip_norm), _update_rule(config))
    inner = optax.apply_if_finite(rule, max_consecutive_errors=_NEVER)

    def init(params: Any) -> OptimizerState:
        narrow = any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(params))
        # Copies: what an update may overwrite is nobody else's.
        master = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params) if narrow else None
        return OptimizerState(inner.init(_float32(params)), master)

    def update(gradients: Any, state: OptimizerState, params: Any = None) -> tuple[Any, OptimizerState]:
        moved = params if state.master is None else state.master
        # The bias corrections of optax mix integer step counts with floats.
        with jax.numpy_dtype_promotion("standard"):
            updates, rule = inner.update(_float32(gradients), state.rule, moved)
        if state.master is None:
            return updates, OptimizerState(rule, None)
        master = jax.tree.map(jnp.add, moved, updates)
        updates = jax.tree.map(lambda new, old: new - old.astype(jnp.float32), master, params)
        return updates, OptimizerState(rule, master)

    return optax.GradientTransformation(init, update)


def skipped_updates(state: OptimizerState) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Updates that were left out because of their gradients: in all, and without one in between, up to now."""
    return state.rule.total_notfinite, state.rule.notfinite_count


def apply_gradients(
    optimizer: optax.GradientTransformation, params: Any, state: OptimizerState, gradients: Any
) -> tuple[Any, OptimizerState, Float[Array, ""]]:
    """One update.

    Returns:
        New parameters, new optimizer state, and the global norm of the gradients before the clip.
    """
    updates, state = optimizer.update(gradients, state, params)
    moved = jax.tree.map(lambda leaf, update: (leaf.astype(jnp.float32) + update).astype(leaf.dtype), params, updates)
    return moved, state, optax.tree.norm(_float32(gradients))


def advance(
    optimizer: optax.GradientTransformation, params: Any, state: OptimizerState, gradients: Any
) -> tuple[Any, OptimizerState, Float[Array, ""]]:
    """`apply_gradients` compiled by itself, so that its bits do not depend on its surroundings, and in place."""

    def body(_: Int[Array, ""], carry: tuple[Any, OptimizerState, Array]) -> tuple[Any, OptimizerState, Array]:
        return apply_gradients(optimizer, *carry[:2], gradients)

    return lax.fori_loop(0, opaque_int(1), body, (params, state, jnp.float32(0.0)))
