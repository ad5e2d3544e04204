"""What is a leaf, and what each leaf is given: which are measured, how many of their
axes count layers, over which axes a unit is summed, and which label they carry.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import prefix, sharding
from .sharding import Axes

Stacked = (
    int | Callable[[str, Any], int | None] | Any | None
)  # Any: a tree prefix of whole numbers
Axis = (
    int
    | tuple[int, ...]
    | Callable[[str, Any], int | tuple[int, ...] | None]
    | Any
    | None
)  # Any: a tree prefix of these


def measured(tree: Any) -> Any:
    """The tree with None in the place of every leaf that is not measured: no float or
    complex dtype, or no elements.
    """
    return jax.tree.map(
        lambda leaf: leaf if _is_measured(leaf) else None, unboxed(tree)
    )


def measured_as(tree: Any, params: Any) -> Any:
    """The weights that belong to the leaves of a tree that `measured` made."""
    return jax.tree.map(
        lambda leaf, weight: None if leaf is None else weight,
        tree,
        unboxed(params),
        is_leaf=prefix.is_none,
    )


def cast_like(x: jax.Array, leaf: Any) -> jax.Array:
    """An array in the dtype of a leaf, weakly typed where the leaf is."""
    leaf = jnp.asarray(leaf)
    x = x.astype(leaf.dtype)
    if not leaf.weak_type:
        return x

    # The only public way to a weakly typed array is to fill one with a scalar.
    def fill(number: jax.Array) -> jax.Array:
        return lax.full_like(leaf, number, shape=())

    for _ in range(x.ndim):
        fill = jax.vmap(fill)
    return fill(x)


def with_unmeasured(changed: Any, tree: Any) -> Any:
    """What was made of the measured leaves, in the tree that they came from, with the
    leaves that are not measured in their places.
    """
    old, treedef = jax.tree.flatten(tree, is_leaf=prefix.is_none)
    new = jax.tree.leaves(changed, is_leaf=prefix.is_none)
    return treedef.unflatten(
        [
            before if after is None else after
            for before, after in zip(old, new, strict=True)
        ]
    )


def unboxed(tree: Any) -> Any:
    """The tree with arrays in the place of objects that hold one, such as the variables
    of flax NNX, whose optimizer hands them to `init` and arrays to `update`.
    """
    return jax.tree.map(
        lambda leaf: leaf.__jax_array__() if _is_box(leaf) else leaf,
        tree,
        is_leaf=_is_box,
    )


def stacked_axes(stacked: Stacked, tree: Any, call: str) -> list[int]:
    """For each leaf, how many leading axes count layers."""
    counts = for_each_leaf(stacked, tree, f"{call}: stacked")
    for (path, leaf), count in zip(
        jax.tree_util.tree_flatten_with_path(tree)[0], counts
    ):
        known = count is None or (
            isinstance(count, (int, np.integer)) and 0 <= count <= jnp.ndim(leaf)
        )
        if not known:
            raise ValueError(
                f"{call}: stacked must be a number of leading axes, from 0 to "
                f"{jnp.ndim(leaf)} for the leaf {prefix.name(path)!r} of shape "
                f"{jnp.shape(leaf)}, got {count!r}."
            )
    return [int(count or 0) for count in counts]


def unit_axes(
    axis: Axis, stacked: Stacked, axes: Axes, tree: Any, call: str
) -> list[tuple[int, ...] | None]:
    """For each leaf, the dimensions to sum over; None for all of them without keeping
    any.
    """
    chosen = for_each_leaf(axis, tree, f"{call}: axis", _is_axes)
    dims = []
    for (path, leaf), value, skip, shape in zip(
        jax.tree_util.tree_flatten_with_path(tree)[0],
        chosen,
        stacked_axes(stacked, tree, call),
        sharding.whole_shapes(axes, tree, call),
    ):
        rank = jnp.ndim(leaf) - skip
        if value is None:
            is_vector = shape is not None and sum(n > 1 for n in shape[skip:]) <= 1
            if rank > 5 and not is_vector:
                raise ValueError(
                    f"{call}: axis must be given for the leaf {prefix.name(path)!r} of "
                    f"rank {rank}: there is no rule above rank 5."
                )
            by_rank = {2: 1, 3: 1, 4: 3, 5: 4}.get(rank, rank)
            inside = tuple(range(rank if is_vector else by_rank))
        else:
            wanted = value if isinstance(value, tuple) else (value,)
            if not all(
                isinstance(i, (int, np.integer)) and -rank <= i < rank for i in wanted
            ):
                raise ValueError(
                    f"{call}: axis={value!r} does not fit the leaf "
                    f"{prefix.name(path)!r}, a tensor of rank {rank}: give an axis for "
                    "each leaf."
                )
            inside = tuple(sorted(i % rank for i in wanted))
        whole = value is None and rank <= 1 and not skip
        dims.append(None if whole else tuple(i + skip for i in inside))
    return dims


def for_each_leaf(
    value: Any,
    tree: Any,
    argument: str,
    is_value: Callable[[Any], bool] = lambda x: False,
) -> list[Any]:
    """One value for each leaf, from a function of path and leaf or from a tree
    prefix.
    """
    if callable(value):
        return [
            value(prefix.name(path), leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        ]
    table = (
        value if isinstance(value, prefix.Prefix) else prefix.freeze(value, is_value)
    )
    return prefix.lookup(table, tree, argument)


def frozen(name: str, numbers: Any, call: str) -> Any:
    """`axis`, `stacked` or `columns`, as a static argument of a jitted function can be.

    Raises:
      TypeError: a number is an array, as `optax.inject_hyperparams` makes one of every
        number.
    """
    if callable(numbers):
        return numbers
    table = prefix.freeze(numbers, _is_axes if name == "axis" else lambda x: False)
    for _, number in table.entries:
        if isinstance(number, jax.Array):
            raise TypeError(
                f"{call}: {name} must be known when the clipper is built, got "
                f"{number!r}: under inject_hyperparams name it in static_args."
            )
    return table


def by_label(
    tree: Any, labels: Any, call: str
) -> tuple[dict[Any, dict[str, Any]], Callable[[Any], Any]]:
    """The leaves sorted by label, {label: {path: leaf}}, and the function that puts
    such a dict back into the tree's shape.
    """
    treedef = jax.tree.structure(tree)
    tree = unboxed(tree)
    table = labels(tree) if callable(labels) else labels
    if not isinstance(table, prefix.Prefix):
        table = prefix.freeze(table, lambda x: isinstance(x, str))
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    keys = list(
        zip(
            prefix.lookup(table, tree, f"{call}: labels"),
            prefix.names([path for path, _ in paths]),
        )
    )
    check_labels(f"{call}: labels must be", {label for label, _ in keys})
    groups: dict[Any, dict[str, Any]] = {
        label: {} for label in sorted({label for label, _ in keys}, key=str)
    }
    for (label, path), (_, leaf) in zip(keys, paths):
        groups[label][path] = leaf
    return groups, lambda sorted_leaves: jax.tree.unflatten(
        treedef, [sorted_leaves[label][path] for label, path in keys]
    )


def check_labels(must: str, labels: Iterable[Any]) -> None:
    """Raises TypeError for labels that cannot be the keys of one dict in a pytree,
    which JAX sorts. `must` begins the text.
    """
    try:
        sorted(labels)
    except TypeError:
        shown = " and ".join(sorted(map(repr, labels)))
        raise TypeError(
            f"{must} of one kind, which sorts, got {shown}: make all of them strings, "
            "or all of them ints."
        ) from None


def axes_by_label(axes: Axes, tree: Any, labels: Any, call: str) -> Axes:
    """`axes` for the tree that `by_label` makes."""
    axes = sharding.freeze(axes)
    if not isinstance(axes, prefix.Prefix):
        return axes
    specs = jax.tree.unflatten(
        jax.tree.structure(tree), prefix.lookup(axes, tree, f"{call}: axes")
    )
    return sharding.freeze(by_label(specs, labels, call)[0])


def _is_axes(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(i, int) for i in x)


def _is_box(x: Any) -> bool:
    return callable(getattr(x, "__jax_array__", None))


def _is_measured(leaf: Any) -> bool:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return bool(jnp.issubdtype(dtype, jnp.inexact)) and 0 not in jnp.shape(leaf)
