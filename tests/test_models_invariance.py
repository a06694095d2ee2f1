"""Bits of the invariant forward do not depend on rows, tokens per row, cache capacity, or differentiation."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

from specrl_jax.models.backend import made_for
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import init_params
from specrl_jax.models.policy import forward, grid_batch, logits, policy_cache, sequence_positions
from specrl_jax.models.presets import PRESETS
from specrl_jax.rollout.sampling import Context, SamplingLaw, sample_tokens, score_tokens

INVARIANT = Numerics("invariant")
ROWS, LENGTH, PREFIX = 64, 76, 6
SMALL = replace(PRESETS["tiny-qwen3"], vocab_size=97)
WIDE = replace(
    SMALL,
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=768,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
)
# Of sizes that fill the registers of a CPU, so that kernels do it all.
FULL = replace(SMALL, vocab_size=128, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=32)
# A permutation, so that row 0 of a small batch is not row 0 of the large one.
ORDER = np.random.RandomState(1).permutation(ROWS)


def random_tokens(config):
    return np.random.RandomState(2).randint(0, config.vocab_size, (ROWS, LENGTH)).astype(np.int32)


def all_logits(params, config, tokens):
    rows, width = tokens.shape
    positions = sequence_positions(jnp.full((rows,), width, jnp.int32), width)
    out = forward(params, config, grid_batch(tokens, positions), numerics=INVARIANT)
    return logits(params, config, out.hidden, INVARIANT).reshape(rows, width, -1)


@functools.lru_cache
def reference(config):
    """Parameters, tokens, and teacher-forced logits of all rows."""
    params = init_params(jax.random.key(0), config)
    tokens = random_tokens(config)
    return params, tokens, np.asarray(jax.jit(all_logits, static_argnums=1)(params, config, jnp.asarray(tokens)))


@functools.partial(jax.jit, static_argnums=(1, 3, 4))
def decode_in_rounds(params, config, tokens, queries, capacity):
    """Logits `[rows, LENGTH, V]` from a prefill and rounds of `queries` new tokens per row.

    A round keeps between 1 and `queries` tokens of a row, others in each row; the rest are wrong
    drafts, which the next round overwrites. Rows therefore advance at different speeds.
    """
    rows = tokens.shape[0]
    row_ids = jnp.arange(rows, dtype=jnp.int32)
    cache = policy_cache(config, rows, capacity, INVARIANT)
    positions = sequence_positions(jnp.full((rows,), PREFIX, jnp.int32), PREFIX)
    out = forward(params, config, grid_batch(tokens[:, :PREFIX], positions), numerics=INVARIANT, cache=cache)
    seen = jnp.full((rows, LENGTH, config.vocab_size), jnp.nan, jnp.float32)
    first = logits(params, config, out.hidden, INVARIANT).reshape(rows, PREFIX, -1)
    seen = seen.at[:, :PREFIX].set(first)
    cache = out.cache.replace(length=jnp.full((rows,), PREFIX, jnp.int32))

    def one_round(carry):
        turn, cache, seen = carry
        kept = 1 + (row_ids * 7 + turn * 3) % queries
        steps = jnp.arange(queries, dtype=jnp.int32)[None]
        positions = cache.length[:, None] + steps
        new = jnp.take_along_axis(tokens, jnp.minimum(positions, LENGTH - 1), 1)
        new = jnp.where(steps < kept[:, None], new, (new + 1) % config.vocab_size)
        positions = jnp.where(positions < LENGTH, positions, -1)
        out = forward(params, config, grid_batch(new, positions), numerics=INVARIANT, cache=cache)
        scores = logits(params, config, out.hidden, INVARIANT).reshape(rows, queries, -1)
        slots = jnp.where((steps < kept[:, None]) & (positions >= 0), positions, LENGTH)
        seen = seen.at[row_ids[:, None], slots].set(scores, mode="drop")
        length = jnp.minimum(cache.length + kept, LENGTH)
        return turn + 1, out.cache.replace(length=length), seen

    return jax.lax.while_loop(lambda carry: carry[1].length.min() < LENGTH, one_round, (jnp.int32(0), cache, seen))[2]


def _cases():
    """Every pair of rows and new tokens; CI takes each value of both at least once."""
    quick = {("float32", 1, 1, 128), ("float32", 3, 2, 256), ("float32", 20, 4, 128), ("float32", 64, 5, 80)}
    quick |= {("bfloat16", 3, 4, 128), ("bfloat16", 64, 2, 256)}
    for dtype in ("float32", "bfloat16"):
        for rows in (1, 3, 20, 64):
            for queries in (1, 2, 4, 5):
                for capacity in (80, 128, 256):
                    case = (dtype, rows, queries, capacity)
                    yield pytest.param(*case, marks=pytest.mark.ci if case in quick else pytest.mark.full)


def check_decoding(config, rows, queries, capacity):
    params, tokens, expected = reference(config)
    chosen = ORDER[:rows]
    ours = np.asarray(decode_in_rounds(params, config, jnp.asarray(tokens[chosen]), queries, capacity))
    np.testing.assert_array_equal(ours, expected[chosen])


@pytest.mark.parametrize(("dtype", "rows", "queries", "capacity"), list(_cases()))
def test_decoding_has_the_bits_of_the_teacher_forced_forward(dtype, rows, queries, capacity):
    check_decoding(replace(SMALL, dtype=dtype), rows, queries, capacity)


FAMILIES = {
    "qwen3": FULL,
    "qwen2": replace(FULL, family="qwen2"),
    "llama": replace(FULL, family="llama", tie_embeddings=False),
    "one head of keys": replace(FULL, num_heads=16, num_kv_heads=1),
}


@pytest.mark.ci
@pytest.mark.parametrize(("rows", "queries"), [(1, 1), (3, 5), (20, 2), (64, 4)])
def test_kernels_decode_with_the_bits_of_the_teacher_forced_forward(rows, queries):
    check_decoding(FULL, rows, queries, 128)


@pytest.mark.ci
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_kernels_read_a_prompt_with_the_bits_of_training(config):
    """All tokens at once into a cache, packed and on a grid; and layer by layer, as `remat` has it."""
    params, tokens = init_params(jax.random.key(0), config), jnp.asarray(random_tokens(config)[:3] % config.vocab_size)
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(7), x.shape), params)  # biases too
    positions = sequence_positions(jnp.array([LENGTH, 50, 9], jnp.int32), LENGTH)
    grid = grid_batch(tokens, positions)
    packed = replace(grid, is_grid=False)

    def read(params, batch, **options):
        out = forward(params, config, batch, numerics=INVARIANT, **options)
        return jnp.where(batch.positions[:, None] >= 0, out.hidden, 0.0)

    read = jax.jit(read, static_argnames="remat")
    expected = read(params, grid)
    np.testing.assert_array_equal(read(params, grid, remat=True), expected)
    for batch in (grid, packed):
        np.testing.assert_array_equal(read(params, batch, cache=policy_cache(config, 3, 128, INVARIANT)), expected)


@pytest.mark.ci
def test_kernels_have_one_set_of_bits_for_any_registers(any_registers):
    """As far as a forward goes: bits are a machine's, and the forward of one CPU is not that of another."""
    params, chosen = init_params(jax.random.key(0), FULL), jnp.asarray(random_tokens(FULL)[ORDER[:5]])
    expected = jax.jit(lambda *args: all_logits(*args), static_argnums=1)(params, FULL, chosen)
    decode = jax.jit(lambda *args: decode_in_rounds.__wrapped__(*args), static_argnums=(1, 3, 4))
    np.testing.assert_array_equal(decode(params, FULL, chosen, 3, 128), expected)


