"""GRPO with exact speculative rollouts.

By default: make a small policy from nothing (supervised warm-up), train an EAGLE-3
draft head on its rollouts, improve it with GRPO while the head drafts, and evaluate
it greedily on held-out problems. With --compare the GRPO part runs again without
speculation; tokens and parameters must come out the same.
"""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.common import Run, RunOptions, check_least, profile, progress, run_main
from experiments.outputs import check_output, open_output, provenance
from experiments.report import close_run
from experiments.setup import (
    Arm,
    PolicyShape,
    build_workload,
    check_draft_training,
    check_warm_up,
    default_numerics,
    draft_head_config,
    load_or_shape_policy,
    per_device,
    resolve_mesh,
)
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_folder import load_drafter, save_drafter
from specrl_jax.drafters.eagle3_params import Eagle3Params, init_eagle3
from specrl_jax.drafters.eagle3_training import DraftLossConfig
from specrl_jax.errors import InputError
from specrl_jax.models.config import Dtype, PolicyConfig
from specrl_jax.models.huggingface import save_policy
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams, init_params
from specrl_jax.models.policy import forward, grid_batch, sequence_positions
from specrl_jax.rl.drafting import DraftTraining
from specrl_jax.rl.grpo import GrpoState, GrpoStep, UpdateConfig
from specrl_jax.rl.losses import LossConfig
from specrl_jax.rl.microbatches import MicrobatchConfig
from specrl_jax.rl.optimizers import OptimizerConfig
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.engine import RolloutConfig, RolloutEngine
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.trajectory import Sequences, Trajectory, to_sequences
from specrl_jax.training.draft_head import OfflineDraftTraining
from specrl_jax.training.grpo_run import GrpoRun, RunConfig
from specrl_jax.training.metrics import read_metrics
from specrl_jax.training.sampling import Sampler, sample_all
from specrl_jax.training.speculation import response_metrics
from specrl_jax.training.stages import run_stage
from specrl_jax.training.supervised import SupervisedTraining
from specrl_jax.training.workloads import Workload, response_text


@dataclass(frozen=True)
class WarmUp:
    """Supervised training of a policy made from nothing."""

    steps: int = 1050
    batch: int = 40
    """Sequences per update."""
    microbatch: MicrobatchConfig = MicrobatchConfig(4, (0.2, 0.27, 0.33, 0.5, 0.75, 1.0))
    optimizer: OptimizerConfig = OptimizerConfig(0.02, name="muon", warmup_steps=20, adam_learning_rate=0.004)
    focus: float = 0.0
    """Share of each batch drawn from the RL examples (jsonl tasks)."""

    def __post_init__(self) -> None:
        check_least("warmup", self, steps=0, batch=1)
        if not 0.0 <= self.focus <= 1.0:
            raise InputError(f"--warmup.focus is {self.focus}; choose a share from 0 to 1")


@dataclass(frozen=True)
class DraftHead:
    """Training of the EAGLE-3 head on the policy's rollouts, before RL and during it."""

    prompts: int = 128
    """Prompts whose rollouts are the training data."""
    steps: int = 300
    batch: int = 32
    """Sequences per update."""
    microbatch: MicrobatchConfig = MicrobatchConfig(8)
    unroll: int = 3
    """Steps of the training-time test."""
    optimizer: OptimizerConfig = OptimizerConfig(
        0.012, name="muon", warmup_steps=5, schedule="linear", adam_learning_rate=0.004
    )
    online: bool = True
    """Keep training it on the policy's forwards during RL."""
    online_sequences: int = 2
    """Sequences per policy microbatch that train it."""
    online_optimizer: OptimizerConfig = OptimizerConfig(0.0005)

    def __post_init__(self) -> None:
        check_least("draft", self, prompts=1, steps=0, batch=1, unroll=1, online_sequences=1)


