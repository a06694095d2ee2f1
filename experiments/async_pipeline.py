"""Synchronous and asynchronous steps, with and without speculation.

The same GRPO run, several times for every seed: rollouts made in their own step (lag 0, the whole mesh rolls out and
then learns), or some steps ahead on devices of their own; every run with drafts and without. `step_s` is the median
second of a step, `exposed_s` what of it waits for a rollout, `speedup` that of the step over the synchronous one
without drafts; means over seeds with 95% intervals. Every run corrects with truncated importance weights, so that they
differ in the lag alone. NVIDIA (arXiv 2604.26779, 8B, lag 1, 12 + 4 nodes): steps of 75.0 s without and 60.5 s with
drafts, 10.4 and 0.6 s of them exposed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import train_grpo, train_options
from experiments.common import check_least, run_main
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.rollout_options import MOST_DRAFTS, SpeculationFlags, SpeculationOptions
from experiments.seeds import grouped, mean_over_seeds, over_seeds
from experiments.train_options import Config as GrpoConfig
from experiments.train_options import grpo_arm
from specrl_jax.errors import InputError
from specrl_jax.training.metrics import read_metrics, write_json

SCRIPT = "async_pipeline"
_PAPER = {(1, False): (75.0, 10.4), (1, True): (60.5, 0.6)}
"""Seconds of a step and of its exposed rollout, by lag and speculation."""


@dataclass(frozen=True)
class Config(GrpoConfig):
    """Options of the table: those of a GRPO run, and what is compared."""

    seeds: int = 3
    speculation: SpeculationFlags = SpeculationOptions(draft_length=3)
    lags: tuple[int, ...] = (0, 1, 2)
    learner_mesh: str = "data=1"
    """Devices that learn where the rollouts have devices of their own (--rollout-mesh); --mesh is of lag 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("", self, seeds=1)
        if 0 not in self.lags or min(self.lags) < 0 or len(set(self.lags)) < len(self.lags):
            raise InputError(f"--lags is {self.lags}; choose different numbers from 0, and 0 among them")
        if self.lag or self.compare or self.speculation.draft_length == 0:
            raise InputError("--lag, --compare and runs without drafts are chosen by the table; leave them out")

    @property
    def arms(self) -> dict[str, tuple[int, bool]]:
        """Lag and whether drafts are made, by name of the run."""
        return {f"lag {lag}, {'drafts' if k else 'no drafts'}": (lag, k) for lag in self.lags for k in (False, True)}


# One dispatch of timed pieces: nothing is saved to disk between the steps.
_TABLE = {"scan_steps": 1000, "measured_every": 1, "eval_every": 0, "loss": {"importance_cap": 2.0}, "compare": False}
CPU = {
    **_TABLE,
    "mesh": "data=2",
    "rollout_mesh": "data=1",
    "steps": 12,
    "prompts": 16,
    "samples": 8,
    "eval_problems": 64,
    "max_new_tokens": 160,
    "numerics": "plain",
}
GPU = {**_TABLE, "mesh": "data=8", "learner_mesh": "data=2", "rollout_mesh": "data=6", "steps": 40, "prompts": 48}
_SMALL = train_options.PRESETS["smoke"]
SMOKE = {
    **_SMALL,
    **_TABLE,
    "mesh": "data=2",
    "rollout_mesh": "data=1",
    "seeds": 1,
    "draft": {**_SMALL["draft"], "microbatch": {"rows": 2, "widths": (1.0,)}},
}
PRESETS: dict[str, Mapping[str, Any]] = {"cpu": CPU, "gpu": GPU, "smoke": {**SMOKE, "lags": (0, 1), "steps": 3}}


def run_of(config: Config, seed: int, folder: Path, lag: int, drafts: bool, **given: Any) -> GrpoConfig:
    """One GRPO run."""
    changes = {"lag": lag, "rollout_mesh": config.rollout_mesh if lag else None} | given
    if lag and config.rollout_mesh is not None:
        changes["mesh"] = config.learner_mesh
    if not drafts:
        changes |= {
            "speculation": replace(config.speculation, draft_length=0, most_drafts=MOST_DRAFTS, costs=None),
            "drafter": None,
        }
    return grpo_arm(config, seed, folder, **changes)


