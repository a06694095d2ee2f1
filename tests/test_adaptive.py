"""Rounds whose drafts are chosen while they run: the tokens are those without drafts, whatever is decided."""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_rollout_programs import COLLECTIVE, instructions_in_loops
from tiny import INVARIANT, POLICY, assert_same, keys_of, random_eagle3, take_prompts, tiny_params, tiny_prompts
from tiny import run as run_alone

from specrl_jax.errors import InputError
from specrl_jax.models.numerics import Numerics
from specrl_jax.parallel.mesh import DATA, MeshConfig, make_mesh
from specrl_jax.rollout import adaptive as adaptive_module
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
    merge,
    overall_acceptance,
    plan_round,
    seconds_per_token,
    share,
    worth_another_step,
    worth_of_tokens,
)
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Block, Match
from specrl_jax.rollout.sampling import Context, SamplingLaw
from specrl_jax.training import costs as costs_module

pytestmark = pytest.mark.ci
SAMPLES, NEW = 3, 20
PROMPTS = tiny_prompts()
KEYS = keys_of(PROMPTS, SAMPLES)


def test_rows_that_share_alike_have_as_many_drafts_as_there_is_room_for():
    survival = jnp.array([[0.9, 0.8, 0.7], [0.5, 0.1, 0.0], [0.0, 0.0, 0.0]], jnp.float32)
    for budget, lengths in ((0, [0, 0, 0]), (1, [0, 0, 0]), (2, [1, 1, 0]), (5, [2, 2, 0]), (9, [3, 2, 0])):
        np.testing.assert_array_equal(share(survival, jnp.int32(budget)), lengths)


DRAFTING = (Body(15, 60), Body(4, 16))  # two to compile
BODIES = (Body(15, 15), Body(15, 30), Body(15, 60), Body(4, 4), Body(4, 16), Body(1, 1), Body(1, 5))


def engine_of(adaptive=True, numerics=INVARIANT, law=None, **settings):
    law = law or SamplingLaw(end_ids=(1, 7))
    drafter, _ = random_eagle3()
    settings = {"bodies": BODIES} | settings if adaptive else {"ladder": (1.0,)} | settings
    config = RolloutConfig(NEW, SAMPLES, 4 if adaptive else 0, law, adaptive=adaptive, **settings)
    return RolloutEngine(POLICY, config, numerics, drafter if adaptive else None)


def plain(**settings):
    engine = engine_of(False, **settings)
    return jax.device_get(jax.jit(engine.rollout)(tiny_params(), None, PROMPTS, KEYS))


def adaptive(engine, control):
    program = jax.jit(lambda *a: engine.rollout(*a[:4], control=a[4]))
    return jax.device_get(program(tiny_params(), random_eagle3()[1], PROMPTS, KEYS, control))


@pytest.fixture(scope="module")
def program():
    engine = engine_of()
    return jax.jit(lambda *a: engine.rollout(*a[:4], control=a[4]))


def table(**cheap):
    """Every round costs a second, except those named by their place."""
    seconds = np.ones(len(BODIES))
    for place, cost in cheap.items():
        seconds[int(place[1:])] = cost
    return initial_control(seconds)


TABLES = {
    "even": table(),
    "never": table(b0=1e-3, b3=1e-3, b5=1e-3),
    "always": table(b2=1e-3, b4=1e-4, b6=1e-5),
    "idle, then drafts": table(b0=1e-6, b4=1e-9, b6=1e-9),
    "largest only": table(b1=1e-9),
}
SOME = initial_control(np.array([1.0, 1e-4]))


