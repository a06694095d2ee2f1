"""Train a draft head offline on rollouts of its policy, and measure how many drafts are accepted.

`python -m experiments.train_draft --policy P --task jsonl --data D` lets the policy answer prompts, trains a head on
the answers (a new EAGLE-3, MTP or block drafter, or that of `--drafter`), saves it in OUT/drafter and rolls out
held-out prompts with it: acceptance length, its 95% interval over rounds, and survival by depth, of the new head and
of the one it started from. `--eval-data` names other prompts to be measured on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from transformers import PreTrainedTokenizerFast

from experiments.common import Run, RunOptions, check_least, run_main
from experiments.draft_stage import DraftStage, DraftStageOptions, Rollouts
from experiments.inference import Model, ModelFlags, ModelOptions, ProblemOptions, open_model, open_problems
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.rollout_options import LawFlags, LawOptions
from experiments.setup import check_draft_batches, draft_head_config
from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.block_params import BlockConfig
from specrl_jax.drafters.heads import (
    HeadConfig,
    HeadDrafter,
    as_head,
    beside_its_policy,
    drafter_for_head,
    save_drafter,
)
from specrl_jax.drafters.mtp_attached import WITH_EXPERTS, attached_config
from specrl_jax.drafters.mtp_layouts import LayoutName
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import save_policy
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.training.metrics import write_json
from specrl_jax.training.sampling import Sampler, sample_all
from specrl_jax.training.speculation import acceptance_figures
from specrl_jax.training.workloads import end_ids

SCRIPT = "train_draft"


@dataclass(frozen=True)
class HeadOptions:
    """A new head."""

    kind: Literal["eagle3", "mtp", "block"] = "eagle3"
    """eagle3: one draft after the other; mtp: so too, by one more layer of the policy (multi-token prediction), which
    starts as its last; block: all of a round at once (DFlash, DSpark)."""
    layout: LayoutName = "mimo"
    """Family whose MTP heads it is like: mimo is the policy's own layer."""
    experts: int = 8
    """Experts of an MTP head whose layout has some."""
    experts_per_token: int = 2
    """How many of them a token reads."""
    layers: int = 2
    """Layers of a block drafter."""
    block_size: int = 8
    """Slots of a block: the newest token and those to be filled in."""
    sample_from_anchor: bool = True
    """Whether the newest token's slot drafts too (DSpark), so that a block has as many drafts as slots."""
    markov_rank: int = 64
    """Rank of the correction of a draft by the one before; 0 for none (DFlash)."""
    confidence: bool = True
    """Whether a block drafter says how likely each draft is to be accepted."""
    mask_token_id: int | None = None
    """Token that stands in slots to be filled in; by default the tokenizer's padding, or end, token."""
    norm_before_fc: bool = False
    """Normalise the policy's features together."""
    fc_norm: bool = False
    """Normalise each of the policy's features (EAGLE-3.1)."""
    norm_before_residual: bool = False
    norm_output: bool = False
    """Feed the head's output back after its final norm (EAGLE-3.1)."""
    qk_norm: bool = False

    def __post_init__(self) -> None:
        check_least("head", self, layers=1, block_size=2, markov_rank=0, experts=2, experts_per_token=1)
        own = ("layers", "block_size", "sample_from_anchor", "markov_rank", "confidence", "mask_token_id")
        flags = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "qk_norm")
        experts, mtp = ("experts", "experts_per_token"), ("layout", "experts", "experts_per_token")
        unread = () if self.layout in WITH_EXPERTS else experts
        foreign = {"eagle3": own + mtp, "mtp": own + flags + unread, "block": flags + mtp}
        for name in foreign[self.kind]:
            if getattr(self, name) != getattr(type(self), name):
                flag = f"--head.{name.replace('_', '-')}"
                kind = f"--head.kind {self.kind}" + (f" --head.layout {self.layout}" if self.kind == "mtp" else "")
                raise InputError(f"{flag} does not belong to {kind}; leave one of them out")

    def config(self, policy: PolicyConfig, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> HeadConfig:
        """The head for a policy, over at most `vocab_size` of its tokens; InputError when a size does not fit."""
        eagle3 = draft_head_config(policy, vocab_size)
        if self.kind == "eagle3":
            flags = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "qk_norm")
            return replace(eagle3, **{flag: getattr(self, flag) for flag in flags})
        if self.kind == "mtp":
            size = eagle3.draft_vocab_size
            return attached_config(policy, self.layout, size, self.experts, self.experts_per_token)
        mask = self.mask_token_id
        if mask is None:
            mask = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_ids(tokenizer)[0]
        backbone = replace(policy, family="qwen3", num_layers=self.layers, tie_embeddings=False)
        return BlockConfig(
            backbone=backbone,
            draft_vocab_size=eagle3.draft_vocab_size,
            boundaries=eagle3.boundaries,
            block_size=self.block_size,
            mask_token_id=mask,
            sample_from_anchor=self.sample_from_anchor,
            markov_rank=self.markov_rank,
            confidence=self.confidence,
        )


