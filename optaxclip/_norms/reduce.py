"""From leaves to norms.

`norms_of` has a way for each order:

    2, "rms", "average"    `norms_by_squares`       roots of sums of squares
    inf                    `_norms_of_order_inf`    the largest modulus
    any other              `_norms_by_powers`       divided by the largest, then powers

Each way computes a term of each leaf (sums.py) and joins the terms over leaves and
devices (join.py). Norms are right for zeros and all normal numbers: no square
overflows or is lost. The derivative is finite everywhere. For elements that are 0 it is
0 by definition: below order 1 the true one is infinite there.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._numbers import divided, norm_dtype
from . import join
from .moduli import tangent_of_modulus
from .specs import NormPlan
from .squares import norms_by_squares
from .sums import bits_of_largest, sum_in_float64_on_cpu, sum_over

# Orders whose norm is a root of squares. None is 2.
ORDERS_OF_SQUARES = (None, 2, "rms", "average")


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def norms_of(plan: NormPlan, arrays: list[Array]) -> list[Array]:
    """The norms of some leaves.

    Args:
      plan: how each leaf enters its norm.
      arrays: the leaves. On a device of shard_map and pmap, its part of them.

    Returns:
      For each norm a scalar, or an array with the axes of a leaf that keeps some.
    """
    # An empty tree has the norm 0.
    if not arrays:
        return [jnp.zeros((), np.float32)] * plan.norm_count
    if plan.ord in ORDERS_OF_SQUARES:
        return norms_by_squares(plan, arrays)
    if plan.ord == math.inf:
        return _norms_of_order_inf(plan, arrays)
    return _norms_by_powers(plan, arrays, float(plan.ord))


# ------------------------------------------------------------------------ other orders


def _norms_of_order_inf(plan: NormPlan, arrays: list[Array]) -> list[Array]:
    """The norms of order inf. They are compared as integers: the bits of non-negative
    floats sort as the floats do.
    """
    dtype = norm_dtype(arrays)
    terms = []
    for spec, array in zip(plan.specs, arrays):
        terms.append(bits_of_largest(array, spec.summed_axes, dtype))
    totals = join.per_norm(
        plan, terms, operation=join.MAX, join_leaves=join.joined_by_platform
    )
    return [lax.bitcast_convert_type(bits, dtype) for bits in totals]


def _norms_by_powers(plan: NormPlan, arrays: list[Array], order: float) -> list[Array]:
    """The norms of order p. Elements are first divided by the largest element of their
    norm, so that no power leaves the range. That reads them a second time. An order
    below 1/4 needs no division.
    """
    dtype = norm_dtype(arrays)
    divisors = []
    for largest in _norms_of_order_inf(plan, arrays):
        ones = jnp.ones_like(largest)
        if order < 0.25:
            # Not divided: powers of all numbers are in the range. A division would make
            # 0 of small elements such as 1e-40, whose power 1e-40^0.15 = 1e-6 counts.
            divisors.append(ones)
        else:
            # 0, NaN and inf do not divide. They come out of the sum as they are.
            is_divisor = (largest > 0) & (largest < jnp.inf)
            divisors.append(jnp.where(is_divisor, largest, ones))
    terms = []
    for spec, array in zip(plan.specs, arrays):
        # After a division quotients are in [0, 1], and one is 1. A power that becomes 0
        # is too small to count.
        moduli = jnp.abs(array).astype(dtype)
        quotients = divided(moduli, spec.local_value(divisors))
        if order.is_integer():
            powers = lax.integer_pow(quotients, int(order))
        else:
            powers = quotients**order
        terms.append(sum_in_float64_on_cpu(powers, spec.summed_axes))
    totals = _sums_per_norm(plan, terms)
    return [divisor * total ** (1 / order) for divisor, total in zip(divisors, totals)]


def _sums_per_norm(plan: NormPlan, terms: list[Array]) -> list[Array]:
    """The sum of each norm, from the sums of its leaves."""
    return join.per_norm(
        plan, terms, operation=join.ADD, join_leaves=join.joined_by_platform
    )


# -------------------------------------------------------------------------- derivative


@norms_of.defjvp
def _norms_jvp(
    plan: NormPlan, primals: tuple[list[Array]], tangents: tuple[list[Array]]
) -> tuple[list[Array], list[Array]]:
    """By hand: sqrt has no finite derivative at 0, and squares may overflow.

    2            sum x / norm * dx
    "rms"        sum x / rms * dx / N
    "average"    sum x / rms * dx / N^1.5, with average = rms / N^0.5
    inf          the mean of d|x| over the largest elements, in all leaves and on
                 all devices
    any other    sum (|x| / norm)^(p-1) * d|x|
    """
    (arrays,) = primals
    (array_tangents,) = tangents
    norms = norms_of(plan, arrays)
    dtype = norm_dtype(arrays)
    # `element_divisors` divide the elements, and `total_divisors` their sum: by N for a
    # mean, and by 1 for other orders.
    element_divisors = norms
    counts = plan.element_counts(arrays, dtype)
    total_divisors = counts
    if plan.ord == "average":
        # The RMS of the elements, and N^1.5.
        element_divisors = [norm * count**0.5 for norm, count in zip(norms, counts)]
        total_divisors = [count * count**0.5 for count in counts]
    terms = []
    counts_of_largest = []
    for spec, array, tangent in zip(plan.specs, arrays, array_tangents):
        divisor = spec.local_value(element_divisors)
        if plan.ord in ORDERS_OF_SQUARES:
            products = _quotients_times_tangent(array, divisor, tangent)
        else:
            slopes = _slopes(float(plan.ord), array, divisor)
            products = slopes * tangent_of_modulus(array, tangent).astype(dtype)
            if plan.ord == math.inf:
                count = sum_in_float64_on_cpu(slopes, spec.summed_axes)
                counts_of_largest.append(count)
        terms.append(sum_over(products, spec.summed_axes))
    totals = _sums_per_norm(plan, terms)
    if plan.ord == math.inf:
        # Nothing is the largest where the norm is NaN: 0 / 1.
        total_counts = _sums_per_norm(plan, counts_of_largest)
        total_divisors = [jnp.maximum(count, 1) for count in total_counts]
    return norms, [total / divisor for total, divisor in zip(totals, total_divisors)]


def _quotients_times_tangent(array: Array, norm: Array, tangent: Array) -> Array:
    """x / norm * dx. Computed from x and not from |x|: JAX's derivative of |x| at 0 is
    0, so second derivatives would be lost.
    """
    if jnp.iscomplexobj(array):
        real = _quotients_times_tangent(jnp.real(array), norm, jnp.real(tangent))
        imag = _quotients_times_tangent(jnp.imag(array), norm, jnp.imag(tangent))
        return real + imag
    # Where the norm is 0 all x are 0: 0 / 1 is 0. A norm that is NaN also divides by 1,
    # and the NaN in x shows.
    divisor = jnp.where(norm > 0, norm, 1.0)
    quotients = divided(array.astype(norm.dtype), divisor)
    return quotients * tangent.astype(norm.dtype)


def _slopes(order: float, array: Array, norm: Array) -> Array:
    """What d|x| of each element is multiplied by, for orders without squares. For order
    inf this is 1 for the largest elements, and 0 for all others.
    """
    moduli = jnp.abs(array).astype(norm.dtype)
    if order == math.inf:
        return (moduli == norm).astype(norm.dtype)
    divisor = jnp.where(norm > 0, norm, 1.0)
    quotients = divided(moduli, divisor)
    # Two wheres: at 0 a power below 1 does not exist, and the unused branch of a where
    # must stay finite as well.
    bases = jnp.where(quotients > 0, quotients, 1.0)
    return jnp.where(quotients > 0, bases ** (order - 1.0), 0.0)
