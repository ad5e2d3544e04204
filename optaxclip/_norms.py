"""Norms of pytrees: global, of each tensor, of each unit, of each group.

    order p     (sum |x|^p)^(1/p)         p > 0, None means 2
    order inf   max |x|                   a NaN survives
    "rms"       sqrt(sum |x|^2 / N)
    "average"   sqrt(sum |x|^2) / N       TensorFlow's average norm

A measure is a static description of what is measured together. Called on a tree of
clipped leaves it returns `Norms`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _mesh as mesh
from . import _trees as trees
from ._checks import check_known, check_takes, is_function, shown
from ._mesh import MeshAxes, Split
from ._plan import Leaf, Norms, Plan, norms_of
from ._sums import Dims, as_float
from ._trees import Axis, Stacked, clipped_leaves

Ord = float | Literal["rms", "average"] | None
ORDERS = "a number above 0, math.inf, 'rms' or 'average'"


# -------------------------------------------------------------------------- measures


class Measure(Protocol):
    """What is measured together. Hashable, so that equal clippers share a program."""

    def __call__(self, tree: Any) -> Norms: ...


class GlobalNorm(NamedTuple):
    """One norm for all leaves together."""

    call: str = "global_norm"
    ord: Ord = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: Any) -> Norms:
        arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        splits = mesh.splits(self.mesh_axes, tree, [None] * len(arrays), self.call)
        leaves = tuple(Leaf(norm=0, split=split) for split in splits)
        values = norms_of(Plan(leaves, 1, self.ord), arrays)
        # The empty path: its name is "".
        return Norms(values, leaves, paths=((),), treedef=jax.tree.structure(0))


class TensorNorm(NamedTuple):
    """One norm for each leaf, or for each layer of a stacked leaf."""

    call: str = "tensor_norm"
    ord: Ord = None
    stacked: Any = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: Any) -> Norms:
        dims: list[Dims] = []
        # Layers keep their axes, and all others are summed: one norm for each layer.
        for axes, leaf in zip(_layers(self, tree), jax.tree.leaves(tree)):
            dims.append(trees.other_axes(axes, jnp.ndim(leaf)) if axes else None)
        return _norm_of_each_leaf(tree, dims, self, units=False)


class UnitwiseNorm(NamedTuple):
    """One norm for each unit: the weights that feed one output."""

    call: str = "unitwise_norm"
    ord: Ord = None
    axis: Any = None
    stacked: Any = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: Any) -> Norms:
        shapes = mesh.whole_shapes(self.mesh_axes, tree, self.call)
        dims = trees.unit_axes(self.axis, _layers(self, tree), tree, self.call, shapes)
        return _norm_of_each_leaf(tree, dims, self, units=True)


class GroupNorm(NamedTuple):
    """One norm for all leaves that carry a label."""

    labels: Any  # a frozen tree prefix of labels, or a function that makes one
    call: str = "group_norm"
    ord: Ord = None
    mesh_axes: Any = "auto"
    allow_missing: bool = False  # whether a label may have no leaf

    def __call__(self, tree: Any) -> Norms:
        arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        argument = f"{self.call}: labels"
        # A function is called in each trace, so its labels may follow the tree.
        table = static_labels(labels_of(self.labels, tree), self.call)
        label_of_leaf = trees.lookup(
            table, tree, argument, allow_missing=self.allow_missing
        )
        splits = mesh.splits(self.mesh_axes, tree, [None] * len(arrays), self.call)
        # A label whose leaves are None or integers has a norm as well, which is 0.
        labels = set(label_of_leaf)
        if isinstance(self.labels, trees.Prefix):
            labels |= {label for _, label in self.labels.entries}
        check_labels(f"{argument} must be", labels)
        # The order in which JAX flattens a dict: 2 before 10.
        ordered = sorted(labels)
        leaves = []
        for label, split in zip(label_of_leaf, splits):
            leaves.append(Leaf(norm=ordered.index(label), split=split))
        plan = Plan(tuple(leaves), len(ordered), self.ord)
        return Norms(
            norms_of(plan, arrays),
            plan.leaves,
            # The name of a norm is its label.
            paths=tuple((jax.tree_util.DictKey(label),) for label in ordered),
            treedef=jax.tree.structure(dict.fromkeys(ordered, 0)),
            noun="label",
            allow_missing=self.allow_missing,
        )


class OwnNorm(NamedTuple):
    """A norm function of the user's: from a tree to a tree prefix of norms."""

    norm: Callable[[Any], Any]
    call: str = "clip_by"

    def __call__(self, tree: Any) -> Norms:
        # A norm may be a Python number, or an integer, whose dtype holds no limit of
        # 1.5.
        norms = jax.tree.map(as_float, self.norm(tree))
        return norms_of_tree(norms, tree, f"{self.call}: what norm returns")


