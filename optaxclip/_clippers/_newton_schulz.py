"""Singular values by matrix products alone: the clipped matrices, by a hard or a smooth
shrink, and the largest singular values.

Both shrinks use the polar factor [Z; B] of a matrix with more rows than columns:

    [cI; X]     = [Z; B] (X^H X + c^2 I)^(1/2)
    B           has the singular values b = s / sqrt(s^2 + c^2)
    Z           has the singular values z = c / sqrt(s^2 + c^2)

    smooth(2)   c B = X (I + X^H X / c^2)^(-1/2)
    hard        the singular values c b / max(b, z), where
                max(b, z)^2 = (1 + |1 - 2 z^2|) / 2, with |A| = A sign(A)

The singular values of [cI; X] are at least c, so the iteration knows where to begin.
Accuracy is lost with s_max / c. A root of the Gram matrix loses it with the square.

On a TPU all matrices of one width go through the same products (see `_piles`).

Reference: F. L. Cesista, Numerically stable spectral clipping via Newton-Schulz, 2025,
for sign iterations. Chen, Chow, A stable scaling of Newton-Schulz for improving the
sign function computation of a Hermitian matrix, 2014, for the scaling.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._mesh import typed_as
from ._piles import each_replaced, of_each
from ._tiles import Matrices, Whole, adjoint

# The Gram matrix is raised to the power 2^16, whose trace bounds the largest singular
# value. m equal singular values are overestimated by m^(1 / 2^17).
SQUARINGS = 16
# By the bytes of a real number: as many as turn eps into 1, and some more.
STEPS = {4: 24, 8: 48}

Carry = tuple[jax.Array, jax.Array, jax.Array]


def largest(leaves: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    """For each leaf [layers, rows, columns] the largest singular value of each matrix,
    and a bound that it never exceeds, both [layers, 1, 1].

    Both come from the 2^16th power of the Gram matrix, by repeated squaring.
    """
    return of_each(_largest, leaves)


def shrunk(
    leaves: Sequence[jax.Array],
    limits: Sequence[jax.Array],
    bounds: Sequence[jax.Array],
    *,
    steps: int | None,
    is_hard: bool,
) -> list[jax.Array]:
    """Matrices with their singular values shrunk, by `hard` or by `smooth(2)`.

    Their singular values are at most `bounds`. `steps` None is as many as the dtype of
    a matrix needs.
    """
    # From 2^13 bound on nothing is shortened in float32, and [cI; X] would lose X.
    limits = [
        jnp.minimum(limit, 2.0**13 * bound)
        for limit, bound in zip(limits, bounds)
    ]
    shrink = partial(_shrunk, steps=steps, is_hard=is_hard)
    found = each_replaced(shrink, leaves, limits, bounds)
    return [limit * b for limit, b in zip(limits, found)]


def _largest(matrices: Matrices, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    gram = matrices.gram(x)
    fixed = lax.stop_gradient(gram)
    trace = _trace(fixed)
    square = partial(_square, matrices.squares)
    start = fixed / trace, jnp.log(trace), jnp.full_like(trace, 0.5)
    power, log, _ = lax.fori_loop(0, SQUARINGS, square, start)
    # A mean of the squared singular values in which the largest outweighs all others.
    # It is never above the largest.
    weights = _inner(power, power)
    product = matrices.squares.product(gram, power)
    mean = _inner(power, product) / jnp.where(weights > 0, weights, 1.0)
    # The root of 0 has no derivative.
    norm = jnp.where(mean > 0, jnp.sqrt(jnp.where(mean > 0, mean, 1.0)), 0.0)
    # The bound is exact but for rounding, which 0.001 covers.
    return norm, 1.001 * jnp.exp(0.5 * log)


def _shrunk(
    matrices: Matrices,
    x: jax.Array,
    limit: jax.Array,
    bound: jax.Array,
    *,
    steps: int | None,
    is_hard: bool,
) -> jax.Array:
    """B with the singular values b, or b / max(b, z)."""
    steps = steps or STEPS[x.real.dtype.itemsize]
    highest = jnp.sqrt(bound**2 + limit**2)
    eye = jnp.eye(x.shape[-1], dtype=x.dtype)
    z = limit * jnp.expand_dims(eye, range(limit.ndim - 2))
    zx = matrices.stack(z, x)
    factor = _polar(matrices, zx, limit / highest, highest, steps)
    if is_hard:
        z = matrices.top(factor)
        inverse = _inverse_of_largest(matrices.squares, z, steps)
        factor = matrices.times(factor, inverse)
    return matrices.rest(factor)


def _inverse_of_largest(squares: Whole, z: jax.Array, steps: int) -> jax.Array:
    """max(b, z)^-1 for Hermitian Z, where b^2 = 1 - z^2."""
    eye = _eye_like(z)
    difference = eye - 2 * squares.product(z, adjoint(z))
    eps = jnp.full_like(z[..., :1, :1].real, jnp.finfo(z.dtype).eps)
    sign = _polar(squares, difference, eps, jnp.ones_like(eps), steps)
    absolute = squares.product(difference, sign)
    inverse = _inverse_root(squares, 0.5 * (eye + absolute))
    # What is not in reach of the steps counts as less than |1 - 2 z^2|, down to 0.
    lost = _in_reach(steps, float(jnp.finfo(z.dtype).eps))
    return inverse / math.sqrt(1 + lost)


def _polar(
    matrices: Matrices,
    x: jax.Array,
    lowest: jax.Array,
    highest: jax.Array,
    steps: int,
) -> jax.Array:
    """Turns every singular value of x / highest in [lowest, 1] into 1, by the iteration
    x <- r x (3 - r^2 x^2) / 2. For a Hermitian matrix this is the sign.

    Singular values that are too small for so many steps come out below 1.
    """

    def step(carry: Carry, _: None) -> tuple[Carry, None]:
        x, lowest, highest = carry
        r, lowest = _raised(lowest, jnp)
        # The first step divides by highest too, the others by 1. An array x / highest
        # would be a second copy of all matrices.
        r = r / highest
        gram = matrices.gram(x)
        factor = 0.5 * r * (3 * _eye_like(gram) - r**2 * gram)
        return (matrices.times(x, factor), lowest, jnp.ones_like(r)), None

    # For a lower one the iteration would not come to rest in time, and large singular
    # values would end anywhere.
    eps = float(jnp.finfo(x.dtype).eps)
    lowest = jnp.maximum(lax.stop_gradient(lowest), _in_reach(steps, eps))
    start = x, lowest, highest
    return lax.scan(step, start, length=steps)[0][0]


def _raised(lowest: Any, numpy: Any) -> tuple[Any, Any]:
    """The r that raises the lowest singular value most, and what becomes of that."""
    # Near lowest = 0 it would send 1 to 0, and 1 + eps below 0, so it is taken for 0.1
    # at least.
    low = numpy.maximum(lowest, 0.1)
    r = numpy.sqrt(3 / (1 + low + low**2))
    return r, 0.5 * r * lowest * (3 - (r * lowest) ** 2)


@lru_cache
def _in_reach(steps: int, eps: float) -> float:
    """The lowest singular value that so many steps turn into 1."""
    lowest = np.logspace(-40, 0, 4001)
    raised = lowest
    for _ in range(steps):
        _, raised = _raised(raised, np)
    return float(lowest[np.argmax(raised >= 1 - 4 * eps)])


def _inverse_root(squares: Whole, x: jax.Array) -> jax.Array:
    """x^(-1/2) of Hermitian matrices with eigenvalues in [1/2, 1].

    The error 1 - x y^2 is 1/2 at first, then 0.22, 0.04, 1e-3, 1e-6, 1e-12.
    """
    eye = _eye_like(x)

    def step(_: int, y: jax.Array) -> jax.Array:
        square = squares.product(y, y)
        return 0.5 * squares.product(y, 3 * eye - squares.product(x, square))

    return lax.fori_loop(0, 5, step, eye)


def _square(squares: Whole, _: int, carry: Carry) -> Carry:
    """Squares a matrix, divides it by its trace, and adds up the logarithms."""
    power, log, weight = carry
    power = squares.product(power, power)
    trace = _trace(power)
    return power / trace, log + weight * jnp.log(trace), weight / 2


def _trace(x: jax.Array) -> jax.Array:
    """The trace of each matrix, [..., 1, 1]. 1 for a matrix of zeros."""
    trace = jnp.real(jnp.trace(x, axis1=-2, axis2=-1))[..., None, None]
    return jnp.where(trace > 0, trace, 1.0)


def _eye_like(x: jax.Array) -> jax.Array:
    """An identity for each matrix, with as many columns."""
    columns = x.shape[-1]
    eye = jnp.eye(columns, dtype=x.dtype)
    eyes = jnp.broadcast_to(eye, (*x.shape[:-2], columns, columns))
    # On an Explicit mesh factors of a product must be split alike.
    return typed_as(eyes, jax.typeof(x))


def _inner(a: jax.Array, b: jax.Array) -> jax.Array:
    """The inner product of each pair of matrices, [matrices, 1, 1]."""
    return jnp.sum(jnp.real(jnp.conj(a) * b), (-2, -1), keepdims=True)
