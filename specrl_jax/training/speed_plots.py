"""Plots of what rounds cost and what drafts win, from the rows of the benchmarks."""

from matplotlib.figure import Figure

from specrl_jax.training.plots import COLORS, Rows


def draw_round_cost(rows: Rows) -> Figure:
    """Measured cost of a round by draft length (solid) and its floor (dashed), a colour per number of rows."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for i, count in enumerate(dict.fromkeys(row["rows"] for row in rows)):
        own = sorted((row for row in rows if row["rows"] == count), key=lambda row: row["draft_length"])
        drafts = [0, *(row["draft_length"] for row in own)]
        color = COLORS[i % len(COLORS)]
        axes.plot(drafts, [1.0, *(row["round_cost"] for row in own)], "o-", color=color, label=f"{count} rows")
        axes.plot(drafts, [1.0, *(row["floor"] for row in own)], "--", color=color)
    axes.set_xlabel("drafts per round (dashed: floor of bare matrix products)")
    axes.set_ylabel("round / autoregressive step")
    axes.legend()
    return figure


def draw_speedups(rows: Rows) -> Figure:
    """Rollout speed over no drafts, with its 95% interval, a group per batch and a colour per draft length."""

    def batch(row: dict[str, object]) -> str:
        kind = f"synthetic {row['synthetic_survival']}" if row["synthetic_survival"] else row["workload"]
        context = f"\n{row['context']} in the caches" if row.get("context") else ""
        return f"{row['rows']} rows\n{row['lengths']}\n{kind}{context}"

    batches = list(dict.fromkeys(batch(dict(row)) for row in rows))
    # Fixed numbers of drafts by their size, then the controller's arms.
    arms = sorted(
        {str(row["draft_length"]) for row in rows}, key=lambda arm: (not arm[0].isdigit(), len(arm.split(",")[0]), arm)
    )
    figure = Figure(figsize=(3 + 1.4 * len(batches), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        own = [row for row in rows if row["draft_length"] == arm]
        places = [batches.index(batch(dict(row))) + (i - (len(arms) - 1) / 2) * width for row in own]
        heights = [row["speedup"] for row in own]
        errors = [
            [row["speedup"] - row["speedup_low"] for row in own],
            [row["speedup_high"] - row["speedup"] for row in own],
        ]
        label = f"{arm} drafts" if arm.isdigit() else arm
        axes.bar(places, heights, width, yerr=errors, color=COLORS[i % len(COLORS)], label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(batches)), batches)
    axes.set_ylabel("speed / speed without drafts")
    figure.legend(loc="outside right upper")
    return figure


def draw_draft_lengths(rows: Rows) -> Figure:
    """Speed-up by draft length, a panel per workload and a colour per number of rows; crosses are the paper's."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure = Figure(figsize=(5 * len(workloads), 4), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False, sharey=True)[0]
    for axes, workload in zip(panels, workloads, strict=True):
        own = [row for row in rows if row["workload"] == workload]
        for i, count in enumerate(dict.fromkeys(row["rows"] for row in own)):
            line = sorted((row for row in own if row["rows"] == count), key=lambda row: row["draft_length"])
            lengths, heights, errors = (
                [row[name] for row in line] for name in ("draft_length", "speedup", "speedup_ci95")
            )
            axes.errorbar(
                lengths, heights, yerr=errors, marker="o", color=COLORS[i % len(COLORS)], label=f"{count} rows"
            )
        paper = {row["draft_length"]: row["paper_speedup"] for row in own if row.get("paper_speedup") is not None}
        if paper:
            axes.plot(list(paper), list(paper.values()), "x", color="black", label="NeMo RL, 8B")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_title(workload)
        axes.set_xlabel("drafts per round")
    panels[0].set_ylabel("speed / speed without drafts")
    panels[0].legend()
    return figure
