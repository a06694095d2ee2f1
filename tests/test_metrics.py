"""Rows of metrics: what lands in the file, what a resume does to it, and optional reporters."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.errors import InputError
from specrl_jax.training.metrics import MetricsWriter, read_metrics, to_json, write_json

pytestmark = pytest.mark.ci


def _lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_are_plain_json_and_on_disk_at_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            0,
            {
                "reward_mean": jnp.float32(0.1),
                "survival_per_position": np.array([0.5, np.nan]),
                "kl": float("inf"),
                "loss": jnp.asarray(float("-inf"), jnp.bfloat16),
                "entropy": jnp.asarray(1.5, jnp.bfloat16),
                "zero_advantage_groups": np.int64(3),
                "timing": "scanned",
                "ended": jnp.asarray([True, False]),
            },
        )
        (row,) = _lines(tmp_path)
    assert row == {
        "step": 0,
        "reward_mean": float(np.float32(0.1)),
        "survival_per_position": [0.5, None],
        "kl": None,
        "loss": None,
        "entropy": 1.5,
        "zero_advantage_groups": 3,
        "timing": "scanned",
        "ended": [True, False],
    }
    assert row["ended"][0] is True


def test_a_resumed_run_writes_the_steps_after_its_checkpoint_again(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(5):
            writer.write(step, {"run": 1})
    # The run was killed while it wrote a line.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "ru')
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
    with MetricsWriter(tmp_path, resume_step=3) as writer:
        writer.write(3, {"run": 2})
    assert [(row["step"], row["run"]) for row in _lines(tmp_path)] == [(0, 1), (1, 1), (2, 1), (3, 2)]
    with MetricsWriter(tmp_path):
        assert read_metrics(tmp_path) == []


def test_a_malformed_row_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(tmp_path) == []
    path.write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl line 2 is not JSON \(.*\); delete that line"):
        MetricsWriter(tmp_path, resume_step=3)
    path.write_text('{"step": 0}\n[1]\n')
    with pytest.raises(InputError, match=r'metrics\.jsonl line 2 is no object with a whole number "step"'):
        read_metrics(tmp_path)


def test_a_json_file_is_replaced_whole(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"speedup": np.float32(1.5), "out": tmp_path, "nan": np.nan})
    assert json.loads(path.read_text()) == {"speedup": 1.5, "out": str(tmp_path), "nan": None}
    with pytest.raises(TypeError, match="object has no JSON form"):
        write_json(path, {"speedup": object()})
    assert json.loads(path.read_text())["speedup"] == 1.5
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
    assert to_json((1, np.bool_(True))) == [1, True]


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboardX")
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(0, {"reward_mean": 0.5, "survival_per_position": [0.7, 0.4], "timing": "measured", "kl": None})
    (events,) = (tmp_path / "tensorboard").iterdir()
    written = events.read_bytes()
    assert all(name in written for name in (b"reward_mean", b"survival_per_position/1"))
    assert b"timing" not in written


@pytest.mark.parametrize(("option", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_reporter_is_named_before_anything_is_written(tmp_path, monkeypatch, option, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf'--{option} needs {package}, which is not installed; run pip install "\.\['):
        MetricsWriter(tmp_path, **{option: True})
    assert not list(tmp_path.iterdir())


def test_wandb_continues_the_same_page_after_a_resume(tmp_path, monkeypatch):
    pages = []

    class FakeWandb:
        @staticmethod
        def init(**arguments):
            pages.append((arguments["id"], []))
            return FakeWandb

        @staticmethod
        def log(row, step):
            pages[-1][1].append((step, row))

        @staticmethod
        def finish():
            pages[-1][1].append("finished")

    monkeypatch.setitem(sys.modules, "wandb", FakeWandb)
    for resume_step in (None, 1, None):
        with MetricsWriter(tmp_path, resume_step=resume_step, wandb=True) as writer:
            writer.write(1, {"reward_mean": 0.5, "timing": "measured"})
    (first, rows), (second, _), (third, _) = pages
    assert first == second != third
    assert rows == [(1, {"reward_mean": 0.5}), "finished"]
