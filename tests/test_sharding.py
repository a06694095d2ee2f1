"""Where parameters lie on a mesh, and the folders and heads that do not fit one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import write_models

from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import load_policy
from specrl_jax.models.params import init_params
from specrl_jax.models.weights import params_sha256
from specrl_jax.parallel.mesh import MeshConfig, make_mesh
from specrl_jax.parallel.sharding import Layout, check_splits
from specrl_jax.rl.optimizers import OptimizerConfig, make_optimizer

pytestmark = pytest.mark.ci

POLICY = PolicyConfig("qwen3", 32, 16, 48, num_layers=1, num_heads=8, num_kv_heads=2, head_dim=4)


def shard_shapes(tree):
    return jax.tree.map(lambda x: x.addressable_shards[0].data.shape, tree)


def test_parameters_and_moments_are_split_over_fsdp_and_tensor():
    params = init_params(jax.random.key(0), POLICY)
    layout = Layout(make_mesh(MeshConfig(2, 2, 2)), POLICY.num_kv_heads)
    placed = layout.place((params, make_optimizer(OptimizerConfig(0.1, name="muon")).init(params)))
    shapes = shard_shapes(placed[0])
    layer = shapes.layers[0]
    assert (shapes.embed, shapes.head, shapes.final_norm) == ((16, 8), (16, 8), (16,))
    assert (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj) == ((16, 8), (4, 8), (4, 8), (8, 16))
    assert (layer.gate_proj, layer.up_proj, layer.down_proj) == ((24, 8), (24, 8), (8, 24))
    moments = [leaf for leaf in jax.tree.leaves(placed[1]) if leaf.shape == (32, 16)]
    assert moments
    assert {leaf.addressable_shards[0].data.shape for leaf in moments} == {(16, 8)}


def test_few_heads_of_keys_and_values_are_whole_on_every_device():
    params = init_params(jax.random.key(0), POLICY)
    layer = shard_shapes(Layout(make_mesh(MeshConfig(1, 1, 8)), POLICY.num_kv_heads).place(params)).layers[0]
    assert (layer.q_proj, layer.k_proj) == ((4, 16), (8, 16))


def test_a_gather_leaves_tensor_split():
    params = init_params(jax.random.key(0), POLICY)
    layout = Layout(make_mesh(MeshConfig(1, 4, 2)), POLICY.num_kv_heads)
    gathered = jax.jit(layout.gather)(layout.place(params))
    assert shard_shapes(gathered).layers[0].q_proj == (16, 16)
    jax.tree.map(np.testing.assert_array_equal, gathered, params)


@pytest.mark.parametrize(
    ("changes", "tensor", "sentence"),
    [
        ({}, 3, "mesh axis tensor is 3 and does not divide the policy's num_heads of 8"),
        ({"intermediate_size": 44}, 8, "does not divide the policy's intermediate_size of 44"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "neither a divisor nor a multiple of the policy's num_kv_heads of 3"),
    ],
)
def test_sizes_that_do_not_split_are_refused(changes, tensor, sentence):
    fields = {"num_heads": 8, "num_kv_heads": 2, "intermediate_size": 48} | changes
    policy = PolicyConfig("qwen3", 32, 16, num_layers=1, head_dim=4, **fields)
    with pytest.raises(InputError) as error:
        check_splits("policy", policy, make_mesh(MeshConfig(tensor=tensor)))
    assert sentence in str(error.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_is_read_in_parts(tmp_path, dtype):
    folder = write_models(tmp_path) / "policy"
    whole, config = load_policy(folder, dtype)
    split, same = load_policy(folder, dtype, make_mesh(MeshConfig(1, 4, 2)))
    assert config == same
    assert params_sha256(split, config) == params_sha256(whole, config)
    assert split.layers[0].q_proj.dtype == jnp.dtype(dtype)
    assert split.layers[0].q_proj.addressable_shards[0].data.shape == (16, 8)
