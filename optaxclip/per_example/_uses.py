"""Where values of a loss come from, and where parameters meet data."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from .._jaxpr import has_backward_rule, moved_outputs
from ._views import View
from ._wide import can_widen, is_narrow, rounds_inside, wide_equation


class Origin(NamedTuple):
    """What a value is made of."""

    leaves: frozenset[int] = frozenset()  # the numbers of the parameters in it
    by: frozenset[int] = frozenset()  # of those that it has a derivative by
    # the scans whose slices are in it, by depth
    loops: frozenset[int] = frozenset()
    is_data: bool = False  # whether the example is in it
    # whether gradients of examples must be made one by one: the way back from it to a
    # parameter may not be linear, or rounds to 16 bits what should be added up first
    one_by_one: bool = False
    view: View | None = None  # set where it is one parameter, rearranged

    def without_derivative(self) -> "Origin":
        return self._replace(by=frozenset(), one_by_one=False)


CONSTANT = Origin()
DATA = Origin(is_data=True)


class Use(NamedTuple):
    """An equation in which values made of parameters meet data."""

    eqn: Any  # None where a parameter is taken for data as it is
    places: tuple[int, ...]  # which of its inputs are made of parameters
    origins: tuple[Origin, ...]  # of those inputs
    data: tuple[Any, ...]  # the types of its other inputs
    outs: tuple[Any, ...]  # the types of its outputs
    # the lengths of the scans around it, outermost first
    loops: tuple[int, ...]
    # the outputs through which a backward pass comes to its operands
    reached: tuple[int, ...] = (0,)

    @property
    def name(self) -> str:
        return "identity" if self.eqn is None else self.eqn.primitive.name

    @property
    def is_narrow(self) -> bool:
        """Whether gradients by its operands, or cotangents, have 16 bits or fewer."""
        if self.eqn is None:
            return any(map(is_narrow, self.outs))
        pairs = zip(self.places, self.origins)
        own = [self.eqn.invars[place].aval for place, x in pairs if x.by]
        return any(map(is_narrow, [*own, *self.outs])) or rounds_inside(
            self.eqn
        )

    @property
    def is_widened(self) -> bool:
        """Whether gradients by its operands are made in float32 instead."""
        return self.is_narrow and (self.eqn is None or can_widen(self.eqn))

    def widened(self) -> "Use":
        """The same in float32."""
        if self.eqn is None:
            return self
        return self._replace(eqn=wide_equation(self.eqn))

    @property
    def one_by_one(self) -> bool:
        """Whether gradients of examples by one of its operands must be made."""
        own = self.eqn is not None and has_backward_rule(self.eqn)
        own = own or (self.is_narrow and not self.is_widened)
        return own or any(origin.one_by_one for origin in self.origins)

    @property
    def tapped(self) -> list[int]:
        """The outputs that a backward pass from the loss is taken to. None of a use of
        frozen parameters, behind which there may be what has no derivative.
        """
        if not any(origin.by for origin in self.origins):
            return []
        types = {k: self.outs[k].dtype for k in self.reached}
        return [k for k, x in types.items() if jnp.issubdtype(x, jnp.inexact)]


def taken_as_data(origin: Origin, aval: Any, loops: tuple[int, ...]) -> Use:
    return Use(None, (0,), (origin,), (), (aval,), loops)


def use_of(
    eqn: Any, ins: list[Origin], wanted: list[bool], loops: tuple[int, ...]
) -> Use:
    """The use of an equation. `wanted` says of each output whether a backward pass
    comes from it.
    """
    places = tuple(k for k, origin in enumerate(ins) if origin.leaves)
    data = [x.aval for k, x in enumerate(eqn.invars) if k not in places]
    outs = tuple(x.aval for x in eqn.outvars)
    origins = tuple(ins[k] for k in places)
    # Zeros would be gone back through otherwise, and 0 times inf is NaN.
    moved = moved_outputs(eqn, [bool(origin.by) for origin in ins])
    pairs = enumerate(zip(wanted, moved))
    reached = tuple(k for k, (comes, moves) in pairs if comes and moves)
    return Use(eqn, places, origins, tuple(data), outs, loops, reached)
