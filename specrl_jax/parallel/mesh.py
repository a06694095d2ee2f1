"""The device mesh: which axes there are, and how one is asked for on the command line.

Axes: `data` splits rows (sequences), `fsdp` splits the storage of parameters and
optimizer state, `tensor` splits heads and hidden units.
"""

import glob
import math
import os
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh

from specrl_jax.errors import InputError

DATA = "data"
FSDP = "fsdp"
TENSOR = "tensor"
AXES = (DATA, FSDP, TENSOR)

# Device files that the drivers of NVIDIA GPUs, AMD GPUs and TPUs create.
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
_TPU_VARIABLES = ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")


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


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh with the axes `data`, `fsdp` and `tensor` over the first `config.size` devices.

    Raises:
        InputError: fewer devices are present than the mesh takes.
    """
    devices = jax.devices()
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
    shape = (config.data, config.fsdp, config.tensor)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[: config.size])


def unused_accelerator() -> str | None:
    """One sentence of warning when this machine seems to have an accelerator but jax sees only the CPU.

    Silent when the CPU was asked for (`JAX_PLATFORMS`).
    """
    if os.environ.get("JAX_PLATFORMS") or jax.default_backend() != "cpu":
        return None
    files = next((found[0] for pattern in _DEVICE_FILES if (found := sorted(glob.glob(pattern)))), None)
    variable = next((name for name in _TPU_VARIABLES if os.environ.get(name)), None)
    sign = files or variable
    if sign is None:
        return None
    extra = "cuda" if sign.startswith("/dev/nvidia") else "tpu"
    if sign == "/dev/kfd":
        return f"{sign} shows an AMD GPU but jax runs on the CPU; install jax for ROCm to use it."
    return (
        f"{sign} shows an accelerator but jax runs on the CPU; "
        f'run pip install ".[{extra}]" to use it, or set JAX_PLATFORMS=cpu to say that this is meant.'
    )
