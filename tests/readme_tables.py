"""Tables of README.md from the files in results/: `PYTHONPATH=. python tests/readme_tables.py` writes them anew.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.outputs import markdown_table

ROOT = Path(__file__).parents[1]
SPEED = ROOT / "results" / "speed"
LOSSLESSNESS = ROOT / "results" / "losslessness"


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _with_interval(value: float, half_width: float, sign: str = "") -> str:
    return f"{value:{sign}.3f} ± {half_width:.3f}"


def demo_table() -> str:
    """The demo runs of results/demo, one row each."""
    rows = []
    for path in sorted((ROOT / "results" / "demo").glob("*.json")):
        run = _read(path)
        rows.append(
            {
                "run": path.stem.replace("_", " "),
                "accuracy before": _with_interval(run["accuracy_before"], run["accuracy_ci95_before"]),
                "after": _with_interval(run["accuracy_after"], run["accuracy_ci95_after"]),
                "gain": _with_interval(run["accuracy_gain"], run["accuracy_gain_ci95"], "+"),
                "acceptance length": run["acceptance_length"],
                "entropy": run["entropy"],
                "same tokens": run.get("tokens_equal"),
                "same parameters": run.get("params_equal"),
            }
        )
    return markdown_table(rows)


def losslessness_table() -> str:
    """Divergences of results/losslessness by kind of run."""
    arms = [row for name in ("plain", "invariant") for row in _read(LOSSLESSNESS / f"{name}.json")["rows"]]
    rows = []
    for numerics, dtype, shape in dict.fromkeys((r["numerics"], r["dtype"], _shape(r)) for r in arms):
        own = [r for r in arms if (r["numerics"], r["dtype"], _shape(r)) == (numerics, dtype, shape)]
        expected = [r.get("expected") for r in own]
        rows.append(
            {
                "numerics": f"{numerics} {dtype}",
                "drafts": shape,
                "programs": len(own),
                "tokens compared": sum(r["tokens"] for r in own),
                "divergences": sum(r["divergences"] for r in own),
                "expected of rounding": None if None in expected else float(sum(expected)),
            }
        )
    return markdown_table(rows)


def invariance_cost_table() -> str:
    """Cost of an invariant decode step over a plain one, a column per block size, from results/losslessness."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in _read(LOSSLESSNESS / "invariant.json")["costs"]:
        line = found.setdefault((row["dtype"], row["rows"]), {"dtype": row["dtype"], "rows": row["rows"]})
        line[f"blocks of {row['token_block']}"] = f"{row['cost']:.2f} ({row['cost_low']:.2f} to {row['cost_high']:.2f})"
    return markdown_table(list(found.values()))


def _shape(row: dict[str, Any]) -> str:
    """Kind of drafts of an arm."""
    return "none" if row["draft_length"] == 0 else row["shape"].split()[0]


def acceptance_table() -> str:
    """Acceptance length by rule, a column per policy and temperature, from results/acceptance."""
    found: dict[str, dict[str, Any]] = {}
    entropy: dict[str, Any] = {"rule": "entropy (nats per token)"}
    for path in sorted((ROOT / "results" / "acceptance").glob("*.json")):
        for row in _read(path)["rows"]:
            column = f"{path.stem}, T = {row['temperature']:g}"
            found.setdefault(row["rule"], {"rule": row["rule"]})[column] = (
                f"{row['acceptance_length']:.2f} ± {row['ci95']:.2f}"
            )
            entropy[column] = row["entropy"]
    return markdown_table([*found.values(), entropy])


def round_cost_table() -> str:
    """Cost of a round beside its floor, from results/speed/round_cost.json."""
    rows = []
    for row in _read(SPEED / "round_cost.json")["rows"]:
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
                "over floor": f"{row['over_floor']:.2f} ({row['over_floor_low']:.2f} to {row['over_floor_high']:.2f})",
            }
        )
    return markdown_table(rows)


def _speed(row: dict[str, Any], name: str = "speedup") -> str:
    return f"{row[name]:.2f} ({row[f'{name}_low']:.2f} to {row[f'{name}_high']:.2f})"


def rollout_table() -> str:
    """Rollouts with drafts over rollouts without, from results/speed/rollout_*.json."""
    rows = []
    for path in sorted(SPEED.glob("rollout_*.json")):
        for row in _read(path)["rows"]:
            synthetic, share = row["synthetic_survival"], row.get("share_of_floor")
            rows.append(
                {
                    "workload": f"synthetic, {synthetic:g}" if synthetic else row.get("workload", "random"),
                    "branchy prompts": row.get("branchy"),
                    "rows": row["rows"],
                    "lengths": row["lengths"],
                    "drafts": row["draft_length"],
                    "acceptance length": row["acceptance_length"],
                    "tokens / s": f"{row['tokens_per_second']:.0f}",
                    "speed-up": _speed(row),
                    "over best fixed": None if share is None else _speed(row, "over_best_fixed"),
                    "of what floors allow": None if share is None else f"{share:.2f} of {row['allowed']:.2f}",
                }
            )
    return markdown_table(rows)


def peers_table() -> str:
    """Our rollouts beside other engines', from results/speed/peers_*.json."""
    rows = []
    for path in sorted(SPEED.glob("peers_*.json")):
        for row in _read(path)["rows"]:
            rows.append(
                {
                    "policy": row["shape"],
                    "workload": row.get("workload", "random"),
                    "rows": row["rows"],
                    "engine": row["arm"],
                    "tokens / s": f"{row['tokens_per_second']:.0f}",
                    "its time / ours": _speed(row),
                    "acceptance length": row["acceptance_length"],
                    "bare products (ms)": None if row["products_ms"] is None else f"{row['products_ms']:.2f}",
                }
            )
    return markdown_table(rows)


def step_table() -> str:
    """GRPO steps beside other trainers', from results/speed/step.json."""
    rows = []
    for row in _read(SPEED / "step.json")["rows"]:
        rows.append(
            {
                "trainer": row["arm"],
                "log-prob pass": row["log_prob_pass"],
                "seconds": f"{row['seconds']:.2f}",
                "speed-up": _speed(row),
                "Amdahl": None if row.get("amdahl") is None else f"{row['amdahl']:.2f}",
                "share of the rollout": f"{row['rollout_share']:.2f}",
            }
        )
    return markdown_table(rows)


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo_table,
    "losslessness": losslessness_table,
    "invariance_cost": invariance_cost_table,
    "acceptance": acceptance_table,
    "round_cost": round_cost_table,
    "rollout": rollout_table,
    "peers": peers_table,
    "step": step_table,
}


def with_tables(text: str) -> str:
    """`text` with every table made anew.

    Raises:
        KeyError: a table has a name that is not in TABLES.
    """

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end of table -->)", table, text, flags=re.S)


def main() -> None:
    """Rewrite the tables of README.md."""
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
