"""Numbers in other dtypes, without a finite one that becomes inf."""

from typing import Any

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
    clipped = xp.clip(number, -largest, largest)
    # float8_e4m3fn has no inf: a conversion would make inf NaN.
    if not np.isinf(np.array(np.inf).astype(dtype)):
        return clipped
    return xp.where(xp.isinf(number), number, clipped)


def rounded_like(x: Array, leaf: ArrayLike) -> Array:
    """The array in the dtype of a leaf. No finite real number becomes inf."""
    dtype = jnp.result_type(leaf)
    if x.dtype != dtype and not jnp.iscomplexobj(x):
        x = kept_finite(dtype, x)
    return x.astype(dtype)
