"""Figures of speculation against counts made up by hand."""

import numpy as np
import pytest

from specrl_jax.data.prompts import Prompts
from specrl_jax.rollout.trajectory import RolloutStats, Trajectory
from specrl_jax.training.speculation import response_metrics

pytestmark = pytest.mark.ci


def counted():
    """Two responses of 4 and 8 tokens, 2 of them in three forwards without a draft, 1 in a round that was cut."""
    zeros = {name: np.int32(0) for name in RolloutStats.__dataclass_fields__}
    per_draft = {"drafted_at": np.array([3, 2]), "accepted_at": np.array([3, 1]), "bodies": np.zeros(0, np.int32)}
    counts = {"rounds": 3, "accepted": 4, "cut_rounds": 1, "steps": 7, "stalled": 5}
    stats = RolloutStats(**zeros | per_draft | {name: np.int32(count) for name, count in counts.items()})
    tokens, prompts = np.zeros((2, 8), np.int32), np.zeros((2, 1), np.int32)
    return Trajectory(
        prompts=Prompts(prompts, np.ones(2, np.int32), np.arange(2, dtype=np.uint32)),
        tokens=tokens,
        log_probs=np.zeros(tokens.shape, np.float32),
        thresholds=None,
        lengths=np.array([4, 8]),
        ended=np.array([True, False]),
        entropy_sum=np.float32(6.0),
        stats=stats,
    )


def test_every_forward_counts_where_acceptance_length_has_rounds_alone():
    found = response_metrics(counted())
    assert found["tokens_per_forward"] == pytest.approx(12 / 7)
    assert found["acceptance_length"] == pytest.approx(1 + 4 / 3)
    assert found["drafted_fraction"] == pytest.approx(4 / 7)
    assert found["rounds_sat_out"] == 5
    assert found["entropy"] == pytest.approx(0.5)
    assert found["truncated_fraction"] == pytest.approx(0.5)


def test_more_responses_than_the_trajectory_holds_are_counted_over_all():
    found = response_metrics(counted(), responses=14, response_tokens=28)
    assert found["tokens_per_forward"] == pytest.approx(28 / 7)
    assert found["policy_forwards_per_sequence"] == pytest.approx(0.5)
    assert found["response_tokens"] == 12
