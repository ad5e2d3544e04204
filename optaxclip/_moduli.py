"""Moduli of elements: their directions and derivatives, and the dtypes of a leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def direction(x: Array) -> Array:
    """x / |x|, 0 at 0, and NaN for an infinite complex number. The modulus itself may
    be beyond the range of the dtype.
    """
    if not jnp.iscomplexobj(x):
        return jnp.sign(x)
    real = jnp.real(x)
    imag = jnp.imag(x)
    longer = jnp.maximum(jnp.abs(real), jnp.abs(imag))
    divisor = jnp.where(longer == 0, 1.0, longer)
    real = real / divisor
    imag = imag / divisor
    # The root has no derivative at 0, so it is not taken of 0.
    square = jnp.where(longer == 0, 1.0, real * real + imag * imag)
    # Not divided by the root: XLA joins two divisions in a row to one, by a product
    # that may leave the range.
    inverse = jax.lax.rsqrt(square)
    return jax.lax.complex(real * inverse, imag * inverse)


def with_modulus(modulus: Array, x: Array) -> Array:
    """modulus * x / |x|."""
    unit_x = direction(x)
    if not jnp.iscomplexobj(x):
        return modulus * unit_x
    # In parts: strict promotion has no product of a real and a complex number.
    return jax.lax.complex(modulus * jnp.real(unit_x), modulus * jnp.imag(unit_x))


def tangent_of_modulus(x: Array, tangent: Array) -> Array:
    """The tangent of |x|, from the tangent of x."""
    if not jnp.iscomplexobj(x):
        return (jnp.sign(x) * tangent).astype(modulus_dtype(x))
    unit_x = direction(x)
    # d|z| = Re(conj(z) / |z| * dz)
    real = jnp.real(unit_x) * jnp.real(tangent)
    return real + jnp.imag(unit_x) * jnp.imag(tangent)


def modulus_dtype(x: Array) -> Any:
    """The real dtype of a leaf's elements."""
    return jnp.finfo(x.dtype).dtype


def wide_dtype(leaf: Any) -> Any:
    """The dtype that arithmetic on a leaf takes place in: at least 32 bits."""
    return np.promote_types(jnp.result_type(leaf), np.float32)
