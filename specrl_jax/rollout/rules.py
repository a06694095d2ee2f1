"""Verification rules as the rollout is told them: frozen dataclasses behind one interface.

To add a rule, write one more. `Match` is the default: its tokens are those of the run
without speculation. `Ratio` and `Block` have the policy's law, not its very tokens.
At temperature 0 all of them are greedy verification.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specrl_jax.errors import InputError
from specrl_jax.models.tree import Tree
from specrl_jax.rollout.draws import Draws
from specrl_jax.rollout.noise import round_keys, subkeys
from specrl_jax.rollout.verification import Proposed, block, lenient_law, match, ratio

MAX_DRAFTS = 64
"""Drafts of a round; more never pay."""


def _check_length(draft_length: int) -> None:
    if not 0 <= draft_length <= MAX_DRAFTS:
        raise InputError(f"draft_length is {draft_length}; choose a number from 0 to {MAX_DRAFTS}")


@runtime_checkable
class Rule(Protocol):
    """How drafts are drawn and judged; a frozen dataclass."""

    @property
    def needs_laws(self) -> bool:
        """Whether `decide` reads the laws of policy and drafter over the whole vocabulary."""

    @property
    def exact(self) -> bool:
        """Whether what is emitted has the policy's law."""

    @property
    def argmax_drafts(self) -> bool:
        """Whether the drafter proposes its most probable tokens instead of drawing them."""

    def tree(self, draft_length: int) -> Tree:
        """The round's tokens for drafts up to `draft_length` deep."""

    def draft_keys(self, keys: UInt32[Array, "r 2"], rounds: Int[Array, "r"]) -> UInt32[Array, "r 2"]:
        """Noise keys for drawing drafts in each row's round `rounds[r]`."""

    def decide(
        self,
        tree: Tree,
        drafts: Int[Array, "r n"],
        own: Int[Array, "r n1"],
        log_p: Float[Array, "r n1 v"] | None,
        log_q: Float[Array, "r n v"] | None,
        draws: Draws,
    ) -> Proposed:
        """What to emit.

        Args:
            tree: of the round.
            drafts: token of every node but the root, -1 where a chain has no more.
            own: the policy's draws below every node with the noise of their positions.
            log_p: its law there, or None where `needs_laws` is false.
            log_q: the law that each draft was drawn from, likewise.
            draws: random draws of this round alone.
        """

    def behaviour(self, log_p: Float[Array, "r k1 v"], log_q: Float[Array, "r k v"]) -> Float[Array, "r k1 v"]:
        """The law that the tokens of a round are really drawn from; `log_p` where the rule is exact.

        Where a chain has no more drafts `log_q` is to be `log_p`: what follows the last draft is the policy's own.
        """


@dataclass(frozen=True)
class Match:
    """Sample-and-match: the tokens are those of the run without speculation.

    branches: candidates below a node, the best of the drafter's law with the policy's noise.
    shape: "comb": only the best candidate of each depth has candidates of its own; "full": all have.
    argmax_drafts: take the drafter's most probable tokens, without the noise.
    """

    branches: int = 1
    shape: Literal["comb", "full"] = "comb"
    argmax_drafts: bool = False
    needs_laws: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.branches < 1:
            raise InputError(f"branches is {self.branches}; it must be at least 1 (a chain)")

    def tree(self, draft_length: int) -> Tree:
        """A chain, or a tree of `branches` candidates; InputError when it is too large to be of use."""
        _check_length(draft_length)
        drafts = sum(self.branches ** (d + 1 if self.shape == "full" else 1) for d in range(draft_length))
        if drafts > MAX_DRAFTS:
            raise InputError(
                f"a tree of {self.branches} branches and depth {draft_length} has {drafts} drafts; "
                f"choose at most {MAX_DRAFTS}"
            )
        return (Tree.full if self.shape == "full" else Tree.comb)(draft_length, self.branches)

    def draft_keys(self, keys: UInt32[Array, "r 2"], rounds: Int[Array, "r"]) -> UInt32[Array, "r 2"]:
        """The policy's own noise."""
        return keys

    def decide(self, tree: Tree, drafts: Any, own: Any, log_p: Any, log_q: Any, draws: Draws) -> Proposed:
        """See `match`."""
        return match(tree, drafts, own)

    def behaviour(self, log_p: Any, log_q: Any) -> Any:
        """The policy's law."""
        return log_p


@dataclass(frozen=True)
class _Sampled:
    """What `Ratio` and `Block` share: chains, drafted with noise of their own in every round."""

    argmax_drafts: bool = False
    needs_laws: ClassVar[bool] = True

    @property
    def exact(self) -> bool:
        """Whether what is emitted has the policy's law."""
        return True

    def tree(self, draft_length: int) -> Tree:
        """A chain; InputError when it is too long to be of use."""
        _check_length(draft_length)
        return Tree.chain(draft_length)

    def draft_keys(self, keys: UInt32[Array, "r 2"], rounds: Int[Array, "r"]) -> UInt32[Array, "r 2"]:
        """Noise of the drafter alone, fresh in every round."""
        return subkeys(round_keys(keys, rounds), "draft")

    def behaviour(self, log_p: Any, log_q: Any) -> Any:
        """The policy's law."""
        return log_p


@dataclass(frozen=True)
class Ratio(_Sampled):
    """Ratio test on every draft.

    argmax_drafts: as in `Match`; by default drafts are drawn with noise of their own.
    lenience: factor by which p may fall short of q before a draft is in doubt; above 1 the law changes.
    """

    lenience: float = 1.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.lenience < math.inf:
            raise InputError(f"lenience is {self.lenience}; choose a number of at least 1 (exact)")

    @property
    def exact(self) -> bool:
        """Without lenience."""
        return self.lenience == 1.0

    def decide(self, tree: Tree, drafts: Any, own: Any, log_p: Any, log_q: Any, draws: Draws) -> Proposed:
        """See `ratio`."""
        return ratio(drafts, log_p, log_q, draws, math.log(self.lenience))

    def behaviour(self, log_p: Any, log_q: Any) -> Any:
        """See `lenient_law`; beyond the last draft the policy's law."""
        if self.exact:
            return log_p
        return jnp.concatenate([lenient_law(log_p[:, :-1], log_q, math.log(self.lenience)), log_p[:, -1:]], axis=1)


@dataclass(frozen=True)
class Block(_Sampled):
    """Block verification; `argmax_drafts` as in `Ratio`."""

    def decide(self, tree: Tree, drafts: Any, own: Any, log_p: Any, log_q: Any, draws: Draws) -> Proposed:
        """See `block`."""
        return block(drafts, log_p, log_q, draws)
