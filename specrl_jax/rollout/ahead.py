"""Who drafts, decided before anything is drawn.

Rules that judge a draft by the law it was drawn from (`ratio`, `block`) emit the policy's law only where a draft is
verified whatever token it turned out to be. A draft that is dropped because its own token, or one after it, looked
doubtful leaves the verified ones with another law than the drafter's, and the emitted tokens with another than the
policy's. So under these rules whether a row drafts once more is decided by the drafts before, and all drafts are
verified, in the cheapest round that holds them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.rollout.control import Body, Control, allocate, share, worth_of_next


def path_survival(survival: Float[Array, "r k c"], step: Int[Array, ""]) -> Float[Array, "r"]:
    """How often the path to draft number `step` of each row survives."""
    return jnp.where(step == 0, 1.0, survival[:, jnp.maximum(step - 1, 0), 0])


def who_drafts(
    worth: Float[Array, "r"], left: Int[Array, ""], price: Float[Array, ""], per_row: bool = True
) -> Bool[Array, "r"]:
    """Rows that draft once more: those to whom it is worth most, as many as can still be verified.

    Args:
        worth: what the next draft of each row saves, by what is known before it is drawn; 0 where there is none.
        left: drafts that there is room for. price: what verifying one must save.
        per_row: else all rows that can draft do, or none does.
    """
    dealt = (allocate if per_row else share)(worth[:, None, None], left)[:, 0, 0]
    count = jnp.sum(worth > 0.0, dtype=jnp.float32)
    return dealt & (worth > price if per_row else jnp.sum(worth) > price * count)


@dataclass(frozen=True)
class Known:
    """What is known before the drafts of a round are drawn.

    worth: of a token of each row (`worth_of_tokens`). room: drafts that a row has room for, `[r]`.
    budget: drafts that can be verified, of all rows. per_row: as for `who_drafts`.
    """

    control: Control
    worth: Float[Array, "r"]
    room: Int[Array, "r"]
    budget: Int[Array, ""]
    per_row: bool

    def who(
        self, survival: Float[Array, "r k c"], step: Int[Array, ""], price: Float[Array, ""]
    ) -> tuple[Bool[Array, "r"], Float[Array, "r"]]:
        """Rows that make draft number `step`, and what that of each row is worth, by how often those before survive."""
        worth = worth_of_next(self.control, self.worth, path_survival(survival, step), step)
        worth = jnp.where(step < self.room, worth, 0.0)
        left = self.budget - jnp.sum(survival > 0.0, dtype=jnp.int32)
        return who_drafts(worth, left, price, self.per_row), worth


def cheapest_that_holds(
    seconds: Float[Array, "n"],
    bodies: Sequence[tuple[int, Body]],
    longest: int,
    taken: Bool[Array, "r k c"],
    count: Int[Array, ""],
) -> Int[Array, ""]:
    """Number of the quickest body, of numbered ones of as many rows, that verifies all drafts that were taken.

    seconds: of all bodies, as planned. count: live rows.
    """
    drafts = jnp.sum(taken, dtype=jnp.int32)
    depth = jnp.sum(jnp.any(taken, axis=(0, 2)), dtype=jnp.int32)
    holds = jnp.stack([(body.tokens - count >= drafts) & (body.depth(longest) >= depth) for _, body in bodies])
    numbers = jnp.array([index for index, _ in bodies], jnp.int32)
    return numbers[jnp.argmin(jnp.where(holds, seconds[numbers], jnp.inf))]
