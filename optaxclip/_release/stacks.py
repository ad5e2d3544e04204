"""A scan through layers, in whose backward pass the layers are updated.

    forward     keeps the input of every layer
    backward    last layer first: its gradient, then new weights and moments in place

JAX asks a function for the cotangents of its inputs. The function of this module
returns other things in their place, which JAX then hands on:

    input                 "cotangent"
    weights, moments      the new weights and moments
    budget                the budget that the layers of the scan leave

So JAX itself goes back through all that is between two stacks, and adds up the
gradients of weights that are tied or shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._jaxpr import body_of, counts_of_scan, type_of
from .._mesh_types import typed_as
from .._trees import PyTree, put_back
from .budget import Budget

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

Entries = dict[str, Array]  # weights and the optimizer's state, by path
# Called with the group of a layer, its gradients, its entries and the budget. Returns
# the new entries, or None in a pass that only measures, and the budget that is left.
UpdateLayer = Callable[[Array, Entries, Entries, Budget], tuple[Entries | None, Budget]]


class LayoutStep(NamedTuple):
    """An equation between a leaf and its scan."""

    equation: JaxprEqn
    axis: int  # of the layers, in its result


class LayerSlice(NamedTuple):
    """Where the part of a layer is in a leaf, or in a moment of the leaf."""

    leaf_path: str
    axis: int  # of the layers
    layer_count: int
    layout_steps: list[LayoutStep]

    def taken(self, array: Array, layer: Array | int) -> Array:
        """The part of a layer. The axis of layers stays, with several rows where the
        scan goes through blocks of layers.
        """
        rows = array.shape[self.axis] // self.layer_count
        return lax.dynamic_slice_in_dim(array, layer * rows, rows, self.axis)

    def put(self, array: Array, layer: Array | int, new: Array) -> Array:
        """The array with a new part for a layer."""
        start = layer * new.shape[self.axis]
        return lax.dynamic_update_slice_in_dim(array, new, start, self.axis)

    def as_layer_reads(self, array: Array) -> Array:
        """The part of a layer as the body of the scan reads it."""
        for equation, axis in self.layout_steps:
            result = type_of(equation.outvars[0])
            if equation.primitive.name == "transpose":
                array = jnp.transpose(array, equation.params["permutation"])
            else:
                shape = list(result.shape)
                shape[axis] //= self.layer_count
                array = array.reshape(shape)
            array = array.astype(result.dtype)
        return array.reshape(array.shape[1:])


def layer_of(
    entries: Entries, slice_of_entry: dict[str, LayerSlice], layer: Array | int
) -> Entries:
    """The entries of one layer."""
    return {
        path: layer_slice.taken(jnp.asarray(entries[path]), layer)
        for path, layer_slice in slice_of_entry.items()
    }


class ScanInputs(NamedTuple):
    """The inputs of a scan or of one of its layers, or their cotangents. None stands in
    the place of weights, and of a cotangent that there is not.
    """

    consts: list[Any]
    carry: list[Any]
    xs: list[Any]


class Stack(NamedTuple):
    """A scan that reads leaves of params layer by layer."""

    equation: JaxprEqn
    slice_of_input: dict[int, LayerSlice]  # by place among the inputs of the scan
    dependent_inputs: set[int]  # places of inputs that depend on trained leaves
    layers_before: int  # in stacks that run earlier

    @property
    def length(self) -> int:
        return self.equation.params["length"]

    @property
    def is_reversed(self) -> bool:
        return self.equation.params["reverse"]

    @property
    def leaf_paths(self) -> set[str]:
        return {x.leaf_path for x in self.slice_of_input.values()}

    def groups(self) -> Array:
        """The group of each layer in the budget. A backward pass goes through them in
        order, and the weights outside of the layers come last. Groups are counted from
        the end: -1 are these weights, -2 is the layer that runs first.
        """
        turns = jnp.arange(self.length)
        if self.is_reversed:
            turns = turns[::-1]
        return -2 - self.layers_before - turns

    def without_weights(self, inputs: list[Any]) -> ScanInputs:
        """The inputs of the scan, with None in the place of weights."""
        inputs = list(inputs)
        for place in self.slice_of_input:
            inputs[place] = None
        return self._scan_inputs(inputs)

    def differentiated(self, inputs: ScanInputs) -> ScanInputs:
        """The inputs that may have a gradient, with None in the place of all others.

        A layer may read the batch through a function that has no derivative, such as a
        `while_loop`. So the batch has no gradient.
        """
        arrays = [*inputs.consts, *inputs.carry, *inputs.xs]
        for place in range(len(arrays)):
            if place not in self.dependent_inputs:
                arrays[place] = None
        return floats(self._scan_inputs(arrays))

    def differentiated_carry(self, carry: list[Any]) -> list[Any]:
        """What is carried and may have a gradient, with None in place of all others."""
        consts, _ = counts_of_scan(self.equation)
        for index in range(len(carry)):
            if consts + index not in self.dependent_inputs:
                carry = [*carry[:index], None, *carry[index + 1 :]]
        return floats(carry)

    def _scan_inputs(self, inputs: list[Any]) -> ScanInputs:
        consts, carries = counts_of_scan(self.equation)
        first_x = consts + carries
        return ScanInputs(
            consts=inputs[:consts], carry=inputs[consts:first_x], xs=inputs[first_x:]
        )

    def run_layer(
        self, layer_entries: Entries, inputs: ScanInputs
    ) -> tuple[list[Array], list[Array]]:
        """The carry after a layer, and its ys."""
        from jax.extend.core import jaxpr_as_fun

        arrays = [*inputs.consts, *inputs.carry, *inputs.xs]
        for place, layer_slice in self.slice_of_input.items():
            arrays[place] = layer_slice.as_layer_reads(
                layer_entries[layer_slice.leaf_path]
            )
        outputs = jaxpr_as_fun(body_of(self.equation))(*arrays)
        count = len(inputs.carry)
        return outputs[:count], outputs[count:]


def may_have_gradient(x: Any) -> bool:
    """Whether an array may have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floats(tree: PyTree) -> PyTree:
    """The arrays that may have a gradient, with None in the place of all others. The
    cotangents of others are float0, which goes too.
    """
    return jax.tree.map(lambda x: x if may_have_gradient(x) else None, tree)


