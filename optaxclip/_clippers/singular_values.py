"""Singular values by matrix products alone: the largest of them, and matrices with
shrunk ones.

Both shrinks use the polar factor [Z; B] of a matrix with more rows than columns:

    [cI; X]     = [Z; B] (X^H X + c^2 I)^(1/2)
    B           has the singular values b = s / sqrt(s^2 + c^2)
    Z           has the singular values z = c / sqrt(s^2 + c^2)

    smooth(2)   c B = X (I + X^H X / c^2)^(-1/2)
    hard        the singular values c b / max(b, z), where
                max(b, z)^2 = (1 + |1 - 2 z^2|) / 2, with |A| = A sign(A)

The singular values of [cI; X] are at least c, so the iteration knows where to begin.
Accuracy is lost with s_max / c. A root of the Gram matrix would lose it with the square
of that ratio.

All functions take matrices [..., rows, columns] with at least as many rows as columns,
and numbers [..., 1, 1] for each of them.

Reference: F. L. Cesista, Numerically stable spectral clipping via Newton-Schulz, 2025,
for sign iterations. Chen, Chow, A stable scaling of Newton-Schulz for improving the
sign function computation of a Hermitian matrix, 2014, for the scaling.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from .._devices.mesh_types import resharded_as
from ..rules._memory import root

# The Gram matrix is raised to the power 2^17. Where m singular values almost tie, the
# largest is underestimated by the factor m^(1 / 2^18).
SQUARINGS = 17
# Steps that turn eps into 1, and some more, by the bytes of a real number.
POLAR_STEPS = {4: 24, 8: 48}


def matmul(a: Array, b: Array) -> Array:
    """a @ b, with factors that are not rounded."""
    # By default accelerators round float32 factors to bfloat16 or TF32.
    return jnp.matmul(a, b, precision="highest")


def adjoint(x: Array) -> Array:
    """The conjugate transpose of each matrix."""
    return jnp.conj(x.mT)


def largest_singular_values(x: Array) -> Array:
    """The largest singular value of each matrix, [..., 1, 1]."""
    gram = matmul(adjoint(x), x)

    def square(_: int, power: Array) -> Array:
        power = matmul(power, power)
        trace = jnp.trace(power, axis1=-2, axis2=-1)
        trace = jnp.real(trace)[..., None, None]
        # Zeros stay zeros.
        divisor = jnp.where(trace > 0, trace, 1.0)
        return power / divisor.astype(power.dtype)

    power = lax.fori_loop(0, SQUARINGS, square, lax.stop_gradient(gram))
    # A weighted mean of the squared singular values. The largest outweighs all others,
    # and no mean is above it.
    weighted = jnp.real(jnp.conj(power) * gram)
    mean = jnp.sum(weighted, axis=(-2, -1), keepdims=True)
    return root(mean)


def shrunk_by_products(
    x: Array, limit: Array, norm: Array, steps: int | None, *, is_hard: bool
) -> Array:
    """Matrices with their singular values shrunk, by `hard` or by `smooth(2)`.

    `norm` is their largest singular value. `steps` None means as many as the dtype
    needs.
    """
    # The bound is above all singular values, also where `largest_singular_values`
    # underestimates.
    bound = 1.001 * lax.stop_gradient(norm)
    if steps is None:
        steps = POLAR_STEPS[x.real.dtype.itemsize]
    # A limit above 2^13 times the bound, in float64 2^28 times, shortens by less than
    # the dtype resolves. It is cut there, since its square must not overflow.
    digits = int(jnp.finfo(bound.dtype).nmant)
    largest_ratio = 2.0 ** (digits // 2 + 2)
    limit = jnp.minimum(limit, largest_ratio * bound)
    # Above the singular values of [cI; X], which are sqrt(s^2 + c^2).
    joint_bound = jnp.sqrt(bound**2 + limit**2)
    # On an Explicit mesh that splits layers, [cI] must be split as X is.
    limit_eye = limit.astype(x.dtype) * _eye(x)
    limit_eye = resharded_as(limit_eye, jax.typeof(x))
    joint = jnp.concatenate([limit_eye, x], axis=-2)
    joint = joint / joint_bound.astype(x.dtype)
    lowest = limit / joint_bound
    polar = _polar(joint, lowest, steps)
    z, b = jnp.split(polar, [x.shape[-1]], axis=-2)
    if is_hard:
        b = matmul(b, _inverse_of_max(z, steps))
    return limit.astype(x.dtype) * b


def _inverse_of_max(z: Array, steps: int) -> Array:
    """max(b, z)^-1 for Hermitian Z, where b^2 = 1 - z^2."""
    eye = _eye(z)
    square_of_z = matmul(z, adjoint(z))
    difference = eye - 2 * square_of_z
    sign = _polar(difference, jnp.finfo(z.dtype).eps, steps)
    absolute = matmul(difference, sign)
    square = 0.5 * (eye + absolute)

    # Newton's iteration for the inverse root of a matrix with eigenvalues in [1/2, 1].
    # The error, 1 - square y^2, is at most 1/2 for y = 1, then 0.22, 0.04, 1e-3, 1e-6,
    # 1e-12, 1e-24.
    def step(_: int, y: Array) -> Array:
        product = matmul(square, matmul(y, y))
        return 0.5 * matmul(y, 3 * eye - product)

    # The first step, from y = 1, multiplies no matrices.
    first = 0.5 * (3 * eye - square)
    more_steps = 4 if z.real.dtype.itemsize == 4 else 5
    inverse = lax.fori_loop(0, more_steps, step, first)
    # With few steps `_polar` does not turn eigenvalues of `difference` near 0 into 1 or
    # -1. Then `square` is too small, by at most the factor 1 + _lowest_in_reach. The
    # division by its root keeps the inverse from being too large.
    return inverse / math.sqrt(1 + _lowest_in_reach(steps))


def _polar(x: Array, lowest: ArrayLike, steps: int) -> Array:
    """Turns all singular values in [lowest, 1] into 1. Of a Hermitian matrix this is
    the sign.

        x <- r x
        x <- x (3 - x^2) / 2

    Singular values that are too small for so many steps come out below 1.
    """

    def step(_: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        x, lowest = carry
        # This r raises the lowest singular value most. For a lowest value of 0 it would
        # be sqrt(3), which sends 1 to 0 and 1 + eps below 0. So it is that for 0.1.
        low = jnp.maximum(lowest, 0.1)
        r = jnp.sqrt(3 / (1 + low + low**2))
        lowest = r * lowest
        new_lowest = 0.5 * lowest * (3 - lowest**2)
        x = r.astype(x.dtype) * x
        gram = matmul(adjoint(x), x)
        factor = 0.5 * (3 * _eye(x) - gram)
        return matmul(x, factor), new_lowest

    # From a lower start r would stay large up to the last step, and singular values
    # near 1 would not settle.
    lowest = jnp.maximum(lax.stop_gradient(lowest), _lowest_in_reach(steps))
    polar, _ = lax.fori_loop(0, steps, step, (x, lowest))
    return polar


def _lowest_in_reach(steps: int) -> float:
    """The lowest singular value that so many steps of `_polar` turn into 1, to within
    4 eps of float64.
    """
    # A step multiplies small singular values by 2.466. The last four steps are for
    # those near 1.
    return min(1.0, 2.46 ** (4.1 - steps))


def _eye(x: Array) -> Array:
    """The identity matrix [1, ..., columns, columns] for matrices [..., columns]."""
    eye = jnp.eye(x.shape[-1], dtype=x.dtype)
    return jnp.expand_dims(eye, range(x.ndim - 2))
