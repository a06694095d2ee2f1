"""How many drafts are accepted, by task, temperature and kind of drafts, and how fast that falls with depth.

A policy answers held-out prompts of every file of `--data` (or of the arithmetic task) at every temperature, once per
kind of drafts, for several seeds; nothing is timed. `survival_per_position` is the share of rounds that accepted the
draft at each depth, `conditional_acceptance` the share of those that came so far. Text drafters propose nothing where
they find nothing: `tokens_per_forward` counts such rounds too. Means over seeds with 95% intervals.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from experiments.common import Run, RunOptions, check_least, progress, run_main
from experiments.inference import Model, ModelFlags, ModelOptions, ProblemOptions, open_model, open_problems
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.rollout_options import Drafts, drafter_for
from experiments.seeds import acceptance_over_seeds, grouped
from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.combined import params_for
from specrl_jax.drafters.suffix import History, init_history, remember
from specrl_jax.errors import InputError
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.training.acceptance_plots import draw_acceptance_bars
from specrl_jax.training.metrics import write_json
from specrl_jax.training.sampling import Sampler, sample_all
from specrl_jax.training.speculation import acceptance_figures
from specrl_jax.training.workloads import end_ids

SCRIPT = "acceptance_by_task"
LOOKING: tuple[Drafts, ...] = ("suffix", "head+suffix")
"""Kinds of drafts that are looked for in other responses too."""
Histories = Mapping[int, History | None]
"""Answers of earlier epochs, by seed."""


class Case(NamedTuple):
    """What a row of the table is about."""

    prompts: str
    temperature: float
    drafts: Drafts


@dataclass(frozen=True)
class Config:
    """Options of the table."""

    run: Run = RunOptions()
    model: ModelFlags = ModelOptions()
    task: Literal["arithmetic", "jsonl"] | None = None
    data: tuple[str, ...] = ()
    """Files with prompts of a jsonl task, each a task of its own."""
    problems: int = 64
    """Held-out prompts of each task: the last of a file."""
    samples: int = 4
    """Responses to each prompt, among which suffix drafts look."""
    temperatures: tuple[float, ...] = (0.6, 1.0, 1.2)
    drafts: tuple[Drafts, ...] = ("head", "ngram", "suffix", "head+suffix")
    draft_length: int = 7
    max_prompt_tokens: int = 256
    max_new_tokens: int = 192
    earlier: int = 0
    """Earlier epochs of answers to the same prompts, which suffix drafts look in too."""
    together: int = 256
    """Responses rolled out at the same time."""
    seeds: int = 3
    """Seeds of the noise; policy, head and prompts are the same for all."""

    def __post_init__(self) -> None:
        check_least("", self, problems=1, samples=1, draft_length=1, max_prompt_tokens=1, together=1, seeds=1)
        check_least("", self, earlier=0)
        for temperature in self.temperatures:
            _ = SamplingLaw(temperature)
        if not self.temperatures or not self.drafts:
            raise InputError("--temperatures and --drafts must name at least one each")
        if self.earlier and not set(self.drafts) & set(LOOKING):
            raise InputError(f"--earlier is for {' and '.join(LOOKING)} drafts; name one of them in --drafts")
        if self.task is not None and (self.task == "jsonl") != bool(self.data):
            raise InputError("--data belongs to --task jsonl; give both")

    @property
    def mesh(self) -> str:
        """Devices asked for."""
        return self.model.mesh

    @property
    def every_seed(self) -> range:
        """Seeds of the noise."""
        return range(self.run.seed, self.run.seed + self.seeds)

    @property
    def batch(self) -> int:
        """Prompts at a time."""
        return max(1, self.together // self.samples)


SMOKE = {
    "task": "arithmetic",
    "problems": 4,
    "samples": 2,
    "temperatures": (1.0,),
    "drafts": ("head", "suffix"),
    "draft_length": 3,
    "earlier": 1,
    "max_new_tokens": 16,
    "seeds": 1,
}
PRESETS: dict[str, Mapping[str, Any]] = {"cpu": {}, "gpu": {"max_new_tokens": 2048, "problems": 256}, "smoke": SMOKE}


def open_tasks(config: Config, model: Model) -> dict[str, Prompts]:
    """Held-out prompts by task; InputError where they cannot be read."""
    stems = [Path(path).stem for path in config.data]
    names = stems if len(set(stems)) == len(stems) else config.data
    sources: list[tuple[str, str | None]] = [*zip(names, config.data, strict=True)]
    tasks = {}
    for name, path in sources or [("arithmetic", None)]:
        options = ProblemOptions(config.task, path, max_prompt_tokens=config.max_prompt_tokens)
        tasks[name] = open_problems(options, model.tokenizer).held_out("dev", config.problems)[0]
    return tasks


def engine_of(config: Config, model: Model, drafts: Drafts | None, temperature: float) -> RolloutEngine:
    """The rollout of a row; without drafts, that of an earlier epoch."""
    law = SamplingLaw(temperature, end_ids=end_ids(model.tokenizer))
    settings = RolloutConfig(config.max_new_tokens, config.samples, config.draft_length if drafts else 0, law)
    drafter = None if drafts is None else drafter_for(drafts, model.drafter)
    return RolloutEngine(model.policy, settings, model.numerics, drafter)


def remembered(config: Config, model: Model, prompts: Prompts, temperature: float, seed: int) -> History | None:
    """Answers of earlier epochs to the prompts."""
    if not config.earlier:
        return None
    engine, ids = engine_of(config, model, None, temperature), np.asarray(prompts.row_ids)
    assert model.params is not None
    history = init_history(ids, config.earlier * config.samples, config.max_new_tokens)
    for epoch in range(config.earlier):
        sampler = Sampler(engine, model.mesh, "draft_data", seed, config.batch, epoch)
        answers = sample_all(sampler, model.params, None, prompts)
        history = jax.jit(remember)(history, ids, answers.tokens, answers.lengths)
    return history


def measure(config: Config, model: Model, prompts: Prompts, case: Case, histories: Histories) -> list[dict[str, Any]]:
    """What is accepted in one case, a row for every seed."""
    engine = engine_of(config, model, case.drafts, case.temperature)
    looks = case.drafts in LOOKING
    shared = case._asdict() | {"draft_length": config.draft_length, "earlier_epochs": config.earlier if looks else 0}
    assert model.params is not None
    rows = []
    for seed in config.every_seed:
        sampler = Sampler(engine, model.mesh, "evaluation", seed, config.batch)
        draft = params_for(engine.drafter, model.draft, histories[seed] if looks else None)
        trajectory = sample_all(sampler, model.params, draft, prompts)
        rows.append(shared | acceptance_figures(trajectory) | {"seed": seed})
    jax.clear_caches()  # every program holds memory maps, of which a process may have some 65,000
    return rows


def summed_up(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds."""
    table = []
    for own in grouped(found, "prompts", "temperature", "drafts").values():
        names = ("prompts", "temperature", "drafts", "draft_length", "earlier_epochs")
        tokens = int(sum(row["response_tokens"] for row in own))
        table.append({name: own[0][name] for name in names} | acceptance_over_seeds(own) | {"response_tokens": tokens})
    return table


