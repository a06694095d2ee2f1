"""A draft head trained offline from the command line: it learns, resumes to the same bits, refuses bad input."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from scripts import refusal, run_script, write_models

from experiments import generate, train_draft

pytestmark = pytest.mark.ci
SMALL = (
    *("--max-new-tokens", 24, "--eval-problems", 4, "--draft.prompts", 8, "--draft.steps", 4, "--draft.batch", 4),
    *("--draft.microbatch.rows", 4, "--draft.microbatch.widths", 1.0, "--draft.unroll", 2, "--mesh", "data=1"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, start in (("train", 10), ("other", 50)):
        rows = ({"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(start, start + 14))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows_of(out):
    return json.loads((out / "results.json").read_text())["rows"]


def test_a_head_is_trained_measured_and_resumed(monkeypatch, tmp_path, models, data):
    given = ("--policy", models / "policy", "--task", "jsonl", "--data", data / "train.jsonl", *SMALL)
    out = tmp_path / "run"
    chosen = (*given, "--head.fc-norm", "--head.norm-output", "--draft.loss", "lk", "--out", out)
    run_script(monkeypatch, train_draft, *chosen)
    first = load_file(out / "drafter" / "model.safetensors")
    assert "fc_norm.2.weight" in first
    assert [(row["head"], row["prompts"]) for row in rows_of(out)] == [("after", "train")]
    run_script(monkeypatch, train_draft, *chosen, "--resume")
    for name, tensor in load_file(out / "drafter" / "model.safetensors").items():
        np.testing.assert_array_equal(tensor, first[name])
    # From that head on, measured on other prompts too.
    more = (*given, "--drafter", out / "drafter", "--eval-data", data / "train.jsonl", data / "other.jsonl")
    run_script(monkeypatch, train_draft, *more, "--out", tmp_path / "more")
    heads = [row["head"] for row in rows_of(tmp_path / "more")]
    assert heads == ["before", "before", "after", "after"]
    assert rows_of(tmp_path / "more")[0]["acceptance_length"] >= 1.0


@pytest.mark.parametrize(
    ("head", "tensor"),
    [
        (
            ("block", "--head.layers", 1, "--head.block-size", 4, "--head.markov-rank", 3),
            "markov_head.markov_w2.weight",
        ),
        (("mtp",), "model.mtp_layers.0.input_proj.weight"),
        (("mtp", "--head.layout", "nemotron_h", "--head.experts", 4), "mtp.layers.1.mixer.experts.3.up_proj.weight"),
    ],
    ids=["block", "mtp", "nemotron_h"],
)
def test_a_head_of_another_kind_is_trained_and_drafts(monkeypatch, tmp_path, models, data, head, tensor):
    given = ("--policy", models / "policy", "--task", "jsonl", "--data", data / "train.jsonl", *SMALL)
    run_script(monkeypatch, train_draft, *given, "--head.kind", *head, "--out", tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "drafter" / "model.safetensors")
    assert np.abs(tensors[tensor]).max() > 0  # a block drafter's begins at zero
    # The folder drafts wherever a head does.
    made = ("--policy", models / "policy", "--drafter", tmp_path / "head" / "drafter", "--task", "arithmetic")
    few = ("--problems", 4, "--max-new-tokens", 12, "--temperature", 0)
    texts = []
    for length in (0, 3):
        out = tmp_path / str(length)
        run_script(monkeypatch, generate, *made, *few, "--draft-length", length, "--out", out)
        texts.append([row["response"] for row in rows_of(out)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ((), "--task is missing; choose arithmetic or jsonl"),
        (("--task", "jsonl"), "--task jsonl needs --data"),
        (("--task", "arithmetic", "--eval-data", "some"), "--eval-data belongs to --task jsonl"),
        (
            ("--task", "arithmetic", "--draft.batch", 16),
            "8 prompts fill no batch of 16",
        ),
        (("--task", "arithmetic", "--draft.loss", "tv", "--eval-draft-length", 0), "--eval-draft-length is 0"),
        (("--task", "arithmetic", "--drafter", "x", "--head.qk-norm"), "--head options are for a new head"),
        (("--task", "arithmetic", "--head.kind", "block", "--head.block-size", 1), "--head.block-size is 1"),
        (("--task", "arithmetic", "--head.kind", "block", "--head.fc-norm"), "--head.fc-norm does not belong to"),
        (("--task", "arithmetic", "--head.kind", "mtp", "--head.qk-norm"), "--head.qk-norm does not belong to"),
        (("--task", "arithmetic", "--head.layout", "qwen3_5"), "--head.layout does not belong to --head.kind eagle3"),
        (
            ("--task", "arithmetic", "--head.kind", "mtp", "--head.experts", 4),
            "--head.experts does not belong to --head.kind mtp --head.layout mimo",
        ),
        (
            (
                "--task",
                "arithmetic",
                "--head.kind",
                "mtp",
                "--head.layout",
                "qwen3_next",
                "--head.experts-per-token",
                9,
            ),
            "reads 9 of 8 experts",
        ),
        (("--task", "arithmetic", "--head.layers", 3), "--head.layers does not belong to --head.kind eagle3"),
        (
            ("--task", "arithmetic", "--head.kind", "block", "--head.block-size", 2, "--head.no-sample-from-anchor"),
            "draft length is 3, and the drafter was made for 1; lower it",
        ),
        (("--task", "arithmetic", "--head.kind", "block", "--head.mask-token-id", 999), "mask_token_id is 999"),
        (("--task", "arithmetic", "--head.fc-norm", "--head.norm-before-fc"), "sets norm_before_fc and fc_norm"),
    ],
)
def test_bad_input_is_refused(monkeypatch, capsys, tmp_path, models, argv, sentence):
    out = tmp_path / "out"
    given = ("--policy", models / "policy", *SMALL, *argv, "--out", out)
    assert sentence in refusal(monkeypatch, capsys, train_draft, *given)
    assert not out.exists()


def test_a_small_policy_is_not_trained(monkeypatch, capsys, tmp_path, models):
    given = ("--policy", models / "policy", "--drafter", models / "policy", "--task", "arithmetic", *SMALL)
    said = refusal(monkeypatch, capsys, train_draft, *given, "--out", tmp_path / "out")
    assert said == "--drafter is a small policy, which drafts as it is; give a draft head to train, or none"


def test_more_problems_than_there_are_is_refused(monkeypatch, capsys, tmp_path, models, data):
    given = ("--policy", models / "policy", "--task", "jsonl", "--data", data / "train.jsonl", *SMALL)
    said = refusal(monkeypatch, capsys, train_draft, *given, "--eval-problems", 14, "--out", tmp_path / "out")
    assert "has 14 prompts, all of them wanted by --eval-problems; lower it" in said
