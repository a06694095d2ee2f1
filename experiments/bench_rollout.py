"""Speculative rollouts against rollouts without, in seconds, on the same sequences.

Arms, in turn: draft length 0, every fixed draft length, the controller, and the controller with a random head
(which can only lose). A batch is `sequences` responses through `rows` rows; long-tailed lengths are
exp(N(ln 64, 0.8)), fixed by the seed and clipped at 512. `speedup` is the median of paired ratios to
draft length 0, with its 95% interval. `share_of_floor` is the controller's speed-up over the most that the
floors of `bench_round_cost` would allow at the acceptance measured here, the best draft length for every number of
live rows.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Int

from experiments.bench_models import (
    ShapeOptions,
    SyntheticMatch,
    drafter_of,
    in_turn,
    open_expanded,
    parts_of,
    ratio,
)
from experiments.common import Run, RunOptions, check_least, progress, run_main
from experiments.expand import Pair
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from specrl_jax.data.prompts import Prompts
from specrl_jax.errors import InputError
from specrl_jax.models.numerics import Numerics
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.noise import sequence_keys
from specrl_jax.rollout.rules import Match, Rule
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.trajectory import Trajectory
from specrl_jax.training.costs import load_costs, measure_costs, save_costs
from specrl_jax.training.metrics import write_json
from specrl_jax.training.speculation import speculation_metrics
from specrl_jax.training.speed_plots import draw_speedups

SCRIPT = "bench_rollout"
Lengths = Literal["long-tailed", "equal"]


@dataclass(frozen=True)
class Config:
    """Options of the measurement."""

    run: Run = RunOptions()
    model: Annotated[ShapeOptions, tyro.conf.arg(name="")] = field(default_factory=ShapeOptions)
    survival: tuple[float, ...] = (0.766, 0.877)
    """Synthetic acceptance: probability of each further draft; 0 for the real acceptance of the pair."""
    rows: tuple[int, ...] = (1, 16)
    sequences: int = 0
    """Responses per rollout; by default as many as rows."""
    lengths: Lengths = "long-tailed"
    tokens: int = 128
    """Tokens of every response of equal length."""
    prompt_tokens: int = 32
    draft_lengths: tuple[int, ...] = (3,)
    """Fixed draft lengths to compare with."""
    longest: int = 7
    """Most drafts of a row under the controller."""
    random_drafter: bool = False
    """Measure the controller with a random head too."""
    ladder: bool = True
    """Move live rows into smaller batches, in all arms."""
    costs: str | None = None
    """Cost table to read, or to write where there is none yet."""
    repeats: int = 15

    def __post_init__(self) -> None:
        check_least("", self, repeats=3, sequences=0, tokens=1, prompt_tokens=2, longest=1)
        if not all(0.0 <= s < 1.0 for s in self.survival):
            raise InputError(f"--survival is {self.survival}; choose probabilities from 0 (real acceptance) to below 1")
        if min(self.rows, default=0) < 1:
            raise InputError("--rows must name at least one number, all of them at least 1")

    @property
    def mesh(self) -> str:
        """One device."""
        return "data=1"


PRESETS: dict[str, Mapping[str, Any]] = {
    "default": {},
    "smoke": {
        "model": {"shape": "25m"},
        "rows": (2,),
        "survival": (0.877,),
        "lengths": "equal",
        "tokens": 8,
        "draft_lengths": (2,),
        "longest": 3,
        "repeats": 3,
    },
}


@dataclass(frozen=True)
class Work:
    """What is rolled out: prompts, and how long every response becomes."""

    prompts: Prompts
    limits: Int[np.ndarray, "b"]

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return int(self.limits.max())


def make_work(config: Config, rows: int, vocab_size: int) -> Work:
    """Random prompts, and response lengths as configured; both fixed by the seed."""
    rng = np.random.default_rng(config.run.seed)
    count = config.sequences or rows
    limits = np.full(count, config.tokens)
    if config.lengths == "long-tailed":
        limits = np.clip(np.round(np.exp(rng.normal(np.log(64.0), 0.8, count))), 1, 512)
    tokens = rng.integers(2, vocab_size, (count, config.prompt_tokens))
    lengths = jnp.full((count,), config.prompt_tokens, jnp.int32)
    prompts = Prompts(jnp.asarray(tokens, jnp.int32), lengths, jnp.arange(count, dtype=jnp.uint32))
    return Work(prompts, limits.astype(np.int32))


@dataclass
class Arm:
    """A way to roll out, timed again and again; `last` is its newest trajectory."""

    call: Callable[[], Trajectory]
    last: Trajectory | None = None

    def __call__(self) -> float:
        """Seconds of one rollout."""
        start = time.perf_counter()
        self.last = jax.block_until_ready(self.call())
        return time.perf_counter() - start


def rollout_of(config: Config, pair: Pair, work: Work, rows: int, k: int, rule: Rule, adaptive: bool) -> RolloutEngine:
    """The engine of one arm; end tokens never come, so that the limits decide."""
    law = SamplingLaw(end_ids=(1,), min_new_tokens=work.longest)
    ladder = (1.0, 0.25, 0.0625) if config.ladder else (1.0,)
    settings = RolloutConfig(
        work.longest, 1, k, law, rule, adaptive=adaptive, rows=rows, ladder=ladder, smallest_rung=1
    )
    return RolloutEngine(pair.policy, settings, Numerics(), drafter_of(pair) if k else None)


def fixed_arm(engine: RolloutEngine, pair: Pair, work: Work) -> Arm:
    """A fixed draft length."""
    program = jax.jit(engine.rollout)
    draft = pair.draft if engine.speculative else None
    keys = noise(work)
    return Arm(lambda: program(pair.params, draft, work.prompts, keys, jnp.asarray(work.limits)))


def adaptive_arm(engine: RolloutEngine, pair: Pair, draft: Any, work: Work, control: Any) -> Arm:
    """The controller. Every rollout starts with what the one before learned, as in training."""
    program = jax.jit(engine.rollout)
    keys, state = noise(work), [control]

    def call() -> Trajectory:
        trajectory = program(pair.params, draft, work.prompts, keys, jnp.asarray(work.limits), state[0])
        state[0] = trajectory.control
        return trajectory

    return Arm(call)


def random_head(draft: Any, seed: int) -> Any:
    """The draft head with weights that mean nothing."""
    leaves, tree = jax.tree.flatten(draft.weights)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [0.05 * jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return replace(draft, weights=jax.tree.unflatten(tree, drawn))


def noise(work: Work) -> Any:
    """Noise keys of the sequences."""
    return sequence_keys(0, "evaluation", 0, work.prompts.row_ids, jnp.zeros((len(work.limits),), jnp.int32))


def measure(pair: Pair, config: Config, rows: int, survival: float) -> list[dict[str, Any]]:
    """A row of the table per arm."""
    work = make_work(config, rows, min(pair.policy.vocab_size, 16_000))
    rule = SyntheticMatch(survival=survival) if survival else Match()
    chosen = rollout_of(config, pair, work, rows, config.longest, rule, adaptive=True)
    bodies = chosen.config.bodies_for(rows)
    control = cost_table(config, chosen, pair, rows)
    arms = {"0": fixed_arm(rollout_of(config, pair, work, rows, 0, Match(), False), pair, work)}
    for k in config.draft_lengths:
        arms[str(k)] = fixed_arm(rollout_of(config, pair, work, rows, k, rule, False), pair, work)
    arms["adaptive"] = adaptive_arm(chosen, pair, pair.draft, work, control)
    if config.random_drafter and pair.head is not None:
        random = random_head(pair.draft, config.run.seed)
        engine = rollout_of(config, pair, work, rows, config.longest, Match(), adaptive=True)
        arms["adaptive, random head"] = adaptive_arm(engine, pair, random, work, control)
    seconds = in_turn(arms, config.repeats, discard=2)
    table = []
    for name, arm in arms.items():
        middle, low, high = ratio(seconds["0"], seconds[name])
        assert arm.last is not None
        stats = jax.device_get(arm.last.stats)
        figures = speculation_metrics(stats)
        table.append(
            {
                "rows": rows,
                "sequences": len(work.limits),
                "lengths": config.lengths,
                "prompt_tokens": config.prompt_tokens,
                "ladder": config.ladder,
                "synthetic_survival": survival or None,
                "draft_length": name,
                "seconds": float(np.median(seconds[name])),
                "tokens_per_second": float(work.limits.sum() / np.median(seconds[name])),
                "speedup": middle,
                "speedup_low": low,
                "speedup_high": high,
                "acceptance_length": figures.get("acceptance_length"),
                "entropy": float(arm.last.entropy_sum) / float(work.limits.sum()),
                "bodies": " ".join(
                    f"{b.rows}x{b.tokens}:{n}" for b, n in zip(bodies, stats.bodies.tolist(), strict=True) if n
                )
                if len(stats.bodies)
                else None,
            }
        )
    return table


def cost_table(config: Config, engine: RolloutEngine, pair: Pair, rows: int) -> Any:
    """The controller's cost table, read or measured."""
    bodies = engine.config.bodies_for(rows)
    path = Path(f"{config.costs}.{rows}.json") if config.costs else None
    if path is not None and path.exists():
        return load_costs(path, bodies)
    start = time.perf_counter()
    control = measure_costs(engine, pair.params, pair.draft, rows, config.prompt_tokens + 64)
    print(f"measured {len(bodies)} rounds of {rows} rows in {time.perf_counter() - start:.0f} s, with compilation")
    for body, cost in zip(bodies, np.asarray(control.seconds), strict=True):
        print(f"  {body.rows} rows, {body.tokens} tokens: {1e3 * cost:.1f} ms")
    if path is not None:
        save_costs(path, control, bodies)
    return control


def main(config: Config) -> None:
    """Measure, write and print."""
    check_output(config.run, SCRIPT, policy=config.model.policy, drafter=config.model.drafter)
    out = open_output(config.run, config, SCRIPT)
    pair = open_expanded(config.model, config.run.seed)
    cases = [(rows, survival) for survival in config.survival for rows in config.rows]
    table: list[dict[str, Any]] = []
    with progress("cases", len(cases)) as advance:
        for rows, survival in cases:
            table += measure(pair, config, rows, survival)
            advance(1, f"{rows} rows: {table[-1]['speedup']:.2f}x")
    source = provenance(config.run.seed) | parts_of(pair, config.model)
    write_results(out, table, "Rollout with and without drafts", source)
    draw_speedups(table).savefig(out / "speedups.png", dpi=120)
    write_json(out / "summary.json", {"best_speedup": max(row["speedup"] for row in table)} | source)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
