"""Where the loss of one example uses its parameters.

The program of the loss (its jaxpr) is split. Some values come from parameters alone,
such as a weight that was cast, transposed or reshaped. Where such a value meets data is
a use, for example the matrix product of a layer. The gradient of an example is known
from what comes into each use and the cotangent of what comes out of it.

Calls of jit and jax.checkpoint are entered, and so is the body of a scan. All else that
has a body (cond, while, custom derivatives) is one use as a whole.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._jaxpr import has_backward_rule, is_literal
from ._views import View, view_after
from ._wide import can_widen, is_narrow, wide_equation


class Origin(NamedTuple):
    """What a value is made of."""

    leaves: frozenset[int] = frozenset()  # the numbers of the parameters in it
    # the scans whose slices are in it, by depth
    loops: frozenset[int] = frozenset()
    is_data: bool = False  # whether the example is in it
    # whether gradients of examples must be made one by one: the way back from it to a
    # parameter may not be linear, or rounds to 16 bits what should be added up first
    one_by_one: bool = False
    view: View | None = None  # set where it is one parameter, rearranged


CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")
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

    @property
    def name(self) -> str:
        return "identity" if self.eqn is None else self.eqn.primitive.name

    @property
    def is_narrow(self) -> bool:
        """Whether gradients by its operands, or cotangents, have 16 bits or fewer."""
        types = list(self.outs)
        if self.eqn is not None:
            types += [self.eqn.invars[place].aval for place in self.places]
        return any(map(is_narrow, types))

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
        """The outputs that have a derivative."""
        outs = enumerate(self.outs)
        return [k for k, out in outs if jnp.issubdtype(out.dtype, jnp.inexact)]


class Evaluate(NamedTuple):
    """An equation of one kind of values."""

    eqn: Any
    origin: Origin  # of its outputs

    def uses(self) -> list[Use]:
        return []


class Meet(NamedTuple):
    """An equation that is a use."""

    eqn: Any
    use: Use

    def uses(self) -> list[Use]:
        return [self.use]


class Call(NamedTuple):
    """A call whose body is entered."""

    eqn: Any
    inner: "Plan"
    consts: list[Any]

    def uses(self) -> list[Use]:
        return self.inner.uses()


class Scan(NamedTuple):
    """A scan, whose body is entered in each turn."""

    eqn: Any
    inner: "Plan"
    consts: list[Any]
    # inputs that are taken for data: first values of carries
    entries: dict[int, Use]
    depth: int  # how many scans are around it

    def uses(self) -> list[Use]:
        return [*self.entries.values(), *self.inner.uses()]


Step = Evaluate | Meet | Call | Scan


class Plan(NamedTuple):
    """A program, split at its uses."""

    jaxpr: Any
    steps: list[Step]
    outs: list[Origin]
    exports: dict[int, Use]  # outputs that are taken for data

    def uses(self) -> list[Use]:
        """All uses, in the order in which the program runs into them."""
        inside = [use for step in self.steps for use in step.uses()]
        return inside + list(self.exports.values())


class Traced(NamedTuple):
    """The program of the loss of one example."""

    plan: Plan
    consts: list[Any]
    out_tree: Any  # of (value, aux)


def trace(loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> Traced:
    """Traces `loss(params, example)` for one example of a batch."""
    found = []

    def capture(params: Any, example: Any) -> jax.Array:
        program = jax.make_jaxpr(loss, return_shape=True)(params, example)
        found.append(program)
        return jnp.zeros(())

    # Inside vmap a batch has the types of its examples.
    jax.make_jaxpr(jax.vmap(capture, (None, 0)))(params, batch)
    closed, shapes = found[0]
    leaves = jax.tree.leaves(params)
    origins = [_parameter(number, leaf) for number, leaf in enumerate(leaves)]
    origins += [DATA] * len(jax.tree.leaves(batch))
    plan = plan_of(closed.jaxpr, origins, ())
    return Traced(_exporting(plan), closed.consts, jax.tree.structure(shapes))


def _parameter(number: int, leaf: Any) -> Origin:
    return Origin(
        frozenset([number]), view=View(leaf.shape, tuple(range(leaf.ndim)))
    )


def plan_of(jaxpr: Any, origins: list[Origin], loops: tuple[int, ...]) -> Plan:
    """Splits a program, given where its inputs come from."""
    table = dict.fromkeys(jaxpr.constvars, CONSTANT)
    table |= dict(zip(jaxpr.invars, origins))
    steps = []
    for eqn in jaxpr.eqns:
        step, outs = _step(
            eqn, [origin_of(table, x) for x in eqn.invars], loops
        )
        table |= dict(zip(eqn.outvars, outs))
        steps.append(step)
    return Plan(jaxpr, steps, [origin_of(table, x) for x in jaxpr.outvars], {})


def origin_of(table: dict[Any, Origin], atom: Any) -> Origin:
    return CONSTANT if is_literal(atom) else table[atom]


def _step(
    eqn: Any, ins: list[Origin], loops: tuple[int, ...]
) -> tuple[Step, list[Origin]]:
    """What to do with an equation, and where its outputs come from."""
    leaves = frozenset().union(*(origin.leaves for origin in ins))
    if not any(origin.is_data for origin in ins):
        inside = frozenset().union(*(origin.loops for origin in ins))
        view = view_after(eqn, [origin.view for origin in ins])
        one_by_one = any(origin.one_by_one for origin in ins)
        one_by_one = one_by_one or has_backward_rule(eqn)
        types = [x.aval for x in (*eqn.invars, *eqn.outvars)]
        if any(map(is_narrow, types)) and not can_widen(eqn):
            one_by_one = True
        out = Origin(leaves, inside, view=view, one_by_one=one_by_one)
        return Evaluate(eqn, out), [out] * len(eqn.outvars)
    data = [DATA] * len(eqn.outvars)
    if not leaves:
        return Evaluate(eqn, DATA), data
    if eqn.primitive.name in CALLS:
        body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = plan_of(getattr(body, "jaxpr", body), ins, loops)
        return Call(eqn, inner, getattr(body, "consts", [])), inner.outs
    if eqn.primitive.name == "scan":
        return _scan(eqn, ins, loops), data
    return Meet(eqn, _use(eqn, ins, loops)), data


def _scan(eqn: Any, ins: list[Origin], loops: tuple[int, ...]) -> Scan:
    """A scan. What it carries is data, since it differs from turn to turn."""
    first, carried = counts_of_scan(eqn)
    last = first + carried
    entries = {}
    for place in range(first, last):
        if ins[place].leaves:
            aval = eqn.invars[place].aval
            entries[place] = taken_as_data(ins[place], aval, loops)
    depth = len(loops)
    sliced = [_slice_of(origin, depth) for origin in ins[last:]]
    origins = [*ins[:first], *[DATA] * carried, *sliced]
    inside = (*loops, eqn.params["length"])
    body = eqn.params["jaxpr"]
    inner = _exporting(plan_of(body.jaxpr, origins, inside), inside)
    return Scan(eqn, inner, body.consts, entries, depth)


def counts_of_scan(eqn: Any) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # So in JAX 0.12.
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def _slice_of(origin: Origin, depth: int) -> Origin:
    """What a scan hands to its body in one turn."""
    if origin.is_data:
        return DATA
    view = origin.view and origin.view.sliced(depth)
    return origin._replace(loops=origin.loops | {depth}, view=view)


def _exporting(plan: Plan, loops: tuple[int, ...] = ()) -> Plan:
    """The plan, with outputs made of parameters taken for data."""
    exports = {}
    for place, origin in enumerate(plan.outs):
        if origin.leaves and not origin.is_data:
            aval = plan.jaxpr.outvars[place].aval
            exports[place] = taken_as_data(origin, aval, loops)
    return plan._replace(exports=exports)


def taken_as_data(origin: Origin, aval: Any, loops: tuple[int, ...]) -> Use:
    return Use(None, (0,), (origin,), (), (aval,), loops)


def _use(eqn: Any, ins: list[Origin], loops: tuple[int, ...]) -> Use:
    places = tuple(k for k, origin in enumerate(ins) if origin.leaves)
    data = [x.aval for k, x in enumerate(eqn.invars) if k not in places]
    outs = tuple(x.aval for x in eqn.outvars)
    origins = tuple(ins[k] for k in places)
    return Use(eqn, places, origins, tuple(data), outs, loops)
