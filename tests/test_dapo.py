"""What DAPO and RLOO add to the objective, against float64 NumPy: one response, one group, one rollout at a time."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import test_grpo
from scripts import COMPILED
from test_grpo import GROUPS, SAMPLES, EvenSum, first_state, scanned, sha
from tiny import PLAIN

from specrl_jax.errors import InputError
from specrl_jax.rl.losses import LossConfig
from specrl_jax.rl.overlong import overlong_penalty
from specrl_jax.rl.tasks import for_every_sample
from specrl_jax.rollout.control import Body, initial_control
from specrl_jax.training.grpo_run import GrpoRun, RunConfig
from specrl_jax.training.metrics import read_metrics
from specrl_jax.training.pieces import Clock, StepPieces

ci, full = pytest.mark.ci, pytest.mark.full
LONGEST, BUFFER = 12, 5  # of test_grpo's programs


@dataclasses.dataclass(frozen=True)
class Patchy(EvenSum):
    """Every response to every `dull`-th prompt is right."""

    dull: int = 3

    def reward(self, problems, tokens, lengths):
        return jnp.where(problems % self.dull == 0, 1.0, super().reward(problems, tokens, lengths))


@dataclasses.dataclass(frozen=True)
class OnHost:
    """The same task, from the host."""

    task: Patchy

    def issue(self, step):
        return self.task.issue("train", step * GROUPS + jnp.arange(GROUPS, dtype=jnp.uint32))

    def rewards(self, problems, trajectory):
        rows = for_every_sample(problems, SAMPLES)
        return np.asarray(self.task.reward(rows, jnp.asarray(trajectory.tokens), jnp.asarray(trajectory.lengths)))


@functools.lru_cache
def make_program(draft_length=0, *, task=None, **changes):
    own = test_grpo.make_program(draft_length, **changes)
    return dataclasses.replace(own, task=task or Patchy())


def penalty(length, ended, longest, buffer):
    """Equation 13 of arXiv 2503.14476, of one response; a truncated one is longer than the longest."""
    if not ended:
        return -1.0
    if length <= longest - buffer:
        return 0.0
    return ((longest - buffer) - length) / buffer


@ci
def test_overlong_penalty_of_every_length():
    lengths = np.arange(1, 101)
    for buffer in (1, 7, 20, 100):
        for ended in (True, False):
            expected = [penalty(length, ended, 100, buffer) for length in lengths]
            found = overlong_penalty(jnp.int32(lengths), jnp.full(100, ended), 100, buffer)
            np.testing.assert_allclose(found, expected, atol=1e-6)
    known = overlong_penalty(jnp.int32([70, 80, 90, 100, 100]), jnp.bool_([1, 1, 1, 1, 0]), 100, 20)
    np.testing.assert_allclose(known, [0, 0, -0.5, -1, -1], atol=1e-7)


def by_hand(rewards, lengths, ended, config):
    """Loss of an on-policy update, where every ratio is 1, with what is reported of rewards; and tokens counted."""
    shaped = [
        r + (penalty(n, e, LONGEST, config.overlong_buffer) if config.overlong_buffer else 0.0)
        for r, n, e in zip(rewards.astype(np.float64), lengths, ended, strict=True)
    ]
    total, tokens, sequences = 0.0, 0, 0
    for start in range(0, len(rewards), SAMPLES):
        group, teaches = shaped[start : start + SAMPLES], len(set(rewards[start : start + SAMPLES])) > 1
        mean = sum(group) / SAMPLES
        std = (sum((r - mean) ** 2 for r in group) / (SAMPLES - 1)) ** 0.5
        for i, reward in enumerate(group):
            others = [r for j, r in enumerate(group) if j != i]
            baseline = mean if config.baseline == "mean" else sum(others) / len(others)
            advantage = (reward - baseline) / (std + 1e-6 if config.normalize_std else 1.0)
            length = int(lengths[start + i])
            if (config.dynamic_sampling and not teaches) or (config.truncated == "mask" and not ended[start + i]):
                continue
            tokens += length
            sequences += 1
            total += advantage * (length if config.loss.aggregation == "token" else 1)
    return -total / (tokens if config.loss.aggregation == "token" else sequences), shaped, tokens


DAPO = {
    "loss": LossConfig(clip_low=0.2, clip_high=0.28),
    "normalize_std": False,
    "overlong_buffer": BUFFER,
    "truncated": "mask",
    "dynamic_sampling": 3,
}
OBJECTIVES = {
    "grpo": {},
    "dr grpo": {"normalize_std": False},
    "rloo": {"baseline": "leave_one_out", "normalize_std": False},
    "rloo / std": {"baseline": "leave_one_out"},
    "masked": {"truncated": "mask"},
    "masked, by sequence": {"truncated": "mask", "loss": LossConfig(aggregation="sequence")},
    "overlong": {"overlong_buffer": BUFFER},
    "dropped": {"dynamic_sampling": 1},
    "dapo": DAPO,
}


@functools.lru_cache
def rolled_out(data=1):
    """One rollout of the first policy, with its rewards."""
    program = make_program(data=data, numerics=PLAIN)
    served = program.gather(first_state(program))
    prompts, problems = program.issue(served)
    trajectory = program.rollout(served, prompts)
    return trajectory, program.reward(served, problems, trajectory)


@pytest.mark.parametrize(
    ("name", "data"), [*((name, 1) for name in OBJECTIVES), ("masked", 2), ("masked, by sequence", 2), ("dropped", 2)]
)
@ci
def test_the_loss_of_an_update_is_the_objective(name, data):
    """Over eight microbatches, on one device and on two, which must agree about the denominator."""
    program = make_program(data=data, updates=1, numerics=PLAIN, **OBJECTIVES[name])
    state, (trajectory, rewards) = first_state(program), rolled_out(data)
    _, metrics, _ = program.update(state, trajectory, program.prepare(state, trajectory), rewards)
    config = program.step.update_config
    rewards, lengths, ended = (np.asarray(x) for x in (rewards, trajectory.lengths, trajectory.ended))
    assert 0 < ended.sum() < len(ended)
    loss, shaped, tokens = by_hand(rewards, lengths, ended, config)
    assert abs(loss) > 1e-3
    assert (tokens < lengths.sum()) == bool(config.dynamic_sampling or config.truncated == "mask")
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-5)
    np.testing.assert_allclose(metrics["ratio"], 1.0, rtol=1e-5)
    np.testing.assert_allclose(metrics["reward_mean"], rewards.mean(), rtol=1e-6)
    if config.overlong_buffer:
        np.testing.assert_allclose(metrics["reward_shaped_mean"], np.mean(shaped), rtol=1e-6)
        np.testing.assert_allclose(metrics["overlong_fraction"], np.mean(np.array(shaped) < rewards), rtol=1e-6)
    else:
        assert "reward_shaped_mean" not in metrics


@ci
def test_masked_responses_have_no_gradient():
    """Whatever their advantage, they move nothing: the update is that of a batch where they earned the mean."""
    program = make_program(updates=1, numerics=PLAIN, truncated="mask", normalize_std=False)
    state, (trajectory, rewards) = first_state(program), rolled_out()
    prepared = program.prepare(state, trajectory)
    sequences, _ = prepared
    cut = ~trajectory.ended[:, None]
    # Old log-probs of their tokens would change ratio and gradient.
    other = dataclasses.replace(sequences, log_probs=jnp.where(cut, sequences.log_probs - 0.1, sequences.log_probs))
    # An update overwrites the optimizer's state that it is given.
    ours, theirs = (program.update(first_state(program), trajectory, (s, None), rewards)[0] for s in (sequences, other))
    assert sha(ours.params) == sha(theirs.params) != sha(state.params)
    kept = dataclasses.replace(program.step.update_config, truncated="keep")
    keeping = dataclasses.replace(program, step=dataclasses.replace(program.step, update_config=kept))
    assert sha(keeping.update(state, trajectory, prepared, rewards)[0].params) != sha(ours.params)


def filled_by_hand(program, state):
    """The batch of a step: rollouts one after the other, their groups chosen in Python; and what was rolled out."""
    served, chosen, fillers, counts = program.gather(state), [], [], {"groups": 0, "teach": 0, "tokens": 0}
    most = program.step.update_config.dynamic_sampling
    for attempt in range(most):
        issued = served.issued + jnp.uint32(GROUPS * attempt)
        own = served.replace(issued=issued, attempt=jnp.int32(attempt))
        prompts, problems = program.issue(own)
        trajectory = program.rollout(own, prompts)
        rewards = np.asarray(program.reward(own, problems, trajectory)).reshape(GROUPS, SAMPLES)
        tokens = np.asarray(trajectory.tokens).reshape(GROUPS, SAMPLES, -1)
        groups = [(int(row), tokens[i], rewards[i]) for i, row in enumerate(np.asarray(prompts.row_ids))]
        teach = [group for group in groups if len(set(group[2])) > 1]
        fillers = [group for group in groups if len(set(group[2])) == 1] + fillers
        chosen += teach
        counts["groups"] += GROUPS
        counts["teach"] += len(teach)
        counts["tokens"] += int(trajectory.lengths.sum())
        if len(chosen) >= GROUPS:
            break
    return (chosen + fillers)[:GROUPS], counts


@functools.lru_cache
def two_steps(draft_length=0, most=3, dull=3, data=1):
    program = make_program(draft_length, data=data, task=Patchy(dull=dull), dynamic_sampling=most)
    state, outputs = scanned(program, 2)(first_state(program))
    return state, *outputs


def assert_filled(trajectories, rewards, step, groups):
    rows, tokens, earned = zip(*groups, strict=True)
    assert tuple(trajectories.prompts.row_ids[step].tolist()) == rows
    np.testing.assert_array_equal(trajectories.tokens[step], np.concatenate(tokens))
    np.testing.assert_array_equal(rewards[step], np.concatenate(earned))


@pytest.mark.parametrize(("most", "dull"), [(3, 3), (1, 3), (2, 1)])
@ci
def test_a_batch_is_filled_with_the_groups_that_teach(most, dull):
    """Full after two rollouts with one to spare; cut short at one; nothing teaches."""
    state, metrics, trajectories, rewards = two_steps(most=most, dull=dull)
    program = make_program(task=Patchy(dull=dull), dynamic_sampling=most)
    start = first_state(program)
    groups, counts = filled_by_hand(program, start)
    assert_filled(trajectories, rewards, 0, groups)
    learned = min(counts["teach"], GROUPS)
    assert [float(metrics[f"{name}_groups"][0]) for name in ("sampled", "dropped", "surplus")] == [
        counts["groups"],
        counts["groups"] - counts["teach"],
        counts["teach"] - learned,
    ]
    assert float(metrics["sampled_tokens"][0]) == counts["tokens"]
    assert float(metrics["zero_advantage_groups"][0]) == GROUPS - learned
    if (most, dull) == (3, 3):
        # Contrast at 1, 2, 4, 5 and 7; then at 8, 10, 11, 13 and 14.
        assert trajectories.prompts.row_ids.tolist() == [[1, 2, 4, 5], [8, 10, 11, 13]]
        assert metrics["surplus_groups"].tolist() == [1.0, 1.0]
        assert int(state.issued) == 16
        assert np.unique(trajectories.version).tolist() == [0, 2]
    if dull == 1:
        assert metrics["loss"].tolist() == metrics["grad_norm"].tolist() == [0.0, 0.0]
        assert int(state.issued) == 2 * most * GROUPS
        assert metrics["sampled_reward_mean"].tolist() == [1.0, 1.0]


@ci
def test_every_rollout_of_a_step_has_noise_of_its_own():
    """The same prompts twice in one step are two draws."""
    program = make_program(dynamic_sampling=2)
    served = program.gather(first_state(program))
    prompts, _ = program.issue(served)
    again = served.replace(attempt=jnp.int32(1))
    assert not np.any(program.step.noise_keys(served, prompts) == program.step.noise_keys(again, prompts))
    drawn = program.add(None, *rolled_out())
    upcoming = program.dynamic_sampling.upcoming(served, drawn)
    assert (int(upcoming.attempt), int(upcoming.issued)) == (1, GROUPS)


@ci
def test_speculation_changes_neither_batches_nor_parameters():
    plain, spec = two_steps(0), two_steps(3)
    np.testing.assert_array_equal(plain[2].tokens, spec[2].tokens)
    assert plain[2].prompts.row_ids.tolist() == spec[2].prompts.row_ids.tolist()
    assert sha(plain[0].params) == sha(spec[0].params)
    assert int(spec[2].stats.rounds.min()) > 0


@full
def test_a_controller_goes_from_rollout_to_rollout():
    rows = GROUPS * SAMPLES
    program = make_program(3, bodies=(Body(rows, rows), Body(rows, 3 * rows)), dynamic_sampling=3)
    costs = initial_control(np.array([1.0, 1.5]))
    state, (_, trajectories, _) = scanned(program, 1)(first_state(program, control=costs))
    np.testing.assert_array_equal(trajectories.tokens[0], two_steps(0)[2].tokens[0])
    # Both rollouts have taught it: a hundredth of the first, which are few, is forgotten before the second.
    learned = float(state.control.accepted.sum() - costs.accepted.sum())
    in_all = float(trajectories.stats.accepted[0])
    assert 0.99 * in_all <= learned + 1e-3  # in float32
    assert learned < in_all


@ci
def test_the_batch_does_not_depend_on_the_mesh():
    """Groups change devices where one has fewer that teach; the minibatches of the update are another matter."""
    one, two = two_steps(0), two_steps(0, data=2)
    for name in ("tokens", "lengths", "ended", "log_probs"):
        np.testing.assert_array_equal(getattr(one[2], name)[0], getattr(two[2], name)[0])
    for name in ("sampled_groups", "dropped_groups", "sampled_tokens", "sampled_reward_mean", "reward_mean"):
        np.testing.assert_allclose(one[1][name][0], two[1][name][0], rtol=1e-5)
    assert int(two[0].issued) == 16


def run(program, folder, task=None, **config):
    folder.mkdir()
    batches = []
    config = RunConfig(2, scan_steps=1, **config)
    report = GrpoRun(
        program, config, folder, lambda state: {}, lambda *step: batches.append(step[2]), host_task=task
    ).run(first_state(program))
    return report, batches, read_metrics(folder)


@pytest.mark.parametrize("host", [False, True], ids=["in-graph", "host"])
@pytest.mark.bits
@ci
def test_pieces_and_the_scanned_step_give_the_same_bits(tmp_path, host):
    draft_length = 0 if host else 3
    expected = two_steps(draft_length)
    program = make_program(draft_length, dynamic_sampling=3)
    if host:
        program = dataclasses.replace(program, task=None)
    report, batches, rows = run(program, tmp_path / "run", OnHost(Patchy()) if host else None, measured_every=1)
    assert sha(report.state) == sha(expected[0])
    for i, (batch, row) in enumerate(zip(batches, rows, strict=True)):
        np.testing.assert_array_equal(batch.tokens, expected[2].tokens[i])
        for name in ("sampled_groups", "dropped_groups", "surplus_groups", "sampled_tokens"):
            assert row[name] == float(expected[1][name][i])
        parts = [v for k, v in row.items() if k.startswith("time_") and k not in ("time_step_s", "time_prefill_s")]
        np.testing.assert_allclose(sum(parts), row["time_step_s"], rtol=1e-6)
        assert row["time_prefill_s"] > 0
        np.testing.assert_allclose(row["tokens_per_second"] * row["time_rollout_s"], row["sampled_tokens"], rtol=1e-6)
        # Entropy and forwards are counted over all rollouts.
        np.testing.assert_allclose(row["entropy"] * row["sampled_tokens"], float(batch.entropy_sum), rtol=1e-6)
        forwards = row["policy_forwards_per_sequence"] * row["sampled_groups"] * SAMPLES
        np.testing.assert_allclose(forwards, int(batch.stats.steps), rtol=1e-6)


@ci
def test_further_rollouts_of_a_rehearsed_step_compile_nothing():
    program = make_program(3, dynamic_sampling=3)
    state, pieces = first_state(program), StepPieces(program)
    served = program.gather(state)
    pieces.rehearse(state, served, *program.issue(served))
    COMPILED.clear()
    sampled = pieces.sample(Clock(), served, 0)
    assert len(sampled.rollouts) > 1
    state = program.dynamic_sampling.past(state, sampled.drawn)
    pieces.learn(Clock(), state, sampled.trajectory, sampled.rewards)
    ours = ("rollout", "_reward", "added", "prepare", "run")
    assert not [name for name in COMPILED if name.removeprefix("jit(").removesuffix(")") in ours], COMPILED


@ci
def test_what_does_not_go_together_is_refused(tmp_path):
    program = make_program(dynamic_sampling=2, loss=test_grpo.CORRECTED)
    with pytest.raises(InputError, match="dynamic_sampling is 2 and rollouts run ahead or apart"):
        run(program, tmp_path / "run", lag=1)
    with pytest.raises(InputError, match="couple_epochs gives a prompt one noise"):
        test_grpo.make_program(0, couple_epochs=True, dynamic_sampling=2)
    with pytest.raises(InputError, match="overlong_buffer is 13, above max_new_tokens 12; lower it"):
        make_program(overlong_buffer=13)
    with pytest.raises(InputError, match="dynamic_sampling is -1; it must be at least 0"):
        make_program(dynamic_sampling=-1)
