"""Responses that come near the most tokens there may be, or reach them without an end (DAPO, arXiv 2503.14476)."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Truncated = Literal["keep", "mask"]
"""What the loss makes of truncated responses: they count like others, or not at all."""


def overlong_penalty(lengths: Int[Array, "b"], ended: Bool[Array, "b"], longest: int, buffer: int) -> Float[Array, "b"]:
    """Soft overlong punishment (eq. 13): 0 up to `longest - buffer` tokens, then linear to -1 at `longest`.

    A truncated response would have gone on: it gets -1.

    Args:
        lengths: response tokens, end token included.
        ended: whether the response closed with an end token.
        longest: most tokens of a response.
        buffer: tokens before it in which the penalty grows, at least 1.
    """
    beyond = lengths.astype(jnp.float32) - (longest - buffer)
    return jnp.where(ended, -jnp.clip(beyond / buffer, 0.0, 1.0), -1.0)
