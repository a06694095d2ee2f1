"""Drafts from earlier text: found as by brute force, exact in a rollout, better the more there is to read."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import INVARIANT, POLICY, VOCAB, assert_same, equal_prices, keys_of, random_eagle3, tiny_params, tiny_prompts

from specrl_jax.drafters.combined import Both, CombinedDrafter
from specrl_jax.drafters.protocol import ChainDrafter, Choice, Texts
from specrl_jax.drafters.suffix import SuffixDrafter, init_history, remember
from specrl_jax.errors import InputError
from specrl_jax.models.tree import Tree
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.control import Body
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Match, Ratio
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.training.speculation import speculation_metrics

pytestmark = pytest.mark.ci
SAMPLES, NEW = 3, 20
PROMPTS = tiny_prompts()
GROUPS = len(PROMPTS.lengths)
KEYS = keys_of(PROMPTS, SAMPLES)
LAW = SamplingLaw(end_ids=(1, 7))


def likeliest(logits, ids, before, count, step=None):
    """Without noise: the candidate with most votes, the first of equals."""
    best = jax.lax.top_k(logits, count)[1]
    token = jnp.take_along_axis(ids, best, axis=2)
    return Choice(token, confidence=jnp.max(jax.nn.log_softmax(logits, axis=-1), axis=-1))


def random_texts(seed, samples=2, groups=3, width=9, length=14, vocab=3):
    rng = np.random.default_rng(seed)
    count = groups * samples
    return Texts(
        prompts=jnp.asarray(rng.integers(0, vocab, (groups, width)), jnp.int32),
        prompt_lengths=jnp.asarray(rng.integers(1, width + 1, groups), jnp.int32),
        row_ids=jnp.asarray([4, 0, 9][:groups] + list(range(10, 7 + groups)), jnp.uint32),
        responses=jnp.asarray(rng.integers(0, vocab, (count, length)), jnp.int32),
        lengths=jnp.asarray(rng.integers(0, length + 1, count), jnp.int32),
        sequence=jnp.asarray(rng.permutation(count), jnp.int32),
    )


def by_hand(drafter, texts, history, sequence, drafts):
    """Look at every place of every text, one after the other; drafts until no place votes."""
    texts, history = jax.device_get((texts, history))
    samples = len(texts.responses) // len(texts.prompts)
    group = sequence // samples
    prompt = texts.prompts[group][: texts.prompt_lengths[group]].tolist()
    written = [texts.responses[i][: texts.lengths[i]].tolist() for i in range(len(texts.responses))]
    own = prompt + written[sequence]
    # Beside its own text, what follows the end of the prompt; matches that end before are its own already.
    tail = prompt[-drafter.longest :]
    others = [written[i] for i in range(group * samples, (group + 1) * samples) if i != sequence]
    others = others if drafter.siblings else []
    row = int(texts.row_ids[group])
    if history is not None and row < len(history.count):
        others += [t[:n].tolist() for t, n in zip(history.tokens[row], history.lengths[row], strict=True)]
    places = []
    elsewhere = [(tail + other, len(tail) - 1, drafter.discount) for other in others if other]
    for text, first, discount in [(own, 0, 0), *elsewhere]:
        for j in range(first, len(text) - 1):
            match = 0
            while match < min(drafter.longest, j + 1, len(own)) and text[j - match] == own[-1 - match]:
                match += 1
            if match >= drafter.shortest:
                places.append((match - discount, text[j + 1 :]))
    places = sorted(places, key=lambda place: -place[0])[: drafter.candidates]
    votes = [(drafter.sharpness**match, follow) for match, follow in places]
    found = []
    for step in range(drafts):
        count: dict[int, float] = {}
        for weight, follow in votes:
            if len(follow) > step and follow[:step] == found:
                count[follow[step]] = count.get(follow[step], 0.0) + weight
        if not count or (step == 0 and max(count.values()) < drafter.sharpness**drafter.shortest * (1 - 1e-5)):
            return found
        found.append(max(count, key=count.__getitem__))
    return found


@pytest.mark.parametrize("siblings", [True, False])
@pytest.mark.parametrize("with_history", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("discount", [0, 1, 3])
@pytest.mark.parametrize("candidates", [4, 200])
def test_drafts_are_those_of_brute_force(candidates, discount, seed, siblings, with_history):
    texts, drafts = random_texts(seed), 4
    rng = np.random.default_rng(seed)
    history = None
    if with_history:
        # The prompt of row 9 is beyond the history.
        tokens, lengths = rng.integers(0, 3, (6, 2, 11)), rng.integers(0, 12, (6, 2))
        empty = init_history(np.arange(6), 2, 11)
        history = replace(empty, tokens=jnp.asarray(tokens, jnp.int32), lengths=jnp.asarray(lengths, jnp.int32))
    drafter = SuffixDrafter(siblings=siblings, longest=5, discount=discount, candidates=candidates)
    state = drafter.init_state(6, 1)
    chain = drafter.propose(history, jnp.zeros((1, 1)), state, texts, Tree.chain(drafts), likeliest).token
    carry, choice = drafter.begin(history, jnp.zeros((1, 1)), state, texts, drafts, likeliest)
    stepwise = [choice.token]
    for step in range(drafts - 1):
        arguments = (carry, stepwise[-1], jnp.int32(step), likeliest)
        carry, choice = drafter.advance(history, jnp.zeros((1, 1)), state, *arguments)
        stepwise.append(choice.token)
    np.testing.assert_array_equal(chain, jnp.stack(stepwise, axis=1))
    lengths = []
    for row, sequence in enumerate(np.asarray(texts.sequence)):
        expected = by_hand(drafter, texts, history, int(sequence), drafts)
        lengths.append(len(expected))
        assert chain[row].tolist() == expected + [-1] * (drafts - len(expected))
    assert max(lengths) == drafts
    np.testing.assert_array_equal(drafter.can_draft(history, texts), np.array(lengths) > 0)


@pytest.mark.parametrize(
    ("own", "followed_by", "drafted"),
    [
        ([4, 5, 6], [2, 2, 2, 2], 2),  # four that agree weigh as much as one of its own
        ([4, 5, 6], [2, 2, 2], -1),
        ([4, 5, 6], [1, 2, 3, 4], -1),
        ([5, 6, 3, 5, 6], [], 3),
    ],
)
def test_votes_that_agree_do_for_drafts(own, followed_by, drafted):
    """A row that ends with `5 6`, which stand in its siblings too, at the default settings."""
    texts = [own, *([8, 5, 6, token] for token in followed_by)]
    width = max(map(len, texts))
    shown = Texts(
        prompts=jnp.asarray([[9]], jnp.int32),
        prompt_lengths=jnp.asarray([1], jnp.int32),
        row_ids=jnp.asarray([0], jnp.uint32),
        responses=jnp.asarray([text + [0] * (width - len(text)) for text in texts], jnp.int32),
        lengths=jnp.asarray([len(text) for text in texts], jnp.int32),
        sequence=jnp.asarray([0], jnp.int32),
    )
    drafter = SuffixDrafter()
    _, choice = drafter.begin(None, jnp.zeros((1, 1)), drafter.init_state(1, 1), shown, 1, likeliest)
    assert choice.token.tolist() == [drafted]
    assert bool(jnp.isfinite(choice.confidence).all()) == (drafted >= 0)
    assert drafter.can_draft(None, shown).tolist() == [drafted >= 0]


def engine_of(k, drafter, rule=None, **settings):
    config = RolloutConfig(NEW, SAMPLES, k, LAW, rule or Match(), **{"ladder": (1.0,)} | settings)
    return RolloutEngine(POLICY, config, INVARIANT, drafter)


def rolled_out(engine, draft=None):
    control = None
    if engine.config.adaptive:
        control = equal_prices(engine.config, engine.layout(*PROMPTS.tokens.shape).rows)
    run = jax.jit(lambda params, draft: engine.rollout(params, draft, PROMPTS, KEYS, None, control))
    return jax.device_get(run(tiny_params(), draft))


def plain():
    return rolled_out(engine_of(0, None))


def history_of(trajectory):
    """After one rollout of the prompts."""
    history = init_history(np.asarray(PROMPTS.row_ids)[::-1], SAMPLES, NEW)
    return remember(history, PROMPTS.row_ids, jnp.asarray(trajectory.tokens), jnp.asarray(trajectory.lengths))


def test_history_keeps_the_newest():
    history, kept = init_history(np.arange(3), 4, 2), []
    for epoch in range(3):
        responses = jnp.asarray([[10 * epoch + i, 1] for i in range(6)], jnp.int32)
        lengths = jnp.asarray([1, 2, 2, 1, 2, 2], jnp.int32)
        history = jax.jit(remember)(history, jnp.asarray([2, 5, 0], jnp.uint32), responses, lengths)
        kept.append(responses[:2, 0].tolist())
    assert history.count.tolist() == [6, 0, 6]
    assert sorted(history.tokens[2, :, 0].tolist()) == sorted(kept[1] + kept[2])
    assert sorted(history.lengths[2].tolist()) == [1, 1, 2, 2]
    assert not history.tokens[1].any()
    # More samples than places: the last ones stay.
    history = remember(init_history(np.arange(1), 2, 2), jnp.zeros((1,), jnp.uint32), responses[:3], lengths[:3])
    assert sorted(history.tokens[0, :, 0].tolist()) == responses[1:3, 0].tolist()


@pytest.mark.parametrize("case", ["chain", "tree", "few rows", "adaptive", "with a head", "adaptive with a head"])
def test_the_policy_s_tokens_whatever_is_found(case):
    expected = plain()
    history = history_of(expected)
    drafter, draft = SuffixDrafter(shortest=1), history
    settings = {}
    if case == "tree":
        settings = {"rule": Match(branches=2)}
    if case == "few rows":
        settings = {"rows": 2}
    if case.startswith("adaptive"):
        settings = {"adaptive": True, "rows": 4}
    if case.endswith("head"):
        head, weights = random_eagle3()
        drafter, draft = CombinedDrafter(head, drafter), Both(weights, history)
    assert isinstance(drafter, ChainDrafter)
    trajectory = rolled_out(engine_of(3, drafter, **settings), draft)
    assert_same(trajectory, expected)
    assert trajectory.stats.accepted > 0


def test_nothing_is_verified_where_nothing_is_found():
    """Tokens cost nothing here, so that the controller drafts wherever it can; 21 tokens stand nowhere twice."""
    settings = {"adaptive": True, "bodies": (Body(15, 15), Body(15, 60))}
    engine = engine_of(3, SuffixDrafter(siblings=False, shortest=NEW + 1, longest=NEW + 1), **settings)
    trajectory = rolled_out(engine)
    assert_same(trajectory, plain())
    used = [body for body, count in zip(engine.config.bodies_for(15), trajectory.stats.bodies, strict=True) if count]
    assert used
    assert all(body.tokens == body.rows for body in used)
    assert trajectory.stats.steps > 0
    assert rolled_out(engine_of(3, SuffixDrafter(shortest=1), **settings)).stats.rounds > 0


def test_ratio_keeps_the_law():
    """Under another rule drafts come with their law, also where nothing was found or allowed."""
    trajectory = rolled_out(engine_of(3, SuffixDrafter(shortest=1), Ratio()))
    assert (trajectory.lengths > 0).all()
    assert np.isfinite(trajectory.log_probs).all()
    law = replace(LAW, min_new_tokens=5, forbidden=(2, 3))
    config = RolloutConfig(NEW, SAMPLES, 3, law, Ratio(), ladder=(1.0,))
    engine = RolloutEngine(POLICY, config, INVARIANT, SuffixDrafter(shortest=1))
    trajectory = rolled_out(engine)
    assert (trajectory.lengths >= 5).all()
    assert np.isfinite(trajectory.log_probs).all()
    assert not np.isin(trajectory.tokens[trajectory.tokens > 0], (2, 3)).any()


@pytest.mark.parametrize("filters", [{}, {"forbidden": (0, 2)}, {"min_new_tokens": 30}, {"top_k": 2}, {"top_p": 0.6}])
def test_a_law_is_one(filters):
    """What `Choose` gives of candidates that repeat, vote for nothing or are forbidden sums to 1."""
    law = replace(LAW, end_ids=(1, 3), **({"min_new_tokens": 20} if "min_new_tokens" in filters else filters))
    engine = engine_of(2, SuffixDrafter(shortest=2), Ratio())
    engine = replace(engine, config=replace(engine.config, law=law))
    batch = jax.jit(lambda: engine.empty_batch(PROMPTS))()
    texts = random_texts(0, samples=SAMPLES, groups=GROUPS, vocab=4)
    rows = replace(batch.rows, sequence=jnp.arange(len(batch.rows.done), dtype=jnp.int32))
    texts = replace(texts, sequence=rows.sequence)
    choose = engine._chooser(rows)
    choice = engine.drafter.propose(None, jnp.zeros((1, 1)), rows.drafter, texts, Tree.chain(2), choose)
    np.testing.assert_allclose(np.exp(np.asarray(choice.log_law, np.float64)).sum(-1), 1.0, atol=1e-5)
    drawn = np.take_along_axis(np.asarray(choice.log_law), np.asarray(choice.token)[..., None], axis=2)
    assert np.isfinite(drawn).all()
    assert choice.token.max() < VOCAB


def test_more_to_read_more_accepted():
    """Sharing the noise of an earlier epoch, its text is known by heart; without it there is little to find."""
    expected = plain()
    length = {}
    for name, drafter, history in (
        ("n-gram", SuffixDrafter(siblings=False, shortest=1), None),
        ("earlier", SuffixDrafter(siblings=False, shortest=1), history_of(expected)),
    ):
        stats = rolled_out(engine_of(3, drafter), history).stats
        length[name] = speculation_metrics(stats)["acceptance_length"]
    assert length["earlier"] > length["n-gram"] + 0.3


def test_bad_settings_are_refused():
    for field, value, sentence in (
        ("shortest", 0, "suffix drafter shortest is 0; it must be at least 1"),
        ("discount", -1, "suffix drafter discount is -1; it must be at least 0"),
        ("longest", 1, "suffix drafter longest is 1, below shortest 2"),
        ("candidates", 0, "suffix drafter candidates is 0"),
        ("sharpness", 1.0, "suffix drafter sharpness is 1.0; choose more than 1"),
    ):
        with pytest.raises(InputError, match=sentence):
            SuffixDrafter(**{field: value})
    head, weights = random_eagle3()
    drafter = CombinedDrafter(head)
    with pytest.raises(InputError, match="proposes chains; choose 1 branch"):
        rolled_out(engine_of(2, drafter, Match(branches=2)), Both(weights, None))
    with pytest.raises(InputError, match="is for rule match, which asks for no laws"):
        rolled_out(engine_of(2, drafter, Ratio()), Both(weights, None))
