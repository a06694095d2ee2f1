"""generate and evaluate: exact with and without a drafter, the same texts in both, figures recomputed by hand."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest
from scripts import DAMAGES, SCRIPTS, SMALLER, refusal, run_script, write_models

from experiments import evaluate, generate
from specrl_jax.data.jsonl import load_examples
from specrl_jax.data.tokenizers import arithmetic_tokenizer
from specrl_jax.rl.pass_at_k import mean_ci95
from specrl_jax.training.workloads import JsonlProblems

pytestmark = pytest.mark.ci
BOTH = pytest.mark.parametrize("script", ["generate", "evaluate"])
SUMS = [f"{i}+{i}=" for i in range(1, 8)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "answer": "2"}) + "\n" for text in SUMS))
    return file


def _run(out, script, *argv):
    """The rows of results.json and summary.json of a script that ran."""
    with pytest.MonkeyPatch.context() as patch:
        run_script(patch, script, *argv, "--out", out)
    assert (out / "config.json").is_file()
    return json.loads((out / "results.json").read_text())["rows"], json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def responses(tmp_path_factory, models, data):
    """Six responses to each sum, without and with a drafter: the options, and rows and figures of both."""
    options = ("--policy", models / "policy", "--task", "jsonl", "--data", data, "--samples", 6, "--max-new-tokens", 12)
    options = (*options, "--seed", 5)
    folder = tmp_path_factory.mktemp("responses")
    drafter = ("--drafter", models / "drafter")
    return options, _run(folder / "alone", generate, *options), _run(folder / "drafted", generate, *options, *drafter)


def _texts(rows):
    return [(row["row_id"], row["sample"], row["prompt"], row["response"], row["tokens"]) for row in rows]


def test_a_drafter_changes_the_speed_and_no_token(responses):
    _, (alone, slow), (drafted, fast) = responses
    assert _texts(drafted) == _texts(alone)
    assert [row["prompt"] for row in alone[::6]] == SUMS
    assert len({row["response"] for row in alone}) > 20
    assert (slow["draft_length"], fast["draft_length"]) == (0, 3)
    assert "acceptance_length" not in slow
    assert fast["acceptance_length"] > 1.0
    assert fast["policy_forwards_per_sequence"] < slow["policy_forwards_per_sequence"]
    assert fast["entropy"] == pytest.approx(slow["entropy"], rel=1e-6)
    assert slow["response_tokens"] == sum(row["tokens"] for row in alone)
    assert slow["tokens_per_second"] == pytest.approx(slow["response_tokens"] / slow["seconds"])
    assert {"commit", "command", "seed", "device", "versions"} <= alone[0].keys()


def test_a_policy_drafts(tmp_path, responses, models):
    """For itself, and so nearly always right."""
    options, (alone, _), _ = responses
    rows, summary = _run(tmp_path / "run", generate, *options, "--drafter", models / "policy")
    assert _texts(rows) == _texts(alone)
    assert summary["acceptance_length"] > 3.9


@pytest.mark.parametrize(
    ("flags", "same"), [(("--branches", 2), True), (("--argmax-drafts",), True), (("--rule", "block"), False)]
)
def test_rules_and_trees_by_flags(tmp_path, responses, models, flags, same):
    options, (alone, slow), _ = responses
    drafter = ("--drafter", models / "drafter")
    rows, summary = _run(tmp_path / "run", generate, *options, *drafter, *flags)
    assert (_texts(rows) == _texts(alone)) == same
    assert summary["acceptance_length"] > 1.0
    assert summary["policy_forwards_per_sequence"] < slow["policy_forwards_per_sequence"]
    assert flags[0].removeprefix("--").replace("-", "_") in summary["rule"] or "Block" in summary["rule"]


def test_the_sampling_law_by_flags(tmp_path, responses):
    """Top-k 1 is greedy whatever the temperature; a forbidden token never comes."""
    options, (alone, _), _ = responses
    rows, _ = _run(tmp_path / "greedy", generate, *options, "--top-k", 1, "--temperature", 1.3)
    assert len({(row["row_id"], row["response"]) for row in rows}) == len(SUMS)
    nines = [row["response"].count("9") for row in alone]
    assert sum(nines) > 0
    nine = arithmetic_tokenizer().convert_tokens_to_ids("9")
    rows, _ = _run(tmp_path / "forbidden", generate, *options, "--forbidden", nine)
    assert not any("9" in row["response"] for row in rows)


def short_response(response, example):
    """A reward of the user's own."""
    assert example.prompt in SUMS
    return 1.0 if len(response) % 3 == 0 else 0.0


