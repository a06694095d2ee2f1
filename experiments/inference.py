"""What `generate` and `evaluate` share: a policy with its drafter, problems, and timed sampling."""

import time
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import jax
import tyro
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from experiments.common import RunOptions, check_least, progress
from experiments.outputs import check_output
from experiments.rollout_options import MOST_DRAFTS, LawFlags, LawOptions, SpeculationFlags, SpeculationOptions
from experiments.setup import arithmetic_workload, default_numerics, draft_head_config, load_judge, resolve_mesh
from specrl_jax.data.jsonl import load_examples
from specrl_jax.data.prompts import Prompts
from specrl_jax.data.tokenizers import arithmetic_tokenizer, load_tokenizer
from specrl_jax.drafters.combined import params_for
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.heads import DraftModel, DraftModelParams, as_head, for_policy, init_head, load_drafter
from specrl_jax.errors import InputError
from specrl_jax.models.config import Dtype, PolicyConfig
from specrl_jax.models.huggingface import check_tokenizer_fits, load_config, load_policy
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams, init_params
from specrl_jax.models.presets import PRESETS
from specrl_jax.parallel.mesh import make_mesh
from specrl_jax.parallel.sharding import Layout, check_splits
from specrl_jax.rl.rewards import answer_reward
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.trajectory import Trajectory
from specrl_jax.training.sampling import Sampler, concatenate
from specrl_jax.training.speculation import response_metrics
from specrl_jax.training.workloads import ArithmeticWorkload, JsonlProblems, end_ids


