"""One batch cut up in every way there is gives one loss and one gradient: padded to the longest, sorted into
microbatches of a few widths, and in another order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_grpo
from jax.sharding import PartitionSpec as P
from test_grpo import first_state
from tiny import PLAIN

from specrl_jax.parallel.sharding import over_mesh
from specrl_jax.rl.grpo import Minibatch
from specrl_jax.rl.losses import LossConfig
from specrl_jax.rl.microbatches import MicrobatchConfig, geometric_widths
from specrl_jax.rollout.trajectory import Sequences

pytestmark = pytest.mark.ci
BATCH, WIDTH = 32, 48
PADDED = MicrobatchConfig(BATCH, (1.0,))
WAYS = {
    "padded, in parts": MicrobatchConfig(4, (1.0,)),
    "sorted": MicrobatchConfig(4, geometric_widths(0.2, 10)),
    "one by one": MicrobatchConfig(1, geometric_widths(0.2, 6)),
}


def off_policy():
    """Sequences of any length, with old, behaviour and reference log-probs that are not the policy's."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, WIDTH + 1, BATCH).astype(np.int32)
    slot = np.arange(WIDTH)[None]
    mask = (slot >= rng.integers(2, 5, (BATCH, 1))) & (slot < lengths[:, None])
    tokens = np.where(slot < lengths[:, None], rng.integers(0, test_grpo.VOCAB, (BATCH, WIDTH)), 0).astype(np.int32)
    old, behaviour, reference = (np.where(mask, rng.normal(-3.0, 0.5, mask.shape), 0.0) for _ in range(3))
    thresholds = np.full(mask.shape, -np.inf)
    arrays = [jnp.asarray(x, jnp.float32) for x in (old, thresholds, behaviour)]
    sequences = Sequences(jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(mask), *arrays)
    counted = jnp.asarray(rng.random(BATCH) < 0.8)
    advantages = jnp.asarray(rng.normal(size=BATCH), jnp.float32)
    return Minibatch(sequences, counted, advantages, jnp.asarray(reference, jnp.float32))


@functools.lru_cache
def loss_and_gradient(config, aggregation):
    """Of a minibatch, by the update's own sum over microbatches."""
    loss = LossConfig(clip_high=0.28, kl_coef=0.1, importance_cap=2.0, aggregation=aggregation)
    program = test_grpo.make_program(0, numerics=PLAIN, updates=1, loss=loss, microbatch=config)
    mesh, step = program.mesh, program.step
    sums = over_mesh(mesh, step._summed_gradients, (P(), P(), P(), P()), (P(), P(), P()))
    params = first_state(program).params

    @jax.jit
    def run(params, whole):
        gradients, metrics, _ = sums(params, whole, None, jnp.int32(0))
        return metrics["loss"], gradients

    return lambda whole: run(params, whole)


def apart(ours, theirs):
    """Relative difference of losses, and the largest of gradient leaves."""
    (loss, gradients), (other, others) = jax.device_get((ours, theirs))
    leaves = zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True)
    worst = max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in leaves)
    return abs(float(loss - other)) / abs(float(other)), float(worst)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_one_loss_and_one_gradient(way, aggregation):
    whole = off_policy()
    expected = loss_and_gradient(PADDED, aggregation)(whole)
    order = np.random.default_rng(1).permutation(BATCH)
    for batch in (whole, jax.tree.map(lambda x: x[order], whole)):
        loss, gradient = apart(loss_and_gradient(WAYS[way], aggregation)(batch), expected)
        assert loss < 1e-6
        assert gradient < 1e-5


def test_a_sequence_left_out_is_noticed():
    """A positive control: without its shortest response the loss is another."""
    whole = off_policy()
    counted = np.asarray(whole.counted)
    lengths = np.where(counted, np.asarray(whole.sequences.lengths), WIDTH + 1)
    without = dataclasses.replace(whole, counted=jnp.asarray(counted).at[int(lengths.argmin())].set(False))
    run = loss_and_gradient(WAYS["sorted"], "token")
    assert apart(run(without), run(whole))[0] > 2e-5
