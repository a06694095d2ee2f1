"""What the rollout engine is meant to reach, beside the worst that was measured: a table of README.md."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from speed_tables import ROOT, cpu, read, with_range

from experiments.outputs import markdown_table

Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """`field` of every row of results/`files` that `of` picks is to be at least (or at most) `bound`."""

    what: str
    files: str
    of: Callable[[Row], bool]
    field: str
    sign: str
    bound: float

    def missed_by(self, row: Row, *, whole: bool = True) -> float:
        """How far beyond the bound a row's interval reaches, or the middle of it; below 0 where it keeps the bound."""
        least = self.sign == "≥"
        end = ("_low" if least else "_high") if whole else ""
        value = float(row.get(self.field + end, row[self.field]))
        return self.bound - value if least else value - self.bound

    def met(self, row: Row) -> str:
        """Whether the interval keeps the bound, or what was measured in the middle alone does."""
        if self.missed_by(row) <= 0:
            return "yes"
        return "in the middle" if self.missed_by(row, whole=False) <= 0 else "no"

    def worst(self, rows: list[Row]) -> Row:
        """The row that is told: of those whose middle misses the bound, if any, what reaches beyond it most."""
        return max(rows, key=lambda row: (self.missed_by(row, whole=False) > 0, self.missed_by(row)))


def _where(**values: Any) -> Callable[[Row], bool]:
    return lambda row: all(row.get(name) == value for name, value in values.items())


def _adaptive(rows: int, **values: Any) -> Callable[[Row], bool]:
    return _where(draft_length="adaptive", ladder=True, rows=rows, **values)


def _short(rows: int) -> Callable[[Row], bool]:
    """The controller, with contexts of which attention is a small part."""
    return lambda row: _adaptive(rows)(row) and row.get("context") != 2048


def _vllm(rows: int) -> Callable[[Row], bool]:
    return lambda row: row["rows"] == rows and row["arm"].startswith("vllm")


