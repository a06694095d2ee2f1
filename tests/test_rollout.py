"""Speculation changes nothing: tokens and log-probs are those of k = 0, bit for bit, and those of a slow reference.

`k = 0` is checked against a Python loop over positions (teacher-forced forward, NumPy noise), against
transformers' greedy search and against the training forward; all else against `k = 0`.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy_noise
import pytest
from tiny import (
    INVARIANT,
    POLICY,
    VOCAB,
    BigramDrafter,
    PolicyAsDrafter,
    assert_same,
    bigram_table,
    keys_of,
    no_texts,
    random_eagle3,
    run,
    take_prompts,
    tiny_params,
    tiny_prompts,
)

from specrl_jax.drafters.protocol import Choice
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.policy import forward, grid_batch, logits, sequence_positions
from specrl_jax.models.tree import Tree
from specrl_jax.rl.microbatches import MicrobatchConfig
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.noise import gumbel_noise
from specrl_jax.rollout.sampling import Context, SamplingLaw
from specrl_jax.rollout.trajectory import to_sequences

ci = pytest.mark.ci
SAMPLES, NEW, ENDS = 3, 28, (1, 7)
PROMPTS = tiny_prompts()


class Setup(NamedTuple):
    policy: PolicyConfig
    numerics: Numerics
    temperature: float
    seed: int = 0

    @property
    def params(self):
        return tiny_params(self.policy, self.seed)


SETUPS = {
    "fp32": Setup(POLICY, INVARIANT, 1.0),
    "bf16": Setup(replace(POLICY, dtype="bfloat16"), Numerics("invariant"), 1.0),
    "cool": Setup(replace(POLICY, family="qwen2", tie_embeddings=True), INVARIANT, 0.6, seed=1),
    "greedy": Setup(replace(POLICY, family="llama"), INVARIANT, 0.0, seed=2),
}


def quick_or_full(cases):
    """Cases whose last entry is true run on every change."""
    return [pytest.param(*case, marks=pytest.mark.ci if quick else pytest.mark.full) for *case, quick in cases]


def engine_of(setup, draft_length, drafter=None, *, samples=SAMPLES, new=NEW, ends=ENDS, ladder=(1.0,)):
    law = SamplingLaw(setup.temperature, end_ids=ends)
    config = RolloutConfig(new, samples, draft_length, law, ladder=ladder, smallest_rung=1)
    return RolloutEngine(setup.policy, config, setup.numerics, drafter)


def drafter_of(kind, setup):
    """A drafter and its parameters."""
    if kind == "eagle":
        return random_eagle3(setup.policy)
    if kind == "bigram":
        return BigramDrafter(), bigram_table()
    return PolicyAsDrafter(setup.policy, setup.numerics), (setup.params, jnp.int32(99))


@functools.lru_cache
def baseline(name):
    """The rollout without speculation."""
    setup = SETUPS[name]
    return run(engine_of(setup, 0), PROMPTS, keys_of(PROMPTS, SAMPLES), setup.params)


@functools.lru_cache
def speculative(name, kind, draft_length, ladder=(1.0,)):
    setup = SETUPS[name]
    drafter, draft = drafter_of(kind, setup)
    engine = engine_of(setup, draft_length, drafter, ladder=ladder)
    return run(engine, PROMPTS, keys_of(PROMPTS, SAMPLES), setup.params, draft)


# Without speculation.


@functools.partial(jax.jit, static_argnums=(1,))
def next_logits(params, config, tokens, lengths):
    """Logits after the last of `lengths` tokens, by the plain teacher-forced forward."""
    rows, width = tokens.shape
    numerics = Numerics("plain")
    out = forward(params, config, grid_batch(tokens, sequence_positions(lengths, width)), numerics=numerics)
    last = out.hidden.reshape(rows, width, -1)[jnp.arange(rows), lengths - 1]
    return logits(params, config, last, numerics)


def slow_reference(setup):
    """Responses sampled position by position, with the noise of `numpy_noise`."""
    prompts = [np.asarray(t)[:n] for t, n in zip(PROMPTS.tokens, PROMPTS.lengths, strict=True)]
    keys = [numpy_noise.sequence_key(0, "rollout", 0, int(r), s) for r in PROMPTS.row_ids for s in range(SAMPLES)]
    sequences = [list(p) for p in prompts for _ in range(SAMPLES)]
    responses = [[] for _ in sequences]
    while any(live := [len(r) < NEW and not (r and r[-1] in ENDS) for r in responses]):
        padded = np.zeros((len(sequences), PROMPTS.tokens.shape[1] + NEW), np.int32)
        for row, sequence in enumerate(sequences):
            padded[row, : len(sequence)] = sequence
        lengths = jnp.array([len(s) for s in sequences], jnp.int32)
        scores = np.asarray(next_logits(setup.params, setup.policy, padded, lengths), np.float64)
        for row in np.flatnonzero(live):
            values = scores[row]
            if setup.temperature:
                values = values / setup.temperature + numpy_noise.gumbel(keys[row], len(responses[row]), VOCAB)
            token = int(np.argmax(values))
            sequences[row].append(token)
            responses[row].append(token)
    return responses


@ci
@pytest.mark.parametrize("name", ["fp32", "cool", "greedy"])
def test_tokens_are_those_of_the_slow_reference(name):
    ours = baseline(name)
    expected = slow_reference(SETUPS[name])
    np.testing.assert_array_equal(ours.lengths, [len(r) for r in expected])
    for row, response in enumerate(expected):
        np.testing.assert_array_equal(ours.tokens[row, : len(response)], response)
        assert ours.ended[row] == (response[-1] in ENDS)


@ci
@pytest.mark.parametrize("name", SETUPS)
def test_the_set_is_not_degenerate(name):
    """Sequences of many lengths, closed by each end token or truncated; padding is zero."""
    ours = baseline(name)
    last = ours.tokens[np.arange(len(ours.lengths)), ours.lengths - 1]
    np.testing.assert_array_equal(np.isin(last, ENDS), ours.ended)
    beyond = np.arange(NEW)[None] >= ours.lengths[:, None]
    assert not ours.tokens[beyond].any()
    assert not ours.log_probs[beyond].any()
    assert (ours.lengths[~ours.ended] == NEW).all()
    assert (ours.log_probs[~beyond] < 0).all()
    least = 3 if name == "greedy" else 6
    assert len(set(ours.lengths)) >= least, ours.lengths
    assert 0 < ours.ended.sum() < len(ours.ended), ours.ended
    if name != "greedy":
        assert set(last) >= set(ENDS)
    groups = ours.tokens.reshape(-1, SAMPLES, NEW)
    alike = (groups[:, :1] == groups[:, 1:]).all(-1)
    assert alike.all() == (name == "greedy")


@pytest.mark.parametrize("name", quick_or_full([("fp32", True), ("bf16", True), ("cool", False), ("greedy", False)]))
def test_log_probs_are_those_of_the_training_forward(name):
    setup, ours = SETUPS[name], baseline(name)
    scorer = Scorer(setup.policy, SamplingLaw(setup.temperature), setup.numerics)
    sequences = to_sequences(jax.tree.map(jnp.asarray, ours))
    mask = np.asarray(sequences.mask)
    assert mask.sum() == ours.lengths.sum()
    scores = jax.tree.map(np.asarray, jax.jit(scorer.score)(setup.params, sequences))
    np.testing.assert_array_equal(scores.log_probs[mask], np.asarray(sequences.log_probs)[mask])
    # The entropy of the rollout is a sum over the same tokens; only its order differs.
    np.testing.assert_allclose(ours.entropy_sum, scores.entropy[mask].sum(), rtol=1e-5)


@ci
def test_log_probs_are_those_of_microbatches():
    """As the update reads them: sorted by length, a few rows at a time, at the width that holds them."""
    setup, ours = SETUPS["fp32"], baseline("fp32")
    scorer = Scorer(setup.policy, SamplingLaw(), setup.numerics)
    sequences = to_sequences(jax.tree.map(jnp.asarray, ours))
    microbatch = MicrobatchConfig(rows=5, widths=(0.5, 1.0))
    log_probs = jax.jit(lambda params: scorer.log_probs(params, sequences, microbatch))(setup.params)
    mask = np.asarray(sequences.mask)
    np.testing.assert_array_equal(np.asarray(log_probs)[mask], np.asarray(sequences.log_probs)[mask])


@ci
def test_greedy_tokens_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from specrl_jax.models.huggingface_config import config_to_hf
    from specrl_jax.models.weights import policy_tensors

    config, ours = SETUPS["greedy"].policy, baseline("greedy")
    settings = config_to_hf(config, {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings)).eval()
    tensors = policy_tensors(SETUPS["greedy"].params, config)
    model.load_state_dict({k: torch.tensor(np.asarray(v)) for k, v in tensors.items()})
    options = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=NEW, eos_token_id=list(ENDS), pad_token_id=0, use_cache=True
    )
    for group, (tokens, length) in enumerate(zip(np.asarray(PROMPTS.tokens), PROMPTS.lengths, strict=True)):
        prompt = torch.tensor(tokens[None, : int(length)], dtype=torch.long)
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=options)
        expected = out[0, int(length) :].numpy()
        row = group * SAMPLES
        np.testing.assert_array_equal(ours.tokens[row, : ours.lengths[row]], expected)


@ci
def test_no_rounds_are_counted_without_drafts():
    stats = baseline("fp32").stats
    assert stats.steps == baseline("fp32").lengths.sum()
    assert (stats.rounds, stats.accepted, stats.cut_rounds, stats.cut_accepted) == (0, 0, 0, 0)
    assert stats.accepted_at.shape == (0,)


# Speculation.

CASES = [
    ("fp32", "eagle", 1, (1.0, 0.4), False),
    ("fp32", "eagle", 2, (1.0,), False),
    ("fp32", "eagle", 3, (1.0,), True),
    ("fp32", "eagle", 7, (1.0,), True),
    ("fp32", "bigram", 3, (1.0, 0.3), True),
    ("fp32", "bigram", 7, (1.0, 0.8, 0.6, 0.5, 0.3, 0.2, 0.07), False),
    ("fp32", "policy", 2, (1.0,), True),
    ("bf16", "eagle", 1, (1.0,), False),
    ("bf16", "eagle", 3, (1.0, 0.5), False),
    ("bf16", "bigram", 2, (1.0,), True),
    ("bf16", "bigram", 7, (1.0, 0.2), False),
    ("bf16", "policy", 2, (1.0,), False),
    ("cool", "eagle", 2, (1.0,), True),
    ("cool", "policy", 7, (1.0, 0.5), False),
    ("greedy", "bigram", 1, (0.3,), True),
    ("greedy", "eagle", 3, (1.0, 0.5), False),
]


@pytest.mark.parametrize(("name", "kind", "draft_length", "ladder"), quick_or_full(CASES))
def test_speculation_changes_nothing(name, kind, draft_length, ladder):
    ours, expected = speculative(name, kind, draft_length, ladder), baseline(name)
    assert_same(ours, expected)
    np.testing.assert_allclose(ours.entropy_sum, expected.entropy_sum, rtol=1e-5)
    # Every token was emitted by a step; a whole round emits one token more than it accepts.
    stats = ours.stats
    assert stats.rounds + stats.cut_rounds == stats.steps
    assert stats.accepted + stats.rounds + stats.cut_accepted == ours.lengths.sum()
    assert stats.accepted_at.sum() == stats.accepted
    assert (np.diff(stats.accepted_at) <= 0).all()
    assert stats.accepted > 0


@ci
def test_any_batch_order_gives_the_same_tokens():
    setup, order = SETUPS["fp32"], np.array([3, 0, 4, 2, 1])
    drafter, draft = drafter_of("eagle", setup)
    prompts = take_prompts(PROMPTS, order)
    engine, params = engine_of(setup, 3, drafter), setup.params
    ours = run(engine, prompts, keys_of(prompts, SAMPLES), params, draft)
    rows = (order[:, None] * SAMPLES + np.arange(SAMPLES)).reshape(-1)
    assert_same(ours, baseline("fp32"), rows)
    # The noise belongs to the sequence: keyed by batch slot, the same tokens do not come back.
    slots = keys_of(prompts.replace(row_ids=PROMPTS.row_ids), SAMPLES)
    with pytest.raises(AssertionError):
        assert_same(run(engine, prompts, slots, params, draft), baseline("fp32"), rows)


@ci
def test_a_group_alone_has_the_same_tokens():
    setup = SETUPS["fp32"]
    drafter, draft = drafter_of("bigram", setup)
    engine = engine_of(setup, 2, drafter)
    for group in (0, 1):
        prompts = take_prompts(PROMPTS, [group])
        ours = run(engine, prompts, keys_of(prompts, SAMPLES), setup.params, draft)
        assert_same(ours, baseline("fp32"), slice(group * SAMPLES, (group + 1) * SAMPLES))


@ci
@pytest.mark.parametrize(("group", "kind", "draft_length"), [(1, "eagle", 1), (2, "bigram", 0)])
def test_a_sequence_alone_has_the_same_tokens(group, kind, draft_length):
    """One row, its prompt not padded; group 1 has a prompt of one token."""
    setup, length = SETUPS["fp32"], int(PROMPTS.lengths[group])
    drafter, draft = drafter_of(kind, setup)
    prompts = take_prompts(PROMPTS, [group])
    prompts = prompts.replace(tokens=prompts.tokens[:, :length])
    engine = engine_of(setup, draft_length, drafter, samples=1)
    for sample in range(SAMPLES):
        key = keys_of(prompts, SAMPLES)[sample : sample + 1]
        ours = run(engine, prompts, key, setup.params, draft)
        row = group * SAMPLES + sample
        assert_same(ours, baseline("fp32"), slice(row, row + 1))


@ci
@pytest.mark.parametrize(("new", "ends"), [(NEW, tuple(range(VOCAB))), (1, ENDS)])
def test_responses_of_one_token(new, ends):
    """All rows end in their first round."""
    setup = SETUPS["fp32"]
    drafter, draft = drafter_of("bigram", setup)
    engine = engine_of(setup, 2, drafter, new=new, ends=ends)
    ours = run(engine, PROMPTS, keys_of(PROMPTS, SAMPLES), setup.params, draft)
    first = baseline("fp32").tokens[:, 0]
    np.testing.assert_array_equal(ours.lengths, 1)
    np.testing.assert_array_equal(ours.tokens[:, 0], first)
    np.testing.assert_array_equal(ours.log_probs[:, 0], baseline("fp32").log_probs[:, 0])
    np.testing.assert_array_equal(ours.ended, np.isin(first, ends))
    assert not ours.tokens[:, 1:].any()
    stats = ours.stats
    assert stats.steps == len(ours.lengths) == stats.rounds + stats.accepted + stats.cut_accepted


@ci
@pytest.mark.parametrize("words", [{"update": 1}, {"seed": 1}, {"purpose": "evaluation"}, {"purpose": "draft_data"}])
def test_other_keys_give_other_samples(words):
    """The same prompts and weights at another update, seed or purpose."""
    setup = SETUPS["fp32"]
    other = run(engine_of(setup, 0), PROMPTS, keys_of(PROMPTS, SAMPLES, **words), setup.params)
    same = (other.tokens == baseline("fp32").tokens).all(axis=1)
    assert same.mean() < 0.2, same


@ci
def test_a_change_in_the_noise_key_is_caught(monkeypatch):
    """One change in the speculative arm, for both the drafter and the policy."""
    setup = SETUPS["fp32"]
    drafter, draft = drafter_of("bigram", setup)
    engine, keys = engine_of(setup, 1, drafter), keys_of(PROMPTS, SAMPLES)
    expected = baseline("fp32")  # before the plant

    def one_late(keys, positions, token_ids):
        return gumbel_noise(keys, positions + 1, token_ids)

    monkeypatch.setattr("specrl_jax.rollout.sampling.gumbel_noise", one_late)
    # A new function object: the program is traced anew.
    planted = run(engine, PROMPTS, keys, setup.params, draft, jax.jit(lambda *args: engine.rollout(*args)))
    with pytest.raises(AssertionError):
        assert_same(planted, expected)


# Acceptance counts.


def recount(trajectory, drafts_at, num_drafts):
    """Rounds of every sequence, replayed from its tokens; `drafts_at(row, emitted)` are the drafts proposed there.

    Returns the fields of `RolloutStats`.
    """
    rounds = accepted = cut_rounds = cut_accepted = steps = 0
    accepted_at = np.zeros(num_drafts, int)
    for row, length in enumerate(trajectory.lengths):
        emitted = 0
        while emitted < length:
            drafts = drafts_at(row, emitted)
            actual = trajectory.tokens[row, emitted:length]
            matched = 0
            while matched < min(num_drafts, len(actual)) and drafts[matched] == actual[matched]:
                matched += 1
            steps += 1
            if matched == len(actual):
                # All that was left was drafted: the sequence's end stopped the round.
                cut_rounds, cut_accepted = cut_rounds + 1, cut_accepted + matched
                break
            rounds, accepted = rounds + 1, accepted + matched
            accepted_at[:matched] += 1
            emitted += matched + 1
    return rounds, accepted, cut_rounds, cut_accepted, tuple(accepted_at), steps


def counts_of(stats):
    numbers = (stats.rounds, stats.accepted, stats.cut_rounds, stats.cut_accepted)
    return *map(int, numbers), tuple(stats.accepted_at.tolist()), int(stats.steps)


def log_softmax(x):
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


@ci
def test_counts_of_a_bigram_drafter_are_those_of_a_replay():
    ours, table = speculative("fp32", "bigram", 3, (1.0, 0.3)), np.asarray(bigram_table(), np.float64)

    def drafts_at(row, emitted):
        key = numpy_noise.sequence_key(0, "rollout", 0, int(PROMPTS.row_ids[row // SAMPLES]), row % SAMPLES)
        prompt = np.asarray(PROMPTS.tokens)[row // SAMPLES, : PROMPTS.lengths[row // SAMPLES]]
        # Of a prompt of one token a drafter has read nothing: the bigram drafter then follows token 0.
        newest = prompt[-1] if len(prompt) > 1 else 0
        token, drafts = ours.tokens[row, emitted - 1] if emitted else newest, []
        for step in range(3):
            scores = log_softmax(table[token]) + numpy_noise.gumbel(key, emitted + step, VOCAB)
            token = int(np.argmax(scores))
            drafts.append(token)
        return drafts

    expected = recount(ours, drafts_at, 3)
    assert counts_of(ours.stats) == expected
    assert all(count > 0 for count in expected[:4])


@ci
@pytest.mark.parametrize("wrong_from", [0, 1, 2])
def test_counts_are_exact_for_a_drafter_of_known_acceptance(wrong_from):
    """The policy as its own drafter, made to err from one draft of each round on; 0 accepts nothing, 2 everything."""
    setup = SETUPS["fp32"]
    drafter, (params, _) = drafter_of("policy", setup)
    prompts = take_prompts(PROMPTS, [0, 2, 3, 4])  # of at least two tokens, so that a drafter knows the last
    keys = keys_of(prompts, SAMPLES)
    ours = run(engine_of(setup, 2, drafter), prompts, keys, params, (params, jnp.int32(wrong_from)))
    assert_same(ours, run(engine_of(setup, 0), prompts, keys, params))
    left = ours.lengths
    rounds, cut = left // (wrong_from + 1), left % (wrong_from + 1)
    accepted_at = tuple(int(rounds.sum()) if i < wrong_from else 0 for i in range(2))
    expected = (rounds.sum(), wrong_from * rounds.sum(), (cut > 0).sum(), cut.sum(), accepted_at)
    assert counts_of(ours.stats) == (*expected, rounds.sum() + (cut > 0).sum())


@ci
def test_counts_of_an_eagle3_head_are_those_of_a_replay():
    """Drafts of a head that reads the whole sequence at once, with the features of the teacher-forced forward."""
    setup, ours = SETUPS["fp32"], speculative("fp32", "eagle", 3)
    (drafter, draft), params = drafter_of("eagle", setup), setup.params
    sequences = to_sequences(jax.tree.map(jnp.asarray, ours))
    starts = [(row, emitted) for row, length in enumerate(ours.lengths) for emitted in range(length)]
    rows, emitted = (jnp.array(x, jnp.int32) for x in zip(*starts, strict=True))
    prompt_lengths = jnp.repeat(PROMPTS.lengths, SAMPLES)[rows]
    width = sequences.tokens.shape[1]

    @jax.jit
    def propose(params, draft):
        positions = sequence_positions(sequences.lengths, width)
        batch = grid_batch(sequences.tokens, positions)
        out = forward(params, setup.policy, batch, numerics=setup.numerics, boundaries=drafter.boundaries)
        features = out.features.reshape(len(ours.lengths), width, -1)[rows, :-1]
        state = drafter.init_state(len(starts), width + 3)
        tokens, counts = sequences.tokens[rows, 1:], prompt_lengths + emitted - 1
        state = drafter.commit(draft, params.embed, state, tokens, features, counts)
        keys, law = keys_of(PROMPTS, SAMPLES)[rows], SamplingLaw(setup.temperature)

        def choose(scores, target_ids, before, count):
            position = emitted + before.shape[2]
            log_law = law.log_law(scores[:, 0], Context(position), target_ids)
            best = jnp.argmax(log_law + gumbel_noise(keys, position, target_ids), axis=-1)
            return Choice(target_ids[best][:, None, None])

        return drafter.propose(draft, params.embed, state, no_texts(len(rows)), Tree.chain(3), choose).token

    drafts = dict(zip(starts, np.asarray(propose(params, draft)).tolist(), strict=True))
    expected = recount(ours, lambda row, emitted: drafts[row, emitted], 3)
    assert counts_of(ours.stats) == expected
    assert expected[1] > 0


# Refusals.


@ci
def test_impossible_rollouts_are_refused():
    setup = SETUPS["fp32"]
    drafter, _ = drafter_of("eagle", setup)
    with pytest.raises(InputError, match="without a drafter"):
        engine_of(setup, 1)
    with pytest.raises(InputError, match="end token 20 is not in the policy's vocabulary of 20"):
        engine_of(setup, 0, ends=(1, 20))
    with pytest.raises(InputError, match=r"boundaries \(0, 1, 2\) of a policy with 1 layers"):
        engine_of(setup._replace(policy=replace(POLICY, num_layers=1)), 1, drafter)
    for wrong in ({"new": 0}, {"samples": 0}, {"ends": ()}, {"ladder": (1.0, 0.0)}, {"ladder": (2.0,)}):
        with pytest.raises(InputError, match=r"rollout \w+ is"):
            engine_of(setup, 0, **wrong)
    with pytest.raises(InputError, match="draft_length is -1"):
        engine_of(setup, -1)
    for temperature in (-0.1, float("nan"), 1e9):
        with pytest.raises(InputError, match="temperature"):
            SamplingLaw(temperature)
