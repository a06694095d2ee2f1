"""Runs over several real processes on this machine, and what is refused before one starts."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from scripts import SCRIPTS, refusal, write_models

from specrl_jax.data.tokenizers import arithmetic_tokenizer
from specrl_jax.models.huggingface import save_policy
from specrl_jax.models.params import init_params
from specrl_jax.models.presets import PRESETS
from specrl_jax.parallel import hosts
from specrl_jax.training.metrics import read_metrics

ROOT = Path(__file__).parents[1]
OPTIONS = """
    --preset smoke --no-compare --steps 2 --scan-steps 1 --prompts 4 --samples 4 --microbatch.rows 4
    --draft.microbatch.rows 2 --max-new-tokens 12 --eval-problems 2 --eval-every 2 --numerics plain --task jsonl
    --reward odd:length --optimizer.name adamw --draft-length 2
"""


def start(folder, out, mesh, *argv):
    """A process of `train_grpo` with rewards from the host."""
    command = [sys.executable, "-m", "experiments.train_grpo", *OPTIONS.split(), "--mesh", mesh, "--out", out]
    command += ["--policy", folder / "policy", "--drafter", folder / "drafter"]
    command += ["--data", folder / "train.jsonl", "--eval-data", folder / "test.jsonl", *argv]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environment, **streams)


def finish(process):
    said, complained = process.communicate(timeout=900)
    assert process.returncode == 0, complained
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_models(tmp_path_factory.mktemp("hosts"))
    (folder / "odd.py").write_text("def length(response, example):\n    return float(len(response) % 2)\n")
    for name, first in (("train", 10), ("test", 20)):
        rows = ({"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(first, first + 9))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def start_together(folder, out, mesh, count, *argv):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shared = ("--coordinator", address, "--processes", count, *argv)
    return [start(folder, out, mesh, *shared, "--process", i) for i in range(count)]


@pytest.mark.parametrize(
    ("count", "mesh"),
    [
        pytest.param(2, "data=2", marks=pytest.mark.ci),
        pytest.param(4, "data=2,fsdp=2", marks=pytest.mark.full),
        pytest.param(2, "tensor=2", marks=pytest.mark.full),
    ],
)
def test_several_processes_are_one_run(folder, tmp_path, count, mesh):
    """Their metrics are those of one process with as many devices; the first prints and writes the run's files."""
    alone = start(folder, tmp_path / "alone", mesh)
    out = tmp_path / "together"
    together = start_together(folder, out, mesh, count)
    finish(alone)
    said = [finish(process) for process in together]
    assert "GRPO 2/2" in said[0]
    assert not any("GRPO" in words for words in said[1:])

    rows, expected = read_metrics(out), read_metrics(tmp_path / "alone")
    assert len(rows) == len(expected) == 3
    assert rows[1]["grad_norm"] > 0.0
    for row, other in zip(rows, expected, strict=True):
        for name, value in other.items():
            if not name.startswith(("time_", "tokens_per_second", "rollout_share")) and not isinstance(value, str):
                np.testing.assert_allclose(row[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    tokens = [(run / "trajectories.bin").read_bytes() for run in (out, tmp_path / "alone", out / "hosts" / "1")]
    assert tokens[0] == tokens[1] == tokens[2]
    assert (out / "policy" / "model.safetensors").is_file()
    assert not (out / "hosts" / "1" / "policy").exists()
    assert sorted(path.name for path in (out / "checkpoints" / "grpo").iterdir()) == ["1", "2"]


@pytest.mark.full
def test_processes_that_time_rounds_together_decide_alike(folder, tmp_path):
    """Every call of a round holds collectives, and each process has a clock of its own."""
    out = tmp_path / "out"
    for process in start_together(folder, out, "tensor=2", 2, "--draft-length", "auto"):
        finish(process)
    finish(start(folder, tmp_path / "plain", "tensor=2"))
    counted = ("policy_forwards_per_sequence", "drafted_fraction", "acceptance_length")
    forwards = [[row.get(name) for row in read_metrics(run) for name in counted] for run in (out, out / "hosts" / "1")]
    assert forwards[0] == forwards[1]
    tokens = [(run / "trajectories.bin").read_bytes() for run in (out, out / "hosts" / "1", tmp_path / "plain")]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 1])
