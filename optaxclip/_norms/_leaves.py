"""Per-leaf bookkeeping: which leaves are clipped, which of their dimensions count
layers, which a unit sums, and which label a leaf carries.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import check_takes, is_function
from . import _prefix as prefix
from ._mesh_axes import whole_shapes
from ._prefix import ByPath
from ._stacked import is_axes, other_axes, stacked_axes

# A whole number or a tuple of them, a tree prefix of these, or a function likewise.
Axis: TypeAlias = "int | Mapping[Any, Axis] | Sequence[Axis] | ByPath | None"


def clipped_leaves(tree: Any, call: str = "") -> Any:
    """The tree of the leaves that count, with None in the place of all others.

    A leaf counts if it has a float or complex dtype and at least one element. `call`
    is what errors name.
    """
    try:
        return jax.tree.map(_clipped, tree, is_leaf=_is_box)
    except TypeError:
        # Paths take time, so they are made only for the error.
        check_leaves(unboxed(tree), f"{call}: " if call else "")
        raise


def check_leaves(tree: Any, begin: str) -> None:
    """Raises for a leaf that is not an array, such as a function in a model."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        try:
            _clipped(leaf)
        except TypeError:
            raise TypeError(
                f"{begin}the leaf {prefix.name(path)!r} must be an array or a number, "
                f"got {leaf!r}: hand over arrays only, with None for everything else. "
                "In equinox that is eqx.filter(model, eqx.is_inexact_array)."
            ) from None


def put_back(changed: Any, tree: Any) -> Any:
    """Puts clipped leaves back into the tree that they came from."""
    # Nothing to put back, as of a tree of floats.
    if jax.tree.structure(changed) == jax.tree.structure(tree):
        return changed
    old, treedef = jax.tree.flatten(tree, is_leaf=prefix.is_none)
    new = jax.tree.leaves(changed, is_leaf=prefix.is_none)
    # None is a leaf that did not count. It comes back as it was.
    pairs = zip(old, new, strict=True)
    return treedef.unflatten([a if b is None else b for a, b in pairs])


def unboxed(tree: Any) -> Any:
    """The tree with arrays in the place of objects that hold one, such as the variables
    of flax NNX, whose optimizer hands them to `init` and arrays to `update`.
    """
    return jax.tree.map(
        lambda leaf: leaf.__jax_array__() if _is_box(leaf) else leaf,
        tree,
        is_leaf=_is_box,
    )


def unit_axes(
    axis: Any, stacked: Any, mesh_axes: Any, tree: Any, call: str
) -> list[tuple[int, ...] | None]:
    """For each leaf, the dimensions that a unit norm sums. None for all of them without
    keeping any.
    """
    found: list[tuple[int, ...] | None] = []
    for (path, leaf), value, layers, shape in zip(
        jax.tree_util.tree_flatten_with_path(tree)[0],
        for_each_leaf(axis, tree, f"{call}: axis", is_axes),
        stacked_axes(stacked, tree, call, mesh_axes),
        whole_shapes(mesh_axes, tree, call),
    ):
        # Axes count within one layer: of [layers, in, out], axis 0 is dimension 1.
        inside = other_axes(layers, jnp.ndim(leaf))
        rank = len(inside)
        where = f"{call}: axis", prefix.name(path), rank
        if value is not None:
            summed = axes_within(value, *where)
        else:
            summed = _axes_by_shape(
                shape and tuple(shape[i] for i in inside), *where
            )
        # A vector is one unit. Its norm is a scalar and joins the vector of all norms.
        whole = value is None and rank <= 1 and not layers
        found.append(None if whole else tuple(inside[i] for i in summed))
    return found


def _axes_by_shape(
    shape: tuple[int, ...] | None, argument: str, name: str, rank: int
) -> tuple[int, ...]:
    """All dimensions of what squeezes to a vector, else those that feed one output."""
    # Axes of size 1 do not count: [1, 1, n] is a vector, as in optax.
    if shape is not None and sum(map(_is_above_1, shape)) <= 1:
        return tuple(range(rank))
    if rank > 5:
        raise ValueError(
            f"{argument} must be given for the leaf {name!r} of rank {rank}: there is "
            "no rule above rank 5."
        )
    # Kernels as [in, out], [in, heads, size], [height, width, in, out], and with depth.
    # Those of rank 3 are taken for attention, as in optax.
    return tuple(range({2: 1, 3: 1, 4: 3, 5: 4}.get(rank, rank)))


def _is_above_1(size: Any) -> bool:
    # A size that only a run of an exported program knows counts as one of many.
    return not isinstance(size, int) or size > 1


