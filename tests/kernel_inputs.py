"""What tests of the CPU's kernels share."""

import jax
import jax.numpy as jnp


def fresh(fn):
    """Compiled as if never seen before: what JAX has traced is not written for other registers."""
    return jax.jit(lambda *arguments: fn(*arguments))


def normal(rng, *shape):
    """Standard normal numbers in float32."""
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)
