"""The closing of a GRPO run: summary.json, the tables, the plots."""

import dataclasses
import functools
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.outputs import markdown_table, write_results
from experiments.setup import Arm
from experiments.turns import in_turn, seconds_of
from specrl_jax.models.weights import params_sha256
from specrl_jax.rl.grpo import GrpoState
from specrl_jax.rl.pass_at_k import mean_ci95
from specrl_jax.training.metrics import read_metrics, write_json
from specrl_jax.training.plots import plot_run

TIMED_PAIRS = 5
"""Rollouts of each arm that are timed in turn."""


def why_slower(arms: Sequence[Arm], speedup: float) -> str:
    """What a round costs and saves, both measured, as one sentence."""
    forwards = [mean_of(read_metrics(arm.folder), "policy_forwards_per_sequence") or 1.0 for arm in arms]
    saved = forwards[1] / forwards[0]
    return (
        f"speculation is slower here: a round does the work of {saved:.1f} steps of one token and takes "
        f"the time of {saved / speedup:.1f}, since so many rows leave the device no idle arithmetic"
    )


def median_of(rows: Sequence[Mapping[str, Any]], name: str, timing: str) -> float | None:
    """Median of a metric over the rows with this timing."""
    values = [row[name] for row in rows if row.get("timing") == timing]
    return float(np.median(values)) if values else None


