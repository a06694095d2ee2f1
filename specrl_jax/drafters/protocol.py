"""What the rollout asks of a drafter.

A drafter reads what the policy emitted and proposes the next tokens. It is a
frozen, hashable description without arrays, so that it can be a static argument
of `jit`; its parameters and its state are pytrees that go in and come out.

Slots. Slot `p` of a row pairs the policy's feature `g_p` (residual streams at
position `p`) with the token `x_{p+1}` that the policy emitted there, and says
something about `x_{p+2}`. After a prefill of `n` prompt tokens and one sampled
token, `n` pairs are read; after a round that emitted `m` tokens, `m` more.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

Choose = Callable[[Float[Array, "r v"], Int[Array, "v"], int], Int[Array, "r"]]
"""`choose(logits, target_ids, step)` picks one target token per row from float32 draft logits; column `i` of
the logits stands for target token `target_ids[i]`. The rollout supplies it: it holds temperature and noise."""


class DraftState(Protocol):
    """A pytree. The row is the leading axis of every leaf, so `x[indices]` compacts rows."""

    @property
    def length(self) -> Int[Array, "r"]:
        """Pairs of each row that have been read."""


@runtime_checkable
class Drafter(Protocol):
    """A proposer of tokens, told apart from other drafters by its static description."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Residual-stream boundaries of the policy whose concatenation is the feature; may be empty."""

    def init_state(self, rows: int, capacity: int) -> Any:
        """An empty state for `rows` rows of at most `capacity` pairs."""

    def commit(
        self,
        params: Any,
        embed: Float[Array, "v d"],
        state: Any,
        tokens: Int[Array, "r q"],
        features: Float[Array, "r q fd"],
        counts: Int[Array, "r"],
    ) -> Any:
        """Read the first `counts[r]` pairs of each row, in the slots from `state.length[r]` on.

        Args:
            params: the drafter's parameters.
            embed: the policy's embedding.
            state: from `init_state` or an earlier `commit`.
            tokens, features: pairs; `tokens[r, j]` follows the position of `features[r, j]`.
                Pairs at or beyond `counts[r]` are padding.
            counts: pairs to read, 0 to q; a row with 0 keeps its state.

        Returns:
            The state with `length` advanced by `counts`.
        """

    def propose(
        self, params: Any, embed: Float[Array, "v d"], state: Any, num_drafts: int, choose: Choose
    ) -> Int[Array, "r k"]:
        """Propose the `num_drafts` (at least 1) tokens after the last committed one; the state does not change."""
