"""GRPO with exact speculative rollouts.

By default: make a small policy from nothing (supervised warm-up), train an EAGLE-3
draft head on its rollouts, improve it with GRPO while the head drafts, and evaluate
it greedily on held-out problems. With --compare the GRPO part runs again without
speculation; tokens and parameters must come out the same.
"""

import dataclasses
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.common import profile, progress, run_main
from experiments.draft_stage import DraftStage, Rollouts
from experiments.outputs import check_output, open_output, provenance
from experiments.report import close_run
from experiments.rollout_options import MOST_DRAFTS
from experiments.setup import (
    Arm,
    build_workload,
    check_draft_training,
    check_warm_up,
    default_numerics,
    draft_head_config,
    load_or_shape_policy,
    resolve_mesh,
)
from experiments.train_options import PRESETS, Config
from specrl_jax.drafters.combined import head_of, params_for
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.heads import (
    DraftModel,
    DraftModelParams,
    HeadDrafter,
    as_head,
    beside_its_policy,
    for_policy,
    load_drafter,
    save_drafter,
)
from specrl_jax.drafters.suffix import History, init_history
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import save_policy
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams, init_params
from specrl_jax.parallel.hosts import of_first, shared_folder
from specrl_jax.parallel.mesh import make_mesh, parse_mesh
from specrl_jax.parallel.sharding import Layout, row_devices
from specrl_jax.rl.drafting import DraftTraining
from specrl_jax.rl.grpo import GrpoState, GrpoStep, UpdateConfig
from specrl_jax.rl.optimizers import OptimizerConfig
from specrl_jax.rl.pass_at_k import mean_ci95
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rl.rewards import RIGHT
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.control import Control
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.trajectory import Trajectory
from specrl_jax.training.checkpoints import latest_step
from specrl_jax.training.costs import costs_at, given_costs
from specrl_jax.training.grpo_run import GrpoRun, RunConfig, grpo_checkpoints
from specrl_jax.training.metrics import read_metrics
from specrl_jax.training.sampling import Sampler, sample_all
from specrl_jax.training.speculation import response_metrics
from specrl_jax.training.stages import run_stage
from specrl_jax.training.supervised import SupervisedTraining
from specrl_jax.training.workloads import JsonlWorkload, Workload, response_text

SCRIPT = "train_grpo"
_MOST_HISTORY = 4 * 10**9  # bytes


