"""What a round costs, beside the least it could.

For every number of live rows, context and draft length, in turn: a round of the engine, an autoregressive
step of the engine, and the bare matrix products of both: `step_over_bare` counts those with weights,
`step_over_products` attention over the caches too. `floor` is the products of the verify and of the draft
steps over those of an autoregressive step; `round_cost` is the measured round over the measured step;
`over_floor` is the one over the other, and `over_products` the same where the floor counts the policy's attention
too. The parts of a round are timed by themselves: drafting, the policy's forward, drawing; bookkeeping is what
remains. `draft_over_least` is the time of drafting over that of the least drafts. `invariant_step` and
`invariant_round` are a step and a round in invariant numerics over the same in plain ones (`--invariant`).
With `--drafts ngram`, `suffix` or `block` the floor is that of the verify alone; a block drafter has random weights
(every draft survives with the same probability whoever made it). Suffix drafts look in the three other responses to a
prompt, where the rows can be split by four, and in four of an earlier epoch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.bare_products import ROUNDS, attention_calls, bare_calls, timed
from experiments.bench_models import OneDevice, ShapeOptions, SyntheticMatch, open_expanded, parts_of
from experiments.bench_work import endless_law
from experiments.common import Run, RunOptions, check_least, progress, run_main
from experiments.expand import Pair
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.turns import after_itself, in_turn, ratio, ratio_columns
from specrl_jax.drafters.block import BlockDrafter
from specrl_jax.drafters.block_params import BlockConfig, init_block
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.suffix import History, SuffixDrafter, init_history
from specrl_jax.errors import InputError
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import ForwardOutput, forward, grid_batch
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.queue import Batch
from specrl_jax.rollout.sampling import Context, sample_tokens
from specrl_jax.training.costs import Timed, standing_batch, timed_rounds
from specrl_jax.training.metrics import write_json
from specrl_jax.training.speed_plots import draw_round_cost

SCRIPT = "bench_round_cost"
INVARIANT = Numerics("invariant")
_LOOKED_IN = 4
"""Responses to a prompt in a rollout, and in the epoch before, where suffix drafts look."""


@dataclass(frozen=True)
class Config(OneDevice):
    """Options of the measurement."""

    run: Run = RunOptions()
    model: Annotated[ShapeOptions, tyro.conf.arg(name="")] = field(default_factory=ShapeOptions)
    rows: tuple[int, ...] = (1, 4, 8, 16)
    draft_lengths: tuple[int, ...] = (1, 3, 5, 7)
    contexts: tuple[int, ...] = (256,)
    drafts: Literal["head", "ngram", "suffix", "block"] = "head"
    """Where drafts come from."""
    survival: float = 0.766
    """Probability of each further draft to be accepted, so that lengths grow as they would."""
    repeats: int = 15
    parts: bool = True
    """Time the parts of a round too."""
    invariant: bool = False
    """Time steps and rounds in invariant numerics too."""

    def __post_init__(self) -> None:
        check_least("", self, repeats=3)
        for name in ("rows", "draft_lengths", "contexts"):
            if min(getattr(self, name), default=0) < 1:
                raise InputError(f"--{name.replace('_', '-')} must name at least one number, all of them at least 1")
        if not 0.0 < self.survival < 1.0:
            raise InputError(f"--survival is {self.survival}; choose a probability above 0 and below 1")


PRESETS: dict[str, Mapping[str, Any]] = {
    "default": {},
    "smoke": {
        "model": {"shape": "toy"},
        "rows": (2,),
        "draft_lengths": (2,),
        "contexts": (16,),
        "repeats": 3,
    },
}


def drafting_of(config: Config, pair: Pair) -> tuple[Any, Any]:
    """The drafter and its parameters: the pair's head, or what `--drafts` names in its place."""
    if config.drafts == "head":
        return pair.drafter, pair.draft
    if config.drafts in ("ngram", "suffix"):
        return SuffixDrafter(siblings=config.drafts == "suffix"), None
    assert isinstance(pair.drafter, Eagle3Drafter)
    block = BlockConfig(
        backbone=replace(pair.policy, family="qwen3", num_layers=1, tie_embeddings=False),
        draft_vocab_size=pair.drafter.config.draft_vocab_size,
        boundaries=pair.drafter.config.boundaries,
        block_size=max(2, *config.draft_lengths),
        mask_token_id=0,
        sample_from_anchor=True,
        markov_rank=64,
    )
    key, ids = jax.random.key(config.run.seed), np.arange(block.draft_vocab_size)
    return BlockDrafter(block), init_block(key, block, pair.params, ids)


