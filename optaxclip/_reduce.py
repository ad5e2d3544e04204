"""From leaves to norms.

`norms_of` has a way for each order:

    2, "rms", "average"    _squares.py    roots of sums of squares, for each platform
    inf                    `_largest`     the largest modulus
    any other              `_by_powers`   divided by the largest, then powers

Each way computes a term of each leaf (_sums.py) and joins the terms over leaves and
devices (_join.py). Norms are right for zeros and all normal numbers: no square
overflows or is lost. The derivative is finite everywhere. For elements that are 0 it is
0 by definition: below order 1 the true one is infinite there.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import _join as join
from ._moduli import tangent_of_modulus
from ._specs import NormPlan
from ._squares import norms_by_squares
from ._sums import divided, largest_bits, norm_dtype, sum_in_range, sum_over

# Orders whose norm is a root of squares. None is 2.
OF_SQUARES = (None, 2, "rms", "average")


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def norms_of(plan: NormPlan, arrays: list[Array]) -> list[Array]:
    """The norms of some leaves.

    Args:
      plan: how each leaf enters its norm.
      arrays: the leaves. On a device of shard_map and pmap, its part of them.

    Returns:
      For each norm a scalar, or an array with the axes of a leaf that keeps some.
    """
    if plan.ord in OF_SQUARES:
        return norms_by_squares(plan, arrays)
    if plan.ord == math.inf:
        return _largest(plan, arrays)
    return _by_powers(plan, arrays, float(plan.ord))


# ------------------------------------------------------------------------ other orders


def _largest(plan: NormPlan, arrays: list[Array]) -> list[Array]:
    """The norms of order inf. They are compared as integers: the bits of non-negative
    floats sort as the floats do.
    """
    dtype = norm_dtype(arrays)
    terms = []
    for spec, array in zip(plan.specs, arrays):
        terms.append(largest_bits(array, spec.axes, dtype))
    totals = join.per_norm(
        plan,
        terms,
        zero=jnp.zeros((), np.int64 if dtype == np.float64 else np.int32),
        operation=join.MAX,
        join_leaves=join.by_platform,
    )
    return [lax.bitcast_convert_type(bits, dtype) for bits in totals]


def _by_powers(plan: NormPlan, arrays: list[Array], order: float) -> list[Array]:
    """The norms of order p. Elements are first divided by the largest element of their
    norm, so that no power leaves the range. That reads them a second time. An order
    below 1/4 needs no division.
    """
    dtype = norm_dtype(arrays)
    divisors = []
    for largest in _largest(plan, arrays):
        ones = jnp.ones_like(largest)
        if order < 0.25:
            # Only the shape of `largest` is used. These powers of all numbers are in
            # the range. A quotient of 1e-40 would become 0, while its power
            # 1e-40^0.15 = 1e-6 counts.
            divisors.append(ones)
        else:
            # 0, NaN and inf do not divide. They come out of the sum as they are.
            divides = (largest > 0) & (largest < jnp.inf)
            divisors.append(jnp.where(divides, largest, ones))
    terms = []
    for spec, array in zip(plan.specs, arrays):
        # After a division quotients are in [0, 1], and one is 1. A power that becomes 0
        # is too small to count.
        quotient = divided(jnp.abs(array).astype(dtype), spec.local_value(divisors))
        if order.is_integer():
            power = lax.integer_pow(quotient, int(order))
        else:
            power = quotient**order
        terms.append(sum_in_range(power, spec.axes))
    norms = []
    for divisor, total in zip(divisors, _added(plan, terms, dtype)):
        norms.append(divisor * total ** (1 / order))
    return norms


def _added(plan: NormPlan, terms: list[Array], dtype: np.dtype) -> list[Array]:
    """The sum of each norm, from the sums of its leaves."""
    return join.per_norm(
        plan,
        terms,
        zero=jnp.zeros((), dtype),
        operation=join.ADD,
        join_leaves=join.by_platform,
    )


# -------------------------------------------------------------------------- derivative


@norms_of.defjvp
def _norms_jvp(
    plan: NormPlan, primals: tuple[list[Array]], tangents: tuple[list[Array]]
) -> tuple[list[Array], list[Array]]:
    """By hand: sqrt has no finite derivative at 0, and squares may overflow."""
    (arrays,) = primals
    (array_tangents,) = tangents
    norms = norms_of(plan, arrays)
    if plan.ord in OF_SQUARES:
        return norms, _tangents_by_squares(plan, norms, arrays, array_tangents)
    if plan.ord == math.inf:
        return norms, _tangents_of_largest(plan, norms, arrays, array_tangents)
    order = float(plan.ord)
    return norms, _tangents_by_powers(plan, norms, arrays, array_tangents, order=order)


def _tangents_by_squares(
    plan: NormPlan, norms: list[Array], arrays: list[Array], tangents: list[Array]
) -> list[Array]:
    """The tangents of norms of order 2, "rms" and "average" = rms / N^0.5.

    d norm = sum (x / norm) dx
    d rms = sum (x / rms) dx / N
    d average = sum (x / rms) dx / N^1.5
    """
    dtype = norm_dtype(arrays)
    counts = plan.element_counts(arrays, dtype)
    x_divisors = norms  # the norm or the rms
    divisors = counts  # 1 for order 2
    if plan.ord == "average":
        x_divisors = [norm * count**0.5 for norm, count in zip(norms, counts)]
        divisors = [count * count**0.5 for count in counts]
    terms = []
    for spec, array, tangent in zip(plan.specs, arrays, tangents):
        products = _slope_times_tangent(array, spec.local_value(x_divisors), tangent)
        terms.append(sum_over(products, spec.axes))
    totals = _added(plan, terms, dtype)
    return [total / divisor for total, divisor in zip(totals, divisors)]


def _slope_times_tangent(array: Array, norm: Array, tangent: Array) -> Array:
    """x / norm * dx. Computed from x and not from |x|: JAX's derivative of |x| at 0 is
    0, so second derivatives would be lost.
    """
    if jnp.iscomplexobj(array):
        real = _slope_times_tangent(jnp.real(array), norm, jnp.real(tangent))
        return real + _slope_times_tangent(jnp.imag(array), norm, jnp.imag(tangent))
    # Where the norm is 0 all x are 0: 0 / 1 is 0. A norm that is NaN also divides by 1,
    # and the NaN in x shows.
    divisor = jnp.where(norm > 0, norm, 1.0)
    quotient = divided(array.astype(norm.dtype), divisor)
    return quotient * tangent.astype(norm.dtype)


def _tangents_of_largest(
    plan: NormPlan, norms: list[Array], arrays: list[Array], tangents: list[Array]
) -> list[Array]:
    """The tangents of norms of order inf: the mean of d|x| over the largest elements,
    in all leaves and on all devices.
    """
    dtype = norm_dtype(arrays)
    terms = []
    counts_of_leaves = []
    for spec, array, tangent in zip(plan.specs, arrays, tangents):
        moduli = jnp.abs(array).astype(dtype)
        is_largest = (moduli == spec.local_value(norms)).astype(dtype)
        modulus_tangent = tangent_of_modulus(array, tangent).astype(dtype)
        terms.append(sum_over(is_largest * modulus_tangent, spec.axes))
        counts_of_leaves.append(sum_in_range(is_largest, spec.axes))
    counts = _added(plan, counts_of_leaves, dtype)
    tangents_of_norms = []
    for total, count in zip(_added(plan, terms, dtype), counts):
        # Nothing is the largest where the norm is NaN: 0 / 1.
        tangents_of_norms.append(total / jnp.maximum(count, 1))
    return tangents_of_norms


def _tangents_by_powers(
    plan: NormPlan,
    norms: list[Array],
    arrays: list[Array],
    tangents: list[Array],
    *,
    order: float,
) -> list[Array]:
    """The tangents of norms of order p: sum (|x| / norm)^(p-1) d|x|."""
    dtype = norm_dtype(arrays)
    terms = []
    for spec, array, tangent in zip(plan.specs, arrays, tangents):
        norm = spec.local_value(norms)
        divisor = jnp.where(norm > 0, norm, 1.0)
        quotient = divided(jnp.abs(array).astype(dtype), divisor)
        # Two wheres: at 0 a power below 1 does not exist, and the unused branch of a
        # where must stay finite as well.
        base = jnp.where(quotient > 0, quotient, 1.0)
        power = jnp.where(quotient > 0, base ** (order - 1.0), 0.0)
        modulus_tangent = tangent_of_modulus(array, tangent).astype(dtype)
        terms.append(sum_over(power * modulus_tangent, spec.axes))
    return _added(plan, terms, dtype)