@dataclass(frozen=True)
class Session:
    """What every part of a run shares."""

    config: Config
    mesh: Mesh
    workload: Workload
    policy: PolicyConfig
    numerics: Numerics
    drafter: DraftModel
    rollout_mesh: Mesh | None = None

    @property
    def draft_length(self) -> int:
        """Drafts per round of the speculative arm; of a row at most, where a controller chooses."""
        options = self.config.speculation
        return options.drafts_with(options.drafter(self.drafter), adaptive=self.adaptive)

    @property
    def adaptive(self) -> bool:
        """Whether a controller chooses the drafts: not of trees in invariant numerics, which have a fixed shape."""
        options = self.config.speculation
        return options.adaptive and (options.branches == 1 or not self.numerics.invariant)

    def engine(
        self, draft_length: int, samples: int, temperature: float | None = None, *, adaptive: bool = False
    ) -> RolloutEngine:
        """A rollout engine of this policy and drafter, by default at the run's temperature."""
        rollout = RolloutConfig(
            max_new_tokens=self.config.max_new_tokens,
            samples_per_prompt=samples,
            draft_length=draft_length,
            law=self.config.law.law(self.workload.end_ids, temperature),
            rule=self.config.speculation.verification,
            adaptive=adaptive,
            rows=self.config.rows,
            cache_bytes=self.config.cache_bytes,
        )
        drafter = self.config.speculation.drafter(self.drafter) if draft_length else None
        return RolloutEngine(self.policy, rollout, self.numerics, drafter)

    @property
    def scorer(self) -> Scorer:
        """The training forward."""
        law = self.config.law.law(self.workload.end_ids)
        law = law.full if self.config.loss_on == "full" else law
        return Scorer(self.policy, law, self.numerics, self.config.remat)

    def draft_training(self, optimizer: OptimizerConfig) -> DraftTraining:
        """Training of the draft head."""
        return self.config.draft.training(self.scorer, as_head(self.drafter).config, optimizer)

    @property
    def draft_stage(self) -> DraftStage:
        """Training of a new draft head before RL."""
        config, draft = self.config, self.config.draft
        training = self.draft_training(draft.optimizer.for_updates(draft.steps))
        together = config.prompts * config.samples  # as many rows at once as in a GRPO step
        return DraftStage(
            draft, self.engine(0, draft.samples), training, as_head(self.drafter), self.mesh, config.run.seed, together
        )

    def program(self, draft_length: int) -> GrpoProgram:
        """The GRPO step with a draft length of its own."""
        config, draft = self.config, self.config.draft
        trainable = isinstance(self.drafter, HeadDrafter) and config.speculation.with_head
        online = draft.online and draft_length > 0 and trainable
        update = UpdateConfig(
            loss=config.loss,
            optimizer=config.optimizer.for_updates(config.steps * config.updates_per_rollout * config.epochs),
            microbatch=config.microbatch,
            updates_per_rollout=config.updates_per_rollout,
            epochs=config.epochs,
            baseline=config.baseline,
            normalize_std=config.normalize_std,
            overlong_buffer=config.overlong_buffer,
            truncated=config.truncated,
            dynamic_sampling=config.dynamic_sampling,
            recompute_logprobs=config.recompute_logprobs,
            draft_sequences=draft.online_sequences if online else 0,
            draft_microbatches=draft.online_microbatches,
        )
        drafting = None
        if online:
            training = self.draft_training(draft.online_optimizer.for_updates(config.steps))
            drafting = dataclasses.replace(training, average=draft.average, tolerance=draft.tolerance)
        adaptive = self.adaptive and draft_length > 0
        engine = self.engine(draft_length, config.samples, adaptive=adaptive)
        step = GrpoStep(engine, self.scorer, update, drafting, config.run.seed, config.couple_epochs)
        return GrpoProgram(step, self.mesh, config.prompts, self.workload.in_graph, config.shuffle_rewards)

    def roller(self, program: GrpoProgram) -> GrpoProgram | None:
        """The step on the devices of the rollouts alone, where there are such."""
        return None if self.rollout_mesh is None else program.on(self.rollout_mesh)

    def rows(self, program: GrpoProgram) -> int:
        """Sequences that a device decodes at the same time."""
        prompts = self.config.prompts // row_devices((self.roller(program) or program).mesh)
        return program.step.engine.layout(prompts, self.workload.prompt_width).rows


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

    checkpoints = shared_folder(out) / "checkpoints" / "warmup"
    with progress("warm-up", warmup.steps, latest_step(checkpoints) or 0) as advance:

        def report(done: int, count: int, metrics: dict[str, Any]) -> bool:
            loss = float(np.mean(metrics["loss"]))
            advance(count, f"loss {loss:.3f}")
            return warmup.stop_loss is not None and loss <= warmup.stop_loss

        state, _ = run_stage(
            checkpoints,
            Layout(session.mesh, session.policy.num_kv_heads).place(state),
            total=warmup.steps,
            chunk=max(1, min(50, warmup.steps // 4)),
            program=program,
            on_chunk=report,
        )
    save_policy(out / "warmup", state.params, session.policy, session.workload.tokenizer)
    return state.params


@dataclass(frozen=True, eq=False)
class Examiner:
    """Greedy accuracy on held-out problems, with speculation.

    draft: the head that drafts where a state has none of its own; it changes the speed only.
    """

    session: Session
    draft: Any

    @cached_property
    def sampler(self) -> Sampler:
        """What rolls out for it."""
        session = self.session
        config = session.config
        # The most that a controller may choose is too many for every round of a full batch.
        draft_length = min(3, session.draft_length) if session.adaptive else session.draft_length
        engine = session.engine(draft_length, 1, 0.0)
        return Sampler(engine, session.mesh, "evaluation", config.run.seed, min(config.eval_problems, 256))

    def examine(self, params: PolicyParams, draft: Any, split: Literal["dev", "test"]) -> dict[str, Any]:
        """Share of right answers with its 95% half-width, which answers were right, and what the responses are like."""
        workload = self.session.workload
        prompts, problems = workload.held_out(split, self.session.config.eval_problems)
        # Earlier responses are to the prompts that the policy is trained on.
        head = self.draft if draft is None else head_of(draft)
        draft = session_draft(self.session, head)
        trajectory = sample_all(self.sampler, params, draft, prompts)
        right = of_first(workload.rewards(problems, trajectory) >= RIGHT).astype(np.float64)
        accuracy, half_width = mean_ci95(right)
        return {"accuracy": accuracy, "accuracy_ci95": half_width, "right": right, **response_metrics(trajectory)}


def session_draft(session: Session, head: DraftModelParams | None, history: History | None = None) -> Any:
    """Parameters of the run's drafter."""
    return params_for(session.config.speculation.drafter(session.drafter), head, history)


def check_rollouts(session: Session, program: GrpoProgram) -> None:
    """Raise InputError where a response does not fit the policy's context or the cache budget, in any of the run."""
    config, width = session.config, session.workload.prompt_width
    roller = session.roller(program) or program
    program.step.engine.layout(config.prompts // row_devices(roller.mesh), width)
    Examiner(session, None).sampler.check(width)
    if config.drafter is None and config.trains_head:
        session.draft_stage.sampler(config.draft.prompts).check(width)


def check_history(config: Config, workload: Workload) -> None:
    """Raise InputError where earlier responses would take more memory than is reasonable."""
    if not config.speculation.with_history or not isinstance(workload, JsonlWorkload):
        return
    size = 4 * workload.train.count * config.history * config.max_new_tokens
    if size > _MOST_HISTORY:
        raise InputError(
            f"--history {config.history} responses of {config.max_new_tokens} tokens to {workload.train.count} prompts "
            f"take {size / 1e9:.0f} GB on every device; lower --history, or --data-limit"
        )


def empty_history(session: Session) -> History | None:
    """Room for earlier responses; None where nobody looks, or no prompt comes again."""
    if not session.config.speculation.with_history or not isinstance(session.workload, JsonlWorkload):
        return None
    row_ids = np.asarray(session.workload.train.encoded.prompts.row_ids)
    return init_history(row_ids, session.config.history, session.config.max_new_tokens)


@dataclass
class Start:
    """What every arm starts from: the policy, the drafter's parameters and whether the loss has a reference."""

    params: PolicyParams
    draft: Any
    with_reference: bool

    def state(self, program: GrpoProgram, control: Control | None, *, last: bool) -> GrpoState:
        """The first state of an arm, which may overwrite it: a copy, or these arrays themselves where no arm follows.

        A policy or a drafter kept for nobody would lie beside every step.
        """
        copied, params, draft = partial(jax.tree.map, jnp.copy), self.params, self.draft
        reference = copied(params) if self.with_reference else None
        if last:
            del self.params, self.draft
        else:
            params, draft = copied((params, draft))
        return program.step.init(params, draft if program.step.engine.speculative else None, reference, control)


def check_controller(session: Session, program: GrpoProgram) -> None:
    """Raise InputError where there is no controller for what options say of one, or a given cost table does not serve.
    A run that has begun has its own table."""
    run, options = session.config.run, session.config.speculation
    given, most = options.costs, options.most_drafts
    if not session.adaptive and (given is not None or most != MOST_DRAFTS):
        named = f"--most-drafts {most}" if given is None else f"--costs {given}"
        raise InputError(
            f"{named} is for a controller, and trees in invariant numerics have none; leave it out, or choose "
            "--numerics plain"
        )
    if given is None or (run.resume and (run.out / "costs.json").exists()):
        return
    given_costs(Path(given), program.step.engine, session.rows(program))


def controller(session: Session, program: GrpoProgram, folder: Path, start: Start) -> Control | None:
    """The draft-length controller with its cost table, given or measured once and kept in the folder, or None."""
    engine, given = program.step.engine, session.config.speculation.costs
    if not engine.config.adaptive:
        return None
    roller, rows = session.roller(program) or program, session.rows(program)
    context = session.workload.prompt_width + session.config.max_new_tokens // 4
    nothing = jnp.int32(0)
    served = roller.receive(program.gather(GrpoState(start.params, None, start.draft, None, None, nothing, nothing)))
    path = None if given is None else Path(given)
    return costs_at(folder / "costs.json", engine, served.params, served.draft, rows, context, path)


def save_run_policy(folder: Path, session: Session, state: GrpoState) -> None:
    """Write the policy of a state, with its native draft head where it came with one."""
    beside = beside_its_policy(session.config.policy, session.drafter, head_of(state.draft))
    save_policy(folder, state.params, session.policy, session.workload.tokenizer, head=beside)


def run_arm(
    session: Session, label: str, folder: Path, draft_length: int, start: Start, examiner: Examiner, last: bool
) -> Arm:
    """One GRPO run in its folder, and what it left. last: no other starts from there."""
    config = session.config
    folder.mkdir(parents=True, exist_ok=True)
    program = session.program(draft_length)
    control = controller(session, program, folder, start)
    best = float(of_first(max((row["accuracy"] for row in read_metrics(folder) if "accuracy" in row), default=-1.0)))

    def evaluate(state: GrpoState) -> dict[str, Any]:
        nonlocal best
        figures = examiner.examine(state.params, state.draft, "dev")
        if figures["accuracy"] > best + 1e-6:  # several processes agree on a float32
            best = figures["accuracy"]
            save_run_policy(folder / "policy_best", session, state)
        return {name: figures[name] for name in ("accuracy", "accuracy_ci95")}

    done = latest_step(grpo_checkpoints(folder)) or 0
    with progress(label, config.steps, done) as advance:

        def on_step(step: int, row: Mapping[str, Any], trajectory: Trajectory, rewards: np.ndarray) -> None:
            note = f"reward {row['reward_mean']:.3f}"
            if "acceptance_length" in row:
                note += f", acceptance length {row['acceptance_length']:.2f}"
            advance(1, note)
            if config.sample_every and step % config.sample_every == 0:
                write_sample(folder / "samples.txt", session, step, trajectory, rewards)

        run = GrpoRun(
            program=program,
            config=RunConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(RunConfig)}),
            roller=session.roller(program),
            folder=folder,
            evaluate=evaluate,
            on_step=on_step,
            host_task=None if session.workload.in_graph is not None else session.workload,  # type: ignore[arg-type]
            tensorboard=config.tensorboard,
            wandb=config.wandb,
        )
        report = run.run(start.state(program, control, last=last))
    models = ("policy",) if config.eval_every else ("policy", "policy_best")
    for name in models:
        save_run_policy(folder / name, session, report.state)
    head = head_of(report.state.draft)
    if head is not None and isinstance(session.drafter, HeadDrafter):
        save_drafter(folder / "drafter", session.drafter, head)
    # What only training reads need not lie beside the next arm.
    state = dataclasses.replace(report.state, opt_state=None, draft_opt_state=None, reference=None)
    return Arm(label, folder, draft_length, dataclasses.replace(report, state=state), program)


def write_sample(path: Path, session: Session, step: int, trajectory: Trajectory, rewards: np.ndarray) -> None:
    """Append the step's first response as text; a resumed run does not write a step twice."""
    written = path.read_text(encoding="utf-8") if path.exists() else ""
    if re.search(rf"^step {step}, reward ", written, re.MULTILINE):
        return
    prompt, response = response_text(session.workload.tokenizer, trajectory, 0)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"step {step}, reward {rewards[0]:g}\n{prompt}{response}\n\n")