@dataclass(frozen=True)
class ModelOptions:
    """Which policy, and how it runs."""

    policy: str | None = None
    """Folder or hub name of the policy; only --preset smoke does without and takes random weights."""
    drafter: str | None = None
    """Folder or hub name of a draft head, or of a small policy with the same tokenizer; without, nothing is drafted."""
    dtype: Dtype | None = None
    """Type of the policy's weights; by default that of its config.json."""
    numerics: Literal["auto", "invariant", "plain"] = "auto"
    """Whether bits are independent of batch and draft length; auto: for float32 on a CPU."""
    mesh: str = "auto"
    """As in data=8; auto splits the prompts over all devices, on a CPU over two virtual ones."""


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are drawn."""

    samples: int = 1
    """Responses per prompt."""
    max_new_tokens: int = 256
    batch: int = 256
    """Responses sampled together, at most."""
    law: LawFlags = LawOptions()
    speculation: SpeculationFlags = SpeculationOptions()

    def __post_init__(self) -> None:
        check_least("", self, samples=1, batch=1)


def check_drafts(model: ModelOptions, sampling: SamplingOptions) -> None:
    """Raise InputError where a draft head was given that would not draft."""
    drafts = sampling.speculation.drafts
    if model.drafter is not None and not sampling.speculation.with_head:
        raise InputError(f"--drafts {drafts} does not use --drafter; leave one of them out")


@dataclass(frozen=True)
class ProblemOptions:
    """Which problems."""

    task: Literal["arithmetic", "jsonl"] | None = None
    data: str | None = None
    """Examples of a jsonl task: a file, or a dataset on the Hugging Face hub."""
    layout: str | None = None
    """gsm8k, math, aime, dapo, chat or generic; told from the fields when left out."""
    subset: str | None = None
    """Subset of a dataset on the hub."""
    data_split: str = "test"
    """Split of a dataset on the hub."""
    split: Literal["dev", "test"] = "test"
    """Arithmetic: which held-out problems; jsonl: the last or the first examples."""
    problems: int = 128
    max_prompt_tokens: int = 1024
    """Longer prompts of a jsonl task are dropped."""

    def __post_init__(self) -> None:
        check_least("", self, problems=1, max_prompt_tokens=1)
        if self.task == "jsonl" and self.data is None:
            raise InputError("--task jsonl needs --data, a file or a dataset name")
        if self.task != "jsonl" and self.data is not None:
            raise InputError("--data belongs to --task jsonl; give both")


# Their options carry no prefix on the command line.
ModelFlags = Annotated[ModelOptions, tyro.conf.arg(name="")]
SamplingFlags = Annotated[SamplingOptions, tyro.conf.arg(name="")]
ProblemFlags = Annotated[ProblemOptions, tyro.conf.arg(name="")]


@dataclass(frozen=True, eq=False)
class Model:
    """A policy and its drafter.

    params, draft: their weights; None where random ones are still to be drawn (`initialised`).
    drafter: a draft head or a small policy, or None.
    """

    mesh: Mesh
    numerics: Numerics
    tokenizer: PreTrainedTokenizerFast
    policy: PolicyConfig
    params: PolicyParams | None
    drafter: DraftModel | None
    draft: DraftModelParams | None

    def engine(self, sampling: SamplingOptions) -> RolloutEngine:
        """The rollout engine; InputError when an option is out of range or does not fit the policy."""
        options = sampling.speculation
        if options.most_drafts != MOST_DRAFTS:
            raise InputError(
                f"--most-drafts {options.most_drafts} is for the controller of train_grpo; choose a --draft-length"
            )
        if options.costs is not None:
            raise InputError(f"--costs {options.costs} is for the controller of train_grpo; choose a --draft-length")
        drafter = options.drafter(self.drafter)
        if drafter is None and options.drafts == "head+suffix":
            raise InputError("--drafts head+suffix needs the head's folder; give --drafter")
        draft_length = options.drafts_with(drafter, adaptive=False)
        rollout = RolloutConfig(
            max_new_tokens=sampling.max_new_tokens,
            samples_per_prompt=sampling.samples,
            draft_length=draft_length,
            law=sampling.law.law(end_ids(self.tokenizer)),
            rule=options.verification,
        )
        return RolloutEngine(self.policy, rollout, self.numerics, drafter if draft_length else None)

    def initialised(self, seed: int) -> "Model":
        """With weights, on every device of the mesh."""
        policy_key, draft_key = jax.random.split(jax.random.key(seed))
        params = init_params(policy_key, self.policy) if self.params is None else self.params
        draft = self.draft
        if self.drafter is not None and draft is None:
            draft = init_head(draft_key, as_head(self.drafter).config, params)
        params = Layout(self.mesh, self.policy.num_kv_heads).place(params)
        if self.drafter is not None:
            draft = Layout(self.mesh, self.drafter.config.num_kv_heads).place(draft)
        return replace(self, params=params, draft=draft)


def check_run(run: RunOptions, script: str, model: ModelOptions, problem: ProblemOptions) -> None:
    """Refuse an output folder as `check_output` does, with the inputs of a script."""
    check_output(run, script, policy=model.policy, drafter=model.drafter, data=problem.data)


def open_model(options: ModelOptions, run: RunOptions, prompts: int, *, same_tokens: bool = True) -> Model:
    """Load a policy and its drafter for so many prompts; nothing is compiled.

    Without `same_tokens` a drafter with another tokenizer than the policy's is loaded too.

    Raises:
        InputError: a folder is missing or damaged, its parts do not belong together, or there is no such mesh.
    """
    mesh = make_mesh(resolve_mesh(options.mesh, lambda devices: devices <= prompts))
    if options.policy is None:
        if run.preset != "smoke" or options.drafter is not None:
            raise InputError("--policy is missing; give the folder or hub name of a policy")
        return _random_model(options, mesh)
    policy = load_config(options.policy)
    tokenizer = load_tokenizer(options.policy)
    check_tokenizer_fits(tokenizer, policy)
    ids = tokenizer if same_tokens else None
    drafter, draft = load_drafter(options.drafter, policy, ids) if options.drafter else (None, None)
    if drafter is not None:
        check_splits("draft head", drafter.config, mesh)
    params, policy = load_policy(options.policy, options.dtype, mesh)
    if drafter is not None and draft is not None:
        drafter, draft = for_policy(drafter, draft, params)
    numerics = default_numerics(options.numerics, policy.dtype)
    return Model(mesh, numerics, tokenizer, policy, params, drafter, draft)


def _random_model(options: ModelOptions, mesh: Mesh) -> Model:
    tokenizer = arithmetic_tokenizer()
    dtype = options.dtype or "float32"
    policy = replace(PRESETS["tiny-qwen3"], vocab_size=len(tokenizer), dtype=dtype)
    numerics = default_numerics(options.numerics, dtype)
    return Model(mesh, numerics, tokenizer, policy, None, Eagle3Drafter(draft_head_config(policy)), None)


def open_problems(
    options: ProblemOptions, tokenizer: PreTrainedTokenizerFast, reward: str | None = None, *, judged: bool = False
) -> ArithmeticWorkload | JsonlProblems:
    """The problems of a task as prompts of this tokenizer.

    Args:
        options, tokenizer: which problems, and for whom.
        reward: "module:function" for examples, by default their answers.
        judged: whether responses will be judged, which takes a reward or an answer to every example.

    Raises:
        InputError: no task is named, or data, reward or tokenizer cannot be used.
    """
    if options.task is None:
        raise InputError("--task is missing; choose arithmetic or jsonl")
    if options.task == "arithmetic":
        return arithmetic_workload(tokenizer)
    assert options.data is not None
    loaded = load_examples(options.data, options.layout, split=options.data_split, subset=options.subset)
    judge = load_judge(reward, loaded.examples) if judged else answer_reward
    problems = JsonlProblems(tokenizer, loaded.examples, judge, options.max_prompt_tokens)
    dropped = problems.encoded.dropped
    print(f"{problems.count} problems, {dropped} dropped for a prompt above {options.max_prompt_tokens} tokens")
    return problems


@dataclass(frozen=True)
class Sampled:
    """trajectory: all responses, on the host. seconds: of sampling them, without compilation."""

    trajectory: Trajectory
    seconds: float


def sample(model: Model, engine: RolloutEngine, prompts: Prompts, seed: int, batch: int) -> Sampled:
    """Draw responses to all prompts, at most `batch` together."""
    if model.params is None:
        raise ValueError("the model has no weights; call initialised first")
    count, samples = len(prompts.lengths), engine.config.samples_per_prompt
    sampler = Sampler(engine, model.mesh, "evaluation", seed, _per_call(count, batch // samples))
    draft = params_for(engine.drafter, model.draft)
    sampler.compile(model.params, draft, prompts)
    seconds, parts = 0.0, []
    with progress("prompts", count) as advance:
        start = time.perf_counter()
        for part in sampler.batches(model.params, draft, prompts):
            seconds += time.perf_counter() - start
            parts.append(part)
            advance(len(part.prompts.lengths), f"{int(part.lengths.sum())} tokens")
            start = time.perf_counter()
    return Sampled(concatenate(parts), seconds)


def _per_call(count: int, most: int) -> int:
    """Prompts per call: equal calls, as few as hold all prompts."""
    calls = -(-count // max(1, most))
    return -(-count // calls)


def figures(model: Model, engine: RolloutEngine, sampled: Sampled) -> dict[str, Any]:
    """What the responses and the speculation were like, and how they were made."""
    seconds, law = sampled.seconds, engine.config.law
    metrics = response_metrics(sampled.trajectory)
    return {
        "prompts": len(sampled.trajectory.prompts.lengths),
        "samples": engine.config.samples_per_prompt,
        "temperature": law.temperature,
        "rule": repr(engine.config.rule),
        "draft_length": engine.config.draft_length,
        "dtype": model.policy.dtype,
        "numerics": model.numerics.mode,
        **metrics,
        "seconds": seconds,
        "tokens_per_second": metrics["response_tokens"] / seconds,
    }
