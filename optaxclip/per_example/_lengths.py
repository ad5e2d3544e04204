"""Norms of the gradients of examples from their factors.

Arrays are [example, stack, position, number]. Squares of tiny and huge numbers leave
the range of float32, so factors are divided by their largest number first: in Gram form
those of each position, since one may be large in `a` and another in `c`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._norms import Leaf, Plan, norms_of

# What rounding may take from a sum of products, over that of their sizes, in eps. 2.2
# was the most that was seen on a CPU, of 2 to 128 positions of 16 to 16384 numbers.
MARGIN = 4


class Pair(NamedTuple):
    """The factors of one use for a batch."""

    # [example, stack, position, rows], or int32[example, stack, position] of a lookup
    a: jax.Array
    c: jax.Array  # [example, stack, position, columns]


def length_of_each(x: jax.Array) -> jax.Array:
    """The norm of each entry along the first axis, float32 or wider."""
    # On each device alone, since others hold other examples.
    leaf = Leaf(0, tuple(range(1, x.ndim)))
    (norms,) = norms_of(Plan((leaf,), 1), [x])
    return norms.reshape(x.shape[:1])


def by_product(pairs: list[Pair]) -> jax.Array:
    """|a| |c| for each example, where there is one position."""
    ((a, c),) = pairs
    stack = a.shape[1]
    rows, columns = a.reshape(-1, *a.shape[2:]), c.reshape(-1, *c.shape[2:])
    # For a stack of matrices |G|^2 = sum_s |a_s|^2 |c_s|^2.
    lengths = length_of_each(rows) * length_of_each(columns)
    return length_of_each(lengths.reshape(-1, stack)) if stack > 1 else lengths


def by_matrix(pairs: list[Pair]) -> jax.Array:
    """|sum_t a_t c_t'| for each example."""
    a, c = _joined(pairs)
    return length_of_each(_dot("bstr,bstk->bsrk", a, c))


def by_gram(pairs: list[Pair]) -> jax.Array:
    """sqrt(sum_ts (a_t . a_s)(c_t . c_s)) for each example, and no less.

    Where positions cancel the sum is smaller than its terms by a factor q, and the
    relative error is that of float32 times q. The norm is too long rather than too
    short: a limit must hold.
    """
    lookups = [
        pair for pair in pairs if jnp.issubdtype(pair.a.dtype, jnp.integer)
    ]
    dense = [
        pair for pair in pairs if not jnp.issubdtype(pair.a.dtype, jnp.integer)
    ]
    if not lookups:
        size, total = _own_gram(_joined(dense))
    elif not dense:
        size, total = _own_gram(_joined(lookups))
    else:
        size, total = _mixed_gram(_joined(dense), _joined(lookups))
    return size * jnp.sqrt(jnp.maximum(total, 0))


def _own_gram(pair: Pair) -> tuple[jax.Array, jax.Array]:
    """A size for each example, and the sum in units of its square."""
    if not jnp.issubdtype(pair.a.dtype, jnp.integer):
        size, (a, c) = _leveled(pair)
        return size, _sum_of_dense(a, c)
    size, c = _scaled(pair.c)
    # a_t . a_s is 1 where both look up the same row, and else 0.
    same = pair.a[..., :, None] == pair.a[..., None, :]
    return size, _sum_of_exact(same.astype(c.dtype), c, c)


def _sum_of_dense(a: jax.Array, c: jax.Array) -> jax.Array:
    """sum_ts (a_t . a_s)(c_t . c_s), and what rounding may have taken from it."""
    one, other = _products(a, a), _products(c, c)
    lost = _sizes(a, a) * jnp.abs(other) + jnp.abs(one) * _sizes(c, c)
    return _sum(one * other + _margin(lost))


def _sum_of_exact(one: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
    """The same of (c_t . d_s) times numbers that no rounding changed."""
    lost = jnp.abs(one) * _sizes(c, d)
    return _sum(one * _products(c, d) + _margin(lost))


def _margin(lost: jax.Array) -> jax.Array:
    return MARGIN * jnp.finfo(lost.dtype).eps * lax.stop_gradient(lost)


def _sizes(x: jax.Array, y: jax.Array) -> jax.Array:
    """|x_t| |y_s|."""
    one, other = (jnp.sqrt(jnp.sum(z * z, -1)) for z in (x, y))
    return one[..., :, None] * other[..., None, :]


def _leveled(pair: Pair) -> tuple[jax.Array, Pair]:
    """A size for each example, and factors with the same products in units of it. In
    each position `a` is at most 1, and `c` has the size of both.
    """
    rows, a = _scaled(pair.a, along=3)
    columns, c = _scaled(pair.c, along=3)
    size, level = _scaled(rows * columns)
    return size, Pair(a, c * level[..., None])


def _mixed_gram(dense: Pair, lookup: Pair) -> tuple[jax.Array, jax.Array]:
    """The same, of a table that is looked up in and multiplied by."""
    size, (a, c) = _leveled(dense)
    own = _sum_of_dense(a, c)
    looked, other = _own_gram(lookup)
    # For a lookup of row r the product with a_t is the entry a_t[r].
    index = jnp.broadcast_to(
        lookup.a[:, :, None, :], (*a.shape[:3], lookup.a.shape[-1])
    )
    met = jnp.take_along_axis(a, index, axis=-1)
    both = _sum_of_exact(met, c, _scaled(lookup.c)[1])
    # |G + H|^2 = |G|^2 + 2 G . H + |H|^2, in units of the larger size squared.
    largest = jnp.maximum(size, looked)
    safe = jnp.where(largest > 0, largest, 1)
    size, looked = size / safe, looked / safe
    total = size**2 * own + 2 * size * looked * both
    return largest, total + looked**2 * other


def _scaled(x: jax.Array, along: int = 1) -> tuple[jax.Array, jax.Array]:
    """The largest number of each example, and the example divided by it. With
    `along=3` of each position.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    axes = tuple(range(along, x.ndim))
    largest = jnp.max(jnp.abs(x), axis=axes)
    # Divided by 1, inf and NaN stay, and the example counts as broken.
    safe = jnp.where((largest > 0) & (largest < jnp.inf), largest, 1)
    return largest, x / jnp.expand_dims(safe, axes)


def _products(x: jax.Array, y: jax.Array) -> jax.Array:
    return _dot("bstn,bsun->bstu", x, y)


def _dot(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """A product in float32. GPU and TPU would else round its factors to fewer bits."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(
        axes, x.astype(wide), y.astype(wide), precision=lax.Precision.HIGHEST
    )


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=tuple(range(1, x.ndim)))


def _joined(pairs: list[Pair]) -> Pair:
    """The positions of all pairs as those of one."""
    if len(pairs) == 1:
        return pairs[0]
    wide = jnp.result_type(*(pair.c.dtype for pair in pairs))
    a = jnp.concatenate([pair.a for pair in pairs], axis=2)
    return Pair(
        a, jnp.concatenate([pair.c.astype(wide) for pair in pairs], axis=2)
    )
