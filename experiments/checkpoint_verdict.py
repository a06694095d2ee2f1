"""From measurements to words: what `check_checkpoint` calls a fault, and acceptance lengths that others published."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments.checkpoint_readings import Reading
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.presets import PRESETS

MARGIN = 0.01
"""Acceptance of a draft by which another reading must be better, beside three standard errors."""
LONG_MARGIN = 0.03
"""The same for what a head loses behind the length at which its positions may end."""
TEXT_MARGIN = 0.5
"""Nats per token by which a policy must prefer text to the same tokens under other names."""
ERRORS = 3.0
"""Standard errors that a difference must exceed."""


@dataclass(frozen=True)
class Finding:
    """fault: "boundaries", "feedback", "halves", "rope", "tokenizer", "policy" or "useless". sentence: about it."""

    fault: str
    sentence: str


@dataclass(frozen=True)
class Difference:
    """A mean difference and its standard error."""

    mean: float
    error: float

    @property
    def is_clear(self) -> bool:
        """Whether it lies above 0 by more than chance."""
        return self.mean > ERRORS * self.error

    def exceeds(self, margin: float) -> bool:
        """Whether it is clear and above a margin."""
        return self.is_clear and self.mean > margin


def difference(one: Float[np.ndarray, "n"], other: Float[np.ndarray, "n"]) -> Difference:
    """`one` less `other`, measured on the same cases."""
    apart = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    error = apart.std(ddof=1) / np.sqrt(len(apart)) if len(apart) > 1 else float("inf")
    return Difference(float(apart.mean()), float(error))


def mean_error(values: Float[np.ndarray, "n"]) -> tuple[float, float]:
    """Mean and standard error."""
    found = difference(values, np.zeros_like(values))
    return found.mean, found.error


@dataclass(frozen=True)
class Published:
    """Acceptance lengths by draft length, and where they stand.

    head: how the folder or hub name of the head ends; without, they are of any EAGLE-3 head for Qwen3-8B.
    temperature: that they were measured at.
    """

    head: str | None
    temperature: float
    lengths: dict[int, float]
    source: str

    def is_of(self, drafter: str, policy: PolicyConfig) -> bool:
        """Whether these figures are of that head, or of one for the same policy."""
        if self.head is not None:
            return drafter.rstrip("/").lower().endswith(self.head.lower())
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size")
        return all(getattr(policy, size) == getattr(PRESETS["qwen3-8b"], size) for size in sizes)


_BENCHMARKS = "means of MT-bench, HumanEval, GSM8K and Alpaca in AngelSlim's benchmarks; trees, chains accept less"
_SPECULATORS = "an EAGLE-3 head of this policy, not this one, on math at temperature 0.6 (speculators #563)"
# Those of the head come first.
PUBLISHED = (
    Published("Qwen3-8B_eagle3", 0.0, {7: 3.72}, f"this head, {_BENCHMARKS}"),
    Published("Qwen3-8B_eagle3", 1.0, {7: 2.94}, f"this head, {_BENCHMARKS}"),
    Published(None, 0.6, {1: 1.81, 2: 2.42, 3: 2.87, 4: 3.12, 5: 3.30, 6: 3.42, 7: 3.45}, _SPECULATORS),
)


def published(drafter: str, policy: PolicyConfig, temperature: float) -> Published | None:
    """What others measured of a head, or of heads of the same policy, at the nearest temperature; None if nothing."""
    known = [figures for figures in PUBLISHED if figures.is_of(drafter, policy)]
    return min(known, key=lambda f: (f.head is None, abs(f.temperature - temperature)), default=None)


def row(check: str, case: str, measured: Any, error: Any = None, against: Any = None, of: str | None = None) -> Any:
    """A row of the table: what was measured, its standard error, and what it is compared with."""
    return {"check": check, "case": case, "measured": measured, "error": error, "compared_with": against, "of": of}


def judge_tokenizer(
    text: Float[np.ndarray, "n"],
    nonsense: Float[np.ndarray, "n"],
    cost: Float[np.ndarray, "n"],
    frequencies: Float[np.ndarray, "n"],
) -> tuple[list[Any], list[Finding]]:
    """Whether the policy knows text when it sees it.

    Args:
        text, nonsense: mean log-probability of a token, of every text and of the text with its tokens renamed.
        cost, frequencies: nats per byte of every text, of the policy and of the frequencies of bytes.
    """
    gain, saved = difference(text, nonsense), difference(frequencies, cost)
    of = "the same tokens renamed"
    rows = [
        row("tokenizer", "log-probability of text, per token", *mean_error(text), float(nonsense.mean()), of),
        row("tokenizer", "nats per byte of text", *mean_error(cost), float(frequencies.mean()), "frequencies of bytes"),
    ]
    if gain.exceeds(TEXT_MARGIN) and saved.is_clear:
        return rows, []
    sentence = (
        f"tokenizer: text is strange to the policy, {gain.mean:+.2f} nats per token likelier than its tokens renamed "
        f"(at least {TEXT_MARGIN:+} is expected), at {cost.mean():.2f} nats per byte, where frequencies of bytes make "
        f"{frequencies.mean():.2f}; so the tokenizer beside it is another policy's, or its weights are untrained; "
        "take all files from the checkpoint that the weights come from"
    )
    return rows, [Finding("tokenizer", sentence)]


def judge_readings(
    ways: Sequence[Reading], overlaps: Sequence[Float[np.ndarray, "i n"]], frequencies: Float[np.ndarray, "n"]
) -> tuple[list[Any], list[Finding]]:
    """Whether a head accepts more when read otherwise than its folder says.

    Args:
        ways: how it is read, first as its folder says.
        overlaps: of every step and row, for each way.
        frequencies: what drafts by the frequencies of tokens would accept, by row.
    """
    means = [found.mean(0) for found in overlaps]
    loaded, first, chance = float(means[0].mean()), float(overlaps[0][0].mean()), float(frequencies.mean())
    rows = [row("reading", ways[0].name, *mean_error(means[0]))]
    for way, mean in zip(ways[1:], means[1:], strict=True):
        rows.append(row("reading", way.name, *mean_error(mean), loaded, "as loaded"))
    rows.append(row("reading", "first draft, as loaded", *mean_error(overlaps[0][0]), chance, "frequencies of tokens"))
    best = int(np.argmax([mean.mean() for mean in means]))
    if not difference(overlaps[best][0], frequencies).exceeds(MARGIN):
        sentence = (
            f"useless: the head does not draft better than the frequencies of tokens ({first:.3f} of its first drafts "
            f"are accepted, {chance:.3f} of theirs), however it is read, so it is untrained or another policy's; "
            "train it with experiments.train_draft, or give the head of this policy"
        )
        return rows, [Finding("useless", sentence)]
    gain, way = difference(means[best], means[0]), ways[best]
    if not gain.exceeds(MARGIN):
        return rows, []
    sentence = (
        f"{way.fault}: {way.because}; {way.name}, {means[best].mean():.3f} of its drafts are accepted instead of "
        f"{loaded:.3f} (standard error of the difference {gain.error:.3f}); {way.remedy}"
    )
    return rows, [Finding(way.fault, sentence)]


def judge_length(
    windows: Float[np.ndarray, "2 2 n"], end: int, length: int, configured: int
) -> tuple[list[Any], list[Finding]]:
    """Whether a head drafts worse behind position `end` because of its positions.

    Args:
        windows: overlaps before `end` and at the end of a row of `length` tokens, each of the head reading the whole
            row and of the head counting positions from the window's start.
        configured: the head's max_position_embeddings.
    """
    names = (f"before position {end}", f"up to position {length}")
    rows = [
        row("long prompt", name, *mean_error(pair[0]), float(pair[1].mean()), "positions from a window's start")
        for name, pair in zip(names, windows, strict=True)
    ]
    before, behind = (difference(pair[1], pair[0]) for pair in windows)
    lost = Difference(behind.mean - before.mean, float(np.hypot(behind.error, before.error)))
    if not (lost.exceeds(LONG_MARGIN) and behind.exceeds(LONG_MARGIN)):
        return rows, []
    remedy = "raise it to the policy's" if configured < length else "look for a limit in its rope parameters"
    sentence = (
        f"rope: the head's positions stop at {end}: up to {length}, {windows[1][0].mean():.3f} of its drafts are "
        f"accepted, and {windows[1][1].mean():.3f} where it counts positions anew; its config.json has "
        f"max_position_embeddings = {configured}, {remedy}, and if that changes nothing train it on longer rows"
    )
    return rows, [Finding("rope", sentence)]
