"""A scan through layers, in whose backward pass the layers are updated.

In a backward pass, JAX brings the cotangents of a function to the function before it.
We put new weights in the place of cotangents, by a `jax.custom_vjp`, and so bring them
from layer to layer. Forward, a layer returns weights, moments and budget (what the clip
may still spend, see budget.py) as they are. Backward it returns:

    input                 "cotangent"
    weights, moments      the new weights and moments of this layer and all later ones
    budget                the budget that these layers leave

So JAX itself goes back through layers and all that is between two stacks, and adds up
the gradients of weights that are tied or shared. JAX keeps the inputs of every layer,
from which the backward pass computes the layer again, and writes new weights and
moments in place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import eval_jaxpr
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from .._jaxpr import body_of, counts_of_scan
from .._trees import PyTree
from .budget import Budget

Entries = dict[str, Array]  # weights and the optimizer's state, by path
# Called with the gradients of a layer, its entries and the budget. Returns the entries
# that are new (none in a pass that only measures), and the budget that is left.
UpdateLayer = Callable[[Entries, Entries, Budget], tuple[Entries, Budget]]
# Brings one layer of a leaf into another order, shape or dtype.
LayoutChange = Callable[[Array], Array]


class LayerSlice(NamedTuple):
    """Where the part of a layer is in a leaf, or in a moment of the leaf. A layer is
    what one turn of the scan reads.
    """

    leaf_path: str
    axis: int  # of the layers
    rows: int  # how many entries of the axis a layer has: several if layers are blocks
    changes: list[LayoutChange]  # from the leaf to the xs of the scan, in this order

    def take(self, array: Array, layer_number: Array | int) -> Array:
        """The part of a layer, in which the axis of layers stays."""
        start = layer_number * self.rows
        return lax.dynamic_slice_in_dim(array, start, self.rows, self.axis)

    def put(self, array: Array, layer_number: Array | int, new: Array) -> Array:
        """The array with a new part for a layer."""
        start = layer_number * self.rows
        return lax.dynamic_update_slice_in_dim(array, new, start, self.axis)

    def as_layer_reads(self, array: Array) -> Array:
        """The part of a layer as the body of the scan reads it."""
        for change in self.changes:
            array = change(array)
        return array.reshape(array.shape[1:])


def layer_of(
    entries: Entries, slice_of_entry: dict[str, LayerSlice], layer_number: Array | int
) -> Entries:
    """The entries of one layer."""
    layer_entries = {}
    for path, layer_slice in slice_of_entry.items():
        layer_entries[path] = layer_slice.take(jnp.asarray(entries[path]), layer_number)
    return layer_entries


class Stack(NamedTuple):
    """A scan that reads leaves of params layer by layer."""

    equation: JaxprEqn
    slice_of_input: dict[int, LayerSlice]  # of the inputs that are leaves, by index

    @property
    def length(self) -> int:
        return self.equation.params["length"]

    @property
    def slice_of_leaf(self) -> dict[str, LayerSlice]:
        """Where layers are in the leaves, by path."""
        slices = self.slice_of_input.values()
        return {layer_slice.leaf_path: layer_slice for layer_slice in slices}


class _Layer(NamedTuple):
    """A layer that is updated backward, in the form of `jax.custom_vjp`. `inputs` are
    those of the scan's body, with None in the place of leaves.
    """

    stack: Stack
    slice_of_entry: dict[str, LayerSlice]
    update: Callable[..., tuple[Entries, Budget]]  # called with its constants first

    def run(
        self,
        inputs: list[Any],
        layer_number: Array,
        constants: list[Array],
        entries: Entries,
        budget: Budget,
    ) -> tuple[list[Array], Entries, Budget]:
        """The outputs of the layer, and entries and budget as they are."""
        weights = layer_of(entries, self.stack.slice_of_leaf, layer_number)
        return self.run_body(inputs, weights), entries, budget

    def forward(self, *arguments: Any) -> Any:
        """What `run` returns, and what `backward` reads of its arguments."""
        inputs, layer_number, constants, _, _ = arguments
        return self.run(*arguments), (inputs, layer_number, constants)

    def backward(self, saved: Any, cotangents: Any) -> Any:
        """The cotangents of the inputs, and entries and budget after the update."""
        inputs, layer_number, constants = saved
        output_cotangents, entries, budget = cotangents
        layer_entries = layer_of(entries, self.slice_of_entry, layer_number)
        weights = {path: layer_entries[path] for path in self.stack.slice_of_leaf}
        _, backward_of_body = jax.vjp(self.run_body, inputs, weights)
        input_cotangents, grads = backward_of_body(output_cotangents)
        new_entries, budget = self.update(constants, grads, layer_entries, budget)
        entries = dict(entries)
        for path, new in new_entries.items():
            layer_slice = self.slice_of_entry[path]
            entries[path] = layer_slice.put(entries[path], layer_number, new)
        # Neither the layer number nor the constants of the update have a cotangent.
        return input_cotangents, None, None, entries, budget

    def run_body(self, inputs: list[Any], weights: Entries) -> list[Array]:
        """What the body of the scan returns: its carry and its ys."""
        inputs = list(inputs)
        for index, layer_slice in self.stack.slice_of_input.items():
            inputs[index] = layer_slice.as_layer_reads(weights[layer_slice.leaf_path])
        return jaxpr_as_fun(body_of(self.stack.equation))(*inputs)


def run_stack(
    stack: Stack,
    update_layer: UpdateLayer,
    *,
    inputs: list[Any],
    stack_entries: Entries,
    slice_of_entry: dict[str, LayerSlice],
    budget: Budget,
) -> tuple[list[Array], Entries, Budget]:
    """Runs a scan. Returns its outputs, and entries and budget as they are. The
    backward pass updates the layers.

    Args:
      inputs: the inputs of the scan.
      stack_entries: weights and moments of the layers of all stacks.
      slice_of_entry: where layers are in these entries.
    """
    slice_of_own_entry = {}
    for path, layer_slice in slice_of_entry.items():
        if layer_slice.leaf_path in stack.slice_of_leaf:
            slice_of_own_entry[path] = layer_slice
    entries = {path: stack_entries[path] for path in slice_of_own_entry}
    layer_entries = jax.eval_shape(
        lambda: layer_of(entries, slice_of_own_entry, layer_number=0)
    )
    weights = {path: layer_entries[path] for path in stack.slice_of_leaf}
    # Traced with weights in the place of gradients, which have the same types.
    update_with_constants, constants = _closure_converted(
        update_layer, weights, layer_entries, budget
    )
    layer = _Layer(stack, slice_of_own_entry, update_with_constants)
    run_layer = jax.custom_vjp(layer.run)
    run_layer.defvjp(layer.forward, layer.backward)

    # A layer takes its weights from the entries, so None stands in their place.
    inputs = list(inputs)
    for index in stack.slice_of_input:
        inputs[index] = None
    const_count, carry_count = counts_of_scan(stack.equation)
    consts = inputs[:const_count]
    carry = inputs[const_count : const_count + carry_count]
    xs = inputs[const_count + carry_count :]

    def body(carry_and_update: Any, number_and_xs: Any) -> Any:
        carry, entries, budget = carry_and_update
        layer_number, xs = number_and_xs
        outputs, entries, budget = run_layer(
            [*consts, *carry, *xs], layer_number, constants, entries, budget
        )
        return (outputs[:carry_count], entries, budget), outputs[carry_count:]

    # Not unrolled as the user's scan may be, since the gradients of several layers
    # could then be alive at once.
    (carry, entries, budget), ys = lax.scan(
        body,
        (carry, entries, budget),
        (jnp.arange(stack.length), xs),
        reverse=stack.equation.params["reverse"],
    )
    return [*carry, *ys], stack_entries | entries, budget


def _closure_converted(
    function: Callable[..., Any], *inputs: PyTree
) -> tuple[Callable[..., Any], list[Array]]:
    """Returns `converted(constants, *inputs)`, and the constants: the arrays that the
    function closes over. A backward rule in a scan may not close over traced arrays.

    `jax.closure_convert` would leave integers in the closure, such as the step.
    """
    program, output_types = jax.make_jaxpr(function, return_shape=True)(*inputs)
    structure = jax.tree.structure(output_types)

    def converted(constants: list[Array], *inputs: PyTree) -> Any:
        outputs = eval_jaxpr(program.jaxpr, constants, *jax.tree.leaves(inputs))
        return structure.unflatten(outputs)

    return converted, program.consts
