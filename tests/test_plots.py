"""Plots show the numbers of the rows, and are left out where there are none."""

import numpy as np
import pytest
from matplotlib.image import imread

from specrl_jax.training.acceptance_plots import draw_acceptance_bars, draw_adaptation, draw_depths
from specrl_jax.training.plots import (
    draw_acceptance,
    draw_learning,
    draw_lengths,
    draw_losslessness,
    draw_time,
    plot_run,
)
from specrl_jax.training.speed_plots import draw_round_cost, draw_speedups

pytestmark = pytest.mark.ci


def _rows(steps, draft_length):
    rows = []
    for step in range(steps):
        row = {"step": step, "reward_mean": 0.4 + 0.01 * step, "timing": "scanned"}
        if step % 10 == 0:
            # The first measured step is an outlier: a mean would show it.
            slow = 100.0 if step == 0 else 1.0
            row |= {"accuracy": 0.3 + 0.01 * step, "timing": "measured", "time_data_s": 0.1}
            row |= {"time_prefill_s": 0.5, "time_rollout_s": 2.0 * slow, "time_update_s": 1.0}
        if draft_length:
            survival = [0.8, 0.5, 0.25] if step % 2 else [0.6, 0.5]
            row |= {"acceptance_length": 2.5, "survival_per_position": survival}
        rows.append(row)
    return rows


def _arms():
    return {"with speculation": _rows(31, 3), "without": _rows(31, 0)}


def test_every_plot_is_written_with_something_on_it(tmp_path):
    files = plot_run(tmp_path, _arms(), lengths={"training": [3, 40, 41, 200]})
    assert [path.name for path in files] == ["learning.png", "acceptance.png", "time.png", "lengths.png"]
    for path in files:
        pixels = imread(path)[..., :3]
        assert pixels.shape[1] > 500
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
    assert plot_run(tmp_path / "none", {"empty": [], "null": [{"step": 0, "reward_mean": None}]}) == []


def test_learning_overlays_both_arms_with_units():
    reward, accuracy = draw_learning(_arms()).axes
    assert [line.get_label() for line in reward.lines] == ["with speculation", "without"]
    assert reward.lines[0].get_linestyle() != reward.lines[1].get_linestyle()
    assert accuracy.lines[1].get_xydata().tolist() == [[0, 0.3], [10, 0.4], [20, 0.5], [30, 0.6]]
    assert (accuracy.get_xlabel(), accuracy.get_ylabel()) == ("GRPO step", "greedy accuracy, held-out")


def test_acceptance_shows_mean_survival_per_position():
    length, survival = draw_acceptance(_arms()).axes
    assert [line.get_label() for line in length.lines] == ["with speculation"]
    assert length.get_ylabel() == "acceptance length (tokens per round)"
    # 16 even steps drafted two tokens, 15 odd ones three: a position never drafted survived in no round.
    expected = [(16 * 0.6 + 15 * 0.8) / 31, 0.5, 15 * 0.25 / 31]
    np.testing.assert_allclose(survival.lines[0].get_xydata(), list(zip([1, 2, 3], expected, strict=True)))
    assert draw_acceptance({"without": _rows(5, 0)}) is None


def test_time_is_split_into_parts_that_add_up_to_the_median_step():
    (axis,) = draw_time(_arms()).axes
    widths = {bars.get_label(): bars[0].get_width() for bars in axis.containers}
    assert widths == pytest.approx({"data": 0.1, "prefill": 0.5, "rollout (decode)": 1.5, "policy update": 1.0})
    ends = [bars[0].get_x() + bars[0].get_width() for bars in axis.containers]
    assert ends[-1] == pytest.approx(3.1)
    assert "seconds" in axis.get_xlabel()
    assert draw_time({"scanned": _rows(10, 3)[1:]}) is None