def open_session(config: Config) -> tuple[Session, PolicyParams | None, DraftModelParams | None]:
    """Check and load everything a run needs; nothing is compiled and nothing written."""
    config.check()
    check_output(config.run, SCRIPT, **config.inputs)
    axes = resolve_mesh(config.mesh, config.fits)
    numerics = default_numerics(config.numerics, config.dtype)
    # What was chosen automatically is part of the run: a resumed one must choose the same.
    config = dataclasses.replace(config, mesh=str(axes), numerics=numerics.mode)
    mesh = make_mesh(axes)
    if mesh.size < len(jax.devices()) and config.rollout_mesh is None:
        print(f"using {mesh.size} of {len(jax.devices())} devices; choose with --mesh, and batches that split over it")
    workload = build_workload(config, mesh)
    params, policy = load_or_shape_policy(config, workload.tokenizer, mesh)
    if config.drafter is not None:
        drafter, draft = load_drafter(config.drafter, policy, workload.tokenizer)
        if params is not None:
            drafter, draft = for_policy(drafter, draft, params)
    else:
        drafter, draft = Eagle3Drafter(draft_head_config(policy, config.draft.vocab_size)), None
    if config.rollout_mesh is not None and jax.process_count() > 1:
        raise InputError(
            f"--rollout-mesh {config.rollout_mesh} is for one process; several take turns, so leave it out"
        )
    apart = None if config.rollout_mesh is None else make_mesh(parse_mesh(config.rollout_mesh), taken=mesh.size)
    session = Session(config, mesh, workload, policy, numerics, drafter, apart)
    program = session.program(session.draft_length)
    check_rollouts(session, program)
    check_controller(session, program)
    if params is None:
        check_warm_up(config.warmup, mesh)
    check_history(config, workload)
    if draft is None and config.trains_head:
        check_draft_training(config.draft, workload, mesh)
    return session, params, draft


