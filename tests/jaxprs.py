"""What a traced computation holds."""

import math

import jax
import pytest
from jax.extend import core

from specrl_jax.models.backend import made_for


def equations(fn, *args):
    """Every equation of `fn(*args)`, inside its loops and calls too."""
    found = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            found.append(equation)
            parameters = list(equation.params.values())
            for inner in jax.tree.leaves(parameters, is_leaf=lambda x: isinstance(x, core.ClosedJaxpr | core.Jaxpr)):
                if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                    visit(getattr(inner, "jaxpr", inner))

    visit(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


def array_shapes(fn, *args):
    """Shape of every array that `fn(*args)` makes."""
    made = (v.aval for equation in equations(fn, *args) for v in equation.outvars)
    return [aval.shape for aval in made if hasattr(aval, "shape")]


def array_sizes(fn, *args):
    """Elements of those arrays."""
    return [math.prod(shape) for shape in array_shapes(fn, *args)]


def exported_for(platform, fn, *args):
    """A program made and lowered for `cpu`, `cuda` or `tpu`.

    Kernels written by hand are named: a program that is saved would miss them elsewhere.
    """
    from specrl_jax.kernels.custom_call import named

    if platform == "cuda" and jax.__version_info__ >= (0, 11):
        pytest.skip("newer versions lower Triton where there is a GPU")
    products = ("product", "product_plus", "product_gated")
    others = ("attention", "row_attention", "norm", "rotate", "norm_rotate", "draw", "draw_greedy", "describe")
    ours = [named(f"specrl_jax_{what}") for what in (*products, *others)]
    own = {"cpu": ours, "cuda": ["__gpu$xla.gpu.triton"]}.get(platform, [])
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in own]
    with made_for("gpu" if platform == "cuda" else platform):
        exported = jax.export.export(fn, platforms=[platform], disabled_checks=checks)(*args)
    assert exported.platforms == (platform,)
    return exported
