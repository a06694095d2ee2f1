"""Pickled draft heads: converted where they hold tensors, refused where they hold anything else."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scripts import refusal, run_script

from experiments import convert
from specrl_jax.drafters.heads import load_drafter

pytestmark = pytest.mark.ci
HEAD = Path(__file__).parent / "fixtures" / "eagle3" / "head"


def test_a_pickled_head_is_converted(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    folder = Path(shutil.copytree(HEAD, tmp_path / "head"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stored = {name: torch.from_numpy(value) for name, value in tensors.items()}
    stored["fc.weight"] = stored["fc.weight"].to(torch.bfloat16)
    torch.save(stored, folder / "pytorch_model.bin")
    out = tmp_path / "out"
    run_script(monkeypatch, convert, "--source", folder, "--out", out)
    _, expected = load_drafter(HEAD)
    drafter, loaded = load_drafter(out / "drafter")
    assert drafter.config.draft_vocab_size == 11
    np.testing.assert_array_equal(loaded.weights.lm_head, expected.weights.lm_head)
    np.testing.assert_allclose(loaded.weights.fc, expected.weights.fc, atol=0.01)
    assert (folder / "pytorch_model.bin").exists()
    assert json.loads((out / "results.json").read_text())["rows"][0]["loads"] == "yes"


class Harm:
    def __reduce__(self):
        return (print, ("run",))


def test_bad_input_is_refused(monkeypatch, capsys, tmp_path):
    out = ("--out", tmp_path / "out")
    assert "--source is missing" in refusal(monkeypatch, capsys, convert, *out)
    (tmp_path / "empty").mkdir()
    assert "holds no pickled weights" in refusal(monkeypatch, capsys, convert, "--source", tmp_path / "empty", *out)
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Harm()}))
    said = refusal(monkeypatch, capsys, convert, "--source", folder, *out)
    assert "holds more than tensors" in said or "run `pip install torch`" in said
    assert not (tmp_path / "out").exists()
