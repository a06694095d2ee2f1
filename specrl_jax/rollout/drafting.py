"""Who drafts once more, when drafting stops, and which round reads the drafts.

Rule match emits the policy's own draws, whatever becomes of a draft: what a draft turned out to be says whether another
pays, and the doubtful ones are left out of the round (`ByConfidence`).

Rules that judge a draft by the law it was drawn from (`ratio`, `block`) emit the policy's law only where a draft is
verified whatever token it turned out to be. A draft that is dropped because its own token, or one after it, looked
doubtful leaves the verified ones with another law than the drafter's, and the emitted tokens with another than the
policy's. So under these rules whether a row drafts once more is decided by the drafts before, and all drafts are
verified, in the cheapest round that holds them (`ByDraftsBefore`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.rollout.control import (
    Body,
    Control,
    Plan,
    allocate,
    best_verified,
    room_left,
    share,
    worth_another_step,
    worth_of_next,
)

_LEAST = 1e-20  # of a draft's survival, where 0 would say that it was not made


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
class Drafting(ABC):
    """How many drafts a round makes, and which body reads them.

    control, plan: what is known before they are drawn. bodies: those with drafts for so many rows, numbered.
    longest: drafts of a row at most. worth: of a token of each row (`worth_of_tokens`).
    room: drafts that a row has room for, `[r]`. count: live rows.
    step_price, token_price: what another step, and a token more to verify, must save.
    per_row: whether rows may have different numbers of drafts.

    `survival` is how often each draft so far, and what stands beside it, survives, 0 for those not made.
    """

    control: Control
    plan: Plan
    bodies: Sequence[tuple[int, Body]]
    longest: int
    worth: Float[Array, "r"]
    room: Int[Array, "r"]
    count: Int[Array, ""]
    step_price: Float[Array, ""]
    token_price: Float[Array, ""]
    per_row: bool

    @property
    def budget(self) -> Int[Array, ""]:
        """Drafts that can be verified, of all rows."""
        return max(body.tokens for _, body in self.bodies) - self.count

    @abstractmethod
    def survival_of(
        self, found: Float[Array, "r c"], survival: Float[Array, "r k c"], step: Int[Array, ""]
    ) -> Float[Array, "r c"]:
        """How often drafts number `step` survive, by what they turned out to be: `found`, or 0 of rows without one."""

    @abstractmethod
    def goes_on(self, survival: Float[Array, "r k c"], step: Int[Array, ""]) -> Bool[Array, ""]:
        """Whether draft number `step` of the rows is worth its time."""

    @abstractmethod
    def body_for(self, worth: Float[Array, "r k c"]) -> Int[Array, ""]:
        """Number of the body that reads the drafts, by what each saves."""


@dataclass(frozen=True)
class ByConfidence(Drafting):
    """By what drafts turned out to be: the best of them are verified, or as many of each row (`per_row`)."""

    def survival_of(
        self, found: Float[Array, "r c"], survival: Float[Array, "r k c"], step: Int[Array, ""]
    ) -> Float[Array, "r c"]:
        """Those of rows that have room."""
        return jnp.where((step < self.room)[:, None], found, 0.0)

    def goes_on(self, survival: Float[Array, "r k c"], step: Int[Array, ""]) -> Bool[Array, ""]:
        """By what the next ones add to the best so far."""
        worths = self.worth[:, None, None] * survival
        left = room_left(self.bodies, self.longest, worths, step, self.count, self.body_for(worths))
        prices = self.step_price, self.token_price
        return worth_another_step(self.control, survival, self.worth, step, self.budget, left, *prices)

    def body_for(self, worth: Float[Array, "r k c"]) -> Int[Array, ""]:
        """The one whose best drafts are worth most beyond its time."""
        plan = self.plan
        return best_verified(plan.seconds, self.bodies, self.longest, worth, self.count, plan.per_second, self.per_row)


@dataclass(frozen=True)
class ByDraftsBefore(Drafting):
    """By the drafts before: all of them are verified."""

    def who(
        self, survival: Float[Array, "r k c"], step: Int[Array, ""], price: Float[Array, ""]
    ) -> tuple[Bool[Array, "r"], Float[Array, "r"]]:
        """Rows that make draft number `step`, and what that of each row is worth, by how often those before survive."""
        worth = worth_of_next(self.control, self.worth, path_survival(survival, step), step)
        worth = jnp.where(step < self.room, worth, 0.0)
        left = self.budget - jnp.sum(survival > 0.0, dtype=jnp.int32)
        return who_drafts(worth, left, price, self.per_row), worth

    def survival_of(
        self, found: Float[Array, "r c"], survival: Float[Array, "r k c"], step: Int[Array, ""]
    ) -> Float[Array, "r c"]:
        """The first are those planned. Whatever a draft is, it counts as one."""
        who, _ = self.who(survival, step, jnp.where(step > 0, self.token_price, 0.0))
        return jnp.where(who[:, None], jnp.maximum(found, _LEAST), 0.0)

    def goes_on(self, survival: Float[Array, "r k c"], step: Int[Array, ""]) -> Bool[Array, ""]:
        """By what the rows that would draft expect of it."""
        who, worth = self.who(survival, step, self.token_price)
        return jnp.sum(jnp.where(who, worth - self.token_price, 0.0)) > self.step_price

    def body_for(self, worth: Float[Array, "r k c"]) -> Int[Array, ""]:
        """The cheapest that holds all of them."""
        return cheapest_that_holds(self.plan.seconds, self.bodies, self.longest, worth > 0.0, self.count)


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