def _zeros(array: Array) -> Array:
    return typed_as(jnp.zeros_like(array), jax.typeof(array))


def run_stack(
    stack: Stack,
    update_layer: UpdateLayer,
    *,
    inputs: list[Array],
    stack_entries: Entries,
    slice_of_entry: dict[str, LayerSlice],
    budget: Budget,
) -> tuple[list[Array], Budget]:
    """Runs a scan, and returns its outputs and the budget. The backward pass updates
    its layers.

    Args:
      inputs: of the scan.
      stack_entries: weights and moments of the layers of all stacks.
      slice_of_entry: of these entries.
      budget: is handed on as it is. Its cotangent is the budget that is left.
    """
    slices_of_stack = {
        path: layer_slice
        for path, layer_slice in slice_of_entry.items()
        if layer_slice.leaf_path in stack.leaf_paths
    }
    loops = _Loops(stack, update_layer, slices_of_stack)

    @jax.custom_vjp
    def scan_layers(inputs: ScanInputs, stack_entries: Entries, budget: Budget) -> Any:
        outputs, _ = loops.forward(inputs, stack_entries, budget)
        return outputs

    scan_layers.defvjp(loops.forward, loops.backward)
    carry, ys, budget = scan_layers(
        stack.without_weights(inputs),
        {path: stack_entries[path] for path in slices_of_stack},
        budget,
    )
    return [*carry, *ys], budget


