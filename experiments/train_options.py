"""Options of `train_grpo`: the configuration, its presets, and what can be refused without loading anything."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from experiments.common import Run, RunOptions, check_least
from experiments.draft_stage import DraftStageOptions
from experiments.rollout_options import LawFlags, LawOptions, SpeculationFlags, SpeculationOptions
from experiments.setup import PolicyShape
from specrl_jax.errors import InputError
from specrl_jax.models.config import Dtype
from specrl_jax.rl.advantages import Baseline
from specrl_jax.rl.losses import LossConfig
from specrl_jax.rl.microbatches import MicrobatchConfig
from specrl_jax.rl.optimizers import OptimizerConfig
from specrl_jax.rl.overlong import Truncated
from specrl_jax.training.metrics import check_reporters


@dataclass(frozen=True)
class WarmUp:
    """Supervised training of a policy made from nothing."""

    steps: int = 1500
    """Updates at most."""
    stop_loss: float | None = 0.05
    """End when the mean loss of a dispatch has come down to this, in nats per token; None: do all steps."""
    batch: int = 40
    """Sequences per update."""
    microbatch: MicrobatchConfig = MicrobatchConfig(4, (0.2, 0.27, 0.33, 0.5, 0.75, 1.0))
    optimizer: OptimizerConfig = OptimizerConfig(0.02, name="muon", warmup_steps=20, adam_learning_rate=0.004)
    focus: float = 0.0
    """Share of each batch drawn from the RL examples (jsonl tasks)."""
    data: tuple[str, ...] = ()
    """More examples to learn from, of any layout: files, or datasets on the Hugging Face hub (jsonl tasks)."""

    def __post_init__(self) -> None:
        check_least("warmup", self, steps=0, batch=1)
        if not 0.0 <= self.focus <= 1.0:
            raise InputError(f"--warmup.focus is {self.focus}; choose a share from 0 to 1")


@dataclass(frozen=True)
class DraftHead(DraftStageOptions):
    """Training of the draft head on the policy's rollouts, before RL and during it."""

    online: bool = True
    """Keep training it on the policy's forwards during RL."""
    online_sequences: int = 2
    """Sequences per policy microbatch that train it."""
    online_microbatches: int = 0
    """Policy microbatches per update that leave such sequences, whose features wait in memory; 0: all."""
    online_optimizer: OptimizerConfig = OptimizerConfig(0.0001)
    average: float = 0.0
    """Draft with the moving average of the weights that are trained online, which keeps this share of itself at every
    update; 0: with those themselves."""
    tolerance: float = 0.0
    """Train online only while the acceptance length is below its best by more than this share; 0: always."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("draft", self, online_sequences=1, online_microbatches=0)
        for name in ("average", "tolerance"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"--draft.{name} is {getattr(self, name)}; choose a share from 0 to below 1")


@dataclass(frozen=True)
class Config:
    """Options of a run."""

    run: Run = RunOptions()
    task: Literal["arithmetic", "jsonl"] = "arithmetic"
    data: str | None = None
    """Training examples of a jsonl task: a file, or a dataset on the Hugging Face hub."""
    subset: str | None = None
    """Subset of a dataset on the hub."""
    data_split: str = "train"
    """Split of --data, where it is a folder or on the hub."""
    eval_data: str | None = None
    """Held-out examples of a jsonl task; by default the training examples that RL does not use."""
    eval_split: str = "test"
    """Split of --eval-data, where it is a folder or on the hub."""
    layout: str | None = None
    """gsm8k, math, aime, dapo, chat or generic; told from the fields when left out."""
    data_limit: int | None = None
    """Use only the first examples for RL."""
    reward: str | None = None
    """MODULE:FUNCTION of your own reward(response, example) -> float."""
    policy: str | None = None
    """Folder or hub name of a policy; by default one is made and warmed up."""
    drafter: str | None = None
    """Folder or hub name of a draft head, by default one is trained; or of a small policy, which drafts as it is."""
    shape: PolicyShape = PolicyShape()
    dtype: Dtype = "float32"
    numerics: Literal["auto", "invariant", "plain"] = "auto"
    """Whether bits are independent of batch and draft length; auto: for float32 on a CPU."""
    mesh: str = "auto"
    """data=N,fsdp=N,tensor=N; auto: data parallel over what devices there are, as far as batches split over it."""
    rollout_mesh: str | None = None
    """Devices of the rollouts alone, of those that --mesh leaves; by default rollouts and training take turns."""
    lag: int = 0
    """Steps between the policy that writes a rollout and the one that learns from it; rollouts run ahead by so many."""
    steps: int = 40
    scan_steps: int = 5
    """Steps per compiled dispatch (in-graph rewards)."""
    measured_every: int = 10
    """Dispatches of which one runs in pieces, each of them timed."""
    prompts: int = 32
    """Prompts per step."""
    samples: int = 16
    """Responses per prompt."""
    rows: int | None = None
    """Responses that are written at the same time, for each group of devices along tensor; the others wait. By default
    all."""
    cache_bytes: int | None = None
    """Memory for the keys and values of policy and drafter, on each device: responses that do not fit wait. By default
    enough for all rows at full length, or three quarters of that where responses wait for a row."""
    max_prompt_tokens: int = 256
    max_new_tokens: int = 224
    law: LawFlags = LawOptions()
    speculation: SpeculationFlags = SpeculationOptions()
    acceptance_floor: float = 0.0
    """Mean acceptance length of a dispatch below which drafting ends for the rest of the run; 0: never. For a
    --draft-length that is a number; auto decides while it runs."""
    history: int = 32
    """Earlier responses of a prompt that suffix drafts look in (jsonl tasks, whose prompts come again)."""
    couple_epochs: bool = False
    """Give a prompt the same noise in every epoch: its earlier response, replayed (drafters/replay.py), is then a
    likely draft."""
    updates_per_rollout: int = 2
    epochs: int = 1
    microbatch: MicrobatchConfig = MicrobatchConfig(16, (0.27, 0.4, 0.7, 1.0))
    remat: bool = False
    """The gradient computes every layer's insides again instead of keeping them: less memory, more time."""
    most_skipped: int = 10
    """Updates in a row whose gradients are not finite, at which the run ends; each of them is left out."""
    recompute_logprobs: bool = False
    loss_on: Literal["support", "full"] = "support"
    """support: log-probs of the law that was sampled, filters included; full: without top-k, top-p and min-p."""
    baseline: Baseline = "mean"
    """What a reward is compared with: the mean of its group, or of the others in it (RLOO)."""
    normalize_std: bool = True
    """Divide advantages by the standard deviation of their group, as GRPO does and Dr. GRPO and RLOO do not."""
    overlong_buffer: int = 0
    """Tokens before --max-new-tokens in which a penalty on the reward grows to 1, which truncated responses pay in full
    (DAPO); 0: none."""
    truncated: Truncated = "keep"
    """mask: the loss leaves out the tokens of truncated responses; their rewards still count in their group."""
    dynamic_sampling: int = 0
    """Rollouts per step at most, to fill the batch with groups whose rewards differ (DAPO); other groups are dropped.
    0: one rollout, every group kept."""
    loss: LossConfig = LossConfig(clip_low=0.2, clip_high=0.28)
    optimizer: OptimizerConfig = OptimizerConfig(
        0.004, name="muon", warmup_steps=4, schedule="linear", adam_learning_rate=0.0002
    )
    warmup: WarmUp = WarmUp()
    draft: DraftHead = DraftHead()
    eval_problems: int = 512
    eval_every: int = 10
    sample_every: int = 5
    """Steps between responses written to samples.txt."""
    compare: bool = False
    """Run GRPO again without speculation and compare."""
    shuffle_rewards: bool = False
    """Control: rewards shuffled within each group."""
    profile: bool = False
    """Record a trace of GRPO in OUT/profile."""
    tensorboard: bool = False
    wandb: bool = False

    def __post_init__(self) -> None:
        check_least("", self, rows=1, steps=1, scan_steps=1, prompts=1, samples=2, max_prompt_tokens=1, data_limit=1)
        check_least("", self, updates_per_rollout=1, epochs=1, history=1, most_skipped=1, measured_every=1)
        check_least("", self, eval_problems=2, eval_every=0, sample_every=0, lag=0)
        check_least("", self, overlong_buffer=0, dynamic_sampling=0, cache_bytes=1)
        if self.acceptance_floor and not 1.0 <= self.acceptance_floor < float("inf"):
            raise InputError(
                f"--acceptance-floor is {self.acceptance_floor}; choose tokens a round from 1, or 0 for none"
            )
        if self.law.temperature == 0.0:
            raise InputError("--temperature is 0.0: all responses of a group would be one; choose a value above 0")

    def check(self) -> None:
        """Raise InputError where options contradict each other, or ask for what is not installed."""
        if self.task == "jsonl" and self.data is None:
            raise InputError("--task jsonl needs --data, a file or a dataset name")
        if self.task == "arithmetic" and (self.data or self.eval_data or self.reward or self.warmup.data):
            raise InputError(
                "--data, --eval-data, --reward and --warmup.data belong to --task jsonl; arithmetic makes and judges "
                "its own problems"
            )
        if self.policy is not None and self.warmup.data:
            raise InputError("--warmup.data is for a policy made from nothing; leave it or --policy out")
        needs = "--loss.importance-cap is 0; correct for the difference with a value such as 2"
        if self.speculation.lenience > 1.0 and self.loss.importance_cap == 0.0:
            raise InputError(f"--lenience {self.speculation.lenience} changes the law of the responses and {needs}")
        if self.loss_on == "full" and self.loss.importance_cap == 0.0:
            raise InputError(f"--loss-on full is not the law that responses are drawn from and {needs}")
        if self.acceptance_floor and (self.lag or self.rollout_mesh is not None):
            raise InputError(
                f"--acceptance-floor {self.acceptance_floor} does not go with --lag or --rollout-mesh; leave one out"
            )
        if self.acceptance_floor and self.speculation.adaptive:
            raise InputError(
                f"--acceptance-floor is {self.acceptance_floor} and --draft-length auto, which chooses by acceptance "
                "itself; leave it out, or give a number of drafts such as 3"
            )
        if self.lag and self.loss.importance_cap == 0.0:
            raise InputError(f"--lag {self.lag} learns from responses of older policies and {needs}")
        if self.rollout_mesh is not None and self.mesh == "auto":
            raise InputError(f"--rollout-mesh {self.rollout_mesh} needs the rest of the devices as --mesh; give both")
        if self.couple_epochs and (self.task == "arithmetic" or self.speculation.rule != "match"):
            raise InputError("--couple-epochs needs --task jsonl, whose prompts come again, and --rule match")
        if self.dynamic_sampling and (self.lag or self.rollout_mesh is not None):
            raise InputError(
                f"--dynamic-sampling {self.dynamic_sampling} does not go with --lag or --rollout-mesh, which must know "
                "how many prompts a step takes; leave one of them out"
            )
        if self.dynamic_sampling and self.couple_epochs:
            raise InputError(
                f"--dynamic-sampling {self.dynamic_sampling} may bring a prompt twice in a step, and --couple-epochs "
                "would give it the same responses; leave one of them out"
            )
        if self.overlong_buffer > self.max_new_tokens:
            raise InputError(
                f"--overlong-buffer is {self.overlong_buffer}, above --max-new-tokens {self.max_new_tokens}; lower it"
            )
        if self.overlong_buffer and self.shuffle_rewards:
            raise InputError(
                f"--overlong-buffer {self.overlong_buffer} would teach lengths where --shuffle-rewards must teach "
                "nothing; leave one of them out"
            )
        if self.drafter is not None and not self.speculation.with_head:
            raise InputError(f"--drafts {self.speculation.drafts} does not use --drafter; leave one of them out")
        if self.drafter is not None and self.policy is None:
            raise InputError("--drafter was made for a policy; give that --policy too")
        check_reporters(tensorboard=self.tensorboard, wandb=self.wandb)

    @property
    def inputs(self) -> dict[str, str | None]:
        """Folders and files that the run reads, by name of the option."""
        read = {"policy": self.policy, "drafter": self.drafter, "data": self.data, "eval_data": self.eval_data}
        return read | {"costs": self.speculation.costs}

    @property
    def trains_head(self) -> bool:
        """Whether a draft head drafts."""
        return self.speculation.draft_length != 0 and self.speculation.with_head

    def fits(self, devices: int) -> bool:
        """Whether every batch of the run splits over so many devices and into its microbatches."""
        parts = devices * self.updates_per_rollout
        batches = [(self.prompts * self.samples, parts * self.microbatch.rows)]
        if self.policy is None:
            batches.append((self.warmup.batch, devices * self.warmup.microbatch.rows))
        if self.trains_head and self.drafter is None:
            batches.append((self.draft.batch, devices * self.draft.microbatch.rows))
        if self.trains_head and self.draft.online:
            leaving = batches[0][0] // (parts * self.microbatch.rows)
            leaving = min(self.draft.online_microbatches or leaving, leaving)
            kept = self.updates_per_rollout * leaving * self.draft.online_sequences
            batches.append((kept, self.draft.microbatch.rows))
        return self.prompts % parts == 0 and all(count % divisor == 0 for count, divisor in batches)


