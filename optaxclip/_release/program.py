"""Reads the program of a loss: which scans go through layers, and what is between.

trace       the loss becomes a program (a jaxpr), whose calls are opened
stacks      scans that read leaves of params slice by slice
parts       all other equations, in runs between the stacks
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import KeyPath

from .._jaxpr import (
    body_of,
    counts_of_scan,
    every_equation,
    is_literal,
    jaxpr_of,
    type_of,
)
from .._trees import PyTree, listed_paths, name

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

    Atom = Var | Literal

JITS = frozenset({"jit", "pjit"})
CALLS = JITS | {"closed_call", "core_call", "checkpoint", "remat2"}
# What may stand between a leaf and the scan that reads it. A slice of the result is
# this operation on a slice of the leaf.
LAYOUT = {
    "transpose",
    "squeeze",
    "broadcast_in_dim",
    "reshape",
    "convert_element_type",
    "copy",
    "copy_p",
    "sharding_constraint",
}
# The parameters of these that say a shape.
SIZES = {"reshape": "new_sizes", "broadcast_in_dim": "shape"}
HOW = (
    "release goes through layers that the loss scans (jax.lax.scan, nn.scan, nnx.scan)"
    ", with their stacked weights as leaves of params that nothing else reads"
)


class Operation(NamedTuple):
    """An equation between a leaf and its scan. Its result has `rows` entries along
    `axis` for each layer.
    """

    equation: JaxprEqn
    axis: int
    rows: int


@dataclass(frozen=True)
class Slice:
    """The part of a leaf that a layer reads: `rows` entries along `axis`.

    No pytree, so that a tree of slices fits a tree of arrays.
    """

    leaf: int  # by place in params
    axis: int
    rows: int
    operations: tuple[Operation, ...] = ()

    def taken(self, array: Array, layer: Array | int) -> Array:
        """The slice, in which the axis stays."""
        start = layer * self.rows
        return lax.dynamic_slice_in_dim(array, start, self.rows, self.axis)

    def put(self, array: Array, layer: Array | int, new: Array) -> Array:
        """The array with another slice."""
        start = layer * self.rows
        return lax.dynamic_update_slice_in_dim(array, new, start, self.axis)

    def as_layer_reads(self, array: Array) -> Array:
        """What the body of the scan makes of the slice."""
        for operation in self.operations:
            equation = operation.equation
            operator, options = equation.primitive, dict(equation.params)
            if operator.name == "sharding_constraint":
                # It is one of the whole array.
                continue
            if operator.name in SIZES:
                sizes = list(options[SIZES[operator.name]])
                sizes[operation.axis] = operation.rows
                options[SIZES[operator.name]] = tuple(sizes)
            array = operator.bind(array, **options)
        return array.reshape(array.shape[1:])


class Stack(NamedTuple):
    """A scan that reads leaves of params layer by layer. Its variables are those of the
    program around it.
    """

    body: ClosedJaxpr  # consts, carry and a slice of each x -> carry and a y of each
    length: int
    is_reversed: bool
    consts: list[Atom]
    carry: list[Atom]
    xs: list[Atom]
    slices: dict[int, Slice]  # by place among the xs
    last_carry: list[Var]
    ys: list[Var]


class Part(NamedTuple):
    """Equations between two stacks, as a program.

    What moves lies between a weight and the loss, so it has a gradient.
    """

    run: Callable[..., list[Array]]  # moving and other inputs -> moving, other outputs
    moving_inputs: list[Var]
    other_inputs: list[Var]
    moving_outputs: list[Var]
    other_outputs: list[Var]


class Program(NamedTuple):
    """A loss, cut at its stacks."""

    sections: list[Part | Stack]  # in the order in which they run
    inputs: list[Var]  # leaves of params, then of the batch
    constants: dict[Var, Array]
    outputs: list[Atom]  # the loss, then leaves of aux
    structure: PyTree  # of what the loss returns
    moving: set[Var]
    slices: dict[int, Slice]  # by leaf, of all stacks
    rest: list[int]  # the other leaves that are trained

    @property
    def groups(self) -> int:
        """How many groups of gradients there are: each layer, and the rest."""
        layers = sum(stack.length for stack in self.stacks)
        return layers + bool(self.rest)

    @property
    def stacks(self) -> list[Stack]:
        return [section for section in self.sections if isinstance(section, Stack)]


def read_program(
    loss: Callable[..., Any],
    params: PyTree,
    batch: Sequence[PyTree],
    trained: Container[int],
) -> Program:
    """Traces the loss and cuts its program at the stacks. `trained` are the leaves of
    params that are.

    Raises:
      TypeError: a loss that is not a real scalar.
      ValueError: a leaf that the loss does not depend on, or a loss without a stack.
    """
    program, shapes = jax.make_jaxpr(loss, return_shape=True)(params, *batch)
    _check_scalar(program, shapes)
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    _check_reads(program, paths, trained)
    # Calls other than jits are opened only if need be: a checkpoint of the head should
    # stay one.
    for calls in (JITS, CALLS):
        flat = _flattened(program, calls)
        weights = {}
        for leaf, var in enumerate(flat.inputs[: len(paths)]):
            if leaf in trained:
                weights[var] = leaf
        before_loss = _before_loss(flat)
        stacks = _stacks_of(flat, weights, before_loss)
        if stacks:
            moving = _after(flat, set(weights)) & before_loss
            return _cut(flat, weights, moving, stacks, jax.tree.structure(shapes))
    raise ValueError(_no_stack(program, flat, weights, paths))


# ----------------------------------------------------------------------------- trace


class Flat(NamedTuple):
    """A program without calls."""

    equations: list[JaxprEqn]
    inputs: list[Var]
    constants: dict[Var, Array]
    outputs: list[Atom]


def is_variable(atom: Atom) -> TypeGuard[Var]:
    """Whether it is no number that stands in the program."""
    return not is_literal(atom)


def _variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    return (atom for atom in atoms if is_variable(atom))


def _jaxpr(
    inputs: Sequence[Var], outputs: Sequence[Atom], equations: list[JaxprEqn]
) -> Jaxpr:
    """A program of these equations."""
    from jax.extend.core import DebugInfo, Jaxpr

    # JAX warns of a program without it.
    debug_info = DebugInfo("release", "loss", None, None)
    return Jaxpr((), inputs, outputs, equations, debug_info=debug_info)


def _flattened(program: ClosedJaxpr, calls: frozenset[str]) -> Flat:
    """The program, with equations in the place of the calls of these names."""
    from jax.extend.core import Var

    equations: list[JaxprEqn] = []
    constants: dict[Var, Array] = {}

    def open_program(closed: ClosedJaxpr, inputs: Sequence[Atom]) -> list[Atom]:
        jaxpr = jaxpr_of(closed)
        new_atom: dict[Var, Atom] = dict(zip(jaxpr.invars, inputs))
        for var, value in zip(jaxpr.constvars, getattr(closed, "consts", ())):
            constant = Var(var.aval)
            constants[constant] = value
            new_atom[var] = constant

        def renamed(atoms: Sequence[Atom]) -> list[Atom]:
            return [new_atom[x] if is_variable(x) else x for x in atoms]

        for equation in jaxpr.eqns:
            if equation.primitive.name in calls:
                outputs = open_program(body_of(equation), renamed(equation.invars))
            else:
                # New ones, since a program may be called twice.
                outputs = [Var(var.aval) for var in equation.outvars]
                renamed_inputs = renamed(equation.invars)
                new = equation.replace(invars=renamed_inputs, outvars=outputs)
                equations.append(new)
            new_atom.update(zip(equation.outvars, outputs))
        return renamed(jaxpr.outvars)

    inputs = [Var(var.aval) for var in jaxpr_of(program).invars]
    outputs = open_program(program, inputs)
    # nnx.scan returns its weights as ys, which nobody reads.
    whole = _jaxpr([*inputs, *constants], outputs, equations)
    used, _ = dce_jaxpr(whole, [True] * len(outputs), instantiate=True)
    inputs = used.invars[: len(inputs)]
    constants = dict(zip(used.invars[len(inputs) :], constants.values()))
    return Flat(used.eqns, inputs, constants, used.outvars)


# ---------------------------------------------------------------------------- stacks


def _stacks_of(
    flat: Flat, weights: dict[Var, int], before_loss: set[Var]
) -> dict[int, Stack]:
    """The scans that read weights slice by slice, by place among the equations."""
    stacks = {}
    maker_of = {var: eqn for eqn in flat.equations for var in eqn.outvars}
    # Who reads weights for aux alone adds nothing to their gradients.
    readers = Counter()
    for equation in flat.equations:
        if not before_loss.isdisjoint(equation.outvars):
            readers.update(_variables(equation.invars))
    for place, equation in enumerate(flat.equations):
        length = equation.params.get("length", 0)
        if equation.primitive.name != "scan" or length == 0:
            continue
        consts, carries = counts_of_scan(equation)
        xs = equation.invars[consts + carries :]
        slices = {}
        for index, x in enumerate(xs):
            leaf_slice = _slice_of(x, length, maker_of, weights)
            if leaf_slice and all(readers[var] == 1 for var in _way(x, maker_of)):
                slices[index] = leaf_slice
        if slices:
            stacks[place] = Stack(
                body=body_of(equation),
                length=length,
                is_reversed=equation.params["reverse"],
                consts=equation.invars[:consts],
                carry=equation.invars[consts : consts + carries],
                xs=xs,
                slices=slices,
                last_carry=equation.outvars[:carries],
                ys=equation.outvars[carries:],
            )
    return stacks


def _way(x: Atom, maker_of: dict[Var, JaxprEqn]) -> Iterator[Var]:
    """An input of a scan, and what it was before operations of layout."""
    while is_variable(x):
        yield x
        maker = maker_of.get(x)
        if maker is None or maker.primitive.name not in LAYOUT:
            return
        x = maker.invars[0]


def _slice_of(
    x: Atom, length: int, maker_of: dict[Var, JaxprEqn], weights: dict[Var, int]
) -> Slice | None:
    """The part of a leaf that is one entry of an input of a scan, or None."""
    axis, rows = 0, 1
    operations: list[Operation] = []
    var = None
    for var in _way(x, maker_of):
        shape = type_of(var).shape
        if operations:
            axis_before = _axis_before(operations[-1], shape, length)
            if axis_before is None:
                return None
            axis, rows = axis_before, shape[axis_before] // length
        if shape[axis] != length * rows:
            return None
        if var in maker_of:
            operations.append(Operation(maker_of[var], axis, rows))
    if var not in weights:
        return None
    return Slice(weights[var], axis, rows, tuple(reversed(operations)))


def _axis_before(
    operation: Operation, shape: tuple[int, ...], length: int
) -> int | None:
    """Along which axis the layers are, before an operation on an array of a shape."""
    equation, axis, _ = operation
    options = equation.params
    if equation.primitive.name == "transpose":
        return options["permutation"][axis]
    if equation.primitive.name == "squeeze":
        kept = [k for k in range(len(shape)) if k not in options["dimensions"]]
        return kept[axis]
    if equation.primitive.name == "broadcast_in_dim":
        axes_after = options["broadcast_dimensions"]
        return axes_after.index(axis) if axis in axes_after else None
    if equation.primitive.name == "reshape":
        # [12, ...] -> [3, 4, ...] makes groups: each of 3 layers reads 4 rows.
        before = math.prod(type_of(equation.outvars[0]).shape[:axis])
        for k in reversed(range(len(shape))):
            if math.prod(shape[:k]) == before and shape[k] % length == 0:
                return k
        return None
    return axis


# ------------------------------------------------------------------------------ parts


def _cut(
    flat: Flat,
    weights: dict[Var, int],
    moving: set[Var],
    stacks: dict[int, Stack],
    structure: PyTree,
) -> Program:
    """The program, cut at the stacks."""
    slices = {}
    for stack in stacks.values():
        slices |= {x.leaf: x for x in stack.slices.values()}
    # Backward, to know what is read later.
    sections: list[Part | Stack] = []
    read_later = set(_variables(flat.outputs))
    end = len(flat.equations)
    for place in [*sorted(stacks, reverse=True), -1]:
        part = _part_of(flat.equations[place + 1 : end], moving, read_later)
        sections.append(part)
        read_later.update(part.moving_inputs, part.other_inputs)
        if place in stacks:
            stack = stacks[place]
            sections.append(stack)
            other_xs = [x for k, x in enumerate(stack.xs) if k not in stack.slices]
            inputs = [*stack.consts, *stack.carry, *other_xs]
            read_later.update(_variables(inputs))
        end = place
    return Program(
        sections=sections[::-1],
        inputs=flat.inputs,
        constants=flat.constants,
        outputs=flat.outputs,
        structure=structure,
        moving=moving,
        slices=slices,
        rest=[leaf for leaf in weights.values() if leaf not in slices],
    )


def _part_of(equations: list[JaxprEqn], moving: set[Var], read_later: set[Var]) -> Part:
    """The part of these equations, without those that nobody reads: they are between a
    leaf and its scan, and run again for each layer.
    """
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

    live: list[JaxprEqn] = []
    needed = set(read_later)
    for equation in reversed(equations):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            live.append(equation)
            needed.update(_variables(equation.invars))
    # Dicts keep the order, so that a program is compiled once.
    read: dict[Var, None] = {}
    written: dict[Var, None] = {}
    for equation in reversed(live):
        read |= dict.fromkeys(_variables(equation.invars))
        written |= dict.fromkeys(equation.outvars)
    inputs = [var for var in read if var not in written]
    outputs = [var for var in written if var in read_later]
    moving_inputs = [var for var in inputs if var in moving]
    other_inputs = [var for var in inputs if var not in moving]
    moving_outputs = [var for var in outputs if var in moving]
    other_outputs = [var for var in outputs if var not in moving]
    jaxpr = _jaxpr(
        [*moving_inputs, *other_inputs], [*moving_outputs, *other_outputs], live[::-1]
    )
    return Part(
        run=jaxpr_as_fun(ClosedJaxpr(jaxpr, ())),
        moving_inputs=moving_inputs,
        other_inputs=other_inputs,
        moving_outputs=moving_outputs,
        other_outputs=other_outputs,
    )


def is_float(x: Any) -> bool:
    """Whether it may have a gradient: an array, or an atom of a program."""
    return jnp.issubdtype(getattr(x, "aval", x).dtype, jnp.inexact)


def _after(flat: Flat, weights: set[Var]) -> set[Var]:
    """The float variables that depend on weights."""
    after = set(weights)
    for equation in flat.equations:
        if not after.isdisjoint(_variables(equation.invars)):
            after.update(filter(is_float, equation.outvars))
    return after


def _before_loss(flat: Flat) -> set[Var]:
    """The variables on which the loss depends."""
    before = set(_variables(flat.outputs[:1]))
    for equation in reversed(flat.equations):
        if not before.isdisjoint(equation.outvars):
            before.update(_variables(equation.invars))
    return before


# ----------------------------------------------------------------------------- checks


def _check_scalar(program: ClosedJaxpr, shapes: PyTree) -> None:
    """Raises TypeError for a loss that is neither a real scalar nor (scalar, aux)."""
    loss = shapes
    if type(shapes) is tuple and len(shapes) == 2:
        loss, _ = shapes
    is_scalar = getattr(loss, "shape", None) == ()
    if not is_scalar or not jnp.issubdtype(loss.dtype, jnp.floating):
        types = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", shapes)
        raise TypeError(
            "release: loss must return a real scalar, or a pair of that and any other "
            f"outputs, got {types}."
        )


def _check_reads(
    program: ClosedJaxpr, paths: list[KeyPath], trained: Container[int]
) -> None:
    """Raises ValueError for float leaves that the loss does not depend on.

    They would get moments and weight decay. `stop_gradient` makes no such leaf.
    """
    jaxpr = jaxpr_of(program)
    is_loss = [index == 0 for index in range(len(jaxpr.outvars))]
    _, is_read = dce_jaxpr(jaxpr, is_loss)
    unread = []
    for leaf, path in enumerate(paths):
        if leaf in trained and not is_read[leaf]:
            unread.append(path)
    if unread:
        raise ValueError(
            "release: the loss must depend on every float leaf of params, but does "
            f"not on {listed_paths(unread)}. Leave out what is not trained, such as "
            "statistics of BatchNorm, by trainable=, and hand new values over as aux."
        )


def _place(equation: JaxprEqn) -> str:
    """The line of the user's that made an equation."""
    from jax.extend.source_info_util import summarize

    return summarize(equation.source_info)


