"""A stage ends where it is told to, and a resumed one knows that it has ended."""

import jax.numpy as jnp
import pytest

from specrl_jax.training.stages import run_stage

pytestmark = pytest.mark.ci


def _run(folder, stop, total=10):
    calls = []

    def program(steps):
        def run(state):
            calls.append(steps)
            return state + steps, {"loss": jnp.zeros((steps,))}

        return run

    state, seconds = run_stage(
        folder,
        jnp.int32(0),
        total=total,
        chunk=4,
        program=program,
        on_chunk=lambda done, count, metrics: done >= stop,
        spent=100.0,
    )
    assert 100.0 < seconds < 160.0
    return int(state), calls


def test_a_stage_ends_early_and_stays_ended(tmp_path):
    assert _run(tmp_path / "a", stop=8) == (8, [4, 4])
    assert _run(tmp_path / "a", stop=8) == (8, [])
    assert _run(tmp_path / "b", stop=99) == (10, [4, 4, 2])
    assert _run(tmp_path / "b", stop=99) == (10, [])


def test_a_stage_goes_on_from_its_last_checkpoint(tmp_path):
    assert _run(tmp_path, stop=99, total=4) == (4, [4])
    assert _run(tmp_path, stop=99) == (10, [4, 2])
