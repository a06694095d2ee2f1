"""What a drafter's queries attend to, against float64: by the kernel for CPUs, and by the compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_inputs import fresh, normal

from specrl_jax.drafters.row_cache import attend
from specrl_jax.models import few_tokens

pytestmark = pytest.mark.ci
ROWS, GROUPS, SHARED = 3, 2, 3


def _inputs(queries, slots, beside, dtype=np.float32, width=32):
    """Queries, a cache and what it counts of each row, keys and values beside it, and which each query sees."""
    rng = np.random.default_rng(slots + beside)
    q = normal(rng, ROWS, queries, GROUPS * SHARED, width).astype(dtype)
    cached = [normal(rng, ROWS, GROUPS, slots, width).astype(dtype) for _ in range(2)]
    own = [normal(rng, ROWS, GROUPS, beside, width).astype(dtype) for _ in range(2)]
    span = np.array([[0, 0], [0, slots], [slots // 3, slots - 1]], np.int32).T
    sees = rng.random((queries, beside)) < 0.5
    sees[:, beside // 2] = True
    return q, *cached, *map(jnp.asarray, span), *own, jnp.asarray(sees)


def _by_hand(q, keys, values, start, stop, own_keys, own_values, sees):
    """Every query by itself, in float64."""
    q, keys, values, own_keys, own_values = (np.asarray(x, np.float64) for x in (q, keys, values, own_keys, own_values))
    out = np.zeros(q.shape)
    for row, query, head in np.ndindex(q.shape[:3]):
        slots, own, at = slice(max(0, start[row]), max(0, stop[row])), np.asarray(sees[query]), (row, head // SHARED)
        k = np.concatenate([keys[at][slots], own_keys[at][own]])
        v = np.concatenate([values[at][slots], own_values[at][own]])
        scores = k @ q[row, query, head] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[row, query, head] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize(("queries", "slots", "beside"), [(1, 8, 1), (1, 264, 7), (4, 40, 32), (3, 776, 5)])
def test_attention_to_a_row_and_beside_it(queries, slots, beside, any_registers):
    inputs = _inputs(queries, slots, beside)
    assert f"row_attention_{any_registers.count}x{any_registers.lanes}" in fresh(attend).lower(*inputs).as_text()
    np.testing.assert_allclose(fresh(attend)(*inputs), _by_hand(*inputs), atol=2e-6)


@pytest.mark.parametrize("width", [16, 48, 80])
def test_heads_of_any_width(width, any_registers):
    """Of less than a tile, and of a tile and a part of one."""
    inputs = _inputs(2, 40, 5, width=width)
    assert "row_attention" in fresh(attend).lower(*inputs).as_text()
    np.testing.assert_allclose(fresh(attend)(*inputs), _by_hand(*inputs), atol=2e-6)


def test_rows_that_end_where_there_is_no_slot(any_registers):
    """Before the first, as of an empty row; beyond the last; and before they start."""
    q, keys, values, *_, own_keys, own_values, sees = _inputs(2, 40, 7)
    start, stop = jnp.asarray([0, 3, 9], jnp.int32), jnp.asarray([-1, 50, 8], jnp.int32)
    inputs = q, keys, values, start, stop, own_keys, own_values, sees
    np.testing.assert_allclose(fresh(attend)(*inputs), _by_hand(*inputs), atol=2e-6)


@pytest.mark.parametrize(
    ("beside", "dtype", "width"), [(40, np.float32, 32), (7, jnp.bfloat16, 32), (7, np.float32, 30)]
)
def test_the_compiler_does_the_rest(beside, dtype, width):
    """More beside a row than a word has bits, other numbers than float32, and heads that fill no registers."""
    inputs = _inputs(2, 40, beside, dtype, width)
    assert "row_attention" not in fresh(attend).lower(*inputs).as_text()
    found = fresh(attend)(*inputs).astype(np.float32)
    np.testing.assert_allclose(found, _by_hand(*inputs), atol=2e-6 if dtype == np.float32 else 0.03)


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
    """Not a number in all slots that do not count, and in keys beside the row that no query sees."""
    q, keys, values, start, stop, own_keys, own_values, sees = _inputs(1, 40, 7)
    slot = np.arange(40)[None, None, :, None]
    outside = (slot < np.asarray(start)[:, None, None, None]) | (slot >= np.asarray(stop)[:, None, None, None])
    wanted = fresh(attend)(q, keys, values, start, stop, own_keys, own_values, sees)
    keys, values = (jnp.where(outside, jnp.nan, x) for x in (keys, values))
    own_keys = jnp.where(sees[0][None, None, :, None], own_keys, jnp.nan)
    out = fresh(attend)(q, keys, values, start, stop, own_keys, own_values, sees)
    np.testing.assert_array_equal(out, wanted)


def test_bits_of_a_row_and_a_query_do_not_depend_on_the_others(any_registers):
    q, keys, values, start, stop, own_keys, own_values, sees = _inputs(3, 300, 7)
    together = fresh(attend)(q, keys, values, start, stop, own_keys, own_values, sees)
    for row, query in np.ndindex(ROWS, 3):
        own, some = slice(row, row + 1), slice(query, query + 1)
        cached = keys[own], values[own], start[own], stop[own], own_keys[own], own_values[own]
        alone = fresh(attend)(q[own, some], *cached, sees[some])
        np.testing.assert_array_equal(alone, together[own, some])


def test_it_has_the_gradient_of_the_compilers(monkeypatch):
    inputs = _inputs(2, 40, 7)

    def gradient(q, keys):
        return jax.grad(lambda q, k: jnp.sum(attend(q, k, *inputs[2:]) ** 2), (0, 1))(q, keys)

    assert "row_attention" in fresh(gradient).lower(*inputs[:2]).as_text()
    ours = fresh(gradient)(*inputs[:2])
    monkeypatch.setattr(few_tokens, "_can_be_written", lambda: False)
    assert "row_attention" not in fresh(gradient).lower(*inputs[:2]).as_text()
    for mine, theirs in zip(ours, fresh(gradient)(*inputs[:2]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
