"""Goals of the rollout engine are judged by whole intervals, and by the worst row."""

import pytest
from speed_goals import GOALS, Goal, goals_table, rows_of
from speed_tables import with_range

pytestmark = pytest.mark.ci


def ranged(middle, low, high):
    return {"speedup": middle, "speedup_low": low, "speedup_high": high}


@pytest.mark.parametrize(
    ("sign", "row", "met"),
    [
        ("≥", ranged(1.6, 1.5, 1.7), "yes"),
        ("≥", ranged(1.6, 1.4, 1.7), "in the middle"),
        ("≥", ranged(1.4, 1.3, 1.6), "no"),
        ("≤", ranged(1.4, 1.3, 1.5), "yes"),
        ("≤", ranged(1.4, 1.3, 1.6), "in the middle"),
        ("≤", ranged(1.6, 1.4, 1.7), "no"),
        ("≤", {"speedup": 1.4}, "yes"),
    ],
)
def test_an_interval_is_judged_by_its_worse_end(sign, row, met):
    assert Goal("", "", bool, "speedup", sign, 1.5).met(row) == met


def test_a_middle_that_misses_is_told_before_a_wider_interval_that_does():
    goal = Goal("", "", bool, "speedup", "≥", 1.5)
    rows = [ranged(1.6, 1.0, 1.7), ranged(1.45, 1.4, 1.5), ranged(1.48, 1.3, 1.6), ranged(1.7, 1.6, 1.8)]
    assert goal.worst(rows) == rows[2]
    assert goal.worst([rows[0], rows[3]]) == rows[0]


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: f"{goal.what}, {goal.field}")
def test_every_goal_is_judged_by_rows_that_have_its_field(goal):
    rows = rows_of(goal)
    assert rows
    assert all(goal.field in row for row in rows)


def test_the_worst_row_is_told():
    (goal,) = (goal for goal in GOALS if goal.what == "same, beside 2048 tokens")
    (line,) = (line for line in goals_table().splitlines() if goal.what in line)
    worst, *others = sorted(rows_of(goal), key=lambda row: -row["over_floor_high"])
    assert with_range(worst, "over_floor") in line
    assert not any(with_range(row, "over_floor") in line for row in others)
