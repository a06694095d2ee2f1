"""Parts of a run from its options: policy, tokenizer, workload, draft head."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from transformers import PreTrainedTokenizerFast

from specrl_jax.data.arithmetic import ArithmeticConfig
from specrl_jax.data.jsonl import load_examples
from specrl_jax.data.tokenizers import arithmetic_tokenizer, load_tokenizer, train_bpe
from specrl_jax.drafters.eagle3_params import Eagle3Config, default_boundaries
from specrl_jax.errors import InputError
from specrl_jax.models.config import Family, PolicyConfig, RopeConfig
from specrl_jax.models.huggingface import check_tokenizer_fits, load_policy
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rl.rewards import answer_reward, load_reward
from specrl_jax.training.grpo_run import RunReport
from specrl_jax.training.workloads import ArithmeticWorkload, JsonlWorkload, Workload


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


@dataclass(frozen=True)
class Arm:
    """One GRPO run of an experiment.

    label: for people. folder: its files. draft_length: drafts per round. report, program: set once it ran.
    """

    label: str
    folder: Path
    draft_length: int
    report: RunReport | None = None
    program: GrpoProgram | None = None


def default_numerics(choice: str, dtype: str) -> Numerics:
    """Invariant for float32 on a CPU unless asked otherwise."""
    if choice == "auto":
        choice = "invariant" if dtype == "float32" and jax.default_backend() == "cpu" else "plain"
    return Numerics("invariant" if choice == "invariant" else "plain")


def build_workload(config: Any) -> Workload:
    """The task, with the policy's tokenizer where a policy is given.

    Raises:
        InputError: data, reward or tokenizer cannot be used.
    """
    tokenizer = load_tokenizer(config.policy) if config.policy else None
    batch = config.warmup.batch
    if config.task == "arithmetic":
        workload = ArithmeticWorkload(ArithmeticConfig(), tokenizer or arithmetic_tokenizer(), config.run.seed, batch)
        _ = workload.table  # refuses a tokenizer that cannot spell the problems
        return workload
    return _jsonl_workload(config, tokenizer)


def _jsonl_workload(config: Any, tokenizer: PreTrainedTokenizerFast | None) -> JsonlWorkload:
    reward = load_reward(config.reward) if config.reward else answer_reward
    loaded = load_examples(config.data, config.layout)
    train = loaded.examples[: config.data_limit]
    if config.eval_data:
        test = load_examples(config.eval_data, config.layout).examples
    else:
        test = loaded.examples[len(train) :]
    if not test:
        raise InputError("no held-out examples are left; give --eval-data or a smaller --data-limit")
    supervised = loaded.examples if config.eval_data else train
    if tokenizer is None:
        texts = [text for e in supervised for text in (_text(e.prompt), e.solution or e.answer or "")]
        tokenizer = train_bpe(texts, config.shape.vocab_size)
    workload = JsonlWorkload(
        tokenizer=tokenizer,
        train=train,
        test=test,
        supervised_examples=supervised,
        reward=reward,
        seed=config.run.seed,
        groups=config.prompts,
        max_prompt_tokens=config.max_prompt_tokens,
        max_tokens=config.max_prompt_tokens + config.max_new_tokens,
        supervised_batch=config.warmup.batch,
        focus=config.warmup.focus,
    )
    print(f"{len(train)} RL examples, {workload.dropped} dropped for a prompt above {config.max_prompt_tokens} tokens")
    return workload


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def load_or_shape_policy(config: Any, tokenizer: PreTrainedTokenizerFast) -> tuple[PolicyParams | None, PolicyConfig]:
    """The policy of `--policy`, or None and the shape of one to be made."""
    if config.policy:
        params, policy = load_policy(config.policy, config.dtype)
        check_tokenizer_fits(tokenizer, policy)
        return params, policy
    shape = config.shape
    return None, PolicyConfig(
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


def draft_head_config(policy: PolicyConfig) -> Eagle3Config:
    """An EAGLE-3 head in proportion to the policy, over its whole vocabulary up to 32,000 tokens."""
    if policy.vocab_size > 32_000:
        raise InputError(
            f"a vocabulary of {policy.vocab_size} needs a draft vocabulary chosen from data; give a trained --drafter"
        )
    return Eagle3Config(
        hidden_size=policy.hidden_size,
        intermediate_size=policy.intermediate_size,
        num_heads=policy.num_heads,
        num_kv_heads=policy.num_kv_heads,
        head_dim=policy.head_dim,
        vocab_size=policy.vocab_size,
        draft_vocab_size=policy.vocab_size,
        boundaries=default_boundaries(policy.num_layers),
        target_hidden_size=policy.hidden_size,
        rms_norm_eps=policy.rms_norm_eps,
        rope=RopeConfig(theta=policy.rope.theta),
        max_position_embeddings=policy.max_position_embeddings,
        dtype=policy.dtype,
    )
