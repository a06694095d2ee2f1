"""The GRPO step: equal bits with and without speculation, scanned and in pieces, draft update on and off."""

import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import exported_for
from tiny import assert_same

from specrl_jax.data.prompts import Prompts
from specrl_jax.data.symbols import symbol_table
from specrl_jax.data.tokenizers import arithmetic_tokenizer
from specrl_jax.drafters.draft_losses import DraftLossConfig
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_params import Eagle3Config, init_eagle3
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import init_params
from specrl_jax.parallel.mesh import MeshConfig, make_mesh
from specrl_jax.rl import grpo
from specrl_jax.rl.drafting import DraftTraining
from specrl_jax.rl.grpo import GrpoStep, UpdateConfig
from specrl_jax.rl.losses import LossConfig
from specrl_jax.rl.microbatches import (
    MicrobatchConfig,
    geometric_widths,
    over_microbatches,
    slots,
    sorted_order,
)
from specrl_jax.rl.optimizers import OptimizerConfig
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.control import Body, initial_control
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Match, Ratio
from specrl_jax.rollout.sampling import SamplingLaw

ci, full = pytest.mark.ci, pytest.mark.full

TABLE = symbol_table(arithmetic_tokenizer())
VOCAB = TABLE.token_bytes.shape[0]
POLICY = PolicyConfig("qwen3", VOCAB, 16, 32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)
HEAD = Eagle3Config(16, 32, 2, 1, 8, VOCAB, VOCAB, (0, 1, 2), 16)
INVARIANT = Numerics("invariant", token_block=8, row_block=4, query_block=4, key_block=16)
GROUPS, SAMPLES = 4, 8


@dataclasses.dataclass(frozen=True)
class EvenSum:
    """Random prompts; a response is right when the sum of its tokens is even, so that every group has both kinds."""

    vocab: int = VOCAB

    def issue(self, split, counters):
        key = jax.vmap(lambda c: jax.random.fold_in(jax.random.key(5), c))(counters)
        tokens = jax.vmap(lambda k: jax.random.randint(k, (6,), 0, self.vocab, jnp.int32))(key)
        return Prompts(tokens, 2 + (counters % 5).astype(jnp.int32), counters), counters

    def reward(self, problems, tokens, lengths):
        return ((tokens.sum(axis=1) + lengths + problems.astype(jnp.int32)) % 2).astype(jnp.float32)


@functools.lru_cache
def initial():
    """A random policy with a peaked law, and a random head."""
    params = init_params(jax.random.key(0), POLICY)
    params = params.replace(embed=params.embed * 50, head=params.head * 2)
    return params, init_eagle3(jax.random.key(1), HEAD, policy=params)


LAW = SamplingLaw(1.0, end_ids=(TABLE.end_id,))
FILTERED = SamplingLaw(0.8, top_k=9, top_p=0.95, repetition_penalty=1.3, min_new_tokens=2, end_ids=(TABLE.end_id,))


def make_program(
    draft_length,
    *,
    online=True,
    numerics=INVARIANT,
    data=1,
    updates=2,
    law=LAW,
    loss_law=None,
    rule=None,
    couple_epochs=False,
    bodies=None,
    **changes,
):
    adaptive = {"adaptive": bodies is not None, "bodies": bodies}
    rollout = RolloutConfig(12, SAMPLES, draft_length, law, rule or Match(), **adaptive, ladder=(1.0,))
    engine = RolloutEngine(POLICY, rollout, numerics, Eagle3Drafter(HEAD) if draft_length else None)
    scorer = Scorer(POLICY, loss_law or law, numerics)
    online = online and draft_length > 0
    drafting = DraftTraining(scorer, HEAD, DraftLossConfig(2), OptimizerConfig(1e-2), MicrobatchConfig(2, (1.0,)))
    update = UpdateConfig(
        LossConfig(clip_high=0.28),
        OptimizerConfig(0.01),
        MicrobatchConfig(4, (1.0,)),
        updates_per_rollout=updates,
        draft_sequences=2 if online else 0,
    )
    update = dataclasses.replace(update, **changes)
    step = GrpoStep(engine, scorer, update, drafting if online else None, 0, couple_epochs)
    return GrpoProgram(step, make_mesh(MeshConfig(data)), GROUPS, EvenSum())


def first_state(program, **kwargs):
    params, draft = initial()
    return program.place(program.step.init(params, draft if program.step.engine.speculative else None, **kwargs))


