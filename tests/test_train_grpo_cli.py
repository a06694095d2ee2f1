"""The command line of train_grpo: bad input is refused before anything happens, killed runs resume to the same bits."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from scripts import DAMAGES, SCRIPTS, SMALLER, give_prices, refusal, run_script, write_models

from experiments import evaluate, generate, train_grpo
from experiments.common import parse_config
from experiments.setup import resolve_mesh
from specrl_jax.data import arithmetic
from specrl_jax.training import costs, grpo_run, stages
from specrl_jax.training.checkpoints import CheckpointWriter
from specrl_jax.training.metrics import read_metrics

ROOT = Path(__file__).parents[1]
SMALL = """
    --preset smoke --no-compare --steps 4 --scan-steps 1 --prompts 2 --samples 4 --microbatch.rows 4 --max-new-tokens 12
    --eval-problems 4 --eval-every 2 --sample-every 1 --draft.microbatch.rows 2 --draft.online-sequences 2
"""
STAGES = """
    --shape.hidden-size 16 --shape.intermediate-size 32 --warmup.steps 4 --warmup.batch 4 --warmup.microbatch.rows 2
    --draft.prompts 8 --draft.steps 4 --draft.batch 4
"""
GSM8K = '{"question": "How much is 1 + 2?", "answer": "1 + 2 = 3\\n#### 3"}\n'


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Check that train_grpo refuses some options in a sentence, and leaves the output folder as it is."""

    def check(sentence, *argv):
        out = tmp_path / "out"
        before = sorted(out.rglob("*"))
        said = refusal(monkeypatch, capsys, train_grpo, "--preset", "smoke", "--out", out, *argv)
        assert re.search(sentence, said), said
        assert sorted(out.rglob("*")) == before

    return check


@pytest.mark.ci
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_policies_are_refused(refused, models, tmp_path, damage):
    policy = shutil.copytree(models / "policy", tmp_path / "policy")
    harm, sentence = DAMAGES[damage]
    harm(policy)
    refused(sentence, "--policy", policy)


@pytest.mark.ci
def test_drafters_that_do_not_fit_are_refused(refused, models, tmp_path):
    other = write_models(tmp_path / "other", *SMALLER)
    policy = ("--policy", models / "policy")
    refused("made for a policy of hidden_size 16, not 32", *policy, "--drafter", other / "drafter")
    drafter = shutil.copytree(models / "drafter", tmp_path / "drafter")
    (drafter / "model.safetensors").unlink()
    refused("drafter lacks model.safetensors", *policy, "--drafter", drafter)
    refused("draft head '/no/such' is neither a folder nor", *policy, "--drafter", "/no/such")


