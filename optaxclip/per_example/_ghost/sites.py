"""Sites: where the parameters of a loss meet data.

The program of the loss of one example (its jaxpr) is split. Some values are made of
parameters alone, such as a weight that was cast or transposed. An equation where such a
value, an operand, meets data is a site, for example the matrix product of a layer. Some
operands become data without meeting any: the first carry of a scan, and an output of
the loss. Their site is a copy, an equation that is inserted.

Calls of jit and jax.checkpoint are entered, and so is the body of a scan. Any other
equation that has a body (cond, while, custom derivatives) is one site. So is a backward
rule of the user's (custom_vjp) even without data, since it may not be linear.

Parameters and sites have indices, in the order of their lists. The input index of an
operand counts the inputs of its site. An output of a site is tapped if its cotangent is
captured (`capture`). The depth of a scan says how many other scans are around it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ... import _jaxpr
from ..._jaxpr import CALLS, source_line, type_of
from .._work import has_convolution
from .flow import Flags, Flow, backward_through
from .values import CHANGES_LAYOUT, DATA, KEEPS_LAYOUT, SUMS, Computation, Origin, View


class Site(NamedTuple):
    """An equation in which operands meet data."""

    site_index: int
    eqn: JaxprEqn
    operands: dict[int, Origin]  # by their input indices, in ascending order
    # The indices of the outputs whose cotangents are captured: a backward pass from the
    # loss goes through them to parameters
    tapped: tuple[int, ...]
    scan_lengths: tuple[int, ...]  # of the scans around it, outermost first

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.eqn.primitive.name

    @property
    def data_types(self) -> list[ShapedArray]:
        """The types of the inputs that are not operands."""
        types = map(type_of, self.eqn.invars)
        return [x for index, x in enumerate(types) if index not in self.operands]

    @property
    def out_types(self) -> list[ShapedArray]:
        return list(map(type_of, self.eqn.outvars))

    @property
    def tapped_types(self) -> list[ShapedArray]:
        out_types = self.out_types
        return [out_types[index] for index in self.tapped]

    @property
    def captured_size(self) -> int:
        """How many numbers are captured of it in one example."""
        types = self.tapped_types
        # The derivative of a sum reads no data, so XLA drops them.
        if self.name not in SUMS:
            types += self.data_types
        return math.prod(self.scan_lengths) * sum(x.size for x in types)


class Step(NamedTuple):
    """One equation of a split program."""

    eqn: JaxprEqn
    site: Site | None = None
    body: SplitProgram | None = None  # of a call or scan that is entered


class SplitProgram(NamedTuple):
    """A jaxpr, split at its sites."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
    steps: list[Step]
    out_origins: list[Origin]
    sites: list[Site]  # also the sites of bodies


class CannotSplit(Exception):
    """The parts of a loss would compute other numbers than the loss as a whole. The
    text names the obstacle, and its line in the user's code.
    """

    def __init__(self, obstacle: str, eqn: JaxprEqn) -> None:
        super().__init__(obstacle + source_line(eqn))


def split_loss(loss: ClosedJaxpr, params: list[Array]) -> SplitProgram:
    """The program of the loss of one example, split at its sites.

    Raises:
      CannotSplit: refs (jax.new_ref), and the obstacles of `_check_equation`.
    """
    for eqn in loss.jaxpr.eqns:
        if _jaxpr.has_refs(eqn):
            raise CannotSplit("a loss with refs (jax.new_ref)", eqn)
    in_origins = []
    for param_index, param in enumerate(params):
        view = View(reshapes=(), axes=tuple(range(param.ndim)))
        origin = Origin(
            param_index=param_index, param_indices=frozenset([param_index]), view=view
        )
        in_origins.append(origin)
    data_count = len(loss.jaxpr.invars) - len(params)
    in_origins += [DATA] * data_count
    # The first output is the loss. The others, aux, have no cotangents.
    has_cotangent = [index == 0 for index in range(len(loss.jaxpr.outvars))]
    splitter = _Splitter(scan_lengths=(), all_sites=[])
    return splitter.split(loss, in_origins, has_cotangent, may_return_operands=False)