@pytest.mark.parametrize("name", TABLES)
def test_the_tokens_are_those_without_drafts(program, name):
    ours = jax.device_get(program(tiny_params(), random_eagle3()[1], PROMPTS, KEYS, TABLES[name]))
    control = ours.control
    assert_same(ours, plain())
    stats, used = ours.stats, ours.stats.bodies
    assert stats.accepted + stats.rounds + stats.cut_accepted <= ours.lengths.sum()
    assert stats.accepted_at.sum() == stats.accepted
    assert np.all(stats.accepted_at <= stats.drafted_at)
    assert np.all(np.diff(stats.drafted_at) <= 0)
    # Of a round are judged the drafts that were accepted, and the first that was not.
    learned = control.drafted.sum() - 2 * BINS, control.accepted.sum() - BINS
    assert learned[1] == stats.accepted <= learned[0] <= stats.accepted + stats.rounds
    drafting = [i for i, body in enumerate(BODIES) if body.tokens > body.rows]
    if name == "never":
        assert not used[drafting].any()
        assert stats.rounds == 0
    elif name == "always":
        assert used[[2, 4, 6]].all()
        assert not used[[0, 1, 3, 5]].any()
    elif name == "idle, then drafts":
        # The drafter reads what it has missed, more than a chunk of it.
        assert used[0] > 0
        assert used[[4, 6]].any()
    elif name == "largest only":
        assert used[1] == used.sum()


@pytest.mark.parametrize(("rows", "bodies"), [(1, None), (4, (Body(4, 4), Body(4, 16), Body(1, 5)))])
def test_few_rows_and_waiting_sequences(rows, bodies):
    engine = engine_of(rows=rows, bodies=bodies)
    control = initial_control(np.ones(len(engine.config.bodies_for(rows))))
    assert_same(adaptive(engine, control), plain())


def test_a_penalty_sees_the_drafts_before_it():
    law = SamplingLaw(repetition_penalty=2.0, end_ids=(1, 7))
    assert_same(adaptive(engine_of(law=law, bodies=DRAFTING), SOME), plain(law=law))


def test_rows_that_share_alike_change_no_token():
    dealt, alike = (adaptive(engine_of(per_row=per_row, bodies=DRAFTING), SOME) for per_row in (True, False))
    assert_same(alike, plain())
    assert not np.array_equal(alike.stats.drafted_at, dealt.stats.drafted_at)


def test_plain_numerics():
    numerics = Numerics(key_block=8)
    ours = adaptive(engine_of(numerics=numerics, bodies=DRAFTING), SOME)
    np.testing.assert_array_equal(ours.tokens, plain(numerics=numerics).tokens)


def test_dealing_takes_the_prefixes_that_save_most():
    rng = np.random.default_rng(0)
    for _ in range(50):
        survival = np.cumprod(rng.choice([0.0, 0.3, 0.9, 1.0], (5, 6)), axis=1)
        worth = (survival * rng.choice([0.1, 0.3, 1.0], (5, 1))).astype(np.float32)
        budget = int(rng.integers(0, 31))
        lengths = np.asarray(allocate(jnp.asarray(worth), jnp.int32(budget)))
        assert lengths.sum() == min(budget, (worth > 0).sum())
        taken = np.arange(6)[None] < lengths[:, None]
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

    def worth(survival, budget, *prices):
        drafted, prices = none.at[:, :2].set(jnp.array(survival, jnp.float32)), map(jnp.float32, prices)
        return bool(worth_another_step(control, drafted, token, jnp.int32(2), jnp.int32(budget), *prices))

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
    assert not worth([[0.8, 0.6], [0.8, 0.6]], 2, 0.0, 0.0)