def scanned(program, steps):
    """Whole steps from a copy of a state, which they would overwrite."""
    run = program.scanned(steps)
    return lambda state: run(program.place(state))


def sha(tree):
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))).hexdigest()


def in_pieces(program, state, steps):
    tokens = []
    for _ in range(steps):
        served = program.gather(state)
        prompts, problems = program.issue(served)
        trajectory = program.rollout(served, prompts)
        rewards = program.reward(served, problems, trajectory)
        prepared = program.prepare(state, trajectory)
        state, _, examples = program.update(state, trajectory, prepared, rewards)
        state, _ = program.update_drafter(state, trajectory, examples)
        tokens.append(np.asarray(trajectory.tokens))
    return state, np.stack(tokens)


@functools.lru_cache
def autoregressive():
    """Two scanned steps without speculation: state, metrics, trajectories, rewards."""
    program = make_program(0)
    state, outputs = scanned(program, 2)(first_state(program))
    return state, *outputs


@pytest.mark.ci
@pytest.mark.parametrize("data", [1, 2])
def test_a_controller_changes_nothing_but_itself(data):
    """Two scanned steps whose draft lengths are chosen on the way; the devices share what they learn."""
    rows = GROUPS * SAMPLES // data
    bodies = (Body(rows, rows), Body(rows, 3 * rows))
    program = make_program(3, bodies=bodies, data=data)
    costs = initial_control(np.array([1.0, 1.5]))
    state, (_, trajectories, _) = scanned(program, 2)(first_state(program, control=costs))
    plain = make_program(0, data=data)
    expected, (_, plain_trajectories, _) = scanned(plain, 2)(first_state(plain))
    np.testing.assert_array_equal(trajectories.tokens, plain_trajectories.tokens)
    assert sha(state.params) == sha(expected.params)
    stats = trajectories.stats
    assert stats.bodies.sum() > 0
    assert stats.rounds.sum() > 0
    # A hundredth of the first step's, which are few, is forgotten before the second.
    first, second = map(float, stats.accepted)
    learned = float(state.control.accepted.sum() - costs.accepted.sum())
    assert abs(learned - (0.99 * first + second)) < 1e-3
    np.testing.assert_array_equal(state.control.seconds, costs.seconds)


@pytest.mark.ci
def test_a_head_may_draft_with_the_average_of_its_weights():
    """The average in float64 from what is trained, step by step; what is trained and the policy are as without it."""
    program, kept = make_program(3), 0.75
    drafting = dataclasses.replace(program.step.drafting, average=kept)
    averaged = dataclasses.replace(program, step=dataclasses.replace(program.step, drafting=drafting))
    step, state = scanned(averaged, 1), first_state(averaged)
    mean = jax.tree.map(lambda x: np.asarray(x, np.float64), state.draft.weights)
    for _ in range(2):
        state, _ = step(state)
        mean = jax.tree.map(lambda m, x: kept * m + (1 - kept) * np.asarray(x), mean, state.draft_opt_state.weights)
        jax.tree.map(lambda m, x: np.testing.assert_allclose(x, m, atol=1e-6), mean, state.draft.weights)
    plain = speculative()[0]
    assert sha(state.draft_opt_state.weights) == sha(plain.draft.weights)
    assert sha(state.params) == sha(plain.params)
    assert sha(state.draft.weights) != sha(plain.draft.weights)


@pytest.mark.ci
def test_a_head_is_trained_only_when_it_is_stale():
    """At the first step nothing is worse than the best; once more was accepted before, the head is trained."""
    program = make_program(3)
    drafting = dataclasses.replace(program.step.drafting, tolerance=0.1)
    patient = dataclasses.replace(program, step=dataclasses.replace(program.step, drafting=drafting))
    step = scanned(patient, 1)
    start = first_state(patient)
    state, (metrics, _, _) = step(start)
    assert metrics["draft_updated"].tolist() == [0.0]
    assert np.isnan(metrics["draft_loss"]).all()
    assert sha(state.draft.weights) == sha(start.draft.weights)
    assert state.draft_opt_state.best == state.draft_opt_state.recent > 1.0
    was_better = dataclasses.replace(start.draft_opt_state, best=jnp.float32(4.0), recent=jnp.float32(1.0))
    trained, (metrics, _, _) = step(dataclasses.replace(start, draft_opt_state=was_better))
    assert metrics["draft_updated"].tolist() == [1.0]
    assert np.isfinite(metrics["draft_loss"]).all()
    assert sha(trained.draft.weights) != sha(start.draft.weights)
    assert sha(trained.params) == sha(state.params)