_ANY, _ROLLOUT, _ROUND, _DEEP = "speed/rollout_*", "speed/rollout_", "speed/round_cost*", "speed/peers_deep"
_LONG = "speed/rollout_context_2048_1"
_NOTHING_TO_WIN = {"draft_length": "adaptive, random head"}
GOALS = (
    Goal("25M, 8 rows: tunix's time over ours", "speed/peers_25m_8", _where(arm="tunix"), "speedup", "≥", 1.0),
    Goal("same, transformers'", "speed/peers_25m_8", _where(arm="transformers"), "speedup", "≥", 1.5),
    Goal("same, vLLM's", "speed/peers_25m_8", _where(arm="vllm"), "speedup", "≥", 0.75),
    Goal("same, vLLM's in 1 row", "speed/peers_25m_1", _where(arm="vllm"), "speedup", "≥", 1.0),
    Goal("arithmetic, 1 row: vLLM's fastest mode over our fastest", _DEEP, _vllm(1), "speedup", "≥", 1.5),
    Goal("same, 8 rows", _DEEP, _vllm(8), "speedup", "≥", 1.0),
    Goal("step over products with weights, 1 row", _ROUND, _where(rows=1, context=256), "step_over_bare", "≤", 1.25),
    Goal("same, 4 rows", _ROUND, _where(rows=4, context=256), "step_over_bare", "≤", 1.25),
    Goal("same, 8 rows", _ROUND, _where(rows=8, context=256), "step_over_bare", "≤", 1.25),
    Goal("same, 16 rows", _ROUND, _where(rows=16, context=256), "step_over_bare", "≤", 1.25),
    Goal("step over all products, attention's too, any rows", _ROUND, _where(), "step_over_products", "≤", 1.25),
    Goal("round over its floor beside 256 tokens", _ROUND, _where(context=256), "over_floor", "≤", 1.15),
    Goal("same, beside 2048 tokens", _ROUND, _where(context=2048), "over_floor", "≤", 1.15),
    Goal("round over a floor with attention, any context", _ROUND, _where(), "over_products", "≤", 1.15),
    Goal("controller, 0.877, 1 row", _ANY, _adaptive(1, synthetic_survival=0.877), "speedup", "≥", 2.2),
    Goal("same, 16 rows", _ANY, _adaptive(16, synthetic_survival=0.877), "speedup", "≥", 1.5),
    Goal("controller, of what floors allow, 1 row", _ANY, _short(1), "share_of_floor", "≥", 0.85),
    Goal("same, 4 rows", _ANY, _adaptive(4), "share_of_floor", "≥", 0.85),
    Goal("same, 16 rows", _ANY, _adaptive(16), "share_of_floor", "≥", 0.85),
    Goal("same, 64 rows", _ANY, _adaptive(64), "share_of_floor", "≥", 0.85),
    Goal("same, 1 row beside 2048 tokens", _LONG, _adaptive(1), "share_of_floor", "≥", 0.85),
    Goal("same, of floors with attention", _LONG, _adaptive(1), "share_with_attention", "≥", 0.85),
    Goal("controller over the best fixed number, 1 row", _ANY, _adaptive(1), "over_best_fixed", "≥", 0.97),
    Goal("same, 4 rows", _ANY, _adaptive(4), "over_best_fixed", "≥", 0.97),
    Goal("same, 16 rows", _ANY, _adaptive(16), "over_best_fixed", "≥", 0.97),
    Goal("same, 64 rows", _ANY, _adaptive(64), "over_best_fixed", "≥", 0.97),
    Goal("controller, random head, 1 row", f"{_ROLLOUT}1", _where(**_NOTHING_TO_WIN), "speedup", "≥", 0.97),
    Goal("same, 16 rows", "speed/random_head_16", _where(**_NOTHING_TO_WIN), "speedup", "≥", 0.97),
    Goal("half branchy, over the best fixed", f"{_ROLLOUT}branchy_8", _adaptive(8), "over_best_fixed", "≥", 1.05),
    Goal("half branchy, over all rows alike", f"{_ROLLOUT}branchy_8", _adaptive(8), "over_alike", "≥", 1.02),
    Goal("GRPO step, 25M: tunix's time over ours", "speed/step", _where(arm="tunix-grpo"), "speedup", "≥", 1.5),
    Goal("same, TRL's", "speed/step", _where(arm="trl-grpo"), "speedup", "≥", 1.5),
    Goal("a prompt for 16 responses over one", "speed/cache", _where(part="prefill of a group"), "over_one", "≤", 1.2),
    Goal("caches over what lives in them", "speed/cache", _where(default=True), "over_live", "≤", 3.0),
    Goal("peak memory over weights and caches", "speed/cache", _where(part="memory"), "over_parts", "≤", 1.3),
    Goal("seconds to compile a round, 25M", "speed/cache", _where(bodies=1), "seconds", "≤", 10.0),
    Goal("8B, 1 row: tokens / s without drafts", "h200/round_cost", _where(rows=1), "tokens_per_second", "≥", 200.0),
    Goal("8B, 1 row: three drafts over a step", "h200/round_cost", _where(rows=1), "round_cost", "≤", 1.25),
    Goal("same, 32 rows", "h200/round_cost", _where(rows=32), "round_cost", "≤", 1.4),
)


def rows_of(goal: Goal) -> list[Row]:
    """What a goal is judged by."""
    files = sorted((ROOT / "results").glob(f"{goal.files}.json"))
    rows = [row for path in files for row in read(path)["rows"]]
    for row in rows:
        if "step_ms" in row:
            row["tokens_per_second"] = 1e3 * row["rows"] / row["step_ms"]
    return [row for row in rows if goal.of(row)]


def _measured(row: Row, field: str) -> str:
    """With the interval, or the end of it that a file has."""
    if f"{field}_low" in row:
        return with_range(row, field)
    return f"{row[field]:.3g}" + (f" (to {row[f'{field}_high']:.2f})" if f"{field}_high" in row else "")


def goals_table() -> str:
    """Goals beside the worst that was measured."""
    lines = []
    for goal in GOALS:
        worst = goal.worst(rows_of(goal))
        lines.append(
            {
                "what": goal.what,
                "goal": f"{goal.sign} {goal.bound:g}",
                "measured": _measured(worst, goal.field),
                "met": goal.met(worst),
                "on": "H200" if "H200" in worst["device"] else cpu(worst),
            }
        )
    return markdown_table(lines)
