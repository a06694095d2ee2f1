"""The draft-init table at its smallest: every head, mode and kind of prompts, with intervals over seeds."""

import json

import numpy as np
import pytest
from scripts import refusal, run_script

from experiments import draft_init

pytestmark = pytest.mark.ci


def test_every_head_is_measured_on_both_kinds_of_prompts(monkeypatch, tmp_path):
    out = tmp_path / "out"
    run_script(monkeypatch, draft_init, "--preset", "smoke", "--mesh", "data=1", "--out", out)
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert len(rows) == 12
    assert {(row["init"], row["mode"]) for row in rows} == {
        (init, mode) for init in ("in-domain", "other", "untrained") for mode in ("offline", "adapted")
    }
    for row in rows:
        assert row["acceptance_length"] >= 1.0
        assert np.isfinite(row["ci95"])
        assert (row["paper_rl_zero"] is None) == (row["init"] == "untrained" or row["prompts"] == "other")
    assert "gap_closed" in json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("--seeds", 1), "--seeds is 1; it must be at least 2"),
        (("--data", "some.jsonl"), "--data and --other-data belong together"),
        (("--drafter", "some"), "--drafter is made by the table"),
        (("--adapt-prompts", 2), "2 rollouts for the draft head of 2 prompts fill no batch of 4"),
        (("--eval-draft-length", 3, "--head.kind", "block", "--head.block-size", 2), "the drafter was made for 2"),
    ],
)
def test_bad_input_is_refused(monkeypatch, capsys, tmp_path, argv, sentence):
    out = tmp_path / "out"
    given = ("--preset", "smoke", "--mesh", "data=1", *argv, "--out", out)
    assert sentence in refusal(monkeypatch, capsys, draft_init, *given)
    assert not out.exists()
