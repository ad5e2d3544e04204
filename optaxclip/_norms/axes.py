"""Which axes of a leaf index layers, and which a unit norm sums."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from .._arguments.checks import shown
from .._arguments.functions import is_function
from .._arguments.prefixes import Prefix, for_each_leaf, lookup, prefix_table
from .._trees import PyTree, Shape, path_name

INTEGERS = (int, np.integer)
ByPath = Callable[[str, Any], Any]  # a function of a leaf's path ("blocks/w") and leaf
# An int or a tuple of ints, a tree prefix of these, or a function that returns these.
Axis: TypeAlias = "int | Mapping[Any, Axis] | Sequence[Axis] | ByPath | None"
Stacked: TypeAlias = "int | Mapping[Any, Stacked] | Sequence[Stacked] | ByPath | None"


def is_axes(x: object) -> TypeGuard[tuple[int, ...]]:
    """Whether it is a tuple of axes, and not a node of a tree."""
    # A NamedTuple of ints is a node of a tree, so the type is tuple itself.
    return type(x) is tuple and all(isinstance(i, INTEGERS) for i in x)


def check_no_bool(argument: str, value: Any) -> None:
    """Raises TypeError for a bool as an axis, or in a tuple of axes. To Python True is
    1 and False is 0.
    """
    axes = value if is_axes(value) else (value,)
    if any(isinstance(axis, bool) for axis in axes):
        raise TypeError(
            f"{argument} must be whole numbers, not bools, got {shown(value)}."
        )


def axes_within(
    value: Any, argument: str, leaf_name: str, rank: int, *, part: str = "the leaf"
) -> tuple[int, ...]:
    """The axes of a leaf, counted from the front: (-1, 0) of rank 3 is (0, 2). `part`
    is what an error calls the leaf.

    Raises:
      ValueError: an axis that the leaf does not have, or one that is named twice.
    """
    entries = value if isinstance(value, tuple) else (value,)
    integers = [entry for entry in entries if isinstance(entry, INTEGERS)]
    axes = {int(axis) % rank for axis in integers if -rank <= axis < rank}
    # The set is smaller if an entry is not an axis of the leaf, or if two are the same
    # axis, as in (0, -3) of rank 3.
    if len(axes) < len(entries):
        raise ValueError(
            f"{argument}={shown(value)} does not fit {part} {leaf_name!r}, a tensor of "
            f"rank {rank}: give axes for each leaf, none of them twice."
        )
    return tuple(sorted(axes))


def other_axes(axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """All other axes of a leaf."""
    return tuple(axis for axis in range(rank) if axis not in axes)


class _StackedValue(NamedTuple):
    """The value of `stacked` for a leaf."""

    value: Any
    # The same for all leaves of one stack: the key path of the value, or the text of
    # what a function returned.
    stack_key: KeyPath | str


def stacked_axes(
    stacked: Stacked, tree: PyTree, call: str, shapes: Sequence[Shape | None]
) -> list[tuple[int, ...]]:
    """For each leaf, the axes that index layers, in ascending order.

        1                        the leading axis, as `jax.vmap` and `lax.scan` stack
        2                        the two leading axes, such as layers and experts
        (1,)                     axis 1, as MaxText and T5X stack
        a tree prefix of these   another value for each part of the model
        function(path, leaf)     the value for each leaf: one of these, or None for 0

    `shapes` has the shape of each leaf over all devices, None where a device knows its
    part only. Leaves that share one value are layers of one stack.

    Raises:
      ValueError: an axis that a leaf does not have, or leaves that share one value but
        not the number of layers.
    """
    # Nothing is stacked: the common case, which looks at no leaf.
    if stacked is None:
        return [()] * len(shapes)
    entries = jax.tree.leaves_with_path(tree)
    # Name and number of layers, such as "12 x 8", of the first leaf of each stack.
    first_leaf_of_stack: dict[KeyPath | str, tuple[str, str]] = {}
    axes_of_leaves = []
    stacked_values = _stacked_values(stacked, tree, f"{call}: stacked")
    for (path, leaf), (value, stack_key), shape in zip(entries, stacked_values, shapes):
        axes = _layer_axes(value, path_name(path), jnp.shape(leaf), call)
        axes_of_leaves.append(axes)
        if not axes or shape is None:
            continue
        sizes = " x ".join(str(shape[axis]) for axis in axes)
        first_name, first_sizes = first_leaf_of_stack.setdefault(
            stack_key, (path_name(path), sizes)
        )
        if sizes != first_sizes:
            raise ValueError(
                f"{call}: stacked={shown(value)} would count {first_sizes} in "
                f"{first_name!r} and {sizes} in {path_name(path)!r}, but leaves of one "
                "stack have the same number of layers. Axes other than the leading "
                "ones are a tuple, such as (1,) for axis 1. A leaf that is not stacked "
                "takes None. Several stacks take a value each, as in "
                "{'encoder': 1, 'decoder': 1}."
            )
    return axes_of_leaves


def _stacked_values(
    stacked: Stacked, tree: PyTree, argument: str
) -> list[_StackedValue]:
    """The value of `stacked` for each leaf."""
    if is_function(stacked):
        # What a function returns has no key path, so equal values are one stack.
        stacked_values = []
        for value in for_each_leaf(stacked, tree, argument):
            # A function may be `path.startswith("blocks")`.
            if isinstance(value, bool):
                value = int(value)
            check_no_bool(argument, value)
            stacked_values.append(_StackedValue(value, repr(value)))
        return stacked_values
    # The key path tells equal values apart.
    entries = []
    for path, value in prefix_table(stacked, is_axes).entries:
        entries.append((path, _StackedValue(value, path)))
    return lookup(Prefix(tuple(entries)), tree, argument)


def _layer_axes(value: Any, leaf_name: str, shape: Shape, call: str) -> tuple[int, ...]:
    """The axes that index layers, of a leaf and its value of `stacked`."""
    rank = len(shape)
    if value is None:
        return ()
    if isinstance(value, INTEGERS) and 0 <= value <= rank:
        return tuple(range(int(value)))
    if is_axes(value):
        return axes_within(value, f"{call}: stacked", leaf_name, rank)
    raise ValueError(
        f"{call}: stacked must be a number of leading axes, from 0 to {rank} for the "
        f"leaf {leaf_name!r} of shape {shape}, or a tuple of its axes, got "
        f"{shown(value)}."
    )


def axes_besides_layers(
    layer_axes_of_leaves: Sequence[tuple[int, ...]], tree: PyTree
) -> list[tuple[int, ...] | None]:
    """For each leaf, the axes that the norm of a layer sums, or None for a leaf without
    layers, which is summed whole.
    """
    summed_axes_of_leaves: list[tuple[int, ...] | None] = []
    for leaf, layer_axes in zip(jax.tree.leaves(tree), layer_axes_of_leaves):
        summed_axes = other_axes(layer_axes, jnp.ndim(leaf)) if layer_axes else None
        summed_axes_of_leaves.append(summed_axes)
    return summed_axes_of_leaves


def unit_axes(
    axis: Axis,
    layer_axes_of_leaves: Sequence[tuple[int, ...]],
    tree: PyTree,
    call: str,
    shapes: Sequence[Shape | None],
) -> list[tuple[int, ...] | None]:
    """For each leaf, the axes that a unit norm sums, or None for a vector, which is one
    unit.

    Args:
      axis: the option. It counts axes within one layer: of [layers, in, out], its axis
        0 is axis 1 of the leaf.
      layer_axes_of_leaves: for each leaf the axes that index layers.
      tree: the leaves.
      call: the function that the user called.
      shapes: of the leaves over all devices, None where a device knows its part only.
    """
    argument = f"{call}: axis"
    entries = jax.tree.leaves_with_path(tree)
    values = for_each_leaf(axis, tree, argument, is_axes)
    summed_axes_of_leaves: list[tuple[int, ...] | None] = []
    for (path, leaf), value, layer_axes, shape in zip(
        entries, values, layer_axes_of_leaves, shapes
    ):
        # A tree prefix was checked when the clipper was built. A function was not.
        check_no_bool(argument, value)
        axes_of_layer = other_axes(layer_axes, jnp.ndim(leaf))
        rank = len(axes_of_layer)
        if value is None and not layer_axes and rank <= 1:
            # The norm of a vector is a scalar, like the norm of a tensor.
            summed_axes_of_leaves.append(None)
            continue
        part = "a layer of the leaf" if layer_axes else "the leaf"
        if value is not None:
            summed_in_layer = axes_within(
                value, argument, path_name(path), rank, part=part
            )
        else:
            if shape is not None:
                shape = tuple(shape[i] for i in axes_of_layer)
            summed_in_layer = _axes_by_shape(
                shape, argument, f"{part} {path_name(path)!r}", rank
            )
        # From positions among the axes of a layer to axes of the leaf.
        summed_axes = tuple(axes_of_layer[i] for i in summed_in_layer)
        summed_axes_of_leaves.append(summed_axes)
    return summed_axes_of_leaves


def _axes_by_shape(
    shape: Shape | None, argument: str, subject: str, rank: int
) -> tuple[int, ...]:
    """The axes that a unit norm sums where `axis` is None: all of a vector, else those
    that feed one output.
    """
    # Axes of size 1 do not count: [1, 1, n] is a vector, as in optax. A symbol of
    # `jax.export` counts as a size above 1.
    if shape is not None:
        ones = [size for size in shape if isinstance(size, int) and size <= 1]
        if rank - len(ones) <= 1:
            return tuple(range(rank))
    if rank > 5:
        raise ValueError(
            f"{argument} must be given for {subject} of rank {rank}: there is no rule "
            "above rank 5."
        )
    # Kernels are [in, out], [in, heads, size], [height, width, in, out] or [depth,
    # height, width, in, out]. Rank 3 is taken for attention, as in optax.
    input_axis_count = {2: 1, 3: 1, 4: 3, 5: 4}.get(rank, rank)
    return tuple(range(input_axis_count))