def grpo_run(table: Config, **changes: Any) -> Config:
    """The GRPO run in the options of a table that adds its own, with changes."""
    return Config(**{name: getattr(table, name) for name in Config.__dataclass_fields__} | changes)


def grpo_arm(table: Config, seed: int, folder: Path, **changes: Any) -> Config:
    """`grpo_run` in a folder of its own, where it goes on if it was begun."""
    resume = (folder / "config.json").is_file()
    return grpo_run(table, run=replace(table.run, seed=seed, out=folder, resume=resume, overwrite=False), **changes)


SMOKE = {
    "steps": 2,
    "scan_steps": 2,
    "prompts": 4,
    "samples": 4,
    "updates_per_rollout": 1,
    "microbatch": {"rows": 8, "widths": (1.0,)},
    "eval_problems": 16,
    "eval_every": 2,
    "max_new_tokens": 48,
    "compare": True,
    "speculation": {"draft_length": 3},
    "shape": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1},
    "warmup": {"steps": 10, "stop_loss": None, "batch": 8, "microbatch": {"rows": 4, "widths": (1.0,)}},
    "draft": {"prompts": 16, "steps": 10, "batch": 8, "microbatch": {"rows": 4, "widths": (1.0,)}, "unroll": 2},
}
GSM8K = {
    "task": "jsonl",
    "layout": "gsm8k",
    "data_limit": 256,
    "steps": 3,
    "prompts": 16,
    "samples": 16,
    "max_prompt_tokens": 160,
    "max_new_tokens": 256,
    "eval_problems": 64,
    "eval_every": 0,
    "updates_per_rollout": 1,
    "microbatch": {"rows": 16},
    "shape": {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_layers": 4, "num_heads": 8},
    "warmup": {"steps": 400, "stop_loss": None, "batch": 32, "microbatch": {"rows": 4}, "focus": 0.6},
    "draft": {"prompts": 256, "samples": 4, "steps": 100, "batch": 32, "microbatch": {"rows": 8}},
    "optimizer": {"learning_rate": 0.002},
}
PRESETS: dict[str, Mapping[str, Any]] = {"demo": {"compare": True}, "smoke": SMOKE, "gsm8k": GSM8K}
