"""Sequences that wait for rows and pages: the same tokens, every page given back, budgets refused when too small."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    INVARIANT,
    POLICY,
    BigramDrafter,
    assert_same,
    bigram_table,
    keys_of,
    random_eagle3,
    tiny_params,
    tiny_prompts,
)

from specrl_jax.errors import InputError
from specrl_jax.models.numerics import Numerics
from specrl_jax.parallel.mesh import MeshConfig, make_mesh
from specrl_jax.rollout import engine as engine_module
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.control import Body, initial_control
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Match
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.training.sampling import Sampler

pytestmark = pytest.mark.ci
SAMPLES, NEW = 3, 20
PROMPTS = tiny_prompts()
KEYS = keys_of(PROMPTS, SAMPLES)
SMALL_PAGES = replace(INVARIANT, key_block=4)
PLAIN = Numerics(key_block=4)


def engine_of(k=0, numerics=SMALL_PAGES, drafter=None, rule=None, **settings):
    law = SamplingLaw(end_ids=(1, 7))
    config = RolloutConfig(NEW, SAMPLES, k, law, rule or Match(), **{"ladder": (1.0,)} | settings)
    return RolloutEngine(POLICY, config, numerics, drafter)


def finished(engine, draft=None):
    def run(params, draft, prompts, keys):
        return engine.finish(params, draft, engine.empty_batch(prompts), keys)

    return jax.device_get(jax.jit(run)(tiny_params(), draft, PROMPTS, KEYS))


def budget(engine, pages, rows):
    """Bytes for so many pages beside the drafter's state."""
    groups, width = PROMPTS.tokens.shape
    together = engine.layout(groups, width).prompts
    return pages * engine.page_bytes() + engine.drafter_bytes(rows + together, width)


def least_pages(engine):
    layout = engine.layout(*PROMPTS.tokens.shape)
    return layout.row_pages + layout.prompts * layout.prompt_pages


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("drafts", [None, "bigram", "tree", "eagle3"])
def test_few_rows_and_few_pages_give_the_same_tokens(rows, drafts):
    expected = finished(engine_of()).trajectory
    drafter, draft = None, None
    if drafts == "eagle3":
        drafter, draft = random_eagle3()
    elif drafts:
        drafter, draft = BigramDrafter(), bigram_table()
    rule = Match(branches=2) if drafts == "tree" else Match()
    engine = engine_of(3 if drafts else 0, drafter=drafter, rule=rule, rows=rows, ladder=(1.0, 0.3), smallest_rung=1)
    pages = least_pages(engine) + 2
    engine = replace(engine, config=replace(engine.config, cache_bytes=budget(engine, pages, rows)))
    assert engine.layout(*PROMPTS.tokens.shape).pool_pages <= pages
    batch = finished(engine, draft)
    assert_same(batch.trajectory, expected)
    stats = batch.trajectory.stats
    assert stats.peak_pages <= pages
    assert stats.peak_tokens <= stats.peak_pages * 4
    assert not batch.pool.holders.any()
    assert batch.rows.done.all()
    if rows == 7:
        assert stats.stalled > 0  # the pool was too small for all rows, and the test is one


def test_a_prompt_is_held_once():
    """All samples of all prompts at once: full prompt pages count once for a group."""
    stats = finished(engine_of()).trajectory.stats
    groups = len(PROMPTS.lengths)
    lengths = np.asarray(PROMPTS.lengths)
    shared = np.maximum(lengths - 1, 0) // 4 * 4
    everything = (lengths.sum() + NEW * groups) * SAMPLES
    assert stats.peak_tokens <= everything - (SAMPLES - 1) * shared.sum()
    assert shared.sum() > 0


@pytest.mark.parametrize(("width", "rows"), [*((width, None) for width in range(2, 10)), (2, 1), (9, 1), (9, 4)])
def test_with_room_for_it_all_rows_reach_full_length(width, rows):
    """Prompts that end anywhere in a page; the pool counts the pages of a prompt once for its group. No budget is room
    enough where no sequence waits for a row."""
    tokens, lengths = PROMPTS.tokens[:, :1].repeat(width, 1), np.full(len(PROMPTS.lengths), width, np.int32)
    prompts = replace(PROMPTS, tokens=tokens, lengths=jnp.asarray(lengths))
    engine = engine_of(rows=rows, cache_bytes=rows and 1 << 62)
    engine = replace(engine, config=replace(engine.config, law=SamplingLaw(end_ids=(1,), min_new_tokens=NEW)))
    layout = engine.layout(*tokens.shape)
    whole = layout.rows * layout.row_pages + layout.prompts * layout.prompt_pages
    assert layout.pool_pages <= whole
    assert layout.pool_pages < whole or width < 9 or rows is not None
    trajectory = jax.device_get(jax.jit(engine.rollout)(tiny_params(), None, prompts, KEYS))
    assert (trajectory.lengths == NEW).all()
    assert trajectory.stats.stalled == 0
    assert trajectory.stats.peak_pages <= layout.pool_pages


