"""Tables of README.md from the files in results/: `PYTHONPATH=. python tests/readme_tables.py` writes them anew.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

import re
from collections.abc import Callable
from typing import Any

from speed_goals import goals_table
from speed_tables import (
    ROOT,
    SPEED,
    cache_table,
    cpu,
    gpu_round_cost_table,
    peers_table,
    read,
    rollout_table,
    round_cost_table,
    step_table,
    with_range,
    write_speedups,
)

from experiments.online_adaptation import paper_lengths
from experiments.outputs import markdown_table

DRAFTS = ROOT / "results" / "drafts"
LOSSLESSNESS = ROOT / "results" / "losslessness"


def _with_interval(value: float, half_width: float, sign: str = "") -> str:
    return f"{value:{sign}.3f} ± {half_width:.3f}"


def demo_table() -> str:
    """The demo runs of results/demo, one row each."""
    rows = []
    for path in sorted((ROOT / "results" / "demo").glob("*.json")):
        run = read(path)
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


def _invariant(key: str) -> list[dict[str, Any]]:
    """Rows of the newest run of each dtype."""
    files = {"float32": "invariant_float32.json", "bfloat16": "invariant.json"}
    return [row for dtype, name in files.items() for row in read(LOSSLESSNESS / name)[key] if row["dtype"] == dtype]


def losslessness_table() -> str:
    """Divergences of results/losslessness by kind of run."""
    arms = [*read(LOSSLESSNESS / "plain.json")["rows"], *_invariant("rows")]
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
    for row in _invariant("costs"):
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
        for row in read(path)["rows"]:
            column = f"{path.stem}, T = {row['temperature']:g}"
            found.setdefault(row["rule"], {"rule": row["rule"]})[column] = (
                f"{row['acceptance_length']:.2f} ± {row['ci95']:.2f}"
            )
            entropy[column] = row["entropy"]
    return markdown_table([*found.values(), entropy])


def _mean(row: dict[str, Any], name: str, half: str | None = None) -> str | None:
    """A mean over seeds with its interval; None where it was not measured."""
    if row.get(name) is None:
        return None
    return f"{row[name]:.2f} ± {row[half or f'{name}_ci95']:.2f}"


def _paper(first: float | None, second: float | None) -> str | None:
    return None if first is None else f"{first:g} / {second:g}"


def draft_length_table() -> str:
    """What k drafts per round win, from results/drafts/draft_length.json."""
    rows = []
    for row in read(DRAFTS / "draft_length.json")["rows"]:
        rows.append(
            {
                "workload": row["workload"],
                "rows": row["rows"],
                "drafts": row["draft_length"],
                "acceptance length": _mean(row, "acceptance_length") if row["draft_length"] else None,
                **({"rollout (s)": f"{row['seconds']:.2f}"} if "seconds" in row else {}),
                "speed-up": _mean(row, "speedup") if row["draft_length"] else None,
                "round / step": _mean(row, "round_cost") if row["draft_length"] else None,
                "NeMo RL: acceptance length": row.get("paper_acceptance_length"),
                "speed-up there": row.get("paper_speedup"),
                "round / step there": row.get("paper_round_cost"),
            }
        )
    return markdown_table(rows)


def draft_init_table() -> str:
    """What a head should have learned from, from results/drafts/draft_init.json."""
    rows = []
    for row in read(DRAFTS / "draft_init.json")["rows"]:
        rows.append(
            {
                "head": row["init"],
                "mode": row["mode"],
                "measured on": row["prompts"],
                "acceptance length": _mean(row, "acceptance_length", "ci95"),
                "training (s)": f"{row['training_seconds']:.0f}",
                "NeMo RL: RL-Zero / RL-Think": _paper(row.get("paper_rl_zero"), row.get("paper_rl_think")),
            }
        )
    return markdown_table(rows)


def text_drafts_table() -> str:
    """Drafts from text under the controller, from results/drafts/text_drafts.json."""
    rows = []
    for row in read(DRAFTS / "text_drafts.json")["rows"]:
        if row["draft_length"] != "0":
            rows.append(
                {
                    "rows": row["rows"],
                    "drafts": f"{row['drafts']}, {row['draft_length']}",
                    "acceptance length": row["acceptance_length"],
                    "tokens / s": f"{row['tokens_per_second']:.0f}",
                    "speed-up": with_range(row),
                    "CPU": cpu(row),
                }
            )
    return markdown_table(rows)


def draft_methods_table() -> str:
    """Every drafter beside the others, from results/drafts/draft_methods.json."""
    rows = []
    for row in read(DRAFTS / "draft_methods.json")["rows"]:
        lengths = (row.get(f"paper_{run}_acceptance_length") for run in ("rl_zero", "rl_think"))
        speedups = (row.get(f"paper_{run}_speedup") for run in ("rl_zero", "rl_think"))
        rows.append(
            {
                "rows": row["rows"],
                "drafts from": row["method"],
                "parameters": row["parameters"] or None,
                "acceptance length": _mean(row, "acceptance_length", "ci95"),
                "tokens per forward": _mean(row, "tokens_per_forward"),
                "speed-up": _mean(row, "speedup"),
                "training (s)": f"{row['training_seconds']:.0f}" if row["training_seconds"] else None,
                "paid back after (rollouts)": None if row["paid_back"] is None else f"{row['paid_back']:.0f}",
                "NeMo RL: acceptance length": _paper(*lengths),
                "speed-up there": _paper(*speedups),
            }
        )
    return markdown_table(rows)


def acceptance_by_task_table() -> str:
    """Acceptance length by task, temperature and drafts, from results/drafts/acceptance_by_task_*.json."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in sorted(DRAFTS.glob("acceptance_by_task_*.json")):
        policy = path.stem.removeprefix("acceptance_by_task_")
        for row in read(path)["rows"]:
            first = {"policy": policy, "prompts": row["prompts"], "temperature": row["temperature"]}
            line = found.setdefault(tuple(first.values()), first | {"entropy": row["entropy"]})
            line[row["drafts"]] = f"{_mean(row, 'acceptance_length', 'ci95')}; {row['tokens_per_forward']:.2f}"
    return markdown_table(list(found.values()))