def test_when_one_is_killed_the_others_say_so_and_the_run_goes_on_from_its_checkpoint(folder, tmp_path, killed):
    out, options = tmp_path / "out", ("--steps", 6, "--lag", 1, "--loss.importance-cap", 2, "--eval-every", 0)
    whole = start_together(folder, tmp_path / "whole", "data=2", 2, *options)
    together = start_together(folder, out, "data=2", 2, *options)
    while len(read_metrics(out)) < 3:
        assert together[0].poll() is None
        time.sleep(0.2)
    together[killed].kill()
    together[killed].communicate()
    _, complained = together[1 - killed].communicate(timeout=300)
    assert together[1 - killed].returncode != 0
    # Which of them speaks first, this program or the runtime beneath, is a matter of luck.
    assert "another process of this run is gone" in complained or "another task died" in complained
    for process in (*whole, *start_together(folder, out, "data=2", 2, *options, "--resume")):
        finish(process)
    assert len(read_metrics(out)) == 6
    for name in ("trajectories.bin", "policy/model.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--processes", 2), "--processes and --process belong to --coordinator ADDRESS:PORT; give all three"),
        (("--coordinator", "auto", "--process", 1), "--processes and --process belong to --coordinator ADDRESS:PORT"),
        (("--coordinator", "10.0.0.1:1"), "needs --processes and --process, a number from 0 to below it"),
        (("--coordinator", "10.0.0.1:1", "--processes", 2, "--process", 2), "they are 2 and 2"),
    ],
)
def test_processes_that_cannot_meet_are_refused(monkeypatch, capsys, tmp_path, options, sentence):
    said = refusal(monkeypatch, capsys, SCRIPTS["train_grpo"], "--preset", "smoke", "--out", tmp_path / "out", *options)
    assert sentence in said
    assert not (tmp_path / "out").exists()


@pytest.mark.ci
def test_other_scripts_run_in_one_process(monkeypatch, capsys, tmp_path):
    said = refusal(monkeypatch, capsys, SCRIPTS["evaluate"], "--out", tmp_path / "out", "--coordinator", "auto")
    assert said == "--coordinator is for train_grpo; evaluate runs in one process, so leave it out"


@pytest.mark.ci
def test_nobody_to_ask_for_the_other_processes(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "KUBERNETES"))}
    command = [sys.executable, "-m", "experiments.train_grpo", "--preset", "smoke", "--out", tmp_path / "out"]
    command += ["--coordinator", "auto"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --coordinator auto: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.ci
def test_files_of_other_processes_lie_beneath_the_run(monkeypatch):
    assert hosts.own_folder(Path("run")) == Path("run")
    assert hosts.shared_folder(Path("run/baseline")) == Path("run/baseline")
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    assert hosts.own_folder(Path("run")) == Path("run/hosts/3")
    assert hosts.shared_folder(Path("run/hosts/3/baseline")) == Path("run/baseline")
    assert hosts.shared_folder(Path("run/hosts/2")) == Path("run/hosts/2")


_LOADS = """
import json, re, sys
from pathlib import Path
import jax
from specrl_jax.models.huggingface import load_policy
from specrl_jax.parallel.hosts import join, wait_for_all
from specrl_jax.parallel.mesh import MeshConfig, make_mesh

join(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
mesh = make_mesh(MeshConfig(fsdp=int(sys.argv[3])))
wait_for_all("start")
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
params, _ = load_policy(Path(sys.argv[1]), "float32", mesh)
jax.block_until_ready(params)
leaves = jax.tree.leaves(params)
shards = sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards)
print(json.dumps([peak() - before, shards, max(leaf.nbytes for leaf in leaves)]))
wait_for_all("end")
"""


@pytest.mark.full
def test_the_0_6b_shape_loads_as_shards_with_little_more_memory_than_they_take(tmp_path):
    policy = dataclasses.replace(PRESETS["qwen3-0.6b"], dtype="bfloat16")
    shapes = jax.eval_shape(lambda key: init_params(key, policy), jax.random.key(0))
    some = np.random.default_rng(0)
    params = jax.tree.map(lambda x: (some.random(x.shape, np.float32) - 0.5).astype(x.dtype), shapes)
    save_policy(tmp_path / "policy", params, policy, arithmetic_tokenizer())
    del params
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _LOADS, str(tmp_path / "policy"), address, "4", str(i)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(4)
    ]
    for process in processes:
        said = finish(process)
        peak, shards, largest = json.loads(said.strip().splitlines()[-1])
        print(f"peak {peak / 1e9:.2f} GB, shards {shards / 1e9:.2f} GB, largest tensor {largest / 1e9:.2f} GB")
        assert peak <= 1.5 * shards + largest
