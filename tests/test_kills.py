"""A run that is killed twenty times, at random moments and while a checkpoint is written, ends as one that was not."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripts import write_models

from specrl_jax.training.metrics import read_metrics

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
KILLS = 20
OPTIONS = """
    --preset smoke --no-compare --steps 60 --scan-steps 1 --eval-every 7 --eval-problems 4 --max-new-tokens 8
    --prompts 4 --samples 4 --microbatch.rows 8 --lag 1 --loss.importance-cap 2 --mesh data=1
"""


def start(folder, out, *argv):
    command = [sys.executable, "-m", "experiments.train_grpo", *OPTIONS.split(), "--out", str(out), *argv]
    command += ["--policy", str(folder / "policy"), "--drafter", str(folder / "drafter")]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def is_being_saved(out):
    folder = out / "checkpoints" / "grpo"
    return folder.is_dir() and any(not path.name.isdigit() for path in folder.iterdir())


def saved(out):
    """Step of the last complete checkpoint."""
    folder = out / "checkpoints" / "grpo"
    return max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=0)


def test_twenty_kills_change_nothing(tmp_path):
    models, whole, out = write_models(tmp_path), tmp_path / "whole", tmp_path / "killed"
    process = start(models, whole)
    complained = process.communicate()[1].decode()
    assert process.returncode == 0, complained
    moments, while_saving, rows = random.Random(0), 0, []
    for kill in range(KILLS):
        process, before = start(models, out, *(("--resume",) if out.exists() else ())), saved(out)
        if kill % 4 == 1:  # anywhere, also before the first step
            time.sleep(moments.uniform(0.0, 15.0))
        else:
            while process.poll() is None and saved(out) == before:
                time.sleep(0.01)
        if kill % 4 == 0:
            while process.poll() is None and not is_being_saved(out):
                pass
        else:
            time.sleep(moments.uniform(0.0, 0.5))
        assert process.poll() is None, process.communicate()[1].decode()
        process.kill()
        process.communicate()
        while_saving += is_being_saved(out)
        rows.append(saved(out))
    process = start(models, out, "--resume")
    complained = process.communicate()[1].decode()
    assert process.returncode == 0, complained
    assert while_saving >= KILLS // 4
    assert rows[-1] > KILLS // 2
    print(f"{KILLS} kills, {while_saving} of them while a checkpoint was written, at steps {rows}")
    for name in ("params_sha256", "trajectory_sha256"):
        first, second = (json.loads((run / "summary.json").read_text())[name] for run in (whole, out))
        assert first == second
    for name in ("policy/model.safetensors", "policy_best/model.safetensors", "drafter/model.safetensors"):
        assert (whole / name).read_bytes() == (out / name).read_bytes()
    assert [row["step"] for row in read_metrics(whole)] == [row["step"] for row in read_metrics(out)]
