"""Plots of how many drafts are accepted, from the rows of the tables."""

from matplotlib.figure import Figure

from specrl_jax.training.plots import COLORS, Rows


def draw_acceptance_bars(rows: Rows, group: str, bar: str) -> Figure:
    """Acceptance length with its 95% interval: a group for every value of one field, a bar for every one of another."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    groups = list(dict.fromkeys(row[group] for row in rows))
    bars = list(dict.fromkeys(row[bar] for row in rows))
    width = 0.8 / len(bars)
    for i, name in enumerate(bars):
        own = [row for row in rows if row[bar] == name]
        places = [groups.index(row[group]) + (i - (len(bars) - 1) / 2) * width for row in own]
        heights, errors = ([row[field] for row in own] for field in ("acceptance_length", "ci95"))
        axes.bar(places, heights, width, yerr=errors, color=COLORS[i % len(COLORS)], label=str(name))
    axes.set_xticks(range(len(groups)), [str(name) for name in groups])
    axes.set_ylabel("tokens per round")
    axes.set_ylim(1, None)
    figure.legend(loc="outside right upper")
    return figure


def draw_depths(rows: Rows, line: str) -> Figure:
    """Share of the drafts at each depth that were accepted, of those whose predecessors were; a line per value."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for i, row in enumerate(rows):
        heights = row["conditional_acceptance"]
        axes.plot(range(1, len(heights) + 1), heights, "o-", color=COLORS[i % len(COLORS)], label=str(row[line]))
    axes.set_xlabel("depth of the draft")
    axes.set_ylabel("accepted, of those reached")
    axes.legend()
    return figure


def draw_adaptation(rows: Rows) -> Figure:
    """Acceptance length by step (left) and by how far the policy has gone (right): a line per arm, a colour each."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    for axes, field, label in zip(panels, ("step", "kl"), ("step", "KL from the start (nats per token)"), strict=True):
        for arm, seed in dict.fromkeys((row["arm"], row["seed"]) for row in rows):
            own = [row for row in rows if (row["arm"], row["seed"]) == (arm, seed)]
            xs, ys = ([row[name] for row in own] for name in (field, "acceptance_length"))
            first = seed == rows[0]["seed"]
            color = COLORS[arms.index(arm) % len(COLORS)]
            axes.plot(xs, ys, "." if field == "kl" else "-", color=color, label=str(arm) if first else None)
        axes.set_xlabel(label)
    panels[0].set_ylabel("tokens per round")
    panels[0].legend()
    return figure
