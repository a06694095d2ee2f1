"""Benchmarks: options are checked, synthetic acceptance is geometric, cost tables come back, ratios are paired."""

import itertools
import json
import re
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from scripts import SCRIPTS, give_prices, refusal, run_script
from tiny import POLICY, equal_prices, random_eagle3, tiny_params, tiny_prompts

from experiments import bench_rollout, draft_length
from experiments.bare_products import (
    Floors,
    allowed_speedup,
    bare_attention,
    floor_calls,
    floors_by_turn,
    live_rows,
)
from experiments.bench_models import ShapeOptions, SyntheticMatch, open_expanded
from experiments.bench_work import Work
from experiments.draft_length import Found
from experiments.seeds import mean_over_seeds
from experiments.turns import after_itself, in_turn, ratio
from specrl_jax.drafters.suffix import SuffixDrafter
from specrl_jax.models.tree import Tree
from specrl_jax.rollout.control import Body, initial_control
from specrl_jax.rollout.draws import PlacedDraws
from specrl_jax.rollout.noise import sequence_keys
from specrl_jax.rollout.rules import Match
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.training.costs import load_costs, standing_batch

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(
    ("script", "sentence", "argv"),
    [
        ("bench_round_cost", "--shape is 9b; choose one of 25m, deep-95m", ("--shape", "9b")),
        ("bench_round_cost", "--policy and --drafter belong together", ("--policy", "somewhere")),
        ("bench_round_cost", "--rows must name at least one number", ("--rows", 0)),
        ("bench_round_cost", "--draft-lengths must name at least one number", ("--draft-lengths", 0)),
        ("bench_round_cost", "--repeats is 1", ("--repeats", 1)),
        ("bench_round_cost", "--survival is 0.0; choose a probability above 0", ("--survival", 0)),
        ("bench_rollout", "--rows must name at least one number", ("--rows", 0)),
        ("bench_rollout", "--draft-lengths names 9, above --longest 7", ("--draft-lengths", 3, 9)),
        ("bench_rollout", "--survival is (1.0,); choose probabilities", ("--survival", 1.0)),
        ("bench_rollout", "--policy and --drafter belong together", ("--drafter", "somewhere")),
        ("bench_rollout", "--task arithmetic is for the real acceptance of --policy", ("--task", "arithmetic")),
        ("bench_rollout", "--branchy is 0.5; choose a share from 0 to 1, with --task", ("--branchy", 0.5)),
        ("bench_rollout", "--context is -1; it must be at least 0", ("--context", -1)),
        ("bench_rollout", "--context is 8, of synthetic acceptance", ("--context", 8, "--survival", 0)),
        (
            "bench_rollout",
            "--context 8 is of rows that begin together",
            ("--context", 8, "--rows", 2, "--sequences", 4),
        ),
        ("bench_rollout", "is in place of prompts; leave --prompt-tokens", ("--context", 8, "--prompt-tokens", 64)),
        ("bench_rollout", "--branches 2 is for real acceptance; give --survival 0", ("--branches", 2)),
        ("bench_peers", "temperature is -1.0; choose a value", ("--temperature", -1.0)),
        ("bench_rollout", "--branches 5 with --longest 7 exceeds 32", ("--branches", 5, "--survival", 0)),
        ("bench_peers", "--adaptive is -1", ("--adaptive", -1)),
        (
            "bench_peers",
            "--adaptive-branches 2 with --adaptive 0; choose --adaptive 1 to 16",
            ("--adaptive-branches", 2),
        ),
        ("bench_peers", "--draft-lengths is (-1,); numbers must be at least 0", ("--draft-lengths", -1)),
        ("bench_peers", "--task arithmetic needs the --policy", ("--task", "arithmetic")),
        ("bench_peers", "has no folder transformers; make it as", ("--environments", "nowhere")),
        ("bench_step", "has no folder tunix; make it as", ("--environments", "nowhere")),
        ("bench_step", "--draft-lengths is (0,); numbers must be at least 1", ("--draft-lengths", 0)),
        ("bench_step", "--adaptive is -1; it must be at least 0", ("--adaptive", -1)),
        ("bench_step", "--kl-coefs is (-0.1,); name at least one number", ("--kl-coefs", -0.1)),
        ("bench_step", "--survival is 1.0; choose 0 (real acceptance) to below 1", ("--survival", 1.0)),
        ("bench_step", "--microbatch is 5; choose a divisor of 16", ("--microbatch", 5)),
        ("draft_length", "--seeds is 1; it must be at least 2", ("--seeds", 1)),
        ("draft_length", "--rows must name at least one number", ("--rows", 0)),
        ("draft_length", "--training-seconds is 9.0; it is of a --drafter", ("--training-seconds", 9)),
        ("draft_length", "--policy and --drafter belong to a --task of theirs", ("--task", "arithmetic")),
        ("bench_cache", "--pools is (1.5,); name shares above 0 and at most 1", ("--pools", 1.5)),
    ],
)
def test_bad_input_is_refused(monkeypatch, capsys, tmp_path, script, sentence, argv):
    assert sentence in refusal(monkeypatch, capsys, SCRIPTS[script], *argv, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_synthetic_acceptance_is_geometric():
    rows, depth, survival = 20_000, 3, 0.877
    keys = sequence_keys(0, "evaluation", 0, jnp.arange(rows, dtype=jnp.uint32), jnp.zeros((rows,), jnp.int32))
    drafts = jnp.tile(jnp.arange(1, depth + 1, dtype=jnp.int32)[None], (rows, 1)).at[: rows // 2, 2].set(-1)
    own = jnp.full((rows, depth + 1), 9, jnp.int32)
    rule = SyntheticMatch(survival=survival)

    def decided(drafts, emitted, rounds=0):
        draws = PlacedDraws.of_round(keys, jnp.full((rows,), rounds, jnp.int32), jnp.full((rows,), emitted, jnp.int32))
        return rule.decide(Tree.chain(drafts.shape[1]), drafts, own[:, : drafts.shape[1] + 1], None, None, draws)

    proposed = decided(drafts, 5)
    accepted = np.asarray(proposed.accepted)
    assert accepted[: rows // 2].max() == 2  # a slot without a draft is never accepted
    whole = accepted[rows // 2 :]
    for depth_reached in (1, 2, 3):
        assert abs(np.mean(whole >= depth_reached) - survival**depth_reached) < 0.015
    for row in (0, rows - 1):
        tokens = np.asarray(proposed.tokens[row])
        np.testing.assert_array_equal(tokens[: accepted[row]], np.arange(1, accepted[row] + 1))
        assert tokens[accepted[row]] == 9
    # Whatever is drafted when, the places of a response are the same: here the third token after five.
    late = np.asarray(decided(drafts[:, :1], 7, rounds=1).accepted)
    reached = whole >= 2
    np.testing.assert_array_equal(late[rows // 2 :][reached], (whole >= 3)[reached])
    assert abs(np.mean(late) - survival) < 0.015


def test_ratios_are_paired_and_have_an_interval():
    rng = np.random.default_rng(0)
    noise = rng.uniform(1.0, 3.0, 15)  # a busy neighbour slows both arms of a turn
    middle, low, high = ratio(2.0 * noise, noise)
    assert (middle, low, high) == (2.0, 2.0, 2.0)
    covered = 0
    for _ in range(400):
        _, low, high = ratio(np.exp(rng.normal(0.0, 0.3, 15)), np.ones(15))
        covered += low <= 1.0 <= high
    assert covered >= 0.93 * 400


def test_calls_take_turns_in_an_order_that_changes():
    order = []

    def call(name):
        order.append(name)
        return float(len(order))

    seconds = in_turn({name: partial(call, name) for name in "abc"}, 6, discard=2)
    turns = ["".join(order[first : first + 3]) for first in range(0, len(order), 3)]
    assert len(turns) == 8
    assert {"".join(sorted(turn)) for turn in turns} == {"abc"}
    assert len(set(turns)) > 2
    for name in "abc":
        own = [1.0 + 3 * index + turn.index(name) for index, turn in enumerate(turns)]
        np.testing.assert_array_equal(seconds[name], own[2:])


def test_of_a_call_right_after_itself_the_second_counts():
    times = iter([5.0, 1.0])
    assert after_itself(lambda: next(times))() == 1.0


def test_rounds_of_a_block_drafter_are_timed(monkeypatch, tmp_path):
    out = tmp_path / "out"
    argv = ("--preset", "smoke", "--shape", "25m", "--drafts", "block", "--out", out)  # large enough to be timed
    run_script(monkeypatch, SCRIPTS["bench_round_cost"], *argv)
    (row,) = json.loads((out / "results.json").read_text())["rows"]
    assert row["drafts"] == "block"
    assert row["draft_over_least"] == 1.0
    assert row["over_floor"] == pytest.approx(row["round_cost"] / row["floor"], rel=0.5)


def test_floors_are_of_products_with_weights_or_with_attention_too(monkeypatch, tmp_path):
    """The definitions of the module's docstring, on seconds that are given."""
    took = {"step": 3.0, "bare step": 2.0, "bare attention 0": 1.0}
    took |= {"round 2": 12.0, "bare verify 2": 3.0, "bare draft": 0.5, "bare attention 2": 4.0}
    took |= {"step, invariant": 4.5, "round 2, invariant": 15.0}

    def told(calls, repeats):
        assert set(calls) == set(took)
        return {name: np.full(repeats, took[name]) for name in calls}

    attended = []

    def noted(fn, weights, x, trips=None):
        if fn is bare_attention:
            attended.append(x.shape)

    monkeypatch.setattr(SCRIPTS["bench_round_cost"], "in_turn", told)
    monkeypatch.setattr("experiments.bare_products.timed", noted)
    argv = ("--preset", "smoke", "--no-parts", "--invariant", "--out", tmp_path / "out")
    run_script(monkeypatch, SCRIPTS["bench_round_cost"], *argv)
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert (row["step_over_bare"], row["step_over_products"], row["round_cost"]) == (1.5, 1.0, 4.0)
    assert (row["floor"], row["over_floor"], row["over_products"]) == (2.0, 2.0, 1.5)
    assert (row["invariant_step"], row["invariant_round"]) == (1.5, 1.25)
    assert [shape[:2] for shape in attended] == [(2, 1), (2, 3)]  # rows, and queries of a step and of a verify


def test_training_is_paid_back_by_the_rollouts_that_win():
    config = draft_length.Config(training_seconds=0)
    seeds = [{0: Found(1.0, 1.0, 1.0, 10.0), 3: Found(2.0, 2.0, 1.0, s), 7: Found(2.0, 0.5, 4.0, 20.0)} for s in (4, 6)]
    assert "paid_back" not in draft_length.row_of(config, 1, "branchy", 3, seeds)
    object.__setattr__(config, "training_seconds", 100.0)
    paid = [draft_length.row_of(config, 1, "branchy", k, seeds)["paid_back"] for k in (0, 3, 7)]
    assert paid == [None, 20.0, None]


def test_rounds_of_suffix_drafts_look_in_siblings_and_an_earlier_epoch(monkeypatch, tmp_path):
    """A round that looks nowhere else would be timed as one of n-gram drafts."""
    seen, find = [], SuffixDrafter.find

    def noted(self, history, texts, depth):
        responses = len(texts.responses) // len(texts.prompts)
        seen.append((self.siblings and responses, history is not None and history.lengths.shape))
        return find(self, history, texts, depth)

    monkeypatch.setattr(SuffixDrafter, "find", noted)
    argv = ("--preset", "smoke", "--drafts", "suffix", "--rows", 4, "--no-parts", "--out", tmp_path / "out")
    run_script(monkeypatch, SCRIPTS["bench_round_cost"], *argv)
    assert set(seen) == {(4, (1, 4))}


def test_fixed_and_adaptive_arms_decode_in_batches_of_the_same_sizes():
    law = SamplingLaw(end_ids=(1,))
    pair, work = SimpleNamespace(policy=POLICY, drafter=random_eagle3()[0]), SimpleNamespace(longest=8, law=law)
    for ladder, rows in itertools.product((True, False), (1, 3, 4, 5, 16, 25, 58, 64)):
        config = bench_rollout.Config(ladder=ladder)
        fixed, adaptive = (
            bench_rollout.rollout_of(config, pair, work, rows, 3, Match(), chosen).config for chosen in (False, True)
        )
        sizes = {body.rows for body in adaptive.bodies_for(rows)}
        assert set(fixed.rungs(rows)) == sizes
        assert ladder == (len(sizes) > 1) or rows == 1


def test_arms_meet_the_same_noise_in_a_turn_and_other_noise_in_the_next():
    drafter, draft = random_eagle3()
    pair = SimpleNamespace(policy=POLICY, params=tiny_params(), drafter=drafter, draft=draft)
    work, config = Work(tiny_prompts(4), np.full(4, 12, np.int32), end_ids=(1,)), bench_rollout.Config()
    engines = [bench_rollout.rollout_of(config, pair, work, 4, k, Match(), False) for k in (0, 3)]
    without, drafting = (bench_rollout.fixed_arm(engine, pair, work) for engine in engines)
    chosen = bench_rollout.rollout_of(config, pair, work, 4, 3, Match(), True)
    control = equal_prices(chosen.config, 4)
    adaptive = bench_rollout.Arm(chosen, pair.params, draft, work, control=control)
    in_turn({"without": without, "drafting": drafting, "adaptive": adaptive}, 2, discard=1)
    for one, *others in zip(without.turns, drafting.turns, adaptive.turns, strict=True):
        for other in others:
            np.testing.assert_array_equal(one.tokens, other.tokens)
    assert len({turn.tokens.tobytes() for turn in drafting.turns}) == 3
    # Figures are of the turns that counted, all of them.
    counted, figures = drafting.turns[1:], drafting.figures(2)
    rounds, accepted = (sum(int(getattr(turn.stats, name)) for turn in counted) for name in ("rounds", "accepted"))
    assert figures["acceptance_length"] == 1.0 + accepted / rounds
    assert figures["response_tokens"] == sum(int(turn.lengths.sum()) for turn in counted)


def test_rows_go_on_from_filled_caches(monkeypatch, tmp_path):
    give_prices(monkeypatch)
    begun, out = [], tmp_path / "out"

    def noted(*args):
        begun.append(standing_batch(*args))
        return begun[-1]

    def told(pair, rows, longest, context):
        assert (rows, longest, context) == (1, 3, 40)
        seconds = {f"floor policy {n}": 1.0 for n in (1, 8)} | {f"floor draft {n}": 0.0 for n in (1, 8)}
        seconds |= {f"floor attention {n}": 0.5 * n for n in (1, 2, 3, 4)}
        return {name: lambda taken=taken: taken for name, taken in seconds.items()}

    monkeypatch.setattr(bench_rollout, "standing_batch", noted)
    monkeypatch.setattr(bench_rollout, "floor_calls", told)
    argv = ("--preset", "smoke", "--rows", 1, "--context", 40, "--out", out)
    run_script(monkeypatch, SCRIPTS["bench_rollout"], *argv)
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [(row["context"], row["prompt_tokens"]) for row in rows] == [(40, 0)] * 3
    # More tokens cost nothing but attention, which a round pays for each.
    assert rows[-1]["allowed"] > rows[-1]["allowed_with_attention"] > 1.0
    assert rows[-1]["share_with_attention"] > rows[-1]["share_of_floor"] > 0.0
    assert begun
    for batch in begun:
        assert np.all(batch.rows.length == 40)
        assert batch.waiting.count == 1  # no prompt is left to read
        assert batch.rows.drafter is None or np.all(batch.rows.drafter.length == 40)


def test_rows_that_go_on_draw_what_their_arms_have_in_common():
    drafter, draft = random_eagle3()
    pair = SimpleNamespace(policy=POLICY, params=tiny_params(), drafter=drafter, draft=draft)
    work, config = Work(tiny_prompts(2), np.array([5, 9], np.int32)), bench_rollout.Config()
    arms = [
        bench_rollout.fixed_arm(bench_rollout.rollout_of(config, pair, work, 2, k, Match(), False), pair, work, 20)
        for k in (0, 3)
    ]
    in_turn(dict(enumerate(arms)), 2, discard=0)
    for one, other in zip(*(arm.turns for arm in arms), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.lengths, work.limits)
    assert not np.array_equal(*(turn.tokens for turn in arms[0].turns))


def test_trees_are_timed_beside_chains(monkeypatch, tmp_path):
    give_prices(monkeypatch)
    argv = (
        "--preset",
        "smoke",
        "--tokens",
        4,
        "--survival",
        0,
        "--branches",
        2,
        "--no-floors",
        "--out",
        tmp_path / "out",
    )
    run_script(monkeypatch, SCRIPTS["bench_rollout"], *argv)
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [row["draft_length"] for row in rows] == ["0", "2", "2, 2 branches", "adaptive", "adaptive, 2 branches"]
    assert rows[4]["over_chains_low"] <= rows[4]["over_chains"] <= rows[4]["over_chains_high"]
    assert not any("over_chains" in row for row in rows[:4])


def test_rollouts_are_timed_at_a_small_shape(monkeypatch, tmp_path):
    out = tmp_path / "out"
    argv = ("--preset", "smoke", "--tokens", 4, "--costs", tmp_path / "costs", "--out", out)
    judged = []

    def noted(floors, *args):
        judged.append((floors, allowed_speedup(floors, *args)))
        return 1.5

    monkeypatch.setattr(bench_rollout, "allowed_speedup", noted)
    run_script(monkeypatch, SCRIPTS["bench_rollout"], *argv, "--invariant", "--alike")
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [row["draft_length"] for row in rows] == ["0", "2", "adaptive", "adaptive, alike"]
    assert rows[2]["over_alike_low"] <= rows[2]["over_alike"] <= rows[2]["over_alike_high"]
    assert rows[0]["speedup"] == 1.0
    assert rows[1]["acceptance_length"] > 1.0
    assert re.fullmatch(r"(\d+x\d+:\d+ ?)+", rows[2]["bodies"])
    saved = json.loads((tmp_path / "costs.2.json").read_text())
    table, bodies = saved["bodies"], tuple(Body(size, tokens) for size, tokens, _ in saved["bodies"])
    control = load_costs(tmp_path / "costs.2.json", bodies, saved["of"])
    # The smoke preset drafts three tokens at most, and its rows are priced 64 tokens after their prompts.
    assert rows[2]["cost_table_ms"] == bench_rollout.round_times(control, bodies, 3, rows[2]["prompt_tokens"] + 64)
    told = dict(entry.split(":") for entry in rows[2]["cost_table_ms"].split())
    assert list(told) == [f"{size}x{tokens}" for size, tokens, _ in table]
    # Told in three digits.
    assert all(float(told[f"{size}x{tokens}"]) >= float(f"{1e3 * seconds:.3g}") for size, tokens, seconds in table)
    for end in ("", "_low", "_high"):
        assert rows[2][f"share_of_floor{end}"] == pytest.approx(rows[2][f"speedup{end}"] / rows[2]["allowed"])
    assert len({tuple(floors.policy) for floors, _ in judged}) == 3  # those of every turn
    assert all(allowed >= 1.0 for _, allowed in judged)
    assert rows[2]["best_fixed"] in ("0", "2")
    assert (tmp_path / "costs.2.json").is_file()
    assert (tmp_path / "costs.invariant.2.json").is_file()
    assert rows[2]["invariant_speedup_low"] <= rows[2]["invariant_speedup"] <= rows[2]["invariant_speedup_high"]
    assert rows[0]["invariant_speedup"] > 0


def test_a_cost_table_is_told_with_its_draft_steps_and_what_is_in_the_cache():
    control = initial_control(np.array([1.0, 2.0]), np.array([0.01, 0.02]), np.array([0.5, 0.5]))
    bodies = Body(2, 2), Body(2, 8)
    # Without drafts 1 + 0.01 x 2 rows x 10 tokens; with six at most, five steps more: 2 + 0.02 x 20 + 5 x 0.5.
    assert bench_rollout.round_times(control, bodies, 7, 10) == "2x2:1.2e+03 2x8:4.9e+03"


def test_a_step_is_timed_with_and_without_drafts(monkeypatch, tmp_path):
    give_prices(monkeypatch)
    out = tmp_path / "out"
    run_script(
        monkeypatch, SCRIPTS["bench_step"], "--preset", "smoke", "--prompt-tokens", 2, "--tokens", 2, "--out", out
    )
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [row["arm"] for row in rows] == ["ours, 0 drafts", "ours, 2 drafts", "ours, up to 2 drafts"]
    assert (rows[0]["speedup"], rows[0]["amdahl"]) == (1.0, 1.0)
    assert all(row["amdahl"] > 0 and row["synthetic_survival"] == 0.877 for row in rows[1:])


def test_what_the_cache_takes_is_told(monkeypatch, tmp_path):
    out = tmp_path / "out"
    run_script(monkeypatch, SCRIPTS["bench_cache"], "--preset", "smoke", "--out", out)
    rows = json.loads((out / "results.json").read_text())["rows"]
    usual, whole, smaller, chosen = (row for row in rows if row["part"] == "memory")
    assert usual["default"]
    assert chosen["default"]
    assert (usual["draft_length"], chosen["draft_length"]) == (3, "adaptive")
    assert chosen["pool_mb"] >= usual["pool_mb"]
    assert not whole["default"]
    assert max(usual["pool_mb"], smaller["pool_mb"]) < whole["pool_mb"]
    assert whole["same_tokens"]
    assert smaller["same_tokens"]
    assert whole["over_live"] > smaller["over_live"] >= 1.0
    compiled = [row for row in rows if row["part"] == "compilation"]
    assert [row["draft_length"] for row in compiled[-2:]] == [3, "adaptive"]
    assert compiled[-1]["bodies"] > 1


def test_what_the_floors_allow():
    """Where more tokens cost nothing more, a draft is worth what it adds; where each costs as much, nothing."""
    tokens = np.array([1, 1000])
    free = Floors(tokens, np.array([1.0, 1.0]), np.array([0.0, 0.0]))
    limits = np.array([3, 1, 2])
    np.testing.assert_array_equal(live_rows(limits, 2), [2, 2, 2])
    np.testing.assert_array_equal(live_rows(np.array([3, 1, 1]), 2), [2, 2, 1])
    assert allowed_speedup(free, limits, 2, [0.5, 0.25], prompt_tokens=0) == pytest.approx(1.75)
    assert allowed_speedup(free, limits, 2, [0.5, 0.25], prompt_tokens=3000) == pytest.approx(6 / (3 + 3 / 1.75))
    fair = Floors(tokens, np.array([1.0, 1000.0]), np.array([0.1, 0.1]))
    assert allowed_speedup(fair, limits, 2, [0.9, 0.81], prompt_tokens=3000) == 1.0
    assert fair.cost(2, 3) == pytest.approx((8 + 0.3) / 2)
    attended = Floors(free.tokens, free.policy, free.draft, attention=np.array([0.5, 0.75, 1.0]))
    assert (attended.step(2), attended.cost(2, 2)) == pytest.approx((2.0, 1.5))
    assert allowed_speedup(attended, limits, 2, [0.5, 0.25], prompt_tokens=0) == pytest.approx(1.5 / 1.25)
    assert attended.without_attention.cost(2, 2) == free.cost(2, 2)


def test_floors_of_a_turn_are_those_that_were_timed_in_it():
    seconds = {"0": [9.0, 9.0], "floor policy 1": [1.0, 2.0], "floor draft 1": [0.1, 0.2]}
    seconds |= {"floor policy 8": [1.5, 4.0], "floor draft 8": [0.3, 0.4]}
    slow, fast = floors_by_turn({name: np.array(both)[::-1] for name, both in seconds.items()})
    np.testing.assert_array_equal(fast.tokens, [1, 8])
    assert (fast.cost(1, 7), slow.cost(1, 7)) == pytest.approx((1.5 + 0.7, (4.0 + 1.4) / 2))
    assert len(fast.attention) == 0
    seconds |= {"floor attention 1": [0.5, 0.6], "floor attention 2": [0.7, 0.8]}
    first, _ = floors_by_turn({name: np.array(both) for name, both in seconds.items()})
    np.testing.assert_array_equal(first.attention, [0.5, 0.7])
    assert floors_by_turn({"0": np.ones(2)}) == []


@pytest.mark.parametrize("rows", [1, 128])
def test_floors_reach_to_the_largest_round_and_to_a_prompt(rows):
    calls = floor_calls(open_expanded(ShapeOptions(shape="toy"), 0), rows, 7)
    counts = [int(name.split()[-1]) for name in calls if "policy" in name]
    assert {1, 8, 512, 8 * rows} <= set(counts)
    assert counts == sorted(counts)
    assert counts[-1] == max(8 * rows, 512)


def test_the_draft_length_table_has_intervals_and_the_papers_figures(monkeypatch, tmp_path):
    out = tmp_path / "out"
    run_script(monkeypatch, SCRIPTS["draft_length"], "--preset", "smoke", "--out", out)
    rows = json.loads((out / "results.json").read_text())["rows"]
    lengths = [(workload, k) for workload in ("predictable", "branchy") for k in (0, 3)]
    assert [(row["workload"], row["draft_length"]) for row in rows] == lengths
    assert rows[1]["paper_acceptance_length"] == 3.32
    for row in rows:
        assert row["seeds"] == 2
        assert (row["speedup"] == 1.0) == (row["draft_length"] == 0)
        assert row["acceptance_length"] >= 1.0
        assert np.isfinite(row["speedup_ci95"])
        assert row["round_cost"] > 0
    assert (out / "draft_length.png").is_file()


def test_intervals_over_seeds_are_students():
    mean, half_width = mean_over_seeds([1.0, 2.0, 3.0])
    assert (mean, half_width) == (2.0, pytest.approx(4.303 / 3**0.5))
    assert np.isnan(mean_over_seeds([1.0])[1])
