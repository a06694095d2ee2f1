"""How many drafts a run makes, by its options and its drafter."""

from types import SimpleNamespace

import pytest

from experiments import train_grpo
from experiments.common import RunOptions
from experiments.rollout_options import SpeculationOptions
from specrl_jax.models.numerics import Numerics

pytestmark = pytest.mark.ci


def test_the_evaluations_of_an_adaptive_run_draft_at_most_three(monkeypatch):
    monkeypatch.setattr(train_grpo, "Sampler", lambda engine, *_: engine)
    for adaptive, chosen, drafted in ((True, 7, 3), (True, 2, 2), (False, 7, 7)):
        speculation = SpeculationOptions(draft_length="auto" if adaptive else 7)
        config = SimpleNamespace(speculation=speculation, run=RunOptions(), eval_problems=8)
        engine = lambda draft_length, *_: draft_length  # noqa: E731
        session = SimpleNamespace(config=config, draft_length=chosen, mesh=None, engine=engine, adaptive=adaptive)
        assert train_grpo.Examiner(session, None).sampler == drafted


@pytest.mark.parametrize(
    ("options", "adaptive", "drafts"),
    [
        ({}, True, 7),
        ({"most_drafts": 4}, True, 4),
        ({"draft_length": 3}, False, 3),
        ({"draft_length": 0}, False, 0),
        ({"rule": "block"}, False, 3),
        ({"rule": "block", "costs": __file__}, True, 7),
        ({"rule": "ratio", "costs": __file__, "most_drafts": 4}, True, 4),
        ({"branches": 2}, True, 7),
        ({"branches": 2, "tree": "full"}, False, 3),
        ({"drafts": "ngram"}, True, 7),
    ],
)
def test_a_controller_chooses_the_drafts_of_chains_by_default(options, adaptive, drafts):
    config = SimpleNamespace(speculation=SpeculationOptions(**options))
    assert config.speculation.adaptive == adaptive
    for made_for, least in (
        (None, drafts),
        (2, min(drafts, 2) if config.speculation.draft_length == "auto" else drafts),
    ):
        if options.get("drafts") == "ngram" and made_for:
            continue
        session = SimpleNamespace(config=config, drafter=SimpleNamespace(most_drafts=made_for), numerics=Numerics())
        session.adaptive = train_grpo.Session.adaptive.fget(session)
        assert train_grpo.Session.draft_length.fget(session) == least
    assert config.speculation.drafts_with(None, adaptive=False) == options.get("draft_length", 0)


@pytest.mark.parametrize(("branches", "adaptive", "drafts"), [(1, True, 7), (2, False, 3)])
def test_trees_have_a_fixed_shape_in_invariant_numerics(branches, adaptive, drafts):
    config = SimpleNamespace(speculation=SpeculationOptions(branches=branches))
    session = SimpleNamespace(config=config, drafter=SimpleNamespace(), numerics=Numerics("invariant"))
    session.adaptive = train_grpo.Session.adaptive.fget(session)
    assert session.adaptive == adaptive
    assert train_grpo.Session.draft_length.fget(session) == drafts