def _no_stack(
    program: ClosedJaxpr, flat: Flat, weights: dict[Var, int], paths: list[KeyPath]
) -> str:
    """The error of a loss without a stack: which scans there are, and what is amiss."""
    scans = []
    for equation in jaxpr_of(program).eqns:
        for inner in every_equation(equation):
            if inner.primitive.name == "scan":
                scans.append(inner)
    if not scans:
        return f"release: loss has no scan. {HOW}."
    maker_of = {var: eqn for eqn in flat.equations for var in eqn.outvars}
    # A dict, since a scan may be called twice.
    texts: dict[str, None] = {}
    at_top = [eqn for eqn in flat.equations if eqn.primitive.name == "scan"]
    places_at_top = {_place(scan) for scan in at_top}
    for scan in at_top:
        text = f"The scan at {_place(scan)}, of length {scan.params['length']}, "
        texts[text + _amiss(scan, flat, maker_of, weights, paths)] = None
    for scan in scans:
        if _place(scan) not in places_at_top:
            text = f"The scan at {_place(scan)}, of length {scan.params['length']}, is "
            text += "inside a loop, a branch or a function with a gradient of its own."
            texts[text] = None
    return f"release: loss has no scan over layers. {' '.join(texts)} {HOW}."


def _amiss(
    scan: JaxprEqn,
    flat: Flat,
    maker_of: dict[Var, JaxprEqn],
    weights: dict[Var, int],
    paths: list[KeyPath],
) -> str:
    """Why a scan is no stack."""
    consts, carries = counts_of_scan(scan)
    for x in scan.invars[consts + carries :]:
        if _slice_of(x, scan.params["length"], maker_of, weights) is None:
            continue
        *_, leaf = way = list(_way(x, maker_of))
        lines = []
        for equation in flat.equations:
            is_next = any(var in way for var in equation.outvars)
            reads = not set(way).isdisjoint(_variables(equation.invars))
            if reads and equation is not scan and not is_next:
                lines.append(_place(equation))
        readers = ", ".join(dict.fromkeys(lines))
        return f"shares its weights {name(paths[weights[leaf]])!r} with {readers}."
    for var in _variables(scan.invars[:consts]):
        if var in weights:
            leaf = name(paths[weights[var]])
            return f"reads {leaf!r} whole in every layer: make it one of its xs."
    return "has no leaf of params among its xs."
