"""Figures of speculation from the counts of rollouts."""

from typing import Any

import numpy as np

from specrl_jax.rollout.trajectory import RolloutStats, Trajectory


def speculation_metrics(stats: RolloutStats) -> dict[str, Any]:
    """Acceptance length and rates; empty without rounds (draft length 0).

    acceptance_length: 1 + accepted / rounds over uncut rounds, the policy's own token included.
    survival_per_position: uncut rounds that accepted draft `i`, as a share of all uncut rounds.
    acceptance_rate_per_position: the same as a share of the uncut rounds that drafted position
        `i`; every round of a fixed draft length drafts every position.
    conditional_acceptance: share of the rounds that accepted draft `i - 1` and accepted draft `i` too.
    cut_rounds_fraction: rounds stopped by an end token or the maximum length.
    drafted_fraction: forwards of a row that had a draft, as a share of all of them.
    """
    rounds, cut = int(stats.rounds), int(stats.cut_rounds)
    if rounds == 0:
        return {}
    survival = np.asarray(stats.accepted_at, np.float64) / rounds
    before = np.concatenate([[1.0], survival[:-1]])
    return {
        "acceptance_length": 1.0 + int(stats.accepted) / rounds,
        "acceptance_rate_per_position": (
            np.asarray(stats.accepted_at, np.float64) / np.maximum(np.asarray(stats.drafted_at), 1)
        ).tolist(),
        "survival_per_position": survival.tolist(),
        "conditional_acceptance": (survival / np.maximum(before, 1e-12)).tolist(),
        "cut_rounds_fraction": cut / (rounds + cut),
        "drafted_fraction": (rounds + cut) / max(int(stats.steps), 1),
    }


def acceptance_interval(stats: RolloutStats) -> tuple[float, float]:
    """Acceptance length and half of its 95% interval, by the normal approximation over uncut rounds."""
    rounds = max(int(stats.rounds), 1)
    survival = np.asarray(stats.accepted_at, np.float64) / rounds
    # accepted = sum of indicators "more than i": its second moment is sum (2 i + 1) P(more than i).
    mean = survival.sum()
    variance = ((2 * np.arange(len(survival)) + 1) * survival).sum() - mean**2
    return 1.0 + float(mean), 1.96 * float(np.sqrt(variance / rounds))


def response_metrics(
    trajectory: Trajectory, responses: int | None = None, response_tokens: int | None = None
) -> dict[str, Any]:
    """Lengths in tokens, entropy in nats per token, and speculation, of a trajectory on the host.

    `tokens_per_forward` counts every forward of a row, those without drafts too, which acceptance length leaves out: by
    it alone can drafters be compared that sit rounds out.
    `rounds_sat_out`: of rows that found no room in the cache.
    `responses` and their tokens: what entropy and speculation are counted over, where that is more than the trajectory.
    """
    lengths = np.asarray(trajectory.lengths)
    ended = lengths[np.asarray(trajectory.ended)]
    tokens = int(lengths.sum())
    over, of_tokens = responses or len(lengths), response_tokens or tokens
    figures = {
        "response_tokens": tokens,
        "response_length_median": float(np.median(lengths)),
        "response_length_p99_ended": float(np.percentile(ended, 99)) if len(ended) else 0.0,
        "truncated_fraction": float(1.0 - np.mean(trajectory.ended)),
        "entropy": float(trajectory.entropy_sum) / max(of_tokens, 1),
        "policy_forwards_per_sequence": int(trajectory.stats.steps) / max(over, 1),
        "tokens_per_forward": of_tokens / max(int(trajectory.stats.steps), 1),
        "rounds_sat_out": int(trajectory.stats.stalled),
    }
    return figures | speculation_metrics(trajectory.stats)


def acceptance_figures(trajectory: Trajectory) -> dict[str, Any]:
    """What a table of acceptance says of a trajectory on the host; `ci95` is that of the acceptance length.

    Without a round that had drafts and was not cut, nothing survives.
    """
    length, half_width = acceptance_interval(trajectory.stats)
    nothing = [0.0] * len(trajectory.stats.accepted_at)
    metrics = {"survival_per_position": nothing, "conditional_acceptance": nothing} | response_metrics(trajectory)
    names = ("tokens_per_forward", "survival_per_position", "conditional_acceptance", "entropy", "response_tokens")
    return {"acceptance_length": length, "ci95": half_width} | {name: metrics[name] for name in names}
