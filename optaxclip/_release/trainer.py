"""What `release` returns, and one step of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import keystr

from .._checks import check_flag, shown
from .._exported import exported
from .._mesh_types import has_types, manual_axes
from .._norms import global_norm
from .._prefixes import lookup, prefix_table
from .._state import NUMBER_NAMES, ClipState
from .._trees import PyTree, clipped_leaves, is_none, leaf_paths, name
from .budget import Budget, first_shares, limit_of_group, new_budget, next_shares
from .optimizers import Optimizer, arrays_by_path, check_optimizer, tree_from_entries
from .program import Program, read_program, run_equations
from .stacks import Entries, LayerSlice, UpdateLayer, layer_of, run_stack

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# The clipped gradients of a group, and what they leave of the budget.
ClipGroup = Callable[[Array | int, Entries, Budget], tuple[Entries, Budget]]
# The group of the weights outside of the layers.
REST = -1


@exported
class ReleaseState(NamedTuple):
    """The state of `release`.

    Attributes:
      optimizer: the optimizer's state, as `optimizer.init(params)` makes it.
      clip: the `ClipState` of the norm of everything.
      shares: float32[groups]: the usual share of each group in the square of the norm.
        Groups are the layers, the last one first, and then all other weights.
    """

    optimizer: PyTree
    clip: Any
    shares: Array


class Model(NamedTuple):
    """What is known of params and loss before a step."""

    program: Program
    optimizer: Optimizer
    weights: Entries  # that are trained
    slice_of_entry: dict[str, LayerSlice]  # of the weights and states of layers


@dataclass(frozen=True, eq=False)
class Released:
    """What `release` returns: `init(params, *batch)`, `step(params, state, *batch)`."""

    loss: Callable[..., Any]
    optimizer: optax.GradientTransformationExtraArgs
    clipper: Any  # of everything. Its state is a `ClipState`
    passes: int
    trainable: PyTree

    def init(self, params: PyTree, *batch: PyTree) -> ReleaseState:
        """Returns the state before the first step. Of the batch only shapes and dtypes
        count, so `jax.ShapeDtypeStruct` will do.
        """
        model = self._model(params, batch)
        check_optimizer(model.optimizer, model.weights, model.program.slice_of_leaf)
        trained = model.optimizer.tree_of(model.weights)
        return ReleaseState(
            optimizer=self.optimizer.init(trained),
            clip=self.clipper.init(trained),
            shares=first_shares(model.program.layer_count + 1),
        )

    def step(
        self, params: PyTree, state: ReleaseState, *batch: PyTree
    ) -> tuple[PyTree, ReleaseState, Any]:
        """Returns new params, the new state, and what the loss returned."""
        manual = manual_axes()
        if manual and not has_types(manual):
            raise ValueError(
                f"release: along the mesh axes {manual} nothing would add up gradients "
                "of devices: use jit, or shard_map with check_vma=True."
            )
        if not isinstance(state, ReleaseState):
            raise TypeError(
                "release: state must be what init(params, *batch) or the step before "
                f"returned, got {shown(state)}."
            )
        model = self._model(params, batch)
        layers = state.shares.size - 1
        if layers != model.program.layer_count:
            raise ValueError(
                "release: state must be of the layers that loss scans, got "
                f"{layers} in a step of {model.program.layer_count} layers: make it by "
                "init."
            )
        entries = arrays_by_path((params, state.optimizer))
        return _Step(self, model, params, state, batch, entries).run()

    def released(self, params: PyTree, *batch: PyTree) -> list[str]:
        """Returns the names of the leaves of params whose gradients are never whole.

        All other gradients are in memory at the end of a step.
        """
        model = self._model(params, batch)
        names = model.optimizer.names
        return [names[leaf] for leaf in names if leaf in model.slice_of_entry]

    def _model(self, params: PyTree, batch: tuple[PyTree, ...]) -> Model:
        weights = _trained_weights(params, self.trainable)
        names = {}
        for path in leaf_paths((params,)):
            names[keystr(path)] = name(path[1:])
        program = read_program(self.loss, params, batch, names, weights)
        optimizer = Optimizer(self.optimizer, names, jax.tree.structure(params))
        slice_of_leaf = program.slice_of_leaf
        slice_of_entry = {}
        for key, leaf in optimizer.leaf_of_entry(weights).items():
            if leaf in slice_of_leaf:
                slice_of_entry[key] = slice_of_leaf[leaf]
        return Model(program, optimizer, weights, slice_of_entry)


def _trained_weights(params: PyTree, trainable: PyTree) -> Entries:
    """The leaves that are trained: float or complex, not empty, and not masked."""
    # Raises for a leaf that is not an array, with its name.
    clipped_leaves(params, "release: params")
    mask = trainable(params) if callable(trainable) else trainable
    flags = lookup(prefix_table(mask, is_none), params, "release: trainable")
    trained = {}
    for (key, array), flag in zip(arrays_by_path((params,)).items(), flags):
        check_flag("release: trainable", flag)
        if flag and clipped_leaves(array) is not None:
            trained[key] = array
    return trained


class _Step(NamedTuple):
    """One step."""

    trainer: Released
    model: Model
    params: PyTree
    state: ReleaseState
    batch: tuple[PyTree, ...]
    entries: Entries  # of params and the optimizer's state

    def run(self) -> tuple[PyTree, ReleaseState, Any]:
        """Returns new params, the new state, and what the loss returned."""
        budget = new_budget(self._limit_ahead(), self.state.shares)
        clip_group: ClipGroup = self._clip_by_budget
        if self.trainer.passes == 2:
            budget = self._measured(budget)
            norm = global_norm(budget.norms)
            clip_group = partial(self._clip_by_norm, norm)

        def update_layer(
            group: Array, grads: Entries, arrays: Entries, budget: Budget
        ) -> tuple[Entries, Budget]:
            grads, budget = clip_group(group, grads, budget)
            entries = self.model.optimizer.updated(self.entries | arrays, grads)
            return {key: entries[key] for key in arrays}, budget

        value, grads, layer_arrays, budget = self._forward_and_backward(
            update_layer, budget
        )
        grads, budget = clip_group(REST, grads, budget)
        # The counters that layers share advance here, once a step. The optimizer needs
        # all leaves for that, so the first layer stands in for the layers, with
        # gradients of 0. Its new arrays are not used.
        first = layer_of(layer_arrays, self.model.slice_of_entry, layer=0)
        for leaf in self.model.program.slice_of_leaf:
            grads[leaf] = jnp.zeros_like(first[leaf])
        entries = self.entries | first
        entries |= self.model.optimizer.updated(entries, grads)
        tree = self.params, self.state.optimizer
        params, optimizer = tree_from_entries(tree, entries | layer_arrays)
        clip_state = self._clip_state_after(budget)
        shares = next_shares(self.state.shares, budget.norms, clip_state.step)
        return params, ReleaseState(optimizer, clip_state, shares), value

    def _forward_and_backward(
        self, update_layer: UpdateLayer, budget: Budget
    ) -> tuple[PyTree, Entries, Entries, Budget]:
        """A forward and a backward pass. Returns the value of the loss, the gradients
        of the rest, the new entries of layers, and what they leave of the budget.

        The cotangent of the budget starts as the budget and is spent layer by layer.
        The cotangent of the layers is the new layers.
        """
        program = self.model.program
        slice_of_entry = self.model.slice_of_entry
        layer_arrays = {key: self.entries[key] for key in slice_of_entry}
        rest = {}
        for key in self.model.weights.keys() - slice_of_entry.keys():
            rest[key] = self.entries[key]

        def loss(rest: Entries, layer_arrays: Entries, budget: Budget) -> Any:
            weights = self.entries | rest
            leaves = [weights[key] for key in self.model.optimizer.names]

            def run_if_stack(
                equation: JaxprEqn, inputs: list[Array]
            ) -> list[Array] | None:
                nonlocal budget
                if id(equation) not in program.stacks:
                    return None
                outputs, budget = run_stack(
                    program.stacks[id(equation)],
                    update_layer,
                    inputs=inputs,
                    entries=layer_arrays,
                    slice_of_entry=slice_of_entry,
                    budget=budget,
                )
                return outputs

            inputs = [*leaves, *jax.tree.leaves(self.batch)]
            value, *aux = run_equations(program.jaxpr, inputs, run_if_stack)
            return (value, budget), aux

        outputs, pull, aux = jax.vjp(loss, rest, layer_arrays, budget, has_aux=True)
        value, _ = outputs
        grads, layer_arrays, budget = pull((jnp.ones_like(value), budget))
        value = program.structure.unflatten([value, *aux])
        return value, grads, layer_arrays, budget

    # -------------------------------------------------------- the limit of everything

    def _measured(self, budget: Budget) -> Budget:
        """The budget after a backward pass that only measures norms."""

        def update_layer(
            group: Array, grads: Entries, arrays: Entries, budget: Budget
        ) -> tuple[None, Budget]:
            _, budget = limit_of_group(budget, group, global_norm(grads))
            return None, budget

        _, grads, _, budget = self._forward_and_backward(update_layer, budget)
        _, budget = limit_of_group(budget, REST, global_norm(grads))
        return budget

    def _limit_ahead(self) -> Array:
        """The limit of this step, before its norm is known. Rules are asked with the
        norm of the step before.
        """
        norm = self.state.clip.norm
        # Before the first norm, and after one that is broken, any norm is possible.
        # finfo.max: a rule without memory then returns no limit.
        is_norm = jnp.isfinite(norm) & (norm > 0)
        largest = jnp.finfo(norm.dtype).max
        return self._clip_state_for(jnp.where(is_norm, norm, largest)).limit

    def _clip_state_for(self, norm: Array, limit: Array | None = None) -> ClipState:
        """The state of the clip of everything after a norm."""
        zero = jnp.zeros_like(norm)
        _, state = self.trainer.clipper.update(
            zero, self.state.clip, grad_norm=norm, limit=limit
        )
        return state

    def _clip_by_budget(
        self, group: Array | int, grads: Entries, budget: Budget
    ) -> tuple[Entries, Budget]:
        """One pass: a group is clipped to its portion of what is left."""
        norm = global_norm(grads)
        limit, budget = limit_of_group(budget, group, norm)
        return self._clipped(grads, norm, limit), budget

    def _clip_by_norm(
        self, norm: Array, group: Array | int, grads: Entries, budget: Budget
    ) -> tuple[Entries, Budget]:
        """Two passes: all groups are clipped by the norm of everything."""
        return self._clipped(grads, norm), budget

    def _clipped(
        self, grads: Entries, norm: Array, limit: Array | None = None
    ) -> Entries:
        """Gradients times min(1, limit / norm). None: the limit of everything."""
        grads, _ = self.trainer.clipper.update(
            grads, self.state.clip, grad_norm=norm, limit=limit
        )
        return grads

    def _clip_state_after(self, budget: Budget) -> ClipState:
        """The state of the clip of everything after this step."""
        norm = global_norm(budget.norms)
        if self.trainer.passes == 2:
            return self._clip_state_for(norm)
        # A group may be clipped where everything is within the limit. With the norm
        # after the clip as the limit, the factor becomes norm_after / norm.
        norm_after = global_norm(budget.norms_after)
        is_limited = jnp.isfinite(budget.limit)
        clip_state = self._clip_state_for(
            norm, limit=jnp.where(is_limited, norm_after, budget.limit)
        )
        index = NUMBER_NAMES.index("limit")
        numbers = clip_state.numbers.at[index].set(budget.limit)
        return clip_state._replace(numbers=numbers)
