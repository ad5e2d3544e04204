"""A scan through layers, in whose backward pass the layers are updated.

    forward     keeps the input of every layer
    backward    last layer first: its gradient, then new weights and moments in place

JAX asks a function for the cotangents of its inputs. Here those of weights and moments
are the new weights and moments, and the cotangent of the budget is what the layers
leave of it. So JAX itself goes back through all that is between two stacks, and adds up
the gradients of weights that are tied or shared.
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
# From the number of a group, the gradients of a layer, its entries and a budget to new
# entries (None where nothing is to be written) and the budget of the layer below.
UpdateLayer = Callable[[Array, Entries, Entries, Budget], tuple[Entries | None, Budget]]


class LayoutStep(NamedTuple):
    """An equation between a leaf and its scan."""

    equation: JaxprEqn
    axis: int  # of the layers, in its result


class LayerSlice(NamedTuple):
    """The part of a leaf, or of a moment, that belongs to one layer."""

    leaf_path: str
    axis: int  # of the layers
    layer_count: int
    layout_steps: list[LayoutStep]

    def taken(self, array: Array, layer: Array | int) -> Array:
        """The slice, in which the axis stays. It has several rows where the scan goes
        through groups of layers.
        """
        rows = array.shape[self.axis] // self.layer_count
        return lax.dynamic_slice_in_dim(array, layer * rows, rows, self.axis)

    def put(self, array: Array, layer: Array | int, new: Array) -> Array:
        """The array with another slice."""
        start = layer * new.shape[self.axis]
        return lax.dynamic_update_slice_in_dim(array, new, start, self.axis)

    def as_layer_reads(self, array: Array) -> Array:
        """What the body of the scan makes of the slice."""
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


class ScanInputs(NamedTuple):
    """The inputs of a scan, or of one of its layers, with None in the place of weights.
    Or their cotangents, with None where there is none.
    """

    consts: list[Any]
    carry: list[Any]
    xs: list[Any]


class Stack(NamedTuple):
    """A scan that reads leaves of params layer by layer."""

    equation: JaxprEqn
    slice_of_input: dict[int, LayerSlice]  # by place among the inputs of the scan
    layers_before: int  # in stacks that run earlier

    @property
    def length(self) -> int:
        return self.equation.params["length"]

    @property
    def leaves(self) -> set[str]:
        return {x.leaf_path for x in self.slice_of_input.values()}

    def inputs_of(self, arrays: list[Any]) -> ScanInputs:
        """The inputs of the scan, without weights."""
        arrays = list(arrays)
        for place in self.slice_of_input:
            arrays[place] = None
        consts, carries = counts_of_scan(self.equation)
        first_x = consts + carries
        return ScanInputs(
            consts=arrays[:consts], carry=arrays[consts:first_x], xs=arrays[first_x:]
        )

    def run_layer(
        self, weights: Entries, inputs: ScanInputs
    ) -> tuple[list[Array], Any]:
        """The carry after a layer, and its ys. `weights` are slices of leaves."""
        from jax.extend.core import jaxpr_as_fun

        arrays = [*inputs.consts, *inputs.carry, *inputs.xs]
        for place, leaf_slice in self.slice_of_input.items():
            arrays[place] = leaf_slice.as_layer_reads(weights[leaf_slice.leaf_path])
        outputs = jaxpr_as_fun(body_of(self.equation))(*arrays)
        count = len(inputs.carry)
        return outputs[:count], outputs[count:]


def layer_of(
    entries: Entries, slice_of_entry: dict[str, LayerSlice], layer: Array | int
) -> Entries:
    """The slices of one layer."""
    return {
        key: slice_of_entry[key].taken(jnp.asarray(entries[key]), layer)
        for key in slice_of_entry
    }


def is_float(x: Any) -> bool:
    """Whether an array may have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floats(tree: PyTree) -> PyTree:
    """The arrays that may have a gradient, with None in the place of all others."""
    return jax.tree.map(lambda x: x if is_float(x) else None, tree)


def _zeros(array: Array) -> Array:
    return typed_as(jnp.zeros_like(array), jax.typeof(array))


def _gradients(
    stack: Stack, weights: Entries, inputs: ScanInputs, cotangents: Any
) -> tuple[Entries, ScanInputs]:
    """The gradients of a layer by its weights, and the cotangents of its inputs."""

    def float_outputs(weights: Entries, moving: ScanInputs) -> Any:
        return floats(stack.run_layer(weights, put_back(moving, inputs)))

    _, pull = jax.vjp(float_outputs, weights, floats(inputs))
    return pull(cotangents)


