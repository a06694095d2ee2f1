"""`experiments/gpu_suite.sh`: everything that a new accelerator should show, at toy size on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[1] / "experiments" / "gpu_suite.sh"


def suite(*arguments):
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(["bash", SUITE, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_every_part_runs_and_writes_its_results(tmp_path):
    out = tmp_path / "suite"
    done = suite(out, "toy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert " passed" in (out / "parity.txt").read_text()
    assert json.loads((out / "losslessness" / "results.json").read_text())["rows"]
    for part in ("round_cost", "rollout", "step", "round_cost_longer"):
        rows = json.loads((out / part / "results.json").read_text())["rows"]
        assert all(row["commit"] and row["device"] for row in rows)


@pytest.mark.ci
def test_a_folder_that_is_there_is_left_alone(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    done = suite(tmp_path, "toy")
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path} exists; name a new folder\n"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "mine"
