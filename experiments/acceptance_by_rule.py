"""How many drafts each verification rule accepts, at equal verified tokens, and what theory says.

Every rule rolls out the same problems with the same drafter and the same number of drafted tokens
per round: chains judged by `ratio`, `block` and `match`, argmax chains, and `match` trees. For chains
the probability that a draft is accepted is computed from the laws of policy and drafter at every draft
that was reached (1 - TV for `ratio`, the coupling's formula for `match`, the policy's own probability for
argmax drafts) and compared with what happened: z is the difference in standard errors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, UInt32

from experiments.common import Run, RunOptions, check_least, progress, run_main
from experiments.inference import (
    Model,
    ModelFlags,
    ModelOptions,
    ProblemFlags,
    ProblemOptions,
    check_run,
    open_model,
    open_problems,
)
from experiments.outputs import markdown_table, open_output, provenance, write_results
from specrl_jax.data.prompts import Prompts
from specrl_jax.errors import InputError
from specrl_jax.models.params import PolicyParams
from specrl_jax.rollout.acceptance import match_acceptance, ratio_acceptance
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.noise import sequence_keys
from specrl_jax.rollout.queue import Batch
from specrl_jax.rollout.round import Judged
from specrl_jax.rollout.rows import Rows
from specrl_jax.rollout.rules import Block, Match, Ratio, Rule
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.trajectory import Trajectory
from specrl_jax.training.acceptance_plots import draw_acceptance_bars
from specrl_jax.training.metrics import write_json
from specrl_jax.training.speculation import acceptance_interval

SCRIPT = "acceptance_by_rule"


@dataclass(frozen=True)
class Config:
    """Options of the table."""

    run: Run = RunOptions()
    model: ModelFlags = ModelOptions()
    problem: ProblemFlags = ProblemOptions(problems=512)
    max_new_tokens: int = 192
    drafts: int = 6
    """Drafted tokens per round of every rule; a multiple of 6."""
    temperatures: tuple[float, ...] = (0.6, 1.0, 1.2)

    def __post_init__(self) -> None:
        check_least("", self, max_new_tokens=2, drafts=1)
        for case in cases(self.drafts):
            _ = case.rule.tree(case.draft_length)  # refuses what is too large
        for temperature in self.temperatures:
            _ = SamplingLaw(temperature)
        if self.drafts % 6:
            raise InputError(f"--drafts is {self.drafts}; choose a multiple of 6, which chains and trees can share")
        if min(self.temperatures, default=0.0) <= 0:
            raise InputError("--temperatures must name at least one, all above 0")

    @property
    def mesh(self) -> str:
        """One device."""
        return "data=1"


SMOKE = {
    "problem": {"task": "arithmetic", "problems": 16},
    "max_new_tokens": 24,
    "temperatures": (1.0,),
}
PRESETS: dict[str, Mapping[str, Any]] = {"default": {}, "smoke": SMOKE}


@dataclass(frozen=True)
class WatchedMatch(Match):
    """`Match` that also keeps the laws, which it does not need."""

    needs_laws: ClassVar[bool] = True


Law = Callable[[Float[Array, "r k v"], Float[Array, "r k v"]], Float[Array, "r k"]]


@dataclass(frozen=True)
class Case:
    """A row of the table: a rule, its depth, and the acceptance that theory gives a reached draft."""

    label: str
    draft_length: int
    rule: Rule
    theory: Law | None = None


def cases(drafts: int) -> list[Case]:
    """Every rule at this many drafted tokens per round."""
    return [
        Case("ratio", drafts, Ratio(), ratio_acceptance),
        Case("block", drafts, Block()),
        Case("match", drafts, WatchedMatch(), match_acceptance),
        # Of a law that is one token, min(p, q) is the policy's probability of that token.
        Case("match, argmax drafts", drafts, WatchedMatch(argmax_drafts=True), ratio_acceptance),
        Case("match, 2 branches", drafts // 2, Match(2)),
        Case("match, 3 branches", drafts // 3, Match(3)),
        *([Case("match, 2 branches, full", 2, Match(2, "full"))] if drafts == 6 else []),
    ]


@struct.dataclass
class Reached:
    """Drafts that were reached at each depth: how many, accepted, expected by theory, and its variance, `[k]`."""

    count: Float[Array, "k"]
    accepted: Float[Array, "k"]
    expected: Float[Array, "k"]
    variance: Float[Array, "k"]


def watch(case: Case, engine: RolloutEngine, rows: Rows, judged: Judged, sums: Reached) -> Reached:
    """Add a round's drafts."""
    if case.theory is None or judged.log_p is None or judged.choice.log_law is None:
        return sums
    depth = jnp.arange(case.draft_length, dtype=jnp.int32)[None]
    accepted = judged.proposed.accepted[:, None]
    room = rows.emitted[:, None] + depth < engine.config.max_new_tokens
    reached = ~rows.done[:, None] & (accepted >= depth) & room
    yes = case.theory(judged.log_p[:, :-1], judged.choice.log_law)
    parts = (jnp.ones_like(yes), (accepted > depth).astype(jnp.float32), yes, yes * (1.0 - yes))
    new = Reached(*(jnp.sum(jnp.where(reached, part, 0.0), axis=0) for part in parts))
    return jax.tree.map(jnp.add, sums, new)