def prepare(session: Session, params: PolicyParams | None, draft: DraftModelParams | None, out: Path) -> Start:
    """What GRPO starts from: policy and head as they were loaded, else trained."""
    config = session.config
    model_key, draft_key = jax.random.split(jax.random.key(config.run.seed))
    if params is None:
        params = warm_up(session, init_params(model_key, session.policy), out)
    if draft is None and config.trains_head:
        prompts = session.workload.draft_prompts(config.draft.prompts)
        stage = session.draft_stage
        rollouts = Rollouts(partial(stage.corpus, params, prompts))
        draft, _ = stage.train(params, rollouts, draft_key, shared_folder(out) / "checkpoints" / "draft")
        save_drafter(out / "drafter", as_head(session.drafter), draft)
    return Start(params, session_draft(session, draft, empty_history(session)), config.loss.kl_coef > 0)


def main(config: Config) -> None:
    """Warm up, train the draft head, run GRPO, compare, report."""
    began = time.perf_counter()
    session, params, draft = open_session(config)
    config = session.config
    # The controller's costs are those of the rows that a device has.
    movable = () if session.adaptive else ("mesh", "rollout_mesh")
    out = open_output(config.run, config, SCRIPT, may_change=movable)
    start = prepare(session, params, draft, out)
    del params, draft  # the last arm overwrites them
    runs = [("GRPO", out, session.draft_length)]
    if config.compare and session.draft_length:
        runs.append(("GRPO without speculation", out / "baseline", 0))
    # An arm without drafts is examined with those that it started from.
    without = runs[-1][2] == 0
    examiner = Examiner(session, jax.tree.map(jnp.copy, head_of(start.draft)) if without else None)
    before = examiner.examine(start.params, start.draft, "test")
    print(f"accuracy before GRPO {before['accuracy']:.3f} on {len(before['right'])} test problems", flush=True)
    with profile(out / "profile" if config.profile else None):
        arms = [run_arm(session, *run, start, examiner, run is runs[-1]) for run in runs]
    final = arms[0].report.state
    after = examiner.examine(final.params, final.draft, "test")
    close_run(session, arms, before, after, provenance(config.run.seed), time.perf_counter() - began)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