def acceptance_by_depth_table() -> str:
    """Acceptance at every depth by how the head was trained, from results/drafts/acceptance_by_depth.json."""
    rows = []
    for row in read(DRAFTS / "acceptance_by_depth.json")["rows"]:
        rows.append(
            {
                "loss": row["loss"],
                "unroll": row["unroll"],
                "measured on": row["prompts"],
                "drafts": row["draft_length"],
                "acceptance length": _mean(row, "acceptance_length", "ci95"),
                "accepted at each depth, of those reached": " ".join(f"{x:.2f}" for x in row["conditional_acceptance"]),
            }
        )
    return markdown_table(rows)


def online_adaptation_table(file: str = "online_adaptation.json") -> str:
    """What becomes of a head while the policy learns, from results/drafts."""
    rows = []
    for row in read(DRAFTS / file)["rows"]:
        rows.append(
            {
                "head": row["arm"] if row.get("head", "own") == "own" else f"{row['head']}, {row['arm']}",
                "first step": _mean(row, "start"),
                "worst step": _mean(row, "worst"),
                f"last {max(1, row['steps'] // 4)} of {row['steps']} steps": _mean(row, "acceptance_length"),
                "KL (nats per token)": _mean(row, "kl"),
                "reward": f"{row['reward_before']:.2f} to {row['reward_after']:.2f}",
                "NeMo RL: RL-Zero / RL-Think": _paper(*paper_lengths(row.get("head", "own"), row["arm"])),
            }
        )
    return markdown_table(rows)


def online_init_table() -> str:
    """What becomes of heads of other domains while the policy learns, from results/drafts/online_init.json."""
    return online_adaptation_table("online_init.json")


