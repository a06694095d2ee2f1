"""How far drafts reach, by how the head was trained: losses, and steps of the training-time test.

For every seed, heads are trained on the same rollouts of the policy, each with one loss (`--losses`) and the unroll of
`--draft.unroll`, or with the first loss and one unroll of `--unrolls`, and measured on held-out prompts at every number
of drafts of `--measured`. `conditional_acceptance` at a depth is the share of the drafts there that were accepted, of
those whose predecessors were. Means over seeds with 95% intervals.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax

from experiments import train_draft
from experiments.common import check_least, run_main
from experiments.draft_stage import Rollouts
from experiments.inference import Model, open_model
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.seeds import acceptance_over_seeds, grouped, over_seeds
from specrl_jax.drafters.heads import HeadDrafter
from specrl_jax.errors import InputError
from specrl_jax.training.acceptance_plots import draw_depths
from specrl_jax.training.metrics import write_json

SCRIPT = "acceptance_by_depth"
Loss = Literal["kl", "tv", "lk"]


@dataclass(frozen=True)
class Config(train_draft.Config):
    """Options of the table: those of a training, and what is varied."""

    losses: tuple[Loss, ...] = ("kl", "tv", "lk")
    """Losses, each at --draft.unroll."""
    unrolls: tuple[int, ...] = (1, 3, 5)
    """Steps of the training-time test, each with the first loss."""
    measured: tuple[int, ...] = (3, 7)
    """Drafts per round."""
    seeds: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("", self, seeds=1)
        if not self.losses or min(self.measured, default=0) < 1 or min(self.unrolls, default=1) < 1:
            raise InputError("--losses and --measured must name at least one each, and all numbers be at least 1")
        if self.model.drafter is not None:
            raise InputError("--drafter is made by the table; leave it out")

    @property
    def variants(self) -> list[tuple[Loss, int]]:
        """Loss and unroll of every head."""
        both = [(loss, self.draft.unroll) for loss in self.losses]
        return list(dict.fromkeys([*both, *((self.losses[0], unroll) for unroll in self.unrolls)]))


PRESETS: dict[str, Mapping[str, Any]] = {
    "cpu": {"draft": {"prompts": 512, "steps": 80}, "max_new_tokens": 160},
    "gpu": {"draft": {"prompts": 8192, "steps": 1000}, "max_new_tokens": 1024},
    "smoke": train_draft.SMOKE | {"losses": ("kl", "lk"), "unrolls": (1,), "measured": (2,), "seeds": 1},
}


def one_seed(config: Config, model: Model, drafter: HeadDrafter, work: train_draft.Work, out: Path) -> list[dict]:
    """A row per head, number of drafts and kind of prompts."""
    assert model.params is not None
    stage = train_draft.stage_of(config, model, drafter)
    rollouts, key = Rollouts(partial(stage.corpus, model.params, work.train)), jax.random.key(config.run.seed)
    rows = []
    for loss, unroll in config.variants:
        changed = replace(config, draft=replace(config.draft, loss=loss, unroll=unroll))
        own = train_draft.stage_of(changed, model, drafter)
        folder = out / "checkpoints" / f"{loss}_{unroll}_{config.run.seed}"
        draft, _ = own.train(model.params, rollouts, key, folder)
        for k in config.measured:
            measured = replace(changed, eval_draft_length=k)
            for row in train_draft.measure(measured, model, drafter, draft, work, f"{loss}, {unroll} steps"):
                rows.append(row | {"loss": loss, "unroll": unroll, "seed": config.run.seed})
    return rows


def summed_up(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds."""
    table = []
    for own in grouped(found, "head", "prompts", "draft_length").values():
        names = ("head", "loss", "unroll", "prompts", "draft_length", "temperature")
        table.append({name: own[0][name] for name in names} | acceptance_over_seeds(own))
    return table


def main(config: Config) -> None:
    """Train, measure, write and print."""
    inputs = {f"eval-data-{i}": path for i, path in enumerate(config.eval_data)}
    check_output(config.run, SCRIPT, policy=config.model.policy, data=config.data, **inputs)
    model = open_model(config.model, config.run, config.draft.prompts)
    drafter = train_draft.new_drafter(config.head, model, config.draft.vocab_size)
    work = train_draft.checked_work(replace(config, eval_draft_length=max(config.measured)), model, drafter)
    out = open_output(config.run, config, SCRIPT)
    model = model.initialised(config.run.seed)
    found = over_seeds(
        config.run.seed,
        config.seeds,
        lambda seed: one_seed(replace(config, run=replace(config.run, seed=seed)), model, drafter, work, out),
        lambda rows: f"{rows[-1]['head']} accepts {rows[-1]['acceptance_length']:.2f} tokens a round",
    )
    table, source = summed_up(found), provenance(config.run.seed) | {"policy": config.model.policy}
    write_results(out, table, "Acceptance by depth", source)
    write_json(out / "summary.json", {"by_seed": found} | source)
    first, deepest = table[0]["prompts"], max(config.measured)
    shown = [row for row in table if row["prompts"] == first and row["draft_length"] == deepest]
    draw_depths(shown, "head").savefig(out / "acceptance_by_depth.png", dpi=120)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
