"""The backend that programs are made for: where its ways cost less, a program is another one there."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specrl_jax.parallel.sharding import compiler_splits

_FEW_NUMBERS = 2**18  # of all tokens, which stay close to a core while kernels pass by

_named: ContextVar[str | None] = ContextVar("backend", default=None)


def backend() -> str:
    """`cpu`, `gpu` or `tpu`: what `made_for` names, by default that of the devices here."""
    return _named.get() or jax.default_backend()


@contextmanager
def made_for(platform: str) -> Iterator[None]:
    """Programs traced within are those of another backend, to be compiled ahead of time."""
    token = _named.set(platform)
    try:
        yield
    finally:
        _named.reset(token)


def few_on_a_cpu(x: Array, *others: Array) -> bool:
    """Whether tokens are so few, and all in float32, that a CPU's kernels (`specrl_jax.kernels`) beat the compiler.

    An array that the compiler splits over devices is its own business.
    """
    plain = all(array.dtype == jnp.float32 for array in (x, *others))
    return backend() == "cpu" and plain and 0 < x.size <= _FEW_NUMBERS and not compiler_splits()
