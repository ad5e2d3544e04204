"""The options of measures: `ord`, `axis`, `stacked`, `labels` and `mesh_axes`.

Here they are checked, and made hashable, as static arguments of a jitted function are.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any, Literal

import jax
import numpy as np

from .. import _trees as trees
from .._arguments.checks import check_concrete, check_takes, shown
from .._arguments.functions import is_function
from .._arguments.prefixes import Prefix, for_each_leaf, static_table
from .._devices import mesh
from .._trees import PyTree
from .axes import check_no_bool, is_axes

# The order of a norm. None means 2.
Ord = float | Literal["rms", "average"] | None
ORDERS = "a number above 0, math.inf, 'rms' or 'average'"


def checked_options(call: str, ord: Any, **options: Any) -> dict[str, Any]:
    """The arguments of a measure, checked and hashable. `options` are `mesh_axes`, and
    `axis`, `stacked` or `labels` where the measure has them.
    """
    arguments: dict[str, Any] = {"call": call, "ord": static_order(ord, call)}
    for option, value in options.items():
        if option == "mesh_axes":
            value = mesh.static_mesh_axes(value, call)
        elif option == "labels":
            value = static_labels(value, call)
        else:
            value = static_axes(f"{call}: {option}", value)
        arguments[option] = value
    return arguments


def static_order(ord: Any, call: str) -> Ord:
    """The order of a norm.

    Raises:
      ValueError: anything but a number above 0, "rms", "average" and None.
    """
    if ord is None or (isinstance(ord, str) and ord in ("rms", "average")):
        return ord
    # The order decides which program is compiled, so a traced one comes too late.
    check_concrete(f"{call}: ord", ord)
    number = np.asarray(ord)
    # True is an int in Python. As an order it is a slip.
    is_real = number.dtype.kind in "iuf" and not number.ndim
    if not is_real or not number > 0:
        raise ValueError(f"{call}: ord must be {ORDERS}, got {shown(ord)}.")
    # A float instead of an array, which cannot be hashed.
    return ord if isinstance(ord, (int, float)) else float(number)


def static_axes(
    argument: str, axes: Any, is_value: Callable[[Any], bool] = is_axes
) -> Any:
    """`axis`, `stacked` or `columns` as a static argument: a function, or a frozen tree
    prefix. `is_value` says which of its nodes are single values: tuples of axes.

    Raises:
      TypeError: a bool, a number that is an array, as `optax.inject_hyperparams` makes
        one of every number, or a function that takes other arguments than path and
        leaf.
    """
    if axes is None:
        return None
    if is_function(axes):
        check_takes(f"{argument} must take path and leaf", axes, 2)
        return axes
    table = static_table(argument, axes, is_value)
    for _, value in table.entries:
        check_no_bool(argument, value)
    return table


def static_labels(labels: Any, call: str) -> Any:
    """`labels` as a static argument: a function, or a frozen tree prefix.

    Raises:
      TypeError: a label is an array.
    """
    if is_function(labels):
        return labels
    return static_table(f"{call}: labels", labels, trees.is_none)


def labels_of(labels: Any, tree: PyTree) -> Any:
    """The labels of a tree, as a tree prefix: `labels` itself, or what it returns if it
    is a function. It takes the tree and returns a tree prefix, or it takes the path of
    a leaf and the leaf, and returns the label of that leaf.
    """
    if not is_function(labels):
        return labels
    if _takes_the_tree(labels, tree):
        return labels(tree)
    paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
    return Prefix(tuple(zip(paths, for_each_leaf(labels, tree, ""))))


def _takes_the_tree(function: Callable[..., Any], tree: PyTree) -> bool:
    """Whether a function takes one argument, the tree, as `optax.partition` calls it.
    Otherwise it takes two: path and leaf.
    """
    try:
        inspect.signature(function).bind(tree)
    except TypeError:
        return False
    except ValueError:  # a function written in C has no signature
        return True
    return True


def check_labels(error_start: str, labels: Collection[Any]) -> None:
    """Raises TypeError for labels that do not sort. JAX sorts the keys of a dict.
    `error_start` is how the error begins: "group_norm: labels must be".
    """
    try:
        sorted(labels)
    except TypeError:
        listed_labels = " and ".join(sorted(map(repr, labels)))
        raise TypeError(
            f"{error_start} of one kind, which sorts, got {listed_labels}: make all of "
            "them strings, or all of them ints."
        ) from None