@dataclass(frozen=True)
class TrainingOptions:
    """A head, how it is trained and how it is measured, whatever the prompts."""

    run: Run = RunOptions()
    model: ModelFlags = ModelOptions()
    eval_problems: int = 64
    """Prompts to be measured on, of each kind."""
    eval_draft_length: int = 3
    max_prompt_tokens: int = 256
    max_new_tokens: int = 256
    together: int = 256
    """Responses rolled out at the same time."""
    law: LawFlags = LawOptions()
    draft: DraftStageOptions = DraftStageOptions()
    head: Annotated[HeadOptions, tyro.conf.arg(name="head")] = field(default_factory=HeadOptions)

    def __post_init__(self) -> None:
        check_least("", self, eval_problems=1, eval_draft_length=1, max_prompt_tokens=1, together=1)

    @property
    def mesh(self) -> str:
        """Devices asked for."""
        return self.model.mesh


@dataclass(frozen=True)
class Config(TrainingOptions):
    """Options of a training."""

    task: Literal["arithmetic", "jsonl"] | None = None
    data: str | None = None
    """Prompts of a jsonl task, answered by the policy: a file, or a dataset on the Hugging Face hub."""
    layout: str | None = None
    """gsm8k, math, aime, dapo, chat or generic; told from the fields when left out."""
    subset: str | None = None
    """Subset of a dataset on the hub."""
    data_split: str = "train"
    """Split of a dataset on the hub."""
    eval_data: tuple[str, ...] = ()
    """Files with other prompts to be measured on; by default prompts of --data that were not trained on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.drafter is not None and self.head != HeadOptions():
            raise InputError("--head options are for a new head, and --drafter names one; leave one of them out")
        if self.eval_data and self.task != "jsonl":
            raise InputError("--eval-data belongs to --task jsonl; give both")

    def problems(self, data: str | None, layout: str | None) -> ProblemOptions:
        """Prompts of a file."""
        return ProblemOptions(
            task=self.task,
            data=data,
            layout=layout,
            subset=self.subset,
            data_split=self.data_split,
            max_prompt_tokens=self.max_prompt_tokens,
        )


SMOKE = {
    "task": "arithmetic",
    "max_new_tokens": 24,
    "eval_problems": 4,
    "draft": {"prompts": 16, "steps": 4, "batch": 8, "microbatch": {"rows": 4, "widths": (1.0,)}, "unroll": 2},
}
PRESETS: dict[str, Mapping[str, Any]] = {"default": {}, "smoke": SMOKE}


@dataclass(frozen=True)
class Work:
    """Prompts to train on, and to be measured on by name."""

    train: Prompts
    held_out: Mapping[str, Prompts]


def new_drafter(head: HeadOptions, model: Model, vocab_size: int) -> HeadDrafter:
    """A head to be made, over at most `vocab_size` tokens; InputError when a size does not fit the policy."""
    return drafter_for_head(head.config(model.policy, model.tokenizer, vocab_size))


def checked_work(config: Config, model: Model, drafter: HeadDrafter) -> Work:
    """As `open_work`; InputError too when the prompts are too few or too long to be trained and measured with."""
    evaluated = engine_of(config, model, drafter, 1)  # refuses more drafts than the drafter has
    check_draft_batches(config.draft, config.draft.prompts, model.mesh)  # of a jsonl task there may be fewer
    work = open_work(config, model)
    check_draft_batches(config.draft, len(work.train.lengths), model.mesh)
    for prompts in (work.train, *work.held_out.values()):
        evaluated.check_prompt_width(prompts.tokens.shape[1])
    return work


def open_work(config: Config, model: Model) -> Work:
    """All prompts; InputError when there are too few, or a file cannot be used."""
    problems = open_problems(config.problems(config.data, config.layout), model.tokenizer)
    name = Path(config.data).stem if config.data else "arithmetic"
    if config.task == "arithmetic":
        draft_prompts = problems.draft_prompts(config.draft.prompts)  # type: ignore[union-attr]  # of the arithmetic task
        return Work(draft_prompts, {name: problems.held_out("test", config.eval_problems)[0]})
    count = problems.count  # type: ignore[union-attr]  # of a jsonl task
    kept = 0 if config.eval_data else config.eval_problems
    trained = min(config.draft.prompts, count - kept)
    if trained < 1:
        raise InputError(f"{config.data} has {count} prompts, all of them wanted by --eval-problems; lower it")
    train = problems.take(np.arange(trained))[0]  # type: ignore[union-attr]
    if not config.eval_data:
        return Work(train, {name: problems.held_out("dev", config.eval_problems)[0]})
    held_out = {}
    for path in config.eval_data:
        found = open_problems(config.problems(path, None), model.tokenizer)
        held_out[path] = found.held_out("test", config.eval_problems)[0]
    return Work(train, held_out)


def engine_of(config: TrainingOptions, model: Model, drafter: HeadDrafter | None, samples: int) -> RolloutEngine:
    """A rollout with or without the head."""
    law = config.law.law(end_ids(model.tokenizer))
    length = 0 if drafter is None else config.eval_draft_length
    return RolloutEngine(
        model.policy, RolloutConfig(config.max_new_tokens, samples, length, law), model.numerics, drafter
    )


def measure(
    config: TrainingOptions, model: Model, drafter: HeadDrafter, draft: Any, work: Work, which: str
) -> list[dict[str, Any]]:
    """A row for every set of held-out prompts."""
    rows = []
    for name, prompts in work.held_out.items():
        engine = engine_of(config, model, drafter, 1)
        batch = min(len(prompts.lengths), config.together)
        sampler = Sampler(engine, model.mesh, "evaluation", config.run.seed, batch)
        trajectory = sample_all(sampler, model.params, draft, prompts)  # type: ignore[arg-type]  # initialised
        row = {
            "head": which,
            "prompts": name,
            "draft_length": config.eval_draft_length,
            "temperature": config.law.temperature,
        }
        rows.append(row | acceptance_figures(trajectory))
    return rows


def stage_of(config: TrainingOptions, model: Model, drafter: HeadDrafter) -> DraftStage:
    """The training of a head."""
    engine = engine_of(config, model, None, config.draft.samples)
    optimizer = config.draft.optimizer.for_updates(config.draft.steps)
    training = config.draft.training(Scorer(model.policy, engine.config.law, model.numerics), drafter.config, optimizer)
    return DraftStage(config.draft, engine, training, drafter, model.mesh, config.run.seed, config.together)


def main(config: Config) -> None:
    """Check everything, roll out, train, save, measure and print."""
    inputs = {"policy": config.model.policy, "drafter": config.model.drafter, "data": config.data}
    check_output(config.run, SCRIPT, **inputs, **{f"eval-data-{i}": path for i, path in enumerate(config.eval_data)})
    model = open_model(config.model, config.run, config.draft.prompts)
    if config.model.drafter is None or model.drafter is None:
        drafter = new_drafter(config.head, model, config.draft.vocab_size)
    else:
        drafter = as_head(model.drafter)
    work = checked_work(config, model, drafter)
    out = open_output(config.run, config, SCRIPT)
    model = model.initialised(config.run.seed)
    assert model.params is not None
    stage = stage_of(config, model, drafter)
    start: Any = model.draft if config.model.drafter is not None else None
    table = [] if start is None else measure(config, model, drafter, start, work, "before")
    key = jax.random.key(config.run.seed)
    rollouts = Rollouts(partial(stage.corpus, model.params, work.train))
    draft, _ = stage.train(model.params, rollouts, key, out / "checkpoints" / "draft", start)
    save_drafter(out / "drafter", drafter, draft)
    beside = beside_its_policy(config.model.policy, drafter, draft)
    if beside is not None:
        save_policy(out / "policy", model.params, model.policy, model.tokenizer, head=beside)
    table += measure(config, model, drafter, draft, work, "after")
    source = provenance(config.run.seed)
    write_results(out, table, "Acceptance of a draft head", source)
    write_json(out / "summary.json", {"acceptance_length": table[-1]["acceptance_length"]} | source)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
