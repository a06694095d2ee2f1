"""Several processes that run one program: how they find each other, agree, and share files.

Every process does the same work on the host and computes the same numbers; arrays of the mesh are theirs together. Only
the first one writes a run's files. The others write copies of their own beneath OUT/hosts, but for checkpoints, which
all write together.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from specrl_jax.errors import InputError

HOSTS_FOLDER = "hosts"
_GONE_AFTER_S = 40
"""A process that is not heard from for so long is gone, and the runtime ends the others."""


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Become one of the processes of a run; call it before anything else uses a device.

    Args:
        coordinator: ADDRESS:PORT of the first process; "auto" where Slurm, Open MPI or a TPU pod says it
            (`jax.distributed.initialize`); None: the run has one process.
        processes, process: their number, and which of them this is; given with an address alone.

    Raises:
        InputError: an argument is missing, there is nobody to ask, or the others cannot be reached.
    """
    given = processes is not None and process is not None
    if coordinator in (None, "auto"):
        if processes is not None or process is not None:
            raise InputError("--processes and --process belong to --coordinator ADDRESS:PORT; give all three")
        if coordinator is None:
            return
    elif not given or not 0 <= process < processes:  # type: ignore[operator]
        raise InputError(
            f"--coordinator {coordinator} needs --processes and --process, a number from 0 to below it; "
            f"they are {processes} and {process}"
        )
    try:
        address = None if coordinator == "auto" else coordinator
        jax.distributed.initialize(address, processes, process, heartbeat_timeout_seconds=_GONE_AFTER_S)
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"--coordinator {coordinator}: {reason}; see experiments/launch for examples") from None


def is_first() -> bool:
    """Whether this process writes the run's files."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Go on when all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def to_host(tree: Any) -> Any:
    """NumPy arrays of everything, on every process; all of them must call it."""

    def fetch(x: Any) -> Any:
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
            return multihost_utils.process_allgather(x, tiled=True)
        return jax.device_get(x)

    return jax.tree.map(fetch, tree)


def whole(tree: Any) -> Any:
    """The same arrays where one process has all of them; else as `to_host`."""
    return tree if jax.process_count() == 1 else to_host(tree)


def of_first(tree: Any) -> Any:
    """What the first process has here: numbers and arrays that a clock, a signal or a file decided."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def any_of(flag: bool) -> bool:
    """Whether it is so on any process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def own_folder(out: Path) -> Path:
    """Where this process writes what a run keeps in `out`."""
    return out if is_first() else out / HOSTS_FOLDER / str(jax.process_index())


def shared_folder(folder: Path) -> Path:
    """The folder of the run's first process that stands for one of this process."""
    parts, own = folder.parts, (HOSTS_FOLDER, str(jax.process_index()))
    found = [i for i in range(len(parts) - 1) if parts[i : i + 2] == own]
    if is_first() or not found:
        return folder
    return Path(*parts[: found[-1]], *parts[found[-1] + 2 :])
