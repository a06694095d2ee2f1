"""What the cache takes, what a group's prompt costs, and how long rounds take to compile.

Memory: long-tailed responses, exp(N(ln 64, 0.8)) clipped at `--longest`, go through a few rows, with the page pool that
a rollout has by default and with `--pools`, shares of one for all rows at full length; by default also with a
controller, whose rollout is one program of all its rounds. `over_live` is the pool and the drafter's cache over what
the tokens alive at the peak take of both, a shared prompt counted once; `over_parts` is the program's peak, by the
compiler, over weights, pool and drafter's cache. Prefill: a prompt with `--group` samples beside one with a single
sample. Compilation: lowering and compiling one round of every kind, and a rollout with all of the controller's, without
the persistent cache.
"""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental.compilation_cache import compilation_cache

from experiments.bench_models import OneDevice, ShapeOptions, open_expanded, parts_of
from experiments.bench_work import endless_law, long_tailed, noise_keys, random_prompts
from experiments.common import Run, RunOptions, check_least, run_main
from experiments.expand import Pair, size
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.turns import in_turn, ratio_columns, seconds_of
from specrl_jax.errors import InputError
from specrl_jax.models.numerics import Numerics
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.control import Control, initial_control
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.training.costs import standing_batch
from specrl_jax.training.metrics import write_json

SCRIPT = "bench_cache"


@dataclass(frozen=True)
class Config(OneDevice):
    """Options of the measurement."""

    run: Run = RunOptions()
    model: Annotated[ShapeOptions, tyro.conf.arg(name="")] = field(default_factory=lambda: ShapeOptions(shape="25m"))
    sequences: int = 256
    rows: int = 16
    prompt_tokens: int = 32
    longest: int = 512
    pools: tuple[float, ...] = (1.0, 0.5, 0.3)
    draft_length: int = 3
    most_drafts: int = 7
    """Drafts of a row at most where a controller chooses."""
    group: int = 16
    group_prompt_tokens: int = 256
    repeats: int = 15

    def __post_init__(self) -> None:
        check_least("", self, sequences=1, rows=1, prompt_tokens=2, longest=2, draft_length=1, most_drafts=1, group=1)
        check_least("", self, group_prompt_tokens=2, repeats=3)
        if not self.pools or not all(0.0 < share <= 1.0 for share in self.pools):
            raise InputError(f"--pools is {self.pools}; name shares above 0 and at most 1")


PRESETS: dict[str, Mapping[str, Any]] = {
    "default": {},
    "smoke": {
        "model": {"shape": "toy"},
        "sequences": 4,
        "rows": 2,
        "longest": 130,
        "pools": (1.0, 0.7),
        "group_prompt_tokens": 8,
        "repeats": 3,
    },
}


def engine_of(pair: Pair, longest: int, **settings: Any) -> RolloutEngine:
    """An engine in which limits end the responses."""
    counts = (settings.pop("samples", 1), settings.pop("draft_length"))
    rollout = RolloutConfig(longest, *counts, endless_law(longest), **settings)
    return RolloutEngine(pair.policy, rollout, Numerics(), pair.drafter)


def chosen_by_a_controller(pair: Pair, config: Config) -> tuple[RolloutEngine, Control]:
    """An engine with all rounds of a controller, and one to which they are all alike."""
    engine = engine_of(pair, config.longest, draft_length=config.most_drafts, adaptive=True, rows=config.rows)
    return engine, initial_control(np.ones(len(engine.config.bodies_for(config.rows))))


