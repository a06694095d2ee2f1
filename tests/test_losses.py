"""The policy loss against float64 NumPy written token by token."""

import functools
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from specrl_jax.errors import InputError
from specrl_jax.rl.losses import LossConfig, Mean, k3, loss_denominator, masked_mean, policy_loss, token_mult_prob_error

pytestmark = pytest.mark.ci

LENGTHS = (5, 7, 1, 3, 0, 6)
WIDTH = 7
WIDE = LossConfig(clip_low=0.2, clip_high=0.28)


def make_batch(seed=0, spread=0.4):
    rng = np.random.default_rng(seed)
    shape = (len(LENGTHS), WIDTH)
    old = rng.normal(-1.5, 0.5, shape)
    log_probs = old + rng.normal(0.0, spread, shape)
    ref = old + rng.normal(0.0, spread, shape)
    advantages = np.abs(rng.normal(size=len(LENGTHS))) * np.array([1, -1, 1, 0, 1, -1])
    mask = np.arange(WIDTH)[None] < np.array(LENGTHS)[:, None]
    arrays = [x.astype(np.float32) for x in (log_probs, old, advantages, ref)]
    return (*arrays[:3], mask, arrays[3])


def reference_loss(log_probs, old, advantages, mask, config, ref):
    """PPO's clipped objective, k3 and both aggregations as the papers print them; also the blocked tokens."""
    clipped = 0
    sequence_sums, token_total = [], 0
    for i in range(mask.shape[0]):
        terms = []
        for t in range(mask.shape[1]):
            if not mask[i, t]:
                continue
            a, lp, lo, lr = (float(x) for x in (advantages[i], log_probs[i, t], old[i, t], ref[i, t]))
            ratio = math.exp(lp - lo)
            bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            clipped += bounded * a < ratio * a
            kl = math.exp(lr - lp) - (lr - lp) - 1
            terms.append(-min(ratio * a, bounded * a) + config.kl_coef * kl)
        token_total += len(terms)
        if terms:
            sequence_sums.append((sum(terms), len(terms)))
    if config.aggregation == "token":
        return sum(s for s, _ in sequence_sums) / token_total, clipped
    return sum(s / n for s, n in sequence_sums) / len(sequence_sums), clipped


def reference_gradient(log_probs, old, advantages, mask, config, ref, step=1e-6):
    """Central differences in float64."""
    gradient = np.zeros(log_probs.shape)
    wide = log_probs.astype(np.float64)
    for index in np.ndindex(*log_probs.shape):
        up, down = wide.copy(), wide.copy()
        up[index] += step
        down[index] -= step
        args = (old, advantages, mask, config, ref)
        gradient[index] = (reference_loss(up, *args)[0] - reference_loss(down, *args)[0]) / (2 * step)
    return gradient


@functools.partial(jax.jit, static_argnames="config")
def loss_and_grad(log_probs, old, advantages, mask, ref, config, denominator):
    return jax.value_and_grad(
        lambda lp: policy_loss(lp, old, advantages, mask, config, ref_log_probs=ref, denominator=denominator),
        has_aux=True,
    )(log_probs)


def run(batch, config, denominator=None):
    return loss_and_grad(*(jnp.asarray(x) for x in batch), config, denominator)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("clip_high", [0.2, 0.28])
