"""Cached and packed forwards against the full one; gradients of the invariant forward against the plain one."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import array_sizes

from specrl_jax.models import attention
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import init_params
from specrl_jax.models.policy import TokenBatch, forward, grid_batch, logits, policy_cache, sequence_positions
from specrl_jax.models.presets import PRESETS

pytestmark = pytest.mark.ci
PLAIN, INVARIANT = Numerics("plain"), Numerics("invariant", token_block=8, row_block=2, query_block=4, key_block=16)
BOTH = pytest.mark.parametrize("numerics", [PLAIN, INVARIANT], ids=["plain", "invariant"])
CONFIG = replace(PRESETS["tiny-qwen3"], vocab_size=50, hidden_size=32, intermediate_size=48, head_dim=8)
LENGTHS, NEW = np.array([5, 9, 7, 3], np.int32), np.array([1, 4, 0, 2], np.int32)
TOKENS = np.random.RandomState(0).randint(0, 50, (4, 13)).astype(np.int32)


@functools.lru_cache
def policy():
    return init_params(jax.random.key(3), CONFIG)


@functools.partial(jax.jit, static_argnums=(2,))
def full_hidden(params, tokens, numerics):
    positions = sequence_positions(jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32), tokens.shape[1])
    out = forward(params, CONFIG, grid_batch(tokens, positions), numerics=numerics, boundaries=(0, 2))
    return out.hidden.reshape(*tokens.shape, -1), out.features.reshape(*tokens.shape, -1)


@functools.partial(jax.jit, static_argnums=(1,))
def after_prefill(params, numerics):
    """Four rows prefilled to their own lengths; the padding of the prompts holds other tokens."""
    cache = policy_cache(CONFIG, 4, 20, numerics)
    positions = sequence_positions(jnp.asarray(LENGTHS), 9)
    garbage = jnp.where(positions < 0, 49, jnp.asarray(TOKENS[:, :9]))
    out = forward(params, CONFIG, grid_batch(garbage, positions), numerics=numerics, cache=cache)
    return out.hidden.reshape(4, 9, -1), out.cache.replace(length=jnp.asarray(LENGTHS))


def grid_of_new_tokens():
    steps = np.arange(4)[None]
    positions = np.where(steps < NEW[:, None], LENGTHS[:, None] + steps, -1).astype(np.int32)
    tokens = np.take_along_axis(TOKENS, np.maximum(positions, 0), 1)
    return tokens, positions


def packed_new_tokens(padding):
    tokens, positions = grid_of_new_tokens()
    rows = np.repeat(np.arange(4, dtype=np.int32), 4).reshape(4, 4)
    live = positions >= 0
    fill = {"tokens": 7, "rows": 0, "positions": -1}
    arrays = {"tokens": tokens, "rows": rows, "positions": positions}
    packed = {k: jnp.asarray(np.pad(a[live], (0, padding), constant_values=fill[k])) for k, a in arrays.items()}
    return TokenBatch(**packed, num_rows=4, max_queries=4, is_grid=False)


@BOTH
def test_cached_forward_equals_the_full_one(numerics):
    expected, _ = full_hidden(policy(), jnp.asarray(TOKENS), numerics)
    prefilled, cache = after_prefill(policy(), numerics)
    tokens, positions = grid_of_new_tokens()
    batch = grid_batch(jnp.asarray(tokens), jnp.asarray(positions))
    out = jax.jit(lambda c: forward(policy(), CONFIG, batch, numerics=numerics, cache=c))(cache)
    compare = np.testing.assert_array_equal
    if not numerics.invariant:
        compare = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    for row, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True)):
        compare(prefilled[row, :length], expected[row, :length])
        compare(out.hidden.reshape(4, 4, -1)[row, :new], expected[row, length : length + new])
    np.testing.assert_array_equal(out.cache.length, LENGTHS)


@BOTH
def test_packed_tokens_equal_the_grid(numerics):
    _, cache = after_prefill(policy(), numerics)
    tokens, positions = grid_of_new_tokens()
    grid = grid_batch(jnp.asarray(tokens), jnp.asarray(positions))
    run = jax.jit(lambda batch: forward(policy(), CONFIG, batch, numerics=numerics, cache=cache, boundaries=(1,)))
    a, b = run(grid), run(packed_new_tokens(padding=3))
    live, count = positions.reshape(-1) >= 0, int(NEW.sum())
    tolerance = 0.0 if numerics.invariant else 2e-5
    np.testing.assert_allclose(b.hidden[:count], a.hidden[live], rtol=0, atol=tolerance)
    np.testing.assert_allclose(b.features[:count], a.features[live], rtol=0, atol=tolerance)
    for x, y in zip(jax.tree.leaves(a.cache), jax.tree.leaves(b.cache), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


@BOTH
def test_a_rejected_draft_leaves_no_trace(numerics):
    """Tokens written beyond `length` change nothing; the next forward overwrites them."""
    _, cache = after_prefill(policy(), numerics)
    tokens, positions = (jnp.asarray(x) for x in grid_of_new_tokens())
    run = jax.jit(lambda t, c: forward(policy(), CONFIG, grid_batch(t, positions), numerics=numerics, cache=c))
    clean, rejected = run(tokens, cache), run((tokens + 11) % 50, cache)
    again = run(tokens, rejected.cache)
    for x, y in zip(jax.tree.leaves(clean), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(x, y)


def test_boundaries_are_the_embedding_and_the_last_stream():
    hidden, features = full_hidden(policy(), jnp.asarray(TOKENS), PLAIN)
    np.testing.assert_array_equal(features[..., :32], policy().embed[TOKENS])
    np.testing.assert_array_equal(features[..., 32:], hidden)


def test_impossible_requests_are_refused():
    batch = grid_batch(jnp.zeros((1, 2), jnp.int32), jnp.array([[0, 1]], jnp.int32))
    with pytest.raises(ValueError, match="boundaries"):
        forward(policy(), CONFIG, batch, numerics=PLAIN, boundaries=(3,))
    with pytest.raises(ValueError, match="grid"):
        forward(policy(), CONFIG, packed_new_tokens(0), numerics=PLAIN)


def mean_nll(params, config, tokens, numerics):
    rows, width = tokens.shape
    positions = sequence_positions(jnp.full((rows,), width, jnp.int32), width)
    out = forward(params, config, grid_batch(tokens, positions), numerics=numerics)
    log_probs = jax.nn.log_softmax(logits(params, config, out.hidden, numerics).reshape(rows, width, -1))
    return -jnp.take_along_axis(log_probs[:, :-1], tokens[:, 1:, None], -1).mean()


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen2", "tiny-llama"])
def test_invariant_and_plain_gradients_agree(name):
    config = replace(PRESETS[name], vocab_size=50, hidden_size=32, intermediate_size=48, head_dim=8)
    params = init_params(jax.random.key(5), config)
    gradient = jax.jit(jax.grad(mean_nll), static_argnums=(1, 3))
    plain, invariant = (gradient(params, config, jnp.asarray(TOKENS), n) for n in (PLAIN, INVARIANT))
    for (path, a), b in zip(jax.tree.leaves_with_path(plain), jax.tree.leaves(invariant), strict=True):
        scale = np.abs(a).max()
        # A bias of the keys shifts all scores of a query alike, but for the rotation: its gradient is small.
        assert scale > 1e-7, path
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-5 * scale + 1e-9, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("queries", [1, 5, 16, 30])
def test_long_sequences_attend_in_blocks_of_queries_as_at_once(monkeypatch, queries):
    """Values and gradients, float64, with padding at the end; no block of scores is larger than one of 4 queries."""
    rows, heads, groups, width = 2, 4, 2, 8
    keys = jax.random.split(jax.random.key(0), 4)
    positions = sequence_positions(jnp.asarray([queries, max(1, queries - 3)], jnp.int32), queries)

    def run(q, k, v):  # traced anew by every `both`
        out = attention.attention(q, k, v, positions, Numerics("plain"))
        seen = jnp.where((positions >= 0)[:, :, None, None], out, 0.0)
        return jnp.sum(seen * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)), seen

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        q = jax.random.normal(keys[0], (rows, queries, heads, width), jnp.float64)
        k, v = (jax.random.normal(key, (rows, groups, queries, width), jnp.float64) for key in keys[1:3])

        def both():
            return jax.value_and_grad(lambda *inputs: run(*inputs), argnums=(0, 1, 2), has_aux=True)

        expected = jax.jit(both())(q, k, v)
        monkeypatch.setattr(attention, "_AT_ONCE", 4)
        monkeypatch.setattr(attention, "_QUERIES", 4)
        ours = jax.jit(both())(q, k, v)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), ours, expected)
        sizes = array_sizes(both(), q, k, v)
    whole = rows * heads * queries * queries
    assert queries <= 8 or not any(size >= whole for size in sizes)
