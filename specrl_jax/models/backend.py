"""The backend that programs are made for: where its ways cost less, a program is another one there."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

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