@dataclass(frozen=True)
class Config:
    """Options of a run."""

    run: Run = RunOptions()
    task: Literal["arithmetic", "jsonl"] = "arithmetic"
    data: str | None = None
    """Training examples of a jsonl task: a file, or a dataset on the Hugging Face hub."""
    eval_data: str | None = None
    """Held-out examples of a jsonl task; by default the training examples that RL does not use."""
    layout: str | None = None
    """gsm8k, math, aime, dapo, chat or generic; told from the fields when left out."""
    data_limit: int | None = None
    """Use only the first examples for RL."""
    reward: str | None = None
    """MODULE:FUNCTION of your own reward(response, example) -> float."""
    policy: str | None = None
    """Folder or hub name of a policy; by default one is made and warmed up."""
    drafter: str | None = None
    """Folder or hub name of a draft head; by default one is trained."""
    shape: PolicyShape = PolicyShape()
    dtype: Dtype = "float32"
    numerics: Literal["auto", "invariant", "plain"] = "auto"
    """Whether bits are independent of batch and draft length; auto: for float32 on a CPU."""
    mesh: str = "auto"
    """data=N,fsdp=N,tensor=N; auto: data parallel over what is there."""
    steps: int = 30
    scan_steps: int = 5
    """Steps per compiled dispatch (in-graph rewards)."""
    prompts: int = 32
    """Prompts per step."""
    samples: int = 16
    """Responses per prompt."""
    max_prompt_tokens: int = 256
    max_new_tokens: int = 224
    temperature: float = 1.0
    draft_length: int | None = None
    """Drafts per round, 0 for none; by default 3."""
    updates_per_rollout: int = 2
    epochs: int = 1
    microbatch: MicrobatchConfig = MicrobatchConfig(16, (0.27, 0.4, 0.7, 1.0))
    recompute_logprobs: bool = False
    normalize_std: bool = True
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
        check_least("", self, steps=1, scan_steps=1, prompts=1, samples=2, max_prompt_tokens=1, data_limit=1)
        check_least("", self, eval_problems=2, eval_every=0, sample_every=0)
        if self.task == "jsonl" and self.data is None:
            raise InputError("--task jsonl needs --data, a file or a dataset name")
        if self.task == "arithmetic" and (self.data or self.reward):
            raise InputError("--data and --reward belong to --task jsonl; arithmetic makes and judges its own problems")


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
    "shape": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1},
    "warmup": {"steps": 10, "batch": 8, "microbatch": {"rows": 4, "widths": (1.0,)}},
    "draft": {"prompts": 4, "steps": 10, "batch": 8, "microbatch": {"rows": 4, "widths": (1.0,)}, "unroll": 2},
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
    "warmup": {"steps": 1500, "batch": 32, "microbatch": {"rows": 4}, "focus": 0.5},
    "draft": {"prompts": 64, "steps": 100, "batch": 32, "microbatch": {"rows": 8}},
    "optimizer": {"learning_rate": 0.002},
}
PRESETS: dict[str, Mapping[str, Any]] = {"demo": {"compare": True}, "smoke": SMOKE, "gsm8k": GSM8K}


@dataclass(frozen=True)
class Session:
    """What every part of a run shares."""

    config: Config
    mesh: Mesh
    workload: Workload
    policy: PolicyConfig
    numerics: Numerics
    drafter: Eagle3Drafter

    @property
    def draft_length(self) -> int:
        """Drafts per round of the speculative arm."""
        return 3 if self.config.draft_length is None else self.config.draft_length

    def engine(self, draft_length: int, samples: int, temperature: float) -> RolloutEngine:
        """A rollout engine of this policy and drafter."""
        rollout = RolloutConfig(
            max_new_tokens=self.config.max_new_tokens,
            samples_per_prompt=samples,
            draft_length=draft_length,
            end_ids=self.workload.end_ids,
            law=SamplingLaw(temperature),
        )
        return RolloutEngine(self.policy, rollout, self.numerics, self.drafter if draft_length else None)

    @property
    def scorer(self) -> Scorer:
        """The training forward."""
        return Scorer(self.policy, SamplingLaw(self.config.temperature), self.numerics)

    def draft_training(self, optimizer: OptimizerConfig, microbatch: MicrobatchConfig) -> DraftTraining:
        """Training of the draft head; its own forwards of the policy need no invariant bits."""
        loss = DraftLossConfig(steps=self.config.draft.unroll)
        scorer = dataclasses.replace(self.scorer, numerics=Numerics("plain"))
        return DraftTraining(scorer, self.drafter.config, loss, optimizer, microbatch)

    def program(self, draft_length: int) -> GrpoProgram:
        """The GRPO step with a draft length of its own."""
        config, draft = self.config, self.config.draft
        online = draft.online and draft_length > 0
        update = UpdateConfig(
            loss=config.loss,
            optimizer=config.optimizer.for_updates(config.steps * config.updates_per_rollout * config.epochs),
            microbatch=config.microbatch,
            updates_per_rollout=config.updates_per_rollout,
            epochs=config.epochs,
            normalize_std=config.normalize_std,
            recompute_logprobs=config.recompute_logprobs,
            draft_sequences=draft.online_sequences if online else 0,
        )
        drafting = (
            self.draft_training(draft.online_optimizer.for_updates(config.steps), draft.microbatch) if online else None
        )
        engine = self.engine(draft_length, config.samples, config.temperature)
        step = GrpoStep(engine, self.scorer, update, drafting, config.run.seed)
        return GrpoProgram(step, self.mesh, config.prompts, self.workload.in_graph, config.shuffle_rewards)