def test_evaluate_judges_the_texts_of_generate(tmp_path, responses, models):
    options, (rows, _), (_, drafted) = responses
    # Calls of 4 prompts over 2 devices; the second holds one that does not count.
    split = ("--batch", 24, "--mesh", "data=2", "--drafter", models / "drafter")
    reward = ("--reward", f"{__name__}:short_response")
    results, summary = _run(tmp_path / "run", evaluate, *options, *split, *reward, "--k", "2,5")
    for name in ("entropy", "acceptance_length", "policy_forwards_per_sequence", "truncated_fraction"):
        assert summary[name] == pytest.approx(drafted[name], rel=1e-6), name
    right = np.array([len(row["response"]) % 3 == 0 for row in rows]).reshape(7, 6)
    assert summary["right_per_problem"] == right.sum(axis=1).tolist()
    assert 0 < right.sum() < right.size
    assert [row["k"] for row in results] == [1, 2, 5]
    for row in results:
        # Every choice of k of the 6 responses, counted out.
        rates = [np.mean([any(chosen) for chosen in itertools.combinations(p, row["k"])]) for p in right]
        assert row["pass_at_k"] == pytest.approx(np.mean(rates))
        assert row["ci95"] == pytest.approx(1.96 * np.std(rates, ddof=1) / 7**0.5)
        assert (row["problems"], row["samples"]) == (7, 6)
        assert summary[f"pass_at_{row['k']}"] == row["pass_at_k"]
    assert summary["accuracy"] == results[0]["pass_at_k"]
    assert "normal approximation over problems" in results[0]["interval"]


def test_greedy_text_is_that_of_transformers(tmp_path, models, capsys):
    prompts = ("1+2", "33-14")
    policy = shutil.copytree(models / "policy", tmp_path / "policy")
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}0{{ message['content'] }}={% endfor %}"
    tokenizer.save_pretrained(policy)
    greedy = ("--temperature", 0, "--max-new-tokens", 12, "--drafter", models / "drafter")
    rows, _ = _run(tmp_path / "run", generate, "--policy", policy, "--prompt", *prompts, *greedy)
    assert [row["prompt"] for row in rows] == ["01+2=", "033-14="]
    printed = capsys.readouterr().out
    assert all(row["prompt"] + row["response"] in printed for row in rows)

    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy)
    for row, prompt in zip(rows, prompts, strict=True):
        chat = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False)
        ids = tokenizer(chat, return_tensors="pt", return_token_type_ids=False, add_special_tokens=False)
        out = model.generate(**ids, do_sample=False, max_new_tokens=12)[0, ids["input_ids"].shape[1] :]
        assert row["response"] == tokenizer.decode(out, skip_special_tokens=True)
        assert row["tokens"] == len(out)


def test_the_test_set_is_the_front_and_the_development_set_the_back(data):
    problems = JsonlProblems(arithmetic_tokenizer(), load_examples(data).examples, short_response, 100)
    for split, row_ids in (("test", [0, 1]), ("dev", [5, 6])):
        prompts, examples = problems.held_out(split, 2)
        assert prompts.row_ids.tolist() == row_ids
        assert [example.row_id for example in examples] == row_ids
    assert len(problems.held_out("dev", 100)[1]) == 7


def test_a_mean_with_its_interval():
    assert mean_ci95(np.array([0.0, 1.0])) == (0.5, pytest.approx(1.96 * 0.5**0.5 / 2**0.5))
    mean, half_width = mean_ci95(np.array([0.25]))
    assert mean == 0.25
    assert np.isnan(half_width)


