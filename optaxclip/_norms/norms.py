"""Norms of pytrees: global, of each tensor, of each unit, of each group.

    order p     (sum |x|^p)^(1/p)         p > 0, None means 2
    order inf   max |x|                   a NaN survives
    "rms"       sqrt(sum |x|^2 / N)
    "average"   sqrt(sum |x|^2) / N       TensorFlow's average norm

A measure is a hashable description of norms: which leaves have a norm together, over
which of their axes, and of which order. Called on a tree of leaves to clip, it returns
their `Norms`. A call passes through:

    public function or clipper
    -> measure                   which axes are summed, and which devices have a part
    -> `_measure_leaves`         the same for each leaf, as `LeafSpec`
    -> `norms_of` in reduce.py   the arithmetic
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import _trees as trees
from .._arguments.checks import broadcasts_to
from .._arguments.prefixes import Prefix, lookup
from .._arguments.updates import warn_of_integers
from .._devices import mesh
from .._devices.mesh import MeshAxes, Split
from .._devices.platforms import traced_once
from .._numbers import as_float
from .._trees import PyTree, leaves_to_clip
from .axes import Axis, Stacked, axes_besides_layers, stacked_axes, unit_axes
from .options import Ord, check_labels, checked_options, labels_of, static_labels
from .reduce import norms_of
from .specs import LeafSpec, NormPlan
from .sums import Axes


class Norms(NamedTuple):
    """The norms of a tree. To JAX only `values` are arrays."""

    # float[] for a norm, the same on all devices
    # float[layers, 1, 1] for a stacked leaf: all layers, also those of other devices
    # float[1, units] for a leaf with units: only those units that this device holds
    values: list[Any]
    specs: tuple[LeafSpec, ...]  # of each leaf
    paths: tuple[Any, ...]  # of each norm: its key path in the tree of norms
    treedef: Any  # of the tree of norms, as norm functions return it
    part_in_errors: str = "leaf"  # what errors call a part that has a norm
    allow_missing: bool = False  # whether limits may name norms that do not exist
    holes: tuple[Any, ...] = ()  # key paths of parts without a norm, such as None

    def tree(self) -> PyTree:
        """The norms as a tree. It fails for a pytree class of the user's that checks
        the shapes of its arrays, since norms have others.
        """
        return self.treedef.unflatten(self.local_values())

    def local_values(self) -> list[Any]:
        """The norms. A stacked leaf has only the layers that this device holds."""
        values = list(self.values)
        for spec in self.specs:
            if spec.norm_index is not None:
                values[spec.norm_index] = spec.local_value(self.values)
        return values

    def gathered(self, local_values: Sequence[Any]) -> list[Any]:
        """The norms of all layers, from those of the layers that this device holds: the
        inverse of `local_values`.
        """
        values = list(local_values)
        for spec in self.specs:
            if spec.norm_index is not None and spec.mesh_axes_of_layers:
                layers_here = values[spec.norm_index]
                layers = mesh.placed_among_zeros(layers_here, spec.mesh_axes_of_kept)
                values[spec.norm_index] = lax.psum(layers, spec.mesh_axes_of_layers)
        return values


jax.tree_util.register_pytree_node(
    Norms,
    lambda norms: ((norms.values,), norms._replace(values=())),
    lambda norms, children: norms._replace(values=children[0]),
)


# -------------------------------------------------------------------------- measures


class Measure(Protocol):
    """A description of norms. Hashable, so that equal clippers share a program."""

    def __call__(self, tree: PyTree) -> Norms: ...


class GlobalNorm(NamedTuple):
    """One norm for all leaves together."""

    call: str = "global_norm"
    ord: Ord = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: PyTree) -> Norms:
        splits = mesh.splits(self.mesh_axes, tree, self.call)
        # The tree of norms is a single leaf. Its path is empty, and its name "".
        return _measure_leaves(
            tree, splits, self.ord, norm_tree=0, norm_indices=[0] * len(splits)
        )


class TensorNorm(NamedTuple):
    """One norm for each leaf, or for each layer of a stacked leaf."""

    call: str = "tensor_norm"
    ord: Ord = None
    stacked: Any = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: PyTree) -> Norms:
        splits = mesh.splits(self.mesh_axes, tree, self.call)
        shapes = mesh.global_shapes(splits, tree)
        layer_axes = stacked_axes(self.stacked, tree, self.call, shapes)
        return _measure_leaves(
            tree,
            splits,
            self.ord,
            norm_tree=tree,
            norm_indices=range(len(splits)),
            summed_axes_of_leaves=axes_besides_layers(layer_axes, tree),
        )


class UnitwiseNorm(NamedTuple):
    """One norm for each unit: the weights that feed one output."""

    call: str = "unitwise_norm"
    ord: Ord = None
    axis: Any = None
    stacked: Any = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: PyTree) -> Norms:
        splits = mesh.splits(self.mesh_axes, tree, self.call)
        shapes = mesh.global_shapes(splits, tree)
        layer_axes = stacked_axes(self.stacked, tree, self.call, shapes)
        summed_axes = unit_axes(self.axis, layer_axes, tree, self.call, shapes)
        return _measure_leaves(
            tree,
            splits,
            self.ord,
            norm_tree=tree,
            norm_indices=range(len(splits)),
            summed_axes_of_leaves=summed_axes,
            has_units=True,
        )


class GroupNorm(NamedTuple):
    """One norm for all leaves that carry a label."""

    labels: Any  # a frozen tree prefix of labels, or a function that makes one
    call: str = "group_norm"
    ord: Ord = None
    mesh_axes: Any = "auto"
    allow_missing: bool = False  # whether a label may have no leaf
    argument: str = "labels"  # the argument of the call that has the labels

    def __call__(self, tree: PyTree) -> Norms:
        argument = f"{self.call}: {self.argument}"
        # A function is called in each trace, so its labels may follow the tree.
        table = static_labels(labels_of(self.labels, tree), self.call)
        label_of_leaf = lookup(table, tree, argument, allow_missing=self.allow_missing)
        # A label that only None and integers carry has the norm 0.
        labels = set(label_of_leaf)
        if isinstance(self.labels, Prefix):
            # A tree of labels made by `jax.tree.map` has None where the updates have.
            for _, label in self.labels.entries:
                if label is not None:
                    labels.add(label)
        check_labels(f"{argument} must be", labels)
        # The order in which JAX flattens a dict: 2 before 10.
        index_of_label = {label: index for index, label in enumerate(sorted(labels))}
        norm_indices = [index_of_label[label] for label in label_of_leaf]
        splits = mesh.splits(self.mesh_axes, tree, self.call)
        norms = _measure_leaves(
            tree, splits, self.ord, norm_tree=index_of_label, norm_indices=norm_indices
        )
        return norms._replace(part_in_errors="label", allow_missing=self.allow_missing)


class UserNorm(NamedTuple):
    """A norm function of the user's: from a tree to a tree prefix of norms."""

    norm: Callable[[Any], Any]
    call: str = "clip_by"

    def __call__(self, tree: PyTree) -> Norms:
        # A norm may be a Python number or an integer array. Limits take the dtype of
        # the norm, and as an integer a limit of 1.5 would be 1.
        norms = jax.tree.map(as_float, self.norm(tree))
        return given_norms(norms, tree, f"{self.call}: what norm returns")


