"""Tasks whose prompts and rewards are computed in the graph."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specrl_jax.data import arithmetic
from specrl_jax.data.arithmetic import ArithmeticConfig, Split
from specrl_jax.data.prompts import Prompts
from specrl_jax.data.symbols import SymbolTable


@runtime_checkable
class InGraphTask(Protocol):
    """Problems by number, and what a response to one is worth; both methods are traced."""

    def issue(self, split: Split, counters: UInt32[Array, "g"]) -> tuple[Prompts, Any]:
        """Prompts of problems `counters`, and a pytree (row-leading) that `reward` judges by."""

    def reward(self, problems: Any, tokens: Int[Array, "b t"], lengths: Int[Array, "b"]) -> Float[Array, "b"]:
        """Reward of each response; `problems` has a row for each of them."""


@dataclass(frozen=True, eq=False)
class ArithmeticTask:
    """Sums and differences with written-out working (`data/arithmetic.py`).

    config: law of the problems. table: the tokenizer as arrays. seed: of the problems.
    """

    config: ArithmeticConfig
    table: SymbolTable
    seed: int

    def issue(self, split: Split, counters: UInt32[Array, "g"]) -> tuple[Prompts, Any]:
        """Problem `counters[i]` of the split; its counter is its row id."""
        problems = arithmetic.sample_problems(self.config, split, self.seed, counters)
        tokens, lengths = arithmetic.encode_prompts(self.table, problems)
        return Prompts(tokens, lengths, counters), problems

    def reward(self, problems: Any, tokens: Int[Array, "b t"], lengths: Int[Array, "b"]) -> Float[Array, "b"]:
        """1 for a right answer that ended, else 0."""
        return arithmetic.reward(self.table, problems, tokens, lengths)


def for_every_sample(problems: Any, samples: int) -> Any:
    """Repeat each problem for the responses of its group."""
    return jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), problems)
