"""Norms of pytrees: global, of each tensor, of each unit, of each group.

    order p     (sum |x|^p)^(1/p)         p > 0, None means 2
    order inf   max |x|                   a NaN survives
    "rms"       sqrt(sum |x|^2 / N)
    "average"   sqrt(sum |x|^2) / N       TensorFlow's average norm

They are right for every finite input: no square overflows or is lost. The derivative is
finite everywhere, and 0 at zero.
"""

from __future__ import annotations

from typing import Any

import jax

from .._other_names import with_our_names
from ._leaves import (
    Axis,
    clipped_leaves,
    labels_of,
    static_labels,
    unboxed,
)
from ._measures import (
    GlobalNorm,
    GroupNorm,
    Ord,
    TensorNorm,
    UnitwiseNorm,
    check_ord,
)
from ._mesh_axes import MeshAxes
from ._stacked import Stacked


@with_our_names
def global_norm(
    tree: Any, *, ord: Ord = None, mesh_axes: MeshAxes = "auto"
) -> Any:
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
    check_ord("global_norm", ord)
    measure = GlobalNorm("global_norm", ord, mesh_axes)
    return measure(clipped_leaves(tree)).blocks[0]


@with_our_names
def tensor_norm(
    tree: Any,
    *,
    ord: Ord = None,
    stacked: Stacked = None,
    mesh_axes: MeshAxes = "auto",
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
    check_ord("tensor_norm", ord)
    # Leaves that do not count are None here, and so in the tree of norms.
    measure = TensorNorm("tensor_norm", ord, stacked, mesh_axes)
    return measure(clipped_leaves(tree)).returned()


@with_our_names
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
    check_ord("unitwise_norm", ord)
    measure = UnitwiseNorm("unitwise_norm", ord, axis, stacked, mesh_axes)
    return measure(clipped_leaves(tree)).returned()


@with_our_names
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

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, 0.0])}
      >>> norms = optaxclip.group_norm(grads, {"w": "matrix", "b": "vector"})
      >>> print(norms["matrix"], norms["vector"])
      5.0 1.0
    """
    check_ord("group_norm", ord)
    # Leaves that do not count have labels too, whose norm may then be 0.
    table = static_labels(labels_of(labels, unboxed(tree)))
    return GroupNorm(table, "group_norm", ord, mesh_axes)(
        clipped_leaves(tree)
    ).returned()
