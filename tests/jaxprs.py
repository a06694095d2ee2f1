"""What a traced computation holds."""

import math

import jax
from jax.extend import core


def array_shapes(fn, *args):
    """Shape of every array that `fn(*args)` makes, inside its loops and calls too."""
    found = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            found.extend(v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape"))
            for parameter in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: isinstance(x, core.ClosedJaxpr | core.Jaxpr)
            ):
                if isinstance(parameter, core.ClosedJaxpr):
                    visit(parameter.jaxpr)
                elif isinstance(parameter, core.Jaxpr):
                    visit(parameter)

    visit(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


def array_sizes(fn, *args):
    """Elements of those arrays."""
    return [math.prod(shape) for shape in array_shapes(fn, *args)]
