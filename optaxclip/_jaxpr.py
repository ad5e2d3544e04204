"""Reading traced programs."""

from collections.abc import Iterator
from typing import Any


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number that stands in the program."""
    # Imported here, since it imports Pallas, which would slow down `import optaxclip`.
    from jax.extend.core import Literal

    return isinstance(atom, Literal)


def has_backward_rule(eqn: Any) -> bool:
    """Whether a backward pass of somebody's own is in an equation (custom_vjp)."""
    if eqn.primitive.name.startswith("custom_vjp_call"):
        return True
    return any(map(has_backward_rule, _inside(eqn.params.values())))


def _inside(values: Any) -> Iterator[Any]:
    """The equations of the programs among the parameters of an equation."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _inside(value)  # such as the branches of a cond
        # A closed program has its equations one step further in.
        yield from getattr(getattr(value, "jaxpr", value), "eqns", ())
