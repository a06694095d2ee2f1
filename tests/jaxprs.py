"""What a traced computation holds."""

import math

import jax
from jax.extend import core


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
