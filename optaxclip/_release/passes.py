"""Runs the program of a loss, and goes back through it one layer at a time.

    forward     keep the input of every layer
    backward    last section first: a part by jax.vjp, a stack layer by layer

Cotangents are kept by variable of the program. So weights that are tied, or shared by
all layers, and losses of single layers add up by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from .._jaxpr import type_of
from .._mesh_types import typed_as
from .._trees import PyTree, put_back
from .program import Part, Program, Stack, is_float, is_variable

if TYPE_CHECKING:
    from .program import Atom, Var


class Stored(NamedTuple):
    """What a step writes layer by layer: whole arrays of a stack, the slices of one
    layer, or a `Slice` for each of them.
    """

    weights: dict[int, Any]  # by leaf of params
    moments: dict[str, Any]  # by path in the state of the optimizer
    clips: list[Any]  # the state of `layer_clip`


class Layer(NamedTuple):
    """Which layer a backward pass is at."""

    stack: int
    number: Array  # within the stack, in the order of the forward pass
    group: Array  # over all stacks, in the order of the backward pass


# From a layer, its gradients, its slices, and what the layer before has left behind, to
# new slices (None where nothing is to be written) and what it leaves behind.
Visit = Callable[[Layer, dict[int, Array], Stored, Any], tuple[Stored | None, Any]]


class Forward(NamedTuple):
    """A forward pass."""

    values: dict[Var, Array]  # of all variables that are read later
    # Of each section, how to go back through a part, and the inputs of all layers of a
    # stack.
    kept: list[Any]

    def read(self, atom: Atom) -> Array:
        if is_variable(atom):
            return self.values[atom]
        literal: Any = atom
        return jnp.asarray(literal.val, type_of(literal).dtype)


class Cotangents:
    """The gradients of the loss by variables of its program, as far as seen."""

    def __init__(self, program: Program, forward: Forward) -> None:
        self.moving = program.moving
        self.values = forward.values
        self.sums: dict[Var, Array] = {}

    def moves(self, atom: Atom) -> TypeGuard[Var]:
        """Whether it lies between a weight and the loss."""
        # A literal cannot be hashed.
        return is_variable(atom) and atom in self.moving

    def add(self, atoms: Iterable[Atom], cotangents: Iterable[Array | None]) -> None:
        for atom, cotangent in zip(atoms, cotangents, strict=True):
            if cotangent is None or not self.moves(atom):
                continue
            if atom in self.sums:
                cotangent = self.sums[atom] + cotangent
            self.sums[atom] = cotangent

    def taken(self, var: Var) -> Array:
        """The sum, which nobody adds to any more."""
        if var in self.sums:
            return self.sums.pop(var)
        return _zeros(self.values[var])


def _zeros(array: Array) -> Array:
    return typed_as(jnp.zeros_like(array), jax.typeof(array))


# --------------------------------------------------------------------------- forward


def forward_pass(program: Program, inputs: Sequence[Array]) -> Forward:
    values = dict(zip(program.inputs, inputs, strict=True)) | program.constants
    forward = Forward(values, kept=[])
    for section in program.sections:
        if isinstance(section, Part):
            forward.kept.append(_run_part(section, values))
        else:
            forward.kept.append(_run_stack(section, program, forward))
    return forward


def _run_part(part: Part, values: dict[Var, Array]) -> Callable[..., list[Array]]:
    """Runs a part, and returns how to go back through it."""
    others = [values[var] for var in part.other_inputs]

    def run(*moving: Array) -> tuple[list[Array], list[Array]]:
        outputs = part.run(*moving, *others)
        count = len(part.moving_outputs)
        return outputs[:count], outputs[count:]

    moving = [values[var] for var in part.moving_inputs]
    moving_outputs, pull, other_outputs = jax.vjp(run, *moving, has_aux=True)
    values.update(zip(part.moving_outputs, moving_outputs))
    values.update(zip(part.other_outputs, other_outputs))
    return pull


class Inputs(NamedTuple):
    """The inputs of a scan, or of one of its layers, with None in the place of weights.
    Or their cotangents, with None where there is none.
    """

    consts: list[Any]
    carry: list[Any]
    xs: list[Any]

    def of_layer(self, carry: Sequence[Array], number: Array) -> Inputs:
        return Inputs(self.consts, list(carry), _at(self.xs, number))


def _inputs_of(stack: Stack, forward: Forward) -> Inputs:
    xs: list[Any] = []
    for index, x in enumerate(stack.xs):
        xs.append(None if index in stack.slices else forward.read(x))
    return Inputs(
        consts=[forward.read(atom) for atom in stack.consts],
        carry=[forward.read(atom) for atom in stack.carry],
        xs=xs,
    )


def _at(arrays: PyTree, number: Array) -> PyTree:
    """One entry along the first axis of all arrays."""
    index = partial(lax.dynamic_index_in_dim, index=number, axis=0, keepdims=False)
    return jax.tree.map(index, arrays)


def _run_layer(
    stack: Stack, weights: dict[int, Array], inputs: Inputs
) -> tuple[list[Array], list[Array]]:
    """The carry after a layer, and its ys. `weights` are slices of leaves."""
    xs = list(inputs.xs)
    for index, leaf_slice in stack.slices.items():
        xs[index] = leaf_slice.as_layer_reads(weights[leaf_slice.leaf])
    outputs = jaxpr_as_fun(stack.body)(*inputs.consts, *inputs.carry, *xs)
    count = len(stack.carry)
    return outputs[:count], outputs[count:]


def _run_stack(stack: Stack, program: Program, forward: Forward) -> list[Array]:
    """Runs all layers, and returns the carry before each of them."""
    inputs = _inputs_of(stack, forward)
    slices = {x.leaf: x for x in stack.slices.values()}
    leaves = {leaf: forward.values[program.inputs[leaf]] for leaf in slices}

    def run(carry: list[Array], number: Array) -> Any:
        weights = {k: slices[k].taken(leaves[k], number) for k in slices}
        new_carry, ys = _run_layer(stack, weights, inputs.of_layer(carry, number))
        return new_carry, (carry, ys)

    last_carry, (carries, ys) = lax.scan(
        run, inputs.carry, jnp.arange(stack.length), reverse=stack.is_reversed
    )
    forward.values.update(zip(stack.last_carry, last_carry))
    forward.values.update(zip(stack.ys, ys))
    return carries


# -------------------------------------------------------------------------- backward


def backward_pass(
    program: Program,
    forward: Forward,
    stored: Sequence[Stored],
    places: Sequence[Stored],
    memory: Any,
    visit: Visit,
) -> tuple[dict[int, Array], list[Stored], Any]:
    """Goes back through the program.

    Args:
      stored: for each stack the whole arrays, which the visits of its layers write to.
      places: for each stack the slices that a layer has of these.
      memory: what the first layer is given.
      visit: what is done with a layer.

    Returns:
      The gradients of the rest, the new arrays, and what the last layer left behind.
    """
    cotangents = Cotangents(program, forward)
    loss = program.outputs[0]
    cotangents.add([loss], [_zeros(forward.read(loss)) + 1])
    new_stored = list(stored)
    stack_number, group = len(stored), 0
    for section, kept in zip(reversed(program.sections), reversed(forward.kept)):
        if isinstance(section, Part):
            of_outputs = [cotangents.taken(var) for var in section.moving_outputs]
            cotangents.add(section.moving_inputs, kept(of_outputs))
        else:
            stack_number -= 1
            way = _Way(section, forward, cotangents, carries=kept)
            new_stored[stack_number], memory = way.back(
                Layer(stack_number, jnp.asarray(0), jnp.asarray(group)),
                stored[stack_number],
                places[stack_number],
                memory,
                visit,
            )
            group += section.length
    grads = {leaf: cotangents.taken(program.inputs[leaf]) for leaf in program.rest}
    return grads, new_stored, memory


class _Loop(NamedTuple):
    """What a layer hands to the layer below it."""

    cotangents: Inputs  # of the carry, of consts so far, and the rows of xs so far
    stored: Stored
    memory: Any


class _Way:
    """The way back through a stack."""

    def __init__(
        self,
        stack: Stack,
        forward: Forward,
        cotangents: Cotangents,
        carries: list[Array],
    ) -> None:
        self.stack = stack
        self.cotangents = cotangents
        self.carries = carries
        self.inputs = _inputs_of(stack, forward)
        of_ys = []
        for var in stack.ys:
            of_ys.append(cotangents.taken(var) if cotangents.moves(var) else None)
        self.of_ys = of_ys

    def back(
        self, layer: Layer, stored: Stored, places: Stored, memory: Any, visit: Visit
    ) -> tuple[Stored, Any]:
        """Goes through all layers. `layer` has the group of the first one."""
        stack = self.stack
        # A carry may begin without a cotangent, and get it from a layer.
        of_carry = []
        for var in stack.last_carry:
            of_carry.append(self.cotangents.taken(var) if is_float(var) else None)
        zeros = jax.tree.map(_zeros, self.moving(self.inputs))
        first = _Loop(zeros._replace(carry=of_carry), stored, memory)

        def turn(count: Array, loop: _Loop) -> _Loop:
            number = count if stack.is_reversed else stack.length - 1 - count
            slices = jax.tree.map(
                lambda place, array: place.taken(array, number), places, loop.stored
            )
            grads, cotangents = self.gradients(slices.weights, number, loop.cotangents)
            here = Layer(layer.stack, number, layer.group + count)
            new_slices, new_memory = visit(here, grads, slices, loop.memory)
            new_stored = loop.stored
            # Put back as they are, weights would be copied.
            if new_slices is not None:
                new_stored = jax.tree.map(
                    lambda place, array, new: place.put(array, number, new),
                    places,
                    loop.stored,
                    new_slices,
                )
            return _Loop(cotangents, new_stored, new_memory)

        last = lax.fori_loop(0, stack.length, turn, first)
        self.cotangents.add(stack.consts, last.cotangents.consts)
        self.cotangents.add(stack.carry, last.cotangents.carry)
        self.cotangents.add(stack.xs, last.cotangents.xs)
        return last.stored, last.memory

    def gradients(
        self, weights: dict[int, Array], number: Array, cotangents: Inputs
    ) -> tuple[dict[int, Array], Inputs]:
        """The gradients of a layer by its slices of weights, and the cotangents below
        it.
        """
        carry = _at(self.carries, number)
        inputs = self.inputs.of_layer(carry, number)

        def run(weights: dict[int, Array], moving: Inputs) -> tuple[Any, Any]:
            carry, ys = _run_layer(self.stack, weights, put_back(moving, inputs))
            return _where_given(carry, cotangents.carry), _where_given(ys, self.of_ys)

        _, pull = jax.vjp(run, weights, self.moving(inputs))
        of_ys = _at(self.of_ys, number)
        grads, of_inputs = pull((cotangents.carry, of_ys))
        row = partial(lax.dynamic_update_index_in_dim, index=number, axis=0)
        below = Inputs(
            consts=jax.tree.map(jnp.add, cotangents.consts, of_inputs.consts),
            carry=of_inputs.carry,
            xs=jax.tree.map(row, cotangents.xs, of_inputs.xs),
        )
        return grads, below

    def moving(self, inputs: Inputs) -> Inputs:
        """The inputs that have a cotangent, with None in the place of the others."""

        def moving_only(atoms: list[Atom], arrays: list[Any]) -> list[Any]:
            moves = self.cotangents.moves
            return [x if moves(atom) else None for x, atom in zip(arrays, atoms)]

        return Inputs(
            consts=moving_only(self.stack.consts, inputs.consts),
            carry=[x if is_float(x) else None for x in inputs.carry],
            xs=moving_only(self.stack.xs, inputs.xs),
        )


def _where_given(arrays: list[Array], cotangents: list[Any]) -> list[Any]:
    """The arrays that have a cotangent, with None in the place of the others."""
    return [None if y is None else x for x, y in zip(arrays, cotangents)]
