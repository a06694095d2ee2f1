"""Which axis of the mesh splits which axis of an array: one table, from what an axis of an array stands for.

Rows (sequences) are split over `data` and `fsdp`. Parameters, and whatever has their field names (moments of an
optimizer), are stored split over `fsdp` and `tensor`; rollouts and gradients read them gathered over `fsdp`
(Rajbhandari et al., ZeRO, arXiv 1910.02054: optimizer state and master weights are split, gradients summed).

`shard_map` takes the row axes by hand, so that every device of a rollout goes its own way. `tensor` is left to the
compiler, which places the collectives that the layout of the kernels asks for (Xu et al., GSPMD, arXiv 2105.04663);
the layout is that of Megatron-LM (Shoeybi et al., arXiv 1909.08053).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax.errors import InputError
from specrl_jax.parallel.mesh import AXES, DATA, FSDP, TENSOR

ROWS = (DATA, FSDP)

MESH_AXIS = {"heads": TENSOR, "kv_heads": TENSOR, "hidden": TENSOR, "vocab": TENSOR, "width": FSDP}
"""Mesh axis of every axis of a parameter that is split; where its size is no multiple, it stays whole."""

KERNELS: dict[str, tuple[str, ...]] = {
    "embed": ("vocab", "width"),
    "head": ("vocab", "width"),
    "lm_head": ("vocab", "width"),
    "q_proj": ("heads", "width"),
    "k_proj": ("kv_heads", "width"),
    "v_proj": ("kv_heads", "width"),
    "o_proj": ("width", "heads"),
    "q_bias": ("heads",),
    "k_bias": ("kv_heads",),
    "v_bias": ("kv_heads",),
    "gate_proj": ("hidden", "width"),
    "up_proj": ("hidden", "width"),
    "down_proj": ("width", "hidden"),
}
"""What the axes of a parameter stand for, by its field; of other matrices the first axis that fits is a width."""


def row_devices(mesh: Mesh) -> int:
    """Devices that rows are split over."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def field_name(path: tuple[Any, ...]) -> str:
    """Innermost field of a dataclass or key of a dict on the path to a leaf."""
    names = [getattr(entry, "name", getattr(entry, "key", None)) for entry in path]
    return next((name for name in reversed(names) if isinstance(name, str)), "")


def check_splits(what: str, config: Any, mesh: Mesh) -> None:
    """Raise InputError unless the heads and hidden units of a policy or draft head split over `tensor`.

    Heads of keys and values may be fewer than `tensor` if they divide it: then they are whole on every device.
    """
    tensor = mesh.shape[TENSOR]
    for field in ("num_heads", "intermediate_size"):
        size = getattr(config, field, tensor)
        if size % tensor:
            raise InputError(
                f"mesh axis tensor is {tensor} and does not divide the {what}'s {field} of {size}; choose one that does"
            )
    kv_heads = getattr(config, "num_kv_heads", tensor)
    if kv_heads % tensor and tensor % kv_heads:
        raise InputError(
            f"mesh axis tensor is {tensor}, neither a divisor nor a multiple of the {what}'s num_kv_heads of "
            f"{kv_heads}; choose one that is"
        )


def _spec(name: str, leaf: Any, kv_heads: int, sizes: Mapping[str, int]) -> P:
    logical: tuple[str | None, ...] | None = KERNELS.get(name)
    if logical is None or len(logical) != leaf.ndim:
        logical = (None,) * leaf.ndim
        if leaf.ndim >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating):
            fits = next((i for i, size in enumerate(leaf.shape) if size % sizes[FSDP] == 0), None)
            logical = tuple("width" if i == fits else None for i in range(leaf.ndim))
    axes: list[str | None] = []
    for axis, size in zip(logical, leaf.shape, strict=True):
        over = None if axis is None else MESH_AXIS[axis]
        parts = kv_heads if axis == "kv_heads" else size
        axes.append(over if over and sizes[over] > 1 and parts % sizes[over] == 0 else None)
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)


@dataclass(frozen=True)
class Layout:
    """Where parameters lie on a mesh, and what has their fields.

    kv_heads: heads of keys and values, which are not split within.
    """

    mesh: Mesh
    kv_heads: int = 1

    def _shardings(self, tree: Any, sizes: Mapping[str, int]) -> Any:
        def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            return NamedSharding(self.mesh, _spec(field_name(path), leaf, self.kv_heads, sizes))

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def stored(self, tree: Any) -> Any:
        """Shardings between steps; the leaves of `tree` may be shapes."""
        return self._shardings(tree, self.mesh.shape)

    def place(self, tree: Any) -> Any:
        """The arrays as they are stored."""
        return jax.device_put(tree, self.stored(tree))

    def keep(self, tree: Any) -> Any:
        """As `place`, traced."""
        return lax.with_sharding_constraint(tree, self.stored(tree))

    def gathered(self, tree: Any) -> Any:
        """Shardings as rollouts and gradients read the arrays: split over `tensor` alone."""
        return self._shardings(tree, dict(self.mesh.shape) | {FSDP: 1})

    def gather(self, tree: Any) -> Any:
        """The arrays as `gathered` says, traced."""
        if self.mesh.shape[FSDP] == 1:
            return tree
        return lax.with_sharding_constraint(tree, self.gathered(tree))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, P())


def over_mesh(mesh: Mesh, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """`fn` as every device computes it on its own rows; `tensor` is the compiler's.

    Replication is not checked: loops whose trip counts differ between devices defeat the
    checker. Every replicated output is a sum over `ROWS` or computed from such sums.
    """
    by_hand = {axis for axis in AXES if axis in ROWS or mesh.shape[axis] == 1}
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=by_hand, check_vma=False)


def compiler_split(axis: str) -> int:
    """Devices of an axis that the compiler splits arrays over, in the program that is being traced; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if not mesh.empty and axis in mesh.auto_axes else 1


def compiler_splits() -> bool:
    """Whether the compiler splits arrays over any axis of more than one device, in the program that is being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


def by_hand_too(axis: str, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`fn` as every device of an axis computes it on its own part, where the compiler has that axis else."""
    if compiler_split(axis) == 1:
        return fn
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names={axis}, check_vma=False)


def sum_over_rows(tree: Any) -> Any:
    """Sums over the devices that rows are split over, inside `over_mesh`.

    Axes of one device are left out: beside an axis of the compiler's, XLA refuses a sum over them.
    """
    axes = tuple(axis for axis in ROWS if lax.axis_size(axis) > 1)
    return lax.psum(tree, axes) if axes else tree