@functools.lru_cache
def one_step():
    """A compiled step of the program without speculation."""
    return scanned(make_program(0), 1)


@functools.lru_cache
def speculative():
    program = make_program(3)
    state, outputs = scanned(program, 2)(first_state(program))
    return state, *outputs


@ci
def test_speculation_changes_neither_tokens_nor_parameters():
    plain, spec = autoregressive(), speculative()
    assert_same(plain[2], spec[2])
    np.testing.assert_array_equal(plain[3], spec[3])
    assert sha(plain[0].params) == sha(spec[0].params) != sha(initial()[0])
    assert sha(spec[0].draft) != sha(initial()[1])
    assert int(spec[2].stats.rounds.sum()) > 0


@ci
def test_the_run_learns_something_to_compare():
    _, metrics, trajectories, rewards = autoregressive()
    assert 0 < np.asarray(rewards).mean() < 1
    assert np.all(np.asarray(metrics["grad_norm"]) > 0)
    assert len(np.unique(np.asarray(trajectories.lengths))) > 3


@ci
@pytest.mark.bits
@pytest.mark.parametrize("draft_length", [0, 3])
def test_scanned_and_in_pieces_give_the_same_bits(draft_length):
    scanned = speculative() if draft_length else autoregressive()
    program = make_program(draft_length)
    state, tokens = in_pieces(program, first_state(program), 2)
    np.testing.assert_array_equal(tokens, scanned[2].tokens)
    assert sha(state) == sha(scanned[0])


@ci
def test_one_step_at_a_time_equals_two_scanned():
    state = first_state(make_program(0))
    for _ in range(2):
        state, _ = one_step()(state)
    assert sha(state) == sha(autoregressive()[0])


@ci
def test_a_change_in_the_noise_key_is_caught(monkeypatch):
    expected = autoregressive()[2].tokens[0]
    program = make_program(3)
    original = grpo.sequence_keys
    monkeypatch.setattr(grpo, "sequence_keys", lambda *args: original(*args) ^ jnp.uint32(1))
    state = first_state(program)
    served = program.gather(state)
    prompts, _ = program.issue(served)
    tokens = program.rollout(served, prompts).tokens
    assert not np.array_equal(tokens, expected)


@pytest.mark.parametrize(
    "numerics",
    [pytest.param(INVARIANT, marks=ci), pytest.param(Numerics("plain", key_block=16), marks=full)],
    ids=["invariant", "plain"],
)
def test_the_draft_update_leaves_the_policy_gradient_alone(numerics):
    """One update from the same trajectory, with the head trained and with it frozen."""
    states = []
    for online in (True, False):
        program = make_program(3, online=online, numerics=numerics, updates=1)
        state = first_state(program)
        served = program.gather(state)
        prompts, problems = program.issue(served)
        trajectory = program.rollout(served, prompts)
        rewards = program.reward(served, problems, trajectory)
        state, metrics, examples = program.update(state, trajectory, program.prepare(state, trajectory), rewards)
        assert (examples is not None) == online
        states.append((sha(state.params), sha(state.opt_state), float(metrics["grad_norm"])))
    assert states[0] == states[1]


@ci
def test_old_log_probs_recomputed_are_those_of_the_rollout():
    program = make_program(0, recompute_logprobs=True)
    state = first_state(program)
    served = program.gather(state)
    prompts, _ = program.issue(served)
    trajectory = program.rollout(served, prompts)
    recomputed, _ = program.prepare(state, trajectory)
    kept, _ = make_program(0).prepare(state, trajectory)
    assert np.asarray(kept.mask).any()
    np.testing.assert_array_equal(recomputed.log_probs, kept.log_probs)


@ci
def test_the_first_update_is_on_policy_and_the_second_is_not():
    state = first_state(make_program(0))
    _, (metrics, *_) = one_step()(state)
    alone = make_program(0, updates=1)
    _, (alone_metrics, *_) = scanned(alone, 1)(state)
    assert float(alone_metrics["ratio"][0]) == 1.0
    assert float(alone_metrics["clip_fraction"][0]) == 0.0
    assert float(metrics["ratio"][0]) != 1.0
    assert float(metrics["clip_fraction"][0]) > 0.0