def run_stack(
    stack: Stack,
    update_layer: UpdateLayer,
    *,
    inputs: list[Array],
    entries: Entries,
    slice_of_entry: dict[str, LayerSlice],
    budget: Budget,
) -> tuple[list[Array], Budget]:
    """Runs a scan, and returns its outputs and the budget. In the backward pass each
    layer is visited.

    Args:
      inputs: of the scan.
      entries: weights and moments of layers. Their cotangents are the new ones.
      slice_of_entry: of these entries.
      budget: its cotangent is what the layers above have left of it.
    """
    slice_of_entry = {
        key: x for key, x in slice_of_entry.items() if x.leaf_path in stack.leaves
    }
    entries = {key: entries[key] for key in slice_of_entry}
    is_reversed = stack.equation.params["reverse"]
    indices = jnp.arange(stack.length)
    order = indices[::-1] if is_reversed else indices
    # Groups are numbered from the end of the shares, so that the rest is -1, however
    # many layers there are. Of 3 layers, layer 2 is group -4 (index 0, the first that a
    # backward pass sees), and layer 0 is -2.
    groups = -2 - stack.layers_before - order

    def forward(inputs: ScanInputs, entries: Entries, budget: Budget) -> Any:
        def one_layer(carry: list[Array], layer_inputs: Any) -> Any:
            layer, xs = layer_inputs
            inputs_of_layer = ScanInputs(inputs.consts, carry, xs)
            arrays_of_layer = layer_of(entries, slice_of_entry, layer)
            new_carry, ys = stack.run_layer(arrays_of_layer, inputs_of_layer)
            return new_carry, (ys, carry)

        last_carry, (ys, carries) = lax.scan(
            one_layer,
            inputs.carry,
            (indices, inputs.xs),
            reverse=is_reversed,
            unroll=stack.equation.params["unroll"],
        )
        saved = inputs._replace(carry=carries), entries
        return (last_carry, ys, budget), saved

    def backward(saved: Any, cotangents: Any) -> Any:
        inputs, entries = saved
        carry_cotangent, ys_cotangent, budget = floats(cotangents)

        def one_layer(loop: Any, layer_inputs: Any) -> Any:
            carry_cotangent, consts_cotangent, entries, budget = loop
            layer, group, carry, xs, ys_cotangent = layer_inputs
            inputs_of_layer = ScanInputs(inputs.consts, carry, xs)
            arrays_of_layer = layer_of(entries, slice_of_entry, layer)

            weights = {leaf: arrays_of_layer[leaf] for leaf in stack.leaves}
            grads, input_cotangents = _gradients(
                stack,
                weights,
                inputs_of_layer,
                cotangents=(carry_cotangent, ys_cotangent),
            )
            new_entries, budget = update_layer(group, grads, arrays_of_layer, budget)
            # Writing back unchanged slices would make XLA copy the weights.
            if new_entries is not None:
                entries = {
                    key: slice_of_entry[key].put(entries[key], layer, new_entries[key])
                    for key in slice_of_entry
                }
            consts_cotangent = jax.tree.map(
                jnp.add, consts_cotangent, input_cotangents.consts
            )
            loop = input_cotangents.carry, consts_cotangent, entries, budget
            return loop, input_cotangents.xs

        zeros = jax.tree.map(_zeros, floats(inputs.consts))
        # Not unrolled, since gradients of several layers could then be alive at once.
        # `_split_transpose` of the user's scan has no meaning for a loop of our own.
        loop, xs_cotangent = lax.scan(
            one_layer,
            (carry_cotangent, zeros, entries, budget),
            (indices, groups, inputs.carry, inputs.xs, ys_cotangent),
            reverse=not is_reversed,
        )
        carry_cotangent, consts_cotangent, entries, budget = loop
        return (
            ScanInputs(consts_cotangent, carry_cotangent, xs_cotangent),
            entries,
            budget,
        )

    @jax.custom_vjp
    def scan_layers(inputs: ScanInputs, entries: Entries, budget: Budget) -> Any:
        outputs, _ = forward(inputs, entries, budget)
        return outputs

    scan_layers.defvjp(forward, backward)
    carry, ys, budget = scan_layers(stack.inputs_of(inputs), entries, budget)
    return [*carry, *ys], budget
