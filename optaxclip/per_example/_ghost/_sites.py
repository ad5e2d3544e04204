"""Sites: where the parameters of a loss meet data.

The program of the loss of one example (its jaxpr) is split. Some values are made of
parameters alone, such as a weight that was cast or transposed. An equation where such a
value, an operand, meets data is a site, for example the matrix product of a layer.

Calls of jit and jax.checkpoint are entered, and so is the body of a scan. Any other
equation that has a body (cond, while, custom derivatives) is one site. So is a backward
rule of the user's (custom_vjp) even without data, since it may not be linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import ShapedArray

from ... import _jaxpr
from ..._jaxpr import CALLS, Flags, Flow, type_of
from .._passes import is_narrow, widened

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

# Sites that are sums: their gradient does not need what comes in beside the operand.
SUMS = ("add", "sub", "add_any", "concatenate")
# They keep all numbers of a parameter, maybe in another order.
KEEPS = ("convert_element_type", "copy", "pvary", "sharding_constraint")
MOVES = ("broadcast_in_dim", "expand_dims", "reshape", "rev", "squeeze")
# What they compute is right with float32 instead of 16 bits.
WIDENED = {*KEEPS, *MOVES, "add", "add_any", "sub", "mul", "div", "neg", "concatenate"}
WIDENED |= {"transpose", "dynamic_slice", "gather", "select_n", "reduce_sum"}
WIDENED |= {"slice", "split", "conv_general_dilated", "dot_general"}


class View(NamedTuple):
    """A parameter, or what scans take of it in a turn, in another order."""

    # What was done to it, but for casts and transposes. Views of a parameter with the
    # same path have the same numbers at the same places.
    path: tuple[Any, ...]
    axes: tuple[int, ...]  # where its axes were before it was transposed


NO_INDICES = frozenset[int]()


class Origin(NamedTuple):
    """What a value is made of."""

    # Returns the value, where the example is not in it: from parameters by their
    # numbers, and from values made of them before. In float32 instead of 16 bits where
    # that is possible.
    make: Callable[[dict[Any, Any]], Any]
    # The parameters that it has a derivative by, as indices of leaves
    leaves: frozenset[int] = NO_INDICES
    scans: frozenset[int] = NO_INDICES  # the scans that slice it, by depth
    is_data: bool = False  # whether the example is in it
    depth: int = 0  # how many operations on parameters are before it
    view: View | None = None  # set where it is one parameter, rearranged


DATA = Origin({}.get, is_data=True)


class Site(NamedTuple):
    """An equation in which operands meet data."""

    number: int  # Sites are counted as the program runs into them.
    eqn: Any  # None where an operand is taken for data as it is
    name: str  # of its primitive
    operands: dict[int, Origin]  # by their places among the inputs
    data_types: list[ShapedArray]  # of its other inputs
    out_types: list[ShapedArray]
    # The outputs that a backward pass from the loss to the parameters comes by
    tapped: tuple[int, ...]
    scan_lengths: tuple[int, ...]  # of the scans around it, outermost first

    @property
    def captured_size(self) -> int:
        """How many numbers are captured of it in one example."""
        types = [self.out_types[index] for index in self.tapped]
        if self.name not in SUMS:
            types += self.data_types
        return math.prod(self.scan_lengths) * sum(x.size for x in types)


class Step(NamedTuple):
    """What to do with one equation."""

    eqn: JaxprEqn | None  # None where a variable is taken for data
    invars: Sequence[Any]  # variables, or literals
    outvars: Sequence[Any]
    site: Site | None = None
    # The body of a call or scan, if it is entered
    body: Program | None = None


class Program(NamedTuple):
    """A program, split at its sites."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
    steps: list[Step]
    out_origins: list[Origin]
    sites: list[Site]  # also those of bodies


class CannotSplit(Exception):
    """The parts of a loss would compute other numbers than the whole."""


