"""Singular values by matrix products alone: the clipped matrix, by a hard or a smooth
shrink, and the largest singular value.

Both shrinks use the polar factor [B, Z] of a matrix with more columns than rows:

    [X, cI]     = (X X^H + c^2 I)^(1/2) [B, Z]
    B           has the singular values b = s / sqrt(s^2 + c^2)
    Z           has the singular values z = c / sqrt(s^2 + c^2)

    smooth(2)   c B = (I + X X^H / c^2)^(-1/2) X
    hard        the singular values c b / max(b, z), where
                max(b, z)^2 = (1 + |1 - 2 z^2|) / 2, with |A| = A sign(A)

The singular values of [X, cI] are at least c, so the iteration knows where to begin.
Accuracy is lost with s_max / c. A root of the Gram matrix loses it with the square.

Reference: F. L. Cesista, Numerically stable spectral clipping via Newton-Schulz, 2025,
for sign iterations. Chen, Chow, A stable scaling of Newton-Schulz for improving the
sign function computation of a Hermitian matrix, 2014, for the scaling.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .._norms._norms import tensor_norm
from .._norms._types import split_as

# The Gram matrix is raised to the power 2^16, whose trace bounds the largest singular
# value. m equal singular values are overestimated by m^(1 / 2^17).
SQUARINGS = 16


def shrunk(
    x: jax.Array,
    limit: jax.Array,
    bound: jax.Array,
    *,
    steps: int,
    is_hard: bool,
) -> jax.Array:
    """Matrices with their singular values shrunk, by `hard` or by `smooth(2)`.

    They have at most as many rows as columns, and singular values of at most `bound`.
    """
    # From 2^13 bound on nothing is shortened in float32, and [X, cI] would lose X.
    limit = jnp.minimum(limit, 2.0**13 * bound)
    eye = _eye_like(x)
    root = jnp.sqrt(bound**2 + limit**2)
    joined = jnp.concatenate([x, limit * eye], -1)
    factor = _polar(joined / root, limit / root, steps)
    b, z = factor[..., : x.shape[-1]], factor[..., x.shape[-1] :]
    if not is_hard:
        return limit * b
    difference = eye - 2 * product(z, adjoint(z))
    eps = jnp.full_like(limit, jnp.finfo(limit.dtype).eps)
    absolute = product(difference, _polar(difference, eps, steps))
    return limit * product(_inverse_root(0.5 * (eye + absolute)), b)


def _polar(x: jax.Array, lowest: jax.Array, steps: int) -> jax.Array:
    """Turns every singular value of x in [lowest, 1] into 1, by the iteration
    x <- r x (3 - r^2 x^2) / 2. For a Hermitian matrix this is the sign.
    """

    def step(
        carry: tuple[jax.Array, jax.Array], _: None
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        x, lowest = carry
        # The r that raises the lowest most. Near lowest = 0 it would send 1 to 0, and
        # 1 + eps below 0, so it is taken for 0.1 at least.
        low = jnp.maximum(lowest, 0.1)
        r = jnp.sqrt(3 / (1 + low + low**2))
        x = 0.5 * r * (3 * x - r**2 * product(product(x, adjoint(x)), x))
        return (x, 0.5 * r * lowest * (3 - (r * lowest) ** 2)), None

    return lax.scan(step, (x, lax.stop_gradient(lowest)), length=steps)[0][0]


def _inverse_root(x: jax.Array) -> jax.Array:
    """x^(-1/2) of Hermitian matrices with eigenvalues in [1/2, 1].

    The error 1 - x y^2 is 1/2 at first, then 0.22, 0.04, 1e-3, 1e-6, 1e-12.
    """
    eye = y = _eye_like(x)
    for _ in range(5):
        y = 0.5 * product(y, 3 * eye - product(x, product(y, y)))
    return y


def largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest singular value, and a bound that it never exceeds.

    Both come from the 2^16th power of the Gram matrix, by repeated squaring.
    """
    fixed = lax.stop_gradient(x)
    gram = product(fixed, adjoint(fixed))
    trace = _trace(gram)
    start = gram / trace, jnp.log(trace), jnp.full_like(trace, 0.5)
    power, log, _ = lax.fori_loop(0, SQUARINGS, _square, start)
    # A mean of the squared singular values in which the largest outweighs all others.
    # It is never above the largest.
    weights = jnp.sqrt(jnp.sum(jnp.abs(power) ** 2, (-2, -1), keepdims=True))
    norm = tensor_norm(product(power, x), stacked=x.ndim - 2).reshape(
        trace.shape
    )
    # The bound is exact but for rounding, which 0.001 covers.
    return norm / jnp.where(weights > 0, weights, 1.0), 1.001 * jnp.exp(
        0.5 * log
    )


def _square(
    _: int, carry: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Squares a matrix, divides it by its trace, and adds up the logarithms."""
    power, log, weight = carry
    power = product(power, power)
    trace = _trace(power)
    return power / trace, log + weight * jnp.log(trace), weight / 2


def _trace(x: jax.Array) -> jax.Array:
    """The trace of each matrix, [..., 1, 1]. 1 for a matrix of zeros."""
    trace = jnp.real(jnp.trace(x, axis1=-2, axis2=-1))[..., None, None]
    return jnp.where(trace > 0, trace, 1.0)


def _eye_like(x: jax.Array) -> jax.Array:
    """An identity for each matrix, with as many rows."""
    rows = x.shape[-2]
    eyes = jnp.broadcast_to(jnp.eye(rows, dtype=x.dtype), (*x.shape[:-1], rows))
    # On an Explicit mesh factors of a product must be split alike.
    return split_as(eyes, jax.typeof(x))


def adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of each matrix."""
    return jnp.conj(x.mT)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b. By default accelerators round float32 factors to bfloat16 or TF32."""
    return jnp.matmul(a, b, precision="highest")