def test_a_round_is_as_long_as_its_drafts_are_sure():
    bodies = tuple(enumerate(Body(1, tokens) for tokens in (1, 2, 4, 8)))
    seconds = np.array([1.0, 1.1, 1.3, 1.7])
    control = initial_control(seconds, per_step=0.05)
    np.testing.assert_allclose(seconds_per_token(control, bodies), 0.1, rtol=1e-5)
    np.testing.assert_allclose(seconds_per_token(control, bodies[2:3]), 0.0)
    count, per_second = jnp.int32(1), jnp.float32(0.5)
    rng = np.random.default_rng(0)
    for _ in range(200):
        survival = np.cumprod(rng.uniform(0.2, 1.0, (1, 7)), axis=1).astype(np.float32)
        kept = np.where(np.arange(7) < rng.integers(1, 8), survival, 0.0)
        found = int(best_verified(control, bodies[1:], 7, jnp.asarray(0.3 * kept, jnp.float32), count, per_second))
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
        found = best_verified(
            control, bodies, 7, jnp.asarray(worth, jnp.float32), jnp.int32(2), jnp.float32(0.5), per_row
        )
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
    for _ in range(50):
        accepted, lengths = jnp.full((8,), 2, jnp.int32), jnp.full((8,), 3, jnp.int32)
        control, record = learn(control, record, jnp.full((8, 3), 0.7), lengths, accepted, live)
    assert choice(control) == 1
    last = replace(control, seconds=control.seconds[2:], per_step=control.per_step[2:])
    rounds = float(plan_round(last, bodies[2:], 3, live, record, none, none).per_second) * 1.02
    np.testing.assert_allclose(rounds, 8 / 3.0, rtol=0.02)


def test_what_was_learned_fades_to_the_first_belief():
    begun = initial_control(np.ones(2))
    control = replace(begun, drafted=begun.drafted + 1000.0, accepted=begun.accepted + 10.0)
    for _ in range(400):
        control = forget(control)
    np.testing.assert_allclose(control.drafted, begun.drafted, rtol=1e-5)
    np.testing.assert_allclose(control.accepted, begun.accepted, rtol=1e-5)
    assert float(forget(replace(begun, drafted=begun.drafted + 10.0)).drafted[0]) == 11.5


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
    assert choice(4, record).rows == 4
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


def test_what_cannot_be_chosen_from_is_refused():
    with pytest.raises(InputError, match="an adaptive draft length needs chains"):
        engine_of(rule=Block())
    with pytest.raises(InputError, match="an adaptive draft length needs chains"):
        engine_of(rule=Match(branches=2))
    with pytest.raises(InputError, match="rollout bodies names 13 rounds"):
        engine_of(bodies=(Body(1, 1),) * 13)
    engine = engine_of(bodies=(Body(15, 15), Body(15, 30), Body(15, 15)))
    with pytest.raises(InputError, match="rollout bodies names a round twice"):
        engine.rollout(tiny_params(), None, PROMPTS, KEYS, control=initial_control(np.ones(3)))
    engine = engine_of(bodies=(Body(4, 4),))
    with pytest.raises(InputError, match="rollout bodies hold at most 4 rows of 15"):
        engine.rollout(tiny_params(), None, PROMPTS, KEYS, control=initial_control(np.ones(1)))
    engine = replace(engine, config=replace(engine.config, bodies=BODIES))
    with pytest.raises(InputError, match="7 rounds to choose from, and a cost table of 1"):
        engine.rollout(tiny_params(), None, PROMPTS, KEYS, control=initial_control(np.ones(1)))
    with pytest.raises(InputError, match="cost table is"):
        initial_control(np.array([1.0, 0.0]))


def test_two_devices_give_the_tokens_of_one_without_talking_in_the_loops():
    prompts = take_prompts(PROMPTS, [0, 1, 2, 3])
    keys, draft = keys_of(prompts, SAMPLES), random_eagle3()[1]
    engine = engine_of(bodies=(Body(6, 6), Body(6, 18)))
    costs = initial_control(np.array([1.0, 1.5]))

    def run(params, draft, prompts, keys, control):
        trajectory = engine.rollout(params, draft, prompts, keys, control=control)
        return trajectory.tokens, trajectory.stats.steps[None], merge(control, trajectory.control)

    mesh, rows = make_mesh(MeshConfig(data=2)), P(DATA)
    specs = {"in_specs": (P(), P(), rows, rows, P()), "out_specs": (rows, rows, P())}
    program = jax.jit(jax.shard_map(run, mesh=mesh, **specs, check_vma=False))
    compiled = program.lower(tiny_params(), draft, prompts, keys, costs).compile()
    tokens, steps, control = jax.device_get(compiled(tiny_params(), draft, prompts, keys, costs))
    alone = run_alone(engine_of(False), prompts, keys, tiny_params())
    np.testing.assert_array_equal(tokens, alone.tokens)
    assert steps[0] != steps[1]  # each device goes its own way
    assert control.accepted.sum() > costs.accepted.sum()
    hlo = compiled.as_text()
    _, inside = instructions_in_loops(hlo)
    assert COLLECTIVE.search(hlo), "the sum of what was learned, after the loops"
    assert not COLLECTIVE.search(inside)
    assert "callback" not in hlo