def _measure_leaves(
    tree: PyTree,
    splits: Sequence[Split],
    ord: Ord,
    *,
    norm_tree: PyTree,
    norm_indices: Sequence[int],
    summed_axes_of_leaves: Sequence[Axes] | None = None,
    has_units: bool = False,
) -> Norms:
    """The norms of a tree, each of one or more leaves.

    Args:
      tree: the leaves.
      splits: for each leaf the mesh axes that split it.
      ord: the order of the norms.
      norm_tree: a tree with one leaf for each norm. Only its structure is used.
      norm_indices: for each leaf the index of its norm.
      summed_axes_of_leaves: for each leaf the axes that are summed. None means all.
      has_units: whether the other axes index units. Otherwise they index layers.
    """
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    if summed_axes_of_leaves is None:
        summed_axes_of_leaves = [None] * len(arrays)
    specs = []
    for array, split, norm_index, summed_axes in zip(
        arrays, splits, norm_indices, summed_axes_of_leaves
    ):
        split_of_norm = split.of_norm(array.shape, summed_axes)
        spec = LeafSpec(
            norm_index,
            summed_axes=summed_axes,
            mesh_axes_of_summed=split_of_norm.mesh_axes_of_summed,
            mesh_axes_of_kept=split_of_norm.mesh_axes_of_kept,
            # A leaf that is summed whole has one norm, and no units.
            has_units=has_units and summed_axes is not None,
        )
        specs.append(spec)
    entries, treedef = jax.tree.flatten_with_path(norm_tree)
    plan = NormPlan(tuple(specs), len(entries), ord)
    return Norms(
        values=norms_of(plan, arrays),
        specs=plan.specs,
        paths=tuple(path for path, _ in entries),
        treedef=treedef,
        holes=trees.holes_of(norm_tree),
    )


