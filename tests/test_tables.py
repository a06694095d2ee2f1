"""The tables of drafters at their smallest: every row is there, and what cannot be made is refused."""

import json

import pytest
from scripts import SCRIPTS, refusal, run_script, write_models

from experiments.online_adaptation import gap_closed
from experiments.seeds import acceptance_over_seeds

ci, full = pytest.mark.ci, pytest.mark.full


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def rows_of(monkeypatch, name, out, *argv):
    run_script(monkeypatch, SCRIPTS[name], "--preset", "smoke", *argv, "--out", out)
    return json.loads((out / "results.json").read_text())["rows"]


@ci
def test_acceptance_by_task_has_a_row_per_prompts_temperature_and_drafts(monkeypatch, tmp_path, models):
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(4)))
    given = ("--policy", models / "policy", "--drafter", models / "drafter", "--task", "jsonl", "--data", data)
    rows = rows_of(monkeypatch, "acceptance_by_task", tmp_path / "out", *given, "--mesh", "data=1")
    assert [(row["prompts"], row["temperature"], row["drafts"]) for row in rows] == [
        ("sums", 1.0, "head"),
        ("sums", 1.0, "suffix"),
    ]
    for row in rows:
        assert row["acceptance_length"] == pytest.approx(1 + sum(row["survival_per_position"]))
    # The drafts change no token.
    assert len({row["response_tokens"] for row in rows}) == 1


@ci
def test_a_case_is_the_mean_over_its_seeds(monkeypatch, tmp_path):
    """The same prompts with other noise; over several seeds the interval is that of their mean."""
    options = ("--temperatures", 1.0, "--drafts", "ngram")
    runs = [
        rows_of(monkeypatch, "acceptance_by_task", tmp_path / f"{count}", *options, "--earlier", 0, "--seeds", count)
        for count in (1, 2)
    ]
    by_seed = json.loads((tmp_path / "2" / "summary.json").read_text())["by_seed"]
    assert [row["seed"] for row in by_seed] == [0, 1]
    assert by_seed[0]["acceptance_length"] == runs[0][0]["acceptance_length"]
    lengths = [row["acceptance_length"] for row in by_seed]
    (row,) = runs[1]
    assert row["acceptance_length"] == pytest.approx(sum(lengths) / 2)
    assert row["ci95"] == pytest.approx(12.706 * abs(lengths[0] - lengths[1]) / 2, rel=1e-3)
    assert row["seeds"] == 2


@full
def test_suffix_drafts_find_what_earlier_epochs_said(monkeypatch, tmp_path):
    """A nearly greedy policy repeats itself from epoch to epoch."""
    options = ("--temperatures", 0.01, "--drafts", "suffix", "--samples", 1, "--max-new-tokens", 32)
    rows = [
        rows_of(monkeypatch, "acceptance_by_task", tmp_path / f"{count}", *options, "--earlier", count)[0]
        for count in (0, 1)
    ]
    assert [row["earlier_epochs"] for row in rows] == [0, 1]
    assert rows[0]["response_tokens"] == rows[1]["response_tokens"]
    assert rows[1]["tokens_per_forward"] > 1.3 * rows[0]["tokens_per_forward"]


@ci
def test_acceptance_by_depth_has_a_row_per_head(monkeypatch, tmp_path):
    rows = rows_of(monkeypatch, "acceptance_by_depth", tmp_path / "out", "--mesh", "data=1")
    assert [(row["loss"], row["unroll"]) for row in rows] == [("kl", 2), ("lk", 2), ("kl", 1)]
    assert all(len(row["conditional_acceptance"]) == row["draft_length"] for row in rows)


@full
def test_draft_methods_stand_side_by_side(monkeypatch, tmp_path):
    rows = rows_of(monkeypatch, "draft_methods", tmp_path / "out")
    assert [row["method"] for row in rows] == [
        "none",
        "n-gram",
        "suffix, siblings",
        "suffix, siblings and last epoch",
        "EAGLE-3",
        "MTP",
        "block",
        "EAGLE-3 and suffix",
    ]
    for row in rows[1:]:
        trained = row["method"].startswith(("EAGLE-3", "MTP", "block"))
        assert (row["training_seconds"] > 0) == (row["parameters"] > 0) == trained
        assert row["acceptance_length"] >= 1.0
        assert row["paid_back"] is None or row["paid_back"] >= 0.0


