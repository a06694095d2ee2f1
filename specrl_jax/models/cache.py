"""Key/value cache with one length per row.

Slot `s` of a row holds position `s` of its sequence. Entries at or beyond
`length` do not count: a query at position `p` reads slots `0..p` only, and a
token is written before it is read. Rejected drafts therefore need no rollback;
the next round overwrites them.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specrl_jax.models.numerics import Numerics


@struct.dataclass
class KVCache:
    """Keys and values of every layer, rows first.

    keys, values: one array `[rows, kv_heads, slots, head_dim]` per layer.
    length: tokens of each row that count, `[rows]`.
    """

    keys: tuple[Float[Array, "r g s c"], ...]
    values: tuple[Float[Array, "r g s c"], ...]
    length: Int[Array, "r"]

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return self.keys[0].shape[2]


def init_cache(
    *, num_layers: int, num_kv_heads: int, head_dim: int, rows: int, capacity: int, dtype: Any, numerics: Numerics
) -> KVCache:
    """An empty cache; `capacity` is rounded up to whole key blocks."""
    slots = -(-capacity // numerics.key_block) * numerics.key_block
    shape = (rows, num_kv_heads, slots, head_dim)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        length=jnp.zeros((rows,), jnp.int32),
    )


def write_slots(
    cached: Float[Array, "r g s c"], new: Float[Array, "n g c"], rows: Int[Array, "n"], positions: Int[Array, "n"]
) -> Float[Array, "r g s c"]:
    """Write token `n` into slot `positions[n]` of row `rows[n]`; padding (position -1) is dropped."""
    slots = jnp.where(positions < 0, cached.shape[2], positions)
    return cached.at[rows, :, slots].set(new, mode="drop")


def keep_path(
    cached: Float[Array, "r g s c"], first: Int[Array, "r"], path: Int[Array, "r q"]
) -> Float[Array, "r g s c"]:
    """Move slots `first + path[:, j]` of each row to `first + j`: the accepted path of a tree, without its siblings.

    Slots beyond the capacity are left out.
    """
    rows = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]
    kept = cached.at[rows, :, first[:, None] + path].get(mode="clip")
    targets = first[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    return cached.at[rows, :, targets].set(kept, mode="drop")
