"""Parts of a run from its options: policy, tokenizer, workload, draft head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from experiments.common import check_least
from specrl_jax.data.arithmetic import ArithmeticConfig
from specrl_jax.data.jsonl import load_examples
from specrl_jax.data.layouts import Example
from specrl_jax.data.tokenizers import arithmetic_tokenizer, load_tokenizer, train_bpe
from specrl_jax.drafters.eagle3_params import Eagle3Config, default_boundaries, head_config
from specrl_jax.errors import InputError
from specrl_jax.models.config import Family, PolicyConfig, RopeConfig
from specrl_jax.models.huggingface import check_tokenizer_fits, load_config, load_policy
from specrl_jax.models.huggingface_config import config_to_hf
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams
from specrl_jax.parallel.mesh import MeshConfig, auto_mesh, parse_mesh
from specrl_jax.parallel.sharding import check_splits, row_devices
from specrl_jax.rl.microbatches import check_microbatch
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rl.rewards import Reward, answer_reward, load_reward
from specrl_jax.training.grpo_run import RunReport
from specrl_jax.training.workloads import ArithmeticWorkload, JsonlProblems, JsonlWorkload, Workload


@dataclass(frozen=True)
class PolicyShape:
    """A policy made from nothing."""

    family: Family = "qwen3"
    vocab_size: int = 2048
    """Vocabulary of the tokenizer trained for a jsonl task; arithmetic has its own."""
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2

    def __post_init__(self) -> None:
        least = dict.fromkeys(("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"), 1)
        check_least("shape", self, vocab_size=2, **least)


@dataclass(frozen=True)
class Arm:
    """One finished GRPO run of an experiment.

    label: for people. folder: its files. draft_length: drafts per round, or of a row at most.
    report, program: what ran.
    """

    label: str
    folder: Path
    draft_length: int
    report: RunReport
    program: GrpoProgram


def default_numerics(choice: str, dtype: str) -> Numerics:
    """Invariant for float32 on a CPU unless asked otherwise."""
    if choice == "auto":
        choice = "invariant" if dtype == "float32" and jax.default_backend() == "cpu" else "plain"
    return Numerics("invariant" if choice == "invariant" else "plain")


def resolve_mesh(text: str, fits: Callable[[int], bool]) -> MeshConfig:
    """The mesh of `--mesh`; "auto" takes as many of the devices as `fits` admits.

    Raises:
        InputError: the text is no mesh.
    """
    return auto_mesh(fits) if text == "auto" else parse_mesh(text)


def per_device(count: int, mesh: Mesh, flag: str) -> int:
    """A device's share of a batch."""
    devices = row_devices(mesh)
    if count % devices:
        raise InputError(f"{flag} is {count}, which {devices} devices cannot share; choose a multiple of {devices}")
    return count // devices


def build_workload(config: Any, mesh: Mesh) -> Workload:
    """The task, with the policy's tokenizer where a policy is given.

    Raises:
        InputError: data, reward or tokenizer cannot be used.
    """
    # With a policy there is no warm-up.
    batch = 1 if config.policy else per_device(config.warmup.batch, mesh, "--warmup.batch")
    tokenizer = None
    if config.policy:
        load_config(config.policy)  # first: transformers says less about an architecture it does not know
        tokenizer = load_tokenizer(config.policy)
    if config.task == "arithmetic":
        return arithmetic_workload(tokenizer or arithmetic_tokenizer(), config.run.seed, batch)
    return _jsonl_workload(config, tokenizer, batch)


def arithmetic_workload(
    tokenizer: PreTrainedTokenizerFast, seed: int = 0, supervised_batch: int = 1
) -> ArithmeticWorkload:
    """The arithmetic task; InputError when the tokenizer cannot spell its problems."""
    workload = ArithmeticWorkload(ArithmeticConfig(), tokenizer, seed, supervised_batch)
    _ = workload.table  # refuses such a tokenizer
    return workload


def load_judge(reward: str | None, examples: Sequence[Example]) -> Reward:
    """The reward "module:function", or that of the examples' answers; InputError when one of them has none."""
    if reward:
        return load_reward(reward)
    unanswered = next((e.row_id for e in examples if e.answer is None), None)
    if unanswered is not None:
        raise InputError(f"row {unanswered} has no answer to judge a response by; give --reward, or remove the row")
    return answer_reward


