"""A draft head beside suffix drafts: each draft of a row is that of whichever is surer of its own.

Where a row repeats earlier text, the suffix knows further than the head; elsewhere the head goes on. The head reads
every draft, whoever made it.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specrl_jax.drafters.protocol import ChainDrafter, Choice, Choose, Drafter, Texts, most_drafts, read_first
from specrl_jax.drafters.suffix import History, SuffixDrafter
from specrl_jax.errors import InputError
from specrl_jax.models.tree import Tree


@struct.dataclass
class Both:
    """Parameters or state of the head and of the suffix drafter."""

    head: Any
    suffix: Any

    @property
    def length(self) -> Int[Array, "r"]:
        """Pairs that have been read, where this is the state."""
        return self.head.length


def params_for(drafter: Drafter | None, head: Any, history: History | None = None) -> Any:
    """Parameters of a drafter: a head, earlier responses, or both."""
    if isinstance(drafter, CombinedDrafter):
        return Both(head, history)
    return history if isinstance(drafter, SuffixDrafter) else head


def head_of(params: Any) -> Any:
    """The parameters of the draft model, which training may change; None where there is none."""
    if isinstance(params, Both):
        return params.head
    return None if isinstance(params, History) else params


def with_head(params: Any, head: Any) -> Any:
    """The same parameters with another head."""
    return replace(params, head=head) if isinstance(params, Both) else head


def history_of(params: Any) -> History | None:
    """Earlier responses that drafts are looked for in, where there are any."""
    found = params.suffix if isinstance(params, Both) else params
    return found if isinstance(found, History) else None


def with_history(params: Any, history: History | None) -> Any:
    """The same parameters with other earlier responses."""
    return replace(params, suffix=history) if isinstance(params, Both) else history


def _surer(one: Choice, other: Choice) -> Choice:
    """Row by row, the draft of greater confidence; the first one's of equals."""
    if one.log_law is not None:
        raise InputError(
            "a head combined with suffix drafts is for rule match, which asks for no laws; choose that rule"
        )
    assert one.confidence is not None
    assert other.confidence is not None
    wins = (other.confidence > one.confidence) & (other.token >= 0)
    token = jnp.where(wins, other.token, one.token)
    assert one.others is not None
    # Beside another drafter's draft stands nothing: what the first one is sure of after its own is not known.
    others = jnp.where((token != one.token)[:, None], -1, one.others)
    return Choice(token, confidence=jnp.where(wins, other.confidence, one.confidence), others=others)


@dataclass(frozen=True)
class CombinedDrafter:
    """A head and a suffix drafter (`protocol.ChainDrafter`), in chains and under rule match; parameters are `Both`."""

    head: ChainDrafter
    suffix: SuffixDrafter = SuffixDrafter()

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Those of the head."""
        return self.head.boundaries

    @property
    def most_drafts(self) -> int | None:
        """Those of the head."""
        return most_drafts(self.head)

    def init_state(self, rows: int, capacity: int) -> Both:
        """Empty states."""
        return Both(self.head.init_state(rows, capacity), self.suffix.init_state(rows, capacity))

    def read_first(self, params: Both, embed: Float[Array, "v d"], state: Both, first: Int[Array, "r"]) -> Both:
        """The head reads the prompts' first tokens, where it does."""
        return replace(state, head=read_first(self.head, params.head, embed, state.head, first))

    def commit(
        self,
        params: Both,
        embed: Float[Array, "v d"],
        state: Both,
        tokens: Int[Array, "r q"],
        features: Float[Array, "r q fd"],
        counts: Int[Array, "r"],
    ) -> Both:
        """The head reads the pairs."""
        return replace(state, head=self.head.commit(params.head, embed, state.head, tokens, features, counts))

    def skip(self, state: Both, counts: Int[Array, "r"]) -> Both:
        """The head passes over pairs."""
        return replace(state, head=self.head.skip(state.head, counts))

    def propose(
        self,
        params: Both,
        embed: Float[Array, "v d"],
        state: Both,
        texts: Texts,
        tree: Tree,
        choose: Choose,
    ) -> Choice:
        """Propose a chain per row."""
        if not tree.is_chain:
            raise InputError("a head combined with suffix drafts proposes chains; choose 1 branch")
        carry, choice = self.begin(params, embed, state, texts, tree.depth, choose)
        drafts = [choice]
        for step in range(tree.depth - 1):
            newest = drafts[-1].token
            carry, choice = self.advance(params, embed, state, carry, newest, jnp.int32(step), choose)
            drafts.append(choice)
        return jax.tree.map(lambda *x: jnp.stack(x, axis=1), *drafts)

    def begin(
        self, params: Both, embed: Float[Array, "v d"], state: Both, texts: Texts, depth: int, choose: Choose
    ) -> tuple[Both, Choice]:
        """The first draft."""
        head, one = self.head.begin(params.head, embed, state.head, texts, depth, choose)
        suffix, other = self.suffix.begin(params.suffix, embed, state.suffix, texts, depth, choose)
        return Both(head, suffix), _surer(one, other)

    def advance(
        self,
        params: Both,
        embed: Float[Array, "v d"],
        state: Both,
        carry: Both,
        tokens: Int[Array, "r"],
        step: Int[Array, ""],
        choose: Choose,
    ) -> tuple[Both, Choice]:
        """Both take the draft; the next one."""
        head, one = self.head.advance(params.head, embed, state.head, carry.head, tokens, step, choose)
        suffix, other = self.suffix.advance(params.suffix, embed, state.suffix, carry.suffix, tokens, step, choose)
        return Both(head, suffix), _surer(one, other)
