"""The command line that every script shares, and output folders that nothing is lost in."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from experiments import common
from experiments.common import Run, RunOptions, configure_jax, parse_config, profile, progress, run_main
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from specrl_jax.errors import InputError

pytestmark = pytest.mark.ci


@dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 1e-3
    """Peak learning rate."""

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise InputError(f"learning_rate is {self.learning_rate}; it must be above 0")


@dataclass(frozen=True)
class Config:
    run: Run = RunOptions()
    optimizer: Optimizer = Optimizer()
    steps: int = 4
    draft_length: int | None = None


PRESETS = {"demo": {"steps": 100, "optimizer": {"learning_rate": 0.5}}, "smoke": {"steps": 2}}


def _parse(*argv):
    return parse_config(Config, PRESETS, argv, script="train", description="Trains.")


def _main(config):
    print(config.steps)
    if config.steps == 13:
        raise KeyboardInterrupt


def _run(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["train", *argv])
    run_main(_main, Config, PRESETS)


def test_explicit_options_override_the_preset():
    assert _parse().steps == 100
    assert _parse().run == RunOptions(preset="demo", out=Path("runs/train-demo"))
    chosen = _parse("--preset", "smoke", "--optimizer.learning-rate", "0.1", "--draft-length=3", "--seed", "7")
    assert chosen == Config(
        run=RunOptions(preset="smoke", out=Path("runs/train-smoke"), seed=7),
        optimizer=Optimizer(0.1),
        steps=2,
        draft_length=3,
    )
    assert _parse("--steps=5", "--preset=demo") == replace(_parse(), steps=5)
    assert _parse("--out", "there", "--resume").run == replace(_parse().run, out=Path("there"), resume=True)


def test_a_preset_with_an_unknown_field_is_a_bug():
    with pytest.raises(TypeError):
        parse_config(Config, {"smoke": {"stepz": 1}}, [], script="train")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--preset", "tiny"], '--preset "tiny" is unknown; choose one of demo, smoke'),
        (["--optimizer.learning-rate", "-1"], "learning_rate is -1.0; it must be above 0"),
        (["--seed", "-1"], "--seed is -1; choose a whole number from 0 to 2147483647"),
        (["--resume", "--overwrite"], "--resume and --overwrite contradict each other; give one of them"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(monkeypatch, capsys, argv, sentence):
    with pytest.raises(SystemExit) as stop:
        _run(monkeypatch, *argv)
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", f"error: {sentence}\n")


def test_other_ends_of_a_script(monkeypatch, capsys):
    _run(monkeypatch, "--steps", "3")
    assert capsys.readouterr() == ("3\n", "")
    for argv, code in ((["--steps", "13"], 130), (["--stepz"], 2), (["--steps", "x"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as stop:
            _run(monkeypatch, *argv)
        assert stop.value.code == code
    printed, complained = capsys.readouterr()
    assert complained.startswith("interrupted\n")
    assert "Traceback" not in complained
    for text in ("--preset", "demo, smoke", "--seed", "--out", "Peak learning rate", "The command line that every"):
        assert text in printed


def test_compiled_programs_are_kept(tmp_path, monkeypatch):
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        configure_jax(tmp_path / "given")
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "given")
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        configure_jax()
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "specrl_jax")
        # A cache folder that cannot be made is done without.
        monkeypatch.setenv("XDG_CACHE_HOME", str(Path(__file__)))
        configure_jax()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


SCRIPT = "train"


def _started(tmp_path, **options):
    run = RunOptions(out=tmp_path / "run", **options)
    return open_output(run, Config(run=run), SCRIPT)


def test_a_new_run_gets_its_folder_and_config(tmp_path):
    run = RunOptions(out=tmp_path / "deep" / "run")
    check_output(run, SCRIPT)
    assert not list(tmp_path.iterdir())
    folder = open_output(run, Config(run=run, draft_length=3), SCRIPT)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["optimizer"] == {"learning_rate": 1e-3}
    assert (saved["draft_length"], saved["run"]["out"]) == (3, str(run.out))


def test_an_existing_run_is_not_touched_unasked(tmp_path):
    folder = _started(tmp_path)
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="already holds a run; continue it with --resume, replace it with --overwrite"):
        _started(tmp_path)
    assert _started(tmp_path, resume=True) == folder
    assert (folder / "metrics.jsonl").exists()


def test_overwrite_deletes_a_run_and_nothing_else(tmp_path):
    # There need not be one.
    folder = _started(tmp_path, overwrite=True)
    made = [
        "metrics.jsonl",
        "policy/model.safetensors",
        "policy/config.json",
        ".policy.new/model.safetensors",
        "checkpoints/3/state/d/abc",
        "time.png",
    ]
    made += ["baseline/metrics.jsonl", "baseline/policy/tokenizer.json", "baseline/checkpoints/1/x", "results.md"]
    for name in made:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for foreign in (
        "notes.md",
        "policy/thesis.pdf",
        "baseline/notes.md",
        "data/config.json",
        "old.png/notes.md",
    ):
        path = folder / foreign
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with pytest.raises(InputError, match=f"holds {foreign}, which no run made; choose another folder"):
            _started(tmp_path, overwrite=True)
        assert all((folder / name).exists() for name in made)
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    _started(tmp_path, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_folder_belongs_to_one_script(tmp_path):
    folder = _started(tmp_path)
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(InputError, match="run holds a run of train, not of evaluate; choose another folder"):
            check_output(RunOptions(out=folder, **options), "evaluate")


def test_overwrite_spares_what_the_run_reads(tmp_path):
    run = RunOptions(out=_started(tmp_path), overwrite=True)
    (tmp_path / "run" / "policy").mkdir()
    (tmp_path / "other").mkdir()
    for inside in (tmp_path / "run" / "policy", tmp_path / "other" / ".." / "run" / "policy", tmp_path / "run"):
        with pytest.raises(InputError, match=r"--eval-data .* lies in --out .*, which --overwrite deletes"):
            check_output(run, SCRIPT, policy=None, eval_data=str(inside))
    check_output(run, SCRIPT, policy=str(tmp_path / "other"), eval_data="some/dataset")


def test_links_are_never_followed_by_overwrite(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "config.json").touch()
    folder = _started(tmp_path)
    for name, target in (("policy", precious), ("checkpoints", precious), ("samples.txt", precious / "config.json")):
        (folder / name).symlink_to(target)
        with pytest.raises(InputError, match=f"holds {name}, which no run made"):
            _started(tmp_path, overwrite=True)
        (folder / name).unlink()
    assert (precious / "config.json").exists()


def test_folders_that_cannot_hold_a_run(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    cases = [
        ({"out": tmp_path / "file"}, r"file cannot be written \(Not a directory\); choose another folder"),
        ({"out": tmp_path / "file" / "run"}, r"file/run cannot be written \(Not a directory\)"),
        ({"out": tmp_path / "new", "resume": True}, "--resume: .*new holds no run; leave --resume out to start one"),
        ({"out": tmp_path / "photos"}, "photos holds cat.png, which no run made"),
        ({"out": tmp_path / "photos", "overwrite": True}, "photos holds cat.png, which no run made"),
    ]
    for options, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            check_output(RunOptions(**options), SCRIPT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "photos"]


def test_an_unwritable_folder_is_refused_early(tmp_path, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(InputError, match=r"run cannot be written \(Permission denied\); choose another folder"):
        check_output(RunOptions(out=tmp_path / "run"), SCRIPT)


def test_a_run_resumes_with_the_options_it_was_started_with(tmp_path):
    _started(tmp_path)
    run = RunOptions(out=tmp_path / "run", resume=True)
    with pytest.raises(
        InputError, match=r"--resume: optimizer.learning_rate is 0.5 but the run in .*run was made with"
    ):
        open_output(run, Config(run=run, optimizer=Optimizer(0.5)), SCRIPT)
    with pytest.raises(InputError, match=r"run\.seed is 1 but"):
        open_output(replace(run, seed=1), Config(run=replace(run, seed=1)), SCRIPT)
    open_output(run, Config(run=run, steps=8), SCRIPT, may_change=("steps",))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 8
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json is not JSON; start again with --overwrite"):
        open_output(run, Config(run=run), SCRIPT)


def test_results_carry_where_they_come_from(tmp_path):
    source = provenance(seed=3)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert (source["commit"] or "").removesuffix(" (modified)") == head.stdout.strip()
    assert source["seed"] == 3
    assert f"jax {jax.__version__}" in source["versions"]
    assert all(value is None or isinstance(value, str | int) for value in source.values())

    rows = [{"k": 3, "speedup": 1.23456, "equal": True}, {"k": 0, "tokens": 123456.7, "rates": [0.5, float("nan")]}]
    write_results(tmp_path, rows, "Speed", source)
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["title"] == "Speed"
    assert saved["rows"][0] == {"k": 3, "speedup": 1.23456, "equal": True, **source}
    text = (tmp_path / "results.md").read_text()
    assert text.startswith("# Speed\n\n" + markdown_table(rows))
    assert f"- command: {source['command']}" in text


def test_tables_are_markdown():
    rows = [{"k": 3, "speedup": 1.23456, "equal": True}, {"k": 0, "tokens": 123456.7, "rates": [0.5, float("nan")]}]
    assert markdown_table(rows).splitlines() == [
        "| k   | speedup | equal | tokens | rates  |",
        "| --- | ------- | ----- | ------ | ------ |",
        "| 3   | 1.235   | yes   | -      | -      |",
        "| 0   | -       | -     | 123457 | 0.5, - |",
    ]


def test_progress_without_a_terminal_is_plain_lines(capsys, monkeypatch):
    clock = iter([0.0, 4.0, 20.0, 24.0])
    monkeypatch.setattr(common.time, "monotonic", lambda: next(clock))
    with progress("GRPO", total=10, done=4) as advance:
        advance(2, "reward 0.1")
        advance(3, "reward 0.2")
        advance(note="reward 0.3")
    assert capsys.readouterr().out == "GRPO 9/10 reward 0.2 (0:04 left)\nGRPO 10/10 reward 0.3 (0:00 left)\n"


def test_progress_on_a_terminal_shows_the_time_left(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress("GRPO", total=10, done=4) as advance:
        advance(6, "reward 0.1")
    shown = capsys.readouterr().out
    assert "10/10" in shown
    assert "left" in shown
    assert "reward 0.1" in shown


def test_profile_leaves_a_trace(tmp_path):
    with profile(None):
        pass
    with profile(tmp_path / "profile"):
        jnp.ones(3).sum().block_until_ready()
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