class _Loops(NamedTuple):
    """The loops through the layers of a stack, as `jax.custom_vjp` wants them."""

    stack: Stack
    update_layer: UpdateLayer
    slice_of_entry: dict[str, LayerSlice]

    def forward(
        self, inputs: ScanInputs, stack_entries: Entries, budget: Budget
    ) -> Any:
        """Returns (carry, ys, budget), and what the backward pass needs."""

        def run_layer(carry: list[Array], of_layer: Any) -> Any:
            layer, xs = of_layer
            new_carry, ys = self.stack.run_layer(
                layer_of(stack_entries, self.slice_of_entry, layer),
                ScanInputs(inputs.consts, carry, xs),
            )
            return new_carry, (ys, carry)

        last_carry, (ys, carries) = lax.scan(
            run_layer,
            inputs.carry,
            (jnp.arange(self.stack.length), inputs.xs),
            reverse=self.stack.is_reversed,
            unroll=self.stack.equation.params["unroll"],
        )
        inputs_of_layers = inputs._replace(carry=carries)
        return (last_carry, ys, budget), (inputs_of_layers, stack_entries)

    def backward(self, saved: Any, cotangents: Any) -> Any:
        """Returns the cotangents of the inputs, the new entries, and the budget that is
        left.
        """
        inputs, stack_entries = saved
        carry_cotangent, ys_cotangents, budget = floats(cotangents)
        carry_cotangent = self.stack.differentiated_carry(carry_cotangent)

        def layer_backward(loop: Any, of_layer: Any) -> Any:
            carry_cotangent, consts_cotangent, stack_entries, budget = loop
            layer, group, carry, xs, ys_cotangent = of_layer
            layer_entries = layer_of(stack_entries, self.slice_of_entry, layer)
            grads, input_cotangents = self._gradients(
                layer_entries,
                ScanInputs(inputs.consts, carry, xs),
                cotangents=(carry_cotangent, ys_cotangent),
            )
            new_entries, budget = self.update_layer(group, grads, layer_entries, budget)
            # Writing back unchanged entries would make XLA copy the weights.
            if new_entries is not None:
                stack_entries = {
                    path: layer_slice.put(stack_entries[path], layer, new_entries[path])
                    for path, layer_slice in self.slice_of_entry.items()
                }
            consts_cotangent = jax.tree.map(
                jnp.add, consts_cotangent, input_cotangents.consts
            )
            loop = input_cotangents.carry, consts_cotangent, stack_entries, budget
            return loop, input_cotangents.xs

        zeros = jax.tree.map(_zeros, self.stack.differentiated(inputs).consts)
        layers = jnp.arange(self.stack.length)
        # Not unrolled, since gradients of several layers could then be alive at once.
        # `_split_transpose` of the user's scan has no meaning for a loop of our own.
        loop, xs_cotangents = lax.scan(
            layer_backward,
            (carry_cotangent, zeros, stack_entries, budget),
            (layers, self.stack.groups(), inputs.carry, inputs.xs, ys_cotangents),
            reverse=not self.stack.is_reversed,
        )
        carry_cotangent, consts_cotangent, stack_entries, budget = loop
        input_cotangents = ScanInputs(consts_cotangent, carry_cotangent, xs_cotangents)
        return input_cotangents, stack_entries, budget

    def _gradients(
        self, layer_entries: Entries, inputs: ScanInputs, cotangents: Any
    ) -> tuple[Entries, ScanInputs]:
        """The gradients of a layer by its weights, and the cotangents of its inputs."""

        def float_outputs(weights: Entries, differentiated: ScanInputs) -> Any:
            inputs_of_layer = put_back(differentiated, inputs)
            carry, ys = self.stack.run_layer(weights, inputs_of_layer)
            return self.stack.differentiated_carry(carry), floats(ys)

        weights = {path: layer_entries[path] for path in self.stack.leaf_paths}
        differentiated = self.stack.differentiated(inputs)
        _, pull = jax.vjp(float_outputs, weights, differentiated)
        return pull(cotangents)