def test_matches_numpy(aggregation, kl_coef, clip_high):
    config = LossConfig(clip_high=clip_high, kl_coef=kl_coef, aggregation=aggregation)
    batch = make_batch()
    (loss, metrics), gradient = run(batch, config)
    log_probs, old, advantages, mask, ref = batch
    expected, clipped = reference_loss(log_probs, old, advantages, mask, config, ref)
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    np.testing.assert_allclose(
        gradient, reference_gradient(log_probs, old, advantages, mask, config, ref), atol=2e-7, rtol=2e-5
    )
    assert 0 < clipped < mask.sum()
    assert float(metrics["clip_fraction"].total) == clipped
    assert float(metrics["clip_fraction"].count) == mask.sum()
    delta = (log_probs.astype(np.float64) - old)[mask]
    np.testing.assert_allclose(metrics["ratio"].value, np.mean(np.exp(delta)), rtol=1e-6)
    np.testing.assert_allclose(metrics["token_mult_prob_error"].value, np.mean(np.exp(np.abs(delta))), rtol=1e-6)
    d = (ref.astype(np.float64) - log_probs)[mask]
    np.testing.assert_allclose(metrics["kl"].value, np.mean(np.exp(d) - d - 1), rtol=1e-6)
    assert float(metrics["excluded_tokens"].total) == 0.0


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("sizes", [(1,) * 6, (3, 3), (2, 1, 3)])
def test_microbatches_add_up(aggregation, sizes):
    config = LossConfig(kl_coef=0.1, aggregation=aggregation)
    batch = make_batch(seed=1)
    (loss, metrics), gradient = run(batch, config)
    ends = np.cumsum(sizes)
    parts = [tuple(x[e - n : e] for x in batch) for n, e in zip(sizes, ends, strict=True)]
    denominator = sum(loss_denominator(jnp.asarray(part[3]), config) for part in parts)
    outputs = [run(part, config, denominator=denominator) for part in parts]
    log_probs, old, advantages, mask, ref = batch
    np.testing.assert_allclose(loss, reference_loss(log_probs, old, advantages, mask, config, ref)[0], rtol=2e-6)
    np.testing.assert_allclose(sum(out[0][0] for out in outputs), loss, rtol=2e-6)
    np.testing.assert_allclose(np.concatenate([out[1] for out in outputs]), gradient, rtol=1e-6, atol=1e-9)
    summed = jax.tree.map(lambda *x: sum(x), *[out[0][1] for out in outputs])
    for name, mean in metrics.items():
        np.testing.assert_allclose(summed[name].value, mean.value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_shards_add_up_under_psum(aggregation):
    config = LossConfig(aggregation=aggregation)
    batch = make_batch(seed=2)
    log_probs, old, advantages, mask, ref = batch
    expected, _ = reference_loss(log_probs, old, advantages, mask, config, ref)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec,) * 4, out_specs=jax.sharding.PartitionSpec())
    def sharded(log_probs, old, advantages, mask):
        denominator = jax.lax.psum(loss_denominator(mask, config), "data")
        part, _ = policy_loss(log_probs, old, advantages, mask, config, denominator=denominator)
        return jax.lax.psum(part, "data")

    np.testing.assert_allclose(sharded(*(jnp.asarray(x) for x in batch[:4])), expected, rtol=2e-6)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_on_policy_gradient_is_the_plain_policy_gradient(aggregation):
    log_probs, _, advantages, mask, _ = make_batch(seed=3)
    config = LossConfig(aggregation=aggregation)
    (_, metrics), gradient = run((log_probs, log_probs, advantages, mask, log_probs), config)
    lengths = mask.sum(axis=1, keepdims=True)
    weights = 1 / mask.sum() if aggregation == "token" else 1 / (np.maximum(lengths, 1) * (lengths > 0).sum())
    np.testing.assert_allclose(gradient, -advantages[:, None] * mask * weights, rtol=1e-6)
    assert float(metrics["clip_fraction"].value) == 0.0
    assert float(metrics["ratio"].value) == 1.0
    assert float(metrics["token_mult_prob_error"].value) == 1.0


# ratio, advantage, does the clip (0.2 / 0.28) block the gradient?
CLIP_CASES = [
    (1.27, 1.0, False),
    (1.29, 1.0, True),
    (0.5, 1.0, False),
    (1.29, -1.0, False),
    (0.81, -1.0, False),
    (0.79, -1.0, True),
    (3.0, 0.0, False),
    (0.3, 0.0, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "blocked"), CLIP_CASES)
def test_clip_blocks_only_the_side_that_would_gain(ratio, advantage, blocked):
    log_prob = np.full((1, 1), math.log(ratio), np.float32)
    zero = np.zeros((1, 1), np.float32)
    mask = np.ones((1, 1), bool)
    (loss, metrics), gradient = run((log_prob, zero, np.float32([advantage]), mask, zero), WIDE)
    assert float(metrics["clip_fraction"].total) == blocked
    np.testing.assert_allclose(loss, -min(advantage * ratio, advantage * np.clip(ratio, 0.8, 1.28)), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.0 if blocked else -advantage * ratio]], rtol=1e-6)