@full
def test_a_reference_adds_its_kl():
    program = make_program(0, loss=LossConfig(kl_coef=0.1))
    params, _ = initial()
    _, (metrics, *_) = scanned(program, 2)(program.step.init(params, reference=params))
    assert float(metrics["kl"][1]) > 0.0


@full
def test_a_data_axis_of_two_devices_rolls_out_the_same_tokens():
    program = make_program(3, data=2)
    state, (metrics, trajectories, rewards) = scanned(program, 1)(first_state(program))
    np.testing.assert_array_equal(trajectories.tokens[0], speculative()[2].tokens[0])
    np.testing.assert_array_equal(rewards[0], speculative()[3][0])
    single = speculative()[1]
    for name in ("reward_mean", "truncated_fraction", "zero_advantage_groups"):
        np.testing.assert_allclose(metrics[name][0], single[name][0], rtol=1e-6)
    assert int(state.issued) == GROUPS


@full
def test_shuffled_rewards_keep_each_group():
    program = make_program(0)
    state = first_state(program)
    shuffled = dataclasses.replace(program, shuffle_rewards=True)
    served = program.gather(state)
    prompts, problems = program.issue(served)
    trajectory = program.rollout(served, prompts)
    before = np.asarray(program.reward(served, problems, trajectory)).reshape(GROUPS, SAMPLES)
    after = np.asarray(shuffled.reward(served, problems, trajectory)).reshape(GROUPS, SAMPLES)
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(np.sort(before, 1), np.sort(after, 1))
    # Rewards from the host are handed out in the same way.
    np.testing.assert_array_equal(shuffled.hand_out(served, trajectory, before.reshape(-1)), after.reshape(-1))
    np.testing.assert_array_equal(program.hand_out(served, trajectory, before.reshape(-1)), before.reshape(-1))


@ci
@pytest.mark.parametrize("data", [1, 2])
def test_a_state_is_taken_over_with_arrays_that_occur_twice(data):
    """A head begins with the policy's norm: the step overwrites both."""
    program = make_program(3, data=data)
    placed = program.scanned(1)(first_state(program))[0]
    params = jax.tree.map(jnp.copy, initial()[0])
    draft = init_eagle3(jax.random.key(1), HEAD, policy=params)
    assert draft.weights.final_norm is params.final_norm
    state = program.take_over(program.step.init(params, draft))
    if data == 1:  # not a copy
        assert state.params.head.unsafe_buffer_pointer() == params.head.unsafe_buffer_pointer()
    assert sha(program.scanned(1)(state)[0]) == sha(placed)


@ci
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_scanned_step_lowers_for_every_platform(platform):
    program = make_program(3)
    exported = exported_for(platform, program.scanned(2), jax.eval_shape(lambda state: state, first_state(program)))
    assert "callback" not in exported.mlir_module()


@ci
def test_microbatches_add_up_whatever_their_width():
    rng = np.random.RandomState(0)
    lengths = jnp.asarray(rng.randint(1, 41, 24), jnp.int32)
    values = jnp.asarray(rng.randint(0, 100, (24, 40)), jnp.int32)
    values = jnp.where(jnp.arange(40)[None] < lengths[:, None], values, 0)

    def fn(weight, micro):
        return weight * micro.sum(), micro

    for config in (MicrobatchConfig(24, (1.0,)), MicrobatchConfig(4, (0.2, 0.5, 1.0)), MicrobatchConfig(1, (0.1,))):
        total, rows = jax.jit(lambda c=config: over_microbatches(fn, jnp.int32(2), values, lengths, c))()
        assert int(total) == 2 * int(values.sum())
        np.testing.assert_array_equal(rows, values[sorted_order(lengths)])


@ci
def test_padding_of_long_tailed_responses():
    """Lengths exp(N(ln 64, 0.8)), at most 512, after prompts of 32 tokens: ten widths pad at most 15%, and one 77%."""
    drawn = np.exp(np.random.default_rng(0).normal(np.log(64), 0.8, 512))
    lengths = jnp.asarray(32 + np.clip(drawn, 1, 512).astype(np.int32))
    values = jnp.where(jnp.arange(544)[None] < lengths[:, None], 1, 0)
    shares = []
    for widths in (geometric_widths(0.1, 10), (1.0,)):
        config = MicrobatchConfig(4, widths)

        def count(_, micro):
            return jnp.float32(micro.size), ()

        computed, _ = jax.jit(lambda c=config: over_microbatches(count, (), values, lengths, c))()
        assert float(computed) == int(slots(lengths, 544, config))
        shares.append(1 - int(lengths.sum()) / float(computed))
    assert shares[0] <= 0.15
    assert shares[1] > 0.7


