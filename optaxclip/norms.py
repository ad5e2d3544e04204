"""Norms of pytrees: global, per tensor, per unit, per group; of any order; right for
every finite input.

    order p     (sum |x|^p)^(1/p)         p > 0; None means 2
    order inf   max |x|                   a NaN survives
    "rms"       sqrt(sum |x|^2 / N)
    "average"   sqrt(sum |x|^2) / N       TensorFlow's average norm

Every norm is float32, or float64 when one of its leaves is float64 or complex128.
Squares are summed in float64, inside the compiled program and without turning on JAX's
x64 mode: float64 holds the square of every float32, bfloat16 and float16, so that
nothing overflows, underflows or swamps, in one read of the leaf. A CPU sums large
float32 leaves in float32, and again in float64 where squares have left its range. Where
float64 would not do (TPU, float64 leaves, orders other than 1, 2, 3 and 4), the values
are divided by the largest first, which costs a second read. Values that are subnormal
in float32 (below 1.2e-38) count as 0 where the hardware flushes them, as XLA on CPU
does.

Complex values count by modulus. Integer, bool and float0 leaves, leaves without
elements, None and `MaskedNode` are not measured. An empty tree has norm 0. The
derivative is finite everywhere, and 0 at zero.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import sharding
from .arguments import check_ord
from .leaves import (
    Axis,
    Stacked,
    axes_by_label,
    by_label,
    frozen,
    measured,
    stacked_axes,
    unit_axes,
)
from .sharding import Axes, Split
from .sums import Dims, p_norms

Ord = float | str | None


class Measure(NamedTuple):
    """A norm function with its options, called on a tree. Two with the same content are
    equal, which is how a compiled update is found again.
    """

    norm: Callable[..., Any]
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, tree: Any) -> Any:
        return self.norm(tree, **dict(self.options))

    def without_devices(self) -> "Measure":
        """The same measure where there are no mesh axes to speak of, as in an `init`
        outside shard_map: the norms have the same shapes.
        """
        return self._replace(
            options=tuple(
                (name, None if name == "axes" and value != "auto" else value)
                for name, value in self.options
            )
        )


def measure_of(
    call: str,
    norm: Callable[..., Any],
    ord: Ord = None,
    axes: Axes = "auto",
    **numbers: Any,
) -> Measure:
    """A norm with its options, once they are seen to be right. `numbers`: `axis` and
    `stacked`, where the norm takes them.
    """
    check_ord(call, ord)
    ord = (
        float(ord) if isinstance(ord, (np.number, jax.Array)) else ord
    )  # static arguments must be hashable
    return Measure(
        norm,
        (
            ("ord", ord),
            ("axes", sharding.freeze(axes)),
            *((name, frozen(name, number, call)) for name, number in numbers.items()),
        ),
    )


def global_norm(tree: Any, *, ord: Ord = None, axes: Axes = "auto") -> jax.Array:
    """The norm of all leaves together, as if they were one vector.

    Args:
      tree: a pytree of arrays.
      ord: the order: a number above 0, `math.inf`, "rms" or "average"; None means 2.
      axes: over which mesh axes leaves are split, inside shard_map and pmap: "auto",
        None, names, or a tree prefix of PartitionSpec (see `optaxclip.sharding`).

    Returns:
      A scalar, float32 (float64 if a leaf has 64 bits).

    Example:
      >>> import optaxclip
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, 2.0])}
      >>> print(optaxclip.global_norm(grads))
      5.477226
    """
    check_ord("global_norm", ord)
    tree = measured(tree)
    leaves = jax.tree.leaves(tree)
    return _norms(
        [leaves],
        [None],
        [sharding.splits(axes, tree, [None] * len(leaves), "global_norm")],
        ord,
    )[0]


def tensor_norm(
    tree: Any, *, ord: Ord = None, stacked: Stacked = None, axes: Axes = "auto"
) -> Any:
    """The norm of each leaf by itself.

    Args:
      tree: a pytree of arrays.
      ord: as in `global_norm`.
      stacked: how many leading axes of a leaf count layers and are not part of one
        tensor, as in models that `lax.scan` over stacked layers: an int, a tree prefix
        of ints, or a function of the leaf's path ("blocks/w") and the leaf.
      axes: as in `global_norm`; stacked leaves that are split need a PartitionSpec.

    Returns:
      A tree of the same structure: a scalar for each leaf (shape (layers, 1, ...) where
      leaves are stacked), None where a leaf is not measured.
    """
    check_ord("tensor_norm", ord)
    tree = measured(tree)
    leaves, treedef = jax.tree.flatten(tree)
    skips = stacked_axes(stacked, tree, "tensor_norm")
    dims = [
        tuple(range(skip, jnp.ndim(leaf))) if skip else None
        for skip, leaf in zip(skips, leaves)
    ]
    return _norm_of_each_leaf(
        leaves, treedef, dims, sharding.splits(axes, tree, dims, "tensor_norm"), ord
    )


def unit_norm(
    tree: Any,
    *,
    axis: Axis = None,
    ord: Ord = None,
    stacked: Stacked = None,
    axes: Axes = "auto",
) -> Any:
    """The norm of each unit: of the weights that feed one output (a column of a JAX
    kernel, a filter of a convolution).

    Args:
      tree: a pytree of arrays.
      axis: the axes that are summed over: an int, a tuple, a tree prefix of these, or a
        function of path and leaf. None chooses by shape, for kernels whose last axis is
        the output, as the code of Brock et al. does: over all axes where at most one is
        longer than 1 (scalars, vectors, shapes such as (1, n)), otherwise over axis 0
        at ranks 2 and 3, over (0, 1, 2) at rank 4, over (0, 1, 2, 3) at rank 5. In
        stacked leaves axes count within one layer. Weights laid out as (out, in), as in
        equinox and torch, take `axis=lambda path, x: tuple(range(1, x.ndim)) or None`.
      ord: as in `global_norm`.
      stacked: as in `tensor_norm`.
      axes: as in `global_norm`; leaves that are split need a PartitionSpec, unless they
        are vectors.

    Returns:
      A tree of the same structure, with the summed axes kept at size 1 (a scalar for a
      leaf of rank 1).

    Raises:
      ValueError: a leaf does not have that axis, or a rank above 5 without `axis` and
        more than one axis that is longer than 1.

    Reference: Brock et al., High-performance large-scale image recognition without
    normalization, 2021 (arXiv 2102.06171).
    """
    check_ord("unit_norm", ord)
    tree = measured(tree)
    leaves, treedef = jax.tree.flatten(tree)
    dims = unit_axes(axis, stacked, axes, tree, "unit_norm")
    return _norm_of_each_leaf(
        leaves, treedef, dims, sharding.splits(axes, tree, dims, "unit_norm"), ord
    )


def group_norm(
    tree: Any, labels: Any, *, ord: Ord = None, axes: Axes = "auto"
) -> dict[Any, jax.Array]:
    """One norm for each label, over all leaves that carry it.

    Args:
      tree: a pytree of arrays.
      labels: a tree prefix of labels, or a function that makes one from the tree, as in
        `optax.partition`.
      ord: as in `global_norm`.
      axes: as in `global_norm`.

    Returns:
      A dict from label to scalar.
    """
    groups, _ = by_label(tree, labels, "group_norm")
    return norm_of_each(
        groups, ord=ord, axes=axes_by_label(axes, tree, labels, "group_norm")
    )


def norm_of_each(
    groups: dict[Any, Any], *, ord: Ord = None, axes: Axes = "auto"
) -> dict[Any, jax.Array]:
    """The global norm of each value of a dict."""
    check_ord("group_norm", ord)
    groups = measured(groups)
    leaves = [jax.tree.leaves(group) for group in groups.values()]
    spread = iter(
        sharding.splits(axes, groups, [None] * sum(map(len, leaves)), "group_norm")
    )
    return dict(
        zip(
            groups,
            _norms(
                leaves,
                [None] * len(leaves),
                [[next(spread) for _ in group] for group in leaves],
                ord,
            ),
        )
    )


def _norm_of_each_leaf(
    leaves: list[Any], treedef: Any, dims: list[Dims], spread: list[Split], ord: Ord
) -> Any:
    return jax.tree.unflatten(
        treedef,
        _norms([[leaf] for leaf in leaves], dims, [[split] for split in spread], ord),
    )


def _norms(
    groups: list[list[Any]], dims: list[Dims], spread: list[list[Split]], ord: Ord
) -> list[jax.Array]:
    """One norm for each group of leaves."""
    groups = [[jnp.asarray(leaf) for leaf in group] for group in groups]
    p = float(ord) if isinstance(ord, (int, float, np.number, jax.Array)) else 2.0
    norms = p_norms(p, tuple(dims), tuple(map(tuple, spread)), groups)
    if ord not in ("rms", "average"):
        return norms
    sizes = [
        sum(_summed(leaf, over, split) for leaf, split in zip(group, how))
        for group, over, how in zip(groups, dims, spread)
    ]
    return [_averaged(norm, size, ord) for norm, size in zip(norms, sizes)]


def _averaged(norm: jax.Array, size: Any, ord: Ord) -> jax.Array:
    if isinstance(size, int):
        count = max(size, 1)
        return norm / (np.sqrt(count) if ord == "rms" else count)
    # A symbolic size of jax.export is a number only when the program runs.
    count = jnp.maximum(jnp.asarray(size), 1).astype(norm.dtype)
    return norm / (jnp.sqrt(count) if ord == "rms" else count)


def _summed(leaf: jax.Array, over: Dims, split: Split) -> Any:
    """How many numbers each norm of a leaf sums, on all devices together."""
    here = leaf.size if over is None else math.prod(leaf.shape[i] for i in over)
    return here * sharding.axes_size(split.summed)