def split_loss(loss: ClosedJaxpr, params: list[Array]) -> Program:
    """Splits the program of the loss of one example.

    Raises:
      CannotSplit: refs (jax.new_ref), which have no place in equations, a rule for
        parameters that asks which of its inputs have a derivative, a learned value of
        lax.pad, random bits that are others under vmap, a kernel of a convolution that
        differs by example, whose derivative lets NaN through to other examples on a
        CPU, or more operations on parameters alone than Python can call in one another.
    """
    if any(_jaxpr.has_refs(eqn) for eqn in loss.jaxpr.eqns):
        raise CannotSplit
    origins = [_parameter(number, leaf.ndim) for number, leaf in enumerate(params)]
    origins += [DATA] * (len(loss.jaxpr.invars) - len(params))
    # After the value of the loss comes aux, which has no cotangents.
    has_cotangent = [index == 0 for index in range(len(loss.jaxpr.outvars))]
    return _split(loss, origins, has_cotangent, (), numbers=count(), is_call=False)


def _parameter(number: int, ndim: int) -> Origin:
    view = View((), tuple(range(ndim)))
    return Origin(lambda values: values[number], frozenset([number]), view=view)


def _constant(value: Any) -> Origin:
    return Origin(lambda values: value)


def _split(
    program: ClosedJaxpr | Jaxpr,
    origins: list[Origin],
    has_cotangent: Flags,
    scan_lengths: tuple[int, ...],
    *,
    numbers: Iterator[int],
    is_call: bool,
) -> Program:
    """Splits a program.

    Args:
      program: the program.
      origins: of its inputs.
      has_cotangent: of each output, whether a backward pass comes from it.
      scan_lengths: of the scans around it, outermost first.
      numbers: of the sites to come.
      is_call: whether outputs may be operands. Elsewhere they are taken for data.
    """
    jaxpr = _jaxpr.jaxpr_of(program)
    consts = getattr(program, "consts", [])
    # By identity, since literals, which are constants too, cannot be hashed.
    origins_by_id: dict[int, Origin] = {}
    for var, value in zip(jaxpr.constvars, consts):
        origins_by_id[id(var)] = _constant(value)
    for var, origin in zip(jaxpr.invars, origins):
        origins_by_id[id(var)] = origin
    steps: list[Step] = []
    sites: list[Site] = []

    def origin_of(atom: Any) -> Origin:
        return origins_by_id.get(id(atom)) or _constant(atom.val)

    def origins_of(atoms: Sequence[Any], has_derivative: Flags) -> list[Origin]:
        origins = []
        for atom, is_reached in zip(atoms, has_derivative):
            origin = origin_of(atom)
            origins.append(origin if is_reached else origin._replace(leaves=NO_INDICES))
        return origins

    def take_for_data(atoms: Sequence[Any], has_derivative: Flags) -> None:
        for atom, is_reached in zip(atoms, has_derivative):
            origin = origin_of(atom)
            if is_reached and origin.leaves:
                site = Site(
                    number=next(numbers),
                    eqn=None,
                    name="identity",
                    operands={0: origin},
                    data_types=[],
                    out_types=[atom.aval],
                    tapped=(0,),
                    scan_lengths=scan_lengths,
                )
                sites.append(site)
                steps.append(Step(None, [atom], [atom], site))
                origins_by_id[id(atom)] = DATA

    def split_body(
        eqn: JaxprEqn, origins: list[Origin], flow: Flow, lengths: tuple[int, ...]
    ) -> Program:
        body = _split(
            _jaxpr.body_of(eqn),
            origins,
            flow.from_outputs,
            lengths,
            numbers=numbers,
            is_call=eqn.primitive.name in CALLS,
        )
        sites.extend(body.sites)
        return body

    flows, _ = _jaxpr.backward_through(jaxpr, has_cotangent)
    for eqn, flow in zip(jaxpr.eqns, flows):
        name = eqn.primitive.name
        in_origins = origins_of(eqn.invars, flow.to_inputs)
        leaves = NO_INDICES.union(*(origin.leaves for origin in in_origins))
        is_data = any(origin.is_data for origin in in_origins)
        is_site = bool(leaves) and (is_data or _jaxpr.has_backward_rule(eqn))
        # Kernels are looked for in all bodies, since one may differ by example.
        has_kernel = _jaxpr.has_convolution(eqn)
        site = None
        body = None
        out_origins = [DATA] * len(eqn.outvars)
        if (leaves or has_kernel) and name in CALLS:
            body = split_body(eqn, in_origins, flow, scan_lengths)
            out_origins = body.out_origins
        elif (is_site or (is_data and has_kernel)) and name == "scan":
            # The carry is data, since it differs from turn to turn.
            carry = slice(*ends_of_scan(eqn))
            take_for_data(eqn.invars[carry], flow.to_inputs[carry])
            # A parameter that is a carry may be another input as well. It is data there
            # too, or its cotangent would be counted twice.
            in_origins = origins_of(eqn.invars, flow.to_inputs)
            origins_in_turn = _origins_in_turn(eqn, in_origins, len(scan_lengths))
            lengths = (*scan_lengths, eqn.params["length"])
            body = split_body(eqn, origins_in_turn, flow, lengths)
        else:
            # Values of parameters alone are made for all turns of a scan at once.
            is_in_scan = len(scan_lengths) > 0
            is_mapped = is_site or (is_in_scan and not is_data)
            _check_equation(eqn, in_origins, is_mapped=is_mapped)
            if is_site:
                site = _site_of(
                    eqn, in_origins, flow.from_outputs, scan_lengths, next(numbers)
                )
                sites.append(site)
            elif not is_data:
                out_origins = _origins_without_data(eqn, in_origins, leaves)
        steps.append(Step(eqn, eqn.invars, eqn.outvars, site, body))
        for var, origin in zip(eqn.outvars, out_origins):
            origins_by_id[id(var)] = origin
    if not is_call:
        take_for_data(jaxpr.outvars, has_cotangent)
    out_origins = [origin_of(var) for var in jaxpr.outvars]
    return Program(jaxpr, consts, steps, out_origins, sites)


