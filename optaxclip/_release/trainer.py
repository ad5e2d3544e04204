"""What `release` returns, and one step of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from .._checks import check_flag, shown
from .._exported import exported
from .._mesh_types import has_types, manual_axes
from .._norms import global_norm
from .._prefixes import lookup, prefix_table
from .._state import NUMBER_NAMES, ClipState
from .._trees import PyTree, clipped_leaves, name
from .budget import Budget, first_shares, new_budget, next_shares, spend
from .layer_clips import ENTRY, LayerClip, shown_states
from .optimizers import Optimizer, check_optimizer, entries_of, slices_of_state
from .passes import Forward, Layer, Stored, backward_pass, forward_pass
from .program import Program, read_program

Weights = dict[int, Array]  # arrays by leaf of params
Entries = dict[str, Array]  # arrays by path in the state of the optimizer
# What limits the norm of everything: its budget, or with two passes that norm itself.
Limiter = Budget | Array | None


@exported
class ReleaseState(NamedTuple):
    """The state of `release`.

    Attributes:
      optimizer: the optimizer's state, as `optimizer.init(params)` makes it.
      clip: the `ClipState` of the norm of everything. () without `max_norm`.
      shares: float32[groups]: the usual share of each group in the square of the norm.
        Groups are the layers, the last one first, and then all other weights. () with
        two passes and without `max_norm`.
      layer_clip: for each stack the arrays [layers, ...] of the states of `layer_clip`.
      clips: what `metrics` shows of these: a `ClipState` of all layers for each clipper
        in `layer_clip`, and the state of the other weights.
    """

    optimizer: Any
    clip: Any
    shares: Any
    layer_clip: Any
    clips: Any


@dataclass(frozen=True, eq=False)
class Released:
    """What `release` returns: `init(params, *batch)`, `step(params, state, *batch)`."""

    loss: Callable[..., Any]
    optimizer: optax.GradientTransformationExtraArgs
    clip: optax.GradientTransformationExtraArgs | None  # of everything
    passes: int
    layer_clip: optax.GradientTransformationExtraArgs
    trainable: PyTree

    def init(self, params: PyTree, *batch: PyTree) -> ReleaseState:
        """Returns the state before the first step. Of the batch only shapes and dtypes
        count, so `jax.ShapeDtypeStruct` will do.
        """
        model = self._model(params, batch)
        check_optimizer(model.optimizer, model.weights, model.program.slices)
        trained = model.optimizer.tree_of(model.weights)
        clip: Any = ()
        shares: Any = ()
        if self.clip is not None:
            clip = self.clip.init(trained)
        if self.clip is not None and self.passes == 1:
            shares = first_shares(model.program.groups)
        states_of_layers = []
        for stack, layer_clip in zip(model.program.stacks, model.layer_clips):
            states = layer_clip.first_states(model.weights, stack.length)
            states_of_layers.append(states)
        rest = self.layer_clip.init(model.optimizer.tree_of(model.rest))
        return ReleaseState(
            optimizer=self.optimizer.init(trained),
            clip=clip,
            shares=shares,
            layer_clip=[jax.tree.leaves(states) for states in states_of_layers],
            clips={"layers": shown_states(states_of_layers), "rest": rest},
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
        leaves, structure = jax.tree.flatten(params)
        forward = forward_pass(model.program, [*leaves, *jax.tree.leaves(batch)])
        new_weights, new_state = _Step(self, model, forward, state).run()
        for leaf, array in new_weights.items():
            leaves[leaf] = array
        outputs = [forward.read(atom) for atom in model.program.outputs]
        value = model.program.structure.unflatten(outputs)
        return structure.unflatten(leaves), new_state, value

    def released(self, params: PyTree, *batch: PyTree) -> list[str]:
        """Returns the names of the leaves of params whose gradients are never whole.

        All other gradients are in memory at the end of a step.
        """
        slices = self._model(params, batch).program.slices
        paths = [path for path, _ in jax.tree.leaves_with_path(params)]
        return [name(paths[leaf]) for leaf in sorted(slices)]

    def _model(self, params: PyTree, batch: tuple[PyTree, ...]) -> _Model:
        weights = _trained_weights(params, self.trainable)
        program = read_program(self.loss, params, batch, weights)
        optimizer = Optimizer(self.optimizer, jax.tree.structure(params))
        layer_clips = []
        for stack in program.stacks:
            slices = {x.leaf: x for x in stack.slices.values()}
            layer_clips.append(LayerClip(self.layer_clip, optimizer, slices))
        rest = {leaf: weights[leaf] for leaf in program.rest}
        return _Model(program, optimizer, weights, rest, layer_clips)


def _trained_weights(params: PyTree, trainable: PyTree) -> Weights:
    """The leaves that are trained: float or complex, not empty, and not masked."""
    # Names a leaf that is not an array.
    clipped_leaves(params, "release: params")
    mask = trainable(params) if callable(trainable) else trainable
    flags = lookup(prefix_table(mask, _is_flag), params, "release: trainable")
    trained = {}
    for leaf, (array, flag) in enumerate(zip(jax.tree.leaves(params), flags)):
        check_flag("release: trainable", flag)
        if flag and clipped_leaves(array) is not None:
            trained[leaf] = array
    return trained


def _is_flag(x: Any) -> bool:
    return isinstance(x, bool)


class _Model(NamedTuple):
    """What is known of params and loss before a step."""

    program: Program
    optimizer: Optimizer
    weights: Weights  # that are trained
    rest: Weights  # of these, what is in no stack
    layer_clips: list[LayerClip]  # for each stack


class _Step:
    """One step, after its forward pass."""

    def __init__(
        self, trainer: Released, model: _Model, forward: Forward, state: ReleaseState
    ) -> None:
        self.trainer = trainer
        self.clip: Any = trainer.clip
        self.model = model
        self.forward = forward
        self.state = state
        self.old_entries = entries_of(state.optimizer).values
        slices = slices_of_state(model.optimizer, model.weights, model.program.slices)
        # For each stack the slices of its layers, and the arrays that these are of.
        self.places: list[Stored] = []
        self.stored: list[Stored] = []
        for layer_clip, clips in zip(model.layer_clips, state.layer_clip):
            leaves = layer_clip.slices
            moments = {key: x for key, x in slices.items() if x.leaf in leaves}
            places = Stored(leaves, moments, [ENTRY for _ in clips])
            self.places.append(places)
            weights = {leaf: model.weights[leaf] for leaf in leaves}
            entries = {key: self.old_entries[key] for key in moments}
            self.stored.append(Stored(weights, entries, clips))

    def run(self) -> tuple[Weights, ReleaseState]:
        """Returns the new weights and the new state."""
        limiter: Limiter = None
        if self.clip is not None and self.trainer.passes == 2:
            limiter = self._norm_of_everything()
        elif self.clip is not None:
            limiter = new_budget(self._limit_ahead(), self.state.shares)
        grads, stored, limiter = self._backward(limiter, self._updated_layer)
        rest, entries, rest_clip, limiter = self._updated_rest(grads, limiter)
        new_weights = dict(rest)
        new_entries = self.old_entries | self._shared_entries() | entries
        states_of_layers = []
        for arrays, layer_clip in zip(stored, self.model.layer_clips):
            new_weights |= arrays.weights
            new_entries |= arrays.moments
            states_of_layers.append(layer_clip.states(arrays.clips, arrays.weights))
        structure = jax.tree.structure(self.state.optimizer)
        new_clip, new_shares = self._learned(limiter)
        return new_weights, ReleaseState(
            optimizer=structure.unflatten(
                [new_entries[key] for key in self.old_entries]
            ),
            clip=new_clip,
            shares=new_shares,
            layer_clip=[arrays.clips for arrays in stored],
            clips={"layers": shown_states(states_of_layers), "rest": rest_clip},
        )

    # ------------------------------------------------------------- layers and the rest

    def _backward(self, memory: Any, visit: Any) -> tuple[Weights, list[Stored], Any]:
        return backward_pass(
            self.model.program, self.forward, self.stored, self.places, memory, visit
        )

    def _updated_layer(
        self, layer: Layer, grads: Weights, slices: Stored, limiter: Limiter
    ) -> tuple[Stored, Limiter]:
        """The new slices of a layer."""
        layer_clip = self.model.layer_clips[layer.stack]
        grads, clips = layer_clip.updated(grads, slices.clips, slices.weights)
        grads, limiter = self._shortened(grads, layer.group, limiter)
        weights, entries = self.model.optimizer.updated(
            slices.weights, grads, self.old_entries | slices.moments
        )
        moments = {key: entries[key] for key in slices.moments}
        return Stored(weights, moments, clips), limiter

    def _updated_rest(
        self, grads: Weights, limiter: Limiter
    ) -> tuple[Weights, Entries, Any, Limiter]:
        """The new weights outside of the layers, their entries in the state of the
        optimizer, and the state of `layer_clip`.
        """
        model = self.model
        if not model.rest:
            return {}, {}, self.state.clips["rest"], limiter
        grads, rest_clip = self._clipped_rest(grads)
        grads, limiter = self._shortened(grads, model.program.groups - 1, limiter)
        weights, entries = model.optimizer.updated(model.rest, grads, self.old_entries)
        return weights, entries, rest_clip, limiter

    def _clipped_rest(self, grads: Weights) -> tuple[Weights, Any]:
        optimizer = self.model.optimizer
        tree, state = self.trainer.layer_clip.update(
            optimizer.tree_of(grads),
            self.state.clips["rest"],
            optimizer.tree_of(self.model.rest),
        )
        return dict(zip(sorted(grads), jax.tree.leaves(tree), strict=True)), state

    def _shared_entries(self) -> Entries:
        """The new entries that all layers share, such as counters, from the first layer
        of each stack.
        """
        shared: Entries = {}
        for places, arrays in zip(self.places, self.stored):
            first = jax.tree.map(lambda place, x: place.taken(x, 0), places, arrays)
            _, entries = self.model.optimizer.updated(
                first.weights, first.weights, self.old_entries | first.moments
            )
            for key in entries.keys() - first.moments.keys():
                shared[key] = entries[key]
        return shared

    # ---------------------------------------------------------- the limit of everything

    def _norm_of_everything(self) -> Array:
        """The global norm, by a backward pass that only measures."""

        def measured(
            layer: Layer, grads: Weights, slices: Stored, norms: Array
        ) -> tuple[None, Array]:
            layer_clip = self.model.layer_clips[layer.stack]
            grads, _ = layer_clip.updated(grads, slices.clips, slices.weights)
            return None, norms.at[layer.group].set(global_norm(grads))

        norms = jnp.zeros(self.model.program.groups, self.state.clip.norm.dtype)
        grads, _, norms = self._backward(norms, measured)
        if grads:
            grads, _ = self._clipped_rest(grads)
            norms = norms.at[-1].set(global_norm(grads))
        return global_norm(norms)

    def _limit_ahead(self) -> Array:
        """The limit of this step, before its norm is known. Rules are asked with the
        norm of the step before.
        """
        norm = self.state.clip.norm
        # Before the first norm, and after one that is broken, any norm is possible.
        # Some rules have no other limit yet than a multiple of the norm itself.
        is_norm = jnp.isfinite(norm) & (norm > 0)
        return self._asked(jnp.where(is_norm, norm, jnp.finfo(norm.dtype).max)).limit

    def _asked(self, norm: Array, limit: Array | None = None) -> ClipState:
        """The state of the clip of everything after a norm."""
        nothing = jnp.zeros_like(norm)
        return self.clip.update(nothing, self.state.clip, grad_norm=norm, limit=limit)[
            1
        ]

    def _shortened(
        self, grads: Weights, group: Array | int, limiter: Limiter
    ) -> tuple[Weights, Limiter]:
        """Clips the gradients of a group."""
        if limiter is None:
            return grads, limiter
        if isinstance(limiter, Budget):
            norm = global_norm(grads)
            limit, limiter = spend(limiter, group, norm)
            options = {"grad_norm": norm, "limit": limit}
        else:
            # The norm of everything, in the place of that of these gradients.
            options = {"grad_norm": limiter}
        grads, _ = self.clip.update(grads, self.state.clip, **options)
        return grads, limiter

    def _learned(self, limiter: Limiter) -> tuple[Any, Any]:
        """The new state of the clip of everything, and the new shares."""
        if limiter is None:
            return (), ()
        if not isinstance(limiter, Budget):
            return self._asked(limiter), ()
        norm, norm_after = global_norm(limiter.norms), global_norm(limiter.norms_after)
        is_clipped = jnp.any(limiter.norms_after < limiter.norms)
        # The factor of everything is norm_after / norm, also below the limit.
        clip = self._asked(norm, jnp.where(is_clipped, norm_after, limiter.limit))
        row = NUMBER_NAMES.index("limit")
        clip = clip._replace(numbers=clip.numbers.at[row].set(limiter.limit))
        shares = next_shares(self.state.shares, limiter.norms, clip.step)
        return clip, shares
