"""An earlier rollout of the same prompts as drafts.

With `couple_epochs` the noise of a prompt is the same in every epoch, and a token of the
earlier policy is accepted with about 1 - TV(p_old, p_new).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.protocol import Choice, Choose, TextDrafter, Texts, TextState, propose_tree
from specrl_jax.models.tree import Tree

_OTHER = -30.0  # logit of every token but the replayed one: finite, so that filters leave a law


@struct.dataclass
class Replay:
    """The rollout that is replayed; its sequences stand in the order of the new one's, on each device.

    tokens: responses, `[sequences, t]`.
    """

    tokens: Int[Array, "s t"]


@dataclass(frozen=True)
class ReplayDrafter(TextDrafter):
    """Proposes what stands at the same place in an earlier response; its parameters are a `Replay`.

    vocab_size: of the policy.
    """

    vocab_size: int

    def propose(
        self,
        params: Replay,
        embed: Float[Array, "v d"],
        state: TextState,
        texts: Texts,
        tree: Tree,
        choose: Choose,
    ) -> Choice:
        """The tokens that followed, whatever has been emitted before them; further candidates are arbitrary."""
        sequence = texts.sequence
        emitted = texts.lengths[sequence]

        ids = jnp.arange(self.vocab_size, dtype=jnp.int32)

        def below(nodes: tuple[int, ...], before: Int[Array, "r m d"], count: int) -> Choice:
            token = params.tokens.at[sequence, emitted + before.shape[2]].get(mode="fill", fill_value=0)
            logits = jnp.where(jax.nn.one_hot(token, self.vocab_size, dtype=bool), 0.0, _OTHER)
            return choose(jnp.repeat(logits[:, None], len(nodes), axis=1), ids, before, count)

        return propose_tree(tree, below, sequence.shape[0])