def ends_of_scan(eqn: JaxprEqn) -> tuple[int, int]:
    """Where constants end in the inputs of a scan, and where its carries end."""
    consts, carries = _jaxpr.counts_of_scan(eqn)
    return consts, consts + carries


def _origins_in_turn(
    eqn: JaxprEqn, in_origins: list[Origin], depth: int
) -> list[Origin]:
    """The origins of the inputs of a scan's body."""
    consts_end, carry_end = ends_of_scan(eqn)
    carries = [DATA] * (carry_end - consts_end)
    slices = [_slice(origin, depth) for origin in in_origins[carry_end:]]
    return [*in_origins[:consts_end], *carries, *slices]


def _check_equation(
    eqn: JaxprEqn, in_origins: list[Origin], *, is_mapped: bool
) -> None:
    """Raises CannotSplit where an equation would compute other numbers by itself."""
    if is_mapped and _jaxpr.has_bits_that_vmap_changes(eqn):
        raise CannotSplit
    has_leaves = any(origin.leaves for origin in in_origins)
    if has_leaves and _jaxpr.asks_what_moves(eqn):
        raise CannotSplit
    # JAX 0.10.2 cannot differentiate lax.pad by the padding value alone.
    if eqn.primitive.name == "pad" and in_origins[1].leaves:
        raise CannotSplit
    kernels = in_origins
    if eqn.primitive.name == "conv_general_dilated":
        kernels = in_origins[1:]
    if _jaxpr.has_convolution(eqn) and any(origin.is_data for origin in kernels):
        raise CannotSplit