@full
def test_online_adaptation_compares_heads_on_the_same_policy(monkeypatch, tmp_path):
    rows = rows_of(monkeypatch, "online_adaptation", tmp_path / "out", "--mesh", "data=1")
    assert [row["arm"] for row in rows] == ["frozen", "online"]
    # Before anything was learned the heads are one, and the policy learns the same whoever drafts.
    for field in ("start", "kl", "reward_before", "reward_after"):
        assert rows[0][field] == rows[1][field]
    assert {row["head"] for row in rows} == {"own"}


@full
def test_a_second_head_adapts_beside_the_first(monkeypatch, tmp_path, models):
    given = ("--policy", models / "policy", "--drafter", models / "drafter", "--other-drafter", models / "drafter")
    rows = rows_of(monkeypatch, "online_adaptation", tmp_path / "out", *given, "--mesh", "data=1")
    assert [(row["head"], row["arm"]) for row in rows] == [
        (head, arm) for head in ("given", "other") for arm in ("frozen", "online")
    ]
    # The heads are one and the same.
    for field in ("start", "worst", "acceptance_length", "reward_after"):
        assert rows[0][field] == rows[2][field]
        assert rows[1][field] == rows[3][field]


@ci
def test_the_share_of_the_gap_that_is_closed():
    """Of the last quarter of the steps, seed by seed."""
    late = {("given", "frozen"): 1.9, ("given", "online"): 2.0, ("other", "frozen"): 1.4}
    found = []
    for seed, online in ((0, 1.7), (1, 1.5)):
        for (head, arm), length in (late | {("other", "online"): online}).items():
            lengths = [1.0, 1.0, 1.0, length]
            found += [{"seed": seed, "head": head, "arm": arm, "acceptance_length": x} for x in lengths]
    mean, half_width = gap_closed(found, 4)
    assert mean == pytest.approx(0.4)
    assert half_width == pytest.approx(12.706 * 0.2, rel=1e-3)
    assert gap_closed([row for row in found if row["head"] == "given"], 4) is None


@ci
def test_depths_that_a_seed_never_reached_do_not_count():
    shared = {"tokens_per_forward": 1.0, "entropy": 1.0, "ci95": 0.1}
    near = {"acceptance_length": 1.5, "survival_per_position": [0.5, 0.0], "conditional_acceptance": [0.5, 0.0]}
    none = {"acceptance_length": 1.0, "survival_per_position": [0.0, 0.0], "conditional_acceptance": [0.0, 0.0]}
    means = acceptance_over_seeds([near | shared, none | shared])
    assert means["acceptance_length"] == 1.25
    assert means["survival_per_position"] == [0.25, 0.0]
    assert means["conditional_acceptance"] == [0.25, 0.0]
    assert acceptance_over_seeds([none | shared])["conditional_acceptance"] == [0.0, 0.0]


@full
def test_a_small_policy_has_no_place_in_a_table_of_training(monkeypatch, capsys, tmp_path, models):
    argv = (
        "--preset",
        "smoke",
        "--policy",
        models / "policy",
        "--drafter",
        models / "policy",
        "--out",
        tmp_path / "out",
    )
    assert "is a policy, which is not trained" in refusal(monkeypatch, capsys, SCRIPTS["online_adaptation"], *argv)
    assert not (tmp_path / "out").exists()


@full
def test_async_pipeline_has_a_row_per_lag_with_and_without_drafts(monkeypatch, tmp_path):
    rows = rows_of(monkeypatch, "async_pipeline", tmp_path / "out")
    assert [(row["lag"], row["drafts"]) for row in rows] == [(0, False), (0, True), (1, False), (1, True)]
    for row in rows:
        assert 0.0 <= row["exposed_s"] <= row["step_s"]
    # Drafts change no token, at any lag.
    for field in ("reward_before", "reward_after"):
        assert rows[0][field] == rows[1][field]
        assert rows[2][field] == rows[3][field]


