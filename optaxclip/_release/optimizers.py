"""The optimizer of a released step: it sees one layer at a time.

Its state is the usual one, `optimizer.init(params)`. A layer is given its slices of the
entries that belong to its leaves, and all entries that no leaf has, such as counters.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import KeyPath, keystr

from .._jaxpr import every_equation, type_of
from .._trees import PyTree, listed, name
from .._wrappers._skipping import SkipState
from .program import Slice

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

ACCUMULATION = "A gradient that is gone cannot be added to: give step the whole batch."
BROKEN_STEPS = "For NaN and inf set max_norm and nonfinite='zero'."
# Optimizers whose update is 0 in some steps, by their state.
PAUSES = {
    optax.MultiStepsState: ("optax.MultiSteps", ACCUMULATION),
    optax.ApplyEvery: ("optax.apply_every", ACCUMULATION),
    optax.ConditionallyMaskState: (
        "optax.conditionally_mask",
        "Call step in the other steps alone.",
    ),
    optax.ApplyIfFiniteState: ("optax.apply_if_finite", BROKEN_STEPS),
    SkipState: ("skip_nonfinite, skip_step or skip_spikes", BROKEN_STEPS),
}


class Optimizer(NamedTuple):
    """An optimizer of trees that have some leaves of params only."""

    transformation: optax.GradientTransformationExtraArgs
    structure: Any  # of params

    def tree_of(self, leaves: dict[int, Any]) -> PyTree:
        """Params with some leaves, and None in the place of the others."""
        count = self.structure.num_leaves
        return self.structure.unflatten([leaves.get(leaf) for leaf in range(count)])

    def updated(
        self, weights: dict[int, Array], grads: dict[int, Array], state: dict[str, Any]
    ) -> tuple[dict[int, Array], dict[str, Array]]:
        """The new weights, and the new entries of the state that belong to them.
        `state` has these, and may have others.
        """
        params = self.tree_of(weights)
        entries = entries_of(jax.eval_shape(self.transformation.init, params))
        old_state = jax.tree.structure(entries.tree).unflatten(
            [state[key] for key in entries.paths]
        )
        updates, new_state = self.transformation.update(
            self.tree_of(grads), old_state, params
        )
        new_params = jax.tree.leaves(optax.apply_updates(params, updates))
        new_weights = dict(zip(sorted(weights), new_params, strict=True))
        return new_weights, entries_of(new_state).values


class Entries(NamedTuple):
    """The leaves of a state by their paths as text, which can be sorted."""

    tree: PyTree
    paths: dict[str, KeyPath]
    values: dict[str, Any]


class StateEntry(NamedTuple):
    """An entry of the state, while an optimizer is checked."""

    name: str
    is_shared: bool  # by all layers, as a counter is


def entries_of(tree: PyTree) -> Entries:
    """The leaves of a state by their paths."""
    paths = {}
    values = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        paths[keystr(path)] = path
        values[keystr(path)] = leaf
    return Entries(tree, paths, values)


def leaf_of(path: KeyPath, leaf_at: dict[KeyPath, int]) -> int | None:
    """The leaf of params to which an entry of a state belongs: its path ends with that
    of the leaf.
    """
    for start in range(len(path) + 1):
        if path[start:] in leaf_at:
            return leaf_at[path[start:]]
    return None


def slices_of_state(
    optimizer: Optimizer, leaves: dict[int, Any], slices: dict[int, Slice]
) -> dict[str, Slice]:
    """The slices that a layer has of the optimizer's state: of entries with the path
    and the shape of a leaf. `leaves` are all that are trained.
    """
    params = optimizer.tree_of(leaves)
    leaf_at = _leaf_at(params, leaves)
    entries = entries_of(jax.eval_shape(optimizer.transformation.init, params))
    slices_by_key = {}
    for key, path in entries.paths.items():
        leaf = leaf_of(path, leaf_at)
        if leaf in slices and entries.values[key].shape == jnp.shape(leaves[leaf]):
            slices_by_key[key] = slices[leaf]
    return slices_by_key


def _leaf_at(params: PyTree, leaves: dict[int, Any]) -> dict[KeyPath, int]:
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    return dict(zip(paths, sorted(leaves), strict=True))


# ----------------------------------------------------------------------------- checks


def check_optimizer(
    optimizer: Optimizer, leaves: dict[int, Any], slices: dict[int, Slice]
) -> None:
    """Refuses an optimizer that does something else to layers than to their stack.

    Raises:
      ValueError: it leaves out steps, keeps something that has no entry for each layer,
        or mixes leaves.
    """
    shapes = jax.eval_shape(lambda: _first_layers(leaves, slices))
    params = optimizer.tree_of(shapes)
    init = optimizer.transformation.init
    state = jax.eval_shape(init, params)
    _check_every_step(state)
    whole_state = jax.eval_shape(init, optimizer.tree_of(leaves))
    whole = entries_of(whole_state).values
    keys_of_slices = slices_of_state(optimizer, leaves, slices)
    leaf_at = _leaf_at(params, leaves)
    names = [name(path) for path in leaf_at]
    state_entries = []
    entries = entries_of(state)
    for key, path in entries.paths.items():
        value = entries.values[key]
        leaf = leaf_of(path, leaf_at)
        is_sliced = key in keys_of_slices and value.shape == shapes[leaf].shape
        # The entries of leaves outside of the stacks are whole.
        is_shared = not is_sliced and (leaf is None or leaf in slices)
        if is_shared:
            _check_shared(name(path), value, whole.get(key))
        state_entries.append(StateEntry(name(path), is_shared))
    program = jax.make_jaxpr(optimizer.transformation.update)(params, state, params)
    state_names = [entry.name for entry in state_entries]
    shared_names = {entry.name for entry in state_entries if entry.is_shared}
    # The arguments of update are gradients, state and weights.
    arguments = [*names, *state_names, *names]
    outputs = [*names, *state_names]

    def reads(index: int) -> tuple[Jaxpr, set[str]]:
        """What is run for an output, and the names of what it is made of."""
        wanted = [place == index for place in range(len(outputs))]
        needed, is_read = dce_jaxpr(program.jaxpr, wanted)
        return needed, {arguments[k] for k in np.flatnonzero(is_read)}

    for index, entry in enumerate(state_entries, len(names)):
        if entry.is_shared:
            _, read = reads(index)
            _check_counter(entry.name, read - shared_names)
    across = []
    for index, leaf in enumerate(leaf_at.values()):
        needed, read = reads(index)
        _check_alone(names[index], read.intersection(names) - {names[index]})
        if leaf in slices and _sums_up(needed):
            across.append(names[index])
    if across:
        warnings.warn(
            f"release: optimizer looks at all numbers of {listed(across)} together. "
            "Here it sees one layer at a time, so that the run is not that of the "
            "usual step, but of one with a list of layers in place of a stack.",
            stacklevel=3,
        )


def _first_layers(leaves: dict[int, Any], slices: dict[int, Slice]) -> dict[int, Array]:
    """The leaves, of stacks the slices of the first layer."""
    first = {}
    for leaf, array in leaves.items():
        array = jnp.asarray(array)
        first[leaf] = slices[leaf].taken(array, 0) if leaf in slices else array
    return first


def _check_every_step(state: PyTree) -> None:
    """Refuses an optimizer whose update is 0 in some steps."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: type(x) in PAUSES)
    for node in nodes:
        if type(node) in PAUSES:
            optimizer, hint = PAUSES[type(node)]
            raise ValueError(
                "release: optimizer must change the weights in every step, and "
                f"{optimizer} does not. {hint}"
            )


