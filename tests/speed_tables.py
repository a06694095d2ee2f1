"""Tables of README.md of what takes how long: files in results/speed and results/h200."""

import json
from pathlib import Path
from typing import Any

from experiments.outputs import markdown_table
from specrl_jax.training.speed_plots import draw_speedups

ROOT = Path(__file__).parents[1]
SPEED = ROOT / "results" / "speed"


def read(path: Path) -> dict[str, Any]:
    """A file of results."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def round_cost_table() -> str:
    """Cost of a round beside its floor, from results/speed/round_cost*.json."""
    rows = []
    for row in (row for path in sorted(SPEED.glob("round_cost*.json")) for row in read(path)["rows"]):
        also = "invariant_step" in row
        rows.append(
            {
                "rows": row["rows"],
                "context": row["context"],
                "drafts": row["draft_length"],
                "step (ms)": f"{row['step_ms']:.1f}",
                "step / products": f"{row['step_over_products']:.2f}",
                "step / products with weights": f"{row['step_over_bare']:.2f}",
                "round / step": f"{row['round_cost']:.2f}",
                "floor": f"{row['floor']:.2f}",
                "over floor": with_range(row, "over_floor"),
                "over floor with attention": with_range(row, "over_products"),
                "invariant step": with_range(row, "invariant_step") if also else None,
                "invariant round": with_range(row, "invariant_round") if also else None,
                "CPU": cpu(row),
            }
        )
    return markdown_table(rows)


def gpu_round_cost_table() -> str:
    """Cost of a round on one H200, from results/h200/round_cost.json."""
    rows = []
    for row in read(ROOT / "results" / "h200" / "round_cost.json")["rows"]:
        rows.append(
            {
                "policy": f"{row['shape']}, {row['dtype']}",
                "rows": row["rows"],
                "context": row["context"],
                "drafts": row["draft_length"],
                "step (ms)": f"{row['step_ms']:.2f}",
                "tokens / s": f"{1e3 * row['rows'] / row['step_ms']:.0f}",
                "step / products": f"{row['step_over_products']:.2f}",
                "round (ms)": f"{row['round_ms']:.2f}",
                "round / step": f"{row['round_cost']:.2f}",
                "floor": f"{row['floor']:.2f}",
                "over floor": with_range(row, "over_floor"),
            }
        )
    return markdown_table(rows)


def with_range(row: dict[str, Any], name: str = "speedup") -> str:
    return f"{row[name]:.2f} ({row[f'{name}_low']:.2f} to {row[f'{name}_high']:.2f})"


def cpu(row: dict[str, Any]) -> str:
    """The kind of CPU of a row's `device`, "AMD EPYC, 2 cores" or "Intel(R) Xeon(R) Processor, 2 cores"."""
    return "Xeon" if "Xeon" in row["device"] else str(row["device"]).split(",")[0].split()[-1]


def rollouts() -> list[dict[str, Any]]:
    """Rows of results/speed/rollout_*.json; a workload of a file is called as the name of its results says."""
    found = []
    for path in sorted(SPEED.glob("rollout_*.json")):
        name = {"jsonl": path.stem.split("_")[1]}
        found += [row | {"workload": name.get(row["workload"], row["workload"])} for row in read(path)["rows"]]
    return found


def write_speedups() -> None:
    """The plot of fixed numbers of drafts and the controller, in batches of one kind of prompts."""
    rows = [row for row in rollouts() if row["ladder"] and not row["branchy"]]
    rows = [row for row in rows if row["draft_length"].isdigit() or row["draft_length"] == "adaptive"]
    rows.sort(key=lambda row: (row["workload"], row["synthetic_survival"] or 0.0, row["rows"], row.get("context") or 0))
    draw_speedups(rows).savefig(SPEED / "speedups.png", dpi=100)


def rollout_table() -> str:
    """Rollouts with drafts over rollouts without, from results/speed/rollout_*.json."""
    rows = []
    for row in rollouts():
        synthetic, share = row["synthetic_survival"], row.get("share_of_floor")
        rows.append(
            {
                "workload": f"synthetic, {synthetic:g}" if synthetic else row["workload"],
                "branchy prompts": row.get("branchy"),
                "prompt tokens": f"{row['context']} in the caches" if row.get("context") else row["prompt_tokens"],
                "rows": row["rows"],
                "lengths": row["lengths"] + ("" if row["ladder"] else ", no ladder"),
                "drafts": row["draft_length"],
                "acceptance length": row["acceptance_length"],
                "tokens / s": f"{row['tokens_per_second']:.0f}",
                "speed-up": with_range(row),
                "over best fixed": None if share is None else with_range(row, "over_best_fixed"),
                "of what floors allow": None if share is None else _share(row),
                "invariant bits": with_range(row, "invariant_speedup") if "invariant_speedup" in row else None,
                "CPU": cpu(row),
            }
        )
    return markdown_table(rows)


def _share(row: dict[str, Any]) -> str:
    """Share of what floors allow, with its interval where they were measured in the same turns; and with attention."""
    name, also = "share_of_floor", "share_with_attention"
    share = with_range(row, name) if f"{name}_low" in row else f"{row[name]:.2f}"
    share += f" of {row['allowed']:.2f}"
    if also in row:
        share += f"; with attention {with_range(row, also)} of {row['allowed_with_attention']:.2f}"
    return share


def peers_table() -> str:
    """Our rollouts beside other engines', from results/speed/peers_*.json."""
    rows = []
    for path in sorted(SPEED.glob("peers_*.json")):
        for row in read(path)["rows"]:
            rows.append(
                {
                    "policy": row["shape"],
                    "workload": row.get("workload", "random"),
                    "prompt tokens": row["prompt_tokens"],
                    "rows": row["rows"],
                    "engine": row["arm"],
                    "tokens / s": f"{row['tokens_per_second']:.0f}",
                    "its time / ours": with_range(row),
                    "acceptance length": row["acceptance_length"],
                    "bare products (ms)": None if row["products_ms"] is None else f"{row['products_ms']:.2f}",
                }
            )
    return markdown_table(rows)


def step_table() -> str:
    """GRPO steps beside other trainers', from results/speed/step.json."""
    rows = []
    for row in read(SPEED / "step.json")["rows"]:
        rows.append(
            {
                "trainer": row["arm"],
                "log-prob pass": row["log_prob_pass"],
                "seconds": f"{row['seconds']:.2f}",
                "speed-up": with_range(row),
                "Amdahl": None if row.get("amdahl") is None else f"{row['amdahl']:.2f}",
                "share of the rollout": f"{row['rollout_share']:.2f}",
            }
        )
    return markdown_table(rows)


def cache_table() -> str:
    """Memory of a rollout by size of its cache, from results/speed/cache.json."""
    rows = [row for row in read(SPEED / "cache.json")["rows"] if row["part"] == "memory"]
    return markdown_table(
        [
            {
                "pool": f"{row['pool_share']}{', default' if row['default'] else ''}",
                "drafts": row["draft_length"],
                "pool (MB)": f"{row['pool_mb']:.0f}",
                "drafter's cache (MB)": f"{row['drafter_mb']:.0f}",
                "live at the peak (MB)": f"{row['live_mb']:.0f}",
                "both caches / live": f"{row['over_live']:.2f}",
                "peak of the program (MB)": f"{row['peak_mb']:.0f}",
                "peak / weights and caches": f"{row['over_parts']:.2f}",
                "rounds sat out": row["rounds_sat_out"],
                "same tokens": row["same_tokens"],
            }
            for row in rows
        ]
    )
