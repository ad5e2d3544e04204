"""The loss with its params: which weights belong to layers, and one backward pass.

    leaf      an array of params
    weight    a leaf that is trained
    entry     a leaf, or an array of the optimizer's state

Dicts of them have their paths in (params, state) as keys.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.extend.core import JaxprEqn
from jax.tree_util import keystr

from .._arguments.checks import check_flag
from .._arguments.functions import is_function
from .._arguments.prefixes import for_each_leaf
from .._jaxpr import run_equations
from .._trees import PyTree, leaf_paths, leaves_to_clip, path_name
from .budget import Budget
from .optimizers import LeafOptimizer, arrays_by_path
from .program import Program, read_program
from .stacks import Entries, LayerSlice, UpdateLayer, run_stack


class PassResult(NamedTuple):
    """What a forward and a backward pass return."""

    value: Any  # what the loss returned
    outer_grads: Entries  # of the weights outside of the layers
    stack_entries: Entries  # the new weights and states of all layers
    budget: Budget  # what the layers leave of it


class Model(NamedTuple):
    """The program of a loss, and where its layers are in weights and moments."""

    program: Program
    optimizer: LeafOptimizer
    trained_weights: Entries
    slice_of_entry: dict[str, LayerSlice]  # of the weights and states of layers

    @property
    def group_count(self) -> int:
        """How many groups share the budget: each layer of each stack, and all weights
        outside of the layers together.
        """
        layer_counts = [stack.length for stack in self.program.stacks.values()]
        return sum(layer_counts) + 1

    def forward_and_backward(
        self,
        update_layer: UpdateLayer,
        all_entries: Entries,
        batch: tuple[PyTree, ...],
        budget: Budget,
    ) -> PassResult:
        """Goes through the loss forward and backward, and updates the layers.

        Only the weights outside of layers get gradients. Entries and budget have no
        cotangents: in their places the backward pass carries the new entries, and the
        budget that is left, from layer to layer (stacks.py).
        """
        stack_entries = {path: all_entries[path] for path in self.slice_of_entry}
        outer_paths = self.trained_weights.keys() - stack_entries.keys()
        outer_weights = {path: all_entries[path] for path in outer_paths}
        forward = partial(self._forward, update_layer, all_entries, batch)
        outputs, backward, aux = jax.vjp(
            forward, outer_weights, stack_entries, budget, has_aux=True
        )
        # The layer that runs last is updated first. It gets entries and budget as they
        # came, in the place of cotangents.
        value, old_entries, full_budget = outputs
        cotangents = jnp.ones_like(value), old_entries, full_budget
        outer_grads, new_entries, budget_left = backward(cotangents)
        value = self.program.structure.unflatten([value, *aux])
        return PassResult(value, outer_grads, new_entries, budget_left)

    def _forward(
        self,
        update_layer: UpdateLayer,
        all_entries: Entries,
        batch: tuple[PyTree, ...],
        outer_weights: Entries,
        stack_entries: Entries,
        budget: Budget,
    ) -> Any:
        """The value of the loss, with entries and budget as they came, and its aux."""

        def run_if_stack(equation: JaxprEqn, inputs: list[Array]) -> list[Array] | None:
            nonlocal stack_entries, budget
            stack = self.program.stacks.get(id(equation))
            if stack is None:
                return None
            # Entries and budget go through each stack, so that what stands for their
            # cotangents comes back through it.
            outputs, stack_entries, budget = run_stack(
                stack,
                update_layer,
                inputs=inputs,
                stack_entries=stack_entries,
                slice_of_entry=self.slice_of_entry,
                budget=budget,
            )
            return outputs

        # A stack reads its leaves from `stack_entries`. Only aux reads them from here.
        entries = all_entries | outer_weights
        leaves = [entries[path] for path in self.optimizer.name_of_leaf]
        inputs = [*leaves, *jax.tree.leaves(batch)]
        value, *aux = run_equations(self.program.jaxpr, inputs, run_if_stack)
        return (value, stack_entries, budget), aux


def read_model(
    loss: Callable[..., Any],
    params: PyTree,
    batch: tuple[PyTree, ...],
    *,
    optimizer: optax.GradientTransformationExtraArgs,
    trainable: PyTree,
) -> Model:
    """Traces the loss, and says where layers are in weights and moments."""
    weights = _trained_weights(params, trainable)
    name_of_leaf = {}
    for path in leaf_paths((params,)):
        # Params that are one array have no path.
        name_of_leaf[keystr(path)] = path_name(path[1:]) or "params"
    program = read_program(loss, params, batch, name_of_leaf, weights)
    optimizer_of_leaves = LeafOptimizer(
        optimizer, name_of_leaf, jax.tree.structure(params)
    )
    slice_of_leaf = program.slice_of_leaf
    slice_of_entry = {}
    for path, leaf_path in optimizer_of_leaves.leaf_of_entry(weights).items():
        if leaf_path in slice_of_leaf:
            slice_of_entry[path] = slice_of_leaf[leaf_path]
    return Model(program, optimizer_of_leaves, weights, slice_of_entry)


def _trained_weights(params: PyTree, trainable: PyTree) -> Entries:
    """The leaves that are trained: float or complex, not empty, and not masked."""
    # Raises for a leaf that is not an array, with its name.
    leaves_to_clip(params, "release: params")
    mask = trainable(params) if is_function(trainable) else trainable
    flags = for_each_leaf(mask, params, "release: trainable")
    trained = {}
    for (path, array), flag in zip(arrays_by_path((params,)).items(), flags):
        check_flag("release: trainable", flag)
        if flag and leaves_to_clip(array, "release: params") is not None:
            trained[path] = array
    return trained
