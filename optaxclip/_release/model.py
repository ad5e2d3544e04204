"""The loss with its params: which weights belong to layers, and one backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .._checks import check_flag
from .._prefixes import lookup, prefix_table
from .._trees import PyTree, clipped_leaves, is_none
from .budget import Budget
from .optimizers import Optimizer, arrays_by_path
from .program import Program, run_equations
from .stacks import Entries, LayerSlice, UpdateLayer, run_stack

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


class PassResult(NamedTuple):
    """What a forward and a backward pass return."""

    value: Any  # what the loss returned
    outer_grads: Entries  # of the weights outside of the layers
    layer_entries: Entries  # the new weights and states of all layers
    budget: Budget  # that the layers leave


class Model(NamedTuple):
    """What is known of params and loss before a step."""

    program: Program
    optimizer: Optimizer
    weights: Entries  # that are trained
    slice_of_entry: dict[str, LayerSlice]  # of the weights and states of layers

    def forward_and_backward(
        self,
        update_layer: UpdateLayer,
        entries: Entries,
        batch: tuple[PyTree, ...],
        budget: Budget,
    ) -> PassResult:
        """Goes through the loss forward and backward, and updates the layers.

        The "cotangents" of the layers are their new entries, and that of the budget is
        the budget that they leave (`stacks`).
        """
        layer_entries = {path: entries[path] for path in self.slice_of_entry}
        outer_paths = self.weights.keys() - layer_entries.keys()
        outer_weights = {path: entries[path] for path in outer_paths}

        def loss(outer_weights: Entries, layer_entries: Entries, budget: Budget) -> Any:
            def run_if_stack(
                equation: JaxprEqn, inputs: list[Array]
            ) -> list[Array] | None:
                nonlocal budget
                stack = self.program.stacks.get(id(equation))
                if stack is None:
                    return None
                outputs, budget = run_stack(
                    stack,
                    update_layer,
                    inputs=inputs,
                    entries=layer_entries,
                    slice_of_entry=self.slice_of_entry,
                    budget=budget,
                )
                return outputs

            weights = entries | outer_weights
            leaves = [weights[path] for path in self.optimizer.name_of_leaf]
            inputs = [*leaves, *jax.tree.leaves(batch)]
            value, *aux = run_equations(self.program.jaxpr, inputs, run_if_stack)
            return (value, budget), aux

        outputs, pull, aux = jax.vjp(
            loss, outer_weights, layer_entries, budget, has_aux=True
        )
        value, _ = outputs
        outer_grads, layer_entries, budget = pull((jnp.ones_like(value), budget))
        value = self.program.structure.unflatten([value, *aux])
        return PassResult(value, outer_grads, layer_entries, budget)


def trained_weights(params: PyTree, trainable: PyTree) -> Entries:
    """The leaves that are trained: float or complex, not empty, and not masked."""
    # Raises for a leaf that is not an array, with its name.
    clipped_leaves(params, "release: params")
    mask = trainable(params) if callable(trainable) else trainable
    flags = lookup(prefix_table(mask, is_none), params, "release: trainable")
    trained = {}
    for (path, array), flag in zip(arrays_by_path((params,)).items(), flags):
        check_flag("release: trainable", flag)
        if flag and clipped_leaves(array) is not None:
            trained[path] = array
    return trained
