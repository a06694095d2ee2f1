"""Parallel block drafter: all drafts of a round from one forward (DFlash, arXiv 2602.06036).

A block is the newest token and mask tokens after it. Its slots attend to each other in both directions, and to the
policy's features of all tokens before: `hidden_norm(fc(g))`, projected by every layer's own key and value kernels, so
that committing a token writes a key and a value per layer and nothing else. With DSpark's correction (arXiv
2607.05147) a draft's logits are moved by the draft before it, through two kernels of low rank, and a small head says
how likely each draft is to be accepted.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.block_params import BlockConfig, BlockParams, BlockWeights
from specrl_jax.drafters.protocol import Choice, Choose, Texts, choose_next, propose_tree
from specrl_jax.drafters.row_cache import Cached, attend, empty_cache, heads_first, run_layers, write
from specrl_jax.models.linear import linear, logits_of
from specrl_jax.models.norm import rms_norm
from specrl_jax.models.policy import project_qkv
from specrl_jax.models.tree import Tree


@struct.dataclass
class BlockState:
    """keys, values: of the tokens with known features, per layer. length: their number, of which the first `start`
    cannot be read. newest: the token after them.
    """

    keys: Cached
    values: Cached
    length: Int[Array, "r"]
    start: Int[Array, "r"]
    newest: Int[Array, "r"]


@struct.dataclass
class Block:
    """A block that has been filled in. hidden, logits: of its drafts, before any correction, `[r, k, ...]`."""

    hidden: Float[Array, "r k d"]
    logits: Float[Array, "r k dv"]


def fuse(config: BlockConfig, weights: BlockWeights, features: Float[Array, "n fd"]) -> Float[Array, "n d"]:
    """What the layers attend to of a token before the block."""
    fused = linear(features.astype(weights.fc.dtype), weights.fc)
    return rms_norm(fused, weights.hidden_norm, config.backbone.rms_norm_eps)


def block_tokens(config: BlockConfig, newest: Int[Array, "*n"]) -> Int[Array, "*n s"]:
    """The newest token and masks after it."""
    masks = jnp.full((*newest.shape, config.block_size - 1), config.mask_token_id, jnp.int32)
    return jnp.concatenate([newest[..., None], masks], axis=-1)


def corrected(
    config: BlockConfig, weights: BlockWeights, logits: Float[Array, "*n dv"], before: Int[Array, "*n"]
) -> Float[Array, "*n dv"]:
    """Draft logits, moved by the token before each draft."""
    if weights.markov_in is None or weights.markov_out is None:
        return logits
    rows = weights.markov_in[before.reshape(-1)].astype(weights.markov_out.dtype)
    return logits + linear(rows, weights.markov_out, jnp.float32).reshape(logits.shape)


def confidence_logits(
    config: BlockConfig, weights: BlockWeights, hidden: Float[Array, "*n d"], before: Int[Array, "*n"]
) -> Float[Array, "*n"] | None:
    """Log-odds that a draft is accepted, or None without that head."""
    if weights.confidence_kernel is None or weights.confidence_bias is None:
        return None
    x = hidden.reshape(-1, hidden.shape[-1])
    if weights.markov_in is not None:
        x = jnp.concatenate([x, weights.markov_in[before.reshape(-1)].astype(x.dtype)], axis=-1)
    odds = linear(x, weights.confidence_kernel, jnp.float32)[:, 0] + weights.confidence_bias.astype(jnp.float32)
    return odds.reshape(before.shape)


def draft_hidden(
    config: BlockConfig, weights: BlockWeights, embed: Float[Array, "v d"], state: BlockState
) -> Float[Array, "r k d"]:
    """Hidden states of all drafts of a block, after the final norm."""
    backbone, slots = config.backbone, config.block_size
    rows = state.newest.shape[0]
    x = embed[block_tokens(config, state.newest).reshape(-1)].astype(weights.fc.dtype)
    positions = state.length[:, None] + jnp.arange(slots, dtype=jnp.int32)[None]
    everyone = jnp.ones((slots, slots), bool)

    def attend_in(i: int, q: Array, k: Array, v: Array) -> Array:
        own = heads_first(k), heads_first(v)
        return attend(q, state.keys[i], state.values[i], state.start, state.length, *own, everyone)

    x = run_layers(backbone, weights.layers, x, positions, attend_in)
    x = rms_norm(x, weights.final_norm, backbone.rms_norm_eps).reshape(rows, slots, -1)
    return x if config.sample_from_anchor else x[:, 1:]


@dataclass(frozen=True)
class BlockDrafter:
    """A block drafter as the rollout uses it (`protocol.ChainDrafter`)."""

    config: BlockConfig

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Residual-stream boundaries of the policy that it reads."""
        return self.config.boundaries

    @property
    def most_drafts(self) -> int:
        """Drafts of a block."""
        return self.config.drafts

    def init_state(self, rows: int, capacity: int) -> BlockState:
        """An empty state for `rows` rows of at most `capacity` pairs."""
        none = jnp.zeros((rows,), jnp.int32)
        return BlockState(*empty_cache(self.config.backbone, rows, capacity), none, none, none)

    def commit(
        self,
        params: BlockParams,
        embed: Float[Array, "v d"],
        state: BlockState,
        tokens: Int[Array, "r q"],
        features: Float[Array, "r q fd"],
        counts: Int[Array, "r"],
    ) -> BlockState:
        """Read the first `counts[r]` pairs of each row."""
        config, weights = self.config, params.weights
        rows, width = tokens.shape
        steps = jnp.arange(width, dtype=jnp.int32)[None]
        slots = jnp.where(steps < counts[:, None], state.length[:, None] + steps, -1)
        fused = fuse(config, weights, features.reshape(rows * width, -1))
        keys, values = [], []
        for layer, old_keys, old_values in zip(weights.layers, state.keys, state.values, strict=True):
            _, k, v = project_qkv(config.backbone, layer, fused, jnp.maximum(slots.reshape(-1), 0))
            keys.append(write(old_keys, k, slots))
            values.append(write(old_values, v, slots))
        last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        newest = jnp.where(counts > 0, last, state.newest)
        return BlockState(tuple(keys), tuple(values), state.length + counts, state.start, newest)

    def _filled(self, params: BlockParams, embed: Float[Array, "v d"], state: BlockState, depth: int) -> Block:
        """The first `depth` drafts of every row's block."""
        if params.lm_head is None:
            raise ValueError("the block drafter has no output rows; give it the policy's (`heads.for_policy`)")
        hidden = draft_hidden(self.config, params.weights, embed, state)[:, :depth]
        logits = logits_of(hidden.reshape(-1, hidden.shape[2]), params.lm_head)
        return Block(hidden, logits.reshape(*hidden.shape[:2], -1))

    def _sure(
        self, params: BlockParams, choice: Choice, hidden: Float[Array, "*n d"], before: Int[Array, "*n"]
    ) -> Choice:
        """The choice with the confidence head's word, where there is such a head and anybody asks."""
        odds = confidence_logits(self.config, params.weights, hidden, before)
        if odds is None or choice.confidence is None:
            return choice
        return replace(choice, confidence=jax.nn.log_sigmoid(odds))

    def propose(
        self,
        params: BlockParams,
        embed: Float[Array, "v d"],
        state: BlockState,
        texts: Texts,
        tree: Tree,
        choose: Choose,
    ) -> Choice:
        """Propose a tree of tokens per row: without a correction all nodes of a depth have the same candidates."""
        block = self._filled(params, embed, state, tree.depth)

        def below(nodes: tuple[int, ...], before: Int[Array, "r m d"], count: int) -> Choice:
            depth = before.shape[2]
            last = before[:, :, -1] if depth else state.newest[:, None]
            logits = jnp.broadcast_to(block.logits[:, depth, None], (*last.shape, block.logits.shape[2]))
            logits = corrected(self.config, params.weights, logits, last)
            return choose(logits, params.target_ids, before, count)

        return propose_tree(tree, below, state.newest.shape[0])

    def begin(
        self,
        params: BlockParams,
        embed: Float[Array, "v d"],
        state: BlockState,
        texts: Texts,
        depth: int,
        choose: Choose,
    ) -> tuple[Block, Choice]:
        """Fill in the block; its first draft."""
        block = self._filled(params, embed, state, depth)
        return block, self._next(params, block, state.newest, jnp.int32(0), choose)

    def advance(
        self,
        params: BlockParams,
        embed: Float[Array, "v d"],
        state: BlockState,
        carry: Block,
        tokens: Int[Array, "r"],
        step: Int[Array, ""],
        choose: Choose,
    ) -> tuple[Block, Choice]:
        """The next draft, given the one before."""
        return carry, self._next(params, carry, tokens, step + 1, choose)

    def _next(
        self, params: BlockParams, block: Block, before: Int[Array, "r"], step: Int[Array, ""], choose: Choose
    ) -> Choice:
        hidden, logits = (
            jax.lax.dynamic_index_in_dim(x, step, 1, keepdims=False) for x in (block.hidden, block.logits)
        )
        choice = choose_next(choose, corrected(self.config, params.weights, logits, before), params.target_ids, step)
        return self._sure(params, choice, hidden, before)

    def skip(self, state: BlockState, counts: Int[Array, "r"]) -> BlockState:
        """Go on after a gap, whose slots are not read."""
        length = state.length + counts
        return replace(state, length=length, start=jnp.where(counts > 0, length, state.start))