@pytest.mark.parametrize("bug", ["noise of the first position", "positions of another row", "a draft too many"])
def test_caught(monkeypatch, bug):
    """What could go wrong where rows of different lengths lie packed side by side is seen."""
    if bug == "noise of the first position":
        monkeypatch.setattr(adaptive_module, "Context", lambda position, seen: Context(position - position % 2, seen))
    elif bug == "positions of another row":
        packed = adaptive_module.AdaptiveRound._packed

        def shifted(self, *args):
            batch, where = packed(self, *args)
            return replace(batch, positions=jnp.where(batch.positions > 0, batch.positions - 1, batch.positions)), where

        monkeypatch.setattr(adaptive_module.AdaptiveRound, "_packed", shifted)
    else:
        judge = adaptive_module.AdaptiveRound.judge_dealt

        def generous(self, *args):
            judged = judge(self, *args)
            most = judged.proposed.tokens.shape[1] - 1
            accepted = jnp.minimum(judged.proposed.accepted + 1, most)
            return replace(judged, proposed=replace(judged.proposed, accepted=accepted))

        monkeypatch.setattr(adaptive_module.AdaptiveRound, "judge_dealt", generous)
    ours, expected = adaptive(engine_of(bodies=DRAFTING), SOME), plain()
    assert not all(np.array_equal(getattr(ours, name), getattr(expected, name)) for name in ("tokens", "lengths"))


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


def test_more_or_fewer_drafts_are_verified_than_planned(program):
    """Prices at which the confidence decides: rounds of several sizes, and no other token."""
    seconds = np.array([1.0, 1.05, 1.15, 0.9, 1.1, 0.8, 1.0])
    ours = jax.device_get(
        program(tiny_params(), random_eagle3()[1], PROMPTS, KEYS, initial_control(seconds, 0.0, 0.01))
    )
    assert_same(ours, plain())
    assert np.count_nonzero(ours.stats.bodies[[1, 2]]) == 2


CASES = [((1, 1), (1, 2), (1, 5)), ((2, 2), (2, 4), (2, 6)), ((2, 6),), ((2, 2),), ((4, 4), (4, 8))]


@pytest.mark.parametrize("sizes", CASES)
def test_what_is_timed_is_the_body_and_the_draft_steps_that_are_asked_for(sizes):
    bodies = tuple(Body(*size) for size in sizes)
    engine = engine_of(bodies=bodies)
    engine = replace(engine, config=replace(engine.config, samples_per_prompt=1))
    timed = costs_module._rounds_of(engine, bodies, 8, 1)
    draft = random_eagle3()[1]
    run = jax.jit(lambda batch: engine.planned_round(tiny_params(), draft, batch, bodies[0].rows).trajectory.stats)
    cases = costs_module._cases(bodies, 4)
    assert {body for body, _ in cases} == set(bodies)
    for body, steps in cases:
        batch = costs_module._forced(timed.batch, bodies, body, steps)
        stats = run(batch)
        np.testing.assert_array_equal(stats.bodies, [other == body for other in bodies])
        assert bool(stats.drafted_at[0]) == (steps > 0)
        assert steps != 1 or not stats.drafted_at[1:].any()


def test_seconds_of_a_body_are_those_after_one_draft_step():
    bodies = (Body(4, 4), Body(4, 8), Body(4, 16), Body(1, 1), Body(1, 3), Body(1, 2))

    def seconds(body, steps):
        return 1.0 + 0.1 * body.tokens + 0.01 * body.rows * steps

    for longest in (1, 2, 4):
        cases = [c for rows in (1, 4) for c in costs_module._cases([b for b in bodies if b.rows == rows], longest)]
        typical = {case: seconds(*case) for case in cases}
        for body in bodies:
            deeper = longest > 1
            expected = seconds(body, min(1, body.depth(longest))), 0.01 * body.rows * deeper
            np.testing.assert_allclose(costs_module._cost(typical, body), expected, atol=1e-12)


