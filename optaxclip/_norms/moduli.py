"""Moduli of elements: their directions and derivatives, and the dtypes of a leaf."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike


def direction(x: Array) -> Array:
    """x / |x|, 0 at 0, and NaN for an infinite complex number. The modulus itself may
    be beyond the range of the dtype.
    """
    if not jnp.iscomplexobj(x):
        return jnp.sign(x)
    real = jnp.real(x)
    imag = jnp.imag(x)
    longer = jnp.maximum(jnp.abs(real), jnp.abs(imag))
    is_zero = longer == 0
    divisor = jnp.where(is_zero, 1.0, longer)
    real = real / divisor
    imag = imag / divisor
    square = real * real + imag * imag
    # The root has no derivative at 0, so it is not taken of 0.
    square = jnp.where(is_zero, 1.0, square)
    # Not divided by the root: XLA joins two divisions in a row to one, by a product
    # that may leave the range.
    inverse = lax.rsqrt(square)
    return lax.complex(real * inverse, imag * inverse)


def with_modulus(modulus: Array, x: Array) -> Array:
    """modulus * x / |x|."""
    unit_x = direction(x)
    if not jnp.iscomplexobj(x):
        return modulus * unit_x
    # In parts: strict promotion has no product of a real and a complex number.
    real = modulus * jnp.real(unit_x)
    imag = modulus * jnp.imag(unit_x)
    return lax.complex(real, imag)


def tangent_of_modulus(x: Array, tangent: Array) -> Array:
    """The tangent of |x|, from the tangent of x."""
    if not jnp.iscomplexobj(x):
        tangent = jnp.sign(x) * tangent
        return tangent.astype(modulus_dtype(x))
    unit_x = direction(x)
    # d|z| = Re(conj(z) / |z| * dz)
    real = jnp.real(unit_x) * jnp.real(tangent)
    imag = jnp.imag(unit_x) * jnp.imag(tangent)
    return real + imag


def modulus_dtype(x: Array) -> Any:
    """The real dtype of a leaf's elements."""
    return jnp.finfo(x.dtype).dtype


def wide_dtype(leaf: Any) -> Any:
    """The dtype that arithmetic on a leaf takes place in: at least 32 bits."""
    # JAX itself does not promote floats of 8 bits.
    dtype = jnp.result_type(leaf)
    return np.promote_types(dtype, np.float32)


def widened(leaf: ArrayLike) -> Array:
    """The leaf in the dtype that arithmetic on it takes place in."""
    leaf = jnp.asarray(leaf)
    return leaf.astype(wide_dtype(leaf))