@full
def test_a_mesh_has_its_shares(monkeypatch, tmp_path):
    rows = rows_of(monkeypatch, "bench_mesh", tmp_path / "out")
    assert [row["mesh"] for row in rows] == ["data=2,fsdp=1,tensor=1", "data=1,fsdp=1,tensor=2"]
    assert all(0.0 <= row[name] <= 1.0 for row in rows for name in ("gather_share", "collectives_share"))
    # Every layer of every token has collectives where heads are split, and a whole rollout four where rows are.
    assert rows[1]["rollout_collectives_share"] > 5 * rows[0]["rollout_collectives_share"]


@full
def test_meshes_draw_the_same_tokens(monkeypatch, tmp_path, models):
    given = ("--policy", models / "policy", "--drafter", models / "drafter", "--task", "arithmetic", "--parts", "mesh")
    rows = rows_of(monkeypatch, "losslessness", tmp_path / "out", *given)
    assert [(row["mesh"], row["draft_length"]) for row in rows] == [
        (mesh, k) for mesh in ("data=2,fsdp=1,tensor=1", "data=1,fsdp=1,tensor=2") for k in (0, 2)
    ]
    assert all(row["divergences"] <= 1 and row["tokens"] > 100 for row in rows)
    assert all(row["divergences"] == 0 for row in rows[:2])


@ci
@pytest.mark.parametrize(
    ("script", "argv", "sentence"),
    [
        ("acceptance_by_task", ("--earlier", 1, "--drafts", "head"), "--earlier is for suffix and head+suffix drafts"),
        ("acceptance_by_task", ("--task", "jsonl"), "--data belongs to --task jsonl; give both"),
        ("acceptance_by_task", ("--draft-length", 0), "--draft-length is 0; it must be at least 1"),
        ("acceptance_by_task", ("--temperatures", -1), "temperature is -1.0; choose a value from 0"),
        ("acceptance_by_depth", ("--seeds", 0), "--seeds is 0; it must be at least 1"),
        ("acceptance_by_depth", ("--measured", 0), "--losses and --measured must name at least one each"),
        ("acceptance_by_depth", ("--drafter", "some"), "--drafter is made by the table; leave it out"),
        ("draft_methods", ("--rows", 0), "--rows must name at least one number, all of them at least 1"),
        ("draft_methods", ("--head.kind", "block"), "--drafter and --head.kind are chosen by the table"),
        ("online_adaptation", ("--averages", 1.5), "--averages is (1.5,); choose shares between 0 and 1"),
        ("online_adaptation", ("--draft-length", 0), "are chosen by the table"),
        ("bench_mesh", ("--draft-length", "auto"), "--draft-length is auto, whose steps differ from mesh to mesh"),
        ("online_adaptation", ("--other-drafter", "some"), "--other-drafter stands beside --drafter; give that too"),
        ("acceptance_by_task", ("--seeds", 0), "--seeds is 0; it must be at least 1"),
        ("async_pipeline", ("--lag", 1), "--lag, --compare and runs without drafts are chosen by the table"),
        ("async_pipeline", ("--lags", 0, 0), "--lags is (0, 0); choose different numbers from 0, and 0 among them"),
        ("async_pipeline", ("--loss.importance-cap", 0), "--lag 1 learns from responses of older policies"),
        ("async_pipeline", ("--mesh", "auto"), "--rollout-mesh data=1 needs the rest of the devices as --mesh"),
        ("online_adaptation", ("--drafter", "some"), "--drafter was made for a policy; give that --policy too"),
    ],
)
def test_bad_input_is_refused(monkeypatch, capsys, tmp_path, script, argv, sentence):
    out = tmp_path / "out"
    assert sentence in refusal(monkeypatch, capsys, SCRIPTS[script], "--preset", "smoke", *argv, "--out", out)
    assert not out.exists()
