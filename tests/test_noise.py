"""Gumbel noise: exact bits, their distribution along every word of the key, and the law of the argmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_noise
import pytest
from scipy import stats

from specrl_jax.models.backend import made_for
from specrl_jax.rollout.noise import best, gumbel_noise, random_bits, sequence_keys
from specrl_jax.rollout.sampling import SamplingLaw

pytestmark = pytest.mark.ci
# Every test has one fixed seed. Good noise stays above the first, a planted fault falls below the second.
PLAUSIBLE, ABSURD = 1e-4, 1e-12


def keys_for(row_ids, samples, seed=0, purpose="rollout", update=0, attempt=0):
    rows = jnp.asarray(row_ids, jnp.uint32)
    return sequence_keys(
        seed, purpose, update, rows, jnp.broadcast_to(jnp.asarray(samples, jnp.int32), rows.shape), attempt
    )


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_the_reference_gives_the_known_answers_of_threefry(key, counter, expected):
    assert numpy_noise.threefry(key, counter) == expected


@pytest.mark.parametrize(
    ("seed", "purpose", "update", "row_id", "sample", "attempt"),
    [
        (0, "rollout", 0, 0, 0, 0),
        (7, "rollout", 3, 11, 2, 0),
        (7, "evaluation", 3, 11, 2, 0),
        (7, "draft_data", 3, 11, 2, 1),
        (123456789, "rollout", 10_000, 2**32 - 1, 15, 0),
    ],
)
def test_bits_are_those_of_the_numpy_reference(seed, purpose, update, row_id, sample, attempt):
    key = numpy_noise.sequence_key(seed, purpose, update, row_id, sample, attempt)
    ours = keys_for([row_id], sample, seed, purpose, update, attempt)
    np.testing.assert_array_equal(ours, [key])
    traced = jax.jit(lambda s, u: keys_for([row_id], sample, s, purpose, u, attempt))(
        jnp.int32(seed), jnp.int32(update)
    )
    np.testing.assert_array_equal(traced, ours)
    positions, tokens = [0, 1, 2, 77, 16_383], [0, 1, 19, 151_935]
    expected = [[numpy_noise.bits(key, position, token) for token in tokens] for position in positions]
    bits = random_bits(jnp.repeat(ours, 5, axis=0), jnp.array(positions, jnp.int32), jnp.array(tokens, jnp.int32))
    np.testing.assert_array_equal(bits, np.array(expected, np.uint32))


def test_noise_does_not_depend_on_batch_order_or_vocabulary(compiled_as_users_do):
    rng = np.random.RandomState(0)
    keys = np.asarray(keys_for(np.arange(40), 0))
    positions = rng.randint(0, 500, 40).astype(np.int32)
    tokens = np.arange(97, dtype=np.int32)
    noise = jax.jit(gumbel_noise)
    whole = np.asarray(noise(keys, positions, tokens))
    order, subset = rng.permutation(40), np.sort(rng.permutation(97)[:31]).astype(np.int32)
    np.testing.assert_array_equal(noise(keys[order], positions[order], tokens), whole[order])
    np.testing.assert_array_equal(noise(keys[:1], positions[:1], tokens), whole[:1])
    np.testing.assert_array_equal(noise(keys, positions, subset), whole[:, subset])
    np.testing.assert_array_equal(noise(keys[7:10], positions[7:10], subset[:5]), whole[7:10, subset[:5]])
    if compiled_as_users_do:
        np.testing.assert_array_equal(gumbel_noise(*map(jnp.asarray, (keys, positions, tokens))), whole)


def test_values_are_minus_log_minus_log():
    keys, ids = keys_for(np.arange(512), 0), jnp.arange(1024, dtype=jnp.int32)
    positions = jnp.zeros((512,), jnp.int32)
    u = numpy_noise.uniform(np.asarray(random_bits(keys, positions, ids)))
    ours, exact = np.asarray(gumbel_noise(keys, positions, ids)), -np.log(-np.log1p(-u))
    assert ours.dtype == np.float32
    # Above the median, where draws decide an argmax, float32 is all that is lost.
    upper = u < 0.5
    np.testing.assert_allclose(ours[upper], exact[upper], rtol=1e-6, atol=1e-6)
    # Below it, the spacing of float32 near u = 1 is lost as well.
    lower = u < 1 - 2.0**-20
    np.testing.assert_allclose(ours[lower], exact[lower], rtol=0, atol=0.01)
    rounded = np.minimum(
        (np.asarray(random_bits(keys, positions, ids)).astype(np.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24
    )
    as_rounded = -np.log(-np.log1p(-rounded.astype(np.float64)))
    np.testing.assert_allclose(ours, as_rounded, rtol=2e-6, atol=2e-6)
    assert np.isfinite(ours).all()
    assert ours.min() > -2.9
    assert stats.kstest(exact.ravel(), "gumbel_r").pvalue > PLAUSIBLE
    assert stats.kstest(ours.ravel().astype(np.float64), "gumbel_r").pvalue > PLAUSIBLE


@pytest.mark.parametrize("bits", [0, 1, 2**31, 2**32 - 1])
def test_extreme_bits_give_finite_noise(bits, monkeypatch):
    monkeypatch.setattr("specrl_jax.rollout.noise.random_bits", lambda *_: jnp.full((1, 1), bits, jnp.uint32))
    value = float(gumbel_noise(keys_for([0], 0), jnp.zeros((1,), jnp.int32), jnp.zeros((1,), jnp.int32))[0, 0])
    assert value == pytest.approx(-np.log(-np.log1p(-min((bits + 0.5) / 2**32, 1 - 2.0**-24))), abs=2e-6)


COUNT = 2**16


@functools.lru_cache
def bits_along(axis):
    """Bits of `COUNT` neighbours along one word of the key, all else equal."""
    numbers, zeros = jnp.arange(COUNT, dtype=jnp.int32), jnp.zeros((COUNT,), jnp.int32)
    one = jnp.zeros((1,), jnp.int32)
    if axis == "token":
        return np.asarray(random_bits(keys_for([0], 0), one, numbers))[0]
    keys = {
        "position": lambda: jnp.broadcast_to(keys_for([0], 0), (COUNT, 2)),
        "row": lambda: keys_for(numbers, 0),
        "sample": lambda: keys_for(zeros, numbers),
        "seed": lambda: jax.vmap(lambda s: keys_for([0], 0, seed=s)[0])(numbers),
        "update": lambda: jax.vmap(lambda u: keys_for([0], 0, update=u)[0])(numbers),
    }[axis]()
    return np.asarray(random_bits(keys, numbers if axis == "position" else zeros, one))[:, 0]


def uniformity(cells):
    """p-value of the chi-square test that all values of a byte are equally likely."""
    return stats.chisquare(np.bincount(cells, minlength=256)).pvalue


def independence(x, y):
    """p-value of the chi-square test that two variables of 16 cells are independent."""
    table = np.bincount(x.astype(np.int64) * 16 + y, minlength=256).reshape(16, 16)
    table = table[table.any(axis=1)][:, table.any(axis=0)]
    return stats.chi2_contingency(table).pvalue


def bit_correlation(x, y):
    """p-value of the largest correlation between any bit of `x` and any of `y` (Bonferroni)."""
    signs_x, signs_y = (((z[:, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(np.float32) * 2 - 1 for z in (x, y))
    largest = np.abs(signs_x.T @ signs_y).max() / len(x) ** 0.5
    return min(1.0, 1024 * 2 * stats.norm.sf(largest))


def pair_p_value(x, y):
    """Least p-value of several tests that two arrays of bits are unrelated."""
    top, low = (lambda z: z >> np.uint32(28)), (lambda z: z & np.uint32(15))
    tests = [independence(a(x), b(y)) for a in (top, low) for b in (top, low)]
    differences = [
        uniformity(((x - y) >> np.uint32(24)).astype(np.int64)),
        uniformity(((x ^ y) & np.uint32(255)).astype(np.int64)),
    ]
    return min(*tests, *differences, bit_correlation(x, y))


@pytest.mark.parametrize("axis", ["token", "position", "row", "sample", "seed", "update"])
def test_bits_are_uniform_and_neighbours_independent(axis):
    bits = bits_along(axis)
    for shift in (0, 8, 16, 24):
        assert uniformity(((bits >> np.uint32(shift)) & np.uint32(255)).astype(np.int64)) > PLAUSIBLE, shift
    for lag in (1, 2, 16):
        assert pair_p_value(bits[:-lag], bits[lag:]) > PLAUSIBLE, lag


def test_purposes_attempts_and_axes_share_no_noise():
    """The same row under another purpose, attempt or sample, and the same number on another axis."""
    rows, zero, one = np.arange(COUNT), jnp.zeros((COUNT,), jnp.int32), jnp.zeros((1,), jnp.int32)

    def of(**word):
        return np.asarray(random_bits(keys_for(rows, **({"samples": 0} | word)), zero, one))[:, 0]

    base = bits_along("row")
    others = {
        "purpose": of(purpose="evaluation"),
        "purpose 2": of(purpose="draft_data"),
        "attempt": of(attempt=1),
        "sample": of(samples=1),
        "update": of(update=1),
        "seed": of(seed=1),
    }
    axes = {axis: bits_along(axis) for axis in ("token", "position", "sample", "seed", "update")}
    for name, other in (others | axes).items():
        # Element 0 of another axis is the very same draw.
        assert pair_p_value(base[1:], other[1:]) > PLAUSIBLE, name


@pytest.mark.parametrize(("position_step", "token_step"), [(0, 1), (1, 0), (1, 1), (1, -1), (2, 1)])
def test_steps_in_position_and_token_do_not_cancel(position_step, token_step):
    keys, ids = keys_for(np.arange(COUNT), 0), jnp.arange(4, dtype=jnp.int32)

    def at(position, token):
        return np.asarray(random_bits(keys, jnp.full((COUNT,), position, jnp.int32), ids))[:, token]

    assert pair_p_value(at(5, 1), at(5 + position_step, 1 + token_step)) > PLAUSIBLE


def test_the_pair_tests_catch_related_noise():
    bits = bits_along("token")
    for related in (bits, ~bits, bits + np.uint32(0x9E3779B9), bits >> np.uint32(1), bits ^ np.uint32(0xFF)):
        assert pair_p_value(bits, related) < ABSURD
    # A weak counter, without the mixing.
    weak = np.arange(COUNT, dtype=np.uint32) * np.uint32(0x9E3779B9)
    assert pair_p_value(weak[:-1], weak[1:]) < ABSURD


def _zipf(size):
    weights = 1.0 / np.arange(1, size + 1) ** 1.2
    return weights / weights.sum()


LAWS = {
    "uniform": np.full(8, 1 / 8),
    "skewed": np.array([0.9, 0.05, 0.03, 0.01, 0.005, 0.003, 0.0015, 0.0005]),
    "very skewed": np.array([1 - 4.4e-4, 3e-4, 1e-4, 3e-5, 1e-5]),
    "zipf": _zipf(50),
    "binary": np.array([0.5, 0.5]),
}
DRAWS = 2**17


@functools.partial(jax.jit, static_argnums=(0,))
def draw(law, log_p, keys, positions, ids):
    scores = jnp.broadcast_to(log_p, (positions.shape[0], log_p.shape[-1]))
    return best(law.perturbed(scores, keys, positions, ids))[:, 0]


def draw_many(p, positions=None, ids=None, keys=None):
    """Tokens at many positions of one sequence."""
    positions = np.arange(DRAWS) if positions is None else positions
    keys = jnp.broadcast_to(keys_for([3], 1), (DRAWS, 2)) if keys is None else keys
    ids = np.arange(len(p)) if ids is None else ids
    log_p = jnp.asarray(np.log(p), jnp.float32)[None]
    return np.asarray(draw(SamplingLaw(), log_p, keys, jnp.asarray(positions, jnp.int32), jnp.asarray(ids, jnp.int32)))


def law_p_value(tokens, p):
    """p-value of the chi-square test that tokens have law `p`; rare tokens are put together."""
    counts, expected = np.bincount(tokens, minlength=len(p)), p * len(tokens)
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


@pytest.mark.parametrize("name", LAWS)
def test_the_argmax_has_the_law(name):
    assert law_p_value(draw_many(LAWS[name]), LAWS[name]) > PLAUSIBLE


def test_the_argmax_has_the_law_over_rows_and_samples():
    p = LAWS["zipf"]
    rows, samples = np.arange(DRAWS) // 16, np.arange(DRAWS) % 16
    tokens = draw_many(p, positions=np.zeros(DRAWS), keys=keys_for(rows, samples))
    assert law_p_value(tokens, p) > PLAUSIBLE
    # Members of a group are independent.
    pairs = tokens.reshape(-1, 16)
    assert independence(np.minimum(pairs[:, 0], 15), np.minimum(pairs[:, 1], 15)) > PLAUSIBLE


def test_the_law_tests_catch_a_wrong_key():
    p = LAWS["skewed"]
    # One noise for all positions; one noise for all tokens.
    assert law_p_value(draw_many(p, positions=np.zeros(DRAWS)), p) < ABSURD
    assert law_p_value(draw_many(p, ids=np.zeros(len(p))), p) < ABSURD
    # Each draw alone has the law when two positions share their noise; together they have not.
    zipf = LAWS["zipf"]
    shared = draw_many(zipf, positions=np.arange(DRAWS) // 2)
    assert law_p_value(shared[::2], zipf) > PLAUSIBLE
    first, second = (np.minimum(shared[i::2], 15) for i in (0, 1))
    assert independence(first, second) < ABSURD
    proper = draw_many(zipf)
    first, second = (np.minimum(proper[i::2], 15) for i in (0, 1))
    assert independence(first, second) > PLAUSIBLE


@pytest.mark.parametrize("noise", [0.25, 1.0])
def test_shared_noise_accepts_as_often_as_the_coupling_says(noise):
    """P(match) = sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) (Daliri, Musco and Suresh, arXiv 2408.07978)."""
    rng = np.random.RandomState(5)
    logits = rng.randn(30) * 2
    p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, logits + noise * rng.randn(30)))
    # The draft covers part of the vocabulary, with the target's token ids.
    ids = np.sort(rng.permutation(30)[:24])
    q_draft = q[ids] / q[ids].sum()
    drafts = ids[draw_many(q_draft, ids=ids)]
    draws = draw_many(p)
    q_full = np.zeros(30)
    q_full[ids] = q_draft
    ratio = np.maximum(p[None] / p[ids, None], q_full[None] / q_draft[:, None])
    expected = (1 / ratio.sum(1)).sum()
    rate = (drafts == draws).mean()
    assert abs(rate - expected) < 5 * (expected * (1 - expected) / DRAWS) ** 0.5
    # Noise by column instead of token id is no coupling.
    assert (ids[draw_many(q_draft)] == draws).mean() < expected - 0.1


def test_greedy_takes_the_first_largest_and_ignores_the_noise():
    log_p = jnp.asarray([[0.0, 2.0, 2.0, 1.0]], jnp.float32)
    ids, positions = jnp.arange(4, dtype=jnp.int32), jnp.arange(64, dtype=jnp.int32)
    keys = jnp.broadcast_to(keys_for([3], 1), (64, 2))
    np.testing.assert_array_equal(draw(SamplingLaw(0.0), log_p, keys, positions, ids), np.ones(64))


def test_best_is_the_same_whoever_compiles_it():
    """Ties, rows of nothing and narrow types: a GPU takes another way."""
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (64, 33)).astype(np.float32)
    scores[7] = -np.inf
    for dtype in (jnp.float32, jnp.bfloat16):
        with made_for("gpu"):
            found = best(jnp.asarray(scores, dtype))
        np.testing.assert_array_equal(found, best(jnp.asarray(scores, dtype)))
        np.testing.assert_array_equal(found[:, 0], np.argmax(scores, axis=1))
        assert found.dtype == jnp.int32
