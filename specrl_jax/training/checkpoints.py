"""Checkpoints of a run: one pytree of arrays and a small JSON object per step, kept by orbax.

Everything needed to continue to the same bits is an array of the state (random
keys as plain integers) or an entry of the JSON object. A checkpoint is written
to a temporary folder, while the run goes on, and then renamed, so a run killed
while saving still holds the one before.
"""

import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from specrl_jax.errors import InputError
from specrl_jax.parallel.hosts import any_of
from specrl_jax.training.termination import Stopped

_STATE = "state"
_META = "meta"
_SCORE = "score"


def _score(metrics: Any) -> float:
    return float(metrics[_SCORE])


_BEST = BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False)


class CheckpointWriter:
    """Saves checkpoints of a run into a folder; a context, at whose end the last one is complete on disk.

    Args:
        folder: of all checkpoints of the run, made where missing.
        keep: checkpoints that are kept, the last ones; the one with the best score is kept besides.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder, self._keep = folder, keep
        self._manager: ocp.CheckpointManager | None = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._manager is not None:
                self._manager.close()  # waits for what is being written
        except Exception as unsaved:
            if error is None or isinstance(error, Stopped):
                raise
            error.add_note(f"and the last checkpoint could not be written: {unsaved}")

    def save(self, step: int, state: Any, meta: Mapping[str, Any], score: float | None = None) -> None:
        """Save `state` and `meta` as the checkpoint of `step`.

        Returns when the arrays are copied, while they are written to disk; the next call waits for that.
        A step that is already saved is left as it is: the state is a function of the step.

        Args:
            step: steps done so far; it must be larger than that of the last checkpoint.
            state: pytree of JAX or NumPy arrays; empty ones are not written.
            meta: JSON object.
            score: what tells the best, such as held-out accuracy; None where it was not measured.
        """
        arrays = _named_leaves(state)
        self._manager = self._manager or _manager(self._folder, self._keep, arrays)
        if step in self._manager.all_steps():
            return
        items = ocp.args.Composite(**{_STATE: ocp.args.StandardSave(arrays), _META: ocp.args.JsonSave(dict(meta))})
        metrics = {_SCORE: -math.inf if score is None else score}
        if not self._manager.save(step, args=items, metrics=metrics):
            latest = self._manager.latest_step()
            raise ValueError(f"checkpoint {step} was not saved: {self._folder} holds step {latest}")


def check_room(folder: Path, state: Any, keep: int = 2) -> None:
    """Raise InputError where the disk has no room for the checkpoints of a run: `keep`, and one that is written.

    The best one is one more in `keep` where there are scores.
    """
    there_already = sum(path.name.isdigit() for path in folder.iterdir()) if folder.is_dir() else 0
    needed = max(1, keep + 1 - there_already) * sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if any_of(free < needed):
        raise InputError(
            f"{folder} has {free / 1e9:.2f} GB free and checkpoints take {needed / 1e9:.2f} GB; "
            "make room, or choose another --out"
        )


def latest_step(folder: Path) -> int | None:
    """Step of the last complete checkpoint, or None."""
    if not folder.is_dir():
        return None
    with _manager(folder) as manager:
        return manager.latest_step()


def load_meta(folder: Path) -> dict[str, Any]:
    """The JSON object of the last checkpoint.

    Raises:
        InputError: there is no checkpoint, or it is damaged.
    """
    with _manager(folder) as manager:
        step = _required_step(manager, folder)
        with _readable(folder / str(step)):
            return dict(manager.restore(step, args=ocp.args.Composite(**{_META: ocp.args.JsonRestore()}))[_META])


def restore_checkpoint(folder: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """Restore the last checkpoint.

    Args:
        folder: folder of all checkpoints of the run.
        like: pytree with the structure, shapes and dtypes of the saved one: arrays, or
            `jax.ShapeDtypeStruct`. An array comes back with the sharding of its leaf here;
            where that says none, uncommitted on the default device.

    Returns:
        The state, bit for bit as it was saved, and the JSON object.

    Raises:
        InputError: there is no checkpoint, it is damaged, or its arrays are not those of `like`.
    """
    wanted = _named_leaves(like)
    with _manager(folder, arrays=wanted) as manager:
        step = _required_step(manager, folder)
        where = folder / str(step)
        with _readable(where):
            saved = manager.item_metadata(step)[_STATE].tree
        _check_same_arrays(saved, wanted, where)
        targets = {name: _target(leaf) for name, leaf in wanted.items()}
        items = ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(targets), _META: ocp.args.JsonRestore()})
        with _readable(where):
            restored = manager.restore(step, args=items)

    def leaf_of(path: Any, leaf: Any) -> Any:
        name = _name(path)
        return _placed(restored[_STATE][name], leaf) if name in wanted else leaf

    return jax.tree_util.tree_map_with_path(leaf_of, like), dict(restored[_META])


def _manager(folder: Path, keep: int | None = None, arrays: Mapping[str, Any] | None = None) -> ocp.CheckpointManager:
    """Opened to save `arrays` (and then keep the last `keep` checkpoints), or only to read them."""
    saving = keep is not None
    # What is encoded for the disk lies in memory beside the state: of all arrays at once it would be another state.
    largest = max((math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in (arrays or {}).values()), default=0)
    at_once = max(1, math.ceil(2 * largest / 1e9))
    options = ocp.CheckpointManagerOptions(
        preservation_policy=AnyPreservationPolicy([LatestN(keep), _BEST]) if saving else None,
        best_fn=_score,
        create=saving,
        # What a killed save left behind.
        cleanup_tmp_directories=saving,
        enable_async_checkpointing=saving,
        save_root_metadata=False,
    )
    states = ocp.StandardCheckpointHandler(save_concurrent_gb=at_once, restore_concurrent_gb=at_once)
    handlers = {_STATE: states, _META: ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(folder.resolve(), options=options, item_handlers=handlers)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path, without the empty ones, which orbax refuses.

    A flat dict does not depend on how orbax treats tuples and dataclasses.
    """
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if leaf.size}


