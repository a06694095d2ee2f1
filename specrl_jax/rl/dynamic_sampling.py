"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): prompts are rolled out until a batch of groups can teach.

A group whose rewards are all equal has no advantage. Such groups are dropped, and the next prompts are rolled out,
until the batch is full or a limit is reached; contrasting groups beyond the batch are dropped too. What is still
missing at the limit stays a group without contrast, whose tokens the loss does not count.

All devices roll out again while the batch of all of them is not full, and groups move between devices when the batch
is put together: it does not depend on the mesh.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.parallel.sharding import ROWS, replicated
from specrl_jax.rl.advantages import has_contrast
from specrl_jax.rl.grpo import GrpoState, RolloutState
from specrl_jax.rollout.trajectory import Trajectory, both_stats


@struct.dataclass
class Drawn:
    """A batch that fills up.

    trajectory, rewards: contrasting groups first, in the order of their prompts, then groups of the newest rollout
        without contrast. Speculation counts, entropy and controller are those of all rollouts.
    rollouts: so far.
    contrasting: groups with contrast among all that were rolled out.
    tokens, reward_sum: of all responses that were rolled out.
    """

    trajectory: Trajectory
    rewards: Float[Array, "b"]
    rollouts: Int[Array, ""]
    contrasting: Int[Array, ""]
    tokens: Int[Array, ""]
    reward_sum: Float[Array, ""]


Sample = Callable[[RolloutState], tuple[Trajectory, Float[Array, "b"]]]
"""One rollout and its rewards."""


def _rows(trajectory: Trajectory) -> Trajectory:
    """What a trajectory has of every prompt and response."""
    return replace(trajectory, entropy_sum=None, stats=None, control=None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DynamicSampling:
    """How a batch is filled.

    most: rollouts of a step at most. groups: prompts of a rollout, and of the batch. samples: responses to each.
    mesh: over which rows are split.
    """

    most: int
    groups: int
    samples: int
    mesh: Mesh

    def goes_on(self, drawn: Drawn) -> Bool[Array, ""]:
        """Whether another rollout is due."""
        return (drawn.rollouts < self.most) & (drawn.contrasting < self.groups)

    def upcoming(self, served: RolloutState, drawn: Drawn) -> RolloutState:
        """What the next rollout reads: the same policy, the next prompts, and noise of its own.

        A prompt of a small dataset may come again within a step; its second group is another draw.
        """
        issued = served.issued + self.groups * drawn.rollouts.astype(jnp.uint32)
        return replace(served, issued=issued, attempt=drawn.rollouts, control=drawn.trajectory.control)

    def added(self, drawn: Drawn | None, trajectory: Trajectory, rewards: Float[Array, "b"]) -> Drawn:
        """The batch with a rollout of its own kind; None is a batch before the first."""
        if drawn is None:
            drawn = _nothing(trajectory, rewards)
        given = lax.with_sharding_constraint((drawn, trajectory, rewards), replicated(self.mesh))
        drawn, trajectory, rewards = given
        kept, fresh = (has_contrast(x, self.samples) for x in (drawn.rewards, rewards))
        # A filler is of the newest rollout: before the first there is none.
        rank = jnp.concatenate([jnp.where(kept, 0, 3), jnp.where(fresh, 1, 2)])
        order = jnp.argsort(rank, stable=True)[: self.groups]

        def pick(before: Array, new: Array) -> Array:
            grouped = jnp.concatenate([before, new]).reshape(2 * self.groups, -1, *new.shape[1:])
            return grouped[order].reshape(new.shape)

        ours, theirs = (_rows(drawn.trajectory), drawn.rewards), (_rows(trajectory), rewards)
        picked = jax.tree.map(pick, ours, theirs)
        rows, picked_rewards = lax.with_sharding_constraint(picked, NamedSharding(self.mesh, P(ROWS)))
        return Drawn(
            trajectory=replace(
                rows,
                entropy_sum=drawn.trajectory.entropy_sum + trajectory.entropy_sum,
                stats=both_stats(drawn.trajectory.stats, trajectory.stats),
                control=trajectory.control,
            ),
            rewards=picked_rewards,
            rollouts=drawn.rollouts + 1,
            contrasting=drawn.contrasting + jnp.sum(fresh, dtype=jnp.int32),
            tokens=drawn.tokens + jnp.sum(trajectory.lengths, dtype=jnp.int32),
            reward_sum=drawn.reward_sum + jnp.sum(rewards),
        )

    def filled(self, sample: Sample, served: RolloutState) -> Drawn:
        """The batch of a step, traced."""

        def another(drawn: Drawn) -> Drawn:
            return self.added(drawn, *sample(self.upcoming(served, drawn)))

        nothing = _nothing(*jax.eval_shape(sample, served))
        nothing = replace(nothing, trajectory=replace(nothing.trajectory, control=served.control))
        return lax.while_loop(self.goes_on, another, nothing)

    def past(self, state: GrpoState, drawn: Drawn) -> GrpoState:
        """The state before the updates of a step, which count the prompts of one rollout as issued."""
        return replace(state, issued=state.issued + self.groups * (drawn.rollouts - 1).astype(jnp.uint32))

    def metrics(self, drawn: Drawn) -> dict[str, Array]:
        """What was rolled out: `sampled_groups`, of them `dropped_groups` (no contrast) and `surplus_groups` (beyond
        the batch), `sampled_tokens`, and `sampled_reward_mean` where `reward_mean` is that of the batch."""
        sampled = drawn.rollouts * self.groups
        counts = {
            "sampled_groups": sampled,
            "dropped_groups": sampled - drawn.contrasting,
            "surplus_groups": jnp.maximum(drawn.contrasting - self.groups, 0),
            "sampled_tokens": drawn.tokens,
        }
        mean = drawn.reward_sum / (sampled * self.samples).astype(jnp.float32)
        return {name: x.astype(jnp.float32) for name, x in counts.items()} | {"sampled_reward_mean": mean}


def _nothing(trajectory: Any, rewards: Any) -> Drawn:
    """A batch before the first rollout; the arguments may be shapes."""
    trajectory, rewards = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (trajectory, rewards))
    zero = jnp.int32(0)
    return Drawn(trajectory, rewards, rollouts=zero, contrasting=zero, tokens=zero, reward_sum=jnp.float32(0.0))
