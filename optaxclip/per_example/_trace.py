"""Where the loss of one example uses its parameters.

The program of the loss (its jaxpr) is split. Some values come from parameters alone,
such as a weight that was cast, transposed or reshaped. Where such a value meets data is
a use, for example the matrix product of a layer. The gradient of an example is known
from what comes into each use and the cotangent of what comes out of it.

Calls of jit and jax.checkpoint are entered, and so is the body of a scan. All else that
has a body (cond, while, custom derivatives) is one use as a whole.
"""

from typing import Any, NamedTuple

import jax

from .._jaxpr import (
    CALLS,
    asks_what_moves,
    body_of,
    counts_of_scan,
    has_backward_rule,
    has_bits_that_vmap_changes,
    has_refs,
    is_literal,
    is_stop,
    reached_backward,
    reached_operands,
    wanted_in_scan,
)
from ._problem import Problem
from ._uses import CONSTANT, DATA, Origin, Use, taken_as_data, use_of
from ._views import View, view_after
from ._wide import can_widen, rounds


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


def trace(problem: Problem) -> Traced | None:
    """Splits the loss of one example of a batch.

    None where it cannot be split. What is written to refs (jax.new_ref) has no place in
    equations. Nor may a rule for parameters ask which of its inputs have a derivative,
    nor random bits be those of a key that is not of threefry.
    """
    closed, shapes = problem.program()
    if any(map(has_refs, closed.jaxpr.eqns)):
        return None
    leaves = jax.tree.leaves(problem.params)
    origins = [_parameter(number, leaf) for number, leaf in enumerate(leaves)]
    origins += [DATA] * len(jax.tree.leaves(problem.batch))
    # After the value of the loss comes aux, which is not gone back through.
    wanted = [place == 0 for place in range(len(closed.jaxpr.outvars))]
    plan = plan_of(closed.jaxpr, origins, (), wanted)
    if _must_stay_whole(plan):
        return None
    return Traced(_exporting(plan), closed.consts, jax.tree.structure(shapes))


def _parameter(number: int, leaf: Any) -> Origin:
    own, view = frozenset([number]), View(leaf.shape, tuple(range(leaf.ndim)))
    return Origin(own, own, view=view)


def plan_of(
    jaxpr: Any,
    origins: list[Origin],
    loops: tuple[int, ...],
    wanted: list[bool],
) -> Plan:
    """Splits a program, given where its inputs come from.

    Args:
      jaxpr: the program.
      origins: those of its inputs.
      loops: the lengths of the scans around it.
      wanted: of each output, whether a backward pass comes from it.
    """
    table = dict.fromkeys(jaxpr.constvars, CONSTANT)
    table |= dict(zip(jaxpr.invars, origins))
    reached = reached_backward(jaxpr, wanted)
    steps = []
    for eqn in jaxpr.eqns:
        ins = [origin_of(table, x) for x in eqn.invars]
        own = [x in reached for x in eqn.outvars]
        pairs = zip(ins, reached_operands(eqn, own))
        ins = [x if comes else x.without_derivative() for x, comes in pairs]
        step, found = _step(eqn, ins, own, loops)
        table |= dict(zip(eqn.outvars, found))
        steps.append(step)
    return Plan(jaxpr, steps, [origin_of(table, x) for x in jaxpr.outvars], {})


def origin_of(table: dict[Any, Origin], atom: Any) -> Origin:
    return CONSTANT if is_literal(atom) else table[atom]


def _step(
    eqn: Any, ins: list[Origin], wanted: list[bool], loops: tuple[int, ...]
) -> tuple[Step, list[Origin]]:
    """What to do with an equation, and where its outputs come from. `wanted` says of
    each whether a backward pass comes from it.
    """
    leaves = frozenset().union(*(origin.leaves for origin in ins))
    data = [DATA] * len(eqn.outvars)
    if not leaves:
        is_data = any(origin.is_data for origin in ins)
        # A constant that a scan slices differs from turn to turn, and so does what is
        # made of it.
        turns = frozenset[int]().union(*(origin.loops for origin in ins))
        out = DATA if is_data else Origin(loops=turns)
        return Evaluate(eqn, out), [out] * len(eqn.outvars)
    if eqn.primitive.name in CALLS:
        body = body_of(eqn)
        inner = plan_of(getattr(body, "jaxpr", body), ins, loops, wanted)
        return Call(eqn, inner, getattr(body, "consts", [])), inner.outs
    if not any(origin.is_data for origin in ins):
        out = _made_of(eqn, ins)
        return Evaluate(eqn, out), [out] * len(eqn.outvars)
    if eqn.primitive.name == "scan":
        step = _scan(eqn, ins, wanted, loops)
        if not _has_rule_for_all_turns(step.inner, len(loops) + 1):
            return step, data
    return Meet(eqn, use_of(eqn, ins, wanted, loops)), data


def _made_of(eqn: Any, ins: list[Origin]) -> Origin:
    """What an equation makes of parameters alone."""
    every = frozenset[int]()
    leaves = every.union(*(origin.leaves for origin in ins))
    by = every.union(*(origin.by for origin in ins))
    loops = every.union(*(origin.loops for origin in ins))
    view = view_after(eqn, [origin.view for origin in ins])
    one_by_one = any(origin.one_by_one for origin in ins)
    one_by_one |= has_backward_rule(eqn)
    one_by_one |= rounds(eqn) and not can_widen(eqn)
    out = Origin(leaves, by, loops, view=view, one_by_one=one_by_one)
    return out.without_derivative() if is_stop(eqn) else out


def _scan(
    eqn: Any, ins: list[Origin], wanted: list[bool], loops: tuple[int, ...]
) -> Scan:
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
    wanted = wanted_in_scan(eqn, wanted)
    inner = _exporting(plan_of(body.jaxpr, origins, inside, wanted), inside)
    return Scan(eqn, inner, body.consts, entries, depth)


def _has_rule_for_all_turns(plan: Plan, depth: int) -> bool:
    """Whether parameters that several turns share come through a backward rule of
    somebody's own. JAX applies it in each turn, and what is made of parameters is made
    once for all of them. Such a scan is one use as a whole.
    """
    for step in plan.steps:
        if isinstance(step, Evaluate):
            shared = step.origin.leaves and len(step.origin.loops) < depth
            if shared and has_backward_rule(step.eqn):
                return True
        elif isinstance(step, (Call, Scan)):
            inside = depth + isinstance(step, Scan)
            if _has_rule_for_all_turns(step.inner, inside):
                return True
    return False


def _must_stay_whole(plan: Plan, in_scan: bool = False) -> bool:
    """Whether parts of a program would give other numbers than the whole: a rule asks
    which inputs have a derivative, or random bits differ under vmap.
    """
    for step in plan.steps:
        if isinstance(step, (Call, Scan)):
            inside = in_scan or isinstance(step, Scan)
            if _must_stay_whole(step.inner, inside):
                return True
            continue
        is_use = isinstance(step, Meet)
        of_params = is_use or bool(step.origin.leaves)
        # Without data it is made for all turns of a scan at once.
        under_vmap = is_use or (in_scan and not step.origin.is_data)
        if of_params and asks_what_moves(step.eqn):
            return True
        if under_vmap and has_bits_that_vmap_changes(step.eqn):
            return True
    return False


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
        if origin.leaves:
            aval = plan.jaxpr.outvars[place].aval
            exports[place] = taken_as_data(origin, aval, loops)
    return plan._replace(exports=exports)