@ci
def test_some_microbatches_leave_outputs_spread_over_the_lengths():
    lengths = jnp.asarray([9, 3, 8, 1, 2, 7, 4, 6, 5, 10, 12, 11], jnp.int32)
    values = jnp.tile(lengths[:, None], (1, 12))
    config = MicrobatchConfig(2, (1.0,))

    def fn(_, micro):
        return micro[0].sum(dtype=jnp.float32), micro[:1]

    total, rows = over_microbatches(fn, (), values, lengths, config, leaving=3)
    assert rows[:, 0].tolist() == [3, 7, 11]  # the first of every second microbatch of two
    assert float(total) == 12 * sum((1, 3, 5, 7, 9, 11))
    assert over_microbatches(fn, (), values, lengths, config, leaving=99)[1][:, 0].tolist() == [1, 3, 5, 7, 9, 11]


@ci
def test_a_filtered_law_trains_on_its_support_to_the_same_bits():
    """Filters and penalties, and Muon, with and without speculation; the first update is on-policy."""
    runs, muon = [], OptimizerConfig(0.05, name="muon")
    for draft_length in (0, 3):
        program = make_program(draft_length, law=FILTERED, updates=1, optimizer=muon)
        state, outputs = scanned(program, 1)(first_state(program))
        runs.append((state, *outputs))
    plain, spec = runs
    for name in ("tokens", "log_probs", "thresholds", "lengths"):
        np.testing.assert_array_equal(getattr(plain[2], name), getattr(spec[2], name))
    assert sha(plain[0].params) == sha(spec[0].params) != sha(initial()[0])
    assert float(spec[1]["ratio"][0]) == 1.0
    assert float(spec[1]["excluded_tokens"][0]) == 0.0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((spec[0].draft, spec[1])))


CORRECTED = LossConfig(clip_high=0.28, importance_cap=2.0)


@ci
@pytest.mark.parametrize("kind", ["lenience", "full"])
def test_what_is_not_drawn_from_the_loss_law_is_corrected(kind):
    """Old log-probs are the training forward's, behaviour log-probs the rollout's; their ratio weights the tokens."""
    choice = {"rule": Ratio(lenience=3.0)} if kind == "lenience" else {"law": FILTERED, "loss_law": FILTERED.full}
    with pytest.raises(InputError, match="importance_cap"):
        make_program(3, **choice)
    program = make_program(3, updates=1, loss=CORRECTED, **choice)
    state = first_state(program)
    served = program.gather(state)
    prompts, problems = program.issue(served)
    trajectory = program.rollout(served, prompts)
    prepared = program.prepare(state, trajectory)
    sequences, _ = prepared
    mask = np.asarray(sequences.mask)
    drift = np.asarray(sequences.log_probs, np.float64)[mask] - np.asarray(sequences.behaviour)[mask]
    assert np.abs(drift).max() > 0.05
    if kind == "full":
        assert drift.max() < 1e-5  # on its support the filtered law has more than the full one
    _, metrics, _ = program.update(state, trajectory, prepared, program.reward(served, problems, trajectory))
    np.testing.assert_allclose(metrics["importance_weight"], np.minimum(np.exp(drift), 2.0).mean(), rtol=1e-5)
    assert float(metrics["ratio"]) == 1.0  # new against old policy, whatever the behaviour


@ci
def test_coupled_epochs_give_a_prompt_the_same_noise_at_every_update():
    for coupled in (False, True):
        step = make_program(0, couple_epochs=coupled).step
        served = make_program(0).gather(first_state(make_program(0)))
        prompts, _ = make_program(0).issue(served)
        for later in (served.replace(updates=served.updates + 7), served.replace(behind=served.behind + 7)):
            same = np.array_equal(step.noise_keys(served, prompts), step.noise_keys(later, prompts))
            assert same == coupled


@ci
def test_what_does_not_split_is_refused():
    with pytest.raises(InputError, match="choose a multiple of 3"):
        make_program(0, updates=3)
    with pytest.raises(InputError, match="microbatch"):
        make_program(0, microbatch=MicrobatchConfig(5))
