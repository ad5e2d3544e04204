"""The norms of groups of leaves: (sum |x|^p)^(1/p), and max |x| for p = inf.

    order 2 on GPU and TPU     three sums of squares in float32, in one read (_bins)
    orders 1 to 4 on a CPU     sums in float64, in one read (_sums_on_cpu)
    all else                   divided by the largest first, which is a second read

The result is a list of blocks: the norms of groups that are summed whole, as one
vector, and after it an array for each group that keeps dimensions. The norm of a single
group is a scalar.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._bins import (
    Bins,
    Dims,
    bins_of_leaf,
    root,
    sum_on_gpu,
    sum_on_tpu,
)
from ._collectives import Split, counted_once, join_devices, names_of_blocks
from ._modulus import divided, modulus, norm_dtype, tangent_of_modulus
from ._platform import per_platform
from ._small_leaves import bins_of_leaves, join_small
from ._sums_on_cpu import sum_squares

# Orders whose powers of any float32 number stay far inside the range of float64.
DIRECT = (1.0, 2.0, 3.0, 4.0)


class Group(NamedTuple):
    """Leaves that share a norm, or one leaf with an array of norms."""

    leaves: list[Any]
    # The dimensions of each leaf that are summed, which stay with size 1. None: all,
    # and none stays.
    dims: Dims
    splits: list[Split]  # of each leaf


Layout = tuple[tuple[Dims, tuple[Split, ...]], ...]  # of each group, without its leaves
Blocks = list[jax.Array]


def group_norms(p: float, groups: list[Group]) -> Blocks:
    """The norms of some groups, in blocks. A group without leaves has norm 0."""
    layout = tuple((group.dims, tuple(group.splits)) for group in groups)
    return _norms(p, layout, [list(map(jnp.asarray, g.leaves)) for g in groups])


def scatter(blocks: Blocks, layout: Layout) -> Blocks:
    """For each group its own norm, out of the blocks."""
    arrays = iter(blocks[any(dims is None for dims, _ in layout) :])
    row, found = 0, []
    for dims, _ in layout:
        if dims is None:
            found.append(blocks[0][row] if blocks[0].ndim else blocks[0])
            row += 1
        else:
            found.append(next(arrays))
    return found


@partial(jax.custom_jvp[Blocks], nondiff_argnums=(0, 1))
def _norms(p: float, layout: Layout, groups: list[list[jax.Array]]) -> Blocks:
    dtype = norm_dtype(groups)
    if p == np.inf:
        blocks = _largest(dtype, layout, groups)
    elif dtype == np.float64:
        blocks = _by_shares(p, np.float64, layout, groups)
    else:
        shares = partial(_by_shares, p, np.float32, layout)
        return per_platform(
            groups,
            cpu=partial(_in_float64, p, layout),
            gpu=partial(_in_bins_on_gpu, layout) if p == 2 else shares,
            tpu=partial(_in_bins, sum_on_tpu, layout) if p == 2 else shares,
        )
    return blocks


@_norms.defjvp
def _norms_jvp(p: float, layout: Layout, primals: Any, tangents: Any) -> Any:
    """d norm = sum (|x| / norm)^(p-1) d|x|.

    Written by hand, since sqrt has no finite derivative at 0 and squares may overflow.
    """
    (groups,), (changes,) = primals, tangents
    blocks = _norms(p, layout, groups)
    norms = scatter(blocks, layout)
    weights = _weights(p, layout, norms, groups)
    terms = []
    for norm, (dims, _), *each in zip(norms, layout, weights, groups, changes):
        moved = []
        for weight, leaf, change in zip(*each):
            if p == 2:
                term = _slope(leaf, change, norm)
            else:
                change = tangent_of_modulus(leaf, change)
                term = weight * change.astype(weight.dtype)
            moved.append(_sum(term, dims).astype(norm.dtype))
        terms.append(moved)
    return blocks, _add_up(terms, layout, blocks[0].dtype if blocks else np.float32)


def _slope(leaf: jax.Array, change: jax.Array, norm: jax.Array) -> jax.Array:
    """x / norm * dx. Without the modulus, whose derivative at 0 hides that of x."""
    wide = np.promote_types(leaf.dtype, norm.dtype)
    unit = divided(leaf.astype(wide), jnp.where(norm > 0, norm, 1.0))
    return jnp.real(jnp.conj(unit) * change.astype(wide))


def _weights(
    p: float, layout: Layout, norms: list[jax.Array], groups: list[list[jax.Array]]
) -> list[list[jax.Array]]:
    """The derivative of each norm by each modulus."""
    if p == np.inf:
        return _shared_by_largest(layout, norms, groups)
    found = []
    for norm, group in zip(norms, groups):
        safe = jnp.where(norm > 0, norm, 1.0)
        shares = [divided(modulus(x).astype(norm.dtype), safe) for x in group]
        found.append([_power_of_share(p - 1.0, share) for share in shares])
    return found


def _power_of_share(power: float, share: jax.Array) -> jax.Array:
    # Two wheres: at 0 a power below 1 does not exist, and the unused branch of a where
    # must stay finite as well.
    return jnp.where(share > 0, jnp.where(share > 0, share, 1.0) ** power, 0.0)


def _shared_by_largest(
    layout: Layout, norms: list[jax.Array], groups: list[list[jax.Array]]
) -> list[list[jax.Array]]:
    """The derivative of a maximum, shared by all elements that are the largest."""
    hits: list[list[jax.Array]] = []
    for norm, group in zip(norms, groups):
        sizes = [modulus(x).astype(norm.dtype) for x in group]
        hits.append([((x == norm) & (norm > 0)).astype(norm.dtype) for x in sizes])
    terms = [[_sum(x, dims) for x in hit] for hit, (dims, _) in zip(hits, layout)]
    dtype = norms[0].dtype if norms else np.float32
    counts = scatter(_add_up(terms, layout, dtype), layout)
    return [[x / jnp.maximum(n, 1) for x in hit] for hit, n in zip(hits, counts)]


def _in_float64(p: float, layout: Layout, groups: list[list[jax.Array]]) -> Blocks:
    if p not in DIRECT:
        return _by_shares(p, np.float64, layout, groups)
    return _roots(p, np.float64, np.float32, layout, groups)


def _by_shares(
    p: float, wide: Any, layout: Layout, groups: list[list[jax.Array]]
) -> Blocks:
    """Divides by the largest of each group first, so that no power leaves the range."""
    dtype = norm_dtype(groups)
    sizes = [[_max(x, dims, dtype) for x in g] for g, (dims, _) in zip(groups, layout)]
    largest = _take_max(sizes, layout, dtype)
    safe = [jnp.where((x > 0) & (x < jnp.inf), x, 1.0).astype(dtype) for x in largest]
    shares = []
    for divisor, group in zip(scatter(safe, layout), groups):
        shares.append([divided(modulus(x).astype(dtype), divisor) for x in group])
    wide = np.promote_types(wide, dtype)
    roots = _roots(p, wide, dtype, layout, shares)
    return [divisor * root for divisor, root in zip(safe, roots)]


def _roots(
    p: float, wide: Any, dtype: Any, layout: Layout, groups: list[list[jax.Array]]
) -> Blocks:
    """(sum |x|^p)^(1/p), summed in the dtype `wide`."""
    # For these operations only, whatever the program around them uses.
    with jax.enable_x64(True):
        terms = []
        for group, (dims, _) in zip(groups, layout):
            terms.append([_sum_of_powers(p, wide, dims, leaf) for leaf in group])
        totals = _add_up(terms, layout, wide)
        roots = [jnp.sqrt(x) if p == 2 else x ** (1.0 / p) for x in totals]
        return [lax.convert_element_type(root, dtype) for root in roots]


# Jitted, so that it is traced once for all leaves of one shape.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _sum_of_powers(p: float, wide: Any, dims: Dims, leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        if p == 2:
            parts = jnp.real(leaf), jnp.imag(leaf)
            real, imag = (_sum_of_powers(p, wide, dims, part) for part in parts)
            return real + imag
        leaf = jnp.abs(leaf)
    if p == 2 and wide == np.float64:
        return sum_squares(leaf, dims)
    if p in DIRECT:
        x = lax.convert_element_type(jnp.abs(leaf), wide)
        return _sum(lax.integer_pow(x, int(p)), dims)
    return _sum(lax.convert_element_type(jnp.abs(leaf) ** p, wide), dims)


def _in_bins(
    sum_in_bins: Callable[[jax.Array, Dims], Bins],
    layout: Layout,
    groups: list[list[jax.Array]],
) -> Blocks:
    """Norms of order 2 from float32 sums in three bins."""
    found = []
    for group, (dims, _) in zip(groups, layout):
        found.append([bins_of_leaf(sum_in_bins, dims, leaf) for leaf in group])
    return _roots_of_bins(found, layout)


def _roots_of_bins(found: list[list[Bins]], layout: Layout) -> Blocks:
    kinds = [[[bins[kind] for bins in of] for of in found] for kind in range(3)]
    blocks = _add_up_all(kinds, layout, np.float32, _total_of_stack)
    return [root(Bins(*each)) for each in zip(*blocks)]


def _in_bins_on_gpu(layout: Layout, groups: list[list[jax.Array]]) -> Blocks:
    """Norms of order 2, with small leaves read together where that moves no data."""
    joined, splits = [], []
    for group, (dims, own) in zip(groups, layout):
        leaves, of_leaves = (group, own) if dims else join_small(group, own)
        joined.append(leaves)
        splits.append((dims, tuple(of_leaves)))
    lone = [
        g[0] for g, (dims, _) in zip(joined, splits) if dims is None and len(g) == 1
    ]
    rows = iter(bins_of_leaves(lone))
    found = []
    for group, (dims, _) in zip(joined, splits):
        if dims is None and len(group) == 1:
            found.append([next(rows)])
        else:
            found.append([bins_of_leaf(sum_on_gpu, dims, leaf) for leaf in group])
    return _roots_of_bins(found, tuple(splits))


def _largest(dtype: Any, layout: Layout, groups: list[list[jax.Array]]) -> Blocks:
    """max |x|. NaN is counted separately, since a maximum over devices drops it."""
    sizes, broken = [], []
    for group, (dims, _) in zip(groups, layout):
        found = [_max_and_broken(dims, dtype, leaf) for leaf in group]
        sizes.append([most for most, _ in found])
        broken.append([nan for _, nan in found])
    names = _names(layout)
    blocks = _gather(sizes, layout, dtype, _maximum) + _gather(
        broken, layout, dtype, _maximum
    )
    blocks = join_devices(lax.pmax, blocks, names + names)
    half = len(blocks) // 2
    pairs = zip(blocks[:half], blocks[half:])
    return [jnp.where(broken > 0, jnp.nan, most) for most, broken in pairs]


@partial(jax.jit, static_argnums=(0, 1))
def _max_and_broken(dims: Dims, dtype: Any, leaf: jax.Array) -> Any:
    # XLA on a CPU fuses a maximum or a sum with what made its operand only if that
    # contains no comparison. So NaN is found by a sum of zeros: 0 / (1 + inf) is 0, and
    # 0 / (1 + NaN) is not.
    x = modulus(leaf)
    broken = jnp.isnan(_sum(0 / (1 + x * x), dims))
    return jnp.where(broken, 0, _max(leaf, dims, dtype)), broken.astype(dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _max(leaf: jax.Array, dims: Dims, dtype: Any) -> jax.Array:
    """max |x|, from which XLA on a CPU drops a NaN."""
    x = jnp.abs(leaf) if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else leaf
    axes = tuple(range(x.ndim)) if dims is None else dims
    most = lax.max(lax.reduce_max(x, axes), -lax.reduce_min(x, axes))
    return (most if dims is None else lax.expand_dims(most, axes)).astype(dtype)


def _sum(x: jax.Array, dims: Dims) -> jax.Array:
    return jnp.sum(x, dims, keepdims=dims is not None)


# From terms of single leaves to blocks: over the leaves of a group, then over devices.


def _add_up(terms: list[list[jax.Array]], layout: Layout, dtype: Any) -> Blocks:
    return _add_up_all([terms], layout, dtype, _total)[0]


def _add_up_all(
    kinds: list[list[list[jax.Array]]],
    layout: Layout,
    dtype: Any,
    join: Callable[[list[jax.Array]], jax.Array],
) -> list[Blocks]:
    """Sums of several kinds of terms, in one collective."""
    if not any(split.summed for _, splits in layout for split in splits):
        return [_gather(terms, layout, dtype, join) for terms in kinds]
    names = _names(layout)
    blocks: Blocks = []
    for terms in kinds:
        once = _counted_once(terms, layout, names)
        blocks += _gather(once, layout, dtype, join)
    blocks = join_devices(lax.psum, blocks, names * len(kinds))
    size = len(names)
    return [blocks[i * size : (i + 1) * size] for i in range(len(kinds))]


def _take_max(sizes: list[list[jax.Array]], layout: Layout, dtype: Any) -> Blocks:
    blocks = _gather(sizes, layout, dtype, _maximum)
    return join_devices(lax.pmax, blocks, _names(layout))


def _names(layout: Layout) -> list[tuple[str, ...]]:
    """For each block, the mesh axes that it is joined over."""
    scalars = [splits for dims, splits in layout if dims is None]
    blocks = [[split for splits in scalars for split in splits]] if scalars else []
    arrays = [list(splits) for dims, splits in layout if dims is not None]
    return names_of_blocks(blocks + arrays)


def _counted_once(
    terms: list[list[jax.Array]], layout: Layout, names: list[tuple[str, ...]]
) -> list[list[jax.Array]]:
    has_vector = any(dims is None for dims, _ in layout)
    arrays = iter(names[has_vector:])
    found = []
    for group, (dims, splits) in zip(terms, layout):
        over = names[0] if dims is None else next(arrays)
        found.append([counted_once(*each, over) for each in zip(group, splits)])
    return found


def _gather(
    terms: list[list[jax.Array]],
    layout: Layout,
    dtype: Any,
    join: Callable[[list[jax.Array]], jax.Array],
) -> Blocks:
    """Joins the terms of each group, and stacks those of whole leaves."""
    zero = jnp.zeros((), dtype)
    joined = [join(group) if group else zero for group in terms]
    scalars = [x for x, (dims, _) in zip(joined, layout) if dims is None]
    arrays = [x for x, (dims, _) in zip(joined, layout) if dims is not None]
    if len(layout) == 1 and scalars:
        return scalars
    return ([jnp.stack(scalars)] if scalars else []) + arrays


def _total(terms: list[jax.Array]) -> jax.Array:
    # A chain of adds: XLA on a CPU merges the all-reduces of a chain, not of a stack.
    return sum(terms[1:], start=terms[0])


def _total_of_stack(terms: list[jax.Array]) -> jax.Array:
    if len(terms) == 1:
        return terms[0]
    # A TPU runs each add of a chain by itself. Without the barrier XLA makes a chain of
    # this sum.
    return jnp.sum(lax.optimization_barrier(jnp.stack(terms)), 0)


def _maximum(terms: list[jax.Array]) -> jax.Array:
    most = terms[0]
    for term in terms[1:]:
        most = jnp.maximum(most, term)
    return most
