"""Drafts from earlier text: n-gram and suffix decoding inside the compiled loop.

What a row has written last is looked for in its own prompt and response (n-gram drafts: prompt lookup, Saxena
2023), in what its siblings have written so far, and in responses to the same prompt in earlier epochs (suffix
decoding, Oliaro et al., arXiv 2411.04975, per prompt as in DAS, arXiv 2511.13841). There is no tree: every place
is compared at once, and the `candidates` matches that count most vote for what followed them.

A vote weighs `sharpness ** match`, so that longer matches outvote shorter ones and equals count by frequency; a match
in another response counts `discount` tokens less. The votes are a law, and drafts are drawn from it as from a draft
head's: with the policy's own noise under rule match.

A row drafts where the votes for one token weigh at least as much as the shortest match in its own text: one short match
in another response does not do, several that agree do. That makes for fewer drafts, of which more are accepted. Rounds
of a fixed draft length verify as many tokens either way and so emit a little less; the controller's cost less by it.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from specrl_jax.drafters.protocol import Choice, Choose, TextDrafter, Texts, TextState, choose_next, propose_tree
from specrl_jax.errors import InputError
from specrl_jax.models.tree import Tree

_NONE = -1e30  # logarithm of the weight of a place that does not match


@struct.dataclass
class History:
    """Responses of earlier epochs to the prompts of a dataset; the newest `e` of each are kept.

    row_ids: of the prompts, ascending, `[n]`.
    tokens, lengths: responses, of length 0 where there is none yet, `[n, e, t]` and `[n, e]`.
    count: responses to each prompt so far, `[n]`.
    """

    row_ids: UInt32[Array, "n"]
    tokens: Int[Array, "n e t"]
    lengths: Int[Array, "n e"]
    count: Int[Array, "n"]

    def place(self, row_ids: UInt32[Array, "m"]) -> Int[Array, "m"]:
        """Where each prompt's responses stand; beyond the end for a prompt of another dataset."""
        count = self.row_ids.shape[0]
        found = jnp.minimum(jnp.searchsorted(self.row_ids, row_ids), count - 1).astype(jnp.int32)
        return jnp.where(self.row_ids[found] == row_ids, found, count)


def init_history(row_ids: np.ndarray, kept: int, longest: int) -> History:
    """Nothing yet; `4 * prompts * kept * longest` bytes.

    Args:
        row_ids: of the prompts, each of them once. kept: responses to each. longest: tokens of a response.
    """
    count = len(row_ids)
    tokens, lengths = jnp.zeros((count, kept, longest), jnp.int32), jnp.zeros((count, kept), jnp.int32)
    return History(jnp.asarray(np.sort(row_ids), jnp.uint32), tokens, lengths, jnp.zeros((count,), jnp.int32))


def remember(
    history: History, row_ids: UInt32[Array, "g"], responses: Int[Array, "b t"], lengths: Int[Array, "b"]
) -> History:
    """The history with a rollout's responses, the samples of a prompt side by side; the oldest make room.

    Prompts of another dataset are left out. Of more samples than are kept the last ones stay.
    """
    kept = history.lengths.shape[1]
    samples = lengths.shape[0] // row_ids.shape[0]
    rows = history.place(row_ids)
    first = history.count.at[rows].get(mode="fill", fill_value=0)
    stays = min(samples, kept)
    sample = jnp.arange(samples - stays, samples, dtype=jnp.int32)[None]
    row = jnp.broadcast_to(rows[:, None], (rows.shape[0], stays))
    slot = (first[:, None] + sample) % kept
    newest = responses.reshape(-1, samples, responses.shape[1])[:, -stays:]
    return History(
        row_ids=history.row_ids,
        tokens=history.tokens.at[row, slot].set(newest, mode="drop"),
        lengths=history.lengths.at[row, slot].set(lengths.reshape(-1, samples)[:, -stays:], mode="drop"),
        count=history.count.at[rows].add(samples, mode="drop"),
    )


@struct.dataclass
class Found:
    """Places where a row's newest tokens have stood before.

    follow: what stood after each, `[r, c, k]`; `left` of it are tokens, `[r, c]`. log_weight: of its vote, `[r, c]`.
    enough: rows whose votes for one token do for drafts, `[r]`.
    """

    follow: Int[Array, "r c k"]
    left: Int[Array, "r c"]
    log_weight: Float[Array, "r c"]
    enough: Bool[Array, "r"]

    def votes(self, depth: int | Int[Array, ""], agree: Bool[Array, "r c"]) -> tuple[Array, Array, Array]:
        """Candidates after `depth` drafts of those places that agree with them.

        Returns:
            ids: one per place, `[r, c]`. logits: the votes for it, where it stands first among its like, `[r, c]`.
            total: logarithm of all votes, `[r]`; -inf where there are none.
        """
        ids = lax.dynamic_index_in_dim(self.follow, depth, 2, keepdims=False)
        weight = jnp.where(agree & (depth < self.left), self.log_weight, _NONE)
        same = ids[:, :, None] == ids[:, None, :]
        logits = jax.nn.logsumexp(jnp.where(same, weight[:, None, :], _NONE), axis=2)
        places = np.arange(ids.shape[1])
        above = jnp.asarray(places[None, None, :] < places[None, :, None]) & (weight > _NONE)[:, None, :]
        repeated = jnp.any(same & above, axis=2)
        logits = jnp.where(repeated | (weight <= _NONE), -jnp.inf, logits)
        total = jax.nn.logsumexp(logits, axis=1)
        # Without votes the law is the first candidate's, so that there is one.
        first = jnp.asarray(places == 0)[None] & (total == -jnp.inf)[:, None]
        return ids, jnp.where(first, 0.0, logits), total