def watched_rollout(case: Case, engine: RolloutEngine) -> Any:
    """A compiled rollout that also counts reached drafts."""

    def run(
        params: PolicyParams, draft: Any, prompts: Prompts, keys: UInt32[Array, "b 2"]
    ) -> tuple[Trajectory, Reached]:
        def body(state: tuple[Batch, Reached]) -> tuple[Batch, Reached]:
            batch, sums = state
            after, judged = engine.round(params, draft, batch)
            return after, watch(case, engine, batch.rows, judged, sums)

        none = jnp.zeros((case.draft_length,), jnp.float32)
        start = engine.start(params, draft, prompts, keys), Reached(none, none, none, none)
        batch, sums = lax.while_loop(lambda state: jnp.any(~state[0].rows.done), body, start)
        return batch.trajectory, sums

    return jax.jit(run)


def measure(case: Case, model: Model, law: SamplingLaw, prompts: Prompts, config: Config) -> dict[str, Any]:
    """One rule at one temperature."""
    rollout = RolloutConfig(config.max_new_tokens, 1, case.draft_length, law, case.rule, ladder=(1.0,))
    engine = RolloutEngine(model.policy, rollout, model.numerics, model.drafter)
    keys = sequence_keys(config.run.seed, "evaluation", 0, prompts.row_ids, jnp.zeros_like(prompts.lengths))
    trajectory, sums = jax.device_get(watched_rollout(case, engine)(model.params, model.draft, prompts, keys))
    stats, tokens = trajectory.stats, int(trajectory.lengths.sum())
    rounds = int(stats.rounds)
    survival = np.asarray(stats.accepted_at, np.float64) / max(rounds, 1)
    length, half_width = acceptance_interval(stats)
    row = {
        "temperature": law.temperature,
        "rule": case.label,
        "drafts": engine.config.tree.size - 1,
        "acceptance_length": length,
        "ci95": half_width,
        "first_draft": float(survival[0]),
        "entropy": float(trajectory.entropy_sum) / max(tokens, 1),
        "tokens": tokens,
        "rounds": rounds,
    }
    if case.theory is not None:
        seen = np.asarray(sums.count) > 0
        z = (sums.accepted - sums.expected)[seen] / np.sqrt(np.maximum(sums.variance[seen], 1e-9))
        row["accepted_of_reached"] = (sums.accepted[seen] / sums.count[seen]).tolist()
        row["theory"] = (sums.expected[seen] / sums.count[seen]).tolist()
        row["z"] = z.tolist()
    return row


def main(config: Config) -> None:
    """Measure every rule at every temperature, write and print."""
    check_run(config.run, SCRIPT, config.model, config.problem)
    model = open_model(replace(config.model, mesh=config.mesh), config.run, config.problem.problems)
    if model.drafter is None:
        raise InputError("--drafter is missing; give the draft head whose drafts are judged")
    workload = open_problems(config.problem, model.tokenizer)
    rollout = RolloutConfig(config.max_new_tokens, 1, 0, SamplingLaw(end_ids=workload.end_ids))
    RolloutEngine(model.policy, rollout, model.numerics).check_prompt_width(workload.prompt_width)
    out = open_output(config.run, config, SCRIPT)
    prompts, _ = workload.held_out(config.problem.split, config.problem.problems)
    model = model.initialised(config.run.seed)
    rows = []
    chosen = [(t, case) for t in config.temperatures for case in cases(config.drafts)]
    with progress("rules", len(chosen)) as advance:
        for temperature, case in chosen:
            law = SamplingLaw(temperature, end_ids=workload.end_ids)
            rows.append(measure(case, model, law, prompts, config))
            advance(1, f"{case.label} at {temperature}: {rows[-1]['acceptance_length']:.3f}")
    source = provenance(config.run.seed) | {"policy": config.model.policy, "numerics": model.numerics.mode}
    source |= {"problems": len(prompts.lengths)}
    write_results(out, rows, "Acceptance length by verification rule", source)
    worst = max((abs(z) for row in rows for z in row.get("z", [])), default=0.0)
    write_json(out / "summary.json", {"largest_z": worst, "tested": sum(len(r.get("z", [])) for r in rows)} | source)
    draw_acceptance_bars(rows, "temperature", "rule").savefig(out / "acceptance_by_rule.png", dpi=120)
    print(markdown_table([{k: v for k, v in row.items() if k not in ("theory", "z")} for row in rows]))
    print(f"largest difference from theory: {worst:.2f} standard errors", flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
