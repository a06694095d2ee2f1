"""The draft-init table: what a draft head should have learned from before it drafts.

For every seed a head is trained on the policy's answers to in-domain prompts, another, as long, on its answers to other
prompts, and a third not at all. Each is measured on held-out prompts of both kinds, as it is (offline) and after it has
gone on learning from fresh in-domain answers (adapted), as a head does that is trained online during RL. Acceptance
lengths are means over seeds with 95% intervals; beside them stand those of NVIDIA (arXiv 2604.26779, Qwen3-8B: drafts
trained on DAPO, in-domain, and on UltraChat; RL-Zero and RL-Think).

`--data` and `--other-data` name files with prompts, as data/gsm8k and data/chat; without them the prompts are the
arithmetic task's, and random tokens in their place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import train_draft
from experiments.common import check_least, run_main
from experiments.draft_stage import Rollouts
from experiments.inference import Model, ProblemOptions, open_model, open_problems
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.seeds import grouped, mean_over_seeds, over_seeds
from experiments.setup import check_draft_batches
from experiments.train_draft import TrainingOptions, Work
from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.heads import HeadDrafter
from specrl_jax.errors import InputError
from specrl_jax.training.metrics import write_json

SCRIPT = "draft_init"
IN_DOMAIN, OTHER, UNTRAINED = "in-domain", "other", "untrained"
# Acceptance lengths at three drafts, RL-Zero and RL-Think, by the draft's training data and mode.
PAPER = {
    (IN_DOMAIN, "offline"): (3.32, 2.77),
    (IN_DOMAIN, "adapted"): (3.29, 2.74),
    (OTHER, "offline"): (2.88, 2.40),
    (OTHER, "adapted"): (3.04, 2.55),
}


@dataclass(frozen=True)
class Config(TrainingOptions):
    """Options of the table: those of a training, and what is compared."""

    data: str | None = None
    """In-domain prompts: a file; by default the arithmetic task's."""
    other_data: str | None = None
    """Other prompts: a file; by default random tokens."""
    seeds: int = 3
    adapt_prompts: int = 512
    """Fresh in-domain prompts that a head goes on learning from."""
    adapt_steps: int = 75
    eval_problems: int = 128
    """Held-out prompts of each kind."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("", self, seeds=2, adapt_prompts=1, adapt_steps=1)
        if (self.data is None) != (self.other_data is None):
            raise InputError("--data and --other-data belong together; give both, or neither")
        if self.model.drafter is not None:
            raise InputError("--drafter is made by the table; leave it out")

    def training(self, seed: int, prompts: int, steps: int) -> TrainingOptions:
        """One training of one seed."""
        return replace(self, run=replace(self.run, seed=seed), draft=replace(self.draft, prompts=prompts, steps=steps))


PRESETS: dict[str, Mapping[str, Any]] = {
    "cpu": {"draft": {"prompts": 1024, "steps": 150}, "max_new_tokens": 128},
    "gpu": {"draft": {"prompts": 8192, "steps": 1000}, "max_new_tokens": 1024, "adapt_prompts": 2048},
    "smoke": {
        "seeds": 2,
        "adapt_prompts": 8,
        "adapt_steps": 2,
        "eval_problems": 4,
        "max_new_tokens": 16,
        "draft": {"prompts": 8, "steps": 2, "batch": 4, "microbatch": {"rows": 4, "widths": (1.0,)}, "unroll": 2},
    },
}


@dataclass(frozen=True)
class Prepared:
    """Prompts to train on, to adapt to, and held out by kind."""

    in_domain: Prompts
    other: Prompts
    fresh: Prompts
    held_out: Mapping[str, Prompts]


def _from_file(config: Config, path: str, model: Model, wanted: int) -> tuple[Prompts, Prompts]:
    """The first prompts of a file, and the last ones, held out."""
    options = ProblemOptions("jsonl", path, max_prompt_tokens=config.max_prompt_tokens)
    problems = open_problems(options, model.tokenizer)
    count = problems.count - config.eval_problems  # type: ignore[union-attr]  # of a jsonl task
    if count < wanted:
        raise InputError(
            f"{path} has {count + config.eval_problems} prompts; {wanted} to train on and {config.eval_problems} to be "
            "measured on are wanted: give more, or lower --draft.prompts, --adapt-prompts or --eval-problems"
        )
    return problems.take(np.arange(wanted))[0], problems.held_out("dev", config.eval_problems)[0]  # type: ignore[union-attr]


def _random_like(prompts: Prompts, vocab_size: int, seed: int) -> Prompts:
    """Random tokens in the places of prompts; other rows, so that the noise is another."""
    tokens = np.random.default_rng(seed).integers(2, vocab_size, prompts.tokens.shape)
    return replace(prompts, tokens=jnp.asarray(tokens, jnp.int32), row_ids=prompts.row_ids + jnp.uint32(10**6))


def prepare(config: Config, model: Model) -> Prepared:
    """All prompts; InputError where there are too few of them."""
    count, fresh = config.draft.prompts, config.adapt_prompts
    if config.data is not None and config.other_data is not None:
        own, own_held_out = _from_file(config, config.data, model, count + fresh)
        other, other_held_out = _from_file(config, config.other_data, model, count)
    else:
        task = open_problems(ProblemOptions("arithmetic"), model.tokenizer)
        own = task.draft_prompts(count + fresh)  # type: ignore[union-attr]  # of the arithmetic task
        own_held_out = task.held_out("test", config.eval_problems)[0]
        size = len(model.tokenizer)
        other = _random_like(jax.tree.map(lambda x: x[:count], own), size, config.run.seed)
        other_held_out = _random_like(own_held_out, size, config.run.seed + 1)
    first, rest = (jax.tree.map(lambda x, part=part: x[part], own) for part in (slice(count), slice(count, None)))
    return Prepared(first, other, rest, {IN_DOMAIN: own_held_out, OTHER: other_held_out})


def one_seed(config: Config, model: Model, drafter: HeadDrafter, prompts: Prepared, seed: int, out: Path) -> list[dict]:
    """What every head of a seed accepts: a flat object per head, mode and kind of prompts."""
    whole = config.training(seed, config.draft.prompts, config.draft.steps)
    stage, key = train_draft.stage_of(whole, model, drafter), jax.random.key(seed)
    more = train_draft.stage_of(config.training(seed, config.adapt_prompts, config.adapt_steps), model, drafter)
    assert model.params is not None
    work, rows = Work(prompts.in_domain, prompts.held_out), []
    kinds = {IN_DOMAIN: prompts.in_domain, OTHER: prompts.other}
    corpora = {kind: Rollouts(partial(stage.corpus, model.params, own)) for kind, own in kinds.items()}
    fresh = Rollouts(partial(more.corpus, model.params, prompts.fresh))

    def note(init: str, mode: str, draft: Any, seconds: float) -> None:
        for row in train_draft.measure(whole, model, drafter, draft, work, init):
            rows.append(row | {"mode": mode, "seed": seed, "training_seconds": seconds})

    for init in (IN_DOMAIN, OTHER, UNTRAINED):
        folder = out / "checkpoints" / f"{init}_{seed}"
        if init == UNTRAINED:
            draft, seconds = stage.fresh(model.params, corpora[IN_DOMAIN](), key), 0.0
        else:
            draft, seconds = stage.train(model.params, corpora[init], key, folder)
        note(init, "offline", draft, seconds)
        adapted = folder.with_name(f"{folder.name}_adapted")
        draft, adapting = more.train(model.params, fresh, key, adapted, draft)
        note(init, "adapted", draft, seconds + adapting)
    return rows


def summed_up(config: Config, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds."""
    table = []
    for (init, mode, kind), own in grouped(found, "head", "mode", "prompts").items():
        length, half_width = mean_over_seeds([row["acceptance_length"] for row in own])
        zero, think = PAPER.get((init, mode), (None, None)) if kind == IN_DOMAIN else (None, None)
        table.append(
            {
                "init": init,
                "mode": mode,
                "prompts": kind,
                "draft_length": config.eval_draft_length,
                "acceptance_length": length,
                "ci95": half_width,
                "entropy": float(np.mean([row["entropy"] for row in own])),
                "training_seconds": float(np.mean([row["training_seconds"] for row in own])),
                "seeds": len(own),
                "paper_rl_zero": zero,
                "paper_rl_think": think,
            }
        )
    return table