def _match_lengths(text: Int[Array, "r p n"], newest: Int[Array, "r m"]) -> Int[Array, "r p n"]:
    """Tokens that end at each place and agree with the newest ones, `newest[:, 0]` the last; at most `m`."""
    agrees = jnp.ones(text.shape, bool)
    length = jnp.zeros(text.shape, jnp.int32)
    for back in range(newest.shape[1]):
        shifted = jnp.pad(text, ((0, 0), (0, 0), (back, 0)), constant_values=-2)[:, :, : text.shape[2]]
        agrees &= shifted == newest[:, back][:, None, None]
        length += agrees.astype(jnp.int32)
    return length


@dataclass(frozen=True)
class SuffixDrafter(TextDrafter):
    """Proposes what followed the newest tokens before (`protocol.ChainDrafter`); its parameters: `History` or None.

    siblings: look in the responses of the same prompt in this rollout too; False, and no history, is n-gram drafts.
    longest: tokens of a match that count. shortest: those that it takes.
    discount: tokens that a match in another response counts less; 0 drafts wherever anything matches.
    candidates: places that vote.
    sharpness: how much a vote weighs more for each token of its match.
    """

    siblings: bool = True
    longest: int = 8
    shortest: int = 2
    discount: int = 1
    candidates: int = 16
    sharpness: float = 4.0

    def __post_init__(self) -> None:
        for name in ("shortest", "candidates"):
            if getattr(self, name) < 1:
                raise InputError(f"suffix drafter {name} is {getattr(self, name)}; it must be at least 1")
        if self.discount < 0:
            raise InputError(f"suffix drafter discount is {self.discount}; it must be at least 0")
        if self.longest < self.shortest:
            raise InputError(
                f"suffix drafter longest is {self.longest}, below shortest {self.shortest}; raise it or lower that"
            )
        if not 1.0 < self.sharpness <= 1000.0:
            raise InputError(f"suffix drafter sharpness is {self.sharpness}; choose more than 1 and at most 1000")

    def find(self, history: History | None, texts: Texts, depth: int) -> Found:
        """The best places for every row, with up to `depth` tokens after each."""
        groups, width = texts.prompts.shape
        samples = texts.responses.shape[0] // groups
        sequence, group = texts.sequence, texts.sequence // samples
        prompt, before = texts.prompts[group], texts.prompt_lengths[group]
        response, emitted = texts.responses[sequence], texts.lengths[sequence]

        # Prompt and response of a row, and the last tokens of both.
        place = jnp.arange(width + response.shape[1], dtype=jnp.int32)[None]
        after = jnp.clip(place - before[:, None], 0, response.shape[1] - 1)
        padded = jnp.pad(prompt, ((0, 0), (0, response.shape[1])))
        own = jnp.where(place < before[:, None], padded, jnp.take_along_axis(response, after, axis=1))
        total = before + emitted
        back = total[:, None] - 1 - jnp.arange(self.longest, dtype=jnp.int32)[None]
        newest = jnp.where(back >= 0, jnp.take_along_axis(own, jnp.maximum(back, 0), axis=1), -1)
        parts = [(own[:, None], total[:, None], 0, 0)]

        # Other responses stand behind the end of the same prompt, of which only the last token is a place of theirs.
        others = []
        if self.siblings and samples > 1:
            written = texts.responses.reshape(groups, samples, -1)[group]
            index = jnp.arange(samples, dtype=jnp.int32)[None]
            lengths = texts.lengths.reshape(groups, samples)[group]
            others.append((written, jnp.where(index == (sequence % samples)[:, None], 0, lengths)))
        if history is not None:
            row = history.place(texts.row_ids)[group]
            written = history.tokens.at[row].get(mode="fill", fill_value=0)
            others.append((written, history.lengths.at[row].get(mode="fill", fill_value=0)))
        tail = before[:, None] - self.longest + jnp.arange(self.longest, dtype=jnp.int32)[None]
        end = jnp.where(tail >= 0, jnp.take_along_axis(prompt, jnp.maximum(tail, 0), axis=1), -2)
        for written, lengths in others:
            beginning = jnp.broadcast_to(end[:, None], (*written.shape[:2], self.longest))
            behind = jnp.where(lengths > 0, self.longest + lengths, 0)
            parts.append((jnp.concatenate([beginning, written], axis=2), behind, self.longest - 1, self.discount))
        return self._best(parts, newest, depth)

    def _best(self, parts: list[tuple[Array, Array, int, int]], newest: Int[Array, "r m"], depth: int) -> Found:
        """Votes of the longest matches of all parts.

        parts: texts `[r, p, n]` and their lengths `[r, p]`, the first place that counts, and the discount.
        """
        rows = newest.shape[0]
        places = []
        for text, lengths, first, discount in parts:
            place = jnp.arange(text.shape[2], dtype=jnp.int32)[None, None]
            after = lengths[:, :, None] - 1 - place
            match = jnp.where((after > 0) & (place >= first), _match_lengths(text, newest), 0)
            # As floats: of integers XLA:CPU sorts all to find a few.
            counts = jnp.where(match >= self.shortest, (match - discount).astype(jnp.float32), -jnp.inf)
            places.append([values.reshape(rows, -1) for values in (text, counts, after)])
        text, counts, after = (jnp.concatenate(values, axis=1) for values in zip(*places, strict=True))
        best, where = lax.top_k(counts, min(self.candidates, counts.shape[1]))
        steps = jnp.arange(1, depth + 1, dtype=jnp.int32)[None, None]
        index = jnp.minimum(where[:, :, None] + steps, text.shape[1] - 1)
        follow = jnp.take_along_axis(text, index.reshape(rows, -1), axis=1).reshape(index.shape)
        follow = jnp.maximum(follow, 0)  # beyond what is left may stand what is no token
        weight = jnp.maximum(best * self._scale, _NONE)
        found = Found(follow, jnp.take_along_axis(after, where, axis=1), weight, jnp.ones(rows, bool))
        _, votes, _ = found.votes(0, jnp.ones(best.shape, bool))
        least = self.shortest * self._scale * (1.0 - 1e-5)  # votes that agree are summed with rounding
        return replace(found, enough=jnp.max(votes, axis=1) >= least)

    @property
    def _scale(self) -> float:
        """What a token of a match adds to the logarithm of its vote."""
        return float(np.log(self.sharpness))

    def can_draft(self, params: History | None, texts: Texts) -> Bool[Array, "r"]:
        """Rows whose newest tokens stand somewhere else too, and are followed by votes that do for drafts."""
        return self.find(params, texts, 1).enough

    def _checked(self, choice: Choice, total: Float[Array, "r *n"], enough: Bool[Array, "r"]) -> Choice:
        """No draft where there are no votes or too few, and little confidence where there are few."""
        total = jnp.where(enough.reshape(-1, *[1] * (total.ndim - 1)), total, -jnp.inf)
        doubt = (self.shortest + 1) * self._scale
        confidence = choice.confidence
        if confidence is not None:
            confidence = confidence + jax.nn.log_sigmoid(total - doubt)
        if choice.log_law is not None:
            return replace(choice, confidence=confidence)
        others = choice.others
        if others is not None:
            others = jnp.where(total[:, None] > -jnp.inf, others, -1)
        total = total.reshape(*total.shape, *[1] * (choice.token.ndim - total.ndim))
        return Choice(jnp.where(total > -jnp.inf, choice.token, -1), confidence=confidence, others=others)

    def propose(
        self,
        params: History | None,
        embed: Float[Array, "v d"],
        state: TextState,
        texts: Texts,
        tree: Tree,
        choose: Choose,
    ) -> Choice:
        """Propose a tree of tokens per row."""
        found = self.find(params, texts, tree.depth)

        def below(nodes: tuple[int, ...], before: Int[Array, "r m d"], count: int) -> Choice:
            agree = jnp.all(found.follow[:, None, :, : before.shape[2]] == before[:, :, None], axis=3)
            votes = [found.votes(before.shape[2], agree[:, i]) for i in range(len(nodes))]
            ids, logits, total = (jnp.stack(values, axis=1) for values in zip(*votes, strict=True))
            return self._checked(choose(logits, ids, before, count), total, found.enough)

        return propose_tree(tree, below, texts.sequence.shape[0])

    def begin(
        self,
        params: History | None,
        embed: Float[Array, "v d"],
        state: TextState,
        texts: Texts,
        depth: int,
        choose: Choose,
    ) -> tuple[tuple[Found, Array], Choice]:
        """Look for the newest tokens; the first draft."""
        found = self.find(params, texts, depth)
        agree = jnp.ones(found.left.shape, bool)
        return (found, agree), self._next(found, agree, jnp.int32(0), choose)

    def advance(
        self,
        params: History | None,
        embed: Float[Array, "v d"],
        state: TextState,
        carry: tuple[Found, Array],
        tokens: Int[Array, "r"],
        step: Int[Array, ""],
        choose: Choose,
    ) -> tuple[tuple[Found, Array], Choice]:
        """Places that went on otherwise lose their votes."""
        found, agree = carry
        agree &= lax.dynamic_index_in_dim(found.follow, step, 2, keepdims=False) == tokens[:, None]
        return (found, agree), self._next(found, agree, step + 1, choose)

    def _next(self, found: Found, agree: Bool[Array, "r c"], step: Int[Array, ""], choose: Choose) -> Choice:
        ids, logits, total = found.votes(step, agree)
        return self._checked(choose_next(choose, logits, ids, step), total, found.enough)
