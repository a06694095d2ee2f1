"""Where drafts should come from: every drafter beside the others, on the same prompts and with the same noise.

For every seed an EAGLE-3 head, an MTP head and a block drafter are trained on the same rollouts of the policy. Then
held-out prompts are answered again and again, with other noise. The first epoch is what suffix drafts may remember; the
later ones are timed with every drafter, in turn: n-gram drafts (the text itself), suffix drafts (its siblings too; and
the first epoch too), the heads, and EAGLE-3 with suffix drafts. Text drafters propose nothing where they find nothing;
`tokens_per_forward` counts such rounds, the acceptance length does not. `speedup` is over no drafts, and `paid_back`
the number of such rollouts after which it has made up for the training of the head, rollouts included. Means over seeds
with 95% intervals; beside them NVIDIA's (arXiv 2604.26779, Qwen3-8B, three drafts: generation of RL-Zero and RL-Think).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import bench_work, train_draft
from experiments.bench_rollout import Arm
from experiments.common import check_least, run_main
from experiments.draft_stage import Rollouts
from experiments.expand import size
from experiments.inference import Model, open_model
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.seeds import grouped, mean_over_seeds, over_seeds
from experiments.train_draft import HeadOptions, Work
from experiments.turns import in_turn
from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.combined import CombinedDrafter, params_for
from specrl_jax.drafters.heads import HeadDrafter
from specrl_jax.drafters.suffix import History, SuffixDrafter, init_history, remember
from specrl_jax.errors import InputError
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.training.acceptance_plots import draw_acceptance_bars
from specrl_jax.training.metrics import write_json
from specrl_jax.training.sampling import concatenate
from specrl_jax.training.speculation import acceptance_figures
from specrl_jax.training.workloads import end_ids

SCRIPT = "draft_methods"
NONE, NGRAM, EAGLE3 = "none", "n-gram", "EAGLE-3"
# Acceptance length and speed-up of the generation at three drafts: RL-Zero, RL-Think (table 2).
PAPER = {NGRAM: ((2.47, 0.7), (2.05, 0.5)), EAGLE3: ((3.32, 1.8), (2.77, 1.5))}


@dataclass(frozen=True)
class Config(train_draft.Config):
    """Options of the table: those of a training, and how the drafters are compared."""

    rows: tuple[int, ...] = (1, 16)
    """Responses decoded at the same time."""
    samples: int = 4
    """Responses to each prompt."""
    repeats: int = 3
    """Rollouts with every drafter for each seed, in turn."""
    seeds: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("", self, seeds=1, samples=1, repeats=1)
        if min(self.rows, default=0) < 1:
            raise InputError("--rows must name at least one number, all of them at least 1")
        if self.model.drafter is not None or self.head.kind != "eagle3":
            raise InputError("--drafter and --head.kind are chosen by the table; leave them out")
        if self.eval_data:
            raise InputError("--eval-data is not for this table, which holds prompts of --data back; leave it out")

    @property
    def mesh(self) -> str:
        """One device."""
        return "data=1"


PRESETS: dict[str, Mapping[str, Any]] = {
    "cpu": {"draft": {"prompts": 512, "steps": 100}, "max_new_tokens": 160, "eval_problems": 16},
    "gpu": {"draft": {"prompts": 8192, "steps": 1000}, "max_new_tokens": 1024, "rows": (8, 64)},
    "smoke": train_draft.SMOKE | {"rows": (2,), "samples": 2, "repeats": 1, "seeds": 1},
}


@dataclass(frozen=True)
class Method:
    """drafter, params: where drafts come from. seconds: of training, with its rollouts. parameters: those trained."""

    drafter: Any
    params: Any
    seconds: float = 0.0
    parameters: int = 0


def heads_of(config: Config, model: Model) -> dict[str, HeadDrafter]:
    """The heads to be trained; InputError where one does not fit."""
    block = HeadOptions(kind="block", layers=1, block_size=max(2, config.eval_draft_length), confidence=False)
    made = {EAGLE3: config.head, "MTP": HeadOptions(kind="mtp"), "block": block}
    return {name: train_draft.new_drafter(head, model, config.draft.vocab_size) for name, head in made.items()}


def trained(config: Config, model: Model, heads: Mapping[str, HeadDrafter], work: Work, out: Path) -> dict[str, Method]:
    """Every head after its training."""
    assert model.params is not None
    seed, made = config.run.seed, {}
    first = train_draft.stage_of(config, model, heads[EAGLE3])
    rollouts = Rollouts(partial(first.corpus, model.params, work.train))
    for name, drafter in heads.items():
        stage = train_draft.stage_of(config, model, drafter)
        draft, seconds = stage.train(
            model.params, rollouts, jax.random.key(seed), out / "checkpoints" / f"{name}_{seed}"
        )
        made[name] = Method(drafter, draft, seconds, size(draft.weights))
    return made


def methods_of(heads: Mapping[str, Method], history: History) -> dict[str, Method]:
    """All that are compared, the rollout without drafts first."""
    suffix, eagle3 = SuffixDrafter(), heads[EAGLE3]
    both = CombinedDrafter(eagle3.drafter, suffix)
    return {
        NONE: Method(None, None),
        NGRAM: Method(SuffixDrafter(siblings=False), None),
        "suffix, siblings": Method(suffix, None),
        "suffix, siblings and last epoch": Method(suffix, history),
        **heads,
        "EAGLE-3 and suffix": replace(eagle3, drafter=both, params=params_for(both, eagle3.params, history)),
    }


def arm_of(config: Config, model: Model, method: Method, prompts: Prompts, rows: int, epoch: int) -> Arm:
    """Rollouts of some prompts, with the noise of `epoch` and those that follow."""
    law = config.law.law(end_ids(model.tokenizer))
    length = 0 if method.drafter is None else config.eval_draft_length
    settings = RolloutConfig(config.max_new_tokens, config.samples, length, law, rows=rows)
    engine = RolloutEngine(model.policy, settings, model.numerics, method.drafter)
    limits = np.full(len(prompts.lengths) * config.samples, config.max_new_tokens, np.int32)
    assert model.params is not None
    work = bench_work.Work(prompts, limits, seed=config.run.seed)
    return Arm(engine, model.params, method.params, work, epoch=epoch)


def one_seed(config: Config, model: Model, heads: Mapping[str, HeadDrafter], work: Work, out: Path) -> list[dict]:
    """A row per number of live rows and drafter."""
    (prompts,) = work.held_out.values()
    made, found = trained(config, model, heads, work, out), []
    for rows in config.rows:
        count = max(1, min(len(prompts.lengths), -(-rows // config.samples)))
        own: Prompts = jax.tree.map(lambda x, count=count: x[:count], prompts)
        earlier = arm_of(config, model, Method(None, None), own, rows, epoch=0)
        _ = earlier()
        history = init_history(np.asarray(own.row_ids), config.samples, config.max_new_tokens)
        history = jax.jit(remember)(history, own.row_ids, earlier.turns[0].tokens, earlier.turns[0].lengths)
        methods = methods_of(made, history)
        arms = {name: arm_of(config, model, method, own, rows, epoch=1) for name, method in methods.items()}
        seconds = in_turn(arms, config.repeats, discard=1)
        for name, method in methods.items():
            row: dict[str, Any] = {"rows": rows, "method": name, "seed": config.run.seed}
            row |= {"seconds": float(np.median(seconds[name])), "training_seconds": method.seconds}
            row |= {"speedup": float(np.median(seconds[NONE] / seconds[name])), "parameters": method.parameters}
            if method.drafter is not None:
                row |= acceptance_figures(concatenate(arms[name].turns[-config.repeats :]))
            found.append(row)
    return found


def summed_up(config: Config, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds."""
    table = []
    groups = grouped(found, "rows", "method")
    for (rows, name), own in groups.items():
        typical = {field: float(np.mean([row[field] for row in own])) for field in ("seconds", "training_seconds")}
        plain = np.mean([row["seconds"] for row in groups[rows, NONE]])
        speedup = mean_over_seeds([row["speedup"] for row in own])
        row = {"rows": rows, "method": name, "draft_length": config.eval_draft_length if name != NONE else 0}
        if name != NONE:
            length = mean_over_seeds([one["acceptance_length"] for one in own])
            row |= {"acceptance_length": length[0], "ci95": length[1]}
            forward = mean_over_seeds([one["tokens_per_forward"] for one in own])
            row |= {"tokens_per_forward": forward[0], "tokens_per_forward_ci95": forward[1]}
        row |= {"speedup": speedup[0], "speedup_ci95": speedup[1]} | typical | {"parameters": own[0]["parameters"]}
        won = float(plain) - typical["seconds"]
        row |= {"paid_back": typical["training_seconds"] / won if won > 0 else None, "seeds": len(own)}
        if name in PAPER:
            for run, (accepted, faster) in zip(("rl_zero", "rl_think"), PAPER[name], strict=True):
                row |= {f"paper_{run}_acceptance_length": accepted, f"paper_{run}_speedup": faster}
        table.append(row)
    return table


def main(config: Config) -> None:
    """Train, measure, write and print."""
    check_output(config.run, SCRIPT, policy=config.model.policy, data=config.data)
    model = open_model(replace(config.model, mesh=config.mesh), config.run, config.draft.prompts)
    heads = heads_of(config, model)
    work = train_draft.checked_work(config, model, heads[EAGLE3])
    out = open_output(config.run, config, SCRIPT)
    model = model.initialised(config.run.seed)
    found = over_seeds(
        config.run.seed,
        config.seeds,
        lambda seed: one_seed(replace(config, run=replace(config.run, seed=seed)), model, heads, work, out),
        lambda rows: f"{rows[-1]['method']}: {rows[-1]['speedup']:.2f}x",
    )
    table, source = summed_up(config, found), provenance(config.run.seed) | {"policy": config.model.policy}
    write_results(out, table, "Draft methods", source)
    write_json(out / "summary.json", {"by_seed": found} | source)
    drafting = [row for row in table if row["method"] != NONE]
    draw_acceptance_bars(drafting, "rows", "method").savefig(out / "draft_methods.png", dpi=120)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
