"""An earlier rollout of the same prompts as drafts.

With `couple_epochs` the noise of a prompt is the same in every epoch, and a token of the
earlier policy is accepted with about 1 - TV(p_old, p_new).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.protocol import Choice, Choose, propose_tree
from specrl_jax.models.tree import Tree

_OTHER = -30.0  # logit of every token but the replayed one: finite, so that filters leave a law


@struct.dataclass
class Replay:
    """The rollout that is replayed; its sequences stand in the order of the new one's, on each device.

    tokens: responses, `[sequences, t]`. prompt_lengths: `[sequences]`.
    """

    tokens: Int[Array, "s t"]
    prompt_lengths: Int[Array, "s"]


@struct.dataclass
class ReplayState:
    """length: pairs of each row that have been read."""

    length: Int[Array, "r"]


@dataclass(frozen=True)
class ReplayDrafter:
    """Proposes what stands at the same place in an earlier response; its parameters are a `Replay`.

    vocab_size: of the policy.
    """

    vocab_size: int

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Reads no features."""
        return ()

    def init_state(self, rows: int, capacity: int) -> ReplayState:
        """Nothing read."""
        return ReplayState(jnp.zeros((rows,), jnp.int32))

    def commit(
        self,
        params: Replay,
        embed: Float[Array, "v d"],
        state: ReplayState,
        tokens: Int[Array, "r q"],
        features: Float[Array, "r q fd"],
        counts: Int[Array, "r"],
    ) -> ReplayState:
        """Count the pairs."""
        return ReplayState(state.length + counts)

    def propose(
        self,
        params: Replay,
        embed: Float[Array, "v d"],
        state: ReplayState,
        sequence: Int[Array, "r"],
        tree: Tree,
        choose: Choose,
    ) -> Choice:
        """The tokens that followed, whatever has been emitted before them; further candidates are arbitrary."""
        # Prompt and response of `m` tokens have `prompt + m - 1` pairs.
        emitted = state.length + 1 - params.prompt_lengths[sequence]

        def logits_below(depth: int, nodes: tuple[int, ...], before: Any) -> Float[Array, "r m v"]:
            token = params.tokens.at[sequence, emitted + depth].get(mode="fill", fill_value=0)
            logits = jnp.where(jax.nn.one_hot(token, self.vocab_size, dtype=bool), 0.0, _OTHER)
            return jnp.repeat(logits[:, None], len(nodes), axis=1)

        ids = jnp.arange(self.vocab_size, dtype=jnp.int32)
        return propose_tree(tree, choose, ids, logits_below, sequence.shape[0])
