"""Numbers and their dtypes: conversions, counts and divisions that stay in range."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

LARGEST_INT32 = 2**31 - 1  # the largest int of JAX, unless jax_enable_x64 is set


def number_for_jit(number: Any) -> Any:
    """The number, as a float if it is beyond the range of int32.

    Unless jax_enable_x64 is set, jit refuses a larger int of Python, and one of NumPy
    would wrap.
    """
    if isinstance(number, Array):
        return number
    float64 = np.asarray(number).astype(np.float64)
    if (np.abs(float64) <= LARGEST_INT32).all():
        return number
    # A scalar becomes a Python float: arithmetic with a float64 of NumPy is in float64.
    return float64 if float64.ndim else float(float64)


def in_norm_dtype(dtype: DTypeLike, number: Any) -> Any:
    """Returns a number in the dtype of a norm, float32 or float64.

    A finite number beyond the range of float32 becomes the largest one that float32
    has: a conversion would make it inf, which is no limit.
    """
    if isinstance(number, Array):
        array = number
    else:
        array = np.asarray(number).astype(np.float64)
    # Other dtypes have no finite numbers beyond the range of float32.
    if array.dtype == np.float64 and dtype == np.float32:
        array = kept_finite(dtype, array)
    return jnp.asarray(array.astype(dtype))


def kept_finite(dtype: DTypeLike, number: Any) -> Any:
    """The number clipped to the finite range of a narrower float dtype. NaN stays, and
    so does inf where the dtype has it.
    """
    xp = jnp if isinstance(number, Array) else np
    largest = float(jnp.finfo(dtype).max)
    is_beyond = xp.abs(number) > largest
    # float8_e4m3fn has no inf: a conversion would make inf NaN.
    if np.isinf(np.array(np.inf).astype(dtype)):
        is_beyond &= xp.isfinite(number)
    # Selected, since XLA on a CPU flushes subnormal numbers where it clips.
    return xp.where(is_beyond, xp.clip(number, -largest, largest), number)


def rounded_like(x: Array, leaf: ArrayLike) -> Array:
    """The array in the dtype of a leaf. No finite real number becomes inf."""
    dtype = jnp.result_type(leaf)
    if x.dtype != dtype and not jnp.iscomplexobj(x):
        x = kept_finite(dtype, x)
    return x.astype(dtype)


def as_float(norm: Array) -> Array:
    """A norm in a float dtype of at least 32 bits."""
    # Strict promotion has no common dtype of an integer and a float.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.asarray(norm, jnp.result_type(norm, np.float32))


def norm_dtype(leaves: Sequence[Any]) -> np.dtype:
    """The dtype of norms: float32, or float64 if a leaf has 64 bits. A complex number
    has the bits of each of its parts.
    """
    bits = [jnp.finfo(leaf.dtype).bits for leaf in leaves]
    if 64 in bits:
        return np.dtype(np.float64)
    return np.dtype(np.float32)


def element_count(sizes: Iterable[int], dtype: DTypeLike) -> Any:
    """The number of elements of an array with axes of these sizes, as a float."""
    count = 1.0
    for size in sizes:
        if isinstance(size, int):
            count *= float(size)
        else:
            # A symbol of jax.export, which only jnp makes an array. It is an int32, in
            # which products would wrap at 2^31.
            count *= jnp.asarray(size).astype(dtype)
    return count


@jax.custom_jvp
def divided(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, for a denominator that is a positive normal number and a
    quotient within the range.

    XLA multiplies an array by the reciprocal of a scalar. Of a scalar above 2^126 the
    reciprocal is flushed to 0, so large numbers are scaled down first.
    """
    # 2^128 / 8 = 2^125, whose reciprocal is a normal number. Scaling by 1/8 may make a
    # tiny numerator subnormal. It does no harm: divided by more than 2^64 it gives 0.
    scale = jnp.where(denominator > 2.0**64, 0.125, 1.0).astype(denominator.dtype)
    return numerator * scale / (denominator * scale)


@divided.defjvp
def _divided_jvp(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    """d(n/d) = (dn - (n/d) dd) / d. JAX's own rule divides by d^2, which underflows to
    0 for d below 1e-19.
    """
    numerator, denominator = primals
    numerator_tangent, denominator_tangent = tangents
    quotient = divided(numerator, denominator)
    difference = numerator_tangent - quotient * denominator_tangent
    return quotient, divided(difference, denominator)