def mean_of(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Mean of a metric over the rows that have it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return float(np.mean(values)) if values else None


def time_rollouts(arms: Sequence[Arm]) -> dict[str, list[float]]:
    """Seconds of the same rollout (final policy and drafter, next prompts) in every arm, in turn."""
    calls: dict[str, Callable[[], float]] = {}
    state: GrpoState = arms[0].report.state
    prompts, _ = arms[0].program.issue(arms[0].program.gather(state))
    for arm in arms:
        own = state if arm.draft_length else dataclasses.replace(state, draft=None, draft_opt_state=None, control=None)
        calls[arm.label] = seconds_of(functools.partial(arm.program.rollout, arm.program.gather(own), prompts))
    return {label: values.tolist() for label, values in in_turn(calls, TIMED_PAIRS).items()}


def peak_memory_gb() -> float:
    """Most memory that this process has held, in 10^9 bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def arm_row(arm: Arm, session: Any) -> dict[str, Any]:
    """A row of the closing table."""
    rows = [row for row in read_metrics(arm.folder) if row["step"] > 0]
    last, adaptive = rows[-1], arm.program.step.engine.config.adaptive
    accuracy = [row for row in read_metrics(arm.folder) if "accuracy" in row]
    return {
        "arm": arm.label,
        "draft_length": f"at most {arm.draft_length}" if adaptive else arm.draft_length,
        "dtype": session.policy.dtype,
        "numerics": session.numerics.mode,
        "batch": session.config.prompts * session.config.samples,
        "dev_accuracy_last": accuracy[-1]["accuracy"] if accuracy else None,
        "acceptance_length": mean_of(rows, "acceptance_length"),
        "tokens_per_second": median_of(rows, "tokens_per_second", "measured"),
        "time_step_s": median_of(rows, "time_step_s", "measured"),
        "time_rollout_s": median_of(rows, "time_rollout_s", "measured"),
        "rollout_share": median_of(rows, "rollout_share", "measured"),
        "time_step_scanned_s": median_of(rows, "time_step_s", "scanned"),
        "reward_mean_last": last["reward_mean"],
        "trajectory_sha256": arm.report.trajectory_sha256,
        "params_sha256": params_sha256(arm.report.state.params, session.policy),
    }


def close_run(
    session: Any,
    arms: Sequence[Arm],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    source: Mapping[str, Any],
    seconds: float,
) -> None:
    """Write summary.json, results and plots, and print the closing tables."""
    out = arms[0].folder
    rows = [arm_row(arm, session) for arm in arms]
    metrics = [row for row in read_metrics(out) if row["step"] > 0]
    summary: dict[str, Any] = {
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "accuracy_gain": after["accuracy"] - before["accuracy"],
        "accuracy_gain_ci95": mean_ci95(after["right"] - before["right"])[1],
        "accuracy_ci95_before": before["accuracy_ci95"],
        "accuracy_ci95_after": after["accuracy_ci95"],
        "eval_problems": len(before["right"]),
        "response_length_median": mean_of(metrics, "response_length_median"),
        "response_length_p99_ended": mean_of(metrics, "response_length_p99_ended"),
        "truncated_fraction": mean_of(metrics, "truncated_fraction"),
        "entropy": mean_of(metrics, "entropy"),
        "clip_fraction": mean_of(metrics, "clip_fraction"),
        "acceptance_length": mean_of(metrics, "acceptance_length"),
        "survival_per_position": _mean_list(metrics, "survival_per_position"),
        "conditional_acceptance": _mean_list(metrics, "conditional_acceptance"),
        "trajectory_sha256": rows[0]["trajectory_sha256"],
        "params_sha256": rows[0]["params_sha256"],
        "wall_seconds": seconds,
        "peak_memory_gb": peak_memory_gb(),
    }
    if len(arms) > 1:
        summary |= comparison(arms, rows)
    write_json(out / "summary.json", summary | dict(source))
    write_results(out, rows, "GRPO with and without speculation", source)
    last = arms[0].report.last
    lengths = {} if last is None else {"last training rollout": np.asarray(last.lengths).tolist()}
    plot_run(out, {arm.label: read_metrics(arm.folder) for arm in arms}, lengths=lengths)
    print(_closing_text(session, rows, summary), flush=True)


def comparison(arms: Sequence[Arm], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speed and equality of the two arms; a row that is slower gets a remark."""
    equal = {
        "tokens_equal": rows[0]["trajectory_sha256"] == rows[1]["trajectory_sha256"],
        "params_equal": rows[0]["params_sha256"] == rows[1]["params_sha256"],
    }
    if arms[0].program.task is None:
        return equal
    seconds = time_rollouts(arms)
    fast, slow = seconds[arms[0].label], seconds[arms[1].label]
    ratios = [b / a for a, b in zip(fast, slow, strict=True)]
    speedup = float(np.median(ratios))
    if speedup < 1.0:
        rows[0]["remark"] = why_slower(arms, speedup)
    share = rows[1]["rollout_share"] or 0.0
    step = None
    if rows[0]["time_step_s"] and rows[1]["time_step_s"]:
        step = rows[1]["time_step_s"] / rows[0]["time_step_s"]
    return equal | {
        "speedup_rollout": speedup,
        "speedup_rollout_range": [min(ratios), max(ratios)],
        "speedup_step": step,
        "speedup_step_amdahl": 1.0 / (share / speedup + 1.0 - share),
        "rollout_seconds": {arms[0].label: fast, arms[1].label: slow},
    }


def _mean_list(rows: Sequence[Mapping[str, Any]], name: str) -> list[float] | None:
    values = [row[name] for row in rows if row.get(name)]
    return np.mean(values, axis=0).tolist() if values else None


def _yes(session: Any, equal: bool) -> str:
    if equal:
        return "yes"
    if session.config.speculation.rule != "match":
        return f"no (rule {session.config.speculation.rule} keeps the law of the tokens, not the tokens)"
    return "NO" if session.numerics.invariant else "no (plain numerics: rounding decides between tokens that tie)"


def _closing_text(session: Any, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    hidden = ("sha256", "remark")
    shown = [{name: value for name, value in row.items() if not name.endswith(hidden)} for row in rows]
    lines = ["", markdown_table(shown)]
    half = summary["accuracy_ci95_after"]
    lines.append(
        f"test accuracy (greedy, {summary['eval_problems']} problems): {summary['accuracy_before']:.3f} before, "
        f"{summary['accuracy_after']:.3f} +- {half:.3f} after GRPO; "
        f"gain {summary['accuracy_gain']:+.3f} +- {summary['accuracy_gain_ci95']:.3f}"
    )
    lines.append(
        f"entropy {summary['entropy']:.3f} nats per token, responses of {summary['response_length_median']:.0f}"
    )
    if summary.get("acceptance_length"):
        survival = ", ".join(f"{x:.2f}" for x in summary["survival_per_position"])
        lines.append(f"acceptance length {summary['acceptance_length']:.2f} (survival per position {survival})")
    if "tokens_equal" in summary:
        lines.append(f"same tokens with and without speculation: {_yes(session, summary['tokens_equal'])}")
        lines.append(f"same parameters: {_yes(session, summary['params_equal'])}")
    speedup = summary.get("speedup_rollout")
    if speedup is not None:
        low, high = summary["speedup_rollout_range"]
        lines.append(f"rollout speed-up {speedup:.2f}x (of {TIMED_PAIRS} pairs {low:.2f} to {high:.2f})")
        if speedup < 1.0:
            lines.append(rows[0]["remark"])
    lines.append(f"{summary['wall_seconds']:.0f} s, at most {summary['peak_memory_gb']:.1f} GB of memory")
    return "\n".join(lines)
