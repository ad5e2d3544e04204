"""The modulus of an element and its derivative, and the dtypes of norms.

Real and complex leaves are treated alike from here on.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def direction(x: jax.Array) -> jax.Array:
    """x / |x|, and 0 at 0.

    Of an infinite complex number, that of its infinite part. The modulus itself may be
    beyond the range of the dtype.
    """
    if not jnp.iscomplexobj(x):
        return jnp.sign(x)
    parts = jnp.real(x), jnp.imag(x)
    infinite = jnp.isinf(parts[0]) | jnp.isinf(parts[1])
    parts = [_sign_where_infinite(part, infinite) for part in parts]
    longer = jnp.maximum(jnp.abs(parts[0]), jnp.abs(parts[1]))
    real, imag = (part / jnp.where(longer == 0, 1.0, longer) for part in parts)
    # The root has no derivative at 0, so it is not taken of 0.
    square = jnp.where(longer == 0, 1.0, real * real + imag * imag)
    # Not divided by the root: XLA joins two divisions in a row to one, by a product
    # that may leave the range.
    inverse = jax.lax.rsqrt(square)
    return jax.lax.complex(real * inverse, imag * inverse)


def with_modulus(size: jax.Array, x: jax.Array) -> jax.Array:
    """size * x / |x|."""
    unit = direction(x)
    if not jnp.iscomplexobj(x):
        return size * unit
    # In parts: strict promotion has no product of a real and a complex number.
    return jax.lax.complex(size * jnp.real(unit), size * jnp.imag(unit))


def _sign_where_infinite(part: jax.Array, infinite: jax.Array) -> jax.Array:
    # inf / inf is NaN. An infinite part counts as 1, and a finite one beside it as 0.
    finite = jnp.where(infinite, 0 * part, part)
    return jnp.where(jnp.isinf(part), jnp.sign(part), finite)


def tangent_of_modulus(x: jax.Array, change: jax.Array) -> jax.Array:
    """The tangent of |x| for a tangent of x."""
    if not jnp.iscomplexobj(x):
        return (jnp.sign(x) * change).astype(modulus_dtype(x))
    unit = direction(x)
    # d|z| = Re(conj(z) / |z| * dz)
    along = (
        jnp.real(unit) * jnp.real(change),
        jnp.imag(unit) * jnp.imag(change),
    )
    return along[0] + along[1]


def modulus_dtype(x: jax.Array) -> Any:
    """The real dtype of a leaf's elements."""
    return jnp.finfo(x.dtype).dtype


def norm_dtype(leaves: Any) -> Any:
    """The dtype of norms: float32, or float64 if a leaf has 64 bits."""
    # Of complex numbers that of their parts.
    bits = [jnp.finfo(leaf.dtype).bits for leaf in jax.tree.leaves(leaves)]
    return np.dtype(np.float64 if max(bits, default=32) == 64 else np.float32)


def as_float(norm: Any) -> jax.Array:
    """A norm in a float dtype of at least 32 bits."""
    # Strict promotion has no common dtype of an integer and a float.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.asarray(norm, jnp.result_type(norm, np.float32))


def wide_dtype(leaf: Any) -> Any:
    """The dtype that arithmetic on a leaf takes place in: at least 32 bits."""
    return np.promote_types(jnp.result_type(leaf), np.float32)


@jax.custom_jvp
def divided(size: jax.Array, whole: jax.Array) -> jax.Array:
    """size / whole, for any normal numbers with size <= whole.

    XLA multiplies an array by the reciprocal of a scalar, which is flushed to 0 above
    2^126. So large numbers are scaled down first.
    """
    # 2^128 / 8 = 2^125, whose reciprocal is a normal number.
    down = jnp.where(whole > 1, 0.125, 1.0).astype(whole.dtype)
    return size * down / (whole * down)


@divided.defjvp
def _divided_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """d(s/w) = (ds - (s/w) dw) / w. The rule of division squares w, which is 0 below
    1e-19.
    """
    size, whole = primals
    share = divided(size, whole)
    return share, divided(tangents[0] - share * tangents[1], whole)