def test_the_smoke_preset_needs_nothing(tmp_path):
    rows, summary = _run(tmp_path / "run", evaluate, "--preset", "smoke")
    assert summary["draft_length"] == 3
    assert [row["k"] for row in rows] == [1, 4]


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Check that a script refuses some options in a sentence, and leaves the output folder as it is."""

    def check(script, sentence, *argv):
        out = tmp_path / "out"
        before = sorted(out.rglob("*"))
        said = refusal(monkeypatch, capsys, SCRIPTS[script], *argv, "--out", out)
        assert re.search(sentence, said), said
        assert sorted(out.rglob("*")) == before

    return check


@BOTH
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_policies_are_refused(refused, models, tmp_path, script, damage):
    policy = shutil.copytree(models / "policy", tmp_path / "policy")
    harm, sentence = DAMAGES[damage]
    harm(policy)
    refused(script, sentence, "--policy", policy, "--task", "arithmetic")


@BOTH
def test_drafters_that_do_not_fit_are_refused(refused, models, tmp_path, script):
    other = write_models(tmp_path / "other", *SMALLER)
    argv = ("--policy", models / "policy", "--task", "arithmetic", "--drafter")
    refused(script, "made for a policy of hidden_size 16, not 32", *argv, other / "drafter")
    drafter = shutil.copytree(models / "drafter", tmp_path / "drafter")
    (drafter / "model.safetensors").unlink()
    refused(script, "drafter lacks model.safetensors", *argv, drafter)


@BOTH
@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--max-new-tokens 213", "prompts of up to 44 tokens with responses of up to 213 exceed the policy's max_pos"),
        ("--max-new-tokens 0", "max_new_tokens is 0"),
        ("--temperature 101", "temperature is 101.0; choose a value from 0"),
        ("--draft-length 2", "draft length is 2 without a drafter; give one or use 0"),
        ("--draft-length -1", "draft_length is -1"),
        ("--most-drafts 5", "--most-drafts 5 is for the controller of train_grpo; choose a --draft-length"),
        (
            "--costs pyproject.toml",
            "--costs pyproject.toml is for the controller of train_grpo; choose a --draft-length",
        ),
        ("--samples 0", "--samples is 0; it must be at least 1"),
        ("--batch 0", "--batch is 0"),
        ("--problems 0", "--problems is 0"),
        ("--mesh data=99", "takes 99 devices but jax sees 8"),
        ("--seed -1", "--seed is -1"),
        ("--data some.jsonl", "--data belongs to --task jsonl"),
        ("--drafts suffix --drafter some", "--drafts suffix does not use --drafter; leave one of them out"),
        ("--drafts head+suffix", "--drafts head.suffix needs the head's folder; give --drafter"),
    ],
)
def test_values_out_of_range_are_refused(refused, models, script, argv, sentence):
    refused(script, sentence, "--policy", models / "policy", "--task", "arithmetic", *argv.split())


@BOTH
def test_malformed_examples_are_refused(refused, models, data, tmp_path, script):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(data.read_text() + '{"prompt": 1\n')
    argv = ("--policy", models / "policy", "--task", "jsonl")
    refused(script, "broken.jsonl, line 8: this is not valid JSON", *argv, "--data", broken)
    refused(script, "file '/no/such.jsonl' does not exist", *argv, "--data", "/no/such.jsonl")
    refused(script, "--task jsonl needs --data", *argv)


@BOTH
def test_an_output_folder_that_holds_a_run_is_refused(refused, models, tmp_path, script):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    refused(script, "already holds a run; continue it with --resume", "--policy", models / "policy")


def test_what_one_of_them_needs(refused, models, data, tmp_path):
    policy = ("--policy", models / "policy")
    refused("generate", "there is nothing to respond to; give --prompt TEXT or --task", *policy)
    refused("generate", "--prompt is an empty text", *policy, "--prompt", "1+1=", "")
    refused("generate", "--prompt and --task contradict", *policy, "--prompt", "1", "--task", "arithmetic")
    refused("generate", "prompts of up to 301 tokens", *policy, "--prompt", "1" * 300 + "=")
    refused("generate", "--policy is missing", "--prompt", "1+1=")
    refused("evaluate", "--policy is missing", "--task", "arithmetic")
    refused("evaluate", "--task is missing; choose arithmetic or jsonl", *policy)
    arithmetic = (*policy, "--task", "arithmetic", "--samples", 4)
    refused("evaluate", "--k asks for pass@8; choose k from 1 to 4", *arithmetic, "--k", "1,8")
    refused("evaluate", '--k is "1;2"; give whole numbers', *arithmetic, "--k", "1;2")
    refused("evaluate", "--samples is 4 at --temperature 0", *arithmetic, "--temperature", 0)
    refused("evaluate", "--reward belongs to --task jsonl", *arithmetic, "--reward", "a:b")
    jsonl = (*policy, "--task", "jsonl", "--data")
    refused("evaluate", "reward 'a' is not of the form module:function", *jsonl, data, "--reward", "a")
    unanswered = tmp_path / "unanswered.jsonl"
    unanswered.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n')
    refused("evaluate", "row 1 has no answer to judge a response by", *jsonl, unanswered)