@dataclass
class _Splitter:
    """The steps of a program, built equation by equation, and the sites of the loss."""

    scan_lengths: tuple[int, ...]  # of the scans around it, outermost first
    all_sites: list[Site]
    # By the identity of variables, since literals cannot be hashed.
    origins_by_id: dict[int, Origin] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def split(
        self,
        program: ClosedJaxpr | Jaxpr,
        in_origins: list[Origin],
        has_cotangent: Flags,
        *,
        may_return_operands: bool,
    ) -> SplitProgram:
        """The program, split at its sites.

        Args:
          program: the jaxpr of the loss, or of a body.
          in_origins: of its inputs.
          has_cotangent: of each output, whether a backward pass comes from it.
          may_return_operands: whether outputs may be operands. Elsewhere they become
            data.
        """
        first_index = len(self.all_sites)
        jaxpr = _jaxpr.jaxpr_of(program)
        consts = getattr(program, "consts", [])
        for var, constant in zip(jaxpr.constvars, consts):
            self.origins_by_id[id(var)] = Origin(constant=constant)
        self.set_origins(jaxpr.invars, in_origins)
        flows, _ = backward_through(jaxpr, has_cotangent)
        for eqn, flow in zip(jaxpr.eqns, flows):
            self.add_equation(eqn, flow)
        if not may_return_operands:
            self.turn_into_data(jaxpr.outvars, has_cotangent)
        out_origins = [self.origin_of(var) for var in jaxpr.outvars]
        sites = self.all_sites[first_index:]
        return SplitProgram(jaxpr, consts, self.steps, out_origins, sites)

    def origin_of(self, atom: Any) -> Origin:
        """The origin of a variable or literal."""
        if id(atom) in self.origins_by_id:
            return self.origins_by_id[id(atom)]
        return Origin(constant=atom.val)

    def set_origins(self, variables: Sequence[Any], origins: list[Origin]) -> None:
        """Remembers the origins of variables."""
        for var, origin in zip(variables, origins):
            self.origins_by_id[id(var)] = origin

    def origins_of_inputs(self, eqn: JaxprEqn, flow: Flow) -> list[Origin]:
        """The origins of the inputs of an equation, without parameters where no
        backward pass arrives.
        """
        origins = []
        for atom, is_reached in zip(eqn.invars, flow.to_inputs):
            origin = self.origin_of(atom)
            if not is_reached:
                origin = origin._replace(param_indices=frozenset())
            origins.append(origin)
        return origins

    def add_equation(self, eqn: JaxprEqn, flow: Flow) -> None:
        """Adds the step of an equation. It may be a site, or a body to enter."""
        name = eqn.primitive.name
        in_origins = self.origins_of_inputs(eqn, flow)
        has_params = any(origin.param_indices for origin in in_origins)
        has_data = any(origin.is_data for origin in in_origins)
        is_site = has_params and (has_data or _jaxpr.has_backward_rule(eqn))
        # A body with a convolution is entered to check that the kernel does not depend
        # on the example.
        has_inner_convolution = has_convolution(eqn)
        if name in CALLS and (has_params or has_inner_convolution):
            body = self._split_body(eqn, in_origins, flow, self.scan_lengths)
            self._add_step(eqn, body.out_origins, body=body)
            return
        if name == "scan" and (is_site or (has_data and has_inner_convolution)):
            self._add_scan(eqn, flow)
            return
        # Gradients of a site are made under jax.vmap, over examples. In a scan,
        # equations without data run under jax.vmap too, over iterations.
        is_mapped = is_site or (len(self.scan_lengths) > 0 and not has_data)
        _check_equation(eqn, in_origins, is_mapped=is_mapped)
        if is_site:
            self._add_site(eqn, in_origins, _tapped_indices(eqn, flow))
        elif has_data:
            self._add_step(eqn, [DATA] * len(eqn.outvars))
        else:
            self._add_step(eqn, _origins_without_data(eqn, in_origins))

    def turn_into_data(self, atoms: Sequence[Any], has_cotangent: Flags) -> None:
        """Makes a site of each operand among these values, an equation that copies it.
        From here on it is data.
        """
        for atom, is_reached in zip(atoms, has_cotangent):
            origin = self.origin_of(atom)
            # Only variables have parameters. Literals are constants.
            if is_reached and origin.param_indices:
                self._add_site(_copy_equation(atom), [origin], tapped=(0,))

    def _add_scan(self, eqn: JaxprEqn, flow: Flow) -> None:
        consts_end, carry_end = ends_of_scan(eqn)
        carry = slice(consts_end, carry_end)
        # The carry is data, since it differs between iterations.
        self.turn_into_data(eqn.invars[carry], flow.to_inputs[carry])
        # Origins are read after that: a parameter that is both the carry and another
        # input must be data in both, or its cotangent would be counted twice.
        in_origins = self.origins_of_inputs(eqn, flow)
        scan_depth = len(self.scan_lengths)
        slices = [
            _origin_of_slice(origin, scan_depth) for origin in in_origins[carry_end:]
        ]
        origins_in_body = [
            *in_origins[:consts_end],
            *[DATA] * (carry_end - consts_end),
            *slices,
        ]
        lengths = (*self.scan_lengths, eqn.params["length"])
        body = self._split_body(eqn, origins_in_body, flow, lengths)
        self._add_step(eqn, [DATA] * len(eqn.outvars), body=body)

    def _split_body(
        self,
        eqn: JaxprEqn,
        in_origins: list[Origin],
        flow: Flow,
        scan_lengths: tuple[int, ...],
    ) -> SplitProgram:
        splitter = _Splitter(scan_lengths, self.all_sites)
        return splitter.split(
            _jaxpr.body_of(eqn),
            in_origins,
            flow.from_outputs,
            may_return_operands=eqn.primitive.name in CALLS,
        )

    def _add_site(
        self, eqn: JaxprEqn, in_origins: list[Origin], tapped: tuple[int, ...]
    ) -> None:
        operands = {}
        for input_index, origin in enumerate(in_origins):
            if origin.param_indices:
                operands[input_index] = origin
        site = Site(
            site_index=len(self.all_sites),
            eqn=eqn,
            operands=operands,
            tapped=tapped,
            scan_lengths=self.scan_lengths,
        )
        self.all_sites.append(site)
        self._add_step(eqn, [DATA] * len(eqn.outvars), site=site)

    def _add_step(
        self,
        eqn: JaxprEqn,
        out_origins: list[Origin],
        *,
        site: Site | None = None,
        body: SplitProgram | None = None,
    ) -> None:
        self.steps.append(Step(eqn, site, body))
        self.set_origins(eqn.outvars, out_origins)


