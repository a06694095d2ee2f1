"""What the rollout asks of a drafter.

A drafter reads what the policy emitted and proposes the next tokens. It is a
frozen, hashable description without arrays, so that it can be a static argument
of `jit`; its parameters and its state are pytrees that go in and come out.

Slots. Slot `p` of a row pairs the policy's feature `g_p` (residual streams at
position `p`) with the token `x_{p+1}` that the policy emitted there, and says
something about `x_{p+2}`. After a prefill of `n` prompt tokens and one sampled
token, `n` pairs are read; after a round that emitted `m` tokens, `m` more. A prompt's first token is in no pair:
a drafter that must know it has a method `read_first`. One that often has nothing to propose may tell so before a round
is planned, `can_draft`.

Drafters that look for earlier text do not need pairs: what has been read and emitted so far,
by all sequences of the rollout, is shown to every drafter as `Texts`.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from specrl_jax.models.tree import Tree


@struct.dataclass
class Texts:
    """What a rollout has read and emitted so far on this device; it changes with every round.

    prompts: `[g, w]`. prompt_lengths: tokens of each, 0 for none, `[g]`. row_ids: of the dataset, `[g]`.
    responses: of all sequences, 0 beyond `lengths`, `[b, t]`; `b = g * samples`, the samples of a prompt side by side.
    lengths: tokens emitted, `[b]`.
    sequence: which of them each row decodes, `[r]`, whatever row it sits in.
    """

    prompts: Int[Array, "g w"]
    prompt_lengths: Int[Array, "g"]
    row_ids: UInt32[Array, "g"]
    responses: Int[Array, "b t"]
    lengths: Int[Array, "b"]
    sequence: Int[Array, "r"]


@struct.dataclass
class Choice:
    """Drafted tokens.

    token: in the policy's vocabulary; -1 for no draft, where `log_law` is None.
    log_law: the law over the policy's vocabulary that they were drawn from, or None where nobody asks.
    confidence: log-probability of the best of them under the drafter's law, or None.
    others: of a chain, what stands beside each draft: the next best candidates, the best first, or None.
    """

    token: Int[Array, "..."]
    log_law: Float[Array, "... v"] | None = None
    confidence: Float[Array, "..."] | None = None
    others: Int[Array, "... o"] | None = None


Choose = Callable[..., Choice]
"""`choose(logits, target_ids, before, count, step)` picks the `count` best candidates below each of `m` nodes of one
depth from float32 draft logits: tokens `[r, m, count]`, the best first, and the node's law `[r, m, v]`. Column `i` of
the logits stands for target token `target_ids[i]`, or `target_ids[r, m, i]` where nodes have candidates of their own;
`before` are the drafts on the path to each node, `step` their number where the path is not shown: of a chain, whose
drafts get as many candidates as the rollout verifies side by side. The rollout supplies it: it holds the sampling law
and the noise."""


def choose_next(
    choose: Choose, logits: Float[Array, "r dv"], target_ids: Int[Array, "*r dv"], step: Int[Array, ""]
) -> Choice:
    """The next draft of a chain: token and confidence of each row, `[r]`, what stands beside it, `[r, o]`, and the law
    that it was drawn from, `[r, v]`, where anybody asks."""
    ids = target_ids if target_ids.ndim == 1 else target_ids[:, None]
    choice = choose(logits[:, None], ids, jnp.zeros((logits.shape[0], 1, 0), jnp.int32), 1, step)
    assert choice.confidence is not None
    law = None if choice.log_law is None else choice.log_law[:, 0]
    return Choice(choice.token[:, 0, 0], law, choice.confidence[:, 0], choice.token[:, 0, 1:])


def propose_tree(tree: Tree, below: Callable[[tuple[int, ...], Int[Array, "r m d"], int], Choice], rows: int) -> Choice:
    """Draft a tree depth by depth.

    Args:
        tree: of the round, with at least one draft.
        below: `below(nodes, before, count)` are the candidates, as `Choose` gives them, below the nodes of a depth that
            have any; it is called for depths `d` = 0, 1, ... in turn, with the drafts on the path to each node.
        rows: of the batch.

    Returns:
        Token and law of every node but the root, in order, `[r, n]` and `[r, n, v]`.
    """
    tokens: dict[int, Array] = {}
    laws: dict[int, Array] = {}
    for depth in range(tree.depth):
        nodes = tree.inner(depth)
        before = jnp.zeros((rows, 1, 0), jnp.int32)
        if depth:
            paths = [[tokens[above] for above in tree.path(node)[1:]] for node in nodes]
            before = jnp.stack([jnp.stack(path, axis=1) for path in paths], axis=1)
        count = max(len(tree.children(node)) for node in nodes)
        choice = below(nodes, before, count)
        for i, node in enumerate(nodes):
            for rank, child in enumerate(tree.children(node)):
                tokens[child] = choice.token[:, i, rank]
                if choice.log_law is not None:
                    laws[child] = choice.log_law[:, i]
    order = range(1, tree.size)
    law = jnp.stack([laws[node] for node in order], axis=1) if laws else None
    return Choice(jnp.stack([tokens[node] for node in order], axis=1), law)


class DraftState(Protocol):
    """A pytree. The row is the leading axis of every leaf, so `x[indices]` compacts rows."""

    @property
    def length(self) -> Int[Array, "r"]:
        """Pairs of each row that have been read."""


@struct.dataclass
class TextState:
    """Of a drafter that reads `Texts` and no pairs. length: pairs of each row that it was shown."""

    length: Int[Array, "r"]


class TextDrafter:
    """What drafters that read `Texts` share: no features, and pairs that are counted and not looked at."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Reads no features."""
        return ()

    def init_state(self, rows: int, capacity: int) -> TextState:
        """Nothing read."""
        return TextState(jnp.zeros((rows,), jnp.int32))

    def commit(
        self,
        params: Any,
        embed: Float[Array, "v d"],
        state: TextState,
        tokens: Int[Array, "r q"],
        features: Float[Array, "r q fd"],
        counts: Int[Array, "r"],
    ) -> TextState:
        """Count the pairs."""
        return TextState(state.length + counts)

    def skip(self, state: TextState, counts: Int[Array, "r"]) -> TextState:
        """Count the pairs."""
        return TextState(state.length + counts)


