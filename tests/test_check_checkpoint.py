"""Faults planted in folders of a policy and its head: each is named, a sound pair is left in peace."""

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from echo_pair import make_echo
from safetensors.numpy import load_file, save_file
from scripts import refusal, run_script, write_models
from tiny_pair import HEAD, POLICY, VOCAB, make_pair

from experiments import check_checkpoint, checkpoint_parity
from experiments.check_checkpoint import Config, check_length, check_readings, check_tokenizer, rolled_out
from experiments.checkpoint_readings import as_sequences, overlap, readings
from experiments.checkpoint_texts import TEXTS, encode
from experiments.checkpoint_verdict import published
from experiments.common import RunOptions
from experiments.inference import ModelOptions, open_model
from specrl_jax.data.tokenizers import train_bpe
from specrl_jax.drafters import eagle3_layer
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_params import init_eagle3
from specrl_jax.drafters.heads import for_policy, load_drafter, save_drafter
from specrl_jax.models.huggingface import load_policy
from specrl_jax.models.presets import PRESETS

pytestmark = pytest.mark.ci
LENGTH = 4096


@dataclass
class Pair:
    """Folders, and what the checks of a head share: the responses are the policy's, whoever drafts."""

    folder: Path
    config: Config
    model: Any
    encoded: Any
    trajectory: Any


