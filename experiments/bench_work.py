"""What the benchmarks roll out: random prompts with forced lengths, or a policy's own task."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Int, UInt32

from experiments.common import check_least
from experiments.inference import ProblemOptions, open_problems
from specrl_jax.data.prompts import Prompts
from specrl_jax.data.tokenizers import load_tokenizer
from specrl_jax.errors import InputError
from specrl_jax.rollout.noise import sequence_keys
from specrl_jax.rollout.sampling import SamplingLaw

Lengths = Literal["long-tailed", "equal"]


@dataclass(frozen=True)
class WorkOptions:
    """Prompts and lengths of responses."""

    task: Literal["arithmetic", "jsonl"] | None = None
    """Real prompts of the policy's task, responses that end as they end, real acceptance."""
    data: str | None = None
    """Examples of a jsonl task: a file, or a dataset on the Hugging Face hub."""
    branchy: float = 0.0
    """Share of the prompts of a task whose tokens are replaced by random ones, so that drafts fail more often."""
    tokens: int = 128
    """Tokens of every response of equal length; at most, under a task."""
    prompt_tokens: int = 32
    """Of every prompt; at most, under a jsonl task."""
    temperature: float = 1.0
    """Of the policy's law; 0 for its most probable tokens."""

    def __post_init__(self) -> None:
        check_least("", self, tokens=1, prompt_tokens=2)
        _ = SamplingLaw(self.temperature)
        if not 0.0 <= self.branchy <= 1.0 or (self.branchy and self.task is None):
            raise InputError(f"--branchy is {self.branchy}; choose a share from 0 to 1, with --task")
        if (self.task == "jsonl") != (self.data is not None):
            raise InputError("--data belongs to --task jsonl; give both")


WorkFlags = Annotated[WorkOptions, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Work:
    """Prompts, the most tokens of every response, what ends one before that, and the seed and temperature of draws."""

    prompts: Prompts
    limits: Int[np.ndarray, "b"]
    end_ids: tuple[int, ...] = ()
    seed: int = 0
    temperature: float = 1.0

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return int(self.limits.max())

    @property
    def law(self) -> SamplingLaw:
        """The policy's; without end tokens of its own the limits decide."""
        law = SamplingLaw(end_ids=self.end_ids) if self.end_ids else endless_law(self.longest)
        return replace(law, temperature=self.temperature)


def endless_law(tokens: int) -> SamplingLaw:
    """Temperature 1 and no end before so many tokens."""
    return SamplingLaw(end_ids=(1,), min_new_tokens=tokens)


def random_prompts(rng: np.random.Generator, count: int, width: int, vocab_size: int) -> Prompts:
    """Prompts of random ids."""
    tokens = rng.integers(2, min(vocab_size, 16_000), (count, width))
    lengths = jnp.full((count,), width, jnp.int32)
    return Prompts(jnp.asarray(tokens, jnp.int32), lengths, jnp.arange(count, dtype=jnp.uint32))


def long_tailed(rng: np.random.Generator, count: int, longest: int = 512) -> Int[np.ndarray, "b"]:
    """Lengths exp(N(ln 64, 0.8)), at most `longest`."""
    return np.clip(np.round(np.exp(rng.normal(np.log(64.0), 0.8, count))), 1, longest).astype(np.int32)


def noise_keys(prompts: Prompts, samples: int = 1, seed: int = 0, epoch: int = 0) -> UInt32[Array, "b 2"]:
    """Noise key of every sample of every prompt; those of another epoch are others."""
    numbers = jnp.tile(jnp.arange(samples, dtype=jnp.int32), len(prompts.row_ids))
    return sequence_keys(seed, "evaluation", epoch, jnp.repeat(prompts.row_ids, samples), numbers)


def make_work(
    options: WorkOptions,
    count: int,
    policy: str | None,
    vocab_size: int,
    lengths: Lengths,
    seed: int,
    samples: int = 1,
) -> Work:
    """`count` sequences, `samples` to a prompt; all that is random is fixed by the seed.

    Args:
        policy: folder with the tokenizer of a task. vocab_size: of random prompts. lengths: where there is no task.

    Raises:
        InputError: the task has too few problems.
    """
    rng = np.random.default_rng(seed)
    if options.task is not None:
        assert policy is not None
        return replace(_task_work(options, policy, count, samples, rng), seed=seed, temperature=options.temperature)
    limits = long_tailed(rng, count) if lengths == "long-tailed" else np.full(count, options.tokens, np.int32)
    prompts = random_prompts(rng, count // samples, options.prompt_tokens, vocab_size)
    return Work(prompts, limits, seed=seed, temperature=options.temperature)


def _task_work(options: WorkOptions, policy: str, sequences: int, samples: int, rng: np.random.Generator) -> Work:
    """Held-out prompts of a task, the branchy ones evenly between the others."""
    tokenizer, count = load_tokenizer(policy), sequences // samples
    problem = ProblemOptions(options.task, options.data, problems=count, max_prompt_tokens=options.prompt_tokens)
    problems = open_problems(problem, tokenizer)
    prompts, _ = problems.held_out("test", count)
    tokens = np.array(prompts.tokens)
    if len(tokens) < count:
        raise InputError(f"{options.data} has {len(tokens)} prompts of {count}; give more, or raise --prompt-tokens")
    if options.branchy:
        branchy = np.diff(np.floor(options.branchy * np.arange(count + 1))) > 0
        tokens[branchy] = rng.integers(2, len(tokenizer), (int(branchy.sum()), tokens.shape[1]))
    prompts = replace(prompts, tokens=jnp.asarray(tokens))
    return Work(prompts, np.full(sequences, options.tokens, np.int32), problems.end_ids)