def _required_step(manager: ocp.CheckpointManager, folder: Path) -> int:
    step = manager.latest_step()
    if step is None:
        raise InputError(f"{folder} holds no complete checkpoint; start a new run instead of resuming")
    return step


@contextlib.contextmanager
def _readable(where: Path) -> Iterator[None]:
    """Whatever orbax and tensorstore raise over files that are cut short or gone, as one sentence."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(
            f"checkpoint {where} is damaged ({reason}); delete that folder to continue from the checkpoint before it"
        ) from error


def _check_same_arrays(saved: Mapping[str, Any], wanted: Mapping[str, Any], where: Path) -> None:
    remedy = "resume with the configuration and the version that saved it"
    for name in sorted(saved.keys() ^ wanted.keys()):
        said = "is missing" if name in wanted else "is not part of this run's state"
        raise InputError(f"checkpoint {where}: array {name} {said}; {remedy}")
    for name, leaf in wanted.items():
        found = f"{saved[name].dtype}{list(saved[name].shape)}"
        asked = f"{leaf.dtype}{list(leaf.shape)}"
        if found != asked:
            raise InputError(f"checkpoint {where}: array {name} is {found} but this run needs {asked}; {remedy}")


def _has_placement(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return leaf.committed
    return getattr(leaf, "sharding", None) is not None


def _target(leaf: Any) -> Any:
    """What orbax restores into: a sharded array, or NumPy where the leaf says nothing about devices."""
    if _has_placement(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return np.empty(leaf.shape, leaf.dtype)


def _placed(restored: Any, leaf: Any) -> Any:
    if _has_placement(leaf) or isinstance(leaf, np.ndarray | np.generic):
        return restored
    return jnp.array(restored)