def async_table() -> str:
    """Synchronous and asynchronous steps, from results/speed/async_pipeline.json."""
    rows = []
    for row in read(SPEED / "async_pipeline.json")["rows"]:
        rows.append(
            {
                "lag": row["lag"],
                "drafts": "yes" if row["drafts"] else "no",
                "step (s)": _mean(row, "step_s"),
                "exposed rollout (s)": _mean(row, "exposed_s"),
                "speed-up of the step": _mean(row, "speedup"),
                "reward": f"{row['reward_before']:.2f} to {row['reward_after']:.2f}",
                "NeMo RL: step (s)": row["paper_step_s"],
                "exposed there (s)": row["paper_exposed_s"],
            }
        )
    return markdown_table(rows)


def mesh_table() -> str:
    """Shares of a step on every mesh, from results/speed/mesh.json."""
    rows = []
    for row in read(SPEED / "mesh.json")["rows"]:
        shares = {
            "gather of weights": row["gather_share"],
            "collectives": row["collectives_share"],
            "collectives in the rollout": row["rollout_collectives_share"],
        }
        rows.append({"mesh": row["mesh"]} | {name: f"{share:.3f}" for name, share in shares.items()})
    return markdown_table(rows)


def mesh_ties_table() -> str:
    """Divergences of rollouts on meshes from one device's, from results/losslessness/mesh.json."""
    rows = []
    for row in read(LOSSLESSNESS / "mesh.json")["rows"]:
        rows.append(
            {
                "mesh": row["mesh"],
                "drafts": row["draft_length"],
                "tokens compared": row["tokens"],
                "divergences": row["divergences"],
                "expected of rounding": row["expected"],
            }
        )
    return markdown_table(rows)


def lag_table() -> str:
    """What runs of the demo's task learn behind their policy, from results/lag."""
    rows = []
    for path in sorted((ROOT / "results" / "lag").glob("lag_*.json")):
        run = read(path)
        gain = f"+{run['accuracy_gain']:.3f} ± {run['accuracy_gain_ci95']:.3f}"
        rows.append(
            {"lag": run["lag"], "accuracy before": run["accuracy_before"], "after": run["accuracy_after"], "gain": gain}
        )
    return markdown_table(rows)


def measured_plan_table() -> str:
    """Memory and time of the pieces of a step of Qwen3-0.6B on a CPU, from results/plans."""
    rows = []
    for row in read(ROOT / "results" / "plans" / "qwen3_0_6b_cpu_measured.json")["rows"]:
        figures = {name: f"{row[name]:.2f}" for name in ("total", "measured", "seconds")}
        rows.append({"program": row["program"]} | figures)
    return markdown_table(rows)


def plans_table() -> str:
    """Memory of the pieces of a step of Qwen3-8B by compiler, from results/plans."""
    rows = []
    for path in sorted((ROOT / "results" / "plans").glob("qwen3_8b_*.json")):
        for row in read(path)["rows"]:
            names = ("compiled by", "program", "total", "needed", "fits")
            line = {"draft head": "block" if "--head block" in row["command"] else "EAGLE-3"}
            line |= {name: f"{row[name]:.2f}" if name in ("total", "needed") else row[name] for name in names}
            rows.append(line)
    return markdown_table(rows)


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo_table,
    "losslessness": losslessness_table,
    "invariance_cost": invariance_cost_table,
    "acceptance": acceptance_table,
    "goals": goals_table,
    "round_cost": round_cost_table,
    "gpu_round_cost": gpu_round_cost_table,
    "rollout": rollout_table,
    "peers": peers_table,
    "step": step_table,
    "cache": cache_table,
    "draft_length": draft_length_table,
    "draft_init": draft_init_table,
    "text_drafts": text_drafts_table,
    "draft_methods": draft_methods_table,
    "acceptance_by_task": acceptance_by_task_table,
    "acceptance_by_depth": acceptance_by_depth_table,
    "online_adaptation": online_adaptation_table,
    "online_init": online_init_table,
    "async": async_table,
    "mesh": mesh_table,
    "mesh_ties": mesh_ties_table,
    "lag": lag_table,
    "plans": plans_table,
    "measured_plan": measured_plan_table,
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
    """Rewrite the tables of README.md, and the plot of rollouts."""
    write_speedups()
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
