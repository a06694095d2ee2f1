"""Suffix drafts in the GRPO step and in its script: earlier responses are kept, and nothing else changes."""

import dataclasses

import numpy as np
import pytest
from test_grpo import HEAD, EvenSum, first_state, initial, make_program, scanned, sha
from tiny import assert_same

from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.combined import Both, CombinedDrafter
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.suffix import SuffixDrafter, init_history
from specrl_jax.rl.optimizers import OptimizerConfig

pytestmark = pytest.mark.ci
ROWS, KEPT, TOKENS, SAMPLES = 6, 12, 12, 8


@dataclasses.dataclass(frozen=True)
class Repeated(EvenSum):
    """The same six prompts again and again, four to a step."""

    def issue(self, split, counters):
        prompts, problems = super().issue(split, counters % ROWS)
        return Prompts(prompts.tokens, prompts.lengths, counters % ROWS), problems


def with_drafter(program, drafter):
    engine = dataclasses.replace(program.step.engine, drafter=drafter)
    return dataclasses.replace(program, step=dataclasses.replace(program.step, engine=engine), task=Repeated())


@pytest.mark.parametrize(("kind", "data"), [("suffix", 1), ("suffix", 2), ("head+suffix", 1)])
def test_the_step_keeps_responses_and_changes_nothing_else(kind, data):
    plain = dataclasses.replace(make_program(0, data=data), task=Repeated())
    expected, (_, trajectories, _) = scanned(plain, 3)(first_state(plain))
    head, history = initial()[1], init_history(np.arange(ROWS), KEPT, TOKENS)
    if kind == "suffix":
        program = with_drafter(make_program(3, online=False, data=data), SuffixDrafter(shortest=1))
        draft = history
    else:
        drafter = CombinedDrafter(Eagle3Drafter(HEAD), SuffixDrafter(shortest=1))
        program, draft = with_drafter(make_program(3, data=data), drafter), Both(head, history)
    start = dataclasses.replace(first_state(program), draft=draft)
    if kind == "head+suffix":
        start = dataclasses.replace(start, draft_opt_state=program.step.drafting.init(head))
    state, (metrics, ours, _) = scanned(program, 3)(start)
    assert_same(ours, trajectories)
    assert sha(state.params) == sha(expected.params)
    assert ours.stats.accepted.sum() > 0
    kept = state.draft if kind == "suffix" else state.draft.suffix
    if kind == "head+suffix":
        assert sha(state.draft.head) != sha(head)
        assert (np.asarray(metrics["draft_grad_norm"]) > 0).all()
    # Three steps of four prompts: each of six prompts twice, with eight samples, of which twelve are kept.
    assert kept.count.tolist() == [2 * SAMPLES] * ROWS
    newest = np.asarray(ours.tokens).reshape(3, 4, SAMPLES, TOKENS)[2]
    row_ids = np.asarray(ours.prompts.row_ids)[2]
    for row, responses in zip(row_ids, newest, strict=True):
        known = {tuple(tokens) for tokens in np.asarray(kept.tokens)[row].tolist()}
        assert {tuple(tokens) for tokens in responses.tolist()} <= known


def test_what_was_written_before_is_accepted_again():
    """With the same noise in every epoch and a policy that does not move, the second epoch is known by heart."""
    program = with_drafter(make_program(3, online=False, couple_epochs=True), SuffixDrafter(shortest=1))
    update = dataclasses.replace(program.step.update_config, optimizer=OptimizerConfig(1e-9))
    program = dataclasses.replace(program, step=dataclasses.replace(program.step, update_config=update))
    start = dataclasses.replace(first_state(program), draft=init_history(np.arange(ROWS), KEPT, TOKENS))
    _, (_, ours, _) = scanned(program, 3)(start)
    length = 1.0 + np.asarray(ours.stats.accepted) / np.asarray(ours.stats.rounds)
    assert length[2] > length[0] + 0.3