def _jsonl_workload(config: Any, tokenizer: PreTrainedTokenizerFast | None, batch: int) -> JsonlWorkload:
    loaded = load_examples(config.data, config.layout, split=config.data_split, subset=config.subset)
    train = loaded.examples[: config.data_limit]
    test, duplicates = loaded.examples[len(train) :], loaded.duplicates
    if config.eval_data:
        where = {"split": config.eval_split, "subset": config.subset}
        held_out_examples = load_examples(config.eval_data, config.layout, **where)
        test, duplicates = held_out_examples.examples, duplicates + held_out_examples.duplicates
    if not test:
        raise InputError("no held-out examples are left; give --eval-data or a smaller --data-limit")
    supervised = loaded.examples if config.eval_data else train
    supervised = [*supervised, *(e for source in config.warmup.data for e in load_examples(source).examples)]
    if tokenizer is None:
        texts = [text for e in supervised for text in (_text(e.prompt), e.solution or e.answer or "")]
        tokenizer = train_bpe(texts, config.shape.vocab_size)
    problems, held_out = (
        JsonlProblems(tokenizer, examples, load_judge(config.reward, examples), config.max_prompt_tokens)
        for examples in (train, test)
    )
    workload = JsonlWorkload(
        train=problems,
        test=held_out,
        supervised_examples=supervised,
        seed=config.run.seed,
        groups=config.prompts,
        max_tokens=config.max_prompt_tokens + config.max_new_tokens,
        supervised_batch=batch,
        focus=config.warmup.focus,
    )
    workload.issue(0)  # refuses fewer examples than prompts per step
    if not config.policy:
        _ = workload.corpus  # refuses examples without a solution
    _ = workload.prompt_width  # refuses examples of which no prompt is kept
    print(
        f"{len(train)} RL and {len(test)} held-out examples ({duplicates} repeated rows left out); "
        f"{problems.encoded.dropped} and {held_out.encoded.dropped} dropped for a prompt above "
        f"{config.max_prompt_tokens} tokens"
    )
    return workload


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def load_or_shape_policy(
    config: Any, tokenizer: PreTrainedTokenizerFast, mesh: Mesh
) -> tuple[PolicyParams | None, PolicyConfig]:
    """The policy of `--policy` on the mesh, or None and the shape of one to be made."""
    if config.policy:
        params, policy = load_policy(config.policy, config.dtype, mesh)
        check_tokenizer_fits(tokenizer, policy)
        return params, policy
    shape = config.shape
    policy = PolicyConfig(
        family=shape.family,
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=max(2, shape.hidden_size // shape.num_heads),
        rope=RopeConfig(),
        dtype=config.dtype,
    )
    check_splits("policy", policy, mesh)
    config_to_hf(policy)  # refuses a shape that transformers cannot load
    check_tokenizer_fits(tokenizer, policy)
    return None, policy


def check_warm_up(warmup: Any, mesh: Mesh) -> None:
    """Raise InputError unless the batches of the warm-up split over the mesh and into microbatches."""
    check_microbatch(warmup.microbatch, per_device(warmup.batch, mesh, "--warmup.batch"))


def check_draft_training(draft: Any, workload: Workload, mesh: Mesh) -> None:
    """As `check_draft_batches`, with as many prompts as a workload has."""
    prompts = draft.prompts
    if isinstance(workload, JsonlWorkload):
        prompts = min(prompts, workload.train.count)
    check_draft_batches(draft, prompts, mesh)


def check_draft_batches(draft: Any, prompts: int, mesh: Mesh) -> None:
    """Raise InputError unless the draft head's batches split over the mesh and the rollouts of its prompts fill one.

    draft: the options of the stage.
    """
    check_microbatch(draft.microbatch, per_device(draft.batch, mesh, "--draft.batch"))
    devices = row_devices(mesh)
    rollouts = prompts * draft.samples // devices * devices
    if rollouts < draft.batch:
        raise InputError(
            f"{rollouts} rollouts for the draft head of {prompts} prompts fill no batch of {draft.batch}; "
            "choose more --draft.prompts or --draft.samples, or a smaller --draft.batch"
        )


def draft_head_config(policy: PolicyConfig, vocab_size: int = 32_000) -> Eagle3Config:
    """An EAGLE-3 head in proportion to the policy, over `vocab_size` of its tokens at most."""
    size, boundaries = min(policy.vocab_size, vocab_size), default_boundaries(policy.num_layers)
    return head_config(policy, size, boundaries, rope=RopeConfig(theta=policy.rope.theta))
