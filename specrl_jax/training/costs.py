"""Seconds of a round, measured on rows in the middle of their responses.

The controller's cost table is made here, once, at the start of a run: a few rounds of every body, in turn.
It is saved beside the run and read again on resume, never measured anew: what a clock said is part of the state.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from specrl_jax.data.prompts import Prompts
from specrl_jax.errors import InputError
from specrl_jax.models.cache import own_pages, pages_for
from specrl_jax.models.params import PolicyParams
from specrl_jax.parallel.hosts import is_first, of_first
from specrl_jax.rollout.control import Body, Control, Plan, initial_control
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.noise import sequence_keys
from specrl_jax.rollout.queue import Batch
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.training.metrics import write_json

_DEAR = 1e9  # seconds that no draft is worth
_MOST_TURNS, _BUDGET_S = 45, 16.0  # turns of measuring, and what they may take

Step = Callable[[Any, Any, Batch], Batch]


def standing_batch(
    engine: RolloutEngine, rows: int, context: int, control: Control | None = None, pages: int | None = None
) -> Batch:
    """`rows` live rows with `context` tokens of nothing in particular in the cache of policy and drafter.

    The engine's samples per prompt must divide `rows`, and share the full pages of their prompt as in a rollout; there
    is room for `max_new_tokens` more. Where the pool is to have fewer `pages`, rows share those that are farthest from
    their beginning, and more of them the fewer there are.
    """
    width, samples = context + 1, engine.config.samples_per_prompt
    groups = rows // samples
    if groups * samples != rows:
        raise ValueError(f"{rows} rows are not filled by groups of {samples}")
    lengths = jnp.full((groups,), width, jnp.int32)
    prompts = Prompts(jnp.zeros((groups, width), jnp.int32), lengths, jnp.arange(groups, dtype=jnp.uint32))
    batch = engine.empty_batch(prompts, control, pages=pages)
    all_rows, of_row = batch.rows.table.shape
    shared, own = context // batch.pool.page_size, jnp.arange(all_rows, dtype=jnp.int32)
    of_prompt = own_pages(groups, shared)[own // samples]
    of_response = groups * shared + own_pages(of_row - shared, all_rows).T  # in the order in which rows ask for them
    ids = jnp.concatenate([of_prompt, of_response], axis=1) % batch.pool.holders.shape[0]
    filled = replace(
        batch.rows,
        table=ids,
        used=jnp.full((all_rows,), of_row, jnp.int32),
        shared=jnp.full((all_rows,), shared, jnp.int32),
        sequence=own,
        keys=sequence_keys(0, "evaluation", 0, jnp.repeat(prompts.row_ids, samples), own % samples),
        limit=jnp.full((all_rows,), engine.config.max_new_tokens, jnp.int32),
        done=jnp.zeros((all_rows,), bool),
    )
    holders = batch.pool.holders.at[ids.reshape(-1)].add(1)
    pool = replace(batch.pool, holders=holders)
    waiting = replace(batch.waiting, count=jnp.int32(groups))
    filled_batch = replace(batch, rows=filled, pool=pool, started=jnp.int32(rows), waiting=waiting)
    return _with_context(filled_batch, context)


def _with_context(batch: Batch, context: int) -> Batch:
    """A batch with so many tokens in the caches of every row, of all that there is room for."""

    def as_read(path: tuple[Any, ...], leaf: Array) -> Array:
        return jnp.full_like(leaf, context) if getattr(path[-1], "name", None) == "length" else leaf

    drafter = jax.tree.map_with_path(as_read, batch.rows.drafter)
    return replace(batch, rows=replace(batch.rows, length=jnp.full_like(batch.rows.length, context), drafter=drafter))


@dataclass
class Timed:
    """Rounds of one kind that can be called again and again; each call starts from the same rows.

    program: compiled. batch: the rows, of whose cache there are shapes. kept: the cache that a call left to the next
    one, of whichever rounds have this list: to fill another takes longer than many a round. Without a list each call
    has one of its own, which lasts as long.
    """

    program: Any
    batch: Batch
    kept: list[Any] | None = None

    def __call__(self, params: PolicyParams, draft: Any, rounds: int, batch: Batch | None = None) -> float:
        """Seconds of a call with so many rounds; `batch` in place of the rows that are its own."""
        # Copied to where the weights are before the clock starts: a copy can take longer than a small round.
        own, where = self._fresh(self.batch if batch is None else batch), _beside(params)
        if jax.tree.leaves(own)[0].sharding != where:  # to ask for each array would take long again
            own = jax.device_put(own, where)
        jax.block_until_ready(own)
        start = time.perf_counter()
        after = jax.block_until_ready(self.program(params, draft, own, rounds))
        seconds = time.perf_counter() - start
        if self.kept is not None:
            self.kept.append((after.pool.keys, after.pool.values))
        return seconds

    def _fresh(self, batch: Batch) -> Batch:
        """A copy of the rows of a batch, with a cache."""
        shapes = batch.pool.keys, batch.pool.values
        keys, values = self.kept.pop() if self.kept else jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), shapes)
        own = _copied(replace(batch, pool=replace(batch.pool, keys=(), values=())))
        return replace(own, pool=replace(own.pool, keys=keys, values=values))


@jax.jit
def _copied(batch: Batch) -> Batch:
    """In one program: to copy every array by itself takes as long as a small round."""
    return jax.tree.map(jnp.copy, batch)


def timed_rounds(step: Step, batch: Batch, kept: list[Any] | None = None) -> Timed:
    """`step`, any number of times in one program, from `batch`; nothing of the cache is copied between calls."""

    def run(params: PolicyParams, draft: Any, start: Batch, rounds: Int[Array, ""]) -> Batch:
        return jax.lax.fori_loop(0, rounds, lambda _, b: step(params, draft, b), start)

    keys, values = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (batch.pool.keys, batch.pool.values))
    lean = replace(batch, pool=replace(batch.pool, keys=keys, values=values))
    return Timed(jax.jit(run, donate_argnums=2), lean, kept)


def _beside(params: PolicyParams) -> jax.sharding.Sharding:
    """Whole, on every device that holds the weights."""
    where = jax.tree.leaves(params)[0].sharding
    return NamedSharding(where.mesh, P()) if isinstance(where, NamedSharding) else where


def measure_costs(engine: RolloutEngine, params: PolicyParams, draft: Any, rows: int, context: int) -> Control:
    """A controller with the measured seconds of every body of an adaptive engine for so many rows.

    Every body is timed in turn at `context` tokens per row, as often as goes into 16 seconds, at most 45 times:
    one that a noisy machine made look cheap would be chosen all along. What a draft step takes is told from rounds that
    make one and all of them, what a token in the cache costs from the shortest and the longest round of most rows with
    an eighth of the context. Compilation is not counted and not small: a program per number of rows. The pool has what
    rounds read and write, and no more than a budget for the cache allows: then rows share pages.
    """
    bodies, longest = engine.config.bodies_for(rows), engine.config.draft_length
    longer = max(engine.config.max_new_tokens, 2 * (1 + longest))  # no row ends in the two rounds of a call
    context = max(1, min(context, engine.policy.max_position_embeddings - longer - 1))
    config = replace(
        engine.config,
        law=_hardly_ending(engine.config.law, engine.policy.vocab_size),
        max_new_tokens=longer,
        samples_per_prompt=1,
        cache_bytes=None,
        rows=None,
    )
    single = replace(engine, config=config)
    sizes = {body.rows: [b for b in bodies if b.rows == body.rows] for body in bodies}
    pages, kept = _pages(single, engine.config.cache_bytes, max(sizes), context), list[Any]()
    programs = {size: _rounds_of(single, tuple(own), context, pages, kept) for size, own in sizes.items()}
    cases = [(body, steps) for own in sizes.values() for body, steps in _cases(own, longest)]
    most, little = sizes[max(sizes)], context // 8
    ends = [_cases(most, longest)[most.index(choose(most, key=lambda body: body.tokens))] for choose in (min, max)]

    def call(case: tuple[Body, int], context: int) -> Callable[[int], float]:
        timed, (body, steps) = programs[case[0].rows], case
        forced = _forced(timed.batch, sizes[body.rows], body, steps)
        return partial(timed, params, draft, batch=_with_context(forced, context))

    calls = [call(case, context) for case in cases] + [call(case, little) for case in ends]
    for warm_up in calls:
        warm_up(1)
    measured = _seconds_per_round(calls)
    typical = dict(zip(cases, measured, strict=False))
    seconds, per_step = (np.array(x) for x in zip(*(_cost(typical, body) for body in bodies), strict=True))
    more = [typical[case] - short for case, short in zip(ends, measured[len(cases) :], strict=True)]
    per_slot = _per_slot(bodies, [body for body, _ in ends], np.array(more) / max(1, context - little))
    # Noise must not make a round free.
    seconds = np.maximum(seconds - per_slot * context * np.array([body.rows for body in bodies]), 0.1 * seconds)
    return initial_control(seconds, per_slot, per_step)


def _pages(engine: RolloutEngine, budget: int | None, rows: int, context: int) -> int:
    """Pages that two rounds of so many rows read and write; no more than there is a budget of bytes for."""
    wanted = rows * pages_for(context + 2 * engine.config.tree.size, engine.numerics)
    if budget is None:
        return wanted
    kept = 3 * engine.drafter_bytes(rows, context + 1)  # of all numbers of rows, and of a call under way
    return max(1, min(wanted, (budget - kept) // engine.page_bytes()))


def _per_slot(bodies: Sequence[Body], ends: Sequence[Body], more: Float[np.ndarray, "2"]) -> Float[np.ndarray, "n"]:
    """What a token in the cache of a row costs in each body, from what one in every row does in two of most rows.

    Every query of a row reads it: in the others it goes by the tokens of a row.
    """
    few, many = (body.tokens / body.rows for body in ends)
    least, most = np.maximum.accumulate(np.maximum(more, 0.0) / ends[0].rows)
    slope = (most - least) / (many - few or 1.0)
    return np.array([least + slope * (body.tokens / body.rows - few) for body in bodies])


def _hardly_ending(law: SamplingLaw, vocab_size: int) -> SamplingLaw:
    """A law that costs as much and ends a response at a token that is hardly ever drawn: the last that may be."""
    return replace(law, end_ids=(max(set(range(vocab_size)) - set(law.forbidden)),))


def _cases(bodies: Sequence[Body], longest: int) -> list[tuple[Body, int]]:
    """What is timed of bodies of as many rows: each with all the drafts that there can be, the smallest that has any
    with one too."""
    most = max(body.depth(longest) for body in bodies)
    cases = [(body, most if body.depth(longest) else 0) for body in bodies]
    drafting = [body for body in bodies if body.depth(longest)]
    return cases + ([(min(drafting, key=lambda body: body.tokens), 1)] if most > 1 else [])


def _cost(typical: Mapping[tuple[Body, int], float], body: Body) -> tuple[float, float]:
    """Seconds of a body after one draft step, and of another step, from those of the cases.

    A round takes longer than all of its draft steps, whatever a noisy clock says of one.
    """
    of_size = {case: taken for case, taken in typical.items() if case[0].rows == body.rows}
    made = max(steps for _, steps in of_size)
    step = 0.0
    if made > 1:
        (once,) = (other for other, steps in of_size if steps == 1)
        least = min(taken for (_, steps), taken in of_size.items() if steps == made)
        step = min(max(0.0, (typical[once, made] - typical[once, 1]) / (made - 1)), least / made)
    steps = made if (body, made) in typical else 0
    return typical[body, steps] - step * max(0, steps - 1), step


def _forced(batch: Batch, bodies: Sequence[Body], body: Body, steps: int) -> Batch:
    """A batch whose rounds are of one body of several, after one draft step or all of them: no other body is worth its
    price, and no draft is worth that of another step, or all are."""
    index = bodies.index(body)
    seconds = np.where(np.arange(len(bodies)) == index, 1.0, _DEAR)
    control = initial_control(seconds, per_step=_DEAR if steps == 1 else -_DEAR)
    plan = Plan(jnp.int32(index), jnp.float32(1.0), jnp.int32(steps), control.seconds)
    return replace(batch, control=control, plan=plan)


def _rounds_of(
    engine: RolloutEngine, bodies: tuple[Body, ...], context: int, pages: int, kept: list[Any] | None = None
) -> Timed:
    """Rounds of as many rows, all of them live, every one as the batch's plan has it, in a pool of so many pages."""
    own = replace(engine, config=replace(engine.config, bodies=bodies))
    batch = standing_batch(own, bodies[0].rows, context, initial_control(np.ones(len(bodies))), pages)

    def step(params: PolicyParams, draft: Any, batch: Batch) -> Batch:
        after = own.planned_round(params, draft, batch, bodies[0].rows)
        # Planning takes time too, of few rows after every round with drafts (after some without, which is not counted);
        # what it says is not followed.
        plan, _ = jax.lax.optimization_barrier((batch.plan, after.plan))
        return replace(after, plan=plan)

    return timed_rounds(step, batch, kept)


