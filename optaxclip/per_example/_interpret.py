"""Running a split program in its two parts.

    operands   the values made of parameters alone, as they come to their uses
    run        the rest, with a tap at each use: the cotangent of the tap is that of
               the outputs of the use

Operands that a scan slices have an axis for its turns in front, the outermost scan
first. So have taps and inputs of uses inside scans.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import jax
from jax import lax

from .._jaxpr import counts_of_scan, is_literal
from ._trace import Call, Evaluate, Meet, Plan, Scan
from ._uses import Origin, Use
from ._wide import can_widen, is_narrow, wide_equation, widened


class Feed(NamedTuple):
    """What a run is given and gives at its uses, in order."""

    operands: Iterator[Any]  # one for each place of each use
    # of each use: a list, with one for each output that has a derivative
    taps: Iterator[Any]
    zero: jax.Array  # float32[], a part of the example
    inputs: list[Any]  # of each use: the data that came into it


def bind(eqn: Any, ins: list[Any]) -> list[Any]:
    """The outputs of an equation."""
    # A custom_jvp keeps its functions as programs. They are made functions again.
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:  # such as the device that compute_on asks for
        outs = eqn.primitive.bind(*ins, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


class _Values(dict[Any, Any]):
    """The values of variables. None for those of the other part."""

    def __init__(self, plan: Plan, consts: list[Any], args: list[Any]) -> None:
        super().__init__(zip(plan.jaxpr.constvars, consts))
        self.update(zip(plan.jaxpr.invars, args))

    def of(self, atoms: list[Any]) -> list[Any]:
        return [x.val if is_literal(x) else self.get(x) for x in atoms]


def operands(
    plan: Plan, consts: list[Any], args: list[Any], is_wide: bool = False
) -> tuple[list[Any], list[Any]]:
    """The outputs that are made of parameters alone, and the operands of all uses.

    `is_wide`: with float32 in the place of 16 bits, where that can be.
    """
    # Values of data are never set. Read as None, they are not used.
    values = _Values(plan, consts, args)
    found = []
    for step in plan.steps:
        ins = values.of(step.eqn.invars)
        outs = []
        if isinstance(step, Evaluate):
            outs = [] if step.origin.is_data else _made(step, ins, is_wide)
        elif isinstance(step, Meet):
            found += [ins[place] for place in step.use.places]
        elif isinstance(step, Call):
            outs, inside = operands(step.inner, step.consts, ins, is_wide)
            found += inside
        else:
            found += [ins[place] for place in step.entries]
            found += _operands_in_scan(step, ins, is_wide)
        values.update(zip(step.eqn.outvars, outs))
    outs = values.of(plan.jaxpr.outvars)
    return outs, found + [outs[place] for place in plan.exports]


def _made(step: Evaluate, ins: list[Any], is_wide: bool) -> list[Any]:
    """The outputs of an equation of parameters."""
    if not is_wide:
        return bind(step.eqn, ins)
    if can_widen(step.eqn):
        return bind(wide_equation(step.eqn), widened(ins))
    pairs = zip(ins, (x.aval for x in step.eqn.invars))
    ins = [x.astype(y.dtype) if is_narrow(y) else x for x, y in pairs]
    return bind(step.eqn, ins)


def _operands_in_scan(step: Scan, ins: list[Any], is_wide: bool) -> list[Any]:
    """The operands of all turns at once."""
    first, count = counts_of_scan(step.eqn)
    # What is carried is data. So no turn needs the one before, and vmap does instead of
    # a loop.
    carried = [None] * count

    def body(consts: list[Any], xs: list[Any]) -> list[Any]:
        args = [*consts, *carried, *xs]
        return operands(step.inner, step.consts, args, is_wide)[1]

    # Operands that all turns share have no axis for them.
    axes = [
        0 if step.depth in origin.loops else None for origin in _origins(step)
    ]
    run = jax.vmap(body, (None, 0), axes, axis_size=step.eqn.params["length"])
    return run(ins[:first], ins[first + count :])


def run(
    plan: Plan, consts: list[Any], args: list[Any], feed: Feed
) -> list[Any]:
    """The outputs that depend on data. Inputs of uses are added to the feed."""
    values = _Values(plan, consts, args)
    for step in plan.steps:
        ins = values.of(step.eqn.invars)
        outs = []
        if isinstance(step, Evaluate):
            # What is made of parameters alone comes from the feed, where it is used.
            outs = [] if step.origin.leaves else bind(step.eqn, ins)
        elif isinstance(step, Meet):
            outs = _run_use(step.use, ins, feed)
        elif isinstance(step, Call):
            outs = _run_call(step, ins, feed)
        else:
            outs = _run_scan(step, ins, feed)
        values.update(zip(step.eqn.outvars, outs))
    outs = values.of(plan.jaxpr.outvars)
    # A parameter that is returned as it is needs a tap as well.
    for place, use in plan.exports.items():
        (outs[place],) = _run_use(use, [None], feed)
    return outs


def apply(use: Use, operands: list[Any], data: list[Any]) -> list[Any]:
    """The outputs of a use that have a derivative."""
    if use.eqn is None:
        return operands
    rest, given = iter(data), dict(zip(use.places, operands))
    places = range(len(use.eqn.invars))
    # Back in the order that the equation has.
    outs = bind(
        use.eqn, [given[k] if k in given else next(rest) for k in places]
    )
    return [outs[k] for k in use.tapped]


def _run_use(use: Use, ins: list[Any], feed: Feed) -> list[Any]:
    for place in use.places:
        ins[place] = next(feed.operands)
    outs = ins if use.eqn is None else bind(use.eqn, ins)
    for place, tap in zip(use.tapped, next(feed.taps)):
        # Values that are the same for all examples would have one cotangent for all.
        each = outs[place] + feed.zero.astype(outs[place].dtype)
        outs[place] = _tapped(each, tap)
    feed.inputs.append([x for k, x in enumerate(ins) if k not in use.places])
    return outs


@jax.custom_vjp
def _tapped(out: jax.Array, tap: jax.Array) -> jax.Array:
    """The output, whose cotangent also goes to the tap.

    A sum with the tap would do, but the zeros that it adds would be held in memory.
    """
    return out


_tapped.defvjp(
    lambda out, tap: (out, None), lambda _, cotangent: (cotangent,) * 2
)


def _run_call(step: Call, ins: list[Any], feed: Feed) -> list[Any]:
    given = _share_of(feed, step.inner.uses())

    # With lists instead of iterators, since jax.checkpoint takes and returns pytrees.
    def inside(ins: list[Any], given: tuple[Any, Any]) -> tuple[Any, Any]:
        own = Feed(iter(given[0]), iter(given[1]), feed.zero, [])
        return run(step.inner, step.consts, ins, own), own.inputs

    if step.eqn.primitive.name in ("checkpoint", "remat2"):
        kept = {key: step.eqn.params[key] for key in ("prevent_cse", "policy")}
        inside = jax.checkpoint(inside, **kept)
    outs, inputs = inside(ins, given)
    feed.inputs.extend(inputs)
    return outs


def _share_of(feed: Feed, uses: list[Use]) -> tuple[list[Any], list[Any]]:
    """What belongs to the uses in a body."""
    count = sum(len(use.places) for use in uses)
    taps = islice(feed.taps, len(uses))
    return list(islice(feed.operands, count)), list(taps)


def _run_scan(step: Scan, ins: list[Any], feed: Feed) -> list[Any]:
    for place, use in step.entries.items():
        (ins[place],) = _run_use(use, [None], feed)
    given, taps = _share_of(feed, step.inner.uses())
    is_sliced = [step.depth in origin.loops for origin in _origins(step)]
    first, carried = counts_of_scan(step.eqn)
    # lax.scan cuts what has an axis for its turns. None has no leaves to cut.
    slices = [x if is_cut else None for x, is_cut in zip(given, is_sliced)]

    def body(carry: list[Any], turn: Any) -> tuple[Any, Any]:
        xs, slices, taps = turn
        whole = zip(slices, given, is_sliced)
        chosen = [cut if is_cut else x for cut, x, is_cut in whole]
        own = Feed(iter(chosen), iter(taps), feed.zero, [])
        outs = run(step.inner, step.consts, [*ins[:first], *carry, *xs], own)
        return outs[:carried], (outs[carried:], own.inputs)

    # So that the loop runs as the loss asks for.
    params = step.eqn.params
    kept = {key: params[key] for key in ("length", "reverse", "unroll")}
    start, rest = ins[first : first + carried], ins[first + carried :]
    carry, (ys, inputs) = lax.scan(body, start, (rest, slices, taps), **kept)
    feed.inputs.extend(inputs)
    return [*carry, *ys]


def _origins(step: Scan) -> list[Origin]:
    """Of all operands in the body."""
    return [origin for use in step.inner.uses() for origin in use.origins]