def ends_of_scan(eqn: JaxprEqn) -> tuple[int, int]:
    """Where constants end in the inputs of a scan, and where its carries end."""
    consts, carries = _jaxpr.counts_of_scan(eqn)
    return consts, consts + carries


def _copy_equation(var: Any) -> JaxprEqn:
    """An equation that rebinds a variable to its copy."""
    # Traced with a number, which has no mesh and no mesh axes.
    (copy_of_number,) = jax.make_jaxpr(jnp.copy)(0.0).eqns
    return copy_of_number.replace(invars=[var], outvars=[var])


def _tapped_indices(eqn: JaxprEqn, flow: Flow) -> tuple[int, ...]:
    """The indices of the outputs to tap: they have a derivative, and a backward pass
    comes from them.
    """
    tapped = []
    for index, var in enumerate(eqn.outvars):
        is_inexact = jnp.issubdtype(type_of(var).dtype, jnp.inexact)
        if flow.from_outputs[index] and is_inexact:
            tapped.append(index)
    return tuple(tapped)


def _check_equation(
    eqn: JaxprEqn, in_origins: list[Origin], *, is_mapped: bool
) -> None:
    """Raises CannotSplit for an equation that would compute other numbers apart from
    the rest of the loss. `is_mapped` says that it may run under jax.vmap, over examples
    or over iterations of a scan.
    """
    if is_mapped and _jaxpr.has_bits_that_vmap_changes(eqn):
        raise CannotSplit(
            "random numbers from keys other than threefry's, beside parameters or in a "
            "scan",
            eqn,
        )
    # A rule with symbolic_zeros is told which inputs have a derivative. Apart from the
    # loss it would be told of others.
    has_params = any(origin.param_indices for origin in in_origins)
    if has_params and _jaxpr.uses_symbolic_zeros(eqn):
        raise CannotSplit("symbolic_zeros in a rule for parameters", eqn)
    # JAX 0.10.2 cannot differentiate lax.pad by the padding value alone.
    if eqn.primitive.name == "pad" and in_origins[1].param_indices:
        raise CannotSplit("a learned value of lax.pad", eqn)
    # On a CPU the derivative of a convolution whose kernel differs by example lets NaN
    # through to other examples. In a body, such as a cond's, any input may be a kernel.
    possible_kernels = in_origins
    if eqn.primitive.name == "conv_general_dilated":
        possible_kernels = in_origins[1:]
    if has_convolution(eqn) and any(origin.is_data for origin in possible_kernels):
        obstacle = "a convolution whose kernel depends on the example"
        raise CannotSplit(obstacle, eqn)


def _origins_without_data(eqn: JaxprEqn, in_origins: list[Origin]) -> list[Origin]:
    """The origins of the outputs of an equation without data."""
    computation = Computation(eqn, in_origins)
    param_indices: frozenset[int] = frozenset()
    if not _jaxpr.is_stop(eqn):
        for in_origin in in_origins:
            param_indices |= in_origin.param_indices
    origin = Origin(
        computation,
        param_indices=param_indices,
        slicing_scans=computation.slicing_scans,
        view=_view_after(eqn, [origin.view for origin in in_origins]),
    )
    return [origin._replace(out_index=index) for index in range(len(eqn.outvars))]


def _origin_of_slice(origin: Origin, scan_depth: int) -> Origin:
    """The slice that a scan of this depth hands to its body in one iteration."""
    view = origin.view
    if view:
        reshapes = (*view.reshapes, ("scan", view.axes))
        view = View(reshapes, axes=tuple(range(len(view.axes) - 1)))
    return origin._replace(slicing_scans=origin.slicing_scans | {scan_depth}, view=view)


def _view_after(eqn: JaxprEqn, views: list[View | None]) -> View | None:
    """The view of the output of an equation, from the views of its inputs."""
    # What is made of several values, such as a sum of weights, is not a view.
    if len(views) != 1 or views[0] is None or not eqn.outvars:
        return None
    reshapes, axes = views[0]
    name = eqn.primitive.name
    if name in KEEPS_LAYOUT:
        return views[0]
    if name == "transpose":
        return View(reshapes, tuple(axes[axis] for axis in eqn.params["permutation"]))
    in_type = type_of(eqn.invars[0])
    out_type = type_of(eqn.outvars[0])
    # An output with more numbers has copies, which would be counted more than once.
    if name not in CHANGES_LAYOUT or out_type.size != in_type.size:
        return None
    reshape = name, axes, str(eqn.params)
    return View((*reshapes, reshape), axes=tuple(range(out_type.ndim)))