def axes_within(
    value: Any, argument: str, name: str, rank: int
) -> tuple[int, ...]:
    """The axes of a leaf, counted from the front.

    Raises:
      ValueError: an axis that it does not have, or has named twice.
    """
    wanted = value if isinstance(value, tuple) else (value,)
    known = [
        isinstance(i, (int, np.integer)) and -rank <= i < rank for i in wanted
    ]
    if not all(known):
        raise ValueError(
            f"{argument}={value!r} does not fit the leaf {name!r}, a tensor of rank "
            f"{rank}: give an axis for each leaf."
        )
    # Counted from the front: (-1, 0) of rank 3 is (0, 2).
    axes = {int(i) % rank for i in wanted}
    if len(axes) < len(wanted):
        raise ValueError(
            f"{argument}={value!r} names an axis twice for the leaf {name!r}, a tensor "
            f"of rank {rank}."
        )
    return tuple(sorted(axes))


def for_each_leaf(
    value: Any,
    tree: Any,
    argument: str,
    is_value: Callable[[Any], bool] = lambda x: False,
) -> list[Any]:
    """One value for each leaf, from a function of path and leaf or from a tree
    prefix.
    """
    # value("blocks/0/w", leaf)
    if is_function(value):
        return [
            value(prefix.name(path), leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        ]
    table = (
        value
        if isinstance(value, prefix.Prefix)
        else prefix.freeze(value, is_value)
    )
    return prefix.lookup(table, tree, argument)


def static_numbers(name: str, numbers: Any, call: str) -> Any:
    """`axis`, `stacked` or `columns`, as a static argument of a jitted function can be.

    Raises:
      TypeError: a number is an array, as `optax.inject_hyperparams` makes one of every
        number, or a function takes other arguments than path and leaf.
    """
    if is_function(numbers):
        check_takes(f"{call}: {name} must take path and leaf", numbers, 2)
    if numbers is None or is_function(numbers):
        return numbers
    # A tuple of axes is one value. In `columns` it is a part of the tree.
    table = prefix.freeze(
        numbers, is_axes if name != "columns" else lambda x: False
    )
    for _, number in table.entries:
        # To Python True is 1, so stacked=True would count one axis.
        if isinstance(number, bool):
            raise TypeError(
                f"{call}: {name} must be a whole number, got {number!r}: for one write "
                f"{name}=1."
            )
        if isinstance(number, jax.Array):
            raise TypeError(
                f"{call}: {name} must be known when the clipper is built, got "
                f"{number!r}: under inject_hyperparams name it in static_args."
            )
    return table


def static_labels(labels: Any) -> Any:
    """Labels as a static argument: a function, or a frozen tree prefix."""
    # A function is static as it is: equal functions share a compilation.
    if is_function(labels):
        return labels
    return prefix.freeze(labels, lambda x: isinstance(x, str))


def labels_of(labels: Any, tree: Any) -> Any:
    """The tree prefix of labels: what a function of the tree makes, or one of path and
    leaf.
    """
    if not is_function(labels):
        return labels
    # Two arguments are path and leaf. One is the tree, as optax.partition calls it.
    if _takes_path(labels):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: labels(prefix.name(path), leaf), tree
        )
    return labels(tree)


def _takes_path(function: Callable[..., Any]) -> bool:
    """Whether a function needs two arguments, path and leaf."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return False
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    # An argument with a default does not count: labels(tree, sep="/") takes a tree.
    needed = [
        x for x in parameters if x.kind in kinds and x.default is x.empty
    ]
    return len(needed) == 2


def by_label(tree: Any, labels: Any, call: str) -> list[Any]:
    """The label of each leaf."""
    # A function is called in each trace, so its labels may follow the tree.
    table = labels_of(labels, tree)
    if not isinstance(table, prefix.Prefix):
        table = prefix.freeze(table, lambda x: isinstance(x, str))
    found = prefix.lookup(table, tree, f"{call}: labels")
    check_labels(f"{call}: labels must be", set(found))
    return found


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


def _is_box(x: Any) -> bool:
    # The protocol by which JAX itself makes an array of an object.
    return callable(getattr(x, "__jax_array__", None))


def _clipped(leaf: Any) -> Any:
    """The leaf, or None for one that does not count."""
    if _is_box(leaf):
        leaf = leaf.__jax_array__()
    # What `optax.masked` leaves in the variables of flax NNX.
    if not jax.tree.leaves(leaf):
        return leaf
    # A Python number has no dtype. Those of random keys and float0 are not inexact.
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    counts = jnp.issubdtype(dtype, jnp.inexact) and 0 not in jnp.shape(leaf)
    return leaf if counts else None