def _check_shared(entry_name: str, entry: Any, whole: Any) -> None:
    """Refuses an entry of the state that layers can neither share nor cut."""
    is_key = jnp.issubdtype(entry.dtype, jax.dtypes.prng_key)
    if is_key or (entry.dtype == jnp.uint32 and entry.shape == (2,)):
        raise ValueError(
            f"release: optimizer draws random numbers from the key {entry_name!r}, "
            "which would be the same in all layers. Add noise to gradients before, or "
            "leave it out."
        )
    if whole is None or whole.shape != entry.shape:
        shape = None if whole is None else list(whole.shape)
        raise ValueError(
            f"release: the state of optimizer must have the shape of each leaf, but "
            f"{entry_name!r} has {shape}, and {list(entry.shape)} for one layer. "
            "Factored moments are such entries: take adafactor(factored=False)."
        )


def _check_counter(entry_name: str, read: set[str]) -> None:
    if read:
        raise ValueError(
            "release: optimizer must treat each array by itself, but its number "
            f"{entry_name!r} depends on {listed(read)}. All layers share it, and it "
            "would learn from the last of them alone."
        )


def _check_alone(leaf: str, others: set[str]) -> None:
    if others:
        raise ValueError(
            "release: optimizer must treat each array by itself, but its update of "
            f"{leaf!r} depends on {listed(others)}. A clip of the global norm is "
            "max_norm here, and any other clip layer_clip."
        )


def _sums_up(program: Jaxpr) -> bool:
    """Whether a program makes fewer numbers of an array, as a norm does."""
    for equation in program.eqns:
        for inner in every_equation(equation):
            sizes = [type_of(x).size for x in inner.invars]
            largest = max(type_of(x).size for x in inner.outvars)
            if inner.primitive.name == "dot_general" or max(sizes, default=0) > largest:
                return True
    return False