def memory(pair: Pair, config: Config) -> list[dict[str, Any]]:
    """A row for the default size of the pool, one for each share of all pages that rows could fill, and the default's
    with a controller, whose tokens are not compared: plain numerics round them otherwise."""
    limits = jnp.asarray(long_tailed(np.random.default_rng(config.run.seed), config.sequences, config.longest))
    rng = np.random.default_rng(config.run.seed)
    prompts = random_prompts(rng, config.sequences, config.prompt_tokens, pair.policy.vocab_size)
    keys = noise_keys(prompts)
    usual = engine_of(pair, config.longest, draft_length=config.draft_length, rows=config.rows)
    whole = replace(usual, config=replace(usual.config, cache_bytes=1 << 62))
    layout = whole.layout(*prompts.tokens.shape)
    adaptive, control = chosen_by_a_controller(pair, config)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves((pair.params, pair.draft)))
    width = prompts.tokens.shape[1]
    per_token = whole.page_bytes() // whole.numerics.key_block
    of_drafter = whole.drafter_bytes(1, width) / (layout.row_pages * whole.numerics.key_block)
    drafter = whole.drafter_bytes(layout.rows + layout.prompts, width)
    budgets = [int(layout.pool_pages * share) * whole.page_bytes() + drafter for share in config.pools]
    fixed = [replace(usual, config=replace(usual.config, cache_bytes=budget)) for budget in (None, *budgets)]
    table, first = [], None
    for engine, table_of_costs in (*((engine, None) for engine in fixed), (adaptive, control)):
        given = pair.params, pair.draft, prompts, keys, limits
        compiled = jax.jit(engine.rollout).lower(*given, control=table_of_costs).compile()
        trajectory = jax.block_until_ready(compiled(*given, control=table_of_costs))
        first = first or trajectory
        used = compiled.memory_analysis()
        assert used is not None
        peak = used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes
        pages = engine.layout(*prompts.tokens.shape).pool_pages
        pool = pages * engine.page_bytes()
        live = int(trajectory.stats.peak_tokens) * (per_token + of_drafter)
        table.append(
            {
                "part": "memory",
                "draft_length": "adaptive" if table_of_costs else config.draft_length,
                "default": engine.config.cache_bytes is None,
                "pool_share": round(pages / layout.pool_pages, 2),
                "sequences": config.sequences,
                "rows": config.rows,
                "pool_mb": pool / 1e6,
                "drafter_mb": drafter / 1e6,
                "live_mb": live / 1e6,
                "over_live": (pool + drafter) / live,
                "peak_mb": peak / 1e6,
                "over_parts": peak / (weights + pool + drafter),
                "rounds_sat_out": int(trajectory.stats.stalled),
                "same_tokens": None if table_of_costs else bool(jnp.all(trajectory.tokens == first.tokens)),
            }
        )
    return table


def prefill(pair: Pair, config: Config) -> dict[str, Any]:
    """A prompt for a group of samples beside a prompt for one."""
    calls: dict[str, Callable[[], float]] = {}
    rng = np.random.default_rng(config.run.seed)
    prompts = random_prompts(rng, 1, config.group_prompt_tokens, pair.policy.vocab_size)
    for samples in (1, config.group):
        engine = engine_of(pair, 64, draft_length=config.draft_length, samples=samples)
        program, keys = jax.jit(engine.start), noise_keys(prompts, samples)
        calls[str(samples)] = seconds_of(functools.partial(program, pair.params, pair.draft, prompts, keys))
    seconds = in_turn(calls, config.repeats)
    return {
        "part": "prefill of a group",
        "samples": config.group,
        "prompt_tokens": config.group_prompt_tokens,
        "seconds": float(np.median(seconds[str(config.group)])),
        **ratio_columns("over_one", seconds[str(config.group)], seconds["1"]),
    }


def compilation(pair: Pair, config: Config) -> list[dict[str, Any]]:
    """Seconds to lower and compile a round, by its rows and drafts, and a rollout whose rounds a controller chooses."""
    kept = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it was used
    table: list[dict[str, Any]] = []

    def compile_and_tell(rows: int, k: int | str, bodies: int, program: Any, *given: Any, **more: Any) -> None:
        start = time.perf_counter()
        program.lower(pair.params, pair.draft, *given, **more).compile()
        seconds = time.perf_counter() - start
        table.append({"part": "compilation", "rows": rows, "draft_length": k, "bodies": bodies, "seconds": seconds})

    for rows, k in ((1, 0), (1, config.draft_length), (config.rows, 0), (config.rows, config.draft_length)):
        engine = engine_of(pair, config.longest, draft_length=k)
        batch = standing_batch(engine, rows, config.prompt_tokens)
        compile_and_tell(rows, k, 1, jax.jit(lambda p, d, b, e=engine: e.round(p, d, b)[0]), batch)
    engine, control = chosen_by_a_controller(pair, config)
    prompts = random_prompts(
        np.random.default_rng(config.run.seed), config.rows, config.prompt_tokens, pair.policy.vocab_size
    )
    program, bodies = jax.jit(engine.rollout), len(control.seconds)
    compile_and_tell(config.rows, "adaptive", bodies, program, prompts, noise_keys(prompts), control=control)
    jax.config.update("jax_enable_compilation_cache", kept)
    compilation_cache.reset_cache()
    return table


def main(config: Config) -> None:
    """Measure, write and print."""
    check_output(config.run, SCRIPT, policy=config.model.policy, drafter=config.model.drafter)
    pair = open_expanded(config.model, config.run.seed)
    out = open_output(config.run, config, SCRIPT)
    table = [*compilation(pair, config), *memory(pair, config), prefill(pair, config)]
    source = provenance(config.run.seed) | parts_of(pair, config.model)
    write_results(out, table, "Cache, prefill and compilation", source)
    write_json(out / "summary.json", {"parameters": size(pair.params)} | source)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
