"""The device mesh: which axes there are, and how one is asked for on the command line.

Axes: `data` splits rows (sequences), `fsdp` splits the storage of parameters and
optimizer state, `tensor` splits heads and hidden units.
"""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from specrl_jax.errors import InputError

DATA = "data"
FSDP = "fsdp"
TENSOR = "tensor"
AXES = (DATA, FSDP, TENSOR)


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise InputError(f"mesh axis {axis} is {getattr(self, axis)}; it must be at least 1")

    def __str__(self) -> str:
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES)

    @property
    def size(self) -> int:
        """Devices that the mesh takes."""
        return math.prod(getattr(self, axis) for axis in AXES)


def parse_mesh(text: str) -> MeshConfig:
    """Read a mesh such as "data=8,fsdp=1,tensor=1"; axes left out have one device.

    Raises:
        InputError: an axis is unknown or given twice, or its size is no positive whole number.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        axis, _, size = (p.strip() for p in part.partition("="))
        if axis not in AXES:
            raise InputError(f'mesh "{text}": unknown axis "{axis}"; write data=N,fsdp=N,tensor=N')
        if axis in sizes:
            raise InputError(f'mesh "{text}": axis {axis} is given twice; give it once')
        if not (size.isascii() and size.isdigit()):
            raise InputError(f'mesh "{text}": size "{size}" of axis {axis} is not a whole number; write {axis}=1')
        sizes[axis] = int(size)
    return MeshConfig(**sizes)


def request_cpu_devices(*meshes: str, processes: int = 1) -> None:
    """Virtual CPU devices for meshes, or two (one per core) for "auto"; without effect on other platforms.

    The loops of a rollout run on one core each, so two devices roll out nearly twice as fast
    as one. Call it before jax makes its devices. Of `processes`, each makes its share.
    """
    sizes = (min(2, os.cpu_count() or 1) * processes if text == "auto" else parse_mesh(text).size for text in meshes)
    wanted = -(-sum(sizes) // processes)
    if wanted > jax.config.values["jax_num_cpu_devices"]:
        with contextlib.suppress(RuntimeError):  # jax has its devices already
            jax.config.update("jax_num_cpu_devices", wanted)


def auto_mesh(fits: Callable[[int], bool]) -> MeshConfig:
    """As many devices along `data` as there are and `fits` admits, on a CPU at most two; one in any case."""
    count = len(jax.devices())
    if jax.default_backend() == "cpu":
        count = min(2, count)
    return MeshConfig(data=max(n for n in range(1, count + 1) if n == 1 or fits(n)))


def make_mesh(config: MeshConfig, taken: int = 0) -> Mesh:
    """A mesh with the axes `data`, `fsdp` and `tensor` over the first `config.size` devices after those `taken`.

    Raises:
        InputError: fewer devices are present than the mesh takes.
    """
    devices = jax.devices()[taken:]
    if not devices:
        raise InputError(
            f"mesh {config} takes {config.size} devices but another mesh has all {taken}; make that smaller"
        )
    if config.size > len(devices):
        hint = ""
        if devices[0].platform == "cpu":
            hint = f", or make virtual CPU devices with JAX_NUM_CPU_DEVICES={config.size}"
        raise InputError(
            f"mesh {config} takes {config.size} devices but jax sees {len(devices)} ({devices[0].device_kind}); "
            f"choose a mesh of at most {len(devices)}{hint}"
        )
    if config.size < len(devices) and jax.process_count() > 1:
        raise InputError(
            f"mesh {config} takes {config.size} of {len(devices)} devices, but a run over several hosts "
            "must use them all; choose sizes whose product is that number"
        )
    return mesh_over(config, devices[: config.size])


def mesh_over(config: MeshConfig, devices: Sequence[Any]) -> Mesh:
    """The mesh over just these devices, which need not be this machine's."""
    shape = (config.data, config.fsdp, config.tensor)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def unused_accelerator() -> str | None:
    """One sentence of warning when this machine has an accelerator but jax runs on the CPU, else None.

    It is jax that looks for GPUs and TPUs, when its first backend starts; this takes its warning in
    and adds the remedy. Call it before anything else uses a device. Silent when `JAX_PLATFORMS` is set.
    """
    warnings: list[str] = []
    logger = logging.getLogger("jax._src.xla_bridge")

    def take(record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        warnings.append(record.getMessage().rstrip("."))
        return False

    logger.addFilter(take)
    try:
        jax.default_backend()
    finally:
        logger.removeFilter(take)
    if not warnings:
        return None
    return f'{"; ".join(warnings)}; run pip install ".[cuda]" or ".[tpu]", or set JAX_PLATFORMS=cpu if that is meant.'
