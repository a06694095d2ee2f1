"""Drafters that put exactness to the test: one that is wrong on purpose, and replays with planted errors."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.protocol import Choice, Choose, Drafter, Texts
from specrl_jax.models.tree import Tree


@dataclass(frozen=True)
class Adversary:
    """A drafter with its logits negated: it proposes what it believes in least."""

    drafter: Drafter

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Those of the drafter."""
        return self.drafter.boundaries

    def init_state(self, rows: int, capacity: int) -> Any:
        """As the drafter's."""
        return self.drafter.init_state(rows, capacity)

    def commit(
        self,
        params: Any,
        embed: Float[Array, "v d"],
        state: Any,
        tokens: Int[Array, "r q"],
        features: Float[Array, "r q fd"],
        counts: Int[Array, "r"],
    ) -> Any:
        """As the drafter does."""
        return self.drafter.commit(params, embed, state, tokens, features, counts)

    def propose(
        self,
        params: Any,
        embed: Float[Array, "v d"],
        state: Any,
        texts: Texts,
        tree: Tree,
        choose: Choose,
    ) -> Choice:
        """What the drafter would propose last."""

        def worst(logits: Array, target_ids: Array, before: Array, count: int) -> Choice:
            return choose(-logits, target_ids, before, count)

        return self.drafter.propose(params, embed, state, texts, tree, worst)


def corrupted(tokens: Int[np.ndarray, "b t"], rate: float, vocab_size: int, seed: int) -> Int[np.ndarray, "b t"]:
    """Responses in which a share of the tokens has been replaced at random."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(tokens.shape) < rate
    return np.where(wrong, rng.integers(vocab_size, size=tokens.shape), tokens).astype(np.int32)