@runtime_checkable
class Drafter(Protocol):
    """A proposer of tokens, told apart from other drafters by its static description."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Residual-stream boundaries of the policy whose concatenation is the feature; may be empty."""

    def init_state(self, rows: int, capacity: int) -> Any:
        """An empty state for `rows` rows of at most `capacity` pairs."""

    def commit(
        self,
        params: Any,
        embed: Float[Array, "v d"],
        state: Any,
        tokens: Int[Array, "r q"],
        features: Float[Array, "r q fd"],
        counts: Int[Array, "r"],
    ) -> Any:
        """Read the first `counts[r]` pairs of each row, in the slots from `state.length[r]` on.

        Args:
            params: the drafter's parameters.
            embed: the policy's embedding.
            state: from `init_state` or an earlier `commit`.
            tokens, features: pairs; `tokens[r, j]` follows the position of `features[r, j]`.
                Pairs at or beyond `counts[r]` are padding.
            counts: pairs to read, 0 to q; a row with 0 keeps its state.

        Returns:
            The state with `length` advanced by `counts`.
        """

    def propose(
        self,
        params: Any,
        embed: Float[Array, "v d"],
        state: Any,
        texts: Texts,
        tree: Tree,
        choose: Choose,
    ) -> Choice:
        """Propose tokens after the last committed one; the state does not change.

        Args:
            params, embed, state: as in `commit`.
            texts: of the whole rollout.
            tree: which tokens to propose; a chain or more (`propose_tree` does the bookkeeping).
            choose: picks candidates from logits.

        Returns:
            Token and law of every node but the root.
        """


def most_drafts(drafter: Any) -> int | None:
    """Drafts of a round at most, for a drafter whose property of this name says so; None for any number."""
    return getattr(drafter, "most_drafts", None)


def read_first(drafter: Any, params: Any, embed: Float[Array, "v d"], state: Any, first: Int[Array, "r"]) -> Any:
    """Show the prompts' first tokens to a drafter whose method of this name reads them; `state` is still empty."""
    read = getattr(drafter, "read_first", None)
    return state if read is None else read(params, embed, state, first)


def can_draft(drafter: Any, params: Any, texts: Texts) -> Bool[Array, "r"] | None:
    """Rows for which a drafter whose method of this name tells it ahead of a round has drafts; None for all of them."""
    tell = getattr(drafter, "can_draft", None)
    return None if tell is None else tell(params, texts)


@runtime_checkable
class ChainDrafter(Drafter, Protocol):
    """A drafter that can stop after any draft, as the draft-length controller asks."""

    def begin(
        self, params: Any, embed: Float[Array, "v d"], state: Any, texts: Texts, depth: int, choose: Choose
    ) -> tuple[Any, Choice]:
        """What `advance` carries, with room for `depth` drafts, and the first draft, as `choose_next` gives it."""

    def advance(
        self,
        params: Any,
        embed: Float[Array, "v d"],
        state: Any,
        carry: Any,
        tokens: Int[Array, "r"],
        step: Int[Array, ""],
        choose: Choose,
    ) -> tuple[Any, Choice]:
        """Take draft number `step` of every row, `tokens`; the next draft."""

    def skip(self, state: Any, counts: Int[Array, "r"]) -> Any:
        """Pass over `counts[r]` pairs that nobody can show; where it is not 0, what was read before is forgotten."""
