"""The scripts that measure exactness: bad input is refused before anything happens, and small runs tell the truth."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import SCRIPTS, refusal, run_script, write_models
from tiny import PLAIN, POLICY, BigramDrafter, bigram_table, tiny_params, tiny_prompts

from experiments.exactness import Arm, Scene, compared_tokens, first_differences, gaps, roll, rounding
from experiments.probe_drafters import corrupted
from specrl_jax.models.tree import Tree
from specrl_jax.rollout.rules import Match
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.trajectory import to_sequences

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    def check(script, sentence, *argv):
        out = tmp_path / "out"
        complaint = refusal(monkeypatch, capsys, SCRIPTS[script], *argv, "--out", out)
        assert sentence in complaint
        assert not out.exists()

    return check


def test_bad_input_is_refused(refused, models):
    policy = ("--policy", models / "policy")
    both = (*policy, "--drafter", models / "drafter", "--task", "arithmetic")
    for script in ("losslessness", "acceptance_by_rule"):
        refused(script, "--policy is missing; give the folder", "--task", "arithmetic")
        refused(script, "--drafter is missing; give the draft head", *policy, "--task", "arithmetic")
        refused(script, "no/such", *policy, "--drafter", "no/such/folder", "--task", "arithmetic")
    refused("losslessness", "--problems is 100; choose a multiple of --batch 256", *both, "--problems", 100)
    refused("losslessness", "--invariant-problems is 100; choose", *both, "--invariant-problems", 100)
    refused("losslessness", "--temperature is 0.0; draws need one above 0", *both, "--temperature", 0)
    refused("losslessness", "draft_length is 100; choose a number from 0 to 64", *both, "--draft-lengths", 100)
    refused("losslessness", "--invariant-problems is 768 and --problems 512; none may", *both, "--problems", 512)
    refused("losslessness", "exceed the policy's max_position_embeddings of 256", *both, "--max-new-tokens", 250)
    refused("acceptance_by_rule", "exceed the policy's max_position_embeddings", *both, "--max-new-tokens", 250)
    refused("acceptance_by_rule", "draft_length is 66; choose a number from 0 to 64", *both, "--drafts", 66)
    refused("losslessness", "--corruption is 2.0; choose a share from 0 to 1", *both, "--corruption", 2)
    refused("losslessness", "--parts and --drafters must name at least one", *both, "--parts")
    refused("acceptance_by_rule", "--drafts is 4; choose a multiple of 6", *both, "--drafts", 4)
    refused("acceptance_by_rule", "--temperatures must name at least one, all above 0", *both, "--temperatures", 0)
    refused("noise_cost", "--shape is gpt; choose one of qwen3-0.6b, ", "--shape", "gpt")
    refused("noise_cost", "--rows must name at least one number", "--rows", 0)
    refused("noise_cost", "--repeats is 0", "--repeats", 0)


def test_the_noise_is_timed_at_a_tiny_shape(monkeypatch, tmp_path):
    run_script(monkeypatch, SCRIPTS["noise_cost"], "--preset", "smoke", "--rows", 1, "--out", tmp_path / "out")
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert row["vocab_size"] == 256
    assert row["step_ms"] > 0


def scene(groups=40):
    drafter = (BigramDrafter(), lambda rows: bigram_table())
    law = SamplingLaw(end_ids=(1, 7))
    return Scene(POLICY, tiny_params(), tiny_prompts(groups), law, 24, 0, {"bigram": drafter})


def test_arms_draw_the_same_sequences_in_the_same_order():
    here = scene()
    reference = roll(here, Arm(PLAIN, batch=40))
    for arm in (
        Arm(PLAIN, 3, drafter="bigram", batch=20),
        Arm(PLAIN, 2, Match(2), "bigram", 40, permuted=True),
        Arm(PLAIN, batch=10, permuted=True, spare=16),
    ):
        ours = roll(here, arm)
        first = first_differences(ours, reference)
        assert (first >= 0).sum() == 0
        assert compared_tokens(first, reference) == reference.lengths.sum()


def test_divergences_are_found_and_measured():
    """A planted difference is found where it is, and the gap there is that of the two best perturbed logits."""
    here = scene()
    reference = roll(here, Arm(PLAIN, batch=40))
    tokens = np.array(reference.tokens)
    row = int(np.argmax(reference.lengths))
    tokens[row, 4:] = (tokens[row, 4:] + 1) % POLICY.vocab_size
    first = first_differences(replace(reference, tokens=tokens), reference)
    assert first[row] == 4
    assert (first >= 0).sum() == 1
    assert compared_tokens(first, reference) == reference.lengths.sum() - reference.lengths[row] + 5
    (tie,) = gaps(here, reference, first)
    assert (tie["sequence"], tie["position"]) == (row, 4)
    assert tie["gap"] > 0
    # A response that goes on where the other has ended differs there.
    lengths = np.array(reference.lengths)
    ended = int(np.argmin(lengths))
    lengths[ended] += 1
    assert first_differences(replace(reference, lengths=lengths), reference)[ended] == lengths[ended] - 1


def test_rounding_predicts_how_many_draws_differ():
    """Noise planted on the logits, far above rounding, changes as many draws as predicted; with it, ties are seen."""
    here, rms = scene(400), 0.02
    reference = roll(here, Arm(PLAIN, batch=400))
    sequences = to_sequences(jax.tree.map(jnp.asarray, replace(reference, stats=None, entropy_sum=None)))
    measured = rounding(here, PLAIN, sequences, Tree.chain(3), 100)
    assert 0 < measured.rms < 1e-5
    expected = replace(measured, rms=rms).ties_per_token
    head = np.asarray(here.params.embed if here.params.head is None else here.params.head)
    # A change of the head moves all logits by about rms, differently for every token.
    hidden = float(np.sqrt(POLICY.hidden_size))  # of a vector after the norm
    shift = np.random.default_rng(0).normal(0, rms / hidden, head.shape).astype(np.float32)
    name = "embed" if here.params.head is None else "head"
    disturbed = replace(here.params, **{name: jnp.asarray(head + shift)})
    ours = roll(replace(here, params=disturbed), Arm(PLAIN, batch=400))
    first = first_differences(ours, reference)
    found, tokens = int((first >= 0).sum()), compared_tokens(first, reference)
    assert found > 10
    assert 0.5 * expected * tokens < found < 2 * expected * tokens


def test_replays_are_corrupted_at_the_rate_asked_for():
    tokens = np.arange(20_000, dtype=np.int32).reshape(100, 200) % 50
    wrong = (corrupted(tokens, 0.2, 50, 0) != tokens).mean()
    assert abs(wrong - 0.2 * 49 / 50) < 0.01
    np.testing.assert_array_equal(corrupted(tokens, 0.0, 50, 0), tokens)