@pytest.mark.parametrize("fill", [np.nan, -np.inf, np.inf, 80.0])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_padding_may_hold_anything(fill, aggregation):
    config = LossConfig(kl_coef=0.1, aggregation=aggregation)
    log_probs, old, advantages, mask, ref = make_batch(seed=4)
    clean = run((log_probs, old, advantages, mask, ref), config)
    dirty = run(
        (*(np.where(mask, x, fill) for x in (log_probs, old)), advantages, mask, np.where(mask, ref, fill)), config
    )
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert np.all(np.asarray(dirty[1])[~mask] == 0.0)


@pytest.mark.parametrize("which", ["log_probs", "old", "both", "ref"])
def test_minus_infinity_has_no_gradient_and_is_counted(which):
    config = LossConfig(kl_coef=0.1)
    log_probs, old, advantages, mask, ref = (x.copy() for x in make_batch(seed=5))
    if which in ("log_probs", "both"):
        log_probs[1, 2] = -np.inf
    if which in ("old", "both"):
        old[1, 2] = -np.inf
    if which == "ref":
        ref[1, 2] = -np.inf
    (loss, metrics), gradient = run((log_probs, old, advantages, mask, ref), config)
    assert np.isfinite(loss)
    assert np.all(np.isfinite(gradient))
    assert all(np.isfinite(mean.value) for mean in metrics.values())
    assert float(metrics["excluded_tokens"].total) == (which != "ref")
    if which != "ref":
        assert float(gradient[1, 2]) == 0.0
    assert float(gradient[1, 1]) != 0.0


def test_minus_infinity_through_log_softmax():
    """Log-probs of masked-out logits: the gradient with respect to the logits stays finite."""
    logits = jnp.float32([[[0.3, -jnp.inf, 0.1], [0.2, 0.4, -jnp.inf]]])
    tokens = jnp.int32([[0, 2]])

    def loss(x):
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(x), tokens[..., None], axis=-1)[..., 0]
        old = jnp.float32([[-0.6, -0.7]])
        return policy_loss(log_probs, old, jnp.float32([1.0]), jnp.ones((1, 2), bool), WIDE)[0]

    gradient = np.asarray(jax.grad(loss)(logits))
    assert np.all(np.isfinite(gradient))
    assert np.any(gradient[0, 0] != 0.0)
    assert np.all(gradient[0, 1] == 0.0)


def test_broken_policy_is_not_hidden():
    log_probs, old, advantages, mask, ref = make_batch(seed=6)
    log_probs[0, 0] = np.nan
    (loss, _), _ = run((log_probs, old, advantages, mask, ref), LossConfig())
    assert np.isnan(loss)


def test_huge_ratios_stay_finite():
    log_probs, old, advantages, mask, ref = make_batch(seed=7)
    (loss, metrics), gradient = run((log_probs + 200, old, advantages, mask, ref), LossConfig(kl_coef=0.1))
    assert np.isfinite(loss)
    assert np.all(np.isfinite(gradient))
    assert np.isfinite(metrics["ratio"].value)


def test_k3_value_and_gradient():
    d = np.array([-30.0, -20.0, -2.0, -1e-3, 0.0, 1e-3, 0.5, 3.0, 30.0])
    clamped = np.clip(d, -20, 20)
    np.testing.assert_allclose(k3(jnp.float32(d)), np.expm1(clamped) - clamped, rtol=1e-6, atol=1e-9)
    # With respect to the policy's log-prob: 1 - exp(d), and 0 where d is clamped.
    gradient = jax.vmap(jax.grad(lambda log_prob, ref: k3(ref - log_prob)))(jnp.zeros(9), jnp.float32(d))
    expected = np.where(np.abs(d) > 20, 0.0, -np.expm1(d))
    inside = np.abs(d) != 20.0
    np.testing.assert_allclose(np.asarray(gradient)[inside], expected[inside], rtol=1e-5, atol=1e-7)


def test_k3_estimates_the_divergence():
    rng = np.random.default_rng(8)
    p, q = (np.exp(x) / np.exp(x).sum() for x in rng.normal(size=(2, 5)))
    estimate = np.sum(p * np.asarray(k3(jnp.asarray(np.log(q / p), jnp.float32))))
    np.testing.assert_allclose(estimate, np.sum(p * np.log(p / q)), rtol=1e-5)


def test_token_mult_prob_error_ignores_padding():
    mask = jnp.asarray([[True, True, False]])
    mean = token_mult_prob_error(jnp.float32([[0.0, -1.0, jnp.nan]]), jnp.float32([[0.1, -1.1, 0.0]]), mask)
    np.testing.assert_allclose(mean.value, math.exp(0.1), rtol=1e-6)
    assert float(mean.count) == 2.0


