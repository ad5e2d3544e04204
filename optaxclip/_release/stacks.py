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

from .._jaxpr import body_of, counts_of_scan
from .._mesh_types import typed_as
from .._trees import PyTree, put_back
from .budget import Budget

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

Entries = dict[str, Array]  # weights and the optimizer's state, by path
# Called with the group of a layer, its gradients, its entries and the budget. Returns
# the new entries, or None in a pass that only measures, and the budget that is left.
UpdateLayer = Callable[[Array, Entries, Entries, Budget], tuple[Entries | None, Budget]]
# One layer of a leaf in another order, shape or dtype.
Layout = Callable[[Array], Array]


class LayerSlice(NamedTuple):
    """Where the part of a layer is in a leaf, or in a moment of the leaf."""

    leaf_path: str
    axis: int  # of the layers
    layer_count: int
    layouts: list[Layout]  # from the leaf to the xs of the scan, one after the other

    def take(self, array: Array, layer: Array | int) -> Array:
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
        for layout in self.layouts:
            array = layout(array)
        return array.reshape(array.shape[1:])


def layer_of(
    entries: Entries, slice_of_entry: dict[str, LayerSlice], layer: Array | int
) -> Entries:
    """The entries of one layer."""
    layer_entries = {}
    for path, layer_slice in slice_of_entry.items():
        layer_entries[path] = layer_slice.take(jnp.asarray(entries[path]), layer)
    return layer_entries


class ScanInputs(NamedTuple):
    """The inputs of a scan or of one of its layers, by their roles. None stands in the
    place of leaves of params, and of what has no gradient.
    """

    consts: list[Any]
    carry: list[Any]
    xs: list[Any]


def scan_inputs(equation: JaxprEqn, inputs: list[Any]) -> ScanInputs:
    """A value for each input of a scan, by the roles of the inputs."""
    consts, carries = counts_of_scan(equation)
    first_x = consts + carries
    return ScanInputs(
        consts=inputs[:consts], carry=inputs[consts:first_x], xs=inputs[first_x:]
    )


class Stack(NamedTuple):
    """A scan that reads leaves of params layer by layer."""

    equation: JaxprEqn
    slice_of_x: dict[int, LayerSlice]  # by index: the xs that are leaves of params
    # Whether an input that is no leaf has a gradient (bools). The batch has none: a
    # layer may read it through a function without a gradient, such as a `while_loop`.
    has_gradient: ScanInputs
    layers_before: int  # in stacks that run earlier

    @property
    def length(self) -> int:
        return self.equation.params["length"]

    @property
    def is_reversed(self) -> bool:
        return self.equation.params["reverse"]

    @property
    def leaf_paths(self) -> set[str]:
        return {layer_slice.leaf_path for layer_slice in self.slice_of_x.values()}

    def groups(self) -> Array:
        """The group of each layer in the budget. A backward pass goes through them in
        order, and the weights outside of the layers come last. Groups are counted from
        the end: -1 are these weights, -2 is the layer that runs first. So group 0 is
        the layer that runs last.
        """
        turns = jnp.arange(self.length)
        if self.is_reversed:
            turns = turns[::-1]
        return -2 - self.layers_before - turns

    def run_layer(
        self, layer_entries: Entries, inputs: ScanInputs
    ) -> tuple[list[Array], list[Array]]:
        """The carry after a layer, and its ys. The inputs have None in the place of
        leaves.
        """
        from jax.extend.core import jaxpr_as_fun

        xs = list(inputs.xs)
        for index, layer_slice in self.slice_of_x.items():
            weights = layer_entries[layer_slice.leaf_path]
            xs[index] = layer_slice.as_layer_reads(weights)
        run = jaxpr_as_fun(body_of(self.equation))
        outputs = run(*inputs.consts, *inputs.carry, *xs)
        count = len(inputs.carry)
        return outputs[:count], outputs[count:]


def may_have_gradient(x: Any) -> bool:
    """Whether an array may have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def differentiable(arrays: list[Array]) -> list[Array | None]:
    """The arrays that may have a gradient, with None in the place of all others.
    Cotangents of integers are float0, and become None as well.
    """
    return [array if may_have_gradient(array) else None for array in arrays]


def selected(flags: PyTree, arrays: PyTree) -> Any:
    """The arrays with a flag, with None in the place of all others."""
    return jax.tree.map(lambda flag, array: array if flag else None, flags, arrays)


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
    entries_of_stack = {}
    slices_of_stack = {}
    for path, layer_slice in slice_of_entry.items():
        if layer_slice.leaf_path in stack.leaf_paths:
            entries_of_stack[path] = stack_entries[path]
            slices_of_stack[path] = layer_slice
    loops = _Loops(stack, update_layer, slices_of_stack)
    all_inputs = scan_inputs(stack.equation, inputs)
    other_xs: list[Array | None] = list(all_inputs.xs)
    for index in stack.slice_of_x:
        other_xs[index] = None

    @jax.custom_vjp
    def scan_layers(inputs: ScanInputs, stack_entries: Entries, budget: Budget) -> Any:
        outputs, _ = loops.forward(inputs, stack_entries, budget)
        return outputs

    scan_layers.defvjp(loops.forward, loops.backward)
    carry, ys, budget = scan_layers(
        all_inputs._replace(xs=other_xs), entries_of_stack, budget
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

        def run_layer(carry: list[Array], layer_inputs: Any) -> Any:
            layer, xs = layer_inputs
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
        carry_cotangent, ys_cotangents, budget = cotangents
        has_gradient = self.stack.has_gradient

        def layer_backward(loop_carry: Any, layer_inputs: Any) -> Any:
            carry_cotangent, consts_cotangent, stack_entries, budget = loop_carry
            layer, group, carry, xs, ys_cotangent = layer_inputs
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
            loop_carry = input_cotangents.carry, consts_cotangent, stack_entries, budget
            return loop_carry, input_cotangents.xs

        consts = selected(has_gradient.consts, inputs.consts)
        layers = jnp.arange(self.stack.length)
        # Not unrolled, since gradients of several layers could then be alive at once.
        # `_split_transpose` of the user's scan has no meaning for a loop of our own.
        loop_carry, xs_cotangents = lax.scan(
            layer_backward,
            (
                selected(has_gradient.carry, carry_cotangent),
                jax.tree.map(_zeros, consts),
                stack_entries,
                budget,
            ),
            (
                layers,
                self.stack.groups(),
                inputs.carry,
                inputs.xs,
                differentiable(ys_cotangents),
            ),
            reverse=not self.stack.is_reversed,
        )
        carry_cotangent, consts_cotangent, stack_entries, budget = loop_carry
        input_cotangents = ScanInputs(consts_cotangent, carry_cotangent, xs_cotangents)
        return input_cotangents, stack_entries, budget

    def _gradients(
        self, layer_entries: Entries, inputs: ScanInputs, cotangents: Any
    ) -> tuple[Entries, ScanInputs]:
        """The gradients of a layer by its weights, and the cotangents of its inputs."""
        has_gradient = self.stack.has_gradient

        def differentiable_outputs(weights: Entries, differentiated: ScanInputs) -> Any:
            carry, ys = self.stack.run_layer(weights, put_back(differentiated, inputs))
            return selected(has_gradient.carry, carry), differentiable(ys)

        weights = {path: layer_entries[path] for path in self.stack.leaf_paths}
        differentiated = selected(has_gradient, inputs)
        _, pull = jax.vjp(differentiable_outputs, weights, differentiated)
        return pull(cotangents)