def _seconds_per_round(calls: Sequence[Callable[[int], float]]) -> Float[np.ndarray, "n"]:
    """Seconds of a round of each call, in as many turns as there is time for: where there is none, by one call.

    Calls are short and turns many: a busy machine changes its pace slowly, so that long calls are no less noisy.

    A call takes time of its own (memory that it maps, weights that other calls pushed out of the processor's caches),
    which would make short rounds look dearer beside long ones than they are in a rollout. It is about the same for all:
    what two calls with one round take beyond one with two, in the median of the quicker half, is taken off every call.
    Of the slower half that would be noise, as much as a short round takes where rows are many.
    """
    start = time.perf_counter()
    tried = np.array([call(1) for call in calls], np.float32)
    # Processes that hold the weights together must make the same calls.
    tried, passed = of_first((tried, np.float32(time.perf_counter() - start)))
    quick = tried <= np.median(tried)
    affordable = _BUDGET_S / (passed * (1.0 + 2.0 * tried[quick].sum() / tried.sum()))
    turns = int(min(affordable, _MOST_TURNS))
    if not turns:  # beside such rounds what a call takes of its own is nothing
        return tried.astype(float)
    timed = [(call, 1) for call in calls] + [(call, 2) for call, is_quick in zip(calls, quick, strict=True) if is_quick]
    taken = np.empty((turns, len(timed)))
    for turn, seconds in enumerate(taken):
        # In another order every turn, so that a machine that changes its pace favours no case.
        for case in np.random.default_rng(turn).permutation(len(timed)):
            call, rounds = timed[case]
            seconds[case] = call(rounds)
    one, two = np.split(_typical(taken), [len(calls)])
    own = max(0.0, float(np.median(2.0 * one[quick] - two)))
    whole = one.copy()
    whole[quick] += two
    return np.maximum(whole - (1 + quick) * own, 0.1 * whole) / (1 + 2 * quick)  # noise must not make a round free