# Cached by JAX: `init` traces it for the shapes, and the first update reuses that
# trace.
@partial(traced_once, static_argnums=0)
def measured(measure: Measure, tree: PyTree) -> Norms:
    """The norms of a tree of leaves to clip."""
    return measure(tree)


# ------------------------------------------------------------------------ given norms


def given_norms(norms: PyTree, tree: PyTree, argument: str = "norms") -> Norms:
    """The `Norms` of a tree that are given as a tree prefix of it.

    Raises:
      ValueError: norms that are not a tree prefix of the updates, or do not broadcast
        to their leaves.
    """
    # Leaves under a None are neither measured nor clipped.
    norms_and_holes, structure = jax.tree.flatten(norms, is_leaf=trees.is_none)
    try:
        parts = structure.flatten_up_to(tree)
    except (TypeError, ValueError):
        raise ValueError(
            f"{argument} must be a tree prefix of the updates, "
            f"{jax.tree.structure(tree)}, got {structure}."
        ) from None
    specs: list[LeafSpec] = []
    norm_count = 0
    for norm, part in zip(norms_and_holes, parts):
        leaves = jax.tree.leaves(part)
        if norm is None:
            specs += [LeafSpec(norm_index=None)] * len(leaves)
            continue
        for leaf in leaves:
            if not broadcasts_to(norm.shape, jnp.shape(leaf)):
                raise ValueError(
                    f"{argument} must be one number for each part of the updates, or "
                    "arrays that broadcast to their leaves, got a norm of shape "
                    f"{norm.shape} for a leaf of shape {jnp.shape(leaf)}."
                )
        specs += [LeafSpec(norm_index=norm_count)] * len(leaves)
        norm_count += 1
    entries, treedef = jax.tree.flatten_with_path(norms)
    return Norms(
        values=[norm for _, norm in entries],
        specs=tuple(specs),
        paths=tuple(path for path, _ in entries),
        treedef=treedef,
        holes=trees.holes_of(norms),
    )


def total_norm(norms: Norms) -> Array:
    """The L2 norm of the norms, without a derivative. The norms may be of any order
    p.
    """
    # The norms themselves are the leaves here. Norms of units are split over devices as
    # the units are, and all others are the same on all devices.
    specs = [LeafSpec(norm_index=0)] * len(norms.values)
    for spec in norms.specs:
        if spec.mesh_axes_of_units:
            specs[spec.norm_index] = LeafSpec(
                norm_index=0, mesh_axes_of_summed=spec.mesh_axes_of_units
            )
    plan = NormPlan(tuple(specs), norm_count=1, ord=None)
    (total,) = norms_of(plan, norms.values)
    return lax.stop_gradient(total)


# ------------------------------------------------------------------- public functions


def global_norm(tree: PyTree, *, ord: Ord = None, mesh_axes: MeshAxes = "auto") -> Any:
    """Returns the norm of all leaves together: (sum |x|^p)^(1/p).

    Complex values count by modulus. Integer, bool and float0 leaves, leaves without
    elements, None and `MaskedNode` do not count.

    Args:
      tree: a pytree of arrays.
      ord: the order p: a number above 0, `math.inf`, "rms" or "average". None means 2.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None (each device measures its own
        part), or a tree prefix of PartitionSpec.

    Returns:
      A scalar, float32 (float64 if a leaf has 64 bits). 0 for an empty tree.

    Raises:
      ValueError: an order that is not above 0, or a mesh axis that is not bound.

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, 2.0])}
      >>> print(optaxclip.global_norm(grads))
      5.477226
    """
    options = checked_options("global_norm", ord=ord, mesh_axes=mesh_axes)
    return _tree_of_norms(GlobalNorm(**options), tree)