def gap_closed(table: list[dict[str, Any]]) -> float:
    """Share of the in-domain head's lead, on in-domain prompts, that the other head makes up by adapting."""
    at = {(row["init"], row["mode"]): row["acceptance_length"] for row in table if row["prompts"] == IN_DOMAIN}
    lead = at[IN_DOMAIN, "offline"] - at[OTHER, "offline"]
    return float((at[OTHER, "adapted"] - at[OTHER, "offline"]) / lead) if lead else float("nan")


def main(config: Config) -> None:
    """Train, measure, write and print."""
    check_output(config.run, SCRIPT, policy=config.model.policy, data=config.data, other_data=config.other_data)
    model = open_model(config.model, config.run, config.draft.prompts)
    drafter = train_draft.new_drafter(config.head, model, config.draft.vocab_size)
    for count in (config.draft.prompts, config.adapt_prompts):
        check_draft_batches(config.draft, count, model.mesh)
    evaluated = train_draft.engine_of(config, model, drafter, 1)
    prompts = prepare(config, model)
    for part in (prompts.in_domain, prompts.other, *prompts.held_out.values()):
        evaluated.check_prompt_width(part.tokens.shape[1])
    out = open_output(config.run, config, SCRIPT)
    model = model.initialised(config.run.seed)
    found = over_seeds(
        config.run.seed,
        config.seeds,
        lambda seed: one_seed(config, model, drafter, prompts, seed, out),
        lambda rows: f"in-domain head accepts {rows[0]['acceptance_length']:.2f} tokens a round",
    )
    table, source = summed_up(config, found), provenance(config.run.seed)
    write_results(out, table, "Draft init", source)
    write_json(out / "summary.json", {"gap_closed": gap_closed(table), "by_seed": found} | source)
    print(markdown_table(table), flush=True)
    print(f"adapting closes {gap_closed(table):.2f} of the gap", flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