def _typical(taken: Float[np.ndarray, "turns cases"]) -> Float[np.ndarray, "cases"]:
    """Seconds of each case in the quickest turn, by what it takes beside the others of a turn in the median of turns.

    A machine may be quick for a while, or slow: what a case was lucky enough to take once says nothing beside the
    others' time of another turn, and the planner goes by ratios alone.
    """
    pace = np.median(taken / np.median(taken, axis=0), axis=1)
    return np.median(taken / pace[:, None], axis=0) * pace.min()


def costs_at(
    path: Path | None,
    engine: RolloutEngine,
    params: PolicyParams,
    draft: Any,
    rows: int,
    context: int,
    given: Path | None = None,
) -> Control:
    """A controller with the cost table in `path`; where there is none yet the `given` one, or one measured, is written.

    Of several processes the first decides: where it has a table, that one is everybody's, else all of them measure.

    Raises:
        InputError: the table is damaged, of other bodies or of something else; or there is none, under a rule whose
            tokens depend on draft lengths.
    """
    bodies, of = engine.config.bodies_for(rows), _described(engine)
    kept = path if path is not None and path.exists() else None
    if of_first(np.bool_(kept is not None or given is not None)):
        control = initial_control(np.ones(len(bodies)))
        if is_first() and kept is not None:
            control = load_costs(kept, bodies, of)
        elif is_first() and given is not None:
            control = given_costs(given, engine, rows)
        control = of_first(control)
        if path is not None and kept is None:
            save_costs(path, control, bodies, of)
        return control
    if engine.config.rule.needs_laws:
        raise InputError(
            f"under {engine.config.rule} a draft length that is chosen decides which tokens are drawn, and a measured "
            "cost table would leave that to a clock; give the table of an earlier run (--costs), or a --draft-length"
        )
    start = time.perf_counter()
    control = measure_costs(engine, params, draft, rows, context)
    seconds = time.perf_counter() - start
    print(f"measured {len(bodies)} kinds of rounds of {rows} rows in {seconds:.0f} s, with compilation", flush=True)
    control = of_first(control)
    if path is not None:
        save_costs(path, control, bodies, of)
    return control