@pytest.mark.parametrize(("said", "turns"), [(5.9, 5), (3.0, 3)])
def test_costs_are_measured_as_often_as_the_first_process_says(monkeypatch, said, turns):
    """A process that measured by its own clock would leave the others waiting in a collective."""
    monkeypatch.setattr(costs_module, "of_first", lambda own: np.float32(said))
    calls = [lambda: 1.0, lambda: 2.0]
    np.testing.assert_array_equal(costs_module._turns(calls), [[1.0, 2.0]] * turns)


def test_costs_are_measured_from_3_to_15_times(monkeypatch):
    assert len(costs_module._turns([lambda: 1.0])) == 15
    monkeypatch.setattr(costs_module, "_BUDGET_S", 0.01)
    assert len(costs_module._turns([lambda: time.sleep(0.1) or 1.0])) == 3


@pytest.mark.parametrize("own", ["", "{half a tab"])
def test_a_cost_table_that_the_first_process_has_is_everybody_s(monkeypatch, tmp_path, own):
    """A process that was killed before it wrote its copy, or while it did, takes the first's."""
    engine, path = engine_of(), tmp_path / "costs.json"
    table = initial_control(np.arange(1.0, 1.0 + len(engine.config.bodies_for(15))), 1e-6, 2e-3)
    if own:
        path.write_text(own)
    monkeypatch.setattr(costs_module, "measure_costs", None)
    monkeypatch.setattr(costs_module, "is_first", lambda: False)
    monkeypatch.setattr(costs_module, "of_first", lambda x: np.bool_(True) if isinstance(x, np.bool_) else table)
    control = costs_module.costs_at(path, engine, tiny_params(), None, 15, 8)
    np.testing.assert_array_equal(control.seconds, table.seconds)


def test_where_the_first_process_has_no_cost_table_all_of_them_measure(monkeypatch, tmp_path):
    engine, path = engine_of(), tmp_path / "costs.json"
    bodies = engine.config.bodies_for(15)
    measured, table = (initial_control(np.full(len(bodies), seconds)) for seconds in (1.0, 2.0))
    costs_module.save_costs(path, initial_control(np.full(len(bodies), 3.0)), bodies, "another")
    monkeypatch.setattr(costs_module, "measure_costs", lambda *_: measured)
    monkeypatch.setattr(costs_module, "of_first", lambda x: np.bool_(False) if isinstance(x, np.bool_) else table)
    control = costs_module.costs_at(path, engine, tiny_params(), None, 15, 8)
    np.testing.assert_array_equal(control.seconds, table.seconds)
    saved = costs_module.load_costs(path, bodies, costs_module._described(engine))
    np.testing.assert_array_equal(saved.seconds, table.seconds)


@pytest.mark.parametrize("samples", [1, 4])
def test_standing_rows_have_pages_of_the_pool_and_share_those_of_their_prompt(samples):
    engine = engine_of(False, numerics=replace(INVARIANT, key_block=8))
    engine = replace(engine, config=replace(engine.config, samples_per_prompt=samples))
    batch = costs_module.standing_batch(engine, 8, 20)
    table, holders = np.asarray(batch.rows.table), np.asarray(batch.pool.holders)
    assert table.max() < len(holders)
    assert holders.sum() == table.size
    assert np.bincount(table[:, :2].reshape(-1)).max() == samples  # 20 tokens fill two pages of 8
    assert len(set(table[:, 2:].reshape(-1))) == table[:, 2:].size
    with pytest.raises(ValueError, match="7 rows are not filled"):
        costs_module.standing_batch(replace(engine, config=replace(engine.config, samples_per_prompt=2)), 7, 20)