@pytest.mark.ci
def test_prompts_longer_than_the_cache_are_refused(refused, models):
    # Arithmetic prompts take up to 44 tokens.
    sentence = (
        "prompts of up to 44 tokens with responses of up to 213 exceed the policy's max_position_embeddings of 256"
    )
    refused(sentence, "--policy", models / "policy", "--max-new-tokens", 213)
    refused("max_position_embeddings of 4096", "--max-new-tokens", 4096)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--steps 0", "--steps is 0; it must be at least 1"),
        ("--samples 1", "--samples is 1; it must be at least 2"),
        ("--eval-every -1", "--eval-every is -1"),
        ("--data-limit 0", "--data-limit is 0"),
        ("--warmup.steps -1", "--warmup.steps is -1; it must be at least 0"),
        ("--warmup.batch 6", "6 sequences .* do not split into microbatches of 4"),
        ("--warmup.batch 7 --mesh data=2", "--warmup.batch is 7, which 2 devices cannot share; choose a multiple of 2"),
        ("--warmup.data more.jsonl", "--data, --eval-data, --reward and --warmup.data belong to --task jsonl"),
        ("--warmup.focus 1.5", "--warmup.focus is 1.5; choose a share from 0 to 1"),
        ("--draft.unroll 0", "--draft.unroll is 0; it must be at least 1"),
        ("--draft.tolerance -0.1", "--draft.tolerance is -0.1; choose a share from 0 to below 1"),
        ("--draft.average 1", "--draft.average is 1.0; choose a share from 0 to below 1"),
        ("--draft.batch 10", "10 sequences .* do not split into microbatches of 4"),
        (
            "--draft.batch 24",
            "16 rollouts for the draft head of 16 prompts fill no batch of 24",
        ),
        ("--draft.online-sequences 9", "draft_sequences is 9; choose 0 to 8"),
        ("--draft.microbatch.rows 4 --draft.online-sequences 3", "6 sequences .* do not split into microbatches of 4"),
        ("--cache-bytes 0", "--cache-bytes is 0; it must be at least 1"),
        ("--cache-bytes 1000", "cache_bytes is 1000; .* need at least [0-9]+: raise it, or lower rows"),
        ("--microbatch.rows 0", "microbatch rows is 0"),
        ("--microbatch.rows 5", "16 sequences .* do not split into microbatches of 5"),
        (
            "--prompts 3 --updates-per-rollout 2",
            "3 prompts per step do not split over 1 devices and 2",
        ),
        ("--updates-per-rollout 0", "--updates-per-rollout is 0; it must be at least 1"),
        ("--temperature -0.5", "temperature is -0.5; choose a value from 0"),
        ("--temperature 0", "--temperature is 0.0: all responses of a group would be one"),
        ("--shape.family qwen2", "use a policy of the qwen3 or llama family"),
        (
            "--shape.family llama --shape.hidden-size 34 --shape.num-heads 8 --shape.num-kv-heads 1",
            "34 is not a multiple of num_heads 8",
        ),
        ("--shape.num-heads 0", "--shape.num-heads is 0; it must be at least 1"),
        ("--eval-problems 1", "--eval-problems is 1; it must be at least 2"),
        ("--max-new-tokens 0", "max_new_tokens is 0; it must be at least 1"),
        ("--draft-length -1", "draft_length is -1; choose a number from 0 to 64"),
        ("--draft-length 65 --rule block", "draft_length is 65; choose a number from 0 to 64"),
        ("--min-new-tokens 49", "min_new_tokens is 49, above max_new_tokens 48; lower it"),
        ("--forbidden 1", "every end token is forbidden, so that no response could end"),
        ("--temperature 1e-9", "temperature is 1e-09; choose a value from 0.001 to 100, or 0"),
        ("--drafts head+suffix --rule ratio", "--drafts head\\+suffix are chains under --rule match"),
        ("--drafts ngram --drafter some", "--drafts ngram does not use --drafter; leave one of them out"),
        ("--history 0", "--history is 0"),
        ("--drafter some", "--drafter was made for a policy; give that --policy too"),
        ("--couple-epochs", "--couple-epochs needs --task jsonl, whose prompts come again, and --rule match"),
        ("--top-k -1", "top_k is -1; it must be at least 0"),
        ("--top-p 0", "top_p is 0.0; choose a mass above 0 and at most 1"),
        ("--min-p 1", "min_p is 1.0; choose a share of at least 0 and below 1"),
        ("--repetition-penalty 0", "repetition_penalty is 0.0; it must be a number above 0"),
        ("--forbidden 3 4000", "forbidden token 4000 is not in the policy's vocabulary of 22"),
        ("--branches 0", "branches is 0; it must be at least 1"),
        ("--most-drafts 0", "--most-drafts is 0; choose 1 to 64, or --draft-length 0 for no drafts"),
        ("--most-drafts 65 --draft-length auto", "--most-drafts is 65; choose 1 to 64"),
        (
            "--most-drafts 5",
            "--most-drafts 5 is for --draft-length auto, in chains or combs under --rule match, or with",
        ),
        ("--most-drafts 5 --draft-length auto --rule block", "--most-drafts 5 is for --draft-length auto"),
        ("--branches 5 --draft-length auto --numerics plain", "of 7 with 5 branches has 35 drafts; choose at most 32"),
        (
            "--draft-length auto --acceptance-floor 2",
            "--acceptance-floor is 2.0 and --draft-length auto, which chooses",
        ),
        ("--tree full", "--tree is full with --branches 1, a chain; choose more branches"),
        ("--branches 2 --rule ratio", "--branches is 2 with --rule ratio; trees need --rule match"),
        ("--branches 3 --tree full --draft-length 7", "tree of 3 branches and depth 7 has 3279 drafts; choose at most"),
        ("--lenience 2", "--lenience is 2.0 with --rule match; it belongs to --rule ratio"),
        ("--lenience 0.5 --rule ratio", "lenience is 0.5; choose a number of at least 1"),
        ("--lenience 2 --rule ratio", "--lenience 2.0 changes the law of the responses and --loss.importance-cap is 0"),
        ("--loss-on full", "--loss-on full is not the law that responses are drawn from"),
        ("--loss.importance-cap -1", "importance_cap is -1.0; it must be a number of at least 0"),
        ("--dynamic-sampling -1", "--dynamic-sampling is -1; it must be at least 0"),
        ("--dynamic-sampling 2 --lag 1 --loss.importance-cap 2", "2 does not go with --lag or --rollout-mesh"),
        ("--dynamic-sampling 2 --mesh data=1 --rollout-mesh data=1", "2 does not go with --lag or --rollout-mesh"),
        ("--dynamic-sampling 2 --couple-epochs --task jsonl --data some.jsonl", "may bring a prompt twice in a step"),
        ("--overlong-buffer 49", "--overlong-buffer is 49, above --max-new-tokens 48; lower it"),
        ("--overlong-buffer 8 --shuffle-rewards", "--overlong-buffer 8 would teach lengths where --shuffle-rewards"),
        ("--optimizer.learning-rate 0", "learning_rate is 0.0; it must be a number above 0"),
        ("--loss.clip-low 0", "clip_low is 0.0"),
        ("--shape.num-kv-heads 3", "num_heads 2 is not a multiple of num_kv_heads 3"),
        ("--shape.hidden-size 0", "--shape.hidden-size is 0; it must be at least 1"),
        ("--mesh data=99", "takes 99 devices but jax sees 8"),
        ("--mesh rows=2", 'unknown axis "rows"'),
        ("--mesh tensor=4", "mesh axis tensor is 4 and does not divide the policy's num_heads of 2"),
        ("--seed -1", "--seed is -1"),
        ("--task jsonl", "--task jsonl needs --data"),
        ("--data some.jsonl", "--data, --eval-data, --reward and --warmup.data belong to --task jsonl"),
        (
            "--task jsonl --data some.jsonl --policy some --warmup.data more.jsonl",
            "--warmup.data is for a policy made from nothing; leave it or --policy out",
        ),
    ],
)
def test_values_out_of_range_are_refused(refused, argv, sentence):
    refused(sentence, *argv.split())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (GSM8K * 2 + '{"question": "How', "data.jsonl, line 3: this is not valid JSON .*; correct or remove it"),
        (GSM8K + '{"question": "How much?"}\n', "data.jsonl, line 2: field 'answer' is missing"),
        (GSM8K + '{"question": "How much?", "answer": "3"}\n', "data.jsonl, line 2: field 'answer' does not end with"),
        ("", "data.jsonl' holds no rows"),
        (GSM8K * 5, "no held-out examples are left"),
        ('{"prompt": "Speak."}\n' * 9, "row 0 has no answer to judge a response by; give --reward"),
    ],
)
def test_malformed_examples_are_refused(refused, models, tmp_path, lines, sentence):
    data = tmp_path / "data.jsonl"
    data.write_text(lines)
    refused(sentence, "--policy", models / "policy", "--task", "jsonl", "--data", data, "--data-limit", 5)