@pytest.mark.ci
def test_where_kernels_do_it_all():
    """No product of the compiler's, and no token that is padding; elsewhere blocks, where any sum is the compiler's."""

    def products(config, queries):
        tokens, positions = jnp.zeros((1, queries), jnp.int32), jnp.arange(queries, dtype=jnp.int32)[None]

        def step(params, cache):
            out = forward(params, config, grid_batch(tokens, positions), numerics=INVARIANT, cache=cache)
            return logits(params, config, out.hidden, INVARIANT)

        arguments = init_params(jax.random.key(0), config), policy_cache(config, 1, 128, INVARIANT)
        found = equations(step, *arguments)
        largest = max(e.outvars[0].aval.shape[0] for e in found if e.primitive.name == "ffi_call")
        return sum(e.primitive.name == "dot_general" for e in found), largest

    assert products(FULL, 1) == (0, 1)
    assert products(FULL, 3) == (0, 3)
    assert products(replace(FULL, vocab_size=97), 1) == (1, INVARIANT.token_block)
    with made_for("tpu"):
        tokens = jnp.zeros((1, 1), jnp.int32)
        found = equations(lambda p: all_logits(p, FULL, tokens), init_params(jax.random.key(0), FULL))
    assert not any(e.primitive.name == "ffi_call" for e in found)