def warm_up(session: Session, params: PolicyParams, out: Path) -> PolicyParams:
    """Supervised training from random parameters."""
    warmup = session.config.warmup
    scorer = Scorer(session.policy, SamplingLaw(1.0), Numerics("plain"))
    training = SupervisedTraining(scorer, warmup.optimizer.for_updates(warmup.steps), warmup.microbatch)
    state = training.init(params)
    corpus = session.workload.corpus

    def program(steps: int) -> Any:
        compiled = training.program(session.mesh, session.workload.supervised, steps)
        return lambda state: compiled(state, corpus)

    with progress("warm-up", warmup.steps) as advance:

        def report(done: int, count: int, metrics: dict[str, Any]) -> None:
            advance(count, f"loss {np.mean(metrics['loss']):.3f}")

        state = run_stage(
            out / "checkpoints" / "warmup",
            session.mesh,
            state,
            total=warmup.steps,
            chunk=max(1, min(50, warmup.steps // 4)),
            program=program,
            on_chunk=report,
        )
    save_policy(out / "warmup", state.params, session.policy, session.workload.tokenizer)
    return state.params


def feature_rms(session: Session, params: PolicyParams, sequences: Sequences) -> float:
    """Root mean square of what the head reads, over some sequences of the policy."""
    batch = grid_batch(sequences.tokens, sequence_positions(sequences.lengths, sequences.tokens.shape[1]))
    out = forward(params, session.policy, batch, numerics=Numerics("plain"), boundaries=session.drafter.boundaries)
    features = np.asarray(out.features, np.float32)[np.asarray(batch.positions) >= 0]
    return float(np.sqrt(np.mean(features**2)))


def train_draft_head(session: Session, params: PolicyParams, key: Any, out: Path) -> Eagle3Params:
    """A new head, trained offline on rollouts of the policy."""
    settings = session.config.draft
    engine = session.engine(0, session.config.samples, session.config.temperature)
    batch = min(settings.prompts, session.config.prompts)
    sampler = Sampler(engine, session.mesh, "draft_data", session.config.run.seed, batch)
    trajectory = sample_all(sampler, params, None, session.workload.draft_prompts(settings.prompts))
    corpus = to_sequences(jax.tree.map(jnp.asarray, trajectory))
    training = session.draft_training(settings.optimizer.for_updates(settings.steps), settings.microbatch)
    share = per_device(settings.batch, session.mesh, "--draft.batch")
    offline = OfflineDraftTraining(training, share, session.config.run.seed)
    scale = feature_rms(session, params, jax.tree.map(lambda x: x[: settings.microbatch.rows], corpus))
    draft = init_eagle3(key, session.drafter.config, policy=params, feature_rms=scale)

    def program(steps: int) -> Any:
        compiled = offline.program(session.mesh, steps)
        return lambda state: compiled(state, params, corpus)

    with progress("draft head", settings.steps) as advance:

        def report(done: int, count: int, metrics: dict[str, Any]) -> None:
            overlap = ", ".join(f"{x:.2f}" for x in metrics["draft_overlap"][-1])
            advance(count, f"loss {np.mean(metrics['draft_loss']):.3f}, overlap {overlap}")

        state = run_stage(
            out / "checkpoints" / "draft",
            session.mesh,
            offline.init(draft),
            total=settings.steps,
            chunk=max(1, min(50, settings.steps // 2)),
            program=program,
            on_chunk=report,
        )
    save_drafter(out / "drafter", session.drafter, state.draft)
    return state.draft


@dataclass(frozen=True, eq=False)
class Examiner:
    """Greedy accuracy on held-out problems, with speculation.

    draft: the head that drafts where a state has none of its own; it changes the speed only.
    """

    session: Session
    draft: Any
    samplers: dict[int, Sampler] = field(default_factory=dict)

    def examine(self, params: PolicyParams, draft: Any, split: Literal["dev", "test"]) -> dict[str, Any]:
        """Share of right answers with its 95% half-width (normal approximation), all rewards, figures of responses."""
        session, count = self.session, self.session.config.eval_problems
        prompts, problems = session.workload.held_out(split, count)
        batch = min(count, 256)
        if batch not in self.samplers:
            engine = session.engine(session.draft_length, 1, 0.0)
            self.samplers[batch] = Sampler(engine, session.mesh, "evaluation", session.config.run.seed, batch)
        trajectory = sample_all(self.samplers[batch], params, self.draft if draft is None else draft, prompts)
        rewards = session.workload.rewards(problems, trajectory)
        accuracy = float(np.mean(rewards))
        half_width = 1.96 * (accuracy * (1 - accuracy) / len(rewards)) ** 0.5
        return {"accuracy": accuracy, "accuracy_ci95": half_width, "rewards": rewards, **response_metrics(trajectory)}


@dataclass(frozen=True)
class Start:
    """What every arm starts from."""

    params: PolicyParams
    draft: Eagle3Params | None
    reference: PolicyParams | None


def run_arm(session: Session, label: str, folder: Path, draft_length: int, start: Start, examiner: Examiner) -> Arm:
    """One GRPO run in its folder, and what it left."""
    config = session.config
    folder.mkdir(parents=True, exist_ok=True)
    program = session.program(draft_length)
    state = program.step.init(start.params, start.draft if draft_length else None, start.reference)
    best = max((row["accuracy"] for row in read_metrics(folder) if "accuracy" in row), default=-1.0)

    def evaluate(state: GrpoState) -> dict[str, Any]:
        nonlocal best
        figures = examiner.examine(state.params, state.draft, "dev")
        if figures["accuracy"] > best:
            best = figures["accuracy"]
            save_policy(folder / "policy_best", state.params, session.policy, session.workload.tokenizer)
        return {name: figures[name] for name in ("accuracy", "accuracy_ci95")}

    with progress(label, config.steps) as advance:

        def on_step(step: int, row: Mapping[str, Any], trajectory: Trajectory, rewards: np.ndarray) -> None:
            note = f"reward {row['reward_mean']:.3f}"
            if "acceptance_length" in row:
                note += f", acceptance length {row['acceptance_length']:.2f}"
            advance(1, note)
            if config.sample_every and step % config.sample_every == 0:
                write_sample(folder / "samples.txt", session, step, trajectory, rewards)

        run = GrpoRun(
            program=program,
            config=RunConfig(config.steps, config.scan_steps, config.eval_every),
            folder=folder,
            evaluate=evaluate,
            on_step=on_step,
            host_task=None if session.workload.in_graph is not None else session.workload,  # type: ignore[arg-type]
            tensorboard=config.tensorboard,
            wandb=config.wandb,
        )
        report = run.run(state)
    save_policy(folder / "policy", report.state.params, session.policy, session.workload.tokenizer)
    if report.state.draft is not None:
        save_drafter(folder / "drafter", session.drafter, report.state.draft)
    return Arm(label, folder, draft_length, report, program)


def write_sample(path: Path, session: Session, step: int, trajectory: Trajectory, rewards: np.ndarray) -> None:
    """Append the step's first response as text; a resumed run does not write a step twice."""
    if path.exists() and f"step {step}, " in path.read_text(encoding="utf-8"):
        return
    prompt, response = response_text(session.workload.tokenizer, trajectory, 0)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"step {step}, reward {rewards[0]:g}\n{prompt}{response}\n\n")


def open_session(config: Config) -> tuple[Session, PolicyParams | None, Eagle3Params | None]:
    """Check and load everything a run needs; nothing is compiled and nothing written."""
    check_output(config.run)
    mesh = resolve_mesh(config.mesh, config.prompts)
    workload = build_workload(config, mesh)
    params, policy = load_or_shape_policy(config, workload.tokenizer)
    numerics = default_numerics(config.numerics, config.dtype)
    if config.drafter is not None:
        drafter, draft = load_drafter(config.drafter, policy)
    else:
        drafter, draft = Eagle3Drafter(draft_head_config(policy)), None
    session = Session(config, mesh, workload, policy, numerics, drafter)
    session.program(session.draft_length).step.engine.check_prompt_width(workload.prompt_width)
    if params is None:
        check_warm_up(config.warmup, mesh)
    if draft is None and session.draft_length:
        check_draft_training(config.draft, config.samples, mesh)
    return session, params, draft


def main(config: Config) -> None:
    """Warm up, train the draft head, run GRPO, compare, report."""
    start = time.perf_counter()
    session, params, draft = open_session(config)
    out = open_output(config.run, config)
    model_key, draft_key = jax.random.split(jax.random.key(config.run.seed))
    if params is None:
        params = warm_up(session, init_params(model_key, session.policy), out)
    if draft is None and session.draft_length:
        draft = train_draft_head(session, params, draft_key, out)
    start_from = Start(params, draft, params if config.loss.kl_coef > 0 else None)
    runs = [("GRPO", out, session.draft_length)]
    if config.compare and session.draft_length:
        runs.append(("GRPO without speculation", out / "baseline", 0))
    examiner = Examiner(session, draft)
    before = examiner.examine(params, draft, "test")
    print(f"accuracy before GRPO {before['accuracy']:.3f} on {config.eval_problems} test problems", flush=True)
    with profile(out / "profile" if config.profile else None):
        arms = [run_arm(session, *run, start_from, examiner) for run in runs]
    final = arms[0].report.state
    after = examiner.examine(final.params, final.draft, "test")
    close_run(session, arms, before, after, provenance(config.run.seed), time.perf_counter() - start)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
