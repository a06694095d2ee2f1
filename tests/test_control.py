"""What the controller plans, deals and learns, against sums by hand."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.models.backend import made_for
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.control import (
    BINS,
    Body,
    allocate,
    best_verified,
    bin_of,
    default_bodies,
    fade,
    forget,
    initial_control,
    learn,
    overall_acceptance,
    plan_round,
    room_left,
    seconds_per_token,
    share,
    worth_another_step,
    worth_of_tokens,
)
from specrl_jax.rollout.sampling import SamplingLaw

pytestmark = pytest.mark.ci


def test_rows_that_share_alike_have_as_many_drafts_as_there_is_room_for():
    survival = jnp.array([[0.9, 0.8, 0.7], [0.5, 0.1, 0.0], [0.0, 0.0, 0.0]], jnp.float32)
    for budget, lengths in ((0, [0, 0, 0]), (1, [0, 0, 0]), (2, [1, 1, 0]), (5, [2, 2, 0]), (9, [3, 2, 0])):
        np.testing.assert_array_equal(share(survival[..., None], jnp.int32(budget)).sum(axis=(1, 2)), lengths)


def test_dealing_takes_the_prefixes_that_save_most():
    rng = np.random.default_rng(0)
    for _ in range(50):
        survival = np.cumprod(rng.choice([0.0, 0.3, 0.9, 1.0], (5, 6)), axis=1)
        worth = (survival * rng.choice([0.1, 0.3, 1.0], (5, 1))).astype(np.float32)
        budget = int(rng.integers(0, 31))
        taken = np.asarray(allocate(jnp.asarray(worth)[..., None], jnp.int32(budget)))[..., 0]
        lengths = taken.sum(axis=1)
        assert lengths.sum() == min(budget, (worth > 0).sum())
        np.testing.assert_array_equal(taken, np.arange(6)[None] < lengths[:, None])
        best = np.sort(worth.ravel())[::-1][: lengths.sum()]
        np.testing.assert_allclose(np.sort(worth[taken])[::-1], best, atol=1e-6)


def test_a_token_is_worth_more_to_a_row_that_gets_few():
    """Another token a round saves a row `1 / x - 1 / (x + 1)` rounds per token, to first order `1 / x**2`."""
    control, record = (
        initial_control(np.ones(2)),
        jnp.array([[1e6, 0.8e6, 0, 0], [1e6, 0.1e6, 0, 0], [1e6, 0.8e6, 0, 0]]),
    )
    live = jnp.array([True, True, False])
    for steps in (0, 1, 3):
        tokens = [sum(p**i for i in range(1 + steps)) for p in (0.8, 0.1)]
        worth = worth_of_tokens(control, 3, jnp.int32(steps), live, record)
        np.testing.assert_allclose(worth, [*(1.0 / x**2 for x in tokens), 0.0], rtol=1e-4)
    # A row for which much was planned, and that got nothing beyond its own tokens, comes to be worth more.
    passed_over = record.at[0, 2:].set(jnp.array([40.0, 40.0]))
    worth = worth_of_tokens(control, 3, jnp.int32(3), live, passed_over)
    np.testing.assert_allclose(worth[0], (44.0 / (40.0 + 4.0 * 2.952)) ** 2, rtol=1e-4)


def test_a_draft_is_worth_what_it_adds_to_those_that_are_verified():
    """Two rows, two drafts each so far; every further draft is taken to survive 0.9 of the last."""
    control = initial_control(np.ones(1))
    none, token = jnp.zeros((2, 4), jnp.float32), jnp.array([0.5, 0.25])

    def worth(survival, budget, *prices, left=0):
        drafted, prices = none.at[:, :2].set(jnp.array(survival, jnp.float32)), map(jnp.float32, prices)
        rooms = jnp.int32(budget), jnp.int32(left)
        return bool(worth_another_step(control, drafted[..., None], token, jnp.int32(2), *rooms, *prices))

    acceptance = float(overall_acceptance(control))  # at every depth, since nothing was learned
    even, uneven = [[0.8, 0.6], [0.8, 0.6]], [[0.9, 0.9], [0.3, 0.05]]
    third = 0.6 * acceptance * np.asarray(token)
    # Of four drafts the first row's third takes the place of the other's second.
    instead = 0.5 * 0.9 * acceptance - 0.25 * 0.05
    for factor, worthwhile in ((0.99, True), (1.01, False)):
        assert worth(even, 8, factor * third.sum(), 0.0) == worthwhile
        assert worth(even, 5, factor * third[0], 0.0) == worthwhile
        assert worth(uneven, 4, factor * instead, 0.0) == worthwhile
        # Where a token has its price too, only the first row's is worth it.
        assert worth(even, 8, factor * 0.1 * third[0], 0.9 * third[0]) == worthwhile
        # It has none for as many as the body has room for anyway, the best.
        for left in (2, 9):
            assert worth(even, 8, factor * third.sum(), 0.9 * third[0], left=left) == worthwhile
        assert worth(even, 8, factor * third[0], 0.9 * third[0], left=1) == worthwhile
    assert not worth([[0.8, 0.6], [0.8, 0.6]], 2, 0.0, 0.0)


def test_what_a_body_has_room_for_is_counted_to_its_depth():
    bodies = ((2, Body(4, 8)), (5, Body(4, 16)))  # of depths 2 and 6
    worth = jnp.zeros((4, 7, 2)).at[:2, :2, 0].set(0.5).at[0, 0, 1].set(0.1)
    # Two live rows of four, with two drafts each and one candidate beside.
    for chosen, step, expected in ((2, 2, 0), (5, 2, 9), (2, 1, 1), (5, 6, 0)):
        assert int(room_left(bodies, 7, worth, jnp.int32(step), jnp.int32(2), jnp.int32(chosen))) == expected
    deeper = worth.at[0, 2, 0].set(0.4)
    assert int(room_left(bodies, 7, deeper, jnp.int32(1), jnp.int32(2), jnp.int32(2))) == 1
    assert int(room_left(bodies, 7, jnp.ones((4, 7, 2)), jnp.int32(1), jnp.int32(2), jnp.int32(5))) == 0


def test_a_round_is_as_long_as_its_drafts_are_sure():
    bodies = tuple(enumerate(Body(1, tokens) for tokens in (1, 2, 4, 8)))
    seconds = np.array([1.0, 1.1, 1.3, 1.7])
    control = initial_control(seconds, per_step=0.05)
    np.testing.assert_allclose(seconds_per_token(control.seconds, bodies), 0.1, rtol=1e-5)
    np.testing.assert_allclose(seconds_per_token(control.seconds, bodies[2:3]), 0.0)
    count, per_second = jnp.int32(1), jnp.float32(0.5)
    rng = np.random.default_rng(0)
    for _ in range(200):
        survival = np.cumprod(rng.uniform(0.2, 1.0, (1, 7)), axis=1).astype(np.float32)
        kept = np.where(np.arange(7) < rng.integers(1, 8), survival, 0.0)
        found = int(
            best_verified(
                control.seconds, bodies[1:], 7, jnp.asarray(0.3 * kept[..., None], jnp.float32), count, per_second
            )
        )
        gains = [0.3 * kept[0, : body.tokens - 1].sum() - 0.5 * seconds[i] for i, body in bodies[1:]]
        assert found == 1 + int(np.argmax(gains))


@pytest.mark.parametrize("per_row", [True, False])
def test_drafts_are_worth_what_the_rows_that_verify_them_save(per_row):
    """Three rows, one of them ended: of the bodies' tokens each live row takes one."""
    bodies = tuple(enumerate(Body(3, tokens) for tokens in (4, 6, 12, 24)))
    control, rng = initial_control(np.array([1.0, 1.15, 1.5, 2.2])), np.random.default_rng(0)
    chosen = set()
    for _ in range(200):
        worth = rng.uniform(0.1, 0.5, (3, 1)) * np.cumprod(rng.uniform(0.2, 1.0, (3, 7)), axis=1)
        worth[2] = 0.0
        drafts = jnp.asarray(worth[..., None], jnp.float32)
        found = best_verified(control.seconds, bodies, 7, drafts, jnp.int32(2), jnp.float32(0.5), per_row)
        gains = []
        for i, body in bodies:
            drafts, room = worth[:, : body.depth(7)], body.tokens - 2
            saved = np.sort(drafts.ravel())[::-1][:room].sum() if per_row else drafts[:, : room // 2].sum()
            gains.append(saved - 0.5 * float(control.seconds[i]))
        assert int(found) == int(np.argmax(gains))
        chosen.add(int(found))
    assert len(chosen) > 2


def test_learning_counts_what_was_judged():
    control, record = learn(
        initial_control(np.ones(2)),
        jnp.zeros((3, 4)),
        confidence=jnp.full((3, 4), 0.5),
        lengths=jnp.array([4, 2, 0], jnp.int32),
        accepted=jnp.array([1, 2, 0], jnp.int32),
        counted=jnp.array([True, True, True]),
    )
    here = int(bin_of(jnp.float32(0.5)))
    assert (control.drafted[here] - 2.0, control.accepted[here]) == (4.0, 2.0 * (here + 0.5) / BINS + 3.0)
    np.testing.assert_array_equal(record, [[2, 1, 2, 1], [2, 2, 3, 1], [0, 0, 1, 1]])
    promised = float(overall_acceptance(initial_control(np.ones(2))))
    np.testing.assert_allclose(control.by_depth[0, :3], [2 * promised, 2 * promised, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(control.by_depth[1, :3], [2.0, 1.0, 0.0])


def test_what_deep_drafts_are_worth_is_learned_by_depth():
    """The first two drafts are always accepted and the third never: three are as good as two."""
    bodies = tuple(Body(8, 8 * (1 + drafts)) for drafts in (1, 2, 3))
    control, record = initial_control(np.array([1.0, 1.01, 1.02])), jnp.zeros((8, 4))
    live, none = jnp.ones((8,), bool), jnp.int32(0)

    def choice(control):
        return int(plan_round(control, bodies, 3, live, record, none, jnp.int32(-1)).body)

    assert choice(control) == 2
    for _ in range(200):
        accepted, lengths = jnp.full((8,), 2, jnp.int32), jnp.full((8,), 3, jnp.int32)
        control, record = learn(control, record, jnp.full((8, 3), 0.7), lengths, accepted, live)
    assert choice(control) == 1
    last = replace(control, seconds=control.seconds[2:], per_step=control.per_step[2:])
    rounds = float(plan_round(last, bodies[2:], 3, live, record, none, none).per_second) * 1.02
    np.testing.assert_allclose(rounds, 8 / 3.0, rtol=0.02)


def test_a_hard_beginning_leaves_no_good_head_idle():
    """All rows begin at once, and of the first drafts one in eight is accepted; ten such rounds are another matter."""
    bodies, live = (Body(16, 16), Body(16, 32)), jnp.ones((16,), bool)
    control, record = initial_control(np.array([1.0, 1.3])), jnp.zeros((16, 4))
    accepted = (jnp.arange(16) < 2).astype(jnp.int32)
    choices = []
    for _ in range(10):
        control, record = learn(control, record, jnp.full((16, 1), 0.7), jnp.ones((16,), jnp.int32), accepted, live)
        choices.append(int(plan_round(control, bodies, 1, live, record, jnp.int32(0), jnp.int32(-1)).body))
    assert choices[0] == 1
    assert choices[-1] == 0


def test_what_was_learned_fades_to_the_first_belief():
    begun = initial_control(np.ones(2))
    control = replace(begun, drafted=begun.drafted + 1000.0, accepted=begun.accepted + 10.0)
    control = jax.lax.fori_loop(0, 2000, lambda _, control: forget(control), control)
    np.testing.assert_allclose(control.drafted, begun.drafted, rtol=1e-5)
    np.testing.assert_allclose(control.accepted, begun.accepted, rtol=1e-5)
    more = begun.drafted + 33.0  # of each of 16 bins: more than 512 drafts
    np.testing.assert_allclose(forget(replace(begun, drafted=more)).drafted, begun.drafted + 0.95 * 33.0, rtol=1e-6)


def test_of_few_drafts_less_is_forgotten():
    """As many as end a bad drafter: as many as a twentieth of them would be tried anew in every rollout."""
    begun = initial_control(np.ones(2))
    control = forget(replace(begun, drafted=begun.drafted + 32.0, by_depth=begun.by_depth + 10.0))
    np.testing.assert_allclose(control.drafted, begun.drafted + 0.99 * 32.0, rtol=1e-6)
    np.testing.assert_allclose(control.by_depth, 9.9, rtol=1e-6)


def test_what_is_in_the_cache_makes_rounds_dearer_by_what_they_read():
    bodies = (Body(1, 1), Body(1, 2))
    control = initial_control(np.array([1.0, 1.2]), per_slot=np.array([0.001, 0.01]))
    live, record = jnp.ones((1,), bool), jnp.zeros((1, 4))
    for slots, seconds, body in ((0, [1.0, 1.2], 1), (200, [1.2, 3.2], 0)):
        plan = plan_round(control, bodies, 1, live, record, jnp.int32(slots), jnp.int32(-1))
        np.testing.assert_allclose(plan.seconds, seconds, rtol=1e-6)
        assert int(plan.body) == body


def test_default_bodies_serve_any_number_of_rows():
    sizes, platforms = ((*range(1, 34), 64, 512), (1, 2, 3, 5, 7, 15, 16, 32)), (("cpu", 64), ("gpu", 256))
    for rows, longest, (platform, many) in itertools.product(*sizes, platforms):
        with made_for(platform):
            bodies = default_bodies(rows, longest)
        assert len(set(bodies)) == len(bodies) <= 12
        assert Body(rows, rows) in bodies
        assert Body(1, 1) in bodies or rows > 4
        assert Body(rows, rows * (1 + longest)) in bodies or (len(bodies) == 12 and rows * (1 + longest) > many)
        assert all(body.rows <= body.tokens <= body.rows * (1 + longest) for body in bodies)
        RolloutConfig(8, 1, longest, SamplingLaw(end_ids=(1,)), adaptive=True).bodies_for(rows)
    assert [body.tokens for body in default_bodies(1, 7)] == [1, 2, 4, 8]
    assert [body.tokens for body in default_bodies(1, 8)] == [1, 2, 4, 8, 9]
    assert Body(8, 8) in default_bodies(16, 3)
    # Of very many rows most drafts are left out in its place.
    assert {Body(64, 512), Body(32, 32)} & set(default_bodies(64, 7)) == {Body(32, 32)}
    for platform, kept in (("cpu", Body(8, 8)), ("gpu", Body(16, 128)), ("tpu", Body(16, 128))):
        with made_for(platform):
            assert {Body(16, 128), Body(8, 8)} & set(default_bodies(16, 7)) == {kept}
    assert {Body(8, 64), Body(4, 4)} & set(default_bodies(8, 7)) == {Body(8, 64)}


def test_a_plan_pays_for_the_steps_of_the_rows_that_are_live():
    """Two live rows of eight: 16 tokens are 7 drafts each, of at most 2."""
    bodies, live = (Body(8, 16), Body(8, 24)), jnp.arange(8) < 2
    for body, steps in zip(bodies, (2, 4), strict=True):
        assert int(body.steps(7, jnp.int32(2))) == steps
        assert int(body.steps(7, jnp.int32(8))) == steps // 2
    record = jnp.full((8, 4), 100.0)
    for step, chosen in ((0.0, 1), (0.5, 0)):
        control = initial_control(np.array([1.0, 1.01]), per_step=step)
        plan = plan_round(control, bodies, 7, live, record, jnp.int32(0), jnp.int32(-1))
        assert int(plan.body) == chosen
        assert int(plan.steps) == (2, 4)[chosen]


def test_a_plan_stays_where_it_is_unless_another_body_is_clearly_better():
    bodies, live, record = (Body(8, 16), Body(8, 24)), jnp.arange(8) < 2, jnp.full((8, 4), 100.0)

    def plan(seconds, now, bodies=bodies):
        control = initial_control(np.array(seconds))
        return plan_round(control, bodies, 7, live, record, jnp.int32(0), jnp.int32(now))

    few, many = (float(plan([1.0], -1, (body,)).per_second) for body in bodies)  # rounds per token in a second
    for gain, stays in ((0.01, True), (0.03, False)):
        seconds = [1.0, few / many / (1.0 + gain)]
        assert [int(plan(seconds, -1).body), int(plan(seconds, -1).steps)] == [1, 4]
        assert [int(plan(seconds, 0).body), int(plan(seconds, 0).steps)] == ([0, 2] if stays else [1, 4])


def test_drafts_that_do_not_pay_end_at_once_and_come_back_with_a_margin():
    bodies, live, record = (Body(2, 2), Body(2, 4)), jnp.ones((2,), bool), jnp.full((2, 4), 100.0)

    def chosen(drafting, now):
        control = initial_control(np.array([1.0, drafting]))
        return int(plan_round(control, bodies, 7, live, record, jnp.int32(0), jnp.int32(now)).body)

    control = initial_control(np.ones(1))
    plans = [plan_round(control, (body,), 7, live, record, jnp.int32(0), jnp.int32(-1)) for body in bodies]
    even = float(plans[0].per_second / plans[1].per_second)  # seconds at which drafts cost what they save
    assert [chosen(even * 1.01, now) for now in (0, 1)] == [0, 0]
    assert [chosen(even / 1.01, now) for now in (0, 1)] == [0, 1]
    assert [chosen(even / 1.03, now) for now in (0, 1)] == [1, 1]
    # Also where other drafts are a little better than none, and better than those of now by less than the margin.
    three = (*bodies, Body(2, 4))
    control = initial_control(np.array([1.0, even * 1.01, even / 1.005]))
    assert int(plan_round(control, three, 7, live, record, jnp.int32(0), jnp.int32(1)).body) == 2


def test_the_choice_follows_costs_and_live_rows():
    bodies = default_bodies(16, 7)
    assert len(bodies) == 12
    # A round costs one unit and a twentieth for every token.
    control = initial_control(np.array([1.0 + 0.05 * body.tokens for body in bodies]))
    record = jnp.full((16, 4), 100.0)

    def choice(live, record, now=-1):
        rows = jnp.arange(16) < live
        return bodies[int(plan_round(control, bodies, 7, rows, record, jnp.int32(0), jnp.int32(now)).body)]

    assert choice(1, record) == Body(1, 8)
    assert choice(16, record * jnp.array([[1.0, 0.01, 1.0, 1.0]])) == Body(16, 16)
    # Sure drafts take the room of rows that have ended; doubtful ones do not pay for it.
    assert choice(4, record) == Body(8, 32)
    assert choice(4, record * jnp.array([[1.0, 0.5, 1.0, 1.0]])).rows == 4
    # It stays where it is unless another body is clearly better.
    stay = bodies.index(Body(16, 16))
    assert choice(16, record * jnp.array([[1.0, 0.01, 1.0, 1.0]]), stay) == Body(16, 16)


def test_a_round_that_serves_only_the_surest_rows_is_not_chosen():
    """Half of the rows accept nearly everything, half of them nothing: these wait for every dearer round."""
    bodies = (Body(8, 16), Body(8, 64))
    control, live = initial_control(np.array([1.0, 2.0])), jnp.ones((8,), bool)
    for accepted, chosen in ((98.0, bodies[1]), (2.0, bodies[0])):
        record = jnp.full((8, 4), 100.0).at[:4, 1].set(accepted)
        assert bodies[int(plan_round(control, bodies, 7, live, record, jnp.int32(0), jnp.int32(-1)).body)] == chosen


def test_a_few_refusals_do_not_end_drafting():
    """Without drafts nothing is learned: a row gives up after many refused ones, and tries again some time."""
    bodies = tuple(Body(1, tokens) for tokens in (1, 2, 4, 8))
    control = initial_control(np.array([0.0218, 0.0313, 0.0353, 0.0438]))

    def drafts(record):
        live, now = jnp.ones((1,), bool), jnp.int32(-1)
        return bodies[int(plan_round(control, bodies, 7, live, record, jnp.int32(0), now).body)].tokens > 1

    assert drafts(jnp.zeros((1, 4)))
    assert drafts(jnp.array([[2.0, 0.0, 1.0, 1.0]]))
    record = jnp.array([[30.0, 0.0, 30.0, 30.0]])
    assert not drafts(record)
    for _ in range(150):
        record = fade(record)
    assert drafts(record)