def given_costs(path: Path, engine: RolloutEngine, rows: int) -> Control:
    """A controller with a cost table of another run; InputError unless it is of this engine with so many rows."""
    remedy = "give that of a run of the same models and options, prompts and samples on as many devices"
    return load_costs(path, engine.config.bodies_for(rows), _described(engine), remedy)


def _described(engine: RolloutEngine) -> str:
    """What a cost table is of, besides its bodies: policy, drafter and its candidates, numerics and sampling law, in 16
    characters."""
    of: tuple[Any, ...] = (engine.policy, engine.drafter, engine.numerics, engine.config.law)
    if engine.config.branches > 1:  # a draft step finds more candidates
        of = (*of, engine.config.branches)
    return hashlib.sha256(repr(of).encode()).hexdigest()[:16]


def save_costs(path: Path, control: Control, bodies: tuple[Body, ...], of: str) -> None:
    """Write a cost table as JSON; `of` says what else it belongs to."""
    table = [[body.rows, body.tokens, float(s)] for body, s in zip(bodies, control.seconds, strict=True)]
    costs = {
        "of": of,
        "bodies": table,
        "per_slot": np.asarray(control.per_slot).tolist(),
        "steps": np.asarray(control.per_step).tolist(),
    }
    write_json(path, costs)


