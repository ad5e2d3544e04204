"""`layer_clip`: a clipper that sees the gradient of one layer, and its states."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from .._mesh_types import resharded_as
from .._state import COUNT_NAMES, ClipState, Names, clip_states
from .._trees import PyTree
from .optimizers import Optimizer
from .program import Slice

# One entry of an array of all layers.
ENTRY = Slice(leaf=-1, axis=0, rows=1)


class LayerClip(NamedTuple):
    """A clipper of one layer of a stack."""

    clipper: optax.GradientTransformationExtraArgs
    optimizer: Optimizer  # knows the tree of params
    slices: dict[int, Slice]  # of the leaves of the stack

    def first_states(self, leaves: dict[int, Array], length: int) -> PyTree:
        """The states of all layers before the first step, arrays [layers, ...]."""
        states = jax.vmap(lambda layer: self._first_state(leaves, layer))(
            jnp.arange(length)
        )
        # Zeros that vmap stacks have no type of a mesh.
        return jax.tree.map(lambda x: resharded_as(x, jax.typeof(x)), states)

    def states(self, arrays: list[Array], leaves: dict[int, Array]) -> PyTree:
        """The states of all layers, made of their arrays."""
        shapes = jax.eval_shape(lambda: self._first_state(leaves, 0))
        return jax.tree.structure(shapes).unflatten(arrays)

    def updated(
        self, grads: dict[int, Array], state: list[Array], weights: dict[int, Array]
    ) -> tuple[dict[int, Array], list[Array]]:
        """The clipped gradient of a layer, and the arrays [1, ...] of its new state."""
        params = self._layer(weights)
        shapes = jax.eval_shape(self.clipper.init, params)
        old_state = jax.tree.structure(shapes).unflatten([x[0] for x in state])
        tree, new_state = self.clipper.update(self._layer(grads), old_state, params)
        clipped = {}
        for leaf, array in zip(sorted(grads), jax.tree.leaves(tree), strict=True):
            clipped[leaf] = array.reshape(grads[leaf].shape)
        return clipped, [x[None] for x in jax.tree.leaves(new_state)]

    def _first_state(self, leaves: dict[int, Array], layer: Array | int) -> PyTree:
        weights = {}
        for leaf, layer_slice in self.slices.items():
            weights[leaf] = layer_slice.taken(jnp.asarray(leaves[leaf]), layer)
        return self.clipper.init(self._layer(weights))

    def _layer(self, arrays: dict[int, Array]) -> PyTree:
        """The slices of a layer as it reads them, without the axis of layers."""
        layer = {}
        for leaf, array in arrays.items():
            has_axis = self.slices[leaf].rows > 1
            axis = self.slices[leaf].axis
            layer[leaf] = array if has_axis else jnp.squeeze(array, axis)
        return self.optimizer.tree_of(layer)


def shown_states(states: PyTree) -> list[ClipState]:
    """What `metrics` shows of the states of all layers, arrays [layers, ...]."""
    return [_of_all_layers(state) for state in clip_states(states)]


def _of_all_layers(state: ClipState) -> ClipState:
    """The states of all layers, arrays [layers, rows, norms], as that of a stacked
    leaf.
    """
    layers = range(state.step.size)
    names = {}
    for leaf, inside in state.names.layers_of_name.items():
        ends = [f"/{end}" for end in inside] if inside else [""]
        keys = [f"{layer}{end}" for end in ends for layer in layers]
        # The norm of everything in a layer has no name of its own.
        names[leaf or "layer"] = dict.fromkeys(keys)

    def rows_of_all(array: Array) -> Array:
        rows = array[..., None] if state.names.is_global else array
        # [rows, norms, layers], of which each norm has its layers side by side.
        return jnp.moveaxis(rows, 0, -1).reshape(rows.shape[1], -1)

    return ClipState(
        Names(names, state.names.unit_leaves),
        rows_of_all(state.counts)[: len(COUNT_NAMES)],
        rows_of_all(state.numbers)[: len(state.number_names)],
    )
