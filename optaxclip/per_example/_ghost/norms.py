"""The norm of an example's gradient G = sum_t a_t c_t', a sum of outer products. At
position t, a_t is the input and c_t the cotangent, or the reverse if G is transposed.

    norms_of_products    |G| = |a| |c|, for one position
    sums_of_rows         for lookups, the sum of the cotangents of each row
    gradients_of         G itself
    norms_by_gram        |G| = sqrt(sum_ts (a_t . a_s)(c_t . c_s))

References: Goodfellow, Efficient per-example gradient computations, 2015 (arXiv
1510.01799), for one position. Li, Tramer, Liang, Hashimoto, Large language models can
be strong differentially private learners, 2022 (arXiv 2110.05679), for several.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._devices.platforms import per_platform
from ..._norms.reduce import norms_of
from ..._norms.specs import LeafSpec, NormPlan
from .._example_factors import MAX_CANCELLATION, NormSource
from .forms import OuterProducts

# An example with an input at least this long has the norm inf, and does not count. The
# weighted sum computes a * (f * c), with the clip factor f. A product f * c below the
# range of the dtype becomes 0, and with such an input a * (f * c) may be too large to
# lose.
LARGEST_INPUT = 2.0**104
# In a mean a norm by gram counts as at least 1 / 256 of sum |a_t| |c_t|. The square of
# a shorter one is mostly rounding. It might be 0, and the example would not be clipped.
# A private sum takes 1 / 16. In a mean that would lengthen the norms of ordinary
# examples: P orthogonal terms of one length have the norm sum |a_t| |c_t| / sqrt(P),
# which is less than 1 / 16 of the sum from 257 positions on.
MAX_CANCELLATION_IN_MEANS = 256
# Of outer products of a batch, [example, stack, position, ...]
BATCHED_POSITION_AXIS = 2
# GPU and TPU would round the factors of a product to fewer bits otherwise.
HIGHEST = lax.Precision.HIGHEST


def _norm(array: Array) -> Array:
    """The norm of an array on this device."""
    spec = LeafSpec(norm_index=0)
    plan = NormPlan((spec,), norm_count=1, ord=None)
    (norm,) = norms_of(plan, [array])
    return norm


_norms_along_batch = jax.vmap(_norm)
_norms_of_vectors = jnp.vectorize(_norm, signature="(n)->()")


def joined(products: list[OuterProducts]) -> OuterProducts:
    """The outer products of several sites as those of one."""
    a = jnp.concatenate([outer.a for outer in products], BATCHED_POSITION_AXIS)
    c = jnp.concatenate([outer.c for outer in products], BATCHED_POSITION_AXIS)
    return OuterProducts(a, c)


def norms_of_products(outer: OuterProducts) -> Array:
    """The norm of each matrix of a gradient of one position, [example, stack]."""
    a = outer.a[:, :, 0]
    c = outer.c[:, :, 0]
    a_norms = _norms_of_vectors(a)
    c_norms = _norms_of_vectors(c)
    # |G| = |a c'| = |a| |c|: Goodfellow, 2015
    return _products_of_norms(a_norms, c_norms)


def _products_of_norms(a_norms: Array, c_norms: Array) -> Array:
    """|a| |c|, or inf beside an input that is too large."""
    is_too_large = (c_norms != 0) & (a_norms >= LARGEST_INPUT)
    return jnp.where(is_too_large, jnp.inf, a_norms * c_norms)


def sums_of_rows(products: list[OuterProducts]) -> Array:
    """For lookups, the sum of the cotangents of each row that is looked up.

    Returns:
      [example, stack, position, columns]. After the positions are sorted by their rows,
      a sum stands at the first position of its row. All other numbers are 0.
    """
    rows, c = joined(products)
    # Over examples and stack
    first_places = jax.vmap(jax.vmap(jnp.searchsorted))
    sorted_rows = jnp.sort(rows)
    first_positions = first_places(sorted_rows, rows)
    return _scattered(first_positions, c, c.shape[1:])


def gradients_of(products: list[OuterProducts], shape: tuple[int, ...]) -> Array:
    """The gradients of examples, [example, *shape]: with stack, rows and columns."""
    total: Any = 0.0
    for outer in products:
        if outer.is_lookup:
            total += _scattered(outer.a, outer.c, shape)
            continue
        dtype = np.promote_types(outer.a.dtype, np.float32)
        a = outer.a.astype(dtype)
        c = outer.c.astype(dtype)
        # G = sum_t a_t c_t'
        total += jnp.einsum("bstr,bstk->bsrk", a, c, precision=HIGHEST)
    return total


def _scattered(rows: Array, c: Array, shape: tuple[int, ...]) -> Array:
    """The sums of the cotangents of each row of a stack, for each example."""
    stack = jnp.arange(shape[0])[:, None]

    def sums_in_one(zeros: Array, rows: Array, c: Array) -> Array:
        return zeros.at[stack, rows].add(c)

    dtype = np.promote_types(c.dtype, np.float32)
    batch_shape = len(rows), *shape
    zeros = jnp.zeros(batch_shape, dtype)
    # JAX promotes no 8-bit floats by itself.
    return jax.vmap(sums_in_one)(zeros, rows, c.astype(dtype))


def norms_by_gram(
    products: list[OuterProducts], *, roundings: int, is_bounded: bool
) -> NormSource:
    """The norm of each gradient G, without G, and a bound of |G| and of its terms:

        |G|^2 = sum_ts (a_t . a_s)(c_t . c_s)      Li et al., 2022
        |G| <= sum_t |a_t| |c_t|

    Where squares would leave the range of the dtype, the norm is the bound.

    Args:
      products: the outer products of all sites.
      roundings: how many roundings a square has at most.
      is_bounded: whether a gradient must be at most 1 + e times as long as its norm,
        with the error e of `_bounds.py`, as in a private sum. A CPU then adds up
        squares in float64. Elsewhere the norm is rounded up by the most that its
        additions may lose, in whatever order they are made.
    """
    terms = _gram_terms(products)
    bounds = _term_bounds(terms)
    is_in_range = _squares_are_in_range(terms, bounds)
    if is_bounded:
        squares = _bounded_squares(terms, bounds, is_in_range, roundings)
    else:
        squares = _squares(terms, terms.c.dtype)
    # A user may differentiate `clipped_grad`, and the derivative of sqrt(0) would be
    # NaN.
    is_positive = is_in_range & (squares > 0)
    positive_squares = jnp.where(is_positive, squares, 1)
    roots = jnp.where(is_positive, jnp.sqrt(positive_squares), 0)
    norms = jnp.where(is_in_range, roots, bounds)
    term_bounds = bounds
    if not is_bounded:
        # `_norms_of_examples` divides every bound by MAX_CANCELLATION.
        term_bounds = bounds * (MAX_CANCELLATION / MAX_CANCELLATION_IN_MEANS)
    return NormSource(norms, term_bounds)


class GramTerms(NamedTuple):
    """The outer products of all sites, joined along positions. Each pair of positions
    makes a term of the square.
    """

    rows: Array | None  # of lookups, if there are any
    a: Array  # the inputs of all other sites
    c: Array  # of all sites, lookups first
    a_norms: Array  # |a_t| of each position
    c_norms: Array  # |c_t|

    @property
    def is_nonzero(self) -> Array:
        """Whether the outer product of a position is not 0."""
        return (self.a_norms != 0) & (self.c_norms != 0)


def _gram_terms(products: list[OuterProducts]) -> GramTerms:
    """The outer products of all sites, in one dtype. At least one site is no lookup:
    for lookups alone there is `sums_of_rows`.
    """
    lookups = [outer for outer in products if outer.is_lookup]
    dense = joined([outer for outer in products if not outer.is_lookup])
    dtype = np.dtype(np.float32)
    for array in jax.tree.leaves(products):
        # Numbers of rows are integers, and change no dtype.
        if jnp.issubdtype(array.dtype, np.inexact):
            dtype = np.promote_types(dtype, array.dtype)
    a = dense.a.astype(dtype)
    a_norms = _norms_of_vectors(a)
    c = dense.c
    rows = None
    if lookups:
        rows, c_of_lookups = joined(lookups)
        # The input of a lookup is 1 in one row.
        ones = jnp.ones_like(rows, dtype)
        a_norms = jnp.concatenate([ones, a_norms], BATCHED_POSITION_AXIS)
        c = jnp.concatenate([c_of_lookups, c], BATCHED_POSITION_AXIS)
    c = c.astype(dtype)
    c_norms = _norms_of_vectors(c)
    terms = GramTerms(rows, a, c, a_norms, c_norms)
    if c.shape[1] == 1:
        # With the axis of a stack of one, XLA on a CPU would compute a and c twice.
        terms = jax.tree.map(lambda x: x[:, 0], terms)
    return terms


def _term_bounds(terms: GramTerms) -> Array:
    """The bound of each gradient, sum_t |a_t| |c_t|. For a stack it is the norm of the
    bounds of its matrices.
    """
    term_norms = _products_of_norms(terms.a_norms, terms.c_norms)
    return _norms_along_batch(jnp.sum(term_norms, -1))


def _squares_are_in_range(terms: GramTerms, bounds: Array) -> Array:
    """Whether squares stay in the range of the dtype, for each example."""
    norm_sums = jnp.where(terms.is_nonzero, terms.a_norms + terms.c_norms, 0)
    total = _sum_per_example(norm_sums)
    position_count = norm_sums[0].size  # of the whole stack
    info = jnp.finfo(bounds.dtype)
    # Numbers below tiny are flushed to 0. Of P positions of the whole stack, R rows and
    # K columns, with A = sum (|a_t| + |c_t|), inner products lose R tiny and K tiny,
    # and their products tiny, together at most
    #     max(R, K) tiny A^2 + P^2 tiny <= 2^26 tiny (A + 2^-13 P)^2
    # for R, K up to 2^24. That is below eps / 2 of the square of a bound that exceeds
    # 2^13 sqrt(2 tiny / eps) (A + 2^-13 P).
    smallest = 2.0**13 * float(2 * info.tiny / info.eps) ** 0.5
    is_large_enough = bounds > smallest * (total + 2.0**-13 * position_count)
    largest = float(info.max) ** 0.5
    is_small_enough = jnp.maximum(bounds, total) < largest
    return is_large_enough & is_small_enough


def _bounded_squares(
    terms: GramTerms, bounds: Array, is_in_range: Array, roundings: int
) -> Array:
    """The squares of norms for a private sum. On a CPU a square is too small by at most
    what float64 loses. Elsewhere it is rounded up, and never too small.
    """
    dtype = terms.c.dtype
    lost_share = gamma(roundings, dtype)
    # No gradient is longer than its bound, so at most the square of that is added.
    lost_share = min(lost_share, 1.0)

    def in_float64(terms: GramTerms) -> Array:
        with jax.enable_x64(True):
            squares = _squares(terms, np.float64)
            return lax.convert_element_type(squares, dtype)

    def rounded_up(terms: GramTerms) -> Array:
        lost = jnp.where(is_in_range, lost_share * bounds**2, 0)
        return jnp.maximum(_squares(terms, dtype), 0) + lost

    return per_platform(terms, cpu=in_float64, gpu=rounded_up, plain=rounded_up)


def gamma(count: int, dtype: Any) -> float:
    """gamma(n) = n u / (1 - n u): the largest error of a sum with n roundings, divided
    by the sum of the sizes of its terms. u is half of eps.
    """
    share = count * float(jnp.finfo(dtype).eps) / 2
    if share >= 1:
        return np.inf
    return share / (1 - share)


def _squares(terms: GramTerms, dtype: Any) -> Array:
    """|G|^2 = sum_ts (a_t . a_s)(c_t . c_s), for each example."""
    a = lax.convert_element_type(terms.a, dtype)
    c = lax.convert_element_type(terms.c, dtype)
    products_of_a = _inner_products(a)
    products_of_c = _inner_products(c)
    if terms.rows is not None:
        products_of_a = _with_lookups(products_of_a, terms.rows, a)
    # Selected, since beside a cotangent of 0 the product of inputs may be inf.
    is_nonzero = terms.is_nonzero
    both_are_nonzero = is_nonzero[..., :, None] & is_nonzero[..., None, :]
    terms_of_pairs = products_of_a * products_of_c
    return _sum_per_example(jnp.where(both_are_nonzero, terms_of_pairs, 0))


def _inner_products(a: Array) -> Array:
    """a_t . a_s of all pairs of positions, [..., t, s]."""
    stack_axes = tuple(range(a.ndim - 2))
    last_axis = (a.ndim - 1,)
    # Not `jnp.einsum`: it asks for its dtype by name, which vmap and derivatives do
    # again, where there may be no float64.
    return lax.dot_general(
        a,
        a,
        dimension_numbers=((last_axis, last_axis), (stack_axes, stack_axes)),
        precision=HIGHEST,
    )


def _with_lookups(products_of_a: Array, rows: Array, a: Array) -> Array:
    """The inner products of all inputs, where those of lookups are 1 in one row and
    come first.
    """
    is_same_row = rows[..., :, None] == rows[..., None, :]
    # The inner product of a_t with the input of a lookup is the entry a_t[row].
    entries = jnp.take_along_axis(a, rows[..., None, :], axis=-1)
    products_of_lookups = is_same_row.astype(a.dtype)
    upper_half = [products_of_lookups, entries.mT]
    lower_half = [entries, products_of_a]
    return jnp.block([upper_half, lower_half])


def _sum_per_example(x: Array) -> Array:
    """For each example, over all other axes."""
    return jnp.sum(x, range(1, x.ndim))