def tensor_norm(
    tree: PyTree,
    *,
    ord: Ord = None,
    stacked: Stacked = None,
    mesh_axes: MeshAxes = "auto",
) -> Any:
    """Returns the norm of each leaf: (sum |x|^p)^(1/p).

    Args:
      tree: a pytree of arrays.
      ord: the order p: a number above 0, `math.inf`, "rms" or "average". None means 2.
      stacked: which axes of a leaf index its layers, each a tensor of its own. 1 is
        the leading axis, as `lax.scan` and `jax.vmap` stack layers, and 2 the two
        leading ones, such as layers and experts. A tuple names axes by position: (1,)
        is axis 1, as MaxText and T5X stack, and (-2,) the last but one. Also a tree
        prefix of these, with None for leaves that are not stacked, or a function of the
        leaf's path ("blocks/w") and the leaf. Leaves that share one value must have the
        same number of layers.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None (each device measures its own
        part), or a tree prefix of PartitionSpec, which stacked leaves that are split
        need.

    Returns:
      A tree of the same structure: a scalar for each leaf (for stacked leaves an array
      with size 1 on all axes but those of layers), None for a leaf that does not count.

    Raises:
      ValueError: an order that is not above 0, a mesh axis that is not bound, an axis
        in `stacked` that a leaf does not have, or leaves of one stack with different
        numbers of layers.
      TypeError: a bool or an array as an axis.

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, 0.0])}
      >>> print(optaxclip.tensor_norm(grads)["w"])
      5.0
    """
    options = checked_options(
        "tensor_norm", ord=ord, stacked=stacked, mesh_axes=mesh_axes
    )
    return _tree_of_norms(TensorNorm(**options), tree)


def unitwise_norm(
    tree: PyTree,
    *,
    axis: Axis = None,
    ord: Ord = None,
    stacked: Stacked = None,
    mesh_axes: MeshAxes = "auto",
) -> Any:
    """Returns the norm of each unit: of the weights that feed one output.

    | shape of a leaf or layer              | `axis=None` sums |
    |---------------------------------------|------------------|
    | at most one axis is longer than 1     | all axes         |
    | (in, out)                             | axis 0           |
    | (in, heads, size)                     | axis 0           |
    | (height, width, in, out)              | axes 0, 1, 2     |
    | (depth, height, width, in, out)       | axes 0, 1, 2, 3  |

    Args:
      tree: a pytree of arrays.
      axis: the axes that are summed over: an int, a tuple, a tree prefix of these, or a
        function of path and leaf. None chooses by shape, for kernels whose last axis is
        the output, as the table says. In stacked leaves axes count within one layer.
      ord: the order: a number above 0, `math.inf`, "rms" or "average". None means 2.
      stacked: which axes of a leaf index its layers: 1 for the leading axis, 2 for the
        two leading ones, (1,) for axis 1, a tree prefix of these, or a function of path
        and leaf.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None (each device measures its own
        part), or a tree prefix of PartitionSpec, required for every split leaf except
        vectors.

    Returns:
      A tree of the same structure, with the summed axes kept at size 1 (a scalar for a
      vector that is taken whole).

    Raises:
      ValueError: an order that is not above 0, an axis that a leaf does not have, a
        rank above 5 without `axis`, or a mesh axis that is not bound.
      TypeError: a bool or an array as an axis.

    Example:
      >>> print(optaxclip.unitwise_norm(jnp.array([[3.0, 1.0], [4.0, 0.0]])))
      [[5. 1.]]

    Reference: Brock et al., High-performance large-scale image recognition without
    normalization, 2021 (arXiv 2102.06171).
    """
    options = checked_options(
        "unitwise_norm", ord=ord, axis=axis, stacked=stacked, mesh_axes=mesh_axes
    )
    return _tree_of_norms(UnitwiseNorm(**options), tree)


def group_norm(
    tree: PyTree, labels: Any, *, ord: Ord = None, mesh_axes: MeshAxes = "auto"
) -> dict[Any, Array]:
    """Returns one norm for each label, over all leaves that carry it.

    Args:
      tree: a pytree of arrays.
      labels: a tree prefix of labels, a function that makes one from the tree, as in
        `optax.partition`, or a function of a leaf's path ("blocks/w") and the leaf that
        returns its label.
      ord: the order: a number above 0, `math.inf`, "rms" or "average". None means 2.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None (each device measures its own
        part), or a tree prefix of PartitionSpec.

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
    # Leaves that do not count have labels too. A label that only such leaves carry has
    # the norm 0.
    labels = labels_of(labels, trees.unboxed(tree))
    options = checked_options("group_norm", ord=ord, labels=labels, mesh_axes=mesh_axes)
    return _tree_of_norms(GroupNorm(**options), tree)


def _tree_of_norms(
    measure: GlobalNorm | TensorNorm | UnitwiseNorm | GroupNorm, tree: PyTree
) -> Any:
    """The norms of the leaves that count, as a tree, with None for all others."""
    leaves = leaves_to_clip(tree, measure.call)
    if not jax.tree.leaves(leaves):
        warn_of_integers(measure.call, tree)
    return measure(leaves).tree()
