"""PNG plots of a run, drawn from the rows of its metrics.jsonl.

An arm is one run; plots that compare draw several, by label. A step without a
number (null, or a key it does not have) leaves no point.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Rows = Sequence[Mapping[str, Any]]

# Parts of a step in the order they run; prefill is taken out of the rollout it belongs to.
_TIME_PARTS = {
    "time_data_s": "data",
    "time_weight_sync_s": "weight sync",
    "time_prefill_s": "prefill",
    "time_rollout_s": "rollout (decode)",
    "time_reward_s": "reward",
    "time_logprob_s": "log-probs",
    "time_update_s": "policy update",
    "time_draft_update_s": "draft update",
}
COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB", "#222222")
_LINES = ("-", "--", ":", "-.")


def plot_run(
    folder: Path, arms: Mapping[str, Rows], *, lengths: Mapping[str, Sequence[int]] | None = None
) -> list[Path]:
    """Draw every plot that the rows have numbers for.

    Args:
        folder: where the PNG files go; it exists.
        arms: metrics rows by label, for example "with speculation" and "without".
        lengths: response lengths in tokens by label.

    Returns:
        The files written: learning.png, acceptance.png, time.png, lengths.png.
    """
    drawn = {
        "learning.png": draw_learning(arms),
        "acceptance.png": draw_acceptance(arms),
        "time.png": draw_time(arms),
        "lengths.png": draw_lengths(lengths or {}),
    }
    written = []
    for name, figure in drawn.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=120)
            written.append(folder / name)
    return written


def draw_learning(arms: Mapping[str, Rows]) -> Figure | None:
    """Mean reward and held-out accuracy over steps, one line per arm."""
    panels = {"reward_mean": "mean reward of the rollouts", "accuracy": "greedy accuracy, held-out"}
    shown = [name for name in panels if any(_series(rows, name)[0] for rows in arms.values())]
    if not shown:
        return None
    figure, axes = _figure(len(shown))
    for axis, name in zip(axes, shown, strict=True):
        for i, (label, rows) in enumerate(arms.items()):
            steps, values = _series(rows, name)
            # Arms may be equal to the bit: later ones are dashed, so that the first stays visible.
            axis.plot(steps, values, _LINES[i % len(_LINES)], color=COLORS[i], label=label, marker=_marker(steps), ms=4)
        _label_steps(axis, panels[name])
    return figure


def draw_acceptance(arms: Mapping[str, Rows]) -> Figure | None:
    """Acceptance length over steps, and the share of rounds whose draft survives each position."""
    arms = {label: rows for label, rows in arms.items() if _series(rows, "acceptance_length")[0]}
    if not arms:
        return None
    survival = {label: _survival(rows) for label, rows in arms.items()}
    figure, axes = _figure(1 + any(len(values) > 0 for values in survival.values()))
    for i, (label, rows) in enumerate(arms.items()):
        steps, values = _series(rows, "acceptance_length")
        axes[0].plot(steps, values, color=COLORS[i], label=label, marker=_marker(steps), ms=4)
        if len(survival[label]):
            positions = np.arange(1, len(survival[label]) + 1)
            axes[1].plot(positions, survival[label], color=COLORS[i], label=label, marker="o", ms=5)
            for position, share in zip(positions, survival[label], strict=True):
                axes[1].annotate(
                    f"{share:.2f}", (position, share), (0, 7), textcoords="offset points", ha="center", fontsize=8
                )
    _label_steps(axes[0], "acceptance length (tokens per round)")
    if len(axes) > 1:
        axes[1].set(xlabel="draft position", ylabel="share of rounds accepted up to here", ylim=(0.0, 1.1))
        axes[1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes[1].legend(frameon=False)
    return figure


def draw_time(arms: Mapping[str, Rows]) -> Figure | None:
    """Where the time of a step goes: one stacked bar per arm, medians over the measured steps."""
    measured = {label: [r for r in rows if r.get("timing") == "measured"] for label, rows in arms.items()}
    parts = {label: _time_parts(rows) for label, rows in measured.items() if rows}
    if not parts:
        return None
    figure, (axis,) = _figure(1)
    figure.set_size_inches(7.5, 1.6 + 0.7 * len(parts))
    labels = list(parts)
    left = np.zeros(len(labels))
    for color, (key, name) in zip(COLORS, _TIME_PARTS.items(), strict=True):
        widths = np.array([parts[label][key] for label in labels])
        if widths.any():
            axis.barh(labels, widths, left=left, color=color, label=name, height=0.6)
            left += widths
    for i, total in enumerate(left):
        axis.text(total, i, f" {total:.3g} s", va="center", fontsize=9)
    axis.set(xlabel="seconds per step (median of the measured steps)", xlim=(0.0, 1.15 * left.max()))
    axis.invert_yaxis()
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def draw_lengths(lengths: Mapping[str, Sequence[int]]) -> Figure | None:
    """Histogram of response lengths, with median and 99th percentile in the legend."""
    lengths = {label: values for label, values in lengths.items() if len(values)}
    if not lengths:
        return None
    figure, (axis,) = _figure(1)
    bins = np.linspace(0, max(max(values) for values in lengths.values()) + 1, 41).tolist()
    for i, (label, values) in enumerate(lengths.items()):
        median, tail = np.percentile(values, [50, 99])
        text = f"{label}: median {median:.0f}, 99th percentile {tail:.0f}"
        axis.hist(values, bins=bins, histtype="step", color=COLORS[i], linestyle=_LINES[i % len(_LINES)], label=text)
    axis.set(xlabel="response length (tokens)", ylabel="responses", yscale="log")
    axis.legend(frameon=False)
    return figure


def _figure(panels: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(5.2 * panels, 3.6) if panels > 1 else (6.4, 3.6), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
    return figure, axes


def _label_steps(axis: Axes, name: str) -> None:
    axis.set(xlabel="GRPO step", ylabel=name)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.legend(frameon=False)


def _marker(steps: Sequence[int]) -> str:
    """Points where there are few: an evaluation every so often."""
    return "o" if len(steps) <= 30 else ""


def _series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _survival(rows: Rows) -> np.ndarray:
    """Mean over steps; shorter lists (a shorter draft) count as zero beyond their end."""
    lists = [row["survival_per_position"] for row in rows if row.get("survival_per_position")]
    if not lists:
        return np.zeros(0)
    table = np.zeros((len(lists), max(map(len, lists))))
    for row, values in zip(table, lists, strict=True):
        row[: len(values)] = [value or 0.0 for value in values]
    return table.mean(axis=0)


def _time_parts(rows: Rows) -> dict[str, float]:
    parts = {key: float(np.median([row.get(key) or 0.0 for row in rows])) for key in _TIME_PARTS}
    parts["time_rollout_s"] = max(parts["time_rollout_s"] - parts["time_prefill_s"], 0.0)
    return parts


def draw_losslessness(rows: Rows, costs: Rows) -> Figure:
    """Divergences per million tokens by kind of run, found and expected; and the cost of invariant numerics.

    Args:
        rows: of `experiments.losslessness`, with numerics, dtype, tokens, divergences, and expected where known.
        costs: rows, dtype, token_block, cost.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    kinds = list(dict.fromkeys((row["numerics"], row["dtype"]) for row in rows))
    labels = []
    for i, kind in enumerate(kinds):
        own = [row for row in rows if (row["numerics"], row["dtype"]) == kind]
        tokens = sum(row["tokens"] for row in own)
        found = 1e6 * sum(row["divergences"] for row in own) / tokens
        left.bar(i, found, color=COLORS[i])
        left.annotate(f"{found:.3g}", (i, found), ha="center", va="bottom")
        labels.append(f"{kind[0]}\n{kind[1]}\n{tokens / 1e6:.2g}M tokens")
        if all("expected" in row for row in own):
            expected = 1e6 * sum(row["expected"] for row in own) / tokens
            left.plot([i - 0.4, i + 0.4], [expected] * 2, color="black", linestyle="--", label="expected of rounding")
    if not costs:
        right.set_visible(False)
    left.set_xticks(range(len(kinds)), labels)
    left.set_yscale("symlog", linthresh=0.1)
    left.margins(y=0.2)
    left.set_ylim(bottom=0)
    left.set_ylabel("divergences per million tokens")
    if left.get_legend_handles_labels()[0]:
        left.legend()
    for i, kind in enumerate(dict.fromkeys((row["dtype"], row["token_block"]) for row in costs)):
        own = [row for row in costs if (row["dtype"], row["token_block"]) == kind]
        places, heights = ([row[name] for row in own] for name in ("rows", "cost"))
        right.plot(places, heights, "o-", color=COLORS[i % len(COLORS)], label=f"{kind[0]}, blocks of {kind[1]}")
    right.axhline(1.0, color="black", linewidth=0.8)
    right.set_xscale("log", base=2)
    right.set_xlabel("rows")
    right.set_ylabel("invariant decode step / plain")
    if costs:
        right.legend()
    return figure
