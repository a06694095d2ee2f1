"""Heads of one layer that draft one token after the other: cache, commit and propose.

Slot `p` holds the token `x_{p+1}` and a hidden state: of a committed pair it comes from the policy's features, of a
drafted token from the head's own output `h2` one step earlier. The layer stands at rotary position `p`; its logits
predict `x_{p+2}`. What it computes is in `draft_layer`: EAGLE-3 (Li et al., arXiv 2503.01840) or the layer of a policy
trained for multi-token prediction.

Keys and values of a slot depend on its pair only, so `commit` projects all new
pairs but attends for the last one alone. Its numerics are always plain: a draft
decides how many tokens a round emits, never which.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.draft_layer import (
    LayerConfig,
    LayerParams,
    LayerWeights,
    attention_input,
    draft_logits,
    fed_back,
    fuse,
    mix_and_mlp,
    project_keys,
    project_queries,
)
from specrl_jax.drafters.eagle3_params import Eagle3Config
from specrl_jax.drafters.protocol import Choice, Choose, Texts, choose_next, propose_tree
from specrl_jax.drafters.row_cache import attend, write
from specrl_jax.models.tree import Tree


@struct.dataclass
class Eagle3State:
    """keys, values: of the committed pairs. length: their number, of which the first `start` cannot be read.

    hidden: `h2` of each row's last one.
    """

    keys: Float[Array, "r g s c"]
    values: Float[Array, "r g s c"]
    length: Int[Array, "r"]
    start: Int[Array, "r"]
    hidden: Float[Array, "r d"]


def init_state(config: LayerConfig, rows: int, capacity: int) -> Eagle3State:
    """An empty state; `capacity` counts pairs and is rounded up to a multiple of 8."""
    dtype = jnp.dtype(config.dtype)
    shape = (rows, config.num_kv_heads, -(-capacity // 8) * 8, config.head_dim)
    hidden = jnp.zeros((rows, config.hidden_size), dtype)
    none = jnp.zeros((rows,), jnp.int32)
    return Eagle3State(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), none, none, hidden)


def commit(
    config: LayerConfig,
    params: LayerParams,
    embed: Float[Array, "v d"],
    state: Eagle3State,
    tokens: Int[Array, "r q"],
    features: Float[Array, "r q fd"],
    counts: Int[Array, "r"],
) -> Eagle3State:
    """Read the first `counts[r]` pairs of each row; see `protocol.Drafter.commit`.

    Pairs that do not fit the cache are dropped: the caller provides the capacity.
    """
    weights = params.with_rows(params.weights)
    rows, width = tokens.shape
    steps = jnp.arange(width, dtype=jnp.int32)[None]
    slots = jnp.where(steps < counts[:, None], state.length[:, None] + steps, -1)
    positions = jnp.maximum(slots.reshape(-1), 0)

    fused = fuse(config, weights, features.reshape(rows * width, -1))
    residual, x = attention_input(config, weights, embed, tokens.reshape(-1), fused, positions)
    keys, values = project_keys(config, weights, x, positions)
    length = state.length + counts
    all_keys, all_values = write(state.keys, keys, slots), write(state.values, values, slots)

    last = jnp.arange(rows, dtype=jnp.int32) * width + jnp.maximum(counts - 1, 0)
    queries = project_queries(config, weights, x[last], jnp.maximum(length - 1, 0))
    own = keys[last][:, :, None], values[last][:, :, None]
    attended = attend(queries[:, None], all_keys, all_values, state.start, length - 1, *own, jnp.ones((1, 1), bool))[
        :, 0
    ]
    hidden = mix_and_mlp(config, weights, residual[last], attended)
    hidden = jnp.where((counts > 0)[:, None], hidden, state.hidden)
    return Eagle3State(all_keys, all_values, length, state.start, hidden)


def propose(
    config: LayerConfig,
    params: LayerParams,
    embed: Float[Array, "v d"],
    state: Eagle3State,
    tree: Tree,
    choose: Choose,
) -> Choice:
    """Propose a tree of target tokens per row; see `protocol.Drafter.propose`.

    Keys and values of drafted tokens stay beside the cache, which is neither copied nor written.
    """
    weights = params.with_rows(params.weights)
    rows = state.hidden.shape[0]
    hidden = state.hidden[:, None]
    read: list[int] = []
    keys: list[Array] = []
    values: list[Array] = []

    def below(nodes: tuple[int, ...], before: Int[Array, "r m d"], candidates: int) -> Choice:
        nonlocal hidden
        count, depth = len(nodes), before.shape[2]
        if depth > 0:
            above = tree.inner(depth - 1)
            came_from = [above.index(tree.parents[node - 1]) for node in nodes]
            fed = fed_back(config, weights, hidden[:, np.array(came_from)].reshape(rows * count, -1))
            positions = jnp.repeat(state.length + (depth - 1), count)
            residual, x = attention_input(config, weights, embed, before[:, :, -1].reshape(-1), fed, positions)
            for store, new in zip((keys, values), project_keys(config, weights, x, positions), strict=True):
                store.append(new.reshape(rows, count, *new.shape[1:]).transpose(0, 2, 1, 3))
            read.extend(nodes)
            queries = project_queries(config, weights, x, positions)
            queries = queries.reshape(rows, count, *queries.shape[1:])
            own = jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2)
            sees = jnp.asarray(tree.sees[np.ix_(nodes, read)])
            attended = attend(queries, state.keys, state.values, state.start, state.length, *own, sees)
            attended = attended.reshape(rows * count, *attended.shape[2:])
            hidden = mix_and_mlp(config, weights, residual, attended).reshape(rows, count, -1)
        logits = draft_logits(config, weights, hidden.reshape(rows * count, -1)).reshape(rows, count, -1)
        return choose(logits, params.target_ids, before, candidates)

    return propose_tree(tree, below, rows)


@struct.dataclass
class Drafted:
    """keys, values: of the drafts so far, with room for more, `[r, g, k, c]`. hidden: `h2` of the last, `[r, d]`."""

    keys: Float[Array, "r g k c"]
    values: Float[Array, "r g k c"]
    hidden: Float[Array, "r d"]


def advance(
    config: LayerConfig,
    weights: LayerWeights,
    embed: Float[Array, "v d"],
    state: Eagle3State,
    carry: Drafted,
    tokens: Int[Array, "r"],
    step: Int[Array, ""],
) -> tuple[Drafted, Float[Array, "r dv"]]:
    """Take a draft of every row; the logits of the next (as `protocol.ChainDrafter.advance`)."""
    positions = state.length + step
    fed = fed_back(config, weights, carry.hidden)
    residual, x = attention_input(config, weights, embed, tokens, fed, positions)
    new_keys, new_values = project_keys(config, weights, x, positions)
    keys = lax.dynamic_update_slice_in_dim(carry.keys, new_keys[:, :, None], step, 2)
    values = lax.dynamic_update_slice_in_dim(carry.values, new_values[:, :, None], step, 2)
    queries = project_queries(config, weights, x, positions)[:, None]
    sees = (jnp.arange(keys.shape[2], dtype=jnp.int32) <= step)[None]
    attended = attend(queries, state.keys, state.values, state.start, state.length, keys, values, sees)
    hidden = mix_and_mlp(config, weights, residual, attended[:, 0])
    return Drafted(keys, values, hidden), draft_logits(config, weights, hidden)


@dataclass(frozen=True)
class LayerDrafter:
    """A head of one layer as the rollout uses it (`protocol.Drafter`)."""

    config: Any

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Residual-stream boundaries of the policy that the head reads."""
        return self.config.boundaries

    def init_state(self, rows: int, capacity: int) -> Eagle3State:
        """An empty state for `rows` rows of at most `capacity` pairs."""
        return init_state(self.config, rows, capacity)

    def commit(
        self,
        params: LayerParams,
        embed: Float[Array, "v d"],
        state: Eagle3State,
        tokens: Int[Array, "r q"],
        features: Float[Array, "r q fd"],
        counts: Int[Array, "r"],
    ) -> Eagle3State:
        """Read the first `counts[r]` pairs of each row."""
        return commit(self.config, params, params.embedding(embed), state, tokens, features, counts)

    def propose(
        self,
        params: LayerParams,
        embed: Float[Array, "v d"],
        state: Eagle3State,
        texts: Texts,
        tree: Tree,
        choose: Choose,
    ) -> Choice:
        """Propose a tree of tokens per row, whatever text it holds."""
        return propose(self.config, params, params.embedding(embed), state, tree, choose)

    def begin(
        self,
        params: LayerParams,
        embed: Float[Array, "v d"],
        state: Eagle3State,
        texts: Texts,
        depth: int,
        choose: Choose,
    ) -> tuple[Drafted, Choice]:
        """The draft after the last committed pair."""
        rows, groups, _, width = state.keys.shape
        empty = jnp.zeros((rows, groups, depth, width), state.keys.dtype)
        logits = draft_logits(self.config, params.with_rows(params.weights), state.hidden)
        return Drafted(empty, empty, state.hidden), choose_next(choose, logits, params.target_ids, jnp.int32(0))

    def advance(
        self,
        params: LayerParams,
        embed: Float[Array, "v d"],
        state: Eagle3State,
        carry: Drafted,
        tokens: Int[Array, "r"],
        step: Int[Array, ""],
        choose: Choose,
    ) -> tuple[Drafted, Choice]:
        """Take a draft of every row."""
        weights = params.with_rows(params.weights)
        carry, logits = advance(self.config, weights, params.embedding(embed), state, carry, tokens, step)
        return carry, choose_next(choose, logits, params.target_ids, step + 1)

    def skip(self, state: Eagle3State, counts: Int[Array, "r"]) -> Eagle3State:
        """Go on after a gap, whose slots are not read."""
        length = state.length + counts
        return replace(state, length=length, start=jnp.where(counts > 0, length, state.start))


@dataclass(frozen=True)
class Eagle3Drafter(LayerDrafter):
    """An EAGLE-3 head."""

    config: Eagle3Config