def main(config: Config) -> None:
    """Check everything, roll out, write and print."""
    inputs = {f"data-{i}": path for i, path in enumerate(config.data)}
    check_output(config.run, SCRIPT, policy=config.model.policy, drafter=config.model.drafter, **inputs)
    model = open_model(config.model, config.run, config.problems)
    if model.drafter is None and any("head" in drafts for drafts in config.drafts):
        raise InputError("--drafter is missing; give the draft head, or --drafts without it")
    tasks = open_tasks(config, model)
    cases = [Case(name, t, drafts) for name in tasks for t in config.temperatures for drafts in config.drafts]
    for name, temperature, drafts in cases:
        engine_of(config, model, drafts, temperature).check_prompt_width(tasks[name].tokens.shape[1])
    out = open_output(config.run, config, SCRIPT)
    model = model.initialised(config.run.seed)
    found: list[dict[str, Any]] = []
    with progress("rollouts", len(cases)) as advance:
        for (name, temperature), group in itertools.groupby(cases, lambda case: case[:2]):
            histories = {seed: remembered(config, model, tasks[name], temperature, seed) for seed in config.every_seed}
            for case in group:
                found += measure(config, model, tasks[name], case, histories)
                advance(1, f"{name} at {temperature}, {case.drafts}: {found[-1]['acceptance_length']:.2f}")
    table, source = summed_up(found), provenance(config.run.seed)
    source |= {"policy": config.model.policy, "drafter": config.model.drafter}
    write_results(out, table, "Acceptance by task", source)
    write_json(out / "summary.json", {"by_seed": found} | source)
    labelled = [row | {"group": f"{row['prompts']}\n{row['temperature']:g}"} for row in table]
    draw_acceptance_bars(labelled, "group", "drafts").savefig(out / "acceptance_by_task.png", dpi=120)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