def engine_of(pair: Pair, drafter: Any, draft_length: int, survival: float, samples: int = 1) -> RolloutEngine:
    """An engine whose rows never end while they are timed."""
    room = 64 * (draft_length + 1)
    rollout = RolloutConfig(room, samples, draft_length, endless_law(room), SyntheticMatch(survival=survival))
    return RolloutEngine(pair.policy, rollout, Numerics(), drafter if draft_length else None)


def earlier_epoch(engine: RolloutEngine, rows: int, seed: int) -> History:
    """Responses of random tokens to the prompts of a standing batch, as long as they can be."""
    groups, longest = rows // engine.config.samples_per_prompt, engine.config.max_new_tokens
    history = init_history(np.arange(groups), _LOOKED_IN, longest)
    tokens = jax.random.randint(jax.random.key(seed), history.tokens.shape, 0, engine.policy.vocab_size, jnp.int32)
    full = jnp.full_like(history.lengths, longest)
    return replace(history, tokens=tokens, lengths=full, count=jnp.full_like(history.count, _LOOKED_IN))


def round_call(pair: Pair, engine: RolloutEngine, draft: Any, rows: int, context: int) -> Callable[[], float]:
    """Rounds of the engine."""
    batch = standing_batch(engine, rows, context)
    rounds = timed_rounds(lambda p, d, b: engine.round(p, d, b)[0], batch)
    return per_round(rounds, pair.params, draft if engine.speculative else None)


def per_round(rounds: Timed, params: PolicyParams, draft: Any) -> Callable[[], float]:
    """Seconds of a round, right after a call like it."""
    return after_itself(lambda: rounds(params, draft, ROUNDS) / ROUNDS)


