"""Rounds whose drafts are chosen while they run: the tokens are those without drafts, whatever is decided."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import exported_for
from test_rollout_programs import COLLECTIVE, instructions_in_loops
from tiny import (
    INVARIANT,
    POLICY,
    assert_same,
    equal_prices,
    keys_of,
    random_eagle3,
    take_prompts,
    tiny_params,
    tiny_prompts,
)
from tiny import run as run_alone

from specrl_jax.drafters.replay import ReplayDrafter
from specrl_jax.errors import InputError
from specrl_jax.models.cache import pages_for
from specrl_jax.models.numerics import Numerics
from specrl_jax.parallel.mesh import DATA, MeshConfig, make_mesh
from specrl_jax.rollout import adaptive as adaptive_module
from specrl_jax.rollout import engine as engine_module
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.control import (
    BINS,
    Body,
    initial_control,
    merge,
)
from specrl_jax.rollout.drafting import ByConfidence
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.sampling import Context, SamplingLaw
from specrl_jax.training import costs as costs_module

pytestmark = pytest.mark.ci
SAMPLES, NEW = 3, 20
PROMPTS = tiny_prompts()
KEYS = keys_of(PROMPTS, SAMPLES)


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
    assert_same(adaptive(engine, equal_prices(engine.config, rows)), plain())


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


def test_what_cannot_be_chosen_from_is_refused():
    with pytest.raises(InputError, match="rollout bodies names 13 rounds"):
        engine_of(bodies=(Body(1, 1),) * 13)
    engine = engine_of(bodies=(Body(15, 15), Body(15, 30), Body(15, 15)))
    with pytest.raises(InputError, match="rollout bodies names a round twice"):
        engine.rollout(tiny_params(), None, PROMPTS, KEYS, control=initial_control(np.ones(3)))
    engine = engine_of(bodies=(Body(4, 4),))
    with pytest.raises(InputError, match="rollout bodies hold at most 4 rows of 15"):
        engine.rollout(tiny_params(), None, PROMPTS, KEYS, control=initial_control(np.ones(1)))
    for body in (Body(4, 3), Body(4, 21)):
        engine = engine_of(bodies=(Body(15, 15), body))
        with pytest.raises(
            InputError, match="rollout bodies must have a token for each row and at most 4 drafts a row"
        ):
            engine.rollout(tiny_params(), None, PROMPTS, KEYS, control=initial_control(np.ones(2)))
    engine = engine_of(bodies=(Body(15, 15), Body(16, 16)))
    with pytest.raises(InputError, match="rollout bodies must have at most 15 rows"):
        engine.rollout(tiny_params(), None, PROMPTS, KEYS, control=initial_control(np.ones(2)))
    with pytest.raises(InputError, match="ReplayDrafter cannot stop after any draft"):
        replace(engine, drafter=ReplayDrafter(POLICY.vocab_size))
    engine = replace(engine, config=replace(engine.config, bodies=BODIES))
    with pytest.raises(InputError, match="7 rounds to choose from, and a cost table of 1"):
        engine.rollout(tiny_params(), None, PROMPTS, KEYS, control=initial_control(np.ones(1)))
    with pytest.raises(InputError, match="cost table is"):
        initial_control(np.array([1.0, 0.0]))


def over_mesh(engine, devices):
    """The rollout under `shard_map` over the data axis, what was learned summed over the mesh after the loops."""

    def run(params, draft, prompts, keys, control):
        trajectory = engine.rollout(params, draft, prompts, keys, control=control)
        return trajectory.tokens, trajectory.stats.steps[None], merge(control, trajectory.control)

    mesh, rows = make_mesh(MeshConfig(data=devices)), P(DATA)
    specs = {"in_specs": (P(), P(), rows, rows, P()), "out_specs": (rows, rows, P())}
    return jax.jit(jax.shard_map(run, mesh=mesh, **specs, check_vma=False))


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_loop_lowers_for_every_platform(platform):
    costs = initial_control(np.ones(len(BODIES)))
    exported = exported_for(
        platform, over_mesh(engine_of(), 1), tiny_params(), random_eagle3()[1], PROMPTS, KEYS, costs
    )
    assert "stablehlo.while" in exported.mlir_module()
    assert "callback" not in exported.mlir_module()


def test_two_devices_give_the_tokens_of_one_without_talking_in_the_loops():
    prompts = take_prompts(PROMPTS, [0, 1, 2, 3])
    keys, draft = keys_of(prompts, SAMPLES), random_eagle3()[1]
    engine = engine_of(bodies=(Body(6, 6), Body(6, 18)))
    costs = initial_control(np.array([1.0, 1.5]))
    compiled = over_mesh(engine, 2).lower(tiny_params(), draft, prompts, keys, costs).compile()
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
            right = packed(self, *args)
            positions = right.batch.positions
            shifted = jnp.where(positions > 0, positions - 1, positions)
            return replace(right, batch=replace(right.batch, positions=shifted))

        monkeypatch.setattr(adaptive_module.AdaptiveRound, "_packed", shifted)
    else:
        judge = adaptive_module.AdaptiveRound.judge_dealt

        def generous(self, *args):
            judged, tried = judge(self, *args)
            most = judged.proposed.tokens.shape[1] - 1
            accepted = jnp.minimum(judged.proposed.accepted + 1, most)
            return replace(judged, proposed=replace(judged.proposed, accepted=accepted)), tried

        monkeypatch.setattr(adaptive_module.AdaptiveRound, "judge_dealt", generous)
    ours, expected = adaptive(engine_of(bodies=DRAFTING), SOME), plain()
    assert not all(np.array_equal(getattr(ours, name), getattr(expected, name)) for name in ("tokens", "lengths"))


def test_more_or_fewer_drafts_are_verified_than_planned(program, monkeypatch):
    """Prices at which the confidence decides: rounds of several sizes, and no other token."""
    control = initial_control(np.array([1.0, 1.05, 1.1, 0.9, 1.1, 0.8, 1.0]), 0.0, 0.01)
    ours = jax.device_get(program(tiny_params(), random_eagle3()[1], PROMPTS, KEYS, control))
    assert_same(ours, plain())
    assert np.count_nonzero(ours.stats.bodies[[1, 2]]) == 2
    # What is verified is what the choice says, not the plan.
    monkeypatch.setattr(ByConfidence, "body_for", lambda drafting, _: jnp.int32(drafting.bodies[0][0]))
    smallest = adaptive(engine_of(), control)
    assert_same(smallest, plain())
    assert smallest.stats.bodies[1] > 0
    assert not smallest.stats.bodies[2]


CASES = [((1, 1), (1, 2), (1, 5)), ((2, 2), (2, 4), (2, 6)), ((2, 6),), ((2, 2),), ((4, 4), (4, 8))]


@pytest.mark.parametrize("sizes", CASES)
def test_what_is_timed_is_the_body_and_the_draft_steps_that_are_asked_for(sizes):
    bodies = tuple(Body(*size) for size in sizes)
    engine = engine_of(bodies=bodies)
    engine = replace(engine, config=replace(engine.config, samples_per_prompt=1))
    timed = costs_module._rounds_of(engine, bodies, 8, 40)
    params, draft = tiny_params(), random_eagle3()[1]
    run = jax.jit(lambda batch: engine.planned_round(params, draft, batch, bodies[0].rows).trajectory.stats)
    cases = costs_module._cases(bodies, 4)
    assert {body for body, _ in cases} == set(bodies)
    for body, steps in cases:
        batch = timed._fresh(costs_module._forced(timed.batch, bodies, body, steps))
        # What is in the cache is part of the plan's seconds, and not of the table's.
        batch = replace(batch, control=replace(batch.control, seconds=batch.control.seconds[::-1]))
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


def test_costs_come_from_what_the_rounds_took(monkeypatch):
    """By a clock that says what it should: seconds of a body, of a draft step and of a token in the cache."""
    bodies = (Body(8, 8), Body(8, 16), Body(8, 40), Body(2, 2), Body(2, 4), Body(2, 10))
    contexts = set()

    def per_slot(body):  # of a row and a token in its cache
        return 1e-5 * (1.0 + 0.25 * (body.tokens / body.rows - 1.0))

    class Clock:
        def __init__(self, single, own, context, pages, kept):
            assert (pages, kept) == (8 * pages_for(context + 10, INVARIANT), [])  # two rounds of up to five tokens
            self.own, single = own, replace(single, config=replace(single.config, bodies=own))
            table = initial_control(np.ones(len(own)))
            self.batch = costs_module.standing_batch(single, own[0].rows, context, table)

        def __call__(self, _, __, rounds, batch):
            body, steps = self.own[int(np.argmin(batch.control.seconds))], int(batch.plan.steps)
            context = int(batch.rows.length[0])
            contexts.add(context)
            assert {context} == set(np.asarray(batch.rows.drafter.length).tolist())
            step = 0.01 * body.rows * max(0, steps - 1)
            seconds = body.rows * (1.0 + 0.1 * body.tokens + per_slot(body) * context) + step
            return 5.0 + rounds * seconds  # a call takes time of its own

    engine = engine_of(bodies=bodies)
    monkeypatch.setattr(costs_module, "_rounds_of", Clock)
    control = costs_module.measure_costs(engine, tiny_params(), None, 8, 16)
    assert contexts == {2, 16}
    np.testing.assert_allclose(control.per_slot, [per_slot(body) for body in bodies], rtol=1e-3)
    np.testing.assert_allclose(control.per_step, [0.01 * body.rows for body in bodies], rtol=1e-3)
    np.testing.assert_allclose(control.seconds, [b.rows * (1.0 + 0.1 * b.tokens) for b in bodies], rtol=1e-5)


@pytest.mark.parametrize("kept", [None, []], ids=["own cache", "kept cache"])
@pytest.mark.parametrize("devices", [1, 2])
def test_timed_rounds_start_from_the_same_rows_where_the_weights_are(devices, kept):
    params, draft = tiny_params(), random_eagle3()[1]
    if devices > 1:
        params, draft = jax.device_put((params, draft), NamedSharding(make_mesh(MeshConfig(data=devices)), P()))
    engine, kept = engine_of(bodies=(Body(3, 3), Body(3, 6))), None if kept is None else list(kept)
    timed = costs_module._rounds_of(engine, engine.config.bodies, 8, 40, kept)
    forced = costs_module._forced(timed.batch, engine.config.bodies, Body(3, 6), 1)
    given, left, program = [], [], timed.program

    def watched(params, draft, batch, rounds):
        leaves = jax.tree.leaves(batch)
        assert all(leaf.sharding.is_fully_replicated and len(leaf.devices()) == devices for leaf in leaves)
        given.append(jax.tree.map(np.array, batch))
        out = program(params, draft, batch, rounds)
        assert int(out.trajectory.stats.bodies.sum()) == rounds
        left.append(jax.tree.map(np.array, out.pool))
        return out

    timed.program = watched
    for rounds in (2, 3):
        assert timed(params, draft, rounds, forced) > 0.0
    started = given[0].pool if kept is None else left[0]
    jax.tree.map(np.testing.assert_array_equal, given[1].pool.keys, started.keys)
    jax.tree.map(np.testing.assert_array_equal, given[1].pool.values, started.values)
    lean = [replace(batch, pool=replace(batch.pool, keys=(), values=())) for batch in given]
    jax.tree.map(np.testing.assert_array_equal, *lean)
    jax.tree.map(np.testing.assert_array_equal, lean[0].rows, jax.device_get(forced.rows))
    assert given[0].pool.holders.shape == (40,)
    assert given[0].pool.keys[0].shape[0] == 40


def planned_bodies(monkeypatch, rows_a_plan, left, ends=()):
    """Plans after rounds of six rows, which take turns between a body without drafts (0) and one with (1).

    left: live rows of each round. ends: rounds in which a row ends by itself.
    """
    bodies = (Body(6, 6), Body(6, 12), Body(2, 2))
    law = SamplingLaw(end_ids=(1, 7), min_new_tokens=4)  # more tokens than a round brings: no row ends unasked
    engine = engine_of(bodies=bodies, law=law)
    engine = replace(engine, config=replace(engine.config, samples_per_prompt=1))
    plan_round = engine_module.plan_round

    def other(control, bodies, longest, live, record, slots, now, able):
        plan = plan_round(control, bodies, longest, live, record, slots, now, able)
        return replace(plan, body=jnp.where(now == 0, 1, 0).astype(jnp.int32))

    monkeypatch.setattr(engine_module, "plan_round", other)
    monkeypatch.setattr(engine_module, "_ROWS_A_PLAN", rows_a_plan)
    monkeypatch.setattr(engine_module, "_IDLE_ROUNDS_A_PLAN", 4)
    params, draft = tiny_params(), random_eagle3()[1]
    step = jax.jit(lambda batch: engine.planned_round(params, draft, batch, 6))
    batch = costs_module.standing_batch(engine, 6, 8, initial_control(np.ones(3)))
    batch = replace(batch, plan=replace(batch.plan, body=jnp.int32(0)))
    limit, planned = batch.rows.limit, []
    for turn, live in enumerate(left):
        done = batch.rows.done | (jnp.arange(6) >= live)
        own = jnp.where((jnp.arange(6) == live - 1) & (turn in ends), 1, limit)
        rows = replace(batch.rows, done=done, emitted=jnp.zeros_like(batch.rows.emitted), limit=own)
        batch = step(replace(batch, rows=rows))
        planned.append(int(batch.plan.body))
    return planned


def test_many_rows_are_planned_for_less_often_until_fewer_would_do(monkeypatch):
    """Every third round."""
    assert planned_bodies(monkeypatch, 2, (6, 6, 6, 6, 6, 6, 6, 2, 2, 2)) == [0, 0, 1, 1, 1, 0, 0, 1, 0, 1]


def test_rounds_that_teach_nothing_are_not_planned_after(monkeypatch):
    """Few rows: every round with drafts, every fourth without, and where a row has ended."""
    assert planned_bodies(monkeypatch, 16, (6, 6, 6, 6, 6, 6, 6, 6)) == [0, 0, 0, 1, 0, 0, 0, 1]
    assert planned_bodies(monkeypatch, 16, (6, 6, 5, 5, 5, 5), ends=(1,)) == [0, 1, 0, 1, 0, 0]


def test_a_drafter_that_tells_who_can_draft_is_asked_after_every_round(monkeypatch):
    """What it can draft changes with every token."""
    kind = type(engine_of().drafter)
    monkeypatch.setattr(kind, "can_draft", lambda self, params, texts: jnp.ones((6,), bool), raising=False)
    assert planned_bodies(monkeypatch, 16, (6, 6, 6, 6)) == [1, 0, 1, 0]


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


def test_a_cost_table_is_of_a_law_too_and_timed_rows_hardly_end():
    law = SamplingLaw(end_ids=(1, 7), forbidden=(POLICY.vocab_size - 1,))
    assert costs_module._described(engine_of(law=law)) != costs_module._described(engine_of())
    timed = costs_module._hardly_ending(law, POLICY.vocab_size)
    assert timed == replace(law, end_ids=(POLICY.vocab_size - 2,))


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
