"""What `release` returns, and one step of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import optax
from jax import Array

from .._arguments.checks import check_state, shown
from .._devices.mesh_types import has_types, manual_axes
from .._norms.norms import global_norm
from .._state.interop import exported
from .._state.state import ClipState
from .._trees import PyTree
from .budget import Budget, first_shares, new_budget, next_shares, with_norm
from .model import Model, read_model
from .optimizer_checks import check_optimizer
from .optimizers import arrays_by_path, changed_type, tree_from_entries
from .stacks import Entries
from .step_clip import StepClip


@exported
class ReleaseState(NamedTuple):
    """The state of `release`.

    Attributes:
      optimizer: the optimizer's state, as `optimizer.init(params)` makes it, with None
        in the place of leaves that are not trained.
      clip: the `ClipState` of the norm of everything.
      shares: float32[groups]: the usual share of each group in the square of the norm.
        Groups are the layers, the last one first, and then all other weights.
    """

    optimizer: PyTree
    clip: Any
    shares: Array


@dataclass(frozen=True, eq=False)
class Trainer:
    """What `release` returns: `init(params, *batch)`, `step(params, state, *batch)`."""

    loss: Callable[..., Any]
    optimizer: optax.GradientTransformationExtraArgs
    clipper: Any  # clips the norm of all groups together. Its state is a `ClipState`
    # Whether a limit of inf is the user's, which switches the clip off and lets NaN
    # pass. A rule says by inf that it has no limit yet.
    inf_is_off: bool
    passes: int  # 1 or 2
    trainable: PyTree

    def init(self, params: PyTree, *batch: PyTree) -> ReleaseState:
        """Returns the state before the first step. Of the batch only shapes and dtypes
        count, so `jax.ShapeDtypeStruct` will do.
        """
        model = self._model(params, batch)
        check_optimizer(model.optimizer, model.trained_weights, model.program)
        trained = model.optimizer.params_with_only(model.trained_weights)
        return ReleaseState(
            optimizer=self.optimizer.init(trained),
            clip=self.clipper.init(trained),
            shares=first_shares(model.group_count),
        )

    def step(
        self, params: PyTree, state: ReleaseState, *batch: PyTree
    ) -> tuple[PyTree, ReleaseState, Any]:
        """Returns new params, the new state, and what the loss returned."""
        _check_devices()
        if not isinstance(state, ReleaseState):
            raise TypeError(
                "release: state must be what init(params, *batch) or the step before "
                f"returned, got {shown(state)}."
            )
        check_state("release", state.clip, ClipState)
        model = self._model(params, batch)
        _check_state_of(state, model)
        all_entries = arrays_by_path((params, state.optimizer))
        step_clip = StepClip(self.clipper, state.clip, self.inf_is_off)
        # With two passes only `budget.norms` is used.
        budget = new_budget(step_clip.limit_ahead(), state.shares)
        if self.passes == 2:
            budget = _measured(model, all_entries, batch, budget)
            step_clip = step_clip._replace(measured_norm=global_norm(budget.norms))

        def update_layer(
            grads: Entries, layer_entries: Entries, budget: Budget
        ) -> tuple[Entries, Budget]:
            grads, budget = step_clip.clip(grads, budget)
            new_entries = model.optimizer.entries_after_update(
                all_entries | layer_entries, grads
            )
            return {path: new_entries[path] for path in layer_entries}, budget

        result = model.forward_and_backward(update_layer, all_entries, batch, budget)
        outer_grads, budget = step_clip.clip(result.outer_grads, result.budget)
        # All layers have read the counters of the step before. This moves them on.
        outer_entries = model.optimizer.entries_after_update(all_entries, outer_grads)
        params, optimizer_state = tree_from_entries(
            (params, state.optimizer),
            all_entries | result.stack_entries | outer_entries,
        )
        clip_state = step_clip.state_after(budget)
        finite_steps = clip_state.step - clip_state.nonfinite
        shares = next_shares(state.shares, budget.norms, finite_steps)
        return params, ReleaseState(optimizer_state, clip_state, shares), result.value

    def released(self, params: PyTree, *batch: PyTree) -> list[str]:
        """Returns the names of the leaves of params whose gradients are never whole.

        All other gradients are in memory at the end of a step.
        """
        model = self._model(params, batch)
        names = model.optimizer.name_of_leaf
        # A layer has its slice of these entries.
        layer_paths = model.slice_of_entry.keys()
        return [names[path] for path in names if path in layer_paths]

    def _model(self, params: PyTree, batch: tuple[PyTree, ...]) -> Model:
        return read_model(
            self.loss, params, batch, optimizer=self.optimizer, trainable=self.trainable
        )


def _measured(
    model: Model, all_entries: Entries, batch: tuple[PyTree, ...], budget: Budget
) -> Budget:
    """The budget with the norms of all groups, from a pass that changes nothing."""

    def measure_layer(
        grads: Entries, layer_entries: Entries, budget: Budget
    ) -> tuple[Entries, Budget]:
        # Writing back unchanged entries would make XLA copy the weights.
        return {}, with_norm(budget, global_norm(grads))

    result = model.forward_and_backward(measure_layer, all_entries, batch, budget)
    return with_norm(result.budget, global_norm(result.outer_grads))


# ---------------------------------------------------------------------------- checks


def _check_devices() -> None:
    """Raises ValueError under pmap or untyped shard_map, where no psum would be
    inserted.
    """
    manual = manual_axes()
    if manual and not has_types(manual):
        raise ValueError(
            f"release: along the mesh axes {manual} nothing would add up gradients of "
            "devices: use jit, or shard_map with check_vma=True."
        )


def _check_state_of(state: ReleaseState, model: Model) -> None:
    """Raises ValueError for the state of another optimizer, or of params of other
    layers, shapes or dtypes.
    """
    _, optimizer = model.optimizer.abstract_params_and_state(model.trained_weights)
    shares = jax.eval_shape(lambda: first_shares(model.group_count))
    wanted = arrays_by_path(ReleaseState(optimizer, None, shares))
    change = changed_type(arrays_by_path(state._replace(clip=None)), wanted)
    if change:
        raise ValueError(
            "release: state must be of this optimizer, and of params of these layers, "
            f"shapes and dtypes, but its {change}: make it by init."
        )