@pytest.mark.parametrize("rows", [1, 4, 12])
def test_where_sequences_wait_the_default_is_three_quarters_of_all_pages(rows):
    """And at least one row's: responses that all need the most are still written to their ends."""
    engine = engine_of(rows=rows)
    whole, one_row = engine_of(rows=rows, cache_bytes=1 << 62), engine_of(rows=1, cache_bytes=1 << 62)
    pages = [e.layout(*PROMPTS.tokens.shape).pool_pages for e in (engine, whole, one_row)]
    assert pages[0] == max(-(-pages[1] * 3 // 4), pages[2])
    engine = replace(engine, config=replace(engine.config, law=SamplingLaw(end_ids=(1,), min_new_tokens=NEW)))
    trajectory = jax.device_get(jax.jit(engine.rollout)(tiny_params(), None, PROMPTS, KEYS))
    assert (trajectory.lengths == NEW).all()


def test_plain_numerics_queue_too():
    expected = finished(engine_of(numerics=PLAIN)).trajectory
    ours = finished(engine_of(numerics=PLAIN, rows=2)).trajectory
    np.testing.assert_array_equal(ours.tokens, expected.tokens)


def test_a_budget_too_small_for_one_row_is_refused():
    engine = engine_of(rows=4)
    engine = replace(engine, config=replace(engine.config, cache_bytes=budget(engine, least_pages(engine), 4) - 1))
    with pytest.raises(InputError, match=r"rollout cache_bytes is \d+; 4 rows .* need at least \d+: raise it"):
        finished(engine)
    count, width = PROMPTS.tokens.shape
    with pytest.raises(InputError, match=r"rollout cache_bytes is \d+; 4 rows .* need at least \d+: raise it"):
        Sampler(engine, make_mesh(MeshConfig()), "evaluation", 0, count).check(width)
    for name in ("rows", "cache_bytes"):
        with pytest.raises(InputError, match=f"rollout {name} is 0; it must be at least 1"):
            engine_of(**{name: 0})


def peak(engine, pages, control=None):
    """Bytes that a compiled rollout needs beside its arguments with a pool of so many pages, and those of the pool."""
    engine = replace(engine, config=replace(engine.config, cache_bytes=budget(engine, pages, 15)))
    program = jax.jit(lambda *a: engine.rollout(*a, control=control))
    compiled = program.lower(tiny_params(), random_eagle3()[1], PROMPTS, KEYS).compile()
    return compiled.memory_analysis().temp_size_in_bytes, pages * engine.page_bytes()


def copies_of_the_cache(**settings):
    """How often a byte more of the pool is there at the peak."""
    # Pages so large that what is counted of each, a few integers, is less than a part in two hundred of it.
    engine = engine_of(3, Numerics(key_block=16), random_eagle3()[0], smallest_rung=1, **settings)
    # Rows so long that the pools that are asked for are a part of what all could fill.
    policy, config = replace(POLICY, max_position_embeddings=2048), replace(engine.config, max_new_tokens=1000)
    engine = replace(engine, policy=policy, config=config)
    control = initial_control(np.ones(len(settings["bodies"]))) if settings.get("adaptive") else None
    (small, few), (large, many) = (peak(engine, pages, control) for pages in (250, 500))
    return (large - small) / (many - few)


FIXED = {"ladder": (1.0, 0.3)}
ADAPTIVE = {"adaptive": True, "bodies": (Body(15, 15), Body(15, 60), Body(4, 4), Body(4, 16))}


TREES = {"rule": Match(branches=2)}


@pytest.mark.parametrize(
    "settings", [FIXED, ADAPTIVE, FIXED | TREES, ADAPTIVE | TREES], ids=["ladder", "controller", "trees", "dealt trees"]
)
def test_the_cache_is_there_once(settings):
    assert copies_of_the_cache(**settings) == pytest.approx(1.0, abs=0.01)


def test_a_cache_that_is_copied_is_seen(monkeypatch):
    """Where a round chooses between the cache before and after it."""

    def chosen(asked, do, state):
        return jax.tree.map(lambda after, before: jnp.where(asked, after, before), do(state), state)

    monkeypatch.setattr(engine_module, "when", chosen)
    assert copies_of_the_cache(**ADAPTIVE) > 1.5