def test_lengths_are_counted_once():
    (axis,) = draw_lengths({"training": [3, 41, 42, 43, 200], "held-out": []}).axes
    assert axis.get_legend_handles_labels()[1] == ["training: median 42, 99th percentile 194"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("response length (tokens)", "responses")
    assert axis.patches[0].get_xy()[:, 1].max() == 3
    assert draw_lengths({"training": []}) is None


def test_losslessness_shows_divergences_per_million_and_what_was_expected():
    rows = [
        {"numerics": "plain", "dtype": "float32", "tokens": 1_000_000, "divergences": 3, "expected": 2.0},
        {"numerics": "plain", "dtype": "float32", "tokens": 1_000_000, "divergences": 1, "expected": 1.0},
        {"numerics": "invariant", "dtype": "bfloat16", "tokens": 500_000, "divergences": 0},
    ]
    costs = [{"dtype": "float32", "token_block": 8, "rows": n, "cost": 1.0 + 1 / n} for n in (1, 8)]
    left, right = draw_losslessness(rows, costs).axes
    assert [bar.get_height() for bar in left.patches] == [2.0, 0.0]
    (expected,) = left.lines
    assert expected.get_ydata().tolist() == [1.5, 1.5]
    assert right.lines[0].get_ydata().tolist() == [2.0, 1.125]
    assert not draw_losslessness(rows, []).axes[1].get_visible()


def test_acceptance_has_a_bar_per_group_and_name():
    rows = [
        {"rule": rule, "temperature": t, "acceptance_length": height, "ci95": 0.1}
        for rule, t, height in (("ratio", 0.6, 2.0), ("match", 0.6, 1.9), ("ratio", 1.0, 1.8), ("match", 1.0, 1.7))
    ]
    (axes,) = draw_acceptance_bars(rows, "temperature", "rule").axes
    assert sorted(bar.get_height() for bar in axes.patches) == [1.7, 1.8, 1.9, 2.0]


def test_depths_have_a_line_each():
    rows = [{"head": name, "conditional_acceptance": [height, height / 2]} for name, height in (("a", 0.8), ("b", 0.4))]
    (axes,) = draw_depths(rows, "head").axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.8, 0.4], [0.4, 0.2]]
    assert list(axes.lines[0].get_xdata()) == [1, 2]


def test_adaptation_is_shown_by_step_and_by_distance():
    rows = [
        {"arm": arm, "seed": seed, "step": step, "kl": 0.1 * step, "acceptance_length": 2.0 + step}
        for arm in ("frozen", "online")
        for seed in (0, 1)
        for step in (1, 2)
    ]
    left, right = draw_adaptation(rows).axes
    assert [list(line.get_xdata()) for line in left.lines] == [[1, 2]] * 4
    assert [list(line.get_ydata()) for line in right.lines] == [[3.0, 4.0]] * 4
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["frozen", "online"]


def test_costs_stand_beside_their_floors():
    rows = [
        {"rows": count, "draft_length": k, "round_cost": 1 + 0.2 * k, "floor": 1 + 0.1 * k}
        for count in (1, 8)
        for k in (3, 1)
    ]
    (axes,) = draw_round_cost(rows).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[1.0, 1.2, 1.6], [1.0, 1.1, 1.3]] * 2
    assert [list(line.get_xdata()) for line in axes.lines] == [[0, 1, 3]] * 4


def test_speedups_have_intervals():
    rows = [
        {"rows": 1, "lengths": "equal", "synthetic_survival": 0.8, "draft_length": arm, "speedup": s}
        | {"speedup_low": s - 0.1, "speedup_high": s + 0.2}
        for arm, s in (("adaptive", 1.75), ("3", 1.5), ("0", 1.0))
    ]
    (axes,) = draw_speedups(rows).axes
    assert [bar.get_height() for bar in axes.patches] == [1.0, 1.5, 1.75]
    assert [text.get_text() for text in draw_speedups(rows).legends[0].get_texts()] == [
        "0 drafts",
        "3 drafts",
        "adaptive",
    ]
