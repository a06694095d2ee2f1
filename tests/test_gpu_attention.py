"""The GPU's attention of a few queries against float64 attention by hand; on a CPU the kernels are interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_by_hand import (
    GROUPS,
    PAGE,
    PAGES,
    ROWS,
    SHARED,
    WIDTH,
    attention_by_hand,
    chain_reads,
    random_inputs,
    tree_masks,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax.kernels.gpu_attention import few_queries_attention, kernel_fits
from specrl_jax.models.attention import paged_attention
from specrl_jax.models.backend import backend, made_for
from specrl_jax.models.cache import NO_PAGE
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.tree import Tree
from specrl_jax.parallel.mesh import MeshConfig, make_mesh
from specrl_jax.parallel.sharding import ROWS as SPLIT_ROWS
from specrl_jax.parallel.sharding import over_mesh

pytestmark = pytest.mark.ci


@pytest.fixture(autouse=True)
def _full_precision():
    """A GPU multiplies float32 in fewer bits unless it is told not to."""
    with jax.default_matmul_precision("highest"):
        yield


def _kernel(q, keys, values, table, below, bits, ends):
    arrays = (jnp.asarray(x, jnp.int32) for x in (table, below, bits, ends))
    return few_queries_attention(q, keys, values, *arrays, interpret=backend() != "gpu")


@pytest.mark.parametrize("queries", [1, 3, 4])
def test_chains_of_any_length_and_padding(queries):
    q, keys, values, table = random_inputs(queries)
    below, reads = chain_reads(queries)
    table[0, 2:] = NO_PAGE  # beyond what the row has
    out = _kernel(q, keys, values, table, below, np.zeros_like(below), below.max(axis=1))
    np.testing.assert_allclose(out, attention_by_hand(q, keys, values, table, reads), atol=2e-6)


def test_a_tree_reads_ancestors_alone():
    tree = Tree.full(2, 2)
    q, keys, values, table = random_inputs(tree.size)
    below, bits, ends, reads = tree_masks(tree)
    out = _kernel(q, keys, values, table, below, bits, ends)
    np.testing.assert_allclose(out, attention_by_hand(q, keys, values, table, reads), atol=2e-6)


@pytest.fixture
def kernels_here(monkeypatch):
    """Programs made for a GPU run on whatever is here."""
    interpret = backend() != "gpu"
    inside = functools.partial(few_queries_attention, interpret=interpret)
    monkeypatch.setattr("specrl_jax.kernels.gpu_attention.few_queries_attention", inside)


@pytest.mark.parametrize("tree", [None, Tree.comb(2, 2)], ids=["chain", "tree"])
def test_a_gpu_attends_as_a_cpu(tree, kernels_here):
    queries = 4 if tree is None else tree.size
    q, keys, values, table = random_inputs(queries)
    depths = np.arange(queries) if tree is None else np.array(tree.depths)
    positions = np.array([[5], [70], [-1]]) + depths
    positions = jnp.asarray(np.where(np.array([[True], [True], [False]]), positions, -1), jnp.int32)
    table[2] = NO_PAGE  # as of a row that has ended
    arguments = (values, jnp.asarray(table), positions, Numerics(key_block=PAGE), tree)
    with made_for("gpu"):
        ours = paged_attention(q, keys, *arguments)
    with made_for("cpu"):
        expected = paged_attention(q, keys.swapaxes(2, 3), *arguments)
    np.testing.assert_allclose(ours[:2], expected[:2], atol=2e-6)
    np.testing.assert_array_equal(ours[2], 0.0)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
def test_heads_split_over_tensor_without_a_collective(kernels_here):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    rng, rows, queries = np.random.default_rng(0), 4, 3
    pool = (rows * PAGES, GROUPS, PAGE, WIDTH)
    keys, values = (jnp.asarray(rng.normal(size=pool), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(rows, queries, GROUPS * SHARED, WIDTH)), jnp.float32)
    positions = jnp.asarray(np.array([5, 60, 17, 33])[:, None] + np.arange(queries), jnp.int32)
    numerics = Numerics(key_block=PAGE)
    tables = jnp.arange(rows * PAGES, dtype=jnp.int32).reshape(rows, PAGES)
    with made_for("cpu"):
        expected = paged_attention(q, keys.swapaxes(2, 3), values, tables, positions, numerics)

    def local(q, keys, values, table, positions):
        with made_for("gpu"):
            return paged_attention(q, keys, values, table, positions, numerics)

    split, heads = P(SPLIT_ROWS), NamedSharding(mesh, P(SPLIT_ROWS, "tensor"))
    program = jax.jit(over_mesh(mesh, local, (split,) * 5, split))
    arguments = (q, *(jax.device_put(x, heads) for x in (keys, values)), tables % PAGES, positions)
    np.testing.assert_allclose(program(*arguments), expected, atol=2e-6)
    compiled = program.lower(*arguments).compile().as_text()
    assert not [kind for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if kind in compiled]


@pytest.mark.parametrize("tree", [None, Tree.comb(2, 2)], ids=["chain", "tree"])
def test_no_page_beyond_the_pool_is_named(tree, monkeypatch):
    """A GPU would read it. Row 0 is in its first page, row 1 at the end of its last, row 2 has ended."""
    size = 4 if tree is None else tree.size
    q, keys, values, table = random_inputs(size)
    table[0, 1:], table[2] = NO_PAGE, NO_PAGE
    depths = np.arange(size) if tree is None else np.array(tree.depths)
    positions = np.where(np.array([[True], [True], [False]]), np.array([[5], [PAGE * PAGES - 4], [-1]]) + depths, -1)
    named = []

    def noted(q, keys, values, table, below, bits, ends):
        named.extend(table[row, : -(-int(end) // PAGE)] for row, end in enumerate(ends))
        return q

    monkeypatch.setattr("specrl_jax.kernels.gpu_attention.few_queries_attention", noted)
    arrays = (q, keys, values, jnp.asarray(table), jnp.asarray(positions, jnp.int32))
    with made_for("gpu"):
        paged_attention(*arrays, Numerics(key_block=PAGE), tree)
    assert [len(pages) for pages in named] == [1, PAGES, 0]
    assert all((pages < len(keys)).all() for pages in named)


def test_a_key_that_may_not_be_read_is_noticed():
    """A positive control: one slot too many changes the output by far more than the tolerance."""
    q, keys, values, table = random_inputs(1)
    below = np.array([[5], [80], [17]])
    right, wrong = (
        _kernel(q, keys, values, table, b, np.zeros_like(below), below[:, 0] + 1) for b in (below, below + 1)
    )
    assert np.abs(np.asarray(right - wrong)).max() > 1e-3


def test_what_fits():
    assert kernel_fits(16, 64, 128, 2, 0)
    assert kernel_fits(128, 64, 128, 4, 0)
    assert not kernel_fits(16, 64, 96, 2, 0)
    assert not kernel_fits(256, 64, 128, 2, 0)
    assert not kernel_fits(16, 64, 128, 2, Tree.full(5, 2).size)
    assert not kernel_fits(128, 128, 256, 4, 0)  # more than a program may keep close by


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="newer versions lower Triton where there is a GPU")
def test_lowers_for_cuda():
    q, keys, values, _ = random_inputs(4, jnp.bfloat16)
    numbers = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((ROWS, PAGES), (ROWS, 4), (ROWS, 4), (ROWS,))]
    traced = jax.jit(few_queries_attention).trace(q, keys, values, *numbers)
    assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