@pytest.mark.ci
@pytest.mark.parametrize(
    "law", [SamplingLaw(), SamplingLaw(0.7, min_new_tokens=40, end_ids=(3,)), SamplingLaw(0.7, top_p=0.9)]
)
def test_laws_are_drawn_and_scored_with_the_same_bits(law):
    """However many tokens there are, and after training as in the rollout."""
    params, count = init_params(jax.random.key(0), FULL), 300
    hidden = jax.random.normal(jax.random.key(1), (count, FULL.hidden_size))
    keys = jax.random.bits(jax.random.key(2), (count, 2), jnp.uint32)
    positions = jnp.arange(count, dtype=jnp.int32)

    @jax.jit
    def drawn(hidden, keys, positions):
        return sample_tokens(params, FULL, law, hidden, keys, Context(positions), INVARIANT)[0]

    @jax.jit
    def whole_laws(hidden):
        return sample_tokens(params, FULL, law, hidden, keys, Context(positions), INVARIANT, keep_law=True)

    @functools.partial(jax.jit, static_argnums=3)
    def scored(hidden, tokens, thresholds, chunk):
        others = positions, jnp.zeros((3, 100), jnp.int32)
        return score_tokens(params, FULL, law, hidden, tokens, thresholds, *others, INVARIANT, chunk)

    whole = drawn(hidden, keys, positions)
    for start, stop in ((0, 1), (7, 10), (31, 47), (50, 250)):
        jax.tree.map(
            np.testing.assert_array_equal,
            drawn(hidden[start:stop], keys[start:stop], positions[start:stop]),
            jax.tree.map(lambda x: x[start:stop], whole),  # noqa: B023  # used at once
        )
    for chunk in (40, 1024):
        scores = scored(hidden, whole.token, whole.threshold, chunk)
        np.testing.assert_array_equal(scores.log_prob, whole.log_prob)
        np.testing.assert_array_equal(scores.entropy, whole.entropy)
    kept, log_law = whole_laws(hidden)
    jax.tree.map(np.testing.assert_array_equal, kept, whole)
    np.testing.assert_array_equal(log_law[jnp.arange(count), kept.token], whole.log_prob)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "queries"), [(1, 1), (1, 4), (3, 5), (20, 2), (64, 1), (64, 4)])
def test_decoding_has_the_bits_of_the_teacher_forced_forward_at_width_256(dtype, rows, queries):
    check_decoding(replace(WIDE, dtype=dtype), rows, queries, 128)


@pytest.mark.ci
def test_keys_that_lie_as_elsewhere_have_the_bits_of_the_forward_there():
    """On other backends than a CPU keys lie with their width last; such programs run here all the same, traced anew."""
    params, tokens, _ = reference(SMALL)
    chosen = jnp.asarray(tokens[ORDER[:3]])
    with made_for("tpu"):
        expected = jax.jit(lambda *args: all_logits(*args), static_argnums=1)(params, SMALL, chosen)
        decode = jax.jit(lambda *args: decode_in_rounds.__wrapped__(*args), static_argnums=(1, 3, 4))
        ours = decode(params, SMALL, chosen, 4, 128)
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.ci
@pytest.mark.parametrize("rows", [1, 20])
def test_smaller_batches_have_the_bits_of_the_large_one(rows):
    params, tokens, expected = reference(SMALL)
    chosen = ORDER[:rows]
    ours = jax.jit(all_logits, static_argnums=1)(params, SMALL, jnp.asarray(tokens[chosen]))
    np.testing.assert_array_equal(ours, expected[chosen])


@pytest.mark.ci
@pytest.mark.parametrize("config", [SMALL, replace(SMALL, dtype="bfloat16"), FULL], ids=["float32", "bfloat16", "full"])
def test_differentiation_does_not_change_the_bits(config):
    params, tokens, expected = reference(config)
    chosen = ORDER[:20]

    def loss(params, tokens):
        scores = all_logits(params, config, tokens)
        picked = jnp.take_along_axis(jax.nn.log_softmax(scores)[:, :-1], tokens[:, 1:, None], -1)
        return -picked.mean(), scores

    (_, scores), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, jnp.asarray(tokens[chosen]))
    np.testing.assert_array_equal(scores, expected[chosen])
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))