@pytest.mark.ci
def test_too_few_examples_are_refused(refused, models, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(GSM8K * 9)
    jsonl = ("--policy", models / "policy", "--task", "jsonl", "--data", data, "--data-limit", 3)
    refused("a step of 4 prompts cannot be drawn from 3 examples", *jsonl)
    refused("none of the 3 prompts has between 1 and 4 tokens", *jsonl, "--max-prompt-tokens", 4)
    refused("module of reward 'nowhere:f' cannot be imported", *jsonl, "--reward", "nowhere:f")


@pytest.mark.ci
def test_missing_packages_are_refused_early(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(r"--wandb needs wandb, which is not installed; run pip install \"\.\[wandb\]\"", "--wandb")


@pytest.mark.ci
def test_every_preset_can_be_asked_for_with_its_data():
    for preset in train_grpo.PRESETS:
        config = parse_config(train_grpo.Config, train_grpo.PRESETS, ["--preset", preset], script="train_grpo")
        assert config.run.preset == preset
        assert config.fits(1)


@pytest.mark.ci
def test_the_automatic_mesh_leaves_out_devices_that_no_batch_fits(monkeypatch):
    config = parse_config(train_grpo.Config, train_grpo.PRESETS, ["--preset", "demo"], script="train_grpo")
    assert not config.fits(8)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert resolve_mesh("auto", config.fits).data == 2
    assert resolve_mesh("auto", lambda devices: False).data == 1
    assert resolve_mesh("data=3", config.fits).data == 3


@pytest.mark.ci
def test_an_output_folder_that_holds_a_run_is_refused(refused, tmp_path):
    refused("holds no run; leave --resume out", "--resume")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").touch()
    refused("holds letter.txt, which no run made", "--overwrite")
    (tmp_path / "out" / "config.json").write_text("{}")
    refused("already holds a run; continue it with --resume, replace it with --overwrite, or choose another folder")


@pytest.mark.ci
def test_the_command_ends_with_status_2_and_one_sentence(tmp_path):
    command = [sys.executable, "-m", "experiments.train_grpo", "--policy", tmp_path / "none", "--out", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"error: policy '.*/none' is neither a folder nor .*; check the name and the connection\n", done.stderr
    )
    assert not (tmp_path / "out").exists()


class KilledError(Exception):
    """Stands for the signal that ends a process."""


def _run_until_saved(module, times, out, *argv):
    """Run train_grpo until `module` is about to write a checkpoint for the `times`-th time."""
    saved = []

    class Writer(CheckpointWriter):
        def save(self, *args):
            saved.append(args)
            if len(saved) == times:
                raise KilledError
            super().save(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CheckpointWriter", Writer)
        with pytest.raises(KilledError):
            run_script(patch, train_grpo, *argv, "--out", out)


def _read(folder, name):
    return json.loads((folder / name).read_text())


def _assert_same_run(run, other):
    ours, theirs = _read(run, "summary.json"), _read(other, "summary.json")
    for name in ("params_sha256", "trajectory_sha256", "accuracy_before", "accuracy_after", "acceptance_length"):
        assert ours[name] == theirs[name]
    rows, others = read_metrics(run), read_metrics(other)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert any(row["grad_norm"] > 0 for row in rows[3:]), "nothing is learned after the resume"
    names = ("step", "reward_mean", "grad_norm", "draft_loss", "entropy", "accuracy")
    assert [[row.get(name) for name in names] for row in rows] == [[row.get(name) for name in names] for row in others]
    for name in ("trajectories.bin", "policy/model.safetensors", "drafter/model.safetensors", "samples.txt"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name


def odd_length(response, example):
    """A reward that some responses earn."""
    return float(len(response) % 2)


def odd_length_of_some(response, example):
    """The same, of every other prompt."""
    return float(len(response) % 2 * (example.row_id % 2))


@pytest.fixture(scope="module")
def programs_are_kept(tmp_path_factory):
    """Programs compiled by one run are found by the next, as outside of tests."""
    wanted = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.05,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in wanted}
    for settings in (wanted, before):
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if settings is wanted:
            yield


@pytest.fixture(scope="module")
def options(tmp_path_factory, models):
    """Options of a small run with rewards from the host."""
    folder = tmp_path_factory.mktemp("data")
    for name, start in (("train", 10), ("test", 20)):
        rows = ({"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(start, start + 9))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (
        "--data",
        folder / "train.jsonl",
        "--eval-data",
        folder / "test.jsonl",
        "--reward",
        f"{__name__}:odd_length",
    )
    given = ("--policy", models / "policy", "--drafter", models / "drafter", "--task", "jsonl", *data)
    return (*shlex.split(SMALL), *given, "--numerics", "plain", "--optimizer.name", "adamw", "--draft-length", 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, options, programs_are_kept):
    """The folder of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        run_script(patch, train_grpo, *options, "--out", out)
    return out


@pytest.mark.ci
def test_a_run_killed_between_checkpoints_resumes_to_the_same_bits(finished, options, tmp_path, monkeypatch):
    out = tmp_path / "run"
    _run_until_saved(grpo_run, 3, out, *options)
    # Step 3 has left its metrics and tokens, and no checkpoint.
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4
    assert (out / "trajectories.bin").stat().st_size > 0
    assert sorted(path.name for path in (out / "checkpoints" / "grpo").iterdir()) == ["1", "2"]
    assert not (out / "policy").exists()
    run_script(monkeypatch, train_grpo, *options, "--out", out, "--resume")
    _assert_same_run(out, finished)


DAPO = """
    --loss.clip-low 0.2 --loss.clip-high 0.28 --no-normalize-std --dynamic-sampling 3 --overlong-buffer 4
    --truncated mask
"""


@pytest.mark.ci
def test_a_dapo_run_resumes_to_the_same_bits(options, tmp_path, monkeypatch):
    """Half of the prompts teach nothing, so that the steps take more of them than the batches hold."""
    argv, whole, cut = [*options, *shlex.split(DAPO)], tmp_path / "whole", tmp_path / "cut"
    argv[argv.index("--reward") + 1] = f"{__name__}:odd_length_of_some"
    run_script(monkeypatch, train_grpo, *argv, "--out", whole)
    _run_until_saved(grpo_run, 3, cut, *argv)
    run_script(monkeypatch, train_grpo, *argv, "--out", cut, "--resume")
    _assert_same_run(cut, whole)
    rows, resumed = (read_metrics(folder)[1:] for folder in (whole, cut))
    for name in ("sampled_groups", "dropped_groups", "surplus_groups", "sampled_tokens", "reward_shaped_mean"):
        assert [row[name] for row in rows] == [row[name] for row in resumed]
    assert sum(row["dropped_groups"] for row in rows) > 0
    assert max(row["sampled_groups"] for row in rows) > 2


@pytest.mark.ci
@pytest.mark.parametrize("drafts", ["suffix", "head+suffix", "small policy"])
def test_a_run_with_other_drafts_is_the_same_run(finished, options, models, tmp_path, monkeypatch, drafts):
    """A small policy, here the policy of before the run, drafts frozen."""
    given = [*options, "--drafts", "head" if drafts == "small policy" else drafts]
    if drafts == "suffix":
        del given[given.index("--drafter") : given.index("--drafter") + 2]
    if drafts == "small policy":
        given[given.index("--drafter") + 1] = models / "policy"
    out = tmp_path / "run"
    run_script(monkeypatch, train_grpo, *given, "--out", out)
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (out, finished))
    assert ours["trajectory_sha256"] == theirs["trajectory_sha256"]
    assert ours["params_sha256"] == theirs["params_sha256"]
    assert (out / "drafter").is_dir() == (drafts == "head+suffix")


@pytest.mark.ci
def test_the_folders_of_a_run_can_be_sampled_and_evaluated(finished, options, tmp_path, monkeypatch):
    models = ("--policy", finished / "policy", "--drafter", finished / "drafter", "--max-new-tokens", 12)
    run_script(monkeypatch, generate, *models, "--prompt", "18+29=", "1-", "--samples", 3, "--out", tmp_path / "g")
    assert [row["prompt"] for row in _read(tmp_path / "g", "results.json")["rows"]] == ["18+29="] * 3 + ["1-"] * 3
    assert _read(tmp_path / "g", "summary.json")["acceptance_length"] >= 1.0
    # train_grpo's own evaluation is found again.
    data, reward = (options[options.index(name) + 1] for name in ("--eval-data", "--reward"))
    greedy = ("--task", "jsonl", "--data", data, "--reward", reward, "--temperature", 0, "--problems", 4)
    run_script(monkeypatch, evaluate, *models, *greedy, "--out", tmp_path / "e")
    evaluated, summary = _read(tmp_path / "e", "summary.json"), _read(finished, "summary.json")
    assert evaluated["accuracy"] == summary["accuracy_after"]


@pytest.fixture
def some_rewards(monkeypatch):
    """Rewards in the graph that an untrained policy earns, so that there is something to learn."""

    def reward(table, problems, tokens, lengths):
        return (lengths % 2).astype(jnp.float32)

    monkeypatch.setattr(arithmetic, "reward", reward)


@pytest.mark.full
@pytest.mark.usefixtures("some_rewards", "programs_are_kept")
def test_a_run_killed_in_every_stage_resumes_to_the_same_bits(tmp_path, monkeypatch):
    out, argv = tmp_path / "run", (*shlex.split(SMALL), *shlex.split(STAGES))
    run_script(monkeypatch, train_grpo, *argv, "--out", tmp_path / "whole")
    # Warm-up and draft head: four and two checkpoints; GRPO: one a step.
    _run_until_saved(stages, 3, out, *argv)
    assert not (out / "warmup").exists()
    _run_until_saved(stages, 4, out, *argv, "--resume")
    assert (out / "warmup" / "config.json").is_file()
    assert not (out / "drafter").exists()
    _run_until_saved(grpo_run, 3, out, *argv, "--resume")
    assert not (out / "policy").exists()
    run_script(monkeypatch, train_grpo, *argv, "--out", out, "--resume")
    _assert_same_run(out, tmp_path / "whole")


@pytest.mark.ci
def test_an_adaptive_run_resumes_with_the_cost_table_that_it_began_with(options, tmp_path, monkeypatch):
    """Its tokens and parameters are those of a fixed draft length, and nothing is measured a second time."""
    # In plain numerics a log-prob's last bit may change with the tokens of a round, and parameters with it.
    options = ["invariant" if option == "plain" else option for option in options]
    finished = tmp_path / "finished"
    run_script(monkeypatch, train_grpo, *options, "--out", finished)
    out, argv = tmp_path / "run", (*options, "--draft-length", "auto")
    give_prices(monkeypatch)
    _run_until_saved(grpo_run, 3, out, *argv)
    table = (out / "costs.json").read_bytes()
    monkeypatch.setattr(costs, "measure_costs", None)
    run_script(monkeypatch, train_grpo, *argv, "--out", out, "--resume")
    assert (out / "costs.json").read_bytes() == table
    for name in ("params_sha256", "trajectory_sha256"):
        assert _read(out, "summary.json")[name] == _read(finished, "summary.json")[name]


@pytest.mark.full
def test_a_process_killed_by_a_signal_resumes_to_the_same_bits(tmp_path):
    command = [sys.executable, "-m", "experiments.train_grpo", *shlex.split(SMALL + STAGES), "--steps", "8", "--out"]
    subprocess.run([*command, tmp_path / "whole"], cwd=ROOT, check=True)
    out = tmp_path / "killed"
    process = subprocess.Popen([*command, out], cwd=ROOT)
    metrics = out / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 4):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    subprocess.run([*command, out, "--resume"], cwd=ROOT, check=True)
    for name in ("params_sha256", "trajectory_sha256"):
        assert _read(out, "summary.json")[name] == _read(tmp_path / "whole", "summary.json")[name]


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_smoke_preset_runs(tmp_path, script):
    if script == "convert":
        pytest.importorskip("torch")
    command = [sys.executable, "-m", f"experiments.{script}", "--preset", "smoke", "--out", tmp_path / "out"]
    # No program compiled by an earlier run is at hand.
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    for name in ("config.json", "results.json", "results.md", "summary.json"):
        assert (tmp_path / "out" / name).is_file()