def test_empty_batch_is_zero():
    batch = make_batch(seed=9)
    (loss, metrics), gradient = run((*batch[:3], np.zeros_like(batch[3]), batch[4]), LossConfig(kl_coef=0.1))
    assert float(loss) == 0.0
    assert np.all(np.asarray(gradient) == 0.0)
    assert all(float(mean.value) == 0.0 for mean in metrics.values())


def test_means_add():
    a = masked_mean(jnp.float32([[1.0, 2.0]]), jnp.ones((1, 2), bool))
    b = masked_mean(jnp.float32([[6.0, 9.0]]), jnp.asarray([[True, False]]))
    both = jax.tree.map(jnp.add, a, b)
    assert isinstance(both, Mean)
    assert float(both.value) == 3.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"clip_low": 0.0}, "clip_low is 0.0"),
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"clip_high": -0.1}, "clip_high is -0.1"),
        ({"clip_high": float("nan")}, "clip_high is nan"),
        ({"kl_coef": -1.0}, "kl_coef is -1.0"),
        ({"aggregation": "batch"}, "aggregation is 'batch'"),
        ({"importance_cap": -1.0}, "importance_cap is -1.0"),
        ({"importance_cap": float("inf")}, "importance_cap is inf"),
    ],
)
def test_config_out_of_range(fields, words, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it would refuse the unknown word first
    with pytest.raises(InputError, match=words):
        LossConfig(**fields)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_importance_weights_scale_the_surrogate_of_each_token(aggregation):
    """min(p_old / p_behaviour, cap), float64; the KL is not weighted, and no gradient flows through the weight."""
    config = LossConfig(kl_coef=0.1, aggregation=aggregation, importance_cap=1.3)
    without, with_kl = (LossConfig(kl_coef=coef, aggregation=aggregation) for coef in (0.0, 0.1))
    log_probs, old, advantages, mask, ref = make_batch()
    behaviour = (old + np.random.default_rng(9).normal(0.0, 0.4, old.shape)).astype(np.float32)
    weights = np.minimum(np.exp(old.astype(np.float64) - behaviour), 1.3)
    assert (weights[mask] == 1.3).any()
    assert (weights[mask] < 1.3).any()
    arrays = [jnp.asarray(x) for x in (old, advantages, mask)]

    def loss(lp):
        return policy_loss(lp, *arrays, config, jnp.asarray(ref), None, jnp.asarray(behaviour))

    (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.asarray(log_probs))
    expected, slope = 0.0, np.zeros(mask.shape)
    for index in zip(*np.nonzero(mask), strict=True):
        # One token alone: its share of the loss without KL, times its weight; and the KL as it was.
        alone = np.zeros_like(mask)
        alone[index] = True
        sequences, tokens = mask.any(1).sum(), mask.sum()
        share = 1 / tokens if aggregation == "token" else 1 / (sequences * mask[index[0]].sum())
        args = (old, advantages, alone)
        surrogate, _ = reference_loss(log_probs, *args, without, ref)
        kl = reference_loss(log_probs, *args, with_kl, ref)[0] - surrogate
        expected += share * (weights[index] * surrogate + kl)
        pulls = [reference_gradient(log_probs, *args, c, ref)[index] for c in (without, with_kl)]
        slope[index] = share * (weights[index] * pulls[0] + pulls[1] - pulls[0])
    np.testing.assert_allclose(value, expected, rtol=5e-6)
    np.testing.assert_allclose(gradient, slope, atol=5e-7, rtol=5e-5)
    np.testing.assert_allclose(metrics["importance_weight"].value, weights[mask].mean(), rtol=1e-6)


def test_a_behaviour_law_needs_a_cap():
    log_probs, old, advantages, mask, _ = (jnp.asarray(x) for x in make_batch())
    with pytest.raises(ValueError, match="need an importance_cap"):
        policy_loss(log_probs, old, advantages, mask, LossConfig(), None, None, old)


def test_kl_needs_a_reference():
    log_probs, old, advantages, mask, _ = (jnp.asarray(x) for x in make_batch())
    with pytest.raises(ValueError, match="needs ref_log_probs"):
        policy_loss(log_probs, old, advantages, mask, LossConfig(kl_coef=0.1))
