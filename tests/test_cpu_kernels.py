"""The CPU's kernels against float64, for this CPU's registers and for narrower ones."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_by_hand import GROUPS, PAGE, PAGES, SHARED, attention_by_hand, chain_reads, random_inputs, tree_masks
from jax.sharding import PartitionSpec as P
from kernel_inputs import fresh, normal

from specrl_jax.kernels import cpu_attention, llvm, norm, product
from specrl_jax.kernels.custom_call import registered
from specrl_jax.kernels.llvm import Registers, made_with
from specrl_jax.models import few_tokens
from specrl_jax.models.attention import paged_attention
from specrl_jax.models.cache import NO_PAGE
from specrl_jax.models.linear import linear, linears, swiglu
from specrl_jax.models.norm import rms_norm
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.rope import norm_and_rotate
from specrl_jax.models.tree import Tree
from specrl_jax.parallel.mesh import MeshConfig, make_mesh

pytestmark = pytest.mark.ci


def _angles(rng, tokens, half):
    angles = normal(rng, tokens, 1, half)
    return jnp.cos(angles), jnp.sin(angles)


def _operands(tokens, inputs, outputs):
    rng = np.random.default_rng(tokens)
    return normal(rng, tokens, inputs), [normal(rng, rows, inputs) for rows in outputs]


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 11, 16, 33, 70])
def test_products_are_those_of_float64(tokens, any_registers):
    x, kernels = _operands(tokens, 96, (4, 36, 132))
    assert f"{any_registers.count}x{any_registers.lanes}" in fresh(product.product).lower(x, kernels).as_text()
    found = fresh(product.product)(x, kernels)
    for ours, kernel in zip(found, kernels, strict=True):
        np.testing.assert_allclose(ours, np.float64(x) @ np.float64(kernel).T, rtol=0, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 4, 5, 33, 128])
def test_what_is_done_with_products_is_that_of_float64(tokens, any_registers):
    x, (gate, up) = _operands(tokens, 96, (48, 48))
    more = normal(np.random.default_rng(0), tokens, 48)
    gated, raised = (np.float64(x) @ np.float64(kernel).T for kernel in (gate, up))
    np.testing.assert_allclose(fresh(product.product_plus)(x, gate, more), gated + more, rtol=0, atol=2e-5)
    wanted = gated / (1 + np.exp(-gated)) * raised
    np.testing.assert_allclose(fresh(product.gated_product)(x, gate, up), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("tokens", "units", "by_hand"), [(7, 16, True), (129, 16, False), (7, 36, False)])
def test_a_gated_mlp_has_gradients(tokens, units, by_hand):
    x, (gate, up) = _operands(tokens, 32, (units, units))
    down = normal(np.random.default_rng(0), 32, units)

    def loss(mlp, *arguments):
        return jnp.sum(jnp.sin(mlp(*arguments)))

    def by_xla(x, gate, up, down):
        return x + (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def by_us(x, gate, up, down):
        return swiglu(x, gate, up, down, plus=x)

    assert ("product_gated" in _programs(by_us, x, gate, up, down)) == by_hand
    arguments = (x, gate, up, down)
    wanted = jax.grad(functools.partial(loss, by_xla), argnums=(0, 1, 2, 3))(*arguments)
    found = jax.grad(functools.partial(loss, by_us), argnums=(0, 1, 2, 3))(*arguments)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-2, rtol=1e-3), found, wanted)


def test_bits_of_a_token_do_not_depend_on_the_others(any_registers):
    x, kernels = _operands(33, 256, (64, 260))
    together = fresh(product.product)(x, kernels)
    for first, count in ((0, 1), (5, 2), (7, 3), (9, 4), (20, 13)):
        alone = fresh(product.product)(x[first : first + count], kernels)
        for ours, all_ in zip(alone, together, strict=True):
            np.testing.assert_array_equal(ours, all_[first : first + count])


def test_work_for_many_threads_is_done_once():
    """Blocks are taken by XLA's threads and the caller's; several programs run side by side."""
    x, kernels = _operands(8, 512, (4096, 512, 1024))
    program, wanted = fresh(product.product), [np.float64(x) @ np.float64(kernel).T for kernel in kernels]
    wrong = []

    def many():
        for _ in range(50):
            for ours, theirs in zip(program(x, kernels), wanted, strict=True):
                if not np.allclose(ours, theirs, rtol=0, atol=2e-4):
                    wrong.append(ours)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_products_fit(any_registers):
    assert product.fits(448, 128)
    assert not product.fits(24, 128)
    assert not product.fits(448, 129)


@pytest.mark.parametrize("tokens", [1, 7, 128, 129])
def test_a_layer_has_gradients(tokens):
    x, kernels = _operands(tokens, 32, (8, 12))

    def loss(multiply, x, kernels):
        return sum(jnp.sum(jnp.sin(y)) for y in multiply(x, kernels))

    def by_xla(x, kernels):
        return [x @ kernel.T for kernel in kernels]

    wanted = jax.grad(functools.partial(loss, by_xla), argnums=(0, 1))(x, kernels)
    found = jax.grad(functools.partial(loss, linears), argnums=(0, 1))(x, kernels)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), found, wanted)


def test_gradients_have_gradients():
    x, (kernel,) = _operands(3, 32, (8,))
    x = 0.1 * x

    def curvature(multiply):
        def bent(x):
            return jnp.sum(jnp.square(jax.grad(lambda x: jnp.sum(jnp.sin(multiply(x, kernel))))(x)))

        return jax.grad(bent)(x)

    np.testing.assert_allclose(curvature(linear), curvature(lambda x, kernel: x @ kernel.T), atol=1e-4, rtol=1e-4)


def test_threads_may_ask_for_a_kernel_at_once():
    with made_with(Registers(32, 8)):
        kernel, names = product.Product(), []
        threads = [threading.Thread(target=lambda: names.append(registered(kernel))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert names == [kernel.name] * 4


def _programs(fn, *arguments):
    return jax.jit(fn).lower(*arguments).as_text()


def test_where_the_kernel_is_used():
    x, (kernel,) = _operands(4, 32, (8,))
    assert product.Product().name in _programs(linear, x, kernel)
    assert "custom_call" not in _programs(linear, x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16))
    assert "custom_call" not in _programs(linear, x[:, :24], kernel[:, :24])
    assert "custom_call" not in _programs(linear, np.zeros((129, 32), np.float32), kernel)


def test_without_llvmlite_the_compiler_does_it_all(monkeypatch):
    monkeypatch.setattr(few_tokens, "_can_be_written", lambda: False)
    q, keys, values, table = random_inputs(1)
    arguments = q, keys.swapaxes(2, 3), values, jnp.asarray(table), jnp.full((3, 1), 4), Numerics(key_block=PAGE)

    def all_of_them(x, kernel):
        return linear(rms_norm(x, x[0], 1e-6), kernel), paged_attention(*arguments)

    x, (kernel,) = _operands(4, 32, (8,))
    assert "custom_call @specrl_jax" not in _programs(all_of_them, x, kernel)
    monkeypatch.undo()
    assert _programs(lambda *a: all_of_them(*a), x, kernel).count("custom_call @specrl_jax") == 3


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
def test_a_product_that_the_compiler_splits_is_its_own():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    x, (kernel,) = _operands(4, 32, (8,))

    def local(axes):
        split = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        return split(linear, axis_names=axes)

    assert "specrl_jax_product" in _programs(local({"data", "fsdp", "tensor"}), x, kernel)
    assert "specrl_jax_product" not in _programs(local({"data", "fsdp"}), x, kernel)


def _attended(q, keys, values, table, below, bits, ends):
    arrays = (jnp.asarray(x, jnp.int32) for x in (table, below, bits, ends))
    return fresh(cpu_attention.few_queries_attention)(q, keys.swapaxes(2, 3), values, *arrays)


@pytest.mark.parametrize("queries", [1, 3, 4])
def test_attention_of_chains_and_padding(queries, any_registers):
    q, keys, values, table = random_inputs(queries)
    below, reads = chain_reads(queries)
    table[0, 2:] = NO_PAGE  # beyond what the row has
    out = _attended(q, keys, values, table, below, np.zeros_like(below), below.max(axis=1))
    np.testing.assert_allclose(out, attention_by_hand(q, keys, values, table, reads), atol=2e-6)


def _in_long_pages(keys, values, table):
    """The pools in pages of four short ones, and their table."""
    pages = np.pad(table, ((0, 0), (0, 2)))
    longer = [jnp.concatenate([pool[pages[:, i::4].ravel()] for i in range(4)], axis=2) for pool in (keys, values)]
    return longer, np.arange(len(table) * 2, dtype=np.int32).reshape(-1, 2)


@pytest.mark.parametrize("lengths", [(1, 16, 17), (32, 33, 48), (49, 64, 65), (80, 81, 96)])
def test_attention_to_a_part_of_a_page(lengths, any_registers):
    """Of long pages, in which slots follow each other as in four short ones."""
    q, keys, values, table = random_inputs(2)
    below = np.array(lengths)[:, None] - np.array([1, 0])
    longer, own = _in_long_pages(keys, values, table)
    out = _attended(q, *longer, own, below, np.zeros_like(below), below[:, 1])
    reads = [[list(range(count)) for count in row] for row in below]
    np.testing.assert_allclose(out, attention_by_hand(q, keys, values, table, reads), atol=2e-6)


def test_attention_of_a_tree(any_registers):
    tree = Tree.full(2, 2)
    q, keys, values, table = random_inputs(tree.size)
    below, bits, ends, reads = tree_masks(tree)
    out = _attended(q, keys, values, table, below, bits, ends)
    np.testing.assert_allclose(out, attention_by_hand(q, keys, values, table, reads), atol=2e-6)


def _alone(inputs, below, bits, ends, row, first, last):
    """Some queries of a row by themselves."""
    q, keys, values, table = inputs
    some, own = slice(first, last + 1), slice(row, row + 1)
    return _attended(q[own, some], keys, values, table[own], below[own, some], bits[own, some], ends[own])


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("second", [(80, 81, 82, 83), (14, 15, 16, 17), (1, 31, 33, 49), (63, 64, 65, 79)])
def test_bits_of_a_query_do_not_depend_on_the_others(long, second, any_registers):
    """Not on how far they read, of whole pages or of parts."""
    q, *pool = random_inputs(4)
    below, _ = chain_reads(4)
    below[1] = second
    if long:
        longer, own = _in_long_pages(*pool)
        pool = [*longer, own]
    bits = np.zeros_like(below)
    together = _attended(q, *pool, below, bits, below[:, -1])
    for row in range(len(below)):
        for first, last in ((0, 0), (1, 2), (3, 3)):
            part = _alone((q, *pool), below, bits, below[:, last], row, first, last)
            np.testing.assert_array_equal(part, together[row : row + 1, first : last + 1])


def test_bits_of_a_tree_in_long_pages_are_those_of_its_paths(any_registers):
    tree = Tree.full(2, 2)
    q, *pool = random_inputs(tree.size)
    longer, own = _in_long_pages(*pool)
    below, bits, ends, reads = tree_masks(tree)
    together = _attended(q, *longer, own, below, bits, ends)
    np.testing.assert_allclose(together, attention_by_hand(q, *pool, reads), atol=2e-6)
    for row in range(len(below)):
        for node in range(tree.size):
            part = _alone((q, *longer, own), below, bits, ends, row, node, node)
            np.testing.assert_array_equal(part, together[row : row + 1, node : node + 1])


@pytest.mark.parametrize("which", ["q", "keys", "values"])
def test_what_is_not_a_number_stays_none(which):
    arrays = dict(zip(("q", "keys", "values", "table"), random_inputs(1), strict=True))
    spoiled = {"q": (1, 0, 5, 3), "keys": (arrays["table"][1, 4], 1, 15, 3), "values": (arrays["table"][1, 4], 1, 2, 3)}
    arrays[which] = arrays[which].at[spoiled[which]].set(jnp.nan)
    below = np.array([[5], [80], [17]])
    out = np.asarray(_attended(**arrays, below=below, bits=np.zeros_like(below), ends=below[:, 0]))
    heads = slice(5, 6) if which == "q" else slice(SHARED, None)
    assert np.isnan(out[1, 0, heads, 3]).all()
    assert np.isfinite(out[[0, 2]]).all()
    assert np.isfinite(out[1, 0, :SHARED]).all()


def test_pages_beyond_the_pool_are_not_read():
    """As of a row that asks for slots it has no page for: numbers without meaning, but numbers."""
    q, keys, values, table = random_inputs(1)
    table[1, 1:] = NO_PAGE
    positions = jnp.asarray([[5], [PAGE * PAGES + 40], [17]], jnp.int32)
    numerics = Numerics(key_block=PAGE)
    out = paged_attention(q, keys.swapaxes(2, 3), values, jnp.asarray(table), positions, numerics)
    assert np.isfinite(out).all()


def test_large_scores_and_their_weights():
    """Scores far apart: the weights of the small ones vanish, and nothing is infinite."""
    q, keys, values, table = random_inputs(1)
    below = np.full((3, 1), PAGE * PAGES)
    reads = [[list(range(PAGE * PAGES))]] * 3
    out = _attended(40.0 * q, keys, values, table, below, np.zeros_like(below), below[:, 0])
    np.testing.assert_allclose(out, attention_by_hand(40.0 * q, keys, values, table, reads), atol=2e-5)


def test_a_key_that_may_not_be_read_is_noticed():
    """A positive control: one slot too many changes the output by far more than the tolerance."""
    q, keys, values, table = random_inputs(1)
    below = np.array([[5], [80], [17]])
    right, wrong = (
        _attended(q, keys, values, table, b, np.zeros_like(below), below[:, 0] + 1) for b in (below, below + 1)
    )
    assert np.abs(np.asarray(right - wrong)).max() > 1e-3


def test_what_attention_fits(any_registers):
    assert cpu_attention.kernel_fits(GROUPS * SHARED, 64, 64, 0)
    assert not cpu_attention.kernel_fits(257, 64, 64, 0)
    assert not cpu_attention.kernel_fits(4, 512, 64, 0)
    assert not cpu_attention.kernel_fits(4, 64, 66, 0)
    assert not cpu_attention.kernel_fits(4, 64, 64, 33)


@pytest.mark.parametrize(("normed", "turned"), [(True, True), (True, False), (False, True)])
def test_heads_are_normed_and_turned(normed, turned, any_registers):
    rng = np.random.default_rng(0)
    x, weight = normal(rng, 5, 3, 64), normal(rng, 64)
    cos, sin = _angles(rng, 5, 32)
    wanted, c, s = np.float64(x), np.float64(cos), np.float64(sin)
    if normed:
        wanted = wanted / np.sqrt(np.mean(wanted**2, axis=-1, keepdims=True) + 1e-6) * np.float64(weight)
    if turned:
        first, second = np.split(wanted, 2, axis=-1)
        wanted = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    found = norm.norm_and_rotate(x, (weight, 1e-6) if normed else None, (cos, sin) if turned else None)
    np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize("weighted", [True, False])
def test_norm_and_rotation_have_gradients(weighted, monkeypatch):
    rng = np.random.default_rng(1)
    x, weight, angles = normal(rng, 5, 3, 64), normal(rng, 64), _angles(rng, 5, 32)

    def loss(x, weight):
        turned = norm_and_rotate(x, weight if weighted else None, 1e-6, *angles)
        return jnp.sum(jnp.sin(rms_norm(turned, weight, 1e-6)))

    assert "custom_call" in _programs(loss, x, weight)
    found = jax.grad(loss, argnums=(0, 1))(x, weight)
    monkeypatch.setattr(few_tokens, "_FEW_NUMBERS", 0)
    jax.clear_caches()
    assert "custom_call" not in _programs(loss, x, weight)
    wanted = jax.grad(loss, argnums=(0, 1))(x, weight)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, wanted)


def test_registers_are_this_cpus_unless_named():
    own = llvm.registers()
    with made_with(Registers(16, 8)):
        assert llvm.lanes() == 8
    assert llvm.registers() == own
