"""Reading traced programs."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number that stands in the program."""
    # Imported here, since it imports Pallas, which would slow down `import optaxclip`.
    from jax.extend.core import Literal

    return isinstance(atom, Literal)


def has_backward_rule(eqn: Any) -> bool:
    """Whether a backward pass of somebody's own is in an equation (custom_vjp)."""
    if eqn.primitive.name.startswith("custom_vjp_call"):
        return True
    return any(map(has_backward_rule, inside(eqn)))


def has_refs(eqn: Any) -> bool:
    """Whether an equation, or one that it runs, has an array that can be written to."""
    variables = (x for x in (*eqn.invars, *eqn.outvars) if not is_literal(x))
    # The type of a ref is no type of an array.
    if not all(isinstance(x.aval, ShapedArray) for x in variables):
        return True
    return any(map(has_refs, inside(eqn)))


def reached_backward(jaxpr: Any, outs: list[Any]) -> set[Any]:
    """The variables that a backward pass from some outputs of a program comes by."""
    reached = {x for x in outs if not is_literal(x)}
    for eqn in reversed(jaxpr.eqns):
        if reached.intersection(eqn.outvars) and not is_stop(eqn):
            reached.update(x for x in eqn.invars if not is_literal(x))
    return reached


def is_stop(eqn: Any) -> bool:
    """Whether an equation has no derivative, as integers have none."""
    types = [x.aval.dtype for x in eqn.outvars]
    is_float = any(jnp.issubdtype(dtype, jnp.inexact) for dtype in types)
    return eqn.primitive.name == "stop_gradient" or not is_float


def inside(eqn: Any) -> Iterator[Any]:
    """The equations of the programs that an equation runs, not those inside these."""
    return _equations(eqn.params.values())


def _equations(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _equations(value)  # such as the branches of a cond
        # A closed program has its equations one step further in.
        yield from getattr(getattr(value, "jaxpr", value), "eqns", ())
