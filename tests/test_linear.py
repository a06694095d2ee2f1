"""Products with kernels `[out, in]`: the same for few and many tokens, and differentiable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.models.backend import made_for
from specrl_jax.models.linear import linear

pytestmark = pytest.mark.ci


@pytest.mark.parametrize("tokens", [1, 3, 6, 12, 20, 28, 60, 64, 65])
def test_it_is_the_product_with_the_transposed_kernel(tokens):
    keys = jax.random.split(jax.random.key(0), 2)
    x, kernel = jax.random.normal(keys[0], (tokens, 24)), jax.random.normal(keys[1], (40, 24))
    np.testing.assert_allclose(linear(x, kernel), np.float64(x) @ np.float64(kernel).T, atol=1e-5)
    wanted = jax.grad(lambda x, kernel: jnp.sum(jnp.sin(x @ kernel.T)), argnums=(0, 1))(x, kernel)
    found = jax.grad(lambda x, kernel: jnp.sum(jnp.sin(linear(x, kernel))), argnums=(0, 1))(x, kernel)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_it_accumulates_in_the_type_it_is_asked_for():
    x, kernel = jnp.ones((2, 1000), jnp.bfloat16), jnp.full((3, 1000), 1.001, jnp.bfloat16)
    assert linear(x, kernel).dtype == jnp.bfloat16
    assert linear(x, kernel, jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_one_token_on_a_gpu_is_the_same_product(dtype):
    keys = jax.random.split(jax.random.key(1), 2)
    x, kernel = (jax.random.normal(key, (n, 24), jnp.bfloat16) for key, n in zip(keys, (1, 40), strict=True))
    found = {}
    for backend in ("cpu", "gpu"):
        with made_for(backend):
            found[backend] = linear(x, kernel, dtype)
    assert found["gpu"].dtype == found["cpu"].dtype == (dtype or jnp.bfloat16)
    np.testing.assert_allclose(*(np.float32(y) for y in found.values()), rtol=1e-2, atol=1e-4)
    with made_for("gpu"), pytest.raises(jax.dtypes.TypePromotionError):
        linear(x, kernel.astype(jnp.float32))
