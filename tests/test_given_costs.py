"""A cost table that a GRPO run is given: the controller goes by it under every rule, and a killed run resumes by it."""

import json
import shutil

import pytest
from scripts import refusal, run_script
from test_train_grpo_cli import _assert_same_run, _run_until_saved, models, options, programs_are_kept  # noqa: F401
from tiny import equal_prices

from experiments import train_grpo
from experiments.common import parse_config
from specrl_jax.training import costs, grpo_run


@pytest.fixture
def small(request):
    """Options of a small run with rewards from the host, on one device."""
    return (*request.getfixturevalue("options"), "--draft-length", "auto", "--most-drafts", 3, "--mesh", "data=1")


def table_of(argv, path):
    """The table of a run under rule match, as it would be if all rounds cost alike."""
    config = parse_config(train_grpo.Config, train_grpo.PRESETS, list(map(str, argv)), script="train_grpo")
    session, *_ = train_grpo.open_session(config)
    program = session.program(session.draft_length)
    engine, rows = program.step.engine, session.rows(program)
    prices = equal_prices(engine.config, rows)
    costs.save_costs(path, prices, engine.config.bodies_for(rows), costs._described(engine))
    return path


@pytest.mark.full
@pytest.mark.usefixtures("programs_are_kept")
def test_a_killed_run_under_another_rule_goes_on_by_its_table(small, tmp_path, monkeypatch):
    given = table_of(small, tmp_path / "given.json")
    argv = (*small, "--rule", "block", "--costs", given)
    monkeypatch.setattr(costs, "measure_costs", lambda *_: pytest.fail("a clock was asked"))
    run_script(monkeypatch, train_grpo, *argv, "--out", tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["acceptance_length"] > 1.2
    out = tmp_path / "run"
    _run_until_saved(grpo_run, 3, out, *argv)
    assert (out / "costs.json").read_text() == given.read_text()
    given.unlink()  # what a run began with is its own
    run_script(monkeypatch, train_grpo, *argv, "--out", out, "--resume")
    _assert_same_run(out, tmp_path / "whole")


@pytest.mark.ci
def test_tables_that_do_not_serve_are_refused(small, tmp_path, monkeypatch, capsys):
    given = table_of(small, tmp_path / "given.json")

    def refused(sentence, *argv, out="out"):
        argv = (*small, "--out", tmp_path / out, *argv)
        assert sentence in refusal(monkeypatch, capsys, train_grpo, *argv)

    refused("cost table nowhere.json cannot be read", "--costs", "nowhere.json")
    refused("trees in invariant numerics have none", "--costs", given, "--branches", 2, "--numerics", "invariant")
    refused("--most-drafts 5 is for a controller", "--most-drafts", 5, "--branches", 2, "--numerics", "invariant")
    refused("is for --draft-length auto, in chains or combs", "--costs", given, "--draft-length", 3, "--most-drafts", 7)
    refused("is of another policy, drafter, law or numerics", "--costs", given, "--temperature", 0.5)
    refused("give that of a run of the same models and options", "--costs", given, "--samples", 2)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    refused("cannot be read", "--costs", broken)
    assert not (tmp_path / "out").exists()
    # An earlier run's table in the folder that would be deleted.
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"script": "train_grpo"}')
    shutil.copy(given, run / "costs.json")
    refused("--overwrite", "--costs", run / "costs.json", "--overwrite", out="run")
    assert (run / "costs.json").read_text() == given.read_text()
