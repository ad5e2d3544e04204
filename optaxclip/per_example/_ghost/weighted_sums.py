"""The sum of clipped gradients over examples b and positions t, from outer products:

    sum_b f_b G_b = sum_bt a_bt (f_b c_bt)'

It is a matrix product of a and f c.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._factors import times_square
from .._example_factors import GroupFactors, along_batch
from .forms import OuterProducts

# Of `lax.dot_general`, for both factors or for each
Precision = lax.Precision | tuple[lax.Precision, lax.Precision] | None


def terms_of_sum(
    outer: OuterProducts,
    factors: GroupFactors,
    *,
    zeros: Array,
    positions_at_once: int,
    precision: Precision,
) -> list[Array]:
    """The weighted sum of the gradients of some examples, in parts: sums over at most
    `positions_at_once` positions of each. All are like `zeros`, [stack, rows, columns].
    """
    terms = []
    for a, c in _weighted(outer, factors, zeros.dtype):
        positions = a.shape[2]
        for start in range(0, positions, positions_at_once):
            block = slice(start, start + positions_at_once)
            outer_of_block = OuterProducts(a[:, :, block], c[:, :, block])
            terms.append(_sum_of_products(outer_of_block, zeros, precision))
    return terms


def _weighted(
    outer: OuterProducts, factors: GroupFactors, dtype: np.dtype
) -> list[OuterProducts]:
    """Outer products a_t (f c_t)', 0 in examples that do not count. For bfloat16 there
    are two, whose sum it is.
    """
    a, c = outer
    # Selected, since 0 times NaN is NaN.
    a = jnp.where(along_batch(factors.is_counted, a), a, 0)
    c = jnp.where(along_batch(factors.is_counted, c), c, 0)
    weighted_c = times_square(c.astype(dtype), along_batch(factors.roots, c))
    # A factor above 1 may make a cotangent inf, and inf times an input of 0 is NaN. The
    # largest number in its place only makes the example shorter: norms of so large
    # numbers count no cancellation (docs/numerics.md).
    largest = jnp.finfo(dtype).max
    weighted_c = jnp.clip(weighted_c, -largest, largest)
    weighted_c *= along_batch(factors.inverse_divisor, c).astype(dtype)
    is_bfloat16 = a.dtype == c.dtype == jnp.bfloat16
    if is_bfloat16 and weighted_c.dtype == np.float32:
        # As fast on a GPU and a TPU as one product that gives bfloat16.
        leading, trailing = _in_bfloat16(weighted_c)
        return [OuterProducts(a, leading), OuterProducts(a, trailing)]
    if not outer.is_lookup:
        a = a.astype(dtype)
    return [OuterProducts(a, weighted_c)]


def _in_bfloat16(x: Array) -> tuple[Array, Array]:
    """Float32 as a sum of two arrays of bfloat16. One would round the factors.

    The first is cut and not rounded, so that without the second, which may be flushed
    to 0, the gradient is shorter.
    """
    leading_bits = lax.bitcast_convert_type(x, np.uint32) & np.uint32(0xFFFF0000)
    leading = lax.bitcast_convert_type(leading_bits, np.float32)
    trailing = x - leading
    return leading.astype(jnp.bfloat16), trailing.astype(jnp.bfloat16)


def _sum_of_products(outer: OuterProducts, zeros: Array, precision: Precision) -> Array:
    """The sum of outer products over examples and positions, like `zeros`."""
    a, c = outer
    if outer.is_lookup:
        stack = jnp.arange(len(zeros))[:, None]
        return zeros.at[stack, a].add(c)
    # a and c are [example, stack, position, ...]. Examples and positions stay two axes:
    # joined, they would be gathered if devices split the batch.
    summed_axes = (0, 2)
    stack_axis = (1,)
    return lax.dot_general(
        a,
        c,
        dimension_numbers=((summed_axes, summed_axes), (stack_axis, stack_axis)),
        precision=precision,
        preferred_element_type=zeros.dtype,
    )
