"""Checks of the arguments of `update`: gradients, weights, and trees in the state."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from .._trees import (
    PyTree,
    check_sparse,
    is_none,
    leaf_paths,
    leaves_to_clip,
    listed_paths,
    path_name,
    unboxed,
)
from .checks import BEGIN_ANEW, warn_user


def gradients_of(call: str, updates: PyTree, params: PyTree) -> PyTree:
    """The leaves of updates to clip, which must be the gradients alone.

    Raises:
      TypeError: a leaf that is not an array, or a tuple of gradients and something
        else, as `jax.value_and_grad`, `has_aux` and `clipped_grad` return them.
    """
    # The result of `clipped_grad`, whose norms and losses would be taken for gradients.
    if {"grads", "factors"} <= set(getattr(updates, "_fields", ())):
        raise TypeError(
            f"{call}: updates must be the gradients alone, got a "
            f"{type(updates).__name__}: hand over its grads."
        )
    tree = leaves_to_clip(updates, call)
    # A NamedTuple is a tree. A plain pair may be (value, grads).
    if type(updates) is not tuple or len(updates) != 2 or params is None:
        return tree
    structure = jax.tree.structure(params)
    # Params may be a pair as well, of two arrays for example.
    if jax.tree.structure(updates) == structure:
        return tree
    for index, entry in enumerate(updates):
        if jax.tree.structure(entry) == structure:
            raise TypeError(
                f"{call}: updates must be the gradients alone, got a tuple of two in "
                f"which updates[{index}] has the structure of params. "
                "jax.value_and_grad returns (value, grads), and has_aux (grads, aux)."
            )
    return tree


def warn_of_integers(call: str, tree: PyTree) -> None:
    """Warns of the first leaf of integers, for a caller to whom no leaf counts."""
    # A tree without any leaf, such as that of a model without weights, is fine.
    for path, leaf in jax.tree.leaves_with_path(tree):
        # A Python int has no dtype. Any other leaf without one, such as True, is taken
        # for a bool, and bools are not warned of.
        dtype = int if type(leaf) is int else getattr(leaf, "dtype", bool)
        if jnp.issubdtype(dtype, jnp.integer) and jnp.size(leaf):
            warn_user(
                f"{call}: no leaf counts, since none has a float or complex dtype. The "
                f"leaf {path_name(path)!r} is {getattr(dtype, '__name__', dtype)}: "
                "make it float32."
            )
            return


def warn_of_stacks(call: str, tree: PyTree) -> None:
    """Warns of layers that look stacked: at least three leaves below one key, all with
    the same leading size, some of rank 2, some of rank 3 or more, and none of a lower
    rank.
    """
    leaves_below: dict[KeyPath, list[tuple[KeyPath, Any]]] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        for length in range(len(path)):
            leaves_below.setdefault(path[:length], []).append((path, leaf))
    for parent, entries in leaves_below.items():
        ranks = {jnp.ndim(leaf) for _, leaf in entries}
        leading_sizes = {jnp.shape(leaf)[:1] for _, leaf in entries}
        is_stack = (
            len(entries) >= 3
            and len(leading_sizes) == 1
            and min(ranks) == 2
            and max(ranks) >= 3
        )
        if is_stack:
            size = jnp.shape(entries[0][1])[0]
            high_rank_paths = [path for path, leaf in entries if jnp.ndim(leaf) >= 3]
            place = f"below {path_name(parent)!r}" if parent else "of the updates"
            warn_user(
                f"{call}: the leaves {place} look like {size} layers, "
                "stacked on their leading axis. Without stacked= a unit of the leaf "
                f"{path_name(high_rank_paths[0])!r} has one weight from each layer, in "
                "optax too. Use stacked=1, or axis=... if these are no layers."
            )
            return


def check_fits_stored(call: str, tree: PyTree, stored: PyTree) -> None:
    """Raises ValueError unless `stored`, a tree in the state, has an array of the same
    shape for each leaf of the tree.
    """
    entries, treedef = jax.tree.flatten_with_path(tree, is_leaf=is_none)
    try:
        # A None in the tree stands for a whole subtree of the state.
        stored_leaves = treedef.flatten_up_to(stored)
    except (TypeError, ValueError):
        raise ValueError(
            f"{call}: state was made for leaves {listed_paths(leaf_paths(stored))} in "
            f"{type(stored).__name__}, but the updates have "
            f"{listed_paths(leaf_paths(tree))} in {type(tree).__name__}. {BEGIN_ANEW}"
        ) from None
    for (path, leaf), stored_leaf in zip(entries, stored_leaves):
        if leaf is None:
            continue
        if stored_leaf is None:
            raise ValueError(
                f"{call}: the update of the leaf {path_name(path)!r} is "
                f"{jnp.result_type(leaf)}, but what init was given for it has no float "
                "or complex dtype. Make that float32, or give None for the update."
            )
        if jnp.shape(leaf) != jnp.shape(stored_leaf):
            raise ValueError(
                f"{call}: state was made for the leaf {path_name(path)!r} of shape "
                f"{jnp.shape(stored_leaf)}, but its update has {jnp.shape(leaf)}. "
                f"{BEGIN_ANEW}"
            )


def weights_of(call: str, tree: PyTree, params: PyTree) -> PyTree:
    """The weights of the leaves to clip, found by their paths. So `params` may be
    another type of mapping than the updates, and have more entries.

    Raises:
      ValueError: params are None, a leaf has no weight, or one of another shape.
      TypeError: weights that are integers.
    """
    if params is None:
        raise ValueError(
            f"{call} compares updates with weights: call "
            "update(updates, state, params)."
        )
    check_sparse(f"{call}: params", params)
    # A FrozenDict of params and a dict of updates have the same paths.
    weight_by_path = dict(jax.tree.leaves_with_path(unboxed(params)))
    weights = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        # Entries without updates, such as frozen weights, are not used.
        if path not in weight_by_path:
            raise ValueError(
                f"{call}: params has no value for the leaf {path_name(path)!r} "
                f"of the updates: it has {listed_paths(weight_by_path)}."
            )
        weight = weight_by_path[path]
        if jnp.shape(weight) != jnp.shape(leaf):
            raise ValueError(
                f"{call}: params has the shape {jnp.shape(weight)} for the leaf "
                f"{path_name(path)!r}, and the updates have {jnp.shape(leaf)}."
            )
        dtype = getattr(weight, "dtype", type(weight))
        # Weights that are integers would have no norm, while their updates have one.
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"{call}: params must have a float or complex dtype for the leaf "
                f"{path_name(path)!r}, whose update is {jnp.result_type(leaf)}, got "
                f"{jnp.result_type(weight)}. Make it float32, or give None for that "
                "update."
            )
        weights.append(weight)
    return jax.tree.structure(tree).unflatten(weights)
