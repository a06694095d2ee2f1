"""Stages that scan many updates per dispatch: supervised warm-up and draft-head training."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specrl_jax.errors import InputError
from specrl_jax.parallel.hosts import to_host
from specrl_jax.training.checkpoints import CheckpointWriter, check_room, latest_step, restore_checkpoint
from specrl_jax.training.termination import stop_if_asked, termination_saves

StateT = TypeVar("StateT")

_MOST_SKIPPED = 10


def run_stage(
    folder: Path,
    state: StateT,
    *,
    total: int,
    chunk: int,
    program: Callable[[int], Callable[[StateT], tuple[StateT, dict[str, Any]]]],
    on_chunk: Callable[[int, int, dict[str, Any]], bool],
    spent: float = 0.0,
) -> tuple[StateT, float]:
    """Run at most `total` updates in dispatches of `chunk`, from the last checkpoint in `folder` where there is one.

    Args:
        folder: of the stage's checkpoints.
        state: before the first update, where its program keeps it on the mesh.
        total, chunk: updates in all, and per dispatch.
        program: `program(n)` is a compiled `state -> (state, metrics)` of `n` updates.
        on_chunk: called with updates done, updates in this dispatch, and its metrics (steps first);
            True ends the stage.
        spent: seconds of what was made for it before the first update.

    Returns:
        The state, and the seconds spent; a resumed stage goes on counting from its checkpoint.
    """
    done, finished = latest_step(folder) or 0, False
    if done:
        state, meta = restore_checkpoint(folder, state)
        finished, spent = meta["finished"], meta.get("seconds", 0.0)
    if done < total and not finished:
        check_room(folder, state, keep=1)
    programs: dict[int, Callable[[StateT], tuple[StateT, dict[str, Any]]]] = {}
    start = time.perf_counter()
    with termination_saves(), CheckpointWriter(folder, keep=1) as checkpoints:
        while done < total and not finished:
            count = min(chunk, total - done)
            if count not in programs:
                programs[count] = program(count)
            state, metrics = programs[count](state)
            done += count
            metrics = to_host(metrics)
            _check_skipped(metrics)
            finished = on_chunk(done, count, metrics)
            now = time.perf_counter()
            start, spent = now, spent + now - start
            checkpoints.save(done, state, {"step": done, "finished": finished, "seconds": spent})
            stop_if_asked()
    return state, spent


def _check_skipped(metrics: dict[str, Any]) -> None:
    """Raise InputError where too many updates in a row had gradients that are not finite."""
    skipped = max((int(np.max(x)) for name, x in metrics.items() if name.endswith("skipped_in_a_row")), default=0)
    if skipped >= _MOST_SKIPPED:
        raise InputError(
            f"the gradients of {skipped} updates in a row were not finite, and none of them was applied; "
            "start again with a lower learning rate"
        )