def _site_of(
    eqn: JaxprEqn,
    in_origins: list[Origin],
    has_cotangent: Flags,
    scan_lengths: tuple[int, ...],
    number: int,
) -> Site:
    """An equation as a site. Its inputs are operands where they have leaves."""
    operands = {}
    data_types = []
    for place, (var, origin) in enumerate(zip(eqn.invars, in_origins)):
        if origin.leaves:
            operands[place] = origin
        else:
            data_types.append(type_of(var))
    out_types = [type_of(var) for var in eqn.outvars]
    tapped = []
    for index, out_type in enumerate(out_types):
        if has_cotangent[index] and jnp.issubdtype(out_type.dtype, jnp.inexact):
            tapped.append(index)
    return Site(
        number=number,
        eqn=eqn,
        name=eqn.primitive.name,
        operands=operands,
        data_types=data_types,
        out_types=out_types,
        tapped=tuple(tapped),
        scan_lengths=scan_lengths,
    )


def _origins_without_data(
    eqn: JaxprEqn, in_origins: list[Origin], leaves: frozenset[int]
) -> list[Origin]:
    """The origins of the outputs of an equation without data."""
    scans = NO_INDICES.union(*(origin.scans for origin in in_origins))
    depth = 1 + max((origin.depth for origin in in_origins), default=0)
    # Python would call all of them in one another.
    if depth > 100:
        raise CannotSplit

    def outputs(values: dict[Any, Any]) -> list[Any]:
        # Made once for all outputs.
        if outputs not in values:
            run = partial(bind, eqn, is_wide=True)
            # For all turns at once. The axis of the outermost scan is in front.
            for scan in sorted(scans, reverse=True):
                axes = [0 if scan in origin.scans else None for origin in in_origins]
                run = jax.vmap(run, (axes,))
            values[outputs] = run([origin.make(values) for origin in in_origins])
        return values[outputs]

    if _jaxpr.is_stop(eqn):
        leaves = NO_INDICES
    view = _view_after(eqn, [origin.view for origin in in_origins])
    out_origins = []
    for index in range(len(eqn.outvars)):

        def make(values: dict[Any, Any], index: int = index) -> Any:
            return outputs(values)[index]

        out_origins.append(Origin(make, leaves, scans, depth=depth, view=view))
    return out_origins


def _slice(origin: Origin, depth: int) -> Origin:
    """What a scan hands to its body in one turn."""
    view = origin.view
    if view:
        path = *view.path, ("scan", view.axes)
        view = View(path, tuple(range(len(view.axes) - 1)))
    return origin._replace(scans=origin.scans | {depth}, view=view)


def _view_after(eqn: Any, views: list[View | None]) -> View | None:
    """The view that the output of an equation is, or None if it is not one."""
    # A value of two values, such as a sum of weights, is not one rearranged. Nor are
    # numbers that were copied, which would be counted more than once.
    if len(views) != 1 or views[0] is None or not eqn.outvars:
        return None
    path, axes = views[0]
    before = eqn.invars[0].aval
    after = eqn.outvars[0].aval
    name = eqn.primitive.name
    params = eqn.params
    if name in KEEPS:
        return views[0]
    if name == "transpose":
        return View(path, tuple(axes[axis] for axis in params["permutation"]))
    if name not in MOVES or before.size != after.size:
        return None
    return View((*path, (name, axes, str(params))), tuple(range(after.ndim)))


def bind(eqn: JaxprEqn, inputs: list[Any], is_wide: bool = False) -> list[Any]:
    """The outputs of an equation. With `is_wide`, in float32 instead of 16 bits where
    that is possible.
    """
    params = eqn.params
    if is_wide and eqn.primitive.name in WIDENED:
        inputs = widened(inputs)
        for key in ("new_dtype", "preferred_element_type"):
            dtype = params.get(key)
            if dtype is not None and is_narrow(dtype):
                params = params | {key: np.dtype(np.float32)}
    elif is_wide:
        inputs = list(map(_as_narrow_as, inputs, eqn.invars))
    # A custom_jvp keeps its functions as programs. They are made functions again.
    params = eqn.primitive.get_bind_params(params)
    with eqn.ctx.manager:  # such as the device that compute_on asks for
        outputs = eqn.primitive.bind(*inputs, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def _as_narrow_as(x: Any, var: Any) -> Any:
    """The value, cast to the type of a variable that has 16 bits."""
    return x.astype(var.aval.dtype) if is_narrow(var.aval) else x
