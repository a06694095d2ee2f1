"""When a CPU's own kernels (`specrl_jax.kernels`) take the place of the compiler's operations: in float32, for few
tokens, or where bits must be the same for any number of them (`kernels_alone`).

They need llvmlite; where that is missing, as on a machine that was set up for GPUs alone, the compiler does it all. It
is imported where a kernel is used and not before.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specrl_jax.models.backend import backend
from specrl_jax.parallel.sharding import compiler_splits

_FEW_NUMBERS = 2**18  # of all tokens, which stay close to a core while kernels pass by
_alone: ContextVar[bool] = ContextVar("kernels_alone", default=False)


class NoKernelError(Exception):
    """Numbers were to be computed by kernels alone, and for some there is none."""


@contextmanager
def kernels_alone() -> Iterator[None]:
    """What is traced within is computed by kernels however many tokens there are, so that its bits are theirs."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def in_kernels_alone() -> bool:
    """Whether the program that is being traced is one of `kernels_alone`."""
    return _alone.get()


def by_compiler() -> None:
    """Stands where the compiler takes over.

    Raises:
        NoKernelError: it may not.
    """
    if in_kernels_alone():
        raise NoKernelError


def few_on_a_cpu(x: Array, *others: Array) -> bool:
    """Whether tokens are so few, and all in float32, that kernels cost less, or may do it alone.

    An array that the compiler splits over devices is its own business.
    """
    plain = all(array.dtype == jnp.float32 for array in (x, *others))
    few = in_kernels_alone() or x.size <= _FEW_NUMBERS
    return on_a_cpu() and plain and few and x.size > 0 and not compiler_splits()


def on_a_cpu() -> bool:
    """Whether programs are made for a CPU, and its kernels can be written."""
    return backend() == "cpu" and _can_be_written()


@cache
def _can_be_written() -> bool:
    return importlib.util.find_spec("llvmlite") is not None


def with_gradient_of(plain: Callable[..., Any], kernel: Callable[..., Any], *arguments: Any) -> Any:
    """`kernel(*arguments)`, whose gradient is that of a function that the compiler can differentiate.

    Forward-mode differentiation is refused, as of every function with a rule of its own for the gradient.
    """

    @jax.custom_vjp
    def run(*arguments: Any) -> Any:
        return kernel(*arguments)

    run.defvjp(
        lambda *arguments: (run(*arguments), arguments),
        lambda arguments, cotangents: jax.vjp(plain, *arguments)[1](cotangents),
    )
    return run(*arguments)
