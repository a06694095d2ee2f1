"""What a run works on: prompts, rewards, supervised texts and held-out problems of a task.

`ArithmeticWorkload` computes everything in the graph; `JsonlWorkload` reads files
and judges on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int
from transformers import PreTrainedTokenizerFast

from specrl_jax.data import arithmetic
from specrl_jax.data.arithmetic import ArithmeticConfig, Split
from specrl_jax.data.jsonl import EncodedPrompts, encode_examples, encode_supervised, epoch_rows
from specrl_jax.data.layouts import Example
from specrl_jax.data.prompts import Prompts
from specrl_jax.data.symbols import SymbolTable, symbol_table
from specrl_jax.errors import InputError
from specrl_jax.parallel.sharding import ROWS
from specrl_jax.rl.rewards import Reward, score
from specrl_jax.rl.tasks import ArithmeticTask, InGraphTask, for_every_sample
from specrl_jax.rollout.trajectory import Sequences, Trajectory
from specrl_jax.training.supervised import join

# Problem counters of the training split are disjoint: RL counts from 0.
_DRAFT_COUNTERS, _SUPERVISED_COUNTERS = 1 << 29, 1 << 30


class Workload(Protocol):
    """A task as the training loops see it."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Of prompts and responses."""

    @property
    def in_graph(self) -> InGraphTask | None:
        """The task inside the compiled step, or None."""

    @property
    def prompt_width(self) -> int:
        """Most tokens of a prompt."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that close a response."""

    @property
    def corpus(self) -> Any:
        """Arrays that `supervised` reads."""

    def supervised(self, step: Int[Array, ""], corpus: Any) -> Sequences:
        """This device's supervised sequences of an update, traced."""

    def held_out(self, split: Split, count: int) -> tuple[Prompts, Any]:
        """Prompts that training never sees, and what `rewards` judges by."""

    def draft_prompts(self, count: int) -> Prompts:
        """Prompts whose rollouts train the draft head."""

    def rewards(self, problems: Any, trajectory: Trajectory) -> np.ndarray:
        """Reward of each response of a trajectory on the host, `[b]` float32."""


def response_text(tokenizer: PreTrainedTokenizerFast, trajectory: Trajectory, index: int) -> tuple[str, str]:
    """Prompt and response `index` of a trajectory on the host, as text."""
    samples = len(trajectory.lengths) // len(trajectory.prompts.lengths)
    group = index // samples
    prompt = trajectory.prompts.tokens[group, : trajectory.prompts.lengths[group]]
    response = trajectory.tokens[index, : trajectory.lengths[index]]
    return decode(tokenizer, prompt), decode(tokenizer, response)


def decode(tokenizer: PreTrainedTokenizerFast, tokens: Any, *, special: bool = True) -> str:
    """Text of one sequence of token ids, `special` tokens shown or not."""
    return str(tokenizer.decode(np.asarray(tokens), skip_special_tokens=not special))


def end_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The tokenizer's end token; chat models close a turn with it."""
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no end token (eos_token); set one, responses must end with it")
    return (int(tokenizer.eos_token_id),)


@dataclass(frozen=True, eq=False)
class ArithmeticWorkload:
    """config: law of the problems. seed: of the problems. supervised_batch: problems per update and device."""

    config: ArithmeticConfig
    tokenizer: PreTrainedTokenizerFast
    seed: int
    supervised_batch: int

    @cached_property
    def table(self) -> SymbolTable:
        """The tokenizer as arrays."""
        return symbol_table(self.tokenizer)

    @cached_property
    def in_graph(self) -> InGraphTask:
        """Problems by the global counter."""
        return ArithmeticTask(self.config, self.table, self.seed)

    @property
    def prompt_width(self) -> int:
        """Most tokens of a prompt."""
        return self.config.prompt_width

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The end token."""
        return (self.table.end_id,)

    @property
    def corpus(self) -> tuple[()]:
        """Nothing: problems are generated."""
        return ()

    def supervised(self, step: Int[Array, ""], corpus: tuple[()]) -> Sequences:
        """Fresh problems of the training split with their workings."""
        batch = self.supervised_batch
        index = step * lax.axis_size(ROWS) + lax.axis_index(ROWS)
        counters = _SUPERVISED_COUNTERS + index * batch + jnp.arange(batch, dtype=jnp.int32)
        problems = arithmetic.sample_problems(self.config, "train", self.seed, counters.astype(jnp.uint32))
        prompts = arithmetic.encode_prompts(self.table, problems)
        return join(*prompts, *arithmetic.encode_solutions(self.table, problems))

    def held_out(self, split: Split, count: int) -> tuple[Prompts, Any]:
        """The first problems of a split; the same for every seed, so that runs can be compared."""
        task = ArithmeticTask(self.config, self.table, 0)
        return jax.jit(lambda counters: task.issue(split, counters))(jnp.arange(count, dtype=jnp.uint32))

    def draft_prompts(self, count: int) -> Prompts:
        """Problems of the training split."""
        counters = jnp.uint32(_DRAFT_COUNTERS) + jnp.arange(count, dtype=jnp.uint32)
        return jax.jit(lambda counters: self.in_graph.issue("train", counters)[0])(counters)

    @cached_property
    def _rewards(self) -> Any:
        return jax.jit(self.in_graph.reward)

    def rewards(self, problems: Any, trajectory: Trajectory) -> np.ndarray:
        """1 for a right answer that ended, else 0."""
        samples = len(trajectory.lengths) // len(trajectory.prompts.lengths)
        problems = for_every_sample(problems, samples)
        return np.asarray(self._rewards(problems, jnp.asarray(trajectory.tokens), jnp.asarray(trajectory.lengths)))


@dataclass(frozen=True, eq=False)
class JsonlProblems:
    """Examples as prompts, judged on the host.

    max_prompt_tokens: longer prompts are dropped.
    """

    tokenizer: PreTrainedTokenizerFast
    examples: Sequence[Example]
    reward: Reward
    max_prompt_tokens: int

    @cached_property
    def encoded(self) -> EncodedPrompts:
        """The prompts that are kept, and how many are not."""
        return encode_examples(self.examples, self.tokenizer, self.max_prompt_tokens)

    @property
    def count(self) -> int:
        """Prompts that are kept."""
        return len(self.encoded.examples)

    @property
    def prompt_width(self) -> int:
        """Tokens of the longest prompt kept."""
        return int(self.encoded.prompts.tokens.shape[1])

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokenizer's end token."""
        return end_ids(self.tokenizer)

    def take(self, rows: Int[np.ndarray, "n"]) -> tuple[Prompts, Any]:
        """The named prompts and their examples."""
        prompts = jax.tree.map(lambda x: x[rows], self.encoded.prompts)
        return prompts, [self.encoded.examples[i] for i in rows]

    def held_out(self, split: Split, count: int) -> tuple[Prompts, Any]:
        """The test set is taken from the front, the development set from the back."""
        rows = np.arange(self.count)
        return self.take(rows[:count] if split == "test" else rows[-count:])

    def rewards(self, problems: Any, trajectory: Trajectory) -> np.ndarray:
        """The host reward of every response."""
        samples = len(trajectory.lengths) // len(trajectory.prompts.lengths)
        tokens, lengths = np.asarray(trajectory.tokens), np.asarray(trajectory.lengths)
        responses = [t[:n].tolist() for t, n in zip(tokens, lengths, strict=True)]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return score(texts, [example for example in problems for _ in range(samples)], self.reward)


