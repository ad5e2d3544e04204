"""Tree prefixes: one value for a whole subtree of the updates.

Limits, axes, stacked layers, labels and bounds may be given once for everything, or for
each part of the tree, as deep as is wanted. A prefix is matched by key path, so a dict
matches any mapping with the same keys, and `None` or `MaskedNode` in the updates needs
no value.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

import jax

ByPath = Callable[
    [str, Any], Any
]  # of a leaf's path ("blocks/w") and the leaf


class Prefix(NamedTuple):
    """A tree prefix as a flat table. It is hashable when its values are, so it can be a
    static argument of a jitted function.
    """

    entries: tuple[tuple[Any, Any], ...]  # (key path, value)


def is_none(x: Any) -> bool:
    """Is it None? For `jax.tree.map`, which otherwise passes None over."""
    return x is None


def is_hole(leaf: Any) -> bool:
    """Is this a place in the tree where there is nothing: None, or a node without
    leaves such as `optax.MaskedNode`?
    """
    return not jax.tree.leaves(leaf)


def name(path: Any) -> str:
    """A key path as a user reads it: `blocks/0/w`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def names(paths: list[Any], known: Container[str] = ()) -> list[str]:
    """The names of all key paths of a tree, no two alike: where `a/b` could be two
    places, they are written as in Python. No name has line breaks.

    `known` are names of which some may be missing here. Two places that read `a/b` are
    known as in Python, also where one is missing.
    """
    # {"a/b": x} and {"a": {"b": x}} both read a/b.
    short = [name(path).replace("\n", "\\n") for path in paths]
    counts = Counter(short)
    found = []
    for path, own in zip(paths, short):
        long = jax.tree_util.keystr(path)
        is_long = own not in known and long in known
        found.append(long if is_long or counts[own] > 1 else own)
    return found


def freeze(prefix: Any, is_leaf: Callable[[Any], bool]) -> Prefix:
    """The table of a prefix; `is_leaf` says what counts as one value (None always
    does).
    """
    # None is a value: no limit, or the default of an option.
    entries = jax.tree_util.tree_flatten_with_path(
        prefix, is_leaf=lambda x: is_none(x) or is_leaf(x)
    )[0]
    return Prefix(tuple(entries))


def lookup(
    prefix: Prefix, tree: Any, argument: str, part: str = "leaf"
) -> list[Any]:
    """The value for each leaf of `tree`, in order. `part` is what errors call a leaf.

    Raises:
      ValueError: a leaf has no value, or a value stands where the tree has no such
        part. The text names the argument and the path.
    """
    table = dict(prefix.entries)
    values, used = [], set()
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    for path in paths:
        # At most one entry of a tree prefix begins a path. () is a value for all.
        found = next(
            (
                path[:depth]
                for depth in range(len(path) + 1)
                if path[:depth] in table
            ),
            None,
        )
        if found is None:
            raise ValueError(
                f"{argument} has no value for the {part} {name(path)!r}: it has "
                f"{shown(table)}. Give one for each {part}, or one for all."
            )
        values.append(table[found])
        used.add(found)
    # Where updates have None or MaskedNode, values may be given and are not used.
    holes = {
        path
        for path, leaf in jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=is_hole
        )[0]
        if is_hole(leaf)
    }
    # A value at such a place, or above it, need not reach a leaf.
    used.update(
        path[:depth] for path in holes for depth in range(len(path) + 1)
    )
    # Nor need one below it, as in a full tree of limits for masked updates.
    for key in table:
        if key not in used and not any(
            key[:depth] in holes for depth in range(len(key))
        ):
            raise ValueError(
                f"{argument} has a value for {name(key)!r}, but the updates have no "
                f"such {'label' if part == 'label' else 'part'}: they have "
                f"{shown(paths)}."
            )
    return values


def overlaps(one: Prefix, other: Prefix) -> Iterator[tuple[Any, Any]]:
    """The pairs of values of two prefixes that belong to the same leaves."""
    table, others = dict(one.entries), dict(other.entries)
    # First entries of `one` at or above those of `other`, then those strictly below.
    # So each pair comes once.
    for key, value in other.entries:
        yield from (
            (table[key[:depth]], value)
            for depth in range(len(key) + 1)
            if key[:depth] in table
        )
    for key, value in one.entries:
        yield from (
            (value, others[key[:depth]])
            for depth in range(len(key))
            if key[:depth] in others
        )


def shown(paths: Iterable[Any]) -> str:
    """Key paths as errors list them."""
    return listed(map(name, paths)) or "none at all"


def listed(names: Iterable[Any]) -> str:
    """Names in order, and of many the first eight: "'b', 'w'"."""
    # A model may have thousands of leaves.
    known = sorted(map(str, names))
    text = ", ".join(map(repr, known[:8]))
    return text if len(known) <= 8 else f"{text} and {len(known) - 8} more"
