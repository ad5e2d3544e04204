"""The norms of the gradients of examples, or the gradients, from their outer products:

norms_of_products   |a| |c|
sums_of_rows        for lookups, the sum of the cotangents of each row
matrices_of         sum_t a_t c_t'
norms_by_gram       sqrt(sum_ts (a_t . a_s)(c_t . c_s))
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._reduce import norms_of
from ..._specs import LeafSpec, NormPlan
from ..._sums import per_platform
from ._forms import OuterProducts

# A cotangent times its factor may be flushed to 0. Times inputs of a larger norm than
# this the product that is lost would be large.
LARGEST_INPUT = 2.0**104
# GPU and TPU would else round the factors of a product to fewer bits.
HIGHEST = lax.Precision.HIGHEST


def _norm(array: Array) -> Array:
    """The norm of an array on this device."""
    plan = NormPlan((LeafSpec(norm_index=0),), norm_count=1, ord=None)
    (norm,) = norms_of(plan, [array])
    return norm


_norms_along_batch = jax.vmap(_norm)
_norms_of_rows = jnp.vectorize(_norm, signature="(n)->()")


def joined(products: list[OuterProducts]) -> OuterProducts:
    """The outer products of several sites as those of one."""
    a = jnp.concatenate([product.a for product in products], 2)
    c = jnp.concatenate([product.c for product in products], 2)
    return OuterProducts(a, c)


def norms_of_products(product: OuterProducts) -> Array:
    """The norms of the gradients of one position: of a stack |G|^2 = sum_s |a_s|^2
    |c_s|^2.
    """
    a_norms = _norms_of_rows(product.a[:, :, 0])
    c_norms = _norms_of_rows(product.c[:, :, 0])
    norms = a_norms * c_norms
    return _norms_along_batch(norms) if norms.shape[1] > 1 else norms[:, 0]


def sums_of_rows(products: list[OuterProducts]) -> Array:
    """For lookups, the sum of the cotangents that belong to one row, at the first place
    of it in the order of rows.
    """
    a, c = joined(products)
    first_places = jax.vmap(jax.vmap(jnp.searchsorted))(jnp.sort(a), a)
    return _scattered(first_places, c, c.shape[1:])


def matrices_of(products: list[OuterProducts], matrix_shape: tuple[int, ...]) -> Array:
    """The gradients of examples, [example, stack, rows, columns]."""
    total: Any = 0.0
    for a, c in products:
        if _is_lookup(a):
            total += _scattered(a, c, matrix_shape)
            continue
        wide = np.promote_types(a.dtype, np.float32)
        x = jnp.einsum(
            "bstr,bstk->bsrk", a.astype(wide), c.astype(wide), precision=HIGHEST
        )
        # Shifts stand before columns.
        x = x.reshape(*x.shape[:3], -1, matrix_shape[2])
        total += jnp.swapaxes(x, 2, 3).reshape(len(x), *matrix_shape)
    return total


def _scattered(rows: Array, c: Array, shape: tuple[int, ...]) -> Array:
    """The sums of the cotangents of each row of a stack, for each example."""
    stack = jnp.arange(shape[0])[:, None]
    zeros = jnp.zeros((len(rows), *shape), np.promote_types(c.dtype, np.float32))
    return jax.vmap(lambda x, rows, c: x.at[stack, rows].add(c))(zeros, rows, c)


class GramTerms(NamedTuple):
    """The outer products of all sites, of which each pair of positions makes a term."""

    # Those of lookups and of all others: 32 sites had 32 x 32 blocks in one matrix.
    a_arrays: list[Array]
    c: Array
    a_norms: Array  # |a_t| of each position
    c_norms: Array  # |c_t|

    @property
    def has_part(self) -> Array:
        """Whether the gradient has a part from a position."""
        return (self.a_norms != 0) & (self.c_norms != 0)


def _gram_terms(products: list[OuterProducts]) -> GramTerms:
    """The outer products in one dtype, the lookups first."""
    wide = np.dtype(np.float32)
    for x in jax.tree.leaves(products):
        if not _is_lookup(x):
            wide = np.promote_types(wide, x.dtype)
    products = jax.tree.map(partial(_cast, dtype=wide), products)
    lookups = [product for product in products if _is_lookup(product.a)]
    others = [product for product in products if not _is_lookup(product.a)]
    a_arrays = []
    c_arrays = []
    a_norms = []
    if lookups:
        a, c = joined(lookups)
        a_arrays.append(a)
        c_arrays.append(c)
        # A lookup is 1 in one row.
        a_norms.append(jnp.ones_like(a, wide))
    if others:
        a, c = joined(others)
        a_arrays.append(a)
        c_arrays.append(c)
        a_norms.append(_norms_of_rows(a))
    c = jnp.concatenate(c_arrays, 2)
    terms = GramTerms(a_arrays, c, jnp.concatenate(a_norms, 2), _norms_of_rows(c))
    if c.shape[1] == 1:
        # With the axis of a stack of one XLA on a CPU would make the factors twice.
        terms = jax.tree.map(lambda x: x[:, 0], terms)
    return terms


def norms_by_gram(
    products: list[OuterProducts], *, is_bounded: bool
) -> tuple[Array, Array]:
    """For each example the norm of its gradient G, and a bound of it and of its terms:

        |G|^2 = sum_ts (a_t . a_s)(c_t . c_s)
        |G| <= sum_t |a_t| |c_t|

    With `is_bounded` a gradient is never longer than its norm. A CPU then adds up in
    float64. Elsewhere the norm is rounded up by the most that its additions may lose,
    in whatever order they are made. Where squares would leave the range of the dtype,
    the bound is the norm.
    """
    terms = _gram_terms(products)
    dtype = terms.c.dtype
    is_too_large = terms.has_part & (terms.a_norms >= LARGEST_INPUT)
    sizes = jnp.where(is_too_large, jnp.inf, terms.a_norms * terms.c_norms)
    # The bound of a stack is that of all its matrices.
    bounds = _norms_along_batch(jnp.sum(sizes, -1))
    fits = _fits(jnp.where(terms.has_part, terms.a_norms + terms.c_norms, 0), bounds)
    # At most the square of the bound: nothing is longer.
    lost_share = min(rounding(_additions(terms), dtype), 1.0)

    def rounded_up(terms: GramTerms) -> Array:
        lost = jnp.where(fits, lost_share * bounds**2, 0)
        return jnp.maximum(_squares_by_gram(terms, dtype), 0) + lost

    if is_bounded:
        squares = per_platform(
            terms, cpu=_squares_in_float64, gpu=rounded_up, plain=rounded_up
        )
    else:
        squares = _squares_by_gram(terms, dtype)
    is_long = fits & (squares > 0)
    is_zero = fits & (squares <= 0)
    # The derivative of sqrt(0) would be NaN.
    norms = jnp.sqrt(jnp.where(is_long, squares, 1))
    return jnp.where(is_long, norms, jnp.where(is_zero, 0, bounds)), bounds


def _additions(terms: GramTerms) -> int:
    """How many roundings a square in Gram form has at most: of both inner products, of
    the sum over pairs of positions, and one.
    """
    a = terms.a_arrays[-1]
    rows = 1 if _is_lookup(a) else a.shape[-1]
    columns = terms.c.shape[-1]
    # [example, *stack, position, column]
    pairs = math.prod(terms.c.shape[1:-1]) * terms.c.shape[-2]
    return rows + columns + pairs + 1


def _fits(sizes: Array, bounds: Array) -> Array:
    """Whether squares stay in the range of the dtype, for each example. `sizes` has
    |a_t| + |c_t| of each position.
    """
    info = jnp.finfo(bounds.dtype)
    # Numbers that are flushed to 0 are less than eps / 2 of the square of the bound,
    # for up to 2^24 rows and columns, and 2^13 positions of all layers.
    least = 2.0**13 * float(2 * info.tiny / info.eps) ** 0.5
    size = _sums(sizes)
    is_enough = bounds > least * (size + 2.0**-13 * sizes[0].size)
    return is_enough & (jnp.maximum(bounds, size) < float(info.max) ** 0.5)


def rounding(count: int, dtype: Any) -> float:
    """The most that `count` roundings take from a sum, over the sizes of its terms."""
    share = count * float(jnp.finfo(dtype).eps) / 2
    return share / (1 - share) if share < 1 else np.inf


def _squares_in_float64(terms: GramTerms) -> Array:
    with jax.enable_x64(True):
        squares = _squares_by_gram(terms, np.float64)
        return lax.convert_element_type(squares, terms.c.dtype)


def _squares_by_gram(terms: GramTerms, dtype: Any) -> Array:
    """The squares of the norms: sum_ts (a_t . a_s)(c_t . c_s)."""
    a_arrays = [_cast(a, dtype) for a in terms.a_arrays]
    c = _cast(terms.c, dtype)
    blocks = []
    for a in a_arrays:
        blocks.append([_inner_products(a, b, dtype) for b in a_arrays])
    products = jnp.block(blocks) * _inner_products(c, c, dtype)
    # Selected, since beside a cotangent of 0 the product of inputs may be inf.
    both_have_part = terms.has_part[..., :, None] & terms.has_part[..., None, :]
    return _sums(jnp.where(both_have_part, products, 0))


def _cast(x: Array, dtype: Any) -> Array:
    """The array in a dtype, or the numbers of rows as they are."""
    return x if _is_lookup(x) else lax.convert_element_type(x, dtype)


def _sums(x: Array) -> Array:
    """For each example, over all other axes."""
    return jnp.sum(x, range(1, x.ndim))


def _is_lookup(a: Array) -> bool:
    return jnp.issubdtype(a.dtype, jnp.integer)


def _inner_products(a: Array, b: Array, dtype: Any) -> Array:
    """The products a_t . b_s of rows, of which a and b may have the numbers."""
    if _is_lookup(a) and _is_lookup(b):
        # 1 where both look up the same row, and else 0.
        same = a[..., :, None] == b[..., None, :]
        return same.astype(dtype)
    if _is_lookup(a):
        return jnp.swapaxes(_inner_products(b, a, dtype), -1, -2)
    if _is_lookup(b):
        # For a lookup of row r the product with a_t is the entry a_t[r].
        index = jnp.broadcast_to(b[..., None, :], (*a.shape[:-1], b.shape[-1]))
        return jnp.take_along_axis(a, index, axis=-1)
    stacked = tuple(range(a.ndim - 2))
    last = a.ndim - 1
    # `jnp.einsum` asks for its dtype by name, which vmap and derivatives do again,
    # where there may be no float64.
    return lax.dot_general(
        a, b, (((last,), (last,)), (stacked, stacked)), precision=HIGHEST
    )
