"""The draft-length table: what k drafts per round win, by live batch, on predictable and on branchy work.

For every workload, number of live rows and draft length, over several seeds: acceptance length, speed of the rollout
over decoding without drafts (paired, in turn), and the cost of a round in autoregressive steps, prompts left out.
With `--policy`, `--drafter` and `--task` the work is a policy's own prompts, branchy ones with random tokens in their
place; without, acceptance is synthetic: every further draft survives with probability 0.877 (predictable) or 0.766
(branchy), which at three drafts is the acceptance length of NVIDIA's RL-Zero and RL-Think runs (arXiv 2604.26779),
whose figures stand beside ours. Intervals are 95%, of the mean over seeds. Synthetic acceptance costs no training; of a
trained head `--training-seconds` says what it cost, and `paid_back` after how many rollouts it has been made up for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import tyro

from experiments.bench_models import OneDevice, ShapeOptions, SyntheticMatch, open_expanded_or_small, parts_of
from experiments.bench_rollout import Config as RolloutBench
from experiments.bench_rollout import fixed_arm, rollout_of
from experiments.bench_work import Work, WorkFlags, WorkOptions, make_work, noise_keys
from experiments.common import Run, RunOptions, check_least, progress, run_main
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.seeds import mean_over_seeds
from experiments.turns import in_turn, seconds_of
from specrl_jax.errors import InputError
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Match
from specrl_jax.training.metrics import write_json
from specrl_jax.training.speculation import speculation_metrics
from specrl_jax.training.speed_plots import draw_draft_lengths

SCRIPT = "draft_length"
SURVIVAL = {"predictable": 0.877, "branchy": 0.766}
# Qwen3-8B on GB200, generation: acceptance length and speed-up of RL-Zero and of RL-Think (tables 3 to 5).
PAPER = {3: ((3.32, 1.77), (2.77, 1.53)), 5: ((4.35, 1.44), (3.23, 0.84)), 7: ((5.06, 1.21), (3.48, 0.71))}


@dataclass(frozen=True)
class Config(OneDevice):
    """Options of the table."""

    run: Run = RunOptions()
    model: Annotated[ShapeOptions, tyro.conf.arg(name="")] = field(default_factory=ShapeOptions)
    work: WorkFlags = field(default_factory=lambda: WorkOptions(tokens=64))
    rows: tuple[int, ...] = (1, 4, 16)
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 7)
    seeds: int = 3
    repeats: int = 5
    """Rollouts of every arm for each seed, in turn."""
    training_seconds: float = 0.0
    """What the training of --drafter took, its rollouts included."""

    def __post_init__(self) -> None:
        check_least("", self, seeds=2, repeats=1, training_seconds=0)
        if self.training_seconds and self.model.drafter is None:
            raise InputError(f"--training-seconds is {self.training_seconds}; it is of a --drafter: give that too")
        for name in ("rows", "draft_lengths"):
            if min(getattr(self, name), default=0) < 1:
                raise InputError(f"--{name.replace('_', '-')} must name at least one number, all of them at least 1")
        if (self.work.task is None) != (self.model.policy is None):
            raise InputError("--policy and --drafter belong to a --task of theirs; give all three, or none of them")
        if self.work.branchy:
            raise InputError("--branchy is chosen by the table; leave it out")


PRESETS: dict[str, Mapping[str, Any]] = {
    "cpu": {},
    "gpu": {
        "model": {"shape": "8b", "dtype": "bfloat16"},
        "work": {"tokens": 512, "prompt_tokens": 2048},
        "rows": (1, 8, 32, 64),
    },
    "smoke": {
        "model": {"shape": "toy"},
        "work": {"tokens": 8, "prompt_tokens": 8},
        "rows": (1,),
        "draft_lengths": (3,),
        "seeds": 2,
        "repeats": 1,
    },
}


class Found(NamedTuple):
    """What a seed gave for a draft length: tokens a round, speed and cost of a round over those of none, seconds."""

    acceptance_length: float
    speedup: float
    round_cost: float
    seconds: float


def measure(pair: Any, config: Config, rows: int, workload: str, seed: int) -> dict[int, Found]:
    """What every draft length gives, for one seed."""
    real = config.work.task is not None
    options = replace(config.work, branchy=1.0) if real and workload == "branchy" else config.work
    source = (config.model.policy, config.model.target.vocab_size, "equal", seed)
    work = make_work(options, rows, *source)  # type: ignore[arg-type]  # a literal of the kind
    bench = RolloutBench(model=config.model, work=options, survival=(0.0,) if real else (SURVIVAL[workload],))
    rule = Match() if real else SyntheticMatch(survival=SURVIVAL[workload])
    arms = {"0": fixed_arm(rollout_of(bench, pair, work, rows, 0, Match(), False), pair, work)}
    for k in config.draft_lengths:
        arms[str(k)] = fixed_arm(rollout_of(bench, pair, work, rows, k, rule, False), pair, work)
    calls: dict[str, Any] = {**arms, "reading": reading_arm(bench, pair, work, rows)}
    seconds = in_turn(calls, config.repeats, discard=1)
    found = {0: Found(1.0, 1.0, 1.0, float(np.median(seconds["0"])))}
    for k in config.draft_lengths:
        turns = [speculation_metrics(turn.stats) for turn in arms[str(k)].turns[-config.repeats :]]
        lengths = np.array([turn.get("acceptance_length", np.nan) for turn in turns])
        whole = float(np.median(seconds["0"] / seconds[str(k)]))
        decoding = (seconds["0"] - seconds["reading"]) / np.maximum(seconds[str(k)] - seconds["reading"], 1e-9)
        round_cost, typical = float(np.median(lengths / decoding)), float(np.median(seconds[str(k)]))
        length = float(arms[str(k)].figures(config.repeats).get("acceptance_length", float("nan")))
        found[k] = Found(length, whole, round_cost, typical)
    return found


@lru_cache(maxsize=8)
def reading_program(engine: RolloutEngine) -> Any:
    """The compiled reading of prompts; engines that are equal share one."""
    return jax.jit(engine.start)


def reading_arm(bench: RolloutBench, pair: Any, work: Work, rows: int) -> Callable[[], float]:
    """The prompts alone."""
    engine = rollout_of(bench, pair, work, rows, 0, Match(), False)
    program, keys = reading_program(engine), noise_keys(work.prompts)
    return seconds_of(partial(program, pair.params, None, work.prompts, keys))


def row_of(config: Config, rows: int, workload: str, k: int, seeds: list[dict[int, Found]]) -> dict[str, Any]:
    """A row of the table from what the seeds gave."""
    row: dict[str, Any] = {"workload": workload, "rows": rows, "draft_length": k}
    for name in ("acceptance_length", "speedup", "round_cost"):
        row[name], row[f"{name}_ci95"] = mean_over_seeds([getattr(found[k], name) for found in seeds])
    plain, own = (float(np.mean([found[n].seconds for found in seeds])) for n in (0, k))
    row |= {"seconds": own, "seeds": len(seeds)}
    row |= {"acceptance": config.work.task or f"synthetic {SURVIVAL[workload]:g}"}
    if config.training_seconds:
        row["paid_back"] = config.training_seconds / (plain - own) if own < plain else None
    if k in PAPER:
        accepted, won = PAPER[k][0 if workload == "predictable" else 1]
        row |= {"paper_acceptance_length": accepted, "paper_speedup": won, "paper_round_cost": accepted / won}
    return row


def main(config: Config) -> None:
    """Measure, write and print."""
    check_output(config.run, SCRIPT, policy=config.model.policy, drafter=config.model.drafter, data=config.work.data)
    for rows in config.rows:  # refuses what cannot be worked on
        make_work(config.work, rows, config.model.policy, config.model.target.vocab_size, "equal", config.run.seed)
    pair = open_expanded_or_small(config.model, config.run.seed)
    out = open_output(config.run, config, SCRIPT)
    table: list[dict[str, Any]] = []
    cases = [(workload, rows) for workload in SURVIVAL for rows in config.rows]
    with progress("cases", len(cases)) as advance:
        for workload, rows in cases:
            seeds = range(config.run.seed, config.run.seed + config.seeds)
            found = [measure(pair, config, rows, workload, seed) for seed in seeds]
            new = [row_of(config, rows, workload, k, found) for k in (0, *config.draft_lengths)]
            table += new
            # Every program holds memory maps, of which a process may have some 65,000.
            jax.clear_caches()
            best = max(new, key=lambda row: row["speedup"])
            advance(1, f"{workload}, {rows} rows: best {best['speedup']:.2f}x at {best['draft_length']} drafts")
    source = provenance(config.run.seed) | parts_of(pair, config.model)
    write_results(out, table, "Draft length", source)
    draw_draft_lengths(table).savefig(out / "draft_length.png", dpi=120)
    write_json(out / "summary.json", {"best_speedup": max(row["speedup"] for row in table)} | source)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
