"""How responses are rolled out."""

import math
from dataclasses import dataclass

from specrl_jax.errors import InputError
from specrl_jax.models.tree import Tree
from specrl_jax.rollout.control import MOST_BODIES, Body, default_bodies
from specrl_jax.rollout.rules import Match, Rule
from specrl_jax.rollout.sampling import SamplingLaw

MOST_BESIDE = 32
"""Drafts of a row, some beside others: how far a slot lies from its position is a bit of a word in the kernels."""


@dataclass(frozen=True)
class RolloutConfig:
    """max_new_tokens: response tokens at most, end token included.

    samples_per_prompt: size of a prompt's group.
    draft_length: drafts per round on the longest path, 0 for autoregressive decoding; at most so many where the draft
        length is adaptive.
    law: the sampling law; its end tokens close a response.
    rule: how drafts are drawn and judged, in chains or trees.
    adaptive: choose the drafts of every round while it runs (`rollout/control.py`), in chains; where rule match has
        several candidates, the others beside a draft where they pay. Rules that read laws choose before they draw
        (`rollout/drafting.py`): they emit a law, not the tokens of other draft lengths.
    per_row: of an adaptive draft length, drafts go to the rows where they save most; else all rows have as many.
    bodies: compiled rounds to choose from, at most 12; by default those of `default_bodies`. Where drafts are adaptive
        the ladder is theirs, and `ladder` and `smallest_rung` say nothing.
    rows: sequences that are decoded at the same time, on each device; the others wait. By default all.
    cache_bytes: for the keys and values of policy and drafter, on each device; sequences wait, or sit rounds out, when
        they do not fit. By default enough for all rows at full length, a prompt counted once for its group, and where
        sequences wait for a row three quarters of that: rows are then at different places in their responses.
    ladder: fractions of the rows that the live ones are decoded in as their number falls.
    smallest_rung: fewer rows than this get no rung of their own: each one is compiled.
    """

    max_new_tokens: int
    samples_per_prompt: int
    draft_length: int
    law: SamplingLaw
    rule: Rule = Match()
    adaptive: bool = False
    per_row: bool = True
    bodies: tuple[Body, ...] | None = None
    rows: int | None = None
    cache_bytes: int | None = None
    ladder: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    smallest_rung: int = 16

    def __post_init__(self) -> None:
        for name, least in (
            ("max_new_tokens", 1),
            ("samples_per_prompt", 1),
            ("smallest_rung", 1),
            ("rows", 1),
            ("cache_bytes", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"rollout {name} is {value}; it must be at least {least}")
        comb = isinstance(self.rule, Match) and self.rule.shape == "comb"
        if self.adaptive and (not (self.tree.is_chain or comb) or self.draft_length < 1):
            raise InputError(
                f"an adaptive draft length needs chains or combs of at least 1 draft, not {self.rule} with "
                f"draft_length {self.draft_length}; choose those, or a fixed draft length"
            )
        drafts = self.tree.size - 1
        if self.adaptive and self.branches > 1 and drafts > MOST_BESIDE:
            raise InputError(
                f"an adaptive draft length of {self.draft_length} with {self.branches} branches has {drafts} drafts; "
                f"choose at most {MOST_BESIDE}"
            )
        if self.bodies is not None and not 1 <= len(self.bodies) <= MOST_BODIES:
            raise InputError(f"rollout bodies names {len(self.bodies)} rounds; choose 1 to {MOST_BODIES}")
        if not self.law.end_ids:
            raise InputError("rollout end_ids is empty; name at least one end token in the sampling law")
        if not all(0.0 < fraction <= 1.0 for fraction in self.ladder):
            raise InputError(f"rollout ladder is {self.ladder}; give fractions above 0 and at most 1")
        self.rule.tree(self.draft_length)  # refuses what is too large
        if self.law.min_new_tokens > self.max_new_tokens:
            raise InputError(
                f"min_new_tokens is {self.law.min_new_tokens}, above max_new_tokens {self.max_new_tokens}; lower it"
            )
        if set(self.law.end_ids) <= set(self.law.forbidden):
            raise InputError("every end token is forbidden, so that no response could end; allow one of them")

    @property
    def tree(self) -> Tree:
        """The tokens of a round."""
        return self.rule.tree(self.draft_length)

    @property
    def branches(self) -> int:
        """Candidates below a node at most."""
        return self.rule.branches if isinstance(self.rule, Match) else 1

    def bodies_for(self, rows: int) -> tuple[Body, ...]:
        """Compiled rounds for so many rows; none where the draft length is fixed."""
        if not self.adaptive:
            return ()
        bodies = self.bodies or default_bodies(rows, self.draft_length, self.branches)
        if max(body.rows for body in bodies) < rows:
            raise InputError(f"rollout bodies hold at most {max(body.rows for body in bodies)} rows of {rows}; add one")
        if len(set(bodies)) < len(bodies):
            raise InputError(f"rollout bodies names a round twice; got {bodies}")
        if any(not body.rows <= body.tokens <= body.rows * self.tree.size for body in bodies):
            raise InputError(
                f"rollout bodies must have a token for each row and at most {self.tree.size - 1} drafts a row; "
                f"got {bodies}"
            )
        if any(body.rows > rows for body in bodies):
            raise InputError(f"rollout bodies must have at most {rows} rows; got {bodies}")
        return bodies

    def rungs(self, rows: int) -> tuple[int, ...]:
        """Batch sizes of the ladder for `rows` sequences, largest first."""
        sizes = {math.ceil(rows * fraction - 1e-9) for fraction in self.ladder}
        return tuple(sorted({size for size in sizes if size >= self.smallest_rung} | {rows}, reverse=True))