def load_costs(path: Path, bodies: tuple[Body, ...], of: str, remedy: str = "delete it to measure anew") -> Control:
    """A controller from a saved cost table; InputError, with a remedy, when it is of other bodies or something else."""
    try:
        costs = json.loads(path.read_text())
        saved = tuple(Body(int(rows), int(tokens)) for rows, tokens, _ in costs["bodies"])
        seconds = np.array([entry[2] for entry in costs["bodies"]], float)
        per_slot, per_step = (np.array(costs[name], float) for name in ("per_slot", "steps"))
        saved_of = costs["of"]
        if not per_slot.shape == per_step.shape == seconds.shape:
            raise ValueError("slots and steps are not one for each round")
        table = np.array([seconds, per_slot, per_step])
        if not (np.isfinite(table) & (table >= 0)).all() or not seconds.all():
            raise ValueError("seconds must be finite, of rounds above 0 and of others not below")
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise InputError(f"cost table {path} cannot be read ({error}); {remedy}") from error
    if saved != bodies:
        raise InputError(f"cost table {path} is of other rounds than {bodies}; {remedy}")
    if saved_of != of:
        raise InputError(f"cost table {path} is of another policy, drafter, law or numerics; {remedy}")
    return initial_control(seconds, per_slot, per_step)
