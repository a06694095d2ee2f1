"""What a cost table is made of: seconds of calls that a clock told, on machines that change their pace."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from specrl_jax.rollout.control import Body
from specrl_jax.training import costs

pytestmark = pytest.mark.ci


def test_noise_makes_no_round_free(monkeypatch):
    monkeypatch.setattr(costs, "_BUDGET_S", 0.0)
    calls = [lambda rounds: 8.0 + rounds] * 2 + [lambda rounds: 8.0 / rounds]
    np.testing.assert_allclose(costs._seconds_per_round(calls), [1.0, 1.0, 0.4])
    # A call that takes less than its rounds is not one that has time to give.
    np.testing.assert_allclose(costs._seconds_per_round([lambda rounds: float(rounds**2)]), [5.0 / 3.0])


def test_of_a_busy_machine_the_quiet_turns_count(monkeypatch):
    """Two of three turns are slow, and a call of a fourth."""
    monkeypatch.setattr(costs, "_MOST_TURNS", 4)
    pace = iter([4.0, 3.0, 3.0, 1.0, 1.0, 2.0, 2.0, 1.0, 5.0])  # before the turns, then two calls in each
    assert costs._seconds_per_round([lambda rounds: (1.0 + rounds) * next(pace)]) == pytest.approx(1.0)


def test_a_case_is_not_cheap_because_the_machine_was_quick_for_a_while(monkeypatch):
    """Three paces of a machine, and each of three cases is lucky once: they all stand to one another as in a turn."""
    monkeypatch.setattr(costs, "_BUDGET_S", 0.0)
    paces, seen = [1.0, 3.0, 1.0, 2.0], dict.fromkeys(range(7), 0)  # the first before the turns

    def call(case, rounds):
        turn = (seen[case] + 1) // 2 if case < 4 else seen[case]  # a call before the turns, then two in each, or one
        seen[case] += 1
        lucky = 0.4 if turn == 1 + case % 3 and case < 3 else 1.0
        return lucky * paces[turn] * (case + 1.0) * rounds

    calls = [partial(call, case) for case in range(7)]
    np.testing.assert_allclose(costs._seconds_per_round(calls), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])


def test_noise_makes_no_draft_step_longer_than_its_round():
    small, large = Body(4, 8), Body(4, 16)
    typical = {(Body(4, 4), 0): 1.0, (small, 4): 9.0, (large, 4): 2.0, (small, 1): 1.5}  # large was lucky
    np.testing.assert_allclose([costs._cost(typical, body) for body in (small, large)], [[7.5, 0.5], [0.5, 0.5]])


@pytest.mark.parametrize(("more", "expected"), [([-1.0, 4.0], [0.0, 0.5, 1.0]), ([4.0, 2.0], [1.0, 1.0, 1.0])])
def test_noise_makes_no_token_in_the_cache_a_gain(more, expected):
    for bodies in ([Body(4, 4), Body(4, 8), Body(4, 12)], [Body(4, 4), Body(4, 5), Body(4, 6)]):
        per_slot = costs._per_slot(bodies, [bodies[0], bodies[2]], np.array(more))
        np.testing.assert_allclose(per_slot, expected)
    # Where all bodies have as many tokens a row, there is one cost.
    np.testing.assert_allclose(costs._per_slot([bodies[0]], [bodies[0]] * 2, np.array([4.0, 4.0])), [1.0])


def test_the_noise_of_long_rounds_does_not_make_short_ones_cheap(monkeypatch):
    """A call takes half a second of its own, and two long rounds would take hardly more than one."""
    monkeypatch.setattr(costs, "_BUDGET_S", 0.0)
    calls = [lambda rounds: 0.5 + rounds, lambda rounds: 0.5 + 2.0 * rounds, *[lambda rounds: 40.0 + rounds] * 2]
    np.testing.assert_allclose(costs._seconds_per_round(calls), [1.0, 2.0, 40.5, 40.5])


@pytest.mark.parametrize(("said", "turns"), [(1e3, 3), (2.3, 3), (2.2, 4), (0.7, 13), (1e-6, 45)])
def test_costs_are_measured_as_often_as_the_first_process_says(monkeypatch, said, turns):
    """And of the calls that seemed quick to the first; a process that went by its own clock would leave the others
    waiting in a collective."""
    monkeypatch.setattr(costs, "of_first", lambda own: (np.float32([2.5, 1.5]), np.float32(said)))
    made = []

    def call(seconds, rounds):
        made.append((seconds, rounds))
        return 0.5 + seconds * rounds

    np.testing.assert_allclose(costs._seconds_per_round([partial(call, 1.0), partial(call, 2.0)]), [1.0, 2.0])
    assert made[:2] == [(1.0, 1), (2.0, 1)]
    assert sorted(made[2:]) == sorted([(1.0, 1), (2.0, 1), (2.0, 2)] * turns)


def test_measuring_costs_takes_the_time_that_there_is(monkeypatch):
    made = []
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: 0.25 * sum(made)))

    def call(rounds):
        made.append(rounds)
        return 0.25 * rounds

    assert costs._seconds_per_round([call]) == pytest.approx(0.25)
    assert sorted(made) == [1] * (1 + 21) + [2] * 21  # 16 seconds
