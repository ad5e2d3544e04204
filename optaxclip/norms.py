"""Norms of pytrees: global, per tensor, per unit, per group; of any order; right for every finite input.

    order p     (sum |x|^p)^(1/p)         p > 0; None means 2
    order inf   max |x|                   a NaN survives
    "rms"       sqrt(sum |x|^2 / N)
    "average"   sqrt(sum |x|^2) / N       TensorFlow's average norm

Every norm is float32, or float64 when one of its leaves is float64 or complex128. Squares are summed in float64, inside the compiled program and
without turning on JAX's x64 mode: float64 holds the square of every float32, bfloat16 and float16, so that nothing overflows, underflows or
swamps, in one read of the leaf. Where float64 would not do (TPU, float64 leaves, orders other than 2), the values are divided by the largest first,
which costs a second read. Values that are subnormal in float32 (below 1.2e-38) count as 0 where the hardware flushes them, as XLA on CPU does.

Complex values count by modulus. Integer, bool and float0 leaves, leaves without elements, None and `MaskedNode` are not measured. An empty tree
has norm 0. The derivative is finite everywhere, and 0 at zero.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import prefix
from .arguments import check_ord

Ord = float | str | None
Stacked = Any  # int | tree prefix of int | Callable[[str, jax.Array], int]
Axis = Any  # int | tuple of int | None | tree prefix of these | Callable[[str, jax.Array], int | tuple | None]


def global_norm(tree: Any, *, ord: Ord = None) -> jax.Array:
    """The norm of all leaves together, as if they were one vector.

    Args:
      tree: a pytree of arrays.
      ord: the order: a number above 0, `math.inf`, "rms" or "average"; None means 2.

    Returns:
      A scalar, float32 (float64 if a leaf has 64 bits).

    Example:
      >>> import optaxclip
      >>> print(optaxclip.global_norm({"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, 2.0])}))
      5.477226
    """
    check_ord("global_norm", ord)
    leaves = jax.tree.leaves(measured(tree))
    return _norms([leaves], [None], ord)[0]


def tensor_norm(tree: Any, *, ord: Ord = None, stacked: Stacked = None) -> Any:
    """The norm of each leaf by itself.

    Args:
      tree: a pytree of arrays.
      ord: as in `global_norm`.
      stacked: how many leading axes of a leaf count layers and are not part of one tensor, as in models that `lax.scan` over stacked layers: an int,
        a tree prefix of ints, or a function of the leaf's path ("blocks/w") and the leaf.

    Returns:
      A tree of the same structure: a scalar for each leaf (shape (layers, 1, ...) where leaves are stacked), None where a leaf is not measured.
    """
    check_ord("tensor_norm", ord)
    tree = measured(tree)
    leaves, treedef = jax.tree.flatten(tree)
    skips = _stacked_axes(stacked, tree, "tensor_norm")
    axes = [tuple(range(skip, leaf.ndim)) if skip else None for skip, leaf in zip(skips, leaves)]
    return jax.tree.unflatten(treedef, _norms([[leaf] for leaf in leaves], axes, ord))


def unit_norm(tree: Any, *, axis: Axis = None, ord: Ord = None, stacked: Stacked = None) -> Any:
    """The norm of each unit: of the weights that feed one output (a column of a JAX kernel, a filter of a convolution).

    Args:
      tree: a pytree of arrays.
      axis: the axes that are summed over: an int, a tuple, a tree prefix of these, or a function of path and leaf. None chooses by rank, for kernels whose
        last axis is the output, as Brock et al. do: vectors and scalars whole, ranks 2 and 3 over axis 0, rank 4 over (0, 1, 2), rank 5 over (0, 1, 2, 3).
        In stacked leaves axes count within one layer.
      ord: as in `global_norm`.
      stacked: as in `tensor_norm`.

    Returns:
      A tree of the same structure, with the summed axes kept at size 1 (a scalar where a vector is taken whole).

    Raises:
      ValueError: a leaf does not have that axis, or a rank above 5 without `axis`.

    Reference: Brock et al., High-performance large-scale image recognition without normalization, 2021 (arXiv 2102.06171).
    """
    check_ord("unit_norm", ord)
    tree = measured(tree)
    leaves, treedef = jax.tree.flatten(tree)
    axes = _unit_axes(axis, stacked, tree, "unit_norm")
    return jax.tree.unflatten(treedef, _norms([[leaf] for leaf in leaves], axes, ord))


def group_norm(tree: Any, labels: Any, *, ord: Ord = None) -> dict[Any, jax.Array]:
    """One norm for each label, over all leaves that carry it.

    Args:
      tree: a pytree of arrays.
      labels: a tree prefix of labels, or a function that makes one from the tree, as in `optax.partition`.
      ord: as in `global_norm`.

    Returns:
      A dict from label to scalar.
    """
    return norm_of_each(by_label(tree, labels, "group_norm")[0], ord=ord)


def norm_of_each(groups: dict[Any, Any], *, ord: Ord = None) -> dict[Any, jax.Array]:
    """The global norm of each value of a dict."""
    check_ord("group_norm", ord)
    leaves = [jax.tree.leaves(measured(group)) for group in groups.values()]
    return dict(zip(groups, _norms(leaves, [None] * len(leaves), ord)))


def by_label(tree: Any, labels: Any, call: str) -> tuple[dict[Any, dict[str, Any]], Callable[[Any], Any]]:
    """The leaves sorted by label, {label: {path: leaf}}, and the function that puts such a dict back into the tree's shape."""
    table = labels(tree) if callable(labels) else labels
    if not isinstance(table, prefix.Prefix):
        table = prefix.freeze(table, lambda x: isinstance(x, str))
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    keys = [(label, prefix.name(path)) for label, (path, _) in zip(prefix.lookup(table, tree, f"{call}: labels"), paths)]
    groups: dict[Any, dict[str, Any]] = {label: {} for label in sorted({label for label, _ in keys}, key=str)}
    for (label, path), (_, leaf) in zip(keys, paths):
        groups[label][path] = leaf
    return groups, lambda sorted_leaves: jax.tree.unflatten(treedef, [sorted_leaves[label][path] for label, path in keys])


def measured(tree: Any) -> Any:
    """The tree with None in the place of every leaf that is not measured: no float or complex dtype, or no elements."""
    return jax.tree.map(lambda leaf: leaf if _is_measured(leaf) else None, tree)


def _is_measured(leaf: Any) -> bool:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return bool(jnp.issubdtype(dtype, jnp.inexact)) and 0 not in jnp.shape(leaf)


def _stacked_axes(stacked: Stacked, tree: Any, call: str) -> list[int]:
    """For each leaf, how many leading axes count layers."""
    counts = _for_each_leaf(stacked, tree, f"{call}: stacked", lambda x: isinstance(x, int))
    for (path, leaf), count in zip(jax.tree_util.tree_flatten_with_path(tree)[0], counts):
        known = count is None or (isinstance(count, (int, np.integer)) and 0 <= count <= jnp.ndim(leaf))
        if not known:
            raise ValueError(
                f"{call}: stacked must be a number of leading axes, from 0 to {jnp.ndim(leaf)} for the leaf {prefix.name(path)!r} of shape {jnp.shape(leaf)}, got {count!r}."
            )
    return [int(count or 0) for count in counts]


def _unit_axes(axis: Axis, stacked: Stacked, tree: Any, call: str) -> list[tuple[int, ...] | None]:
    """For each leaf, the axes to sum over; None for all of them without keeping any."""
    chosen = _for_each_leaf(axis, tree, f"{call}: axis", lambda x: isinstance(x, tuple) and all(isinstance(i, int) for i in x))
    axes = []
    for (path, leaf), value, skip in zip(jax.tree_util.tree_flatten_with_path(tree)[0], chosen, _stacked_axes(stacked, tree, call)):
        rank = jnp.ndim(leaf) - skip
        if value is None:
            if rank > 5:
                raise ValueError(f"{call}: axis must be given for the leaf {prefix.name(path)!r} of rank {rank}: there is no rule above rank 5.")
            inside = tuple(range({2: 1, 3: 1, 4: 3, 5: 4}.get(rank, rank)))
        else:
            wanted = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(i, (int, np.integer)) and -rank <= i < rank for i in wanted):
                raise ValueError(f"{call}: axis={value!r} does not fit the leaf {prefix.name(path)!r}, a tensor of rank {rank}: give an axis for each leaf.")
            inside = tuple(sorted(i % rank for i in wanted))
        whole = value is None and rank <= 1 and not skip
        axes.append(None if whole else tuple(i + skip for i in inside))
    return axes


def _for_each_leaf(value: Any, tree: Any, argument: str, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """One value for each leaf, from a function of path and leaf or from a tree prefix."""
    if callable(value):
        return [value(prefix.name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    table = value if isinstance(value, prefix.Prefix) else prefix.freeze(value, is_leaf)
    return prefix.lookup(table, tree, argument)


# From here on: lists of groups. A group is a list of leaves that share one norm, together with the axes to sum over (None: all).


def _norms(groups: list[list[Any]], axes: list[tuple[int, ...] | None], ord: Ord) -> list[jax.Array]:
    """One norm for each group."""
    groups = [[jnp.asarray(leaf) for leaf in group] for group in groups]
    p = float(ord) if isinstance(ord, (int, float, np.number, jax.Array)) else 2.0
    norms = _p_norms(p, tuple(axes), groups)
    if ord not in ("rms", "average"):
        return norms
    sizes = [sum(_summed(leaf, over) for leaf in group) for group, over in zip(groups, axes)]
    return [norm / (np.sqrt(max(size, 1)) if ord == "rms" else max(size, 1)) for norm, size in zip(norms, sizes)]


def _summed(leaf: jax.Array, over: tuple[int, ...] | None) -> int:
    return leaf.size if over is None else int(np.prod([leaf.shape[i] for i in over]))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _p_norms(p: float, axes: tuple[tuple[int, ...] | None, ...], groups: list[list[jax.Array]]) -> list[jax.Array]:
    if not any(groups):
        return [jnp.zeros((), jnp.float32) for _ in groups]
    if p == np.inf:
        return [_largest(group, over) for group, over in zip(groups, axes)]

    def summed_in(wide: Any, groups: list[list[jax.Array]]) -> list[jax.Array]:
        return [_root_of_sum(p, group, over, wide) for group, over in zip(groups, axes)]

    # A TPU has no float64: what XLA puts in its place is slow and has the range of float32.
    norms = lax.platform_dependent(groups, tpu=partial(summed_in, np.float32), default=partial(summed_in, np.float64))
    # Without the barrier XLA copies the sum over all leaves into the kernel of every leaf: at 2,000 leaves that is a tenth of the compile time.
    return lax.optimization_barrier(norms)


@_p_norms.defjvp
def _p_norms_jvp(p, axes, primals, tangents):
    """d norm = sum (|x| / norm)^(p-1) d|x|. Written by hand, since sqrt has no finite derivative at 0 and the squares may overflow."""
    norms = _p_norms(p, axes, *primals)
    tangent_norms = []
    for norm, over, group, directions in zip(norms, axes, primals[0], tangents[0]):
        terms = [_weights(p, over, norm, leaf) * _along(leaf, direction) for leaf, direction in zip(group, directions)]
        tangent_norms.append(_total([jnp.sum(term, over, keepdims=over is not None).astype(norm.dtype) for term in terms], norm.dtype))
    return norms, tangent_norms


def _weights(p: float, over: tuple[int, ...] | None, norm: jax.Array, leaf: jax.Array) -> jax.Array:
    """The derivative of the norm with respect to each modulus."""
    size = jnp.abs(leaf).astype(norm.dtype)
    if p == np.inf:
        hit = (size == norm) & (norm > 0)
        return hit / jnp.maximum(jnp.sum(hit, over, keepdims=over is not None), 1).astype(norm.dtype)
    # Two wheres: at 0 neither the quotient nor, for p < 1, its power exists, and the unused branch of a where must stay finite as well.
    share = _share(size, jnp.where(norm > 0, norm, 1.0))
    return jnp.where(share > 0, jnp.where(share > 0, share, 1.0) ** (p - 1.0), 0.0)


def _share(size: jax.Array, whole: jax.Array) -> jax.Array:
    """size / whole. XLA multiplies an array by the reciprocal of a scalar, which flushes to 0 above 2^126; so large numbers come down first."""
    large = whole > 1
    return jnp.where(large, size * 0.125, size) / jnp.where(large, whole * 0.125, whole)


def _along(leaf: jax.Array, direction: jax.Array) -> jax.Array:
    """The change of |leaf| along a direction."""
    if not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return (jnp.sign(leaf) * direction).astype(_real(leaf))
    size = jnp.abs(leaf)
    return jnp.real(jnp.conj(leaf / jnp.where(size > 0, size, 1.0)) * direction)


def _root_of_sum(p: float, group: list[jax.Array], over: tuple[int, ...] | None, wide: Any) -> jax.Array:
    """(sum |x|^p)^(1/p) with sums in the dtype `wide`."""
    dtype = _norm_dtype(group)
    if p in (1.0, 2.0) and dtype == np.float32 and wide == np.float64:
        return _wide_root(p, group, over, np.float64).astype(dtype)
    largest = _largest(group, over)
    divisor = jnp.where((largest > 0) & (largest < jnp.inf), largest, 1.0)
    shares = [_share(jnp.abs(leaf).astype(dtype), divisor) for leaf in group]
    return divisor * _wide_root(p, shares, over, np.promote_types(wide, dtype)).astype(dtype)


def _wide_root(p: float, group: list[jax.Array], over: tuple[int, ...] | None, wide: Any) -> jax.Array:
    with jax.enable_x64(True):  # for these operations only, whatever the program around them uses
        total = _total([jnp.sum(_power(p, leaf, wide), over, keepdims=over is not None) for leaf in group], wide)
        root = jnp.sqrt(total) if p == 2 else total ** (1.0 / p)
        return lax.convert_element_type(root, np.promote_types(np.float32, _norm_dtype(group)))


def _power(p: float, leaf: jax.Array, wide: Any) -> jax.Array:
    """|x|^p in the dtype `wide`."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return _power(p, jnp.real(leaf), wide) + _power(p, jnp.imag(leaf), wide) if p == 2 else _power(p, jnp.abs(leaf), wide)
    if p == 2:
        # Converted before it is squared: that keeps it exact, and apart from the float32 copy that an optimizer makes of 16-bit gradients.
        x = lax.convert_element_type(leaf, wide)
        return x * x
    return lax.convert_element_type(jnp.abs(leaf) ** p if p != 1 else jnp.abs(leaf), wide)


def _largest(group: list[jax.Array], over: tuple[int, ...] | None) -> jax.Array:
    """max |x|. NaN is counted apart, since a maximum over several devices drops it."""
    dtype = _norm_dtype(group)
    largest, broken = jnp.zeros((), dtype), jnp.zeros((), bool)
    for leaf in group:
        size = jnp.abs(leaf).astype(dtype)
        largest = jnp.maximum(largest, jnp.max(size, over, keepdims=over is not None))
        broken = broken | jnp.any(jnp.isnan(size), over, keepdims=over is not None)
    return jnp.where(broken, jnp.nan, largest)


def _total(terms: list[jax.Array], dtype: Any) -> jax.Array:
    """The sum, as a chain of adds: XLA merges the all-reduces of such a chain, not those of a stack."""
    return sum(terms[1:], start=terms[0]) if terms else jnp.zeros((), dtype)


def _real(leaf: jax.Array) -> Any:
    return jnp.finfo(leaf.dtype).dtype


def _norm_dtype(group: list[jax.Array]) -> Any:
    return np.promote_types(np.float32, np.float64 if any(_real(leaf) == np.float64 for leaf in group) else np.float32)
