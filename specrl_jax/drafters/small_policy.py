"""A small policy as drafter (Leviathan et al., arXiv 2211.17192): it reads the same tokens and writes on by itself.

Slot `p` of its cache holds token `x_p`: the prompt's first token lies in slot 0, that of pair `p` in slot `p + 1`.
Reading a token leaves the hidden state that the next draft comes from. Its numerics are always plain: a draft decides
how many tokens a round emits, never which.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.drafters.protocol import Choice, Choose, Texts, choose_next, propose_tree
from specrl_jax.drafters.row_cache import AttendIn, Cached, attend, empty_cache, heads_first, run_layers, write
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import head_weights, token_logits
from specrl_jax.models.tree import Tree

_CHUNK = 64  # tokens of a row that are read together: scores of a whole prompt over the whole cache would not fit

Beside = Callable[[int, Array, Array], tuple[Array, Array]]
"""`beside(i, k, v)` are keys and values of layer `i` beside the cache, with those of the drafts that are being read."""


@struct.dataclass
class SmallPolicyState:
    """keys, values: of the tokens that have been read, per layer; slots before `start` cannot be read.

    length: pairs that have been read, one less than slots. hidden: residual stream at the newest token.
    """

    keys: Cached
    values: Cached
    length: Int[Array, "r"]
    start: Int[Array, "r"]
    hidden: Float[Array, "r d"]


@struct.dataclass
class Drafted:
    """keys, values: of the drafts so far, per layer, with room for more."""

    keys: Cached
    values: Cached


@dataclass(frozen=True)
class SmallPolicyDrafter:
    """A small policy as the rollout uses it (`protocol.ChainDrafter`); its parameters are a `PolicyParams`.

    config: of the small policy. shared_vocab: ids below this mean the same to both policies; others are not proposed.
    """

    config: PolicyConfig
    shared_vocab: int

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Reads no features."""
        return ()

    def init_state(self, rows: int, capacity: int) -> SmallPolicyState:
        """An empty state for `rows` rows of at most `capacity` pairs."""
        none = jnp.zeros((rows,), jnp.int32)
        hidden = jnp.zeros((rows, self.config.hidden_size), jnp.dtype(self.config.dtype))
        return SmallPolicyState(*empty_cache(self.config, rows, capacity + 1), none, none + 1, hidden)

    def read_first(
        self, params: PolicyParams, embed: Float[Array, "v d"], state: SmallPolicyState, first: Int[Array, "r"]
    ) -> SmallPolicyState:
        """Read the prompts' first tokens."""
        none = jnp.zeros_like(first)
        return self._read(params, replace(state, start=none), first[:, None], none, none + 1)

    def commit(
        self,
        params: PolicyParams,
        embed: Float[Array, "v d"],
        state: SmallPolicyState,
        tokens: Int[Array, "r q"],
        features: Float[Array, "r q fd"],
        counts: Int[Array, "r"],
    ) -> SmallPolicyState:
        """Read the tokens of the first `counts[r]` pairs of each row."""
        width = tokens.shape[1]
        chunk = min(width, _CHUNK)
        tokens = jnp.pad(tokens, ((0, 0), (0, -width % chunk)))

        def read(i: Int[Array, ""], state: SmallPolicyState) -> SmallPolicyState:
            here = jnp.clip(counts - i * chunk, 0, chunk)
            part = lax.dynamic_slice_in_dim(tokens, i * chunk, chunk, axis=1)
            state = self._read(params, state, part, state.length + 1, here)
            return replace(state, length=state.length + here)

        return read(jnp.int32(0), state) if width == chunk else lax.fori_loop(0, -(-width // chunk), read, state)

    def _read(
        self,
        params: PolicyParams,
        state: SmallPolicyState,
        tokens: Int[Array, "r q"],
        slot: Int[Array, "r"],
        counts: Int[Array, "r"],
    ) -> SmallPolicyState:
        """Write the first `counts[r]` tokens of each row into the slots from `slot[r]` on."""
        width = tokens.shape[1]
        steps = jnp.arange(width, dtype=jnp.int32)[None]
        slots = jnp.where(steps < counts[:, None], slot[:, None] + steps, -1)
        keys, values = list(state.keys), list(state.values)

        def attend_in(i: int, q: Array, k: Array, v: Array) -> Array:
            own = heads_first(k), heads_first(v)
            out = attend(q, state.keys[i], state.values[i], state.start, slot, *own, jnp.tri(width, dtype=bool))
            keys[i], values[i] = (
                write(cached[i], new.reshape(-1, *new.shape[2:]), slots) for cached, new in ((keys, k), (values, v))
            )
            return out

        hidden = self._run(params, tokens, jnp.maximum(slots, 0), attend_in)
        last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
        hidden = jnp.where((counts > 0)[:, None], last, state.hidden)
        return replace(state, keys=tuple(keys), values=tuple(values), hidden=hidden)

    def _run(
        self, params: PolicyParams, tokens: Int[Array, "r m"], positions: Int[Array, "r m"], attend_in: AttendIn
    ) -> Float[Array, "r m d"]:
        """Residual streams of tokens; of ids that this policy does not have, those of its last one."""
        x = params.embed.at[tokens.reshape(-1)].get(mode="clip")
        return run_layers(self.config, params.layers, x, positions, attend_in).reshape(*tokens.shape, -1)

    def _read_drafts(
        self,
        params: PolicyParams,
        state: SmallPolicyState,
        tokens: Int[Array, "r m"],
        step: Int[Array, ""],
        beside: Beside,
        sees: Bool[Array, "m e"],
    ) -> Float[Array, "r m d"]:
        """Residual streams of drafts with `step` drafts before them, which read what `beside` says they see."""
        visible = state.length + 1

        def attend_in(i: int, q: Array, k: Array, v: Array) -> Array:
            own = beside(i, heads_first(k), heads_first(v))
            return attend(q, state.keys[i], state.values[i], state.start, visible, *own, sees)

        return self._run(params, tokens, jnp.broadcast_to((visible + step)[:, None], tokens.shape), attend_in)

    def _logits(self, params: PolicyParams, hidden: Float[Array, "r m d"]) -> Float[Array, "r m dv"]:
        """Float32 logits of the ids that may be proposed."""
        flat = token_logits(self.config, head_weights(params), hidden.reshape(-1, hidden.shape[2]))
        return flat[:, : self.shared_vocab].reshape(*hidden.shape[:2], -1)

    def propose(
        self,
        params: PolicyParams,
        embed: Float[Array, "v d"],
        state: SmallPolicyState,
        texts: Texts,
        tree: Tree,
        choose: Choose,
    ) -> Choice:
        """Propose a tree of tokens per row; keys and values of drafts stay beside the cache."""
        hidden = state.hidden[:, None]
        read: list[int] = []
        stored: list[tuple[list[Array], list[Array]]] = [([], []) for _ in params.layers]

        def beside(i: int, k: Array, v: Array) -> tuple[Array, Array]:
            stored[i][0].append(k)
            stored[i][1].append(v)
            return jnp.concatenate(stored[i][0], axis=2), jnp.concatenate(stored[i][1], axis=2)

        def below(nodes: tuple[int, ...], before: Int[Array, "r m d"], count: int) -> Choice:
            nonlocal hidden
            depth = before.shape[2]
            if depth > 0:
                read.extend(nodes)
                sees = jnp.asarray(tree.sees[np.ix_(nodes, read)])
                hidden = self._read_drafts(params, state, before[:, :, -1], jnp.int32(depth - 1), beside, sees)
            return choose(self._logits(params, hidden), self._target_ids, before, count)

        return propose_tree(tree, below, hidden.shape[0])

    @property
    def _target_ids(self) -> Int[Array, "dv"]:
        return jnp.arange(self.shared_vocab, dtype=jnp.int32)

    def begin(
        self,
        params: PolicyParams,
        embed: Float[Array, "v d"],
        state: SmallPolicyState,
        texts: Texts,
        depth: int,
        choose: Choose,
    ) -> tuple[Drafted, Choice]:
        """The draft after the newest token."""
        drafted = Drafted(*empty_cache(self.config, state.hidden.shape[0], depth))
        return drafted, self._next(params, state.hidden, jnp.int32(0), choose)

    def advance(
        self,
        params: PolicyParams,
        embed: Float[Array, "v d"],
        state: SmallPolicyState,
        carry: Drafted,
        tokens: Int[Array, "r"],
        step: Int[Array, ""],
        choose: Choose,
    ) -> tuple[Drafted, Choice]:
        """Read a draft of every row; the next."""
        keys, values = list(carry.keys), list(carry.values)

        def beside(i: int, k: Array, v: Array) -> tuple[Array, Array]:
            keys[i] = lax.dynamic_update_slice_in_dim(keys[i], k, step, 2)
            values[i] = lax.dynamic_update_slice_in_dim(values[i], v, step, 2)
            return keys[i], values[i]

        sees = (jnp.arange(keys[0].shape[2], dtype=jnp.int32) <= step)[None]
        hidden = self._read_drafts(params, state, tokens[:, None], step, beside, sees)[:, 0]
        return Drafted(tuple(keys), tuple(values)), self._next(params, hidden, step + 1, choose)

    def _next(self, params: PolicyParams, hidden: Float[Array, "r d"], step: Int[Array, ""], choose: Choose) -> Choice:
        return choose_next(choose, self._logits(params, hidden[:, None])[:, 0], self._target_ids, step)

    def skip(self, state: SmallPolicyState, counts: Int[Array, "r"]) -> SmallPolicyState:
        """Go on after a gap, whose slots are not read."""
        length = state.length + counts
        return replace(state, length=length, start=jnp.where(counts > 0, length + 1, state.start))