@dataclass(frozen=True, eq=False)
class JsonlWorkload:
    """Prompts from examples, rewards on the host.

    train: examples of RL (and of draft data). test: held-out examples.
    supervised_examples: those of the warm-up.
    focus: share of every supervised batch drawn from `train` instead of all supervised examples.
    max_tokens: longer supervised texts are dropped.
    groups: prompts per RL step.
    """

    train: JsonlProblems
    test: JsonlProblems
    supervised_examples: Sequence[Example]
    seed: int
    groups: int
    max_tokens: int
    supervised_batch: int
    focus: float = 0.0

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Of prompts and responses."""
        return self.train.tokenizer

    @property
    def in_graph(self) -> None:
        """None: rewards are computed on the host."""
        return

    @property
    def prompt_width(self) -> int:
        """Tokens of the longest prompt kept."""
        return max(self.train.prompt_width, self.test.prompt_width)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokenizer's end token."""
        return self.train.end_ids

    @cached_property
    def corpus(self) -> tuple[Sequences, Sequences]:
        """All supervised texts, and those of the RL examples."""
        everything = encode_supervised(self.supervised_examples, self.tokenizer, self.max_tokens)
        focused = encode_supervised(self.train.examples, self.tokenizer, self.max_tokens)
        return _as_sequences(everything), _as_sequences(focused)

    def supervised(self, step: Int[Array, ""], corpus: tuple[Sequences, Sequences]) -> Sequences:
        """A random batch; the first `focus` of it comes from the RL examples."""
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), step), lax.axis_index(ROWS))
        focused = round(self.supervised_batch * self.focus)

        def draw(sequences: Sequences, count: int, key: Array) -> Sequences:
            rows = jax.random.randint(key, (count,), 0, sequences.lengths.shape[0])
            return jax.tree.map(lambda x: x[rows], sequences)

        everything, own = corpus
        first, second = jax.random.split(key)
        width = max(everything.tokens.shape[1], own.tokens.shape[1])
        parts = draw(own, focused, first), draw(everything, self.supervised_batch - focused, second)
        return jax.tree.map(lambda *x: jnp.concatenate(x), *(_widen(part, width) for part in parts))

    def issue(self, step: int) -> tuple[Prompts, Any]:
        """Prompts of an RL step: every example once per epoch."""
        return self.train.take(epoch_rows(self.seed, step, self.groups, self.train.count))

    def held_out(self, split: Split, count: int) -> tuple[Prompts, Any]:
        """Held-out examples, at most half of them for each split, so that two or more are never in both."""
        return self.test.held_out(split, min(count, max(1, self.test.count // 2)))

    def draft_prompts(self, count: int) -> Prompts:
        """The first prompts of the RL examples: so many, or as many as there are."""
        return self.train.take(np.arange(min(count, self.train.count)))[0]

    def rewards(self, problems: Any, trajectory: Trajectory) -> np.ndarray:
        """The host reward of every response."""
        return self.train.rewards(problems, trajectory)


def _as_sequences(texts: Any) -> Sequences:
    slots = np.arange(texts.tokens.shape[1])[None]
    learned = (slots >= texts.prompt_lengths[:, None]) & (slots < texts.lengths[:, None])
    arrays = (texts.tokens, texts.lengths, learned, np.zeros(texts.tokens.shape, np.float32))
    return Sequences(*(jnp.asarray(x) for x in arrays))


def _widen(sequences: Sequences, width: int) -> Sequences:
    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, width - x.shape[1]))) if x.ndim == 2 else x

    return jax.tree.map(pad, sequences)
