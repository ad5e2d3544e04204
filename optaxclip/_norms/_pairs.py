"""The three sums on a GPU, from two numbers for each number of a leaf.

    square    x^2
    scaled    (x * 2^-83)^2 where |x| is above 2^20, and -(x * 2^83)^2 elsewhere

Both are added up. Of scaled squares with different signs the positive one stays, since
small numbers count for nothing beside large ones.

Both are one complex number, so that the GPU sums one array. Before it sums several
arrays that are computed from the step of Adam, XLA writes that step to memory.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._three_sums import (
    LARGEST,
    PARTIAL,
    SCALE,
    Dims,
    Sums,
    axes_of,
    is_long,
    is_small,
    sum_at_once,
    three_squares,
)
from ._types import is_on_one_device, typed_as

# 2^37 squares of smaller numbers are less than 2^-50 of a sum that is not finite.
LARGE = 2.0**20
# A GPU sums columns in parts side by side: at least so many, of fewer rows than these.
# For an H100, AGC on GPT-2 small takes 193 kernels and 4.52 GB with 8 parts, and 243
# and 4.56 GB with 32, which XLA adds up in kernels of their own.
PARTS = 8
ROWS = 2048
# Fewer rows than these are one part. Others have parts of as many or more, since each
# writes its sums, or two halves of fewer than twice as many.
LEAST = 32
# Numbers in a row of a large leaf, at most. Of a longer one XLA on an H100 writes more
# than a hundred partial sums.
LONGEST_ROW = 8192


class Pairs(NamedTuple):
    """Squares and scaled squares, or sums of them."""

    both: jax.Array
    # Where jit splits a leaf, XLA joins one array of sums while it is sent, which GPUs
    # cannot do with `_joined`. Two arrays it gathers first.
    zeros: jax.Array


# Jitted, so that it is traced once for all leaves of one shape.
@jax.jit
def pairs_of(leaf: jax.Array) -> Pairs:
    """The pairs of all elements of a real or complex leaf."""
    if jnp.iscomplexobj(leaf):
        return _joined(pairs_of(jnp.real(leaf)), pairs_of(jnp.imag(leaf)))
    x = leaf.astype(np.float32)
    is_large = jnp.abs(x) > np.float32(LARGE)
    scaled = x * jnp.where(is_large, np.float32(1 / SCALE), np.float32(SCALE))
    square = scaled * scaled
    both = lax.complex(x * x, lax.select(is_large, square, -square))
    # Behind a barrier, so that XLA does not drop them.
    zeros = jnp.full(x.shape, lax.optimization_barrier(np.float32(0)))
    return Pairs(both, typed_as(zeros, jax.typeof(x)))


def _joined(one: Pairs, other: Pairs) -> Pairs:
    a, b = lax.imag(one.both), lax.imag(other.both)
    scaled = lax.select((a > 0) != (b > 0), lax.max(a, b), a + b)
    square = lax.real(one.both) + lax.real(other.both)
    return Pairs(lax.complex(square, scaled), one.zeros + other.zeros)


def sum_of_pairs(pairs: Pairs, axes: Iterable[int]) -> Pairs:
    """Sums over some axes, in one reduction."""

    def add(one: Any, other: Any) -> Any:
        return tuple(_joined(Pairs(*one), Pairs(*other)))

    start = np.complex64(0), np.float32(0)
    return Pairs(*lax.reduce(tuple(pairs), start, add, tuple(axes)))


def three_sums_of(pairs: Pairs) -> Sums:
    """The three sums, from sums of pairs."""
    plain, scaled = jnp.real(pairs.both) + pairs.zeros, jnp.imag(pairs.both)
    # Not -scaled, which of 0 is -0.
    up = jnp.where(scaled > 0, np.float32(np.inf), jnp.abs(scaled))
    return Sums(up, plain, jnp.maximum(scaled, 0))


def sum_on_gpu(leaf: jax.Array, dims: Dims) -> Sums:
    """The three sums of a leaf."""
    axes = axes_of(leaf, dims)
    if leaf.ndim and leaf.ndim - 1 not in axes:
        return _sum_over_columns(leaf, axes)
    if is_on_one_device(leaf):
        sums = three_sums_of(_sum_of_leaf(leaf, axes))
    elif is_small(leaf):
        sums = Sums(*sum_at_once(three_squares(leaf), axes))
    else:
        # The partitioner of jit joins a reduction with three operands by two
        # collectives.
        sums = _split_kinds(jnp.sum(_squares_by_kind(leaf), axes))
    if dims is None:
        return sums
    return Sums(*(lax.expand_dims(x, axes) for x in sums))


def _sum_of_leaf(leaf: jax.Array, axes: tuple[int, ...]) -> Pairs:
    """The sum of a leaf, of a large one with several axes in two steps."""
    pairs = pairs_of(leaf)
    *rest, last = axes or (0,)
    if rest and is_long(leaf) and leaf.shape[-1] >= PARTIAL:
        # Without the barrier XLA makes one sum of both.
        rows = lax.optimization_barrier(sum_of_pairs(pairs, (last,)))
        return sum_of_pairs(rows, rest)
    return sum_of_pairs(pairs, axes)


# Jitted, so that it is traced once for all leaves of one shape.
@jax.jit
def sums_of_rows(leaf: jax.Array) -> Pairs:
    """Sums of parts of a large leaf, at most `LONGEST_ROW` of them."""
    sums = pairs_of(leaf)
    while sums.both.size > LONGEST_ROW:
        rows = Pairs(*map(_as_matrix, sums))
        # Without the barrier XLA makes one sum of these and the next.
        sums = lax.optimization_barrier(sum_of_pairs(rows, (1,)))
    return sums


def _as_matrix(numbers: jax.Array) -> jax.Array:
    """Rows of up to 3 sqrt(n) of the n numbers, filled up with zeros if they must be.

    XLA on a GPU computes this while it sums. Of a leaf that is reshaped before it is
    squared, it would write to memory which elements are large.
    """
    most = min(3 * math.isqrt(numbers.size), LONGEST_ROW)
    # Rows that are filled up XLA does not sum in the kernel that computes them.
    even = (x for x in range(most, most // 2, -1) if numbers.size % x == 0)
    length = next(even, most)
    lacking = -numbers.size % length
    if lacking:
        numbers = jnp.pad(numbers.reshape(-1), (0, lacking))
    return numbers.reshape(-1, length)


# Jitted, so that it is traced once for all leaves of one shape.
@jax.jit
def _squares_by_kind(leaf: jax.Array) -> jax.Array:
    """The three squares along a last axis, so that threads side by side read one
    element.
    """
    scales = np.array([SCALE, 1, 1 / SCALE], np.float32)
    shape = (*leaf.shape, len(scales))
    x = lax.broadcast_in_dim(leaf.astype(np.float32), shape, range(leaf.ndim))
    scaled = x * lax.broadcast_in_dim(scales, shape, (leaf.ndim,))
    # The square of what is beyond is inf. Without the bounds XLA may square the scales.
    bound = np.float32(LARGEST)
    return lax.square(lax.clamp(-bound, scaled, bound))


def _split_kinds(sums: jax.Array) -> Sums:
    return Sums(*(sums[..., kind] for kind in range(3)))


def _sum_over_columns(leaf: jax.Array, axes: tuple[int, ...]) -> Sums:
    """Sums over other axes than the last, which XLA on a GPU computes in few threads.

    To have more it would write the squares to memory first. So where reshaping moves no
    data between devices, parts of the longest axis are summed first.
    """
    if not axes or not is_on_one_device(leaf):
        # Along the first axis. For 8 H100 XLA moves a third more with the last.
        stack = jnp.stack(three_squares(leaf))
        return Sums(
            *jnp.sum(stack, [axis + 1 for axis in axes], keepdims=True)
        )
    longest = max(axes, key=lambda axis: leaf.shape[axis])
    rows = leaf.shape[longest]
    parts = _parts_of(rows)
    shape = (
        *leaf.shape[:longest],
        parts,
        rows // parts,
        *leaf.shape[longest + 1 :],
    )
    # The longest axis is two axes now. The first of them stays for the second sum.
    inner = [axis + (axis >= longest) for axis in axes]
    squares = _squares_by_kind(leaf.reshape(shape))
    # Without the barrier XLA makes one sum of both.
    sums = lax.optimization_barrier(jnp.sum(squares, inner, keepdims=True))
    return _split_kinds(jnp.sum(sums, longest))


def _parts_of(rows: Any) -> int:
    """How many parts of one length are summed side by side."""
    # A symbolic size has one part.
    if not isinstance(rows, int) or rows < LEAST:
        return 1
    most = max(PARTS, 2 ** (rows // ROWS).bit_length())
    # At least two, since of several axes behind one part XLA would transpose the leaf.
    fitting = max(2, 2 ** ((rows // LEAST).bit_length() - 1))
    # Of 1002 rows there are 2 parts.
    return math.gcd(rows, min(most, fitting))
