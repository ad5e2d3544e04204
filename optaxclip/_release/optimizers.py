"""The optimizer of a released step: it sees one layer at a time.

Entries are all weights and all arrays of the optimizer's state in one dict, by their
paths in `(params, state)`:

    "[0]['layers']"          a leaf of params
    "[1][0].mu['layers']"    its moment, which follows the leaf: the path ends with that
                             of the leaf, and the shape is the same
    "[1][0].count"           follows no leaf: all layers share it

A layer has its part of a leaf, and of each entry that follows the leaf.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath, keystr

from .._trees import PyTree
from .stacks import Entries

# What the paths of weights begin with.
PARAMS = "[0]"


def arrays_by_path(params_and_state: PyTree) -> Entries:
    """Weights and state by their paths as text, which can be sorted."""
    entries = {}
    for path, entry in jax.tree.leaves_with_path(params_and_state):
        entries[keystr(path)] = entry
    return entries


def tree_from_entries(params_and_state: PyTree, entries: Entries) -> Any:
    """A tree of this structure with these entries."""
    return jax.tree.map_with_path(
        lambda path, _: entries[keystr(path)], params_and_state
    )


def changed_type(entries: Entries, wanted_entries: Entries) -> str:
    """The first entry whose type is not the wanted one, with both types, such as
    "[1].mu is float32[2] in place of bfloat16[2]". "" if there is none.
    """
    for path in sorted(entries.keys() | wanted_entries.keys()):
        entry_type = _shown_type(entries.get(path))
        wanted_type = _shown_type(wanted_entries.get(path))
        if entry_type != wanted_type:
            return f"{path} is {entry_type} in place of {wanted_type}"
    return ""


def _shown_type(array: Any) -> str:
    if array is None:
        return "nothing"
    array_type = jax.typeof(array)
    return f"{array_type.dtype}{list(array_type.shape)}"


class LeafOptimizer(NamedTuple):
    """An optimizer that can be called with some leaves of params, by their entries."""

    transformation: optax.GradientTransformationExtraArgs
    name_of_leaf: dict[str, str]  # what errors call each leaf of params, by its path
    structure: Any  # of params

    def params_with_only(self, leaves: Entries) -> PyTree:
        """Params with some leaves, and None in the place of the others."""
        all_leaves = [leaves.get(path) for path in self.name_of_leaf]
        tree = self.structure.unflatten(all_leaves)
        # Params that are one array would be None as a whole, with which AdamW raises.
        return optax.MaskedNode() if tree is None else tree

    def abstract_params_and_state(self, leaves: Entries) -> tuple[PyTree, PyTree]:
        """Shapes and dtypes of params with some leaves, and of the state for them."""

        def params_and_state(params: PyTree) -> tuple[PyTree, PyTree]:
            with _errors_with_cause():
                return params, self.transformation.init(params)

        return jax.eval_shape(params_and_state, self.params_with_only(leaves))

    def entries_after_update(self, entries: Entries, grads: Entries) -> Entries:
        """The new entries of the leaves that have gradients, and of the counters that
        layers share.
        """
        tree = self.abstract_params_and_state(grads)
        params, state = tree_from_entries(tree, entries)
        with _errors_with_cause():
            updates, state = self.transformation.update(
                self.params_with_only(grads), state, params
            )
            params = optax.apply_updates(params, updates)
        return arrays_by_path((params, state))

    def leaf_of_entry(self, leaves: Entries) -> dict[str, str | None]:
        """The path of the leaf that each entry follows. None: all layers share it."""
        leaf_paths: dict[str, str | None] = {}
        params_and_state = self.abstract_params_and_state(leaves)
        for path, entry in jax.tree.leaves_with_path(params_and_state):
            path_text = keystr(path)
            leaf_path = None
            # A scalar of the state follows no leaf. It may have the name of a scalar
            # leaf, such as the learning rate of optax.inject_hyperparams.
            is_float = jnp.issubdtype(entry.dtype, jnp.inexact)
            may_follow = is_float and entry.shape != ()
            if path_text in leaves or may_follow:
                leaf_path = _leaf_at_end(path, entry.shape, leaves)
            leaf_paths[path_text] = leaf_path
        return leaf_paths


@contextmanager
def _errors_with_cause() -> Iterator[None]:
    """Raises TypeError, with the likely cause, if an optimizer raises."""
    try:
        yield
    except Exception as error:
        # Such as `reduce_on_plateau`, which wants the value of the loss.
        raise TypeError(
            "release: optimizer is called with gradients, state and params alone, and "
            f"with None in the place of some leaves. It raised: {error}"
        ) from error


def _leaf_at_end(path: KeyPath, shape: tuple[int, ...], leaves: Entries) -> str | None:
    """The path of the leaf that has this shape, and whose path is the end of `path`.
    The longest one counts, since the path of a leaf may end with that of another.
    """
    # The first key of a path is 0 for params and 1 for the state.
    for start in range(1, len(path) + 1):
        leaf_path = PARAMS + keystr(path[start:])
        if leaf_path in leaves and jnp.shape(leaves[leaf_path]) == shape:
            return leaf_path
    return None
