"""Singular values by matrix products alone: the hard and the smooth form of a matrix,
and its largest singular value.

Both forms rest on the polar factor of a matrix with more columns, [X, cI] = (X X^H +
c^2 I)^(1/2) [B, Z]. Its singular values are at least c, so that the iteration knows
where to begin, its accuracy is lost with s_max / c and not with the square of it, as in
a root of the Gram matrix, and c B = (I + X X^H / c^2)^(-1/2) X is the smooth form as it
stands. B and Z have singular values b = s / sqrt(s^2 + c^2) and z = c / sqrt(s^2 +
c^2), so that the hard form is c b / max(b, z), with max(b, z)^2 = (1 + |1 - 2 z^2|) /
2, the modulus from the matrix sign.

Reference: F. L. Cesista, Numerically stable spectral clipping via Newton-Schulz, 2025,
for sign iterations; Chen, Chow, A stable scaling of Newton-Schulz for improving the
sign function computation of a Hermitian matrix, 2014, for the scaling.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._norms._norms import tensor_norm

# the power of the Gram matrix whose trace bounds the largest singular value is 2^16: m
# equal ones are overrated by m^(1 / 2^17)
SQUARINGS = 16


def shrunk(
    x: jax.Array, limit: jax.Array, bound: jax.Array, steps: int, is_hard: bool
) -> jax.Array:
    """The hard or the smooth form of matrices with at most as many rows as columns,
    whose singular values are at most `bound`.
    """
    limit = jnp.minimum(
        limit, 2.0**13 * bound
    )  # from there on nothing is shortened in float32, and [X, cI] would drown X
    eye = _eye_beside(x)
    whole = jnp.sqrt(bound**2 + limit**2)
    factor = _polar(jnp.concatenate([x, limit * eye], -1) / whole, limit / whole, steps)
    b, z = factor[..., : x.shape[-1]], factor[..., x.shape[-1] :]
    if not is_hard:
        return limit * b
    side = eye - 2 * product(z, adjoint(z))
    modulus = product(
        side, _polar(side, jnp.full_like(limit, jnp.finfo(limit.dtype).eps), steps)
    )
    return limit * product(_inverse_root(0.5 * (eye + modulus)), b)


def _polar(x: jax.Array, lowest: jax.Array, steps: int) -> jax.Array:
    """Makes every singular value of x that lies in [lowest, 1] to 1, by x <- r x (3 -
    r^2 x^2) / 2. Of a Hermitian matrix this is the sign.
    """

    def step(
        carry: tuple[jax.Array, jax.Array], _: None
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        x, lowest = carry
        # The r that lifts the lowest most. Near 0 it would send 1 to 0, and 1 + eps to
        # the other side: so no lower than 0.1.
        low = jnp.maximum(lowest, 0.1)
        r = jnp.sqrt(3 / (1 + low + low**2))
        x = 0.5 * r * (3 * x - r**2 * product(product(x, adjoint(x)), x))
        return (x, 0.5 * r * lowest * (3 - (r * lowest) ** 2)), None

    return lax.scan(step, (x, lax.stop_gradient(lowest)), length=steps)[0][0]


def _inverse_root(x: jax.Array) -> jax.Array:
    """x^(-1/2) of Hermitian matrices with eigenvalues in [1/2, 1]: the error 1 - x y^2
    is 1/2 at first, then 0.22, 0.04, 1e-3, 1e-6, 1e-12.
    """
    eye = y = _eye_beside(x)
    for _ in range(5):
        y = 0.5 * product(y, 3 * eye - product(x, product(y, y)))
    return y


def largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the largest singular value, a bound that it never exceeds), from the 2^16th
    power of the Gram matrix by repeated squaring.
    """

    def square(
        _: Any, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        power, log, weight = carry
        power = product(power, power)
        trace = _trace(power)
        return power / trace, log + weight * jnp.log(trace), weight / 2

    fixed = lax.stop_gradient(x)
    gram = product(fixed, adjoint(fixed))
    trace = _trace(gram)
    power, log, _ = lax.fori_loop(
        0, SQUARINGS, square, (gram / trace, jnp.log(trace), jnp.full_like(trace, 0.5))
    )
    # A mean of the singular values, squared, in which the largest outweigh all others:
    # never too long.
    weights = jnp.sqrt(jnp.sum(jnp.abs(power) ** 2, (-2, -1), keepdims=True))
    norm = tensor_norm(product(power, x), stacked=x.ndim - 2).reshape(
        trace.shape
    ) / jnp.where(weights > 0, weights, 1.0)
    return norm, 1.001 * jnp.exp(0.5 * log)  # a bound but for rounding, so 0.001 more


def _trace(x: jax.Array) -> jax.Array:
    trace = jnp.real(jnp.trace(x, axis1=-2, axis2=-1))[..., None, None]
    return jnp.where(trace > 0, trace, 1.0)


def _eye_beside(x: jax.Array) -> jax.Array:
    """An identity for each matrix, with as many rows."""
    return jnp.broadcast_to(
        jnp.eye(x.shape[-2], dtype=x.dtype), (*x.shape[:-1], x.shape[-2])
    )


def adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(x.mT)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(
        a, b, precision="highest"
    )  # accelerators would round float32 factors to bfloat16 or TF32
