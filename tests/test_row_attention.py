"""What a drafter's queries attend to, against float64: by the kernel for CPUs, and by the compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_inputs import fresh, normal

from specrl_jax.drafters.row_cache import attend
from specrl_jax.models import few_tokens

pytestmark = pytest.mark.ci
ROWS, GROUPS, SHARED, WIDTH = 3, 2, 3, 32


def _inputs(queries, slots, beside, dtype=np.float32):
    """Queries, a cache and what it counts of each row, keys and values beside it, and which each query sees."""
    rng = np.random.default_rng(slots + beside)
    q, *cached = (normal(rng, ROWS, *shape).astype(dtype) for shape in _shapes(queries, slots))
    own = [normal(rng, ROWS, GROUPS, beside, WIDTH).astype(dtype) for _ in range(2)]
    span = np.array([[0, 0], [0, slots], [slots // 3, slots - 1]], np.int32).T
    sees = rng.random((queries, beside)) < 0.5
    sees[:, beside // 2] = True
    return q, *cached, *map(jnp.asarray, span), *own, jnp.asarray(sees)


def _shapes(queries, slots):
    return (queries, GROUPS * SHARED, WIDTH), *[(GROUPS, slots, WIDTH)] * 2


def _by_hand(q, keys, values, start, stop, own_keys, own_values, sees):
    """Every query by itself, in float64."""
    q, keys, values, own_keys, own_values = (np.asarray(x, np.float64) for x in (q, keys, values, own_keys, own_values))
    out = np.zeros(q.shape)
    for row, query, head in np.ndindex(q.shape[:3]):
        slots, own, at = slice(start[row], stop[row]), np.asarray(sees[query]), (row, head // SHARED)
        k = np.concatenate([keys[at][slots], own_keys[at][own]])
        v = np.concatenate([values[at][slots], own_values[at][own]])
        scores = k @ q[row, query, head] / np.sqrt(WIDTH)
        weights = np.exp(scores - scores.max())
        out[row, query, head] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize(("queries", "slots", "beside"), [(1, 8, 1), (1, 264, 7), (4, 40, 32), (3, 776, 5)])
def test_attention_to_a_row_and_beside_it(queries, slots, beside, any_registers):
    inputs = _inputs(queries, slots, beside)
    assert f"row_attention_{any_registers.count}x{any_registers.lanes}" in fresh(attend).lower(*inputs).as_text()
    np.testing.assert_allclose(fresh(attend)(*inputs), _by_hand(*inputs), atol=2e-6)


@pytest.mark.parametrize(("beside", "dtype"), [(40, np.float32), (7, jnp.bfloat16), (7, np.float32)])
def test_the_compiler_does_the_rest(beside, dtype, monkeypatch):
    """More beside a row than a word has bits, other numbers than float32, and where no kernel can be written."""
    if beside == 7 and dtype == np.float32:
        monkeypatch.setattr(few_tokens, "_can_be_written", lambda: False)
    inputs = _inputs(2, 40, beside, dtype)
    assert "row_attention" not in fresh(attend).lower(*inputs).as_text()
    np.testing.assert_allclose(
        fresh(attend)(*inputs).astype(np.float32), _by_hand(*inputs), atol=2e-6 if dtype == np.float32 else 0.03
    )


@pytest.mark.parametrize("change", ["start", "stop", "sees"])
def test_one_key_too_many_is_noticed(change, any_registers):
    """A positive control: it changes the output by far more than the tolerance."""
    q, keys, values, start, stop, *own, sees = _inputs(1, 40, 7)
    right = fresh(attend)(q, keys, values, start, stop, *own, sees)
    start, stop = start - int(change == "start"), stop - int(change == "stop")
    sees = sees.at[0, 0].set(~sees[0, 0]) if change == "sees" else sees
    wrong = fresh(attend)(q, keys, values, start, stop, *own, sees)
    assert np.abs(np.asarray(right - wrong))[2].max() > 1e-3


def test_what_lies_beyond_a_row_is_not_read(any_registers):
    """Not a number in all slots that do not count, and beside the row in those that no query sees."""
    q, keys, values, start, stop, own_keys, own_values, sees = _inputs(1, 40, 7)
    slot = np.arange(40)[None, None, :, None]
    outside = (slot < np.asarray(start)[:, None, None, None]) | (slot >= np.asarray(stop)[:, None, None, None])
    keys = jnp.where(outside, jnp.nan, keys)
    spoilt = jnp.where(sees[0][None, None, :, None], own_keys, jnp.nan)
    out = fresh(attend)(q, keys, values, start, stop, spoilt, own_values, sees)
    wanted = fresh(attend)(q, jnp.nan_to_num(keys), values, start, stop, own_keys, own_values, sees)
    np.testing.assert_array_equal(out, wanted)


def test_it_has_the_gradient_of_the_compilers(monkeypatch):
    inputs = _inputs(2, 40, 7)

    def gradient(q, keys):
        return jax.grad(lambda q, k: jnp.sum(attend(q, k, *inputs[2:]) ** 2), (0, 1))(q, keys)

    ours = fresh(gradient)(*inputs[:2])
    monkeypatch.setattr(few_tokens, "_can_be_written", lambda: False)
    for mine, theirs in zip(ours, fresh(gradient)(*inputs[:2]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
