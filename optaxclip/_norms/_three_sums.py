"""Sums of squares in float32 whose root is right over the whole range of float32.

    up       sum (x * 2^83)^2     taken if it is finite   three sums of all elements,
    plain    sum x^2              else if it is finite    in one read
    down     sum (x * 2^-83)^2    else

No normal number is too small for `up`. A sum that is taken since the one before it is
infinite is so large that what it may lose, 2^37 squares below 2^-126, is less than
2^-50 of it. There is no branch, so vmap and devices that hold different shards are no
special case.

Where one device holds a large leaf, it takes two sums of known lengths. In any order of
additions the norm is then wrong by at most the sum of both lengths times 2^-25:

    GPU     rows of at most 3 sqrt(n) numbers and 8192, and then their sums (_pairs)
    TPU     the columns of a matrix of 256 rows or more, and then their sums

Reference: Blue, A portable Fortran program to find the Euclidean norm of a vector,
1978. Anderson, Algorithm 978: safe scaling in the level 1 BLAS, 2017. Both sort numbers
by size into three sums. Without sorting, a GPU and a TPU have less to compute for each.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._types import is_known, is_on_one_device

# 2^37 of the largest numbers, which are 2^128, have a finite sum: (2^128 * 2^-83)^2 is
# 2^90. The smallest normal one, which is 2^-126, has a normal square: 2^(-43 * 2).
SCALE = 2.0**83
# What is squared is held within this number, whose square is inf. The root of a finite
# sum is far below it.
LARGEST = 2.0**127
# Elements of a leaf that a GPU reads in less time than a kernel starts.
SMALL = 65_536
# Numbers in a partial sum, at least. With fewer there would be many to write.
PARTIAL = 256
# Elements of a leaf on a mesh of TPUs whose squares may be stacked. Those of larger
# leaves XLA would write to main memory, three times the size of the leaf.
STACKED = 2**22

Dims = tuple[int, ...] | None


class Sums(NamedTuple):
    """Squares of numbers scaled up, as they are, and scaled down, or sums of them."""

    up: jax.Array
    plain: jax.Array
    down: jax.Array


# Jitted, so that it is traced once for all leaves of one shape.
@jax.jit
def three_squares(leaf: jax.Array) -> Sums:
    """The squares of all elements."""
    x = leaf.astype(np.float32)
    # Without minimum and maximum XLA makes x^2 * 2^-166 of it, and that constant is 0.
    up = jnp.minimum(x * np.float32(SCALE), np.float32(LARGEST))
    down = jnp.maximum(x * np.float32(1 / SCALE), np.float32(-LARGEST))
    return Sums(up * up, x * x, down * down)


def sum_on_tpu(leaf: jax.Array, dims: Dims) -> Sums:
    """The three sums, as reductions that a TPU computes in one read."""
    keep = dims is not None
    is_large = is_known(leaf) and leaf.size > STACKED
    if keep and not is_on_one_device(leaf) and not is_large:
        # Three arrays for each of 100 leaves XLA does not put into one collective.
        stack = jnp.stack(three_squares(leaf))
        return Sums(*jnp.sum(stack, [i + 1 for i in dims], keepdims=True))
    terms = terms_on_tpu(leaf, dims)
    return Sums(*(jnp.sum(x, dims, keepdims=keep) for x in terms))


def terms_on_tpu(leaf: jax.Array, dims: Dims) -> Sums:
    """What there is to sum: the squares, or the sums of columns where there are any."""
    terms = three_squares(leaf)
    if not has_columns(leaf, dims):
        return terms
    last = leaf.ndim - 1
    rows = tuple(axis for axis in axes_of(leaf, dims) if axis != last)
    sums = [jnp.sum(x, rows, keepdims=dims is not None) for x in terms]
    # Without the barrier XLA makes one sum of both.
    return Sums(*lax.optimization_barrier(sums))


def has_columns(leaf: jax.Array, dims: Dims) -> bool:
    """Whether columns are summed first: of a large leaf all of them together."""
    axes = axes_of(leaf, dims)
    if not is_long(leaf) or leaf.ndim - 1 not in axes:
        return False
    rows = [leaf.shape[axis] for axis in axes if axis != leaf.ndim - 1]
    return math.prod(rows) >= PARTIAL and is_on_one_device(leaf)


def axes_of(leaf: jax.Array, dims: Dims) -> tuple[int, ...]:
    return tuple(range(leaf.ndim)) if dims is None else tuple(sorted(dims))


def sum_at_once(
    terms: Sequence[jax.Array], axes: Iterable[int]
) -> list[jax.Array]:
    """The sum of each of some arrays of one shape, as one reduction."""

    def add(one: Any, other: Any) -> Any:
        return tuple(a + b for a, b in zip(one, other))

    zeros = (terms[0].dtype.type(0),) * len(terms)
    return list(lax.reduce(tuple(terms), zeros, add, tuple(axes)))


def is_small(leaf: jax.Array) -> bool:
    return is_known(leaf) and leaf.size <= SMALL


def is_long(leaf: jax.Array) -> bool:
    """Whether a leaf is large, so that it takes two sums."""
    return is_known(leaf) and leaf.size > SMALL


# Jitted, so that it is traced once for all leaves of one shape.
@partial(jax.jit, static_argnums=(0, 1))
def sums_of_leaf(
    sum_one: Callable[[jax.Array, Dims], Sums], dims: Dims, leaf: jax.Array
) -> Sums:
    """The sums of a real or complex leaf."""
    if not jnp.iscomplexobj(leaf):
        return sum_one(leaf, dims)
    # |a + bi|^2 = a^2 + b^2, so both parts are summed like real leaves.
    real, imag = (
        sum_one(jnp.real(leaf), dims),
        sum_one(jnp.imag(leaf), dims),
    )
    return Sums(*(one + other for one, other in zip(real, imag)))


def root(sums: Sums) -> jax.Array:
    """The norm, from the first sum that is finite."""
    up, plain, down = (jnp.sqrt(x) for x in sums)
    # Not compared with inf: as the root of a single square XLA takes the number itself.
    # NaN is looked for in `plain`, since the minimum of a CPU drops it.
    norm = jnp.where(plain >= LARGEST, down * np.float32(SCALE), plain)
    return jnp.where(up < LARGEST, up * np.float32(1 / SCALE), norm)


def root_on_gpu(sums: Sums) -> jax.Array:
    """The norm. Of all that a clipper computes from it XLA then makes one kernel.

    On a GPU it does so for numbers that come from one array, unless that has a single
    number. The maximum is no slice, which would be a kernel of its own.
    """
    norm = root(sums)
    if norm.ndim:
        return norm
    pair = lax.optimization_barrier(_paired(norm))
    return jnp.maximum(pair[0], pair[1])


def root_on_tpu(sums: Sums) -> jax.Array:
    """The norm, in one kernel: a TPU runs operations on single numbers one by one."""
    if sums.plain.ndim:
        return root(sums)
    return root(lax.optimization_barrier(Sums(*map(_paired, sums))))[0]


def _paired(number: jax.Array) -> jax.Array:
    return jnp.broadcast_to(number, (2,))
