"""The norms of groups of leaves: (sum |x|^p)^(1/p), and max |x| for p = inf.

    order 2 on GPU and TPU     three float32 sums of squares, in one read (_three_sums)
    orders 1 to 4 on a CPU     sums in float64, in one read (_sums_on_cpu)
    all else                   divided by the largest first, which is a second read

Norms of one shape are the rows of a block (_in_blocks).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._at_once import join_small, sums_on_gpu, sums_on_tpu
from ._collectives import axes_size
from ._derivative import slope, weights_of
from ._groups import (
    Blocks,
    Group,
    Layout,
    add_up,
    layout_of,
    scatter,
    sum_over,
    take_max,
    total_of_stack,
)
from ._in_blocks import Number, Place, in_blocks, stack_by_selects
from ._maxima import largest_moduli, largest_moduli_by_bits, largest_modulus
from ._modulus import divided, norm_dtype, tangent_of_modulus
from ._pairs import sum_on_gpu
from ._platform import per_platform
from ._sums_on_cpu import sums_of_squares
from ._three_sums import (
    Dims,
    Sums,
    root_on_gpu,
    root_on_tpu,
    sum_on_tpu,
    sums_of_leaf,
)

# Orders whose powers of any float32 number stay far inside the range of float64.
# (3.4e38)^4 is 1e154, and (1.2e-38)^4 is 2e-152.
DIRECT = (1.0, 2.0, 3.0, 4.0)

ThreeSums = Sequence[Number]  # of a leaf: up, plain, down


def norms_of(
    groups: list[Group], ord: float | str | None = None
) -> tuple[Blocks, list[Place]]:
    """The norms of some groups, in blocks, and where each is. A group without leaves
    has norm 0.
    """
    leaves = [list(map(jnp.asarray, group.leaves)) for group in groups]
    layout = layout_of(groups)
    places = [part.place for part in layout]
    if ord not in ("rms", "average"):
        p = 2.0 if ord is None else float(ord)
        return _norms(p, layout, leaves, None), places
    dtype = norm_dtype(leaves)
    counts = _counts(groups, places, dtype)
    # Divided before the root: a mean is finite even where the norm is not.
    blocks = _norms(2.0, layout, leaves, counts)
    if ord == "average":
        # sqrt(sum / N) / sqrt(N) = sqrt(sum) / N
        blocks = [block / jnp.sqrt(n) for block, n in zip(blocks, counts)]
    return blocks, places


def _counts(groups: list[Group], places: list[Place], dtype: Any) -> Blocks:
    """How many numbers each norm sums, in blocks."""
    each = [_count(group, dtype) for group in groups]
    # Known sizes are one constant of a program.
    is_known = all(isinstance(count, np.ndarray) for count in each)
    return in_blocks(each, places, np.stack if is_known else jnp.stack)


def _count(group: Group, dtype: Any) -> Any:
    """How many numbers the norm of a group sums on all devices, at least 1, with its
    rank.
    """
    total = 0
    for leaf, split in zip(group.leaves, group.splits):
        dims = range(leaf.ndim) if group.dims is None else group.dims
        # Each device has a part of the leaf, all of one size.
        size = math.prod(leaf.shape[i] for i in dims)
        total += size * axes_size(split.summed)
    rank = 0 if group.dims is None else group.leaves[0].ndim
    # A size of jax.export may be a symbol.
    numbers = np if isinstance(total, int) else jnp
    count = numbers.maximum(numbers.asarray(total), 1).astype(dtype)
    return count.reshape((1,) * rank)


# Layout and order are static: only leaves and counts are traced.
@partial(jax.custom_jvp[Blocks], nondiff_argnums=(0, 1))
def _norms(
    p: float,
    layout: Layout,
    groups: list[list[jax.Array]],
    counts: Blocks | None,
) -> Blocks:
    dtype = norm_dtype(groups)
    # Programs for GPU and TPU have float64 only where a leaf has 64 bits.
    if dtype == np.float64 and p == np.inf:
        return largest_moduli(dtype, layout, groups)
    if dtype == np.float64:
        return _by_shares(p, np.float64, layout, groups, counts)
    if p == np.inf:
        by_bits = partial(largest_moduli_by_bits, layout)
        cpu = partial(largest_moduli, dtype, layout)
        return per_platform(groups, cpu=cpu, gpu=by_bits, tpu=by_bits)
    # Powers of other orders may leave the range of float64 too: (1e38)^10.
    cpu = partial(_by_shares, p, np.float64, layout)
    if p in DIRECT:
        cpu = partial(_roots, p, np.float64, np.float32, layout)
    gpu = tpu = partial(_by_shares, p, np.float32, layout)
    if p == 2:
        gpu = partial(_norms_on_gpu, layout)
        tpu = partial(_norms_on_tpu, layout)
    return per_platform(groups, counts, cpu=cpu, gpu=gpu, tpu=tpu)


@_norms.defjvp
def _norms_jvp(p: float, layout: Layout, primals: Any, tangents: Any) -> Any:
    """d norm = sum (|x| / norm)^(p-1) d|x|."""
    # Counts are numbers of elements, which have no derivative.
    (groups, counts), (changes, _) = primals, tangents
    blocks = _norms(p, layout, groups, counts)
    norms = scatter(blocks, layout)
    weights = weights_of(p, layout, norms, groups)
    terms = []
    for norm, part, *each in zip(norms, layout, weights, groups, changes):
        moved = []
        for weight, leaf, change in zip(*each):
            # |x| d|x| = x dx, which has a second derivative at x = 0 as well.
            if p == 2:
                term = slope(leaf, change, norm)
            else:
                change = tangent_of_modulus(leaf, change)
                term = weight * change.astype(weight.dtype)
            moved.append(sum_over(term, part.dims).astype(norm.dtype))
        terms.append(moved)
    dtype = blocks[0].dtype if blocks else np.float32
    (moved,) = add_up([terms], layout, dtype)
    # norm = (sum |x|^p / n)^(1/p), whose derivative has 1 / n before the sum.
    return blocks, _mean(moved, counts)


def _mean(sums: Blocks, counts: Blocks | None) -> Blocks:
    if counts is None:
        return sums
    return [total / n.astype(total.dtype) for total, n in zip(sums, counts)]


def _by_shares(
    p: float,
    wide: Any,
    layout: Layout,
    groups: list[list[jax.Array]],
    counts: Blocks | None,
) -> Blocks:
    """Divides by the largest of each group first, so that no power leaves the range."""
    dtype = norm_dtype(groups)
    sizes = []
    for group, part in zip(groups, layout):
        sizes.append([largest_modulus(x, part.dims, dtype) for x in group])
    # Over all devices, which must divide by the same number to add up their shares.
    largest = take_max(sizes, layout, dtype)
    # 0, NaN and inf are not divided by, and come out of the sum as they are.
    safe = [
        jnp.where((x > 0) & (x < jnp.inf), x, 1.0).astype(dtype)
        for x in largest
    ]
    # In [0, 1], and one of them is 1. A power that vanishes is too small to count.
    shares = []
    for divisor, group in zip(scatter(safe, layout), groups):
        shares.append(
            [divided(jnp.abs(x).astype(dtype), divisor) for x in group]
        )
    roots = _roots(p, wide, dtype, layout, shares, counts)
    return [divisor * root for divisor, root in zip(safe, roots)]


def _roots(
    p: float,
    wide: Any,
    dtype: Any,
    layout: Layout,
    groups: list[list[jax.Array]],
    counts: Blocks | None,
) -> Blocks:
    """(sum |x|^p)^(1/p), summed in the dtype `wide`."""
    # For these operations only, whatever the program around them uses.
    with jax.enable_x64(True):
        leaves = [leaf for group in groups for leaf in group]
        dims = [
            part.dims for group, part in zip(groups, layout) for _ in group
        ]
        if p == 2 and wide == np.float64:
            sums = iter(sums_of_squares(leaves, dims))
        else:
            sums = map(partial(_sum_of_powers, p, wide), dims, leaves)
        terms = [[next(sums) for _ in group] for group in groups]
        (totals,) = add_up([terms], layout, wide)
        totals = _mean(totals, counts)
        roots = [jnp.sqrt(x) if p == 2 else x ** (1.0 / p) for x in totals]
        return [lax.convert_element_type(root, dtype) for root in roots]


# Jitted, so that it is traced once for all leaves of one shape.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _sum_of_powers(
    p: float, wide: Any, dims: Dims, leaf: jax.Array
) -> jax.Array:
    if p in DIRECT:
        # Converted first: in float32 a power may be inf.
        x = lax.convert_element_type(jnp.abs(leaf), wide)
        return sum_over(lax.integer_pow(x, int(p)), dims)
    # Only shares of the largest come here, whose powers are at most 1.
    return sum_over(lax.convert_element_type(jnp.abs(leaf) ** p, wide), dims)


def _norms_on_tpu(
    layout: Layout, groups: list[list[jax.Array]], counts: Blocks | None
) -> Blocks:
    """Norms of order 2 from three float32 sums."""
    found = _three_sums_of(sums_on_tpu, sum_on_tpu, layout, groups)
    stack = stack_by_selects
    return _roots_of_sums(root_on_tpu, stack, found, layout, counts)


def _norms_on_gpu(
    layout: Layout, groups: list[list[jax.Array]], counts: Blocks | None
) -> Blocks:
    """Norms of order 2, with small leaves read together where that moves no data."""
    parts, joined = [], []
    for part, group in zip(layout, groups):
        # A group with dims has one leaf, and nothing to join.
        if part.dims is None:
            group, splits = join_small(group, part.splits)
            part = part._replace(splits=tuple(splits))
        parts.append(part)
        joined.append(group)
    # In the layout of what was joined, which has fewer leaves in a group.
    layout = tuple(parts)
    found = _three_sums_of(sums_on_gpu, sum_on_gpu, layout, joined)
    return _roots_of_sums(root_on_gpu, jnp.stack, found, layout, counts)


def _three_sums_of(
    at_once: Callable[[list[jax.Array]], Sequence[ThreeSums]],
    sum_leaf: Callable[[jax.Array, Dims], Sums],
    layout: Layout,
    groups: list[list[jax.Array]],
) -> list[list[ThreeSums]]:
    """The sums of each leaf of each group."""
    pairs = list(zip(groups, layout))
    # Whole leaves are found across all groups, and their sums handed out in order.
    whole = [group for group, part in pairs if part.dims is None]
    sums = iter(at_once([leaf for group in whole for leaf in group]))
    found = []
    for group, part in pairs:
        if part.dims is None:
            found.append([next(sums) for _ in group])
        else:
            found.append(
                [sums_of_leaf(sum_leaf, part.dims, leaf) for leaf in group]
            )
    return found


def _roots_of_sums(
    root: Callable[[Sums], jax.Array],
    stack: Callable[[list[jax.Array]], jax.Array],
    found: list[list[ThreeSums]],
    layout: Layout,
    counts: Blocks | None,
) -> Blocks:
    # [[Sums, Sums], [Sums]] -> three times [[x, x], [x]]: up, plain, down.
    kinds = []
    for kind in range(3):
        pick = itemgetter(kind)
        kinds.append([list(map(pick, sums)) for sums in found])
    blocks = add_up(kinds, layout, np.float32, total_of_stack, stack)
    means = [_mean(block, counts) for block in blocks]
    return [root(Sums(*each)) for each in zip(*means)]
