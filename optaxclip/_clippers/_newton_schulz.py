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

All functions take matrices [..., rows, columns] with at least as many rows as columns,
and numbers [..., 1, 1] for each of them.

Reference: F. L. Cesista, Numerically stable spectral clipping via Newton-Schulz, 2025,
for sign iterations. Chen, Chow, A stable scaling of Newton-Schulz for improving the
sign function computation of a Hermitian matrix, 2014, for the scaling.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# The Gram matrix is raised to the power 2^17. Where m singular values almost tie, the
# largest is underestimated by m^(1 / 2^18).
SQUARINGS = 17
# By the bytes of a real number: as many as turn eps into 1, and some more.
STEPS = {4: 24, 8: 48}


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b, whose factors are not rounded."""
    # By default accelerators round float32 factors to bfloat16 or TF32.
    return jnp.matmul(a, b, precision="highest")


def adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of each matrix."""
    return jnp.conj(x.mT)


def largest(x: jax.Array) -> jax.Array:
    """The largest singular value of each matrix, [..., 1, 1]."""
    gram = product(adjoint(x), x)

    def square(_: int, power: jax.Array) -> jax.Array:
        power = product(power, power)
        trace = jnp.real(jnp.trace(power, axis1=-2, axis2=-1))[..., None, None]
        # Zeros stay zeros.
        return power / jnp.where(trace > 0, trace, 1.0)

    power = lax.fori_loop(0, SQUARINGS, square, lax.stop_gradient(gram))
    # A mean of the squared singular values in which the largest outweighs all others.
    # It is never above the largest.
    products = jnp.real(jnp.conj(power) * gram)
    mean = jnp.sum(products, (-2, -1), keepdims=True)
    # The root of 0 has no derivative.
    return jnp.where(mean > 0, jnp.sqrt(jnp.where(mean > 0, mean, 1.0)), 0.0)


def shrunk(
    x: jax.Array,
    limit: jax.Array,
    norm: jax.Array,
    *,
    steps: int | None,
    is_hard: bool,
) -> jax.Array:
    """Matrices with their singular values shrunk, by `hard` or by `smooth(2)`.

    `norm` is the largest of them. `steps` None is as many as the dtype needs.
    """
    # Above all singular values, also where `largest` underestimates them.
    bound = 1.001 * lax.stop_gradient(norm)
    steps = steps or STEPS[x.real.dtype.itemsize]
    # From 2^13 bound on nothing is shortened in float32, and [cI; X] would lose X.
    limit = jnp.minimum(limit, 2.0**13 * bound)
    highest = jnp.sqrt(bound**2 + limit**2)
    zx = jnp.concatenate([limit * _eye(x), x], -2) / highest
    polar = _polar(zx, limit / highest, steps)
    columns = x.shape[-1]
    z, b = polar[..., :columns, :], polar[..., columns:, :]
    if is_hard:
        b = product(b, _inverse_of_largest(z, steps))
    return limit * b


def _inverse_of_largest(z: jax.Array, steps: int) -> jax.Array:
    """max(b, z)^-1 for Hermitian Z, where b^2 = 1 - z^2."""
    eye = _eye(z)
    difference = eye - 2 * product(z, adjoint(z))
    lowest = jnp.full_like(z[..., :1, :1].real, jnp.finfo(z.dtype).eps)
    absolute = product(difference, _polar(difference, lowest, steps))
    square = 0.5 * (eye + absolute)

    # The inverse root of what has eigenvalues in [1/2, 1]. Its error 1 - square y^2 is
    # 1/2 for y = 1, then 0.22, 0.04, 1e-3, 1e-6, 1e-12.
    def step(_: int, y: jax.Array) -> jax.Array:
        return 0.5 * product(y, 3 * eye - product(square, product(y, y)))

    inverse = lax.fori_loop(0, 4, step, 0.5 * (3 * eye - square))
    # What is not in reach of the steps counts as less than |1 - 2 z^2|, down to 0.
    return inverse / math.sqrt(1 + _in_reach(steps))


def _polar(x: jax.Array, lowest: jax.Array, steps: int) -> jax.Array:
    """Turns every singular value in [lowest, 1] into 1, by the iteration
    x <- r x (3 - r^2 x^2) / 2. For a Hermitian matrix this is the sign.

    Singular values that are too small for so many steps come out below 1.
    """

    def step(carry: Any, _: None) -> Any:
        x, lowest = carry
        # The r that raises the lowest most. Near lowest = 0 it would send 1 to 0, and
        # 1 + eps below 0, so it is taken for 0.1 at least.
        low = jnp.maximum(lowest, 0.1)
        r = jnp.sqrt(3 / (1 + low + low**2))
        lowest = 0.5 * r * lowest * (3 - (r * lowest) ** 2)
        factor = 0.5 * r * (3 * _eye(x) - r**2 * product(adjoint(x), x))
        return (product(x, factor), lowest), None

    # For a lower one the iteration would not come to rest in time, and large singular
    # values would end anywhere.
    lowest = jnp.maximum(lax.stop_gradient(lowest), _in_reach(steps))
    return lax.scan(step, (x, lowest), length=steps)[0][0]


def _in_reach(steps: int) -> float:
    """The lowest singular value that so many steps turn into 1, to 4 eps of float64."""
    # Each multiplies small ones by 2.466, and the last four are for those near 1.
    return min(1.0, 2.46 ** (4.1 - steps))


def _eye(x: jax.Array) -> jax.Array:
    """An identity with as many columns and dimensions, for each matrix the same."""
    eye = jnp.eye(x.shape[-1], dtype=x.dtype)
    return jnp.expand_dims(eye, range(x.ndim - 2))