def measure(config: Config, seed: int, out: Path) -> list[dict[str, Any]]:
    """A row per step and arm. What is not given is made once, by the first run of the seed."""
    given: dict[str, Any] = {}
    if config.drafter is None:
        made = out / "arms" / f"begin_{seed}"
        train_grpo.main(replace(run_of(config, seed, made, 0, True), steps=1))
        given = {"policy": config.policy or str(made / "warmup"), "drafter": str(made / "drafter")}
    rows = []
    for name, (lag, drafts) in config.arms.items():
        folder = out / "arms" / f"lag_{lag}_{'drafts' if drafts else 'plain'}_{seed}"
        train_grpo.main(run_of(config, seed, folder, lag, drafts, **given))
        for row in read_metrics(folder):
            exposed = row.get("time_exposed_rollout_s", row.get("time_rollout_s"))
            names = ("step", "time_step_s", "time_weight_sync_s", "reward_mean", "policy_lag", "acceptance_length")
            figures = {key: row.get(key) for key in names} | {"exposed_s": exposed}
            rows.append({"arm": name, "seed": seed, "lag": lag, "drafts": drafts} | figures)
    return rows


def summed_up(config: Config, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds. The first steps of a run, whose rollouts nothing hides, are left out."""
    first, quarter = max(config.lags) + 1, max(1, config.steps // 4)
    steady = [row for row in found if row["step"] > min(first, config.steps - 1)]
    seconds = {
        key: float(np.median([row["time_step_s"] for row in own]))
        for key, own in grouped(steady, "arm", "seed").items()
    }
    table = []
    for (name, lag, drafts), own in grouped(steady, "arm", "lag", "drafts").items():
        exposed = [
            float(np.median([row["exposed_s"] for row in run if row["exposed_s"] is not None] or [np.nan]))
            for run in grouped(own, "seed").values()
        ]
        seeds = [seed for (seed,) in grouped(own, "seed")]
        base = next(arm for arm, what in config.arms.items() if what == (0, False))
        row: dict[str, Any] = {"lag": lag, "drafts": drafts}
        for label, values in (
            ("step_s", [seconds[name, seed] for seed in seeds]),
            ("exposed_s", exposed),
            ("speedup", [seconds[base, seed] / seconds[name, seed] for seed in seeds]),
        ):
            row[label], row[f"{label}_ci95"] = mean_over_seeds(values)
        whole = [one for one in found if one["arm"] == name]
        for label, part in (
            ("reward_before", [one for one in whole if one["step"] <= quarter]),
            ("reward_after", [one for one in whole if one["step"] > config.steps - quarter]),
        ):
            row[label] = float(np.mean([one["reward_mean"] for one in part]))
        step, hidden = _PAPER.get((lag, drafts), (None, None))
        table.append(row | {"paper_step_s": step, "paper_exposed_s": hidden, "seeds": len(seeds)})
    return table


def main(config: Config) -> None:
    """Run every arm of every seed, write and print."""
    config.check()
    check_output(config.run, SCRIPT, **config.inputs)
    for lag, drafts in config.arms.values():  # refuses what cannot be run
        train_grpo.open_session(run_of(config, config.run.seed, config.run.out / "none", lag, drafts))
    out = open_output(config.run, config, SCRIPT)
    found = over_seeds(
        config.run.seed,
        config.seeds,
        lambda seed: measure(config, seed, out),
        lambda rows: f"{rows[-1]['arm']}: {rows[-1]['time_step_s']:.2f} s a step",
    )
    table, source = summed_up(config, found), provenance(config.run.seed) | {"policy": config.policy or "from nothing"}
    write_results(out, table, "Synchronous and asynchronous steps", source)
    write_json(out / "summary.json", {"by_step": found} | source)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
