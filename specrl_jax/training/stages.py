"""Stages that scan many updates per dispatch: supervised warm-up and draft-head training."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from specrl_jax.training.checkpoints import check_room, latest_step, restore_checkpoint, save_checkpoint
from specrl_jax.training.termination import stop_if_asked

StateT = TypeVar("StateT")


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
    check_room(folder, state)
    done, finished = latest_step(folder) or 0, False
    if done:
        state, meta = restore_checkpoint(folder, state)
        finished, spent = meta["finished"], meta.get("seconds", 0.0)
    programs: dict[int, Callable[[StateT], tuple[StateT, dict[str, Any]]]] = {}
    start = time.perf_counter()
    while done < total and not finished:
        count = min(chunk, total - done)
        if count not in programs:
            programs[count] = program(count)
        state, metrics = programs[count](state)
        done += count
        finished = on_chunk(done, count, jax.device_get(metrics))
        now = time.perf_counter()
        start, spent = now, spent + now - start
        save_checkpoint(folder, done, state, {"step": done, "finished": finished, "seconds": spent}, keep=1)
        stop_if_asked()
    return state, spent