def config_of(policy, drafter):
    model = ModelOptions(policy=str(policy), drafter=str(drafter), mesh="data=1", numerics="plain")
    return Config(RunOptions(), model, max_new_tokens=48, draft_length=3, long_prompt=LENGTH, rows=8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    make_pair(folder)
    config = config_of(folder / "policy", folder / "drafter")
    model = open_model(config.model, config.run, 32, same_tokens=False)
    encoded = encode(model.tokenizer, 512)
    return Pair(folder, config, model, encoded, rolled_out(config, model, encoded))


def edited_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def layers(by):
    boundaries = [boundary + by for boundary in HEAD.boundaries]
    return lambda folder: edited_config(folder, eagle_config={"residual_boundaries": boundaries})


def swap_halves(folder):
    tensors = load_file(folder / "model.safetensors")
    for name in "qkv":
        columns = f"midlayer.self_attn.{name}_proj.weight"
        tensors[columns] = np.roll(tensors[columns], POLICY.hidden_size, axis=1)
    save_file(tensors, folder / "model.safetensors")


def forget(folder):
    shutil.rmtree(folder)
    save_drafter(folder, Eagle3Drafter(HEAD), init_eagle3(jax.random.key(9), HEAD))


PLANTED = {
    "nothing": (lambda folder: None, [], ""),
    "layers one lower": (layers(-1), ["boundaries"], r"set residual_boundaries under eagle_config to \[1, 2\]"),
    "layers one higher": (layers(1), ["boundaries"], r"set residual_boundaries under eagle_config to \[1, 2\]"),
    "fed back after the norm": (
        lambda folder: edited_config(folder, norm_output=True),
        ["feedback"],
        "set norm_output to false in its config.json",
    ),
    "halves swapped": (swap_halves, ["halves"], "swap the two halves of the columns of q_proj, k_proj and v_proj"),
    "untrained": (forget, ["useless"], "does not draft better than the frequencies of tokens"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_fault_of_the_head_is_named(pair, tmp_path, planted):
    plant, faults, sentence = PLANTED[planted]
    folder = Path(shutil.copytree(pair.folder / "drafter", tmp_path / "drafter"))
    plant(folder)
    drafter, draft = load_drafter(folder, pair.model.policy)
    rows, found = check_readings(pair.config, replace(pair.model, drafter=drafter, draft=draft), pair.trajectory)
    assert [finding.fault for finding in found] == faults, (rows, found)
    for finding in found:
        assert re.search(sentence, finding.sentence)


def test_a_native_head_is_read_in_its_own_ways():
    folder = Path(__file__).parent / "fixtures" / "mtp" / "policy"
    params, policy = load_policy(folder)
    drafter, draft = for_policy(*load_drafter(folder, policy), params)
    ways = readings(drafter.config, draft, policy.num_layers)
    assert [way.name for way in ways[1:]] == ["read one layer lower", "features after the norm", "halves swapped"]
    sequences = as_sequences(np.random.default_rng(0).integers(0, policy.vocab_size, (3, 12)).astype(np.int32))
    found = [overlap(policy, params, way, sequences, 2, 2) for way in ways]
    assert all(np.isfinite(x).all() and x.shape == (2, 3) for x in found)
    assert all(np.abs(x - found[0]).max() > 1e-3 for x in found[1:])


def other_tokenizer():
    """Of as many tokens, most of them others."""
    return train_bpe([text[::-1].upper() for texts in TEXTS for text in texts], VOCAB)


def test_the_tokenizer_of_a_sound_pair_is_right(pair):
    assert check_tokenizer(pair.config, pair.model, pair.encoded)[1] == []


def test_a_tokenizer_other_than_the_policy_s_is_named(pair):
    tokenizer = other_tokenizer()
    _, found = check_tokenizer(pair.config, replace(pair.model, tokenizer=tokenizer), encode(tokenizer, 512))
    assert [finding.fault for finding in found] == ["tokenizer"]
    assert "the tokenizer beside it is another policy's" in found[0].sentence, found


def test_a_tokenizer_other_than_the_head_s_is_named(pair, tmp_path):
    folder = Path(shutil.copytree(pair.folder / "drafter", tmp_path / "drafter"))
    other_tokenizer().save_pretrained(folder)
    config = config_of(pair.folder / "policy", folder)
    _, found = check_tokenizer(config, open_model(config.model, config.run, 32, same_tokens=False), pair.encoded)
    assert [finding.fault for finding in found] == ["tokenizer"]
    assert "the head was made for another one: its tokenizer has" in found[0].sentence


@pytest.mark.parametrize("stops", [False, True])
def test_positions_that_stop_at_2048_are_named(tmp_path, monkeypatch, stops):
    """As with a table of angles that ends where config.json says, whose last row serves all beyond."""
    make_echo(tmp_path, train_bpe([text for texts in TEXTS for text in texts], VOCAB), stops=2048)
    config = replace(config_of(tmp_path / "policy", tmp_path / "drafter"), rows=2)
    model = open_model(config.model, config.run, 32)
    angles, last = eagle3_layer.rope_angles, model.drafter.config.max_position_embeddings - 1
    if stops:
        monkeypatch.setattr(eagle3_layer, "rope_angles", lambda p, *a: angles(jnp.minimum(p, last), *a))
    jax.clear_caches()
    rows, found = check_length(config, model, encode(model.tokenizer, 512))
    jax.clear_caches()
    before, behind = rows
    assert before["measured"] > 0.9
    assert before["compared_with"] > 0.9
    assert behind["compared_with"] > 0.9
    assert (behind["measured"] > 0.9) == (not stops)
    assert [finding.fault for finding in found] == ["rope"] * stops
    if stops:
        assert "the head's positions stop at 2048: up to 4096, 0.0" in found[0].sentence
        assert "max_position_embeddings = 2048, raise it to the policy's" in found[0].sentence


def run(monkeypatch, pair, drafter, out):
    short = ("--max-new-tokens", 48, "--draft-length", 3, "--long-prompt", 0, "--numerics", "plain", "--mesh", "data=1")
    given = ("--policy", pair.folder / "policy", "--drafter", drafter, *short, "--rows", 8, "--out", out)
    run_script(monkeypatch, check_checkpoint, *given)


def test_the_script_ends_well_where_nothing_is_found(monkeypatch, capsys, tmp_path, pair):
    run(monkeypatch, pair, pair.folder / "drafter", tmp_path / "out")
    assert "verdict: no fault found" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    by_case = {(row["check"], row["case"]): row for row in rows}
    survival = [by_case["acceptance", f"draft {depth}"]["measured"] for depth in (1, 2, 3)]
    assert by_case["acceptance", "length with 3 drafts"]["measured"] == pytest.approx(1 + sum(survival))
    assert survival[0] > 0.2
    if checkpoint_parity.has_torch():
        assert by_case["policy", "divergence from transformers"]["measured"] < 1e-6


def test_the_script_says_what_it_found_and_ends_with_status_1(monkeypatch, capsys, tmp_path, pair):
    folder = Path(shutil.copytree(pair.folder / "drafter", tmp_path / "drafter"))
    swap_halves(folder)
    monkeypatch.setattr(checkpoint_parity, "has_torch", lambda: False)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, pair, folder, tmp_path / "out")
    assert stop.value.code == 1
    said = capsys.readouterr().out
    assert "torch is not installed" in said
    assert "verdict: halves:" in said
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["faults"] == ["halves"]
    assert "halves:" in (tmp_path / "out" / "results.md").read_text()


def test_a_policy_unlike_that_of_transformers_is_named():
    ours = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    rows, found = checkpoint_parity.judge_parity(POLICY, ours, ours)
    assert (rows[0]["measured"], found) == (0.0, [])
    rows, found = checkpoint_parity.judge_parity(POLICY, ours, ours[:, ::-1])
    assert rows[0]["measured"] > 0.1
    assert found[0].fault == "policy"


def test_published_figures_are_those_of_the_head_or_of_its_policy():
    qwen = PRESETS["qwen3-8b"]
    assert "this head" in published("AngelSlim/Qwen3-8B_eagle3", qwen, 1.0).source
    assert published("my/head", qwen, 1.0).lengths[3] == 2.87
    assert published("my/head", POLICY, 1.0) is None


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("--policy", "POLICY"), "--drafter is missing; give the folder or hub name of a draft head"),
        (("--drafter", "DRAFTER"), "--policy is missing; give the folder or hub name of a policy"),
        (("--draft-length", 0), "--draft-length is 0; it must be at least 1"),
        (("--long-prompt", 100), "--long-prompt is 100; give at least 128 tokens, or 0 for none"),
        (("--temperature", -1), "temperature is -1.0; choose a value from 0"),
    ],
)
def test_bad_input_is_refused(monkeypatch, capsys, tmp_path, argv, sentence):
    models = write_models(tmp_path / "models")
    named = {"POLICY": models / "policy", "DRAFTER": models / "drafter"}
    given = [named.get(value, value) for value in argv]
    assert sentence in refusal(monkeypatch, capsys, check_checkpoint, *given, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