def part_calls(pair: Pair, engine: RolloutEngine, params: Any, rows: int, context: int) -> dict[str, Any]:
    """Drafting, forward and drawing of one round, by themselves."""
    batch = standing_batch(engine, rows, context)
    tree, standing = engine.config.tree, batch.rows

    def read(params: Any, batch: Batch) -> ForwardOutput:
        tokens = jnp.repeat(batch.rows.last_token[:, None], tree.size, axis=1)
        positions = batch.rows.length[:, None] + jnp.arange(tree.size, dtype=jnp.int32)[None]
        return forward(
            params,
            pair.policy,
            grid_batch(tokens, positions),
            numerics=engine.numerics,
            cache=batch.pool.cache(batch.rows),
            boundaries=engine.boundaries,
        )

    hidden = jax.jit(lambda params, batch: read(params, batch).hidden)(pair.params, batch)

    def forwards(params: Any, _: Any, batch: Batch) -> Batch:
        out = read(params, batch)
        assert out.cache is not None
        newest = (jnp.sum(out.hidden.reshape(rows, -1), axis=1) > 0).astype(jnp.int32)
        return replace(batch, pool=batch.pool.with_cache(out.cache), rows=replace(batch.rows, last_token=newest))

    def draft(draft: Any, newest: Any) -> Any:
        # What the drafter last knew depends on the trip, so that it does not draft once for all of them; `newest` is 0
        # or 1, which the compiler does not know.
        zero = jnp.max(newest) // 2
        state = jax.tree.map(lambda x: x + zero.astype(x.dtype) if x.ndim <= 2 else x, standing.drafter)
        return engine._propose(pair.params, draft, replace(standing, drafter=state), batch.trajectory).token[:, -1] % 2

    def draw(params: Any, newest: Any) -> Any:
        again = hidden + (jnp.repeat(newest, tree.size) // 2)[:, None].astype(hidden.dtype)
        keys = jnp.repeat(standing.keys, tree.size, axis=0)
        context = Context(jnp.zeros((rows * tree.size,), jnp.int32))
        law, _ = sample_tokens(params, pair.policy, engine.config.law, again, keys, context, engine.numerics)
        # Not the first rows alone: XLA would then sort the vocabulary.
        return jnp.max(law.token.reshape(rows, -1), axis=1) % 2

    whole = timed_rounds(forwards, batch)
    return {
        "draft": timed(draft, params, standing.last_token),
        "forward": per_round(whole, pair.params, None),
        "draw": timed(draw, pair.params, standing.last_token),
    }


def measure(pair: Pair, config: Config, rows: int, context: int) -> list[dict[str, Any]]:
    """A row of the table per draft length, all timed in turn."""
    bare_step, bare_draft = bare_calls(pair, rows)
    drafter, params = drafting_of(config, pair)
    step = engine_of(pair, None, 0, config.survival)
    calls = {"step": round_call(pair, step, None, rows, context), "bare step": bare_step, "bare draft": bare_draft}
    if config.invariant:
        calls["step, invariant"] = round_call(pair, replace(step, numerics=INVARIANT), None, rows, context)
    attention = attention_calls(pair, rows, context, [k + 1 for k in (0, *config.draft_lengths)])
    calls |= {f"bare attention {queries - 1}": call for queries, call in attention.items()}
    looks = config.drafts == "suffix"
    samples = _LOOKED_IN if looks and rows % _LOOKED_IN == 0 else 1
    for k in config.draft_lengths:
        engine = engine_of(pair, drafter, k, config.survival, samples)
        if looks:
            params = earlier_epoch(engine, rows, config.run.seed)
        calls[f"round {k}"] = round_call(pair, engine, params, rows, context)
        if config.invariant:
            calls[f"round {k}, invariant"] = round_call(
                pair, replace(engine, numerics=INVARIANT), params, rows, context
            )
        calls[f"bare verify {k}"] = bare_calls(pair, rows * (k + 1))[0]
        if config.parts:
            named = part_calls(pair, engine, params, rows, context)
            calls |= {f"{name} {k}": call for name, call in named.items()}
    seconds = in_turn(calls, config.repeats)
    typical = {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}
    of_step = ratio(seconds["step"], seconds["bare step"])
    step_products = seconds["bare step"] + seconds["bare attention 0"]
    of_products = ratio(seconds["step"], step_products)
    table = []
    for k in config.draft_lengths:
        whole, verify = seconds[f"round {k}"], seconds[f"bare verify {k}"]
        steps = k if config.drafts == "head" else 0
        least = verify + steps * seconds["bare draft"]
        floor = least / seconds["bare step"]
        products = (least + seconds[f"bare attention {k}"]) / step_products
        cost = ratio(whole, seconds["step"])
        row: dict[str, Any] = {
            "rows": rows,
            "context": context,
            "drafts": config.drafts,
            "draft_length": k,
            "step_ms": 1e3 * typical["step"],
            "step_over_bare": of_step[0],
            "step_over_bare_high": of_step[2],
            "step_over_products": of_products[0],
            "step_over_products_high": of_products[2],
            "round_ms": 1e3 * typical[f"round {k}"],
            "round_cost": cost[0],
            "floor": float(sorted(floor)[len(floor) // 2]),
            **ratio_columns("over_floor", whole / seconds["step"], floor),
            **ratio_columns("over_products", whole / seconds["step"], products),
            "forward_over_bare": float("nan"),
        }
        if config.invariant:
            row |= ratio_columns("invariant_step", seconds["step, invariant"], seconds["step"])
            row |= ratio_columns("invariant_round", seconds[f"round {k}, invariant"], whole)
        if config.parts:
            parts = {name: 1e3 * typical[f"{name} {k}"] for name in ("draft", "forward", "draw")}
            row |= {f"{name}_ms": value for name, value in parts.items()}
            row["bookkeeping_ms"] = row["round_ms"] - sum(parts.values())
            fewest = seconds[f"draft {min(config.draft_lengths)}"]
            row |= ratio_columns("draft_over_least", seconds[f"draft {k}"], fewest)
            row["forward_over_bare"] = ratio(seconds[f"forward {k}"], verify)[0]
        table.append(row)
    return table


def main(config: Config) -> None:
    """Measure, write and print."""
    check_output(config.run, SCRIPT, policy=config.model.policy, drafter=config.model.drafter)
    pair = open_expanded(config.model, config.run.seed)
    out = open_output(config.run, config, SCRIPT)
    cases = [(rows, context) for context in config.contexts for rows in config.rows]
    table: list[dict[str, Any]] = []
    with progress("cases", len(cases)) as advance:
        for rows, context in cases:
            table += measure(pair, config, rows, context)
            advance(1, f"{rows} rows, {context} tokens")
    source = provenance(config.run.seed) | parts_of(pair, config.model)
    write_results(out, table, "Cost of a round", source)
    draw_round_cost([row for row in table if row["context"] == config.contexts[0]]).savefig(
        out / "round_cost.png", dpi=120
    )
    worst = max(table, key=lambda row: row["over_floor"])
    write_json(out / "summary.json", {"worst_over_floor": worst["over_floor"]} | source)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
