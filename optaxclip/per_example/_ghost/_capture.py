"""Captures the data that meet parameters, and the cotangents of what comes out.

The program of the loss of one example (its jaxpr) is split. Some values are made of
parameters alone, such as a weight that was cast or transposed. Where such a value, an
operand, meets data is a use, for example the matrix product of a layer. The gradient of
an example is known from the data that come into each use and the cotangents of what
comes out of it.

    split_loss   finds the uses, and what operands are made of
    capture      runs the losses of a batch forward and backward. Each output of a use
                 has a tap: a value whose cotangent is that of the output

Calls of jit and jax.checkpoint are entered, and so is the body of a scan. All else that
has a body (cond, while, custom derivatives) is one use as a whole. So is a backward
rule of somebody's own (custom_vjp) even without data, since it may not be linear.

What is in a scan has axes for its turns in front, the outermost scan first.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ... import _jaxpr
from ..._jaxpr import CALLS
from ..._mesh import typed_as_varying, varying_as
from .._passes import is_narrow, widened, written

# Uses that are sums: their gradient does not need what comes in beside the operand.
SUMS = ("add", "sub", "add_any", "concatenate")
# They keep all numbers of a parameter, maybe in another order.
KEEPS = ("convert_element_type", "copy", "pvary", "sharding_constraint")
MOVES = ("broadcast_in_dim", "expand_dims", "reshape", "rev", "squeeze")
# What they compute is right with float32 in the place of 16 bits.
WIDENED = {*KEEPS, *MOVES, "add", "add_any", "sub", "mul", "div", "neg", "concatenate"}
WIDENED |= {"transpose", "dynamic_slice", "gather", "select_n", "reduce_sum"}
WIDENED |= {"slice", "split", "conv_general_dilated", "dot_general"}
Flags = list[bool]
Loops = tuple[int, ...]  # the lengths of scans, outermost first


class View(NamedTuple):
    """A parameter, or what scans take of it in a turn, in another order."""

    # What was done to it, but for casts and transposes. Uses of a parameter with the
    # same path have the same numbers at the same places.
    path: tuple[Any, ...]
    axes: tuple[int, ...]  # where its axes were before it was transposed


NONE = frozenset[int]()


class Origin(NamedTuple):
    """What a value is made of."""

    # Gives it, where the example is not in it: from parameters by their numbers, and
    # from what was made of them before. In float32 instead of 16 bits if that can be.
    make: Callable[[dict[Any, Any]], Any]
    # the parameters that it has a derivative by, as numbers
    by: frozenset[int] = NONE
    loops: frozenset[int] = NONE  # the scans that slice it, by depth
    is_data: bool = False  # whether the example is in it
    depth: int = 0  # how many operations on parameters are before it
    view: View | None = None  # set where it is one parameter, rearranged


DATA = Origin({}.get, is_data=True)


class Use(NamedTuple):
    """An equation in which operands meet data."""

    eqn: Any  # None where an operand is taken for data as it is
    name: str  # of its primitive
    places: tuple[int, ...]  # which of its inputs are operands
    origins: tuple[Origin, ...]  # of those
    data: list[Any]  # the types of its other inputs
    outs: list[Any]  # the types of its outputs
    # the outputs that a backward pass from the loss to the parameters comes by
    tapped: tuple[int, ...]
    loops: Loops  # of the scans around it

    @property
    def kept(self) -> int:
        """How many numbers are captured of it in one example."""
        kept = [self.outs[k] for k in self.tapped]
        kept += [] if self.name in SUMS else self.data
        return math.prod(self.loops) * sum(x.size for x in kept)


class Step(NamedTuple):
    """What to do with one equation."""

    eqn: Any  # None where a variable is taken for data
    ins: list[Any]  # variables, or literals
    outs: list[Any]
    use: Use | None = None
    # the body of a call or scan, if it is entered
    inner: "Program | None" = None


class Program(NamedTuple):
    """A program, split at its uses."""

    jaxpr: Any
    consts: list[Any]
    steps: list[Step]
    outs: list[Origin]

    def uses(self) -> list[Use]:
        """All uses, in the order in which the program runs into them."""
        found: list[Use] = []
        for step in self.steps:
            found += [step.use] if step.use else []
            found += step.inner.uses() if step.inner else []
        return found


# What is kept of one use: the data that came in, and the cotangents of the outputs that
# are tapped. Arrays are [example, *turns of scans, ...].
Captured = tuple[list[Array], list[Array]]


class CannotSplit(Exception):
    """The parts of a loss would compute other numbers than the whole."""


def split_loss(loss: Any, params: list[Array]) -> Program:
    """Splits the program of the loss of one example.

    Raises:
      CannotSplit: refs (jax.new_ref), which have no place in equations, a rule for
        parameters that asks which of its inputs have a derivative, random bits that are
        others under vmap, a kernel of a convolution that differs by example, whose
        derivative lets NaN through to other examples on a CPU, or more operations on
        parameters alone than Python can call in one another.
    """
    if any(map(_jaxpr.has_refs, loss.jaxpr.eqns)):
        raise CannotSplit
    origins = []
    for number, leaf in enumerate(params):
        view = View((), tuple(range(leaf.ndim)))
        by = frozenset([number])
        origins.append(Origin(itemgetter(number), by, view=view))
    origins += [DATA] * (len(loss.jaxpr.invars) - len(params))
    # After the value of the loss comes aux, which is not gone back through.
    wanted = [place == 0 for place in range(len(loss.jaxpr.outvars))]
    return _split(loss, origins, wanted, (), is_call=False)


def _split(
    body: Any, origins: list[Origin], wanted: Flags, loops: Loops, is_call: bool
) -> Program:
    """Splits a program.

    Args:
      body: the program.
      origins: those of its inputs.
      wanted: of each output, whether a backward pass comes from it.
      loops: the lengths of the scans around it.
      is_call: whether outputs may be operands. Elsewhere they are taken for data.
    """
    jaxpr, consts = getattr(body, "jaxpr", body), getattr(body, "consts", [])
    # By identity, since literals, which are constants too, cannot be hashed.
    table = dict(zip(map(id, jaxpr.constvars), map(_constant, consts)))
    table |= zip(map(id, jaxpr.invars), origins)
    steps: list[Step] = []

    def origin_of(atom: Any, comes: bool = True) -> Origin:
        origin = table.get(id(atom)) or _constant(atom.val)
        # What no backward pass comes by has no derivative.
        return origin if comes else origin._replace(by=NONE)

    def take_for_data(atoms: list[Any], wanted: Flags) -> None:
        for atom, comes in zip(atoms, wanted):
            origin = origin_of(atom, comes)
            if origin.by:
                own = "identity", (0,), (origin,), [], [atom.aval]
                use = Use(None, *own, (0,), loops)
                steps.append(Step(None, [atom], [atom], use))
                table[id(atom)] = DATA

    flows, _ = _jaxpr.backward_through(jaxpr, wanted)
    convolved = list(map(_jaxpr.has_convolution, jaxpr.eqns))
    for eqn, convolves, (comes, goes) in zip(jaxpr.eqns, convolved, flows):
        ins = list(map(origin_of, eqn.invars, goes))
        by = NONE.union(*(origin.by for origin in ins))
        is_data = any(origin.is_data for origin in ins)
        is_use = bool(by) and (is_data or _jaxpr.has_backward_rule(eqn))
        name, inner, use = eqn.primitive.name, None, None
        outs = [DATA] * len(eqn.outvars)
        if (by or convolves) and name in CALLS:
            inner = _split(_jaxpr.body_of(eqn), ins, comes, loops, is_call=True)
            outs = inner.outs
        elif (is_use or (is_data and convolves)) and name == "scan":
            # What it carries is data, since it differs from turn to turn.
            first, carried = _jaxpr.counts_of_scan(eqn)
            carry = slice(first, first + carried)
            take_for_data(eqn.invars[carry], goes[carry])
            sliced = [_slice(x, len(loops)) for x in ins[carry.stop :]]
            ins = [*ins[:first], *[DATA] * carried, *sliced]
            inside = (*loops, eqn.params["length"])
            inner = _split(_jaxpr.body_of(eqn), ins, comes, inside, False)
        else:
            # What is made of parameters alone is made for all turns of a scan at once.
            is_mapped = is_use or (loops and not is_data)
            changes = is_mapped and _jaxpr.has_bits_that_vmap_changes(eqn)
            if changes or (by and _jaxpr.asks_what_moves(eqn)):
                raise CannotSplit
            kernels = ins[1:] if name == "conv_general_dilated" else ins
            if convolves and any(origin.is_data for origin in kernels):
                raise CannotSplit
            if is_use:
                places = tuple(k for k, origin in enumerate(ins) if origin.by)
                own = tuple(ins[k] for k in places)
                data = [x.aval for k, x in enumerate(eqn.invars) if k not in places]
                types = [x.aval for x in eqn.outvars]
                floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in types]
                tapped = [k for k, each in enumerate(zip(comes, floats)) if all(each)]
                use = Use(eqn, name, places, own, data, types, tuple(tapped), loops)
            elif not is_data:
                outs = _made(eqn, ins, by)
        steps.append(Step(eqn, eqn.invars, eqn.outvars, use, inner))
        table |= zip(map(id, eqn.outvars), outs)
    if not is_call:
        take_for_data(jaxpr.outvars, wanted)
    return Program(jaxpr, consts, steps, list(map(origin_of, jaxpr.outvars)))


def _constant(value: Any) -> Origin:
    return Origin(lambda made: value)


def _made(eqn: Any, ins: list[Origin], by: frozenset[int]) -> list[Origin]:
    """The origins of the outputs of an equation without data."""
    loops = NONE.union(*(origin.loops for origin in ins))
    depth = 1 + max((origin.depth for origin in ins), default=0)
    # Python would call all of them in one another.
    if depth > 100:
        raise CannotSplit

    def outs(made: dict[Any, Any]) -> list[Any]:
        if outs not in made:
            run = partial(bind, eqn, is_wide=True)
            # For all turns at once. The axis of the outermost scan is in front.
            for depth in sorted(loops, reverse=True):
                axes = [0 if depth in x.loops else None for x in ins]
                run = jax.vmap(run, (axes,))
            made[outs] = run([x.make(made) for x in ins])
        return made[outs]

    by = NONE if _jaxpr.is_stop(eqn) else by
    view = _view_after(eqn, [origin.view for origin in ins])
    makes = [lambda made, k=k: outs(made)[k] for k in range(len(eqn.outvars))]
    return [Origin(make, by, loops, depth=depth, view=view) for make in makes]


def _slice(origin: Origin, depth: int) -> Origin:
    """What a scan hands to its body in one turn."""
    view = origin.view
    if view:
        path = *view.path, ("scan", view.axes)
        view = View(path, tuple(range(len(view.axes) - 1)))
    return origin._replace(loops=origin.loops | {depth}, view=view)


def _view_after(eqn: Any, views: list[View | None]) -> View | None:
    """The view that the output of an equation is, or None if it is not one."""
    # What is made of two values, such as a sum of weights, is not one rearranged. Nor
    # are numbers that were copied, which would be counted more than once.
    if len(views) != 1 or views[0] is None or not eqn.outvars:
        return None
    path, axes = views[0]
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    name, params = eqn.primitive.name, eqn.params
    if name in KEEPS:
        return views[0]
    if name == "transpose":
        return View(path, tuple(axes[k] for k in params["permutation"]))
    if name not in MOVES or before.size != after.size:
        return None
    return View((*path, (name, axes, str(params))), tuple(range(after.ndim)))


def bind(eqn: Any, ins: list[Any], is_wide: bool = False) -> list[Any]:
    """The outputs of an equation. With `is_wide`, in float32 instead of 16 bits where
    that can be.
    """
    params = eqn.params
    if is_wide and eqn.primitive.name == "pad":
        # JAX 0.10.2 cannot differentiate lax.pad by the value alone.
        (x, value), edges = widened(ins), params["padding_config"]
        is_inside = lax.pad(jnp.ones(x.shape, bool), False, edges)
        padded = lax.pad(x, jnp.zeros((), x.dtype), edges)
        return [jnp.where(is_inside, padded, value)]
    if is_wide and eqn.primitive.name in WIDENED:
        ins = widened(ins)
        for key in ("new_dtype", "preferred_element_type"):
            dtype = params.get(key)
            if dtype is not None and is_narrow(dtype):
                params = params | {key: np.dtype(np.float32)}
    elif is_wide:
        pairs = zip(ins, [x.aval for x in eqn.invars])
        ins = [x.astype(y.dtype) if is_narrow(y) else x for x, y in pairs]
    # A custom_jvp keeps its functions as programs. They are made functions again.
    params = eqn.primitive.get_bind_params(params)
    with eqn.ctx.manager:  # such as the device that compute_on asks for
        outs = eqn.primitive.bind(*ins, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def capture(
    program: Program, params: list[Array], batch: list[Array]
) -> tuple[list[Array], list[Captured]]:
    """The outputs of the losses of a batch, and what is captured at each use."""
    size, taps = batch[0].shape[0], []
    for use in program.uses():
        outs = [use.outs[k] for k in use.tapped]
        # [example, *turns, ...]: stands for an output, to get its cotangent.
        own = [jnp.zeros((size, *use.loops, *x.shape), x.dtype) for x in outs]
        taps.append(list(map(varying_as, own, outs)))
    # In shard_map cotangents of another type would be summed over devices.
    zeros, taps = typed_as_varying(batch, (jnp.zeros(size, jnp.float32), taps))

    def of_one(example: Any, zero: Array, taps: Any) -> Any:
        (value, *aux), inputs = _run(program, [*params, *example], taps, zero)
        return value, (aux, inputs)

    of_all = partial(jax.vmap(of_one), batch, zeros)
    values, pull, (aux, inputs) = jax.vjp(of_all, taps, has_aux=True)
    # Each tap belongs to one example, so that one pass gives all cotangents.
    (cotangents,) = pull(jnp.ones_like(values))
    return [values, *aux], list(zip(*written((inputs, cotangents))))


def _run(
    program: Program, args: list[Any], taps: list[Any], zero: Array
) -> tuple[list[Any], list[Any]]:
    """The outputs of a program, and the data that came into each use.

    Args:
      program: the program.
      args: its inputs.
      taps: for each use a list, with a tap for each output that has one.
      zero: float32[], a part of the example.
    """
    values = dict(zip(map(id, program.jaxpr.constvars), program.consts))
    values |= zip(map(id, program.jaxpr.invars), args)
    rest, inputs = iter(taps), []

    def of(atoms: list[Any]) -> list[Any]:
        return [values.get(id(x), getattr(x, "val", None)) for x in atoms]

    for eqn, ins, outs, use, inner in program.steps:
        ins, names = of(ins), outs
        if inner:
            own = list(islice(rest, len(inner.uses())))
            outs, inside = _entered(eqn, inner)(ins, own, zero)
            inputs += inside
        else:
            outs = bind(eqn, ins) if eqn else list(ins)
        if use:
            for k, tap in zip(use.tapped, next(rest)):
                # What is the same for all examples would have one cotangent for all.
                outs[k] = _tapped(outs[k] + zero.astype(outs[k].dtype), tap)
            data = [x for k, x in enumerate(ins) if k not in use.places]
            inputs.append(data)
        values |= zip(map(id, names), outs)
    return of(program.jaxpr.outvars), inputs


@jax.custom_vjp
def _tapped(out: Array, tap: Array) -> Array:
    """The output, whose cotangent also goes to the tap.

    A sum with the tap would do, but the zeros that it adds would be held in memory.
    """
    return out


_tapped.defvjp(lambda out, tap: (out, None), lambda _, x: (x, x))


def _entered(eqn: Any, inner: Program) -> Callable[..., Any]:
    """`_run` of the body of a call or scan, as a function of inputs, taps and zero."""
    run, params = partial(_run, inner), eqn.params
    if eqn.primitive.name in ("checkpoint", "remat2"):
        kept = {key: params[key] for key in ("prevent_cse", "policy")}
        return jax.checkpoint(run, **kept)
    if eqn.primitive.name != "scan":
        return run
    first, carried = _jaxpr.counts_of_scan(eqn)
    last = first + carried

    def loop(ins: list[Any], taps: list[Any], zero: Array) -> Any:
        def body(carry: list[Any], turn: Any) -> tuple[Any, Any]:
            xs, taps = turn
            outs, inputs = run([*ins[:first], *carry, *xs], taps, zero)
            return outs[:carried], (outs[carried:], inputs)

        # So that the loop runs as the loss asks for.
        kept = {key: params[key] for key in ("length", "reverse", "unroll")}
        start, xs = ins[first:last], (ins[last:], taps)
        carry, (ys, inputs) = lax.scan(body, start, xs, **kept)
        return [*carry, *ys], inputs

    return loop
