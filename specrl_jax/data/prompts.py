"""Encoded prompts, as the rollout takes them."""

from flax import struct
from jaxtyping import Array, Int, UInt32


@struct.dataclass
class Prompts:
    """A batch of prompts.

    tokens: right-padded token ids, `[g, p]`.
    lengths: tokens of each prompt, at least 1, `[g]`.
    row_ids: identity of each prompt in its dataset (never a batch slot), `[g]`;
        it keys the noise of the prompt's rollouts.
    """

    tokens: Int[Array, "g p"]
    lengths: Int[Array, "g"]
    row_ids: UInt32[Array, "g"]
