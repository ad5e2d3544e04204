"""Tree prefixes: options that are given for parts of a tree.

Limits, axes, stacked layers, labels and bounds may be given once for everything, or for
each part of the tree, at any depth (a tree prefix). A prefix is matched by key path, so
a dict matches any mapping with the same keys, and `None` or `MaskedNode` in the updates
needs no value.
"""

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.tree_util import KeyPath

from .._trees import (
    PyTree,
    holes_of,
    is_box,
    is_none,
    leaf_paths,
    listed_paths,
    path_name,
    unbox,
)
from .checks import shown
from .functions import is_function


class Prefix(NamedTuple):
    """A tree prefix as a flat table. It is hashable when its values are, so it can be a
    static argument of a jitted function.
    """

    entries: tuple[tuple[KeyPath, Any], ...]  # (key path, value)


def prefix_table(prefix: PyTree, is_leaf: Callable[[Any], bool]) -> Prefix:
    """The table of a tree prefix. `is_leaf` says which nodes are single values. None
    always is one.
    """
    if isinstance(prefix, Prefix):
        return prefix

    def is_value(x: object) -> bool:
        # None is a value: no limit, or the default of an option.
        return x is None or is_box(x) or is_leaf(x)

    entries = jax.tree.leaves_with_path(prefix, is_leaf=is_value)
    return Prefix(tuple((path, unbox(value)) for path, value in entries))


def static_table(
    argument: str, prefix: PyTree, is_leaf: Callable[[Any], bool]
) -> Prefix:
    """The table of an option that jit takes as a static argument.

    Raises:
      TypeError: an array, which has no hash. `optax.inject_hyperparams` makes one of
        every number.
    """
    entries = []
    for path, value in prefix_table(prefix, is_leaf).entries:
        if isinstance(value, (np.ndarray, Array)):
            raise TypeError(
                f"{argument} must be known when the clipper is built, got "
                f"{shown(value)}: under inject_hyperparams name it in static_args."
            )
        # A number of NumPy compared with a tuple of axes is an array, and no bool.
        if isinstance(value, np.generic):
            value = value.item()
        entries.append((path, value))
    return Prefix(tuple(entries))


def _beginnings(path: KeyPath) -> Iterator[KeyPath]:
    """The beginnings of a key path (a, b): (), (a,), (a, b)."""
    return (path[:depth] for depth in range(len(path) + 1))


def covering_path(path: KeyPath, table: Collection[KeyPath]) -> KeyPath | None:
    """The path in a table with which a path begins: its own, or the path of a subtree
    around it. None if there is none.
    """
    # A tree prefix has at most one such path. Every path begins with ().
    return next((start for start in _beginnings(path) if start in table), None)


def lookup(
    prefix: Prefix, tree: PyTree, argument: str, *, allow_missing: bool = False
) -> list[Any]:
    """The value of a prefix for each leaf of `tree`, in order.

    `argument` is what errors call the prefix.

    Raises:
      ValueError: a leaf has no value, or, without `allow_missing`, a value has no leaf.
        The text names the argument and the path.
    """
    return lookup_paths(
        prefix,
        leaf_paths(tree),
        set(holes_of(tree)),
        argument=argument,
        part="leaf",
        allow_missing=allow_missing,
    )


def lookup_paths(
    prefix: Prefix,
    paths: Sequence[KeyPath],
    holes: Set[KeyPath],
    *,
    argument: str,
    part: str,
    allow_missing: bool,
) -> list[Any]:
    """`lookup`, by the key paths of leaves and holes. `part` is what errors call a
    leaf.
    """
    table = dict(prefix.entries)
    values = []
    used_paths: set[KeyPath] = set()
    for path in paths:
        table_path = covering_path(path, table)
        if table_path is None:
            raise ValueError(
                f"{argument} has no value for the {part} {path_name(path)!r}: it has "
                f"{listed_paths(table)}. Give one for each {part}, or one for all."
            )
        values.append(table[table_path])
        used_paths.add(table_path)
    if allow_missing:
        return values
    # Values for holes may stay unused: a full tree of limits has some where updates are
    # missing. Such a value stands at the hole, above it or below it.
    for hole in holes:
        used_paths.update(_beginnings(hole))
    for path in table:
        is_below_hole = covering_path(path, holes) is not None
        if path in used_paths or is_below_hole:
            continue
        noun = "label, see allow_missing" if part == "label" else "part"
        raise ValueError(
            f"{argument} has a value for {path_name(path)!r}, but the updates have no "
            f"such {noun}: they have {listed_paths(paths)}."
        )
    return values


def for_each_leaf(
    value: Any, tree: PyTree, argument: str, is_value: Callable[[Any], bool] = is_none
) -> list[Any]:
    """One value for each leaf, from a function of path and leaf or a tree prefix."""
    if is_function(value):
        entries = jax.tree.leaves_with_path(tree)
        return [value(path_name(path), leaf) for path, leaf in entries]
    return lookup(prefix_table(value, is_value), tree, argument)
