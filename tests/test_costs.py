"""What a cost table is made of: seconds of calls that a clock told, on machines that change their pace."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from test_adaptive import engine_of
from tiny import INVARIANT, random_eagle3, tiny_params

from specrl_jax.errors import InputError
from specrl_jax.rollout.control import Body, initial_control
from specrl_jax.training import costs

pytestmark = pytest.mark.ci


def test_noise_makes_no_round_free(monkeypatch):
    monkeypatch.setattr(costs, "_MOST_TURNS", 3)
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
    monkeypatch.setattr(costs, "_MOST_TURNS", 3)
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
    monkeypatch.setattr(costs, "_MOST_TURNS", 3)
    calls = [lambda rounds: 0.5 + rounds, lambda rounds: 0.5 + 2.0 * rounds, *[lambda rounds: 40.0 + rounds] * 2]
    np.testing.assert_allclose(costs._seconds_per_round(calls), [1.0, 2.0, 40.5, 40.5])


@pytest.mark.parametrize(("said", "turns"), [(2.3, 3), (2.2, 4), (0.7, 13), (1e-6, 45)])
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


def test_rounds_for_which_there_is_no_time_are_timed_once(monkeypatch):
    monkeypatch.setattr(costs, "_BUDGET_S", 0.0)
    seconds = iter([2.0, 3.0])
    measured = costs._seconds_per_round([lambda rounds: rounds * next(seconds)] * 2)
    np.testing.assert_array_equal(measured, [2.0, 3.0])
    assert measured.dtype == float


def test_a_cache_budget_bounds_the_rounds_that_are_timed(monkeypatch):
    """Ample, then too small for all rows to have pages of their own: they share, and are timed all the same."""
    timed, rounds_of = [], costs._rounds_of

    def noted(*args):
        timed.append(rounds_of(*args))
        return timed[-1]

    monkeypatch.setattr(costs, "_rounds_of", noted)
    monkeypatch.setattr(costs, "_seconds_per_round", lambda calls: np.ones(len(calls)))
    engine = engine_of(bodies=(Body(4, 4), Body(4, 8), Body(1, 1)), numerics=replace(INVARIANT, key_block=8))
    page, of_drafter = engine.page_bytes(), 3 * engine.drafter_bytes(4, 17)
    for pages, expected in ((100, 16), (10, 10)):  # rounds of five tokens twice beside 16 need four pages of eight
        settings = replace(engine.config, cache_bytes=of_drafter + pages * page)
        costs.measure_costs(replace(engine, config=settings), tiny_params(), random_eagle3()[1], 4, 16)
        for one in timed[-2:]:
            pool = one.batch.pool
            assert sum(math.prod(x.shape) * x.dtype.itemsize for x in (*pool.keys, *pool.values)) == expected * page
            assert int(one.batch.rows.table.max()) == expected - 1 or one.batch.rows.table.size < expected
            read = np.asarray(one.batch.rows.table)[:, :4]
            assert len(set(read.reshape(-1))) == min(expected, read.size)


def test_a_cost_table_comes_back(tmp_path):
    bodies = (Body(4, 4), Body(4, 16))
    path = tmp_path / "costs.json"
    control = initial_control(np.array([0.5, 0.75]), np.array([1e-6, 2e-6]), np.array([2e-3, 3e-3]))
    costs.save_costs(path, control, bodies, "this")
    again = costs.load_costs(path, bodies, "this")
    np.testing.assert_array_equal(again.seconds, [0.5, 0.75])
    np.testing.assert_array_equal(again.per_slot, np.array([1e-6, 2e-6], np.float32))
    np.testing.assert_array_equal(again.per_step, np.array([2e-3, 3e-3], np.float32))
    with pytest.raises(InputError, match="is of other rounds than"):
        costs.load_costs(path, (Body(4, 4), Body(4, 8)), "this")
    with pytest.raises(InputError, match="is of another policy, drafter, law or numerics; delete it"):
        costs.load_costs(path, bodies, "that")
    whole = path.read_text()
    path.write_text(whole.replace("0.003", "0.003, 0.004"))
    with pytest.raises(InputError, match="steps are not one for each round"):
        costs.load_costs(path, bodies, "this")


@pytest.mark.parametrize(
    ("whole", "damaged"),
    [
        ("{", ""),
        ("0.5", "null"),
        ("0.5", '"half"'),
        ("0.5", "NaN"),
        ("0.5", "Infinity"),
        ("0.5", "0.0"),
        ("0.125", "NaN"),
        ("0.125", "-0.125"),
        ("0.25", "-0.25"),
        ("16", "1e400"),
    ],
)
def test_a_damaged_cost_table_is_refused_by_name(tmp_path, whole, damaged):
    bodies, path = (Body(4, 4), Body(4, 16)), tmp_path / "costs.json"
    costs.save_costs(path, initial_control(np.array([0.5, 0.75]), 0.125, 0.25), bodies, "this")
    text = path.read_text()
    assert whole in text
    path.write_text(text.replace(whole, damaged, 1))
    with pytest.raises(InputError, match=r"cost table .*costs\.json cannot be read \(.*\); delete it"):
        costs.load_costs(path, bodies, "this")