# Jitted, so that the first update finds what `init` has traced. Inlined, since a call
# in its place is another program to XLA.
@partial(jax.jit, static_argnums=0, inline=True)
def measured(measure: Measure, tree: Any) -> Norms:
    """The norms of a tree of clipped leaves."""
    return measure(tree)


def types_of(function: Callable[..., Any], *args: Any) -> Any:
    """The types of what a function returns.

    `jax.eval_shape` drops the shardings of a mesh that has both Explicit and Auto axes,
    as seen in JAX 0.10.2.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), program.out_avals)


def norms_of_tree(norms: Any, tree: Any, argument: str = "norms") -> Norms:
    """Norms that are given as a tree prefix of the updates.

    Raises:
      ValueError: norms that are no tree prefix of the updates.
    """
    # None as a norm leaves its part of the tree alone.
    norms_and_holes, treedef = jax.tree.flatten(norms, is_leaf=trees.is_none)
    try:
        parts = treedef.flatten_up_to(tree)
    except (TypeError, ValueError):
        raise ValueError(
            f"{argument} must be a tree prefix of the updates, "
            f"{jax.tree.structure(tree)}, got {treedef}."
        ) from None
    leaves: list[Leaf] = []
    count = 0
    for norm, part in zip(norms_and_holes, parts):
        leaf = Leaf(norm=None if norm is None else count)
        leaves += [leaf] * len(jax.tree.leaves(part))
        count += norm is not None
    entries, treedef = jax.tree.flatten_with_path(norms)
    paths = tuple(path for path, _ in entries)
    values = [norm for _, norm in entries]
    holes = trees.holes_of(norms)
    return Norms(values, tuple(leaves), paths, treedef, holes=holes)


def norm_of_norms(norms: Norms) -> jax.Array:
    """The norm of all norms together, without a derivative."""
    # The norms are now the arrays whose norm is taken. Each device has the norms of its
    # own units. All other norms are the same on all devices.
    leaves = [Leaf(norm=0)] * len(norms.values)
    for leaf in norms.leaves:
        if leaf.units_over:
            leaves[leaf.norm] = Leaf(norm=0, split=Split(leaf.units_over))
    (total,) = norms_of(Plan(tuple(leaves), size=1), norms.values)
    return lax.stop_gradient(total)


def _layers(measure: Any, tree: Any) -> list[tuple[int, ...]]:
    # Nothing is stacked: the common case, which looks at no leaf.
    if measure.stacked is None:
        return [()] * len(jax.tree.leaves(tree))
    # Inside shard_map a program sees the shapes of its device's parts.
    shapes = mesh.whole_shapes(measure.mesh_axes, tree, measure.call)
    return trees.stacked_axes(measure.stacked, tree, measure.call, shapes)


def _norm_of_each_leaf(
    tree: Any, dims: list[Dims], measure: Any, *, units: bool
) -> Norms:
    entries, treedef = jax.tree.flatten_with_path(tree)
    splits = mesh.splits(measure.mesh_axes, tree, dims, measure.call)
    leaves, norms_of_units = [], []
    for index, (summed_dims, split) in enumerate(zip(dims, splits)):
        leaf = Leaf(index, summed_dims, split)
        # A vector that is summed whole has one norm, and no units.
        if units and summed_dims is not None:
            norms_of_units.append(index)
            leaf = Leaf(index, summed_dims, Split(split.summed), split.kept_names())
        leaves.append(leaf)
    plan = Plan(tuple(leaves), len(leaves), measure.ord)
    values = norms_of(plan, [jnp.asarray(leaf) for _, leaf in entries])
    paths = tuple(path for path, _ in entries)
    return Norms(
        values,
        plan.leaves,
        paths,
        treedef,
        units=tuple(norms_of_units),
        holes=trees.holes_of(tree),
    )


def check_measure(call: str, ord: Any, **numbers: Any) -> dict[str, Any]:
    """The options of a measure, checked and hashable.

    `numbers` are `mesh_axes`, and `axis`, `stacked` or `labels` where it has them.
    """
    options: dict[str, Any] = {"call": call, "ord": ord}
    for option, value in numbers.items():
        # Lists and dicts become tables of key paths, which have a hash.
        if option == "mesh_axes":
            # A name has a hash, and so has "auto".
            value = value if isinstance(value, str) else mesh.static_axes(value, call)
        elif option == "labels":
            value = static_labels(value, call)
        elif value is not None:
            value = static_numbers(option, value, call)
        options[option] = value
    if ord in (None, "rms", "average"):
        return options
    # The order decides which program is compiled, so a traced one comes too late.
    check_known(f"{call}: ord", ord)
    is_number = isinstance(ord, (int, float, np.number, jax.Array))
    try:
        # True is an int in Python. As an order it is a slip.
        order = float(ord) if is_number and ord is not True else math.nan
    except (TypeError, OverflowError):  # an array, or 10**400
        order = math.nan
    if math.isnan(order) or order <= 0:
        raise ValueError(f"{call}: ord must be {ORDERS}, got {shown(ord)}.")
    # Static arguments must be hashable.
    if isinstance(ord, (np.number, jax.Array)):
        options["ord"] = order
    return options


def static_numbers(option: str, numbers: Any, call: str) -> Any:
    """`axis`, `stacked` or `columns`, as a static argument of a jitted function can be.

    Raises:
      TypeError: a number is an array, as `optax.inject_hyperparams` makes one of every
        number, or a function takes other arguments than path and leaf.
    """
    if is_function(numbers):
        check_takes(f"{call}: {option} must take path and leaf", numbers, 2)
    if numbers is None or is_function(numbers):
        return numbers
    # A tuple of axes is one value. In `columns` it is a part of the tree.
    is_value = trees.is_axes if option != "columns" else trees.is_none
    table = trees.freeze(numbers, is_value)
    for _, number in table.entries:
        # To Python True is 1, so stacked=True would count one axis.
        if isinstance(number, bool):
            raise TypeError(
                f"{call}: {option} must be a whole number, got {shown(number)}: for "
                f"one write {option}=1."
            )
        if isinstance(number, (np.ndarray, jax.Array)):
            raise TypeError(
                f"{call}: {option} must be known when the clipper is built, got "
                f"{shown(number)}: under inject_hyperparams name it in static_args."
            )
    return table


def static_labels(labels: Any, call: str) -> Any:
    """Labels as a static argument: a function, or a frozen tree prefix."""
    # A function is static as it is: equal functions share a compilation.
    if is_function(labels):
        return labels
    table = trees.freeze(labels, lambda x: isinstance(x, str))
    if any(hasattr(label, "dtype") for _, label in table.entries):
        must = f"{call}: labels must be strings or ints"
        raise TypeError(f"{must}, got {shown(labels)}.")
    return table


def labels_of(labels: Any, tree: Any) -> Any:
    """The tree prefix of labels: what a function of the tree makes, or one of path and
    leaf.
    """
    if not is_function(labels):
        return labels
    # Two arguments are path and leaf. One is the tree, as optax.partition calls it.
    try:
        inspect.signature(labels).bind(tree)
    except TypeError:
        paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
        return trees.Prefix(tuple(zip(paths, trees.for_each_leaf(labels, tree, ""))))
    return labels(tree)


def check_labels(must: str, labels: Iterable[Any]) -> None:
    """Raises TypeError for labels that cannot be the keys of one dict in a pytree,
    which JAX sorts. `must` begins the text.
    """
    try:
        sorted(labels)
    except TypeError:
        listed_labels = " and ".join(sorted(map(repr, labels)))
        raise TypeError(
            f"{must} of one kind, which sorts, got {listed_labels}: make all of them "
            "strings, or all of them ints."
        ) from None


# ------------------------------------------------------------------- public functions


def global_norm(tree: Any, *, ord: Ord = None, mesh_axes: MeshAxes = "auto") -> Any:
    """Returns the norm of all leaves together: (sum |x|^p)^(1/p).

    Complex values count by modulus. Integer, bool and float0 leaves, leaves without
    elements, None and `MaskedNode` do not count.

    Args:
      tree: a pytree of arrays.
      ord: the order p: a number above 0, `math.inf`, "rms" or "average". None means 2.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec.

    Returns:
      A scalar, float32 (float64 if a leaf has 64 bits). 0 for an empty tree.

    Raises:
      ValueError: an order that is not above 0, or a mesh axis that is not bound.

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, 2.0])}
      >>> print(optaxclip.global_norm(grads))
      5.477226
    """
    measure = GlobalNorm(**check_measure("global_norm", ord), mesh_axes=mesh_axes)
    return measure(clipped_leaves(tree, "global_norm")).values[0]


def tensor_norm(
    tree: Any, *, ord: Ord = None, stacked: Stacked = None, mesh_axes: MeshAxes = "auto"
) -> Any:
    """Returns the norm of each leaf: (sum |x|^p)^(1/p).

    Args:
      tree: a pytree of arrays.
      ord: the order p: a number above 0, `math.inf`, "rms" or "average". None means 2.
      stacked: which axes of a leaf count layers and are not part of one tensor. 1 is
        the leading axis, as `lax.scan` and `jax.vmap` stack layers, and 2 the two
        leading ones, such as layers and experts. A tuple names axes by position: (1,)
        is axis 1, as MaxText and T5X stack, and (-2,) the last but one. Also a tree
        prefix of these, with None for leaves that are not stacked, or a function of the
        leaf's path ("blocks/w") and the leaf. Leaves that share one value must have the
        same number of layers.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which stacked leaves that are split need.

    Returns:
      A tree of the same structure: a scalar for each leaf (for stacked leaves an array
      with size 1 on all axes but those of layers), None for a leaf that does not count.

    Raises:
      ValueError: an order that is not above 0, a mesh axis that is not bound, an axis
        in `stacked` that a leaf does not have, or leaves of one stack with different
        numbers of layers.

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, 0.0])}
      >>> print(optaxclip.tensor_norm(grads)["w"])
      5.0
    """
    numbers = {"stacked": stacked, "mesh_axes": mesh_axes}
    measure = TensorNorm(**check_measure("tensor_norm", ord), **numbers)
    # Leaves that do not count are None here, and so in the tree of norms.
    return measure(clipped_leaves(tree, "tensor_norm")).tree()


def unitwise_norm(
    tree: Any,
    *,
    axis: Axis = None,
    ord: Ord = None,
    stacked: Stacked = None,
    mesh_axes: MeshAxes = "auto",
) -> Any:
    """Returns the norm of each unit: of the weights that feed one output.

    Args:
      tree: a pytree of arrays.
      axis: the axes that are summed over: an int, a tuple, a tree prefix of these, or a
        function of path and leaf. None chooses by shape, for kernels whose last axis is
        the output: all axes where at most one is longer than 1, otherwise those before
        the last (axis 0 alone at rank 3). In stacked leaves axes count within one
        layer.
      ord: the order: a number above 0, `math.inf`, "rms" or "average". None means 2.
      stacked: which axes of a leaf count layers: 1 for the leading axis, 2 for the two
        leading ones, (1,) for axis 1, a tree prefix of these, or a function of path and
        leaf.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which all leaves that are split need but
        vectors.

    Returns:
      A tree of the same structure, with the summed axes kept at size 1 (a scalar for a
      vector that is taken whole).

    Raises:
      ValueError: an order that is not above 0, an axis that a leaf does not have, a
        rank above 5 without `axis`, or a mesh axis that is not bound.

    Example:
      >>> print(optaxclip.unitwise_norm(jnp.array([[3.0, 1.0], [4.0, 0.0]])))
      [[5. 1.]]

    Reference: Brock et al., High-performance large-scale image recognition without
    normalization, 2021 (arXiv 2102.06171).
    """
    numbers = {"axis": axis, "stacked": stacked, "mesh_axes": mesh_axes}
    measure = UnitwiseNorm(**check_measure("unitwise_norm", ord), **numbers)
    return measure(clipped_leaves(tree, "unitwise_norm")).tree()


def group_norm(
    tree: Any, labels: Any, *, ord: Ord = None, mesh_axes: MeshAxes = "auto"
) -> dict[Any, jax.Array]:
    """Returns one norm for each label, over all leaves that carry it.

    Args:
      tree: a pytree of arrays.
      labels: a tree prefix of labels, a function that makes one from the tree, as in
        `optax.partition`, or a function of a leaf's path ("blocks/w") and the leaf.
      ord: the order: a number above 0, `math.inf`, "rms" or "average". None means 2.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec.

    Returns:
      A dict from label to scalar.

    Raises:
      ValueError: an order that is not above 0, a leaf without a label, or a mesh axis
        that is not bound.
      TypeError: labels that are None, or that do not sort, such as 1 and "a".

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, 0.0])}
      >>> norms = optaxclip.group_norm(grads, {"w": "matrix", "b": "vector"})
      >>> print(norms["matrix"], norms["vector"])
      5.0 1.0
    """
    # Leaves that do not count have labels too, whose norm may then be 0.
    labels = labels_of(labels, trees.unboxed(tree))
    options = check_measure("group_norm", ord, labels=labels)
    measure = GroupNorm(**options, mesh_axes=mesh_axes)
    return measure(clipped_leaves(tree, "group_norm")).tree()
