"""Heads of other kinds in the GRPO step: the policy's tokens and parameters do not depend on them, and they learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_grpo import POLICY, VOCAB, autoregressive, initial, make_program, scanned, sha
from test_mtp_layouts import ATTACHED
from tiny import assert_same

from specrl_jax.drafters.block_params import BlockConfig
from specrl_jax.drafters.heads import drafter_for_head, init_head
from specrl_jax.drafters.mtp_attached import attached_config
from specrl_jax.drafters.mtp_dialects import mtp_config
from specrl_jax.drafters.small_policy import SmallPolicyDrafter
from specrl_jax.drafters.suffix import SuffixDrafter
from specrl_jax.models.policy import head_weights

ci, full = pytest.mark.ci, pytest.mark.full
BACKBONE = dataclasses.replace(POLICY, num_layers=1, tie_embeddings=False)
HEADS = {
    "mtp": mtp_config(POLICY),
    "block": BlockConfig(BACKBONE, VOCAB - 2, (0, 2), block_size=3, mask_token_id=3, markov_rank=3, confidence=True),
} | {layout: attached_config(POLICY, layout, None, experts=4) for layout in ATTACHED}


def two_steps(program, drafter, draft, **changes):
    """State and reports of two steps with another drafter, whose tokens and policy are those without drafts."""
    engine = dataclasses.replace(program.step.engine, drafter=drafter)
    step = dataclasses.replace(program.step, engine=engine, **changes)
    program = dataclasses.replace(program, step=step)
    state, (metrics, ours, _) = scanned(program, 2)(step.init(initial()[0], draft))
    expected, _, trajectories, _ = autoregressive()
    assert_same(ours, trajectories)
    assert sha(state.params) == sha(expected.params)
    assert ours.stats.accepted.sum() > 0
    return state, metrics


# The experts and blocks of two layouts compile for minutes; test_mtp_layouts.py has their rollouts on every change.
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=full if kind in ("nemotron_h", "deepseek_v3") else ci) for kind in HEADS]
)
def test_a_head_changes_neither_tokens_nor_policy(kind):
    config, program = HEADS[kind], make_program(3)
    # Of the block head two tokens are left out, and the others stand in another order.
    ids = None if kind != "block" else np.random.default_rng(0).permutation(VOCAB)[: VOCAB - 2]
    head = init_head(jax.random.key(1), config, initial()[0], ids)
    drafting = dataclasses.replace(program.step.drafting, head=config)
    state, metrics = two_steps(program, drafter_for_head(config), head, drafting=drafting)
    assert (np.asarray(metrics["draft_grad_norm"]) > 0).all()
    assert sha(state.draft.weights) != sha(head.weights)
    # Its output rows are the policy's, which has learned.
    np.testing.assert_array_equal(state.draft.lm_head, head_weights(state.params)[1][state.draft.target_ids])
    assert sha(state.draft.lm_head) != sha(head.lm_head)


def ngrams(params):
    return SuffixDrafter(siblings=False, shortest=1), None


def small_policy(params):
    return SmallPolicyDrafter(POLICY, VOCAB), params.replace(final_norm=params.final_norm * 0.7)


@ci
@pytest.mark.parametrize("made", [ngrams, small_policy])
def test_a_drafter_that_does_not_learn_changes_neither_tokens_nor_policy(made):
    drafter, draft = made(initial()[0])
    state, _ = two_steps(make_program(3, online=False), drafter, draft)
    assert sha(state.draft) == sha(draft)


@ci
def test_a_slow_decline_makes_a_head_stale_and_a_lasting_one_does_not_keep_it_so():
    drafting = dataclasses.replace(make_program(3).step.drafting, tolerance=0.05)

    def stale_at(lengths):
        state, said = drafting.init(initial()[1]), []
        for length in lengths:
            state, stale = drafting.noted(state, jnp.float32(length))
            said.append(bool(stale))
        return said

    assert not any(stale_at(3.0 + 0.1 * np.sin(np.arange(40))))
    slow = stale_at(3.0 * 0.996 ** np.arange(40))
    assert not any(slow[:10])
    assert any(slow[10:20])
    lasting = stale_at([3.0] * 5 + [2.0] * 60)
    assert all(lasting[6:30])
    assert not any(lasting[50:])
