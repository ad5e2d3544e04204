"""Bounds of values in the dtype of a leaf, where no number may wrap."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def held_exactly(bound: Any, dtype: Any) -> Any:
    """A bound of whole numbers within the range of a leaf's dtype, exactly: without
    x64 JAX would cut numbers of 64 bits to 32.
    """
    if not is_known_whole(bound):
        return bound
    # Beyond the dtype's range a bound clips nothing, and neither does the end of it.
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        ends = int(info.min), int(info.max)
    else:
        info = jnp.finfo(dtype)
        ends = float(info.min), float(info.max)
    held = np.clip(python_ints(bound), *ends)
    return np.asarray(held, info.dtype)


def is_known_whole(bound: Any) -> bool:
    """Is it an int, or an array of them in NumPy?"""
    return isinstance(bound, int) or (
        isinstance(bound, (np.generic, np.ndarray))
        and (bound.dtype == object or jnp.issubdtype(bound.dtype, jnp.integer))
    )


def python_ints(bound: Any) -> Any:
    """Integers that never wrap, in an array of Python objects."""
    return np.asarray(bound).astype(object)


def within_range(dtype: Any, bound: jax.Array) -> jax.Array:
    """A finite bound beyond the range of a float dtype is the end of that range. As inf
    it would leave infinite elements as they are.
    """
    # Under jax.disable_jit it may be a Python number.
    bound = jnp.asarray(bound)
    wide = np.float64 if bound.dtype == np.float64 else np.float32
    most = float(jnp.finfo(dtype).max)
    if float(jnp.finfo(wide).max) <= most:
        return bound
    bound = bound.astype(wide)
    return jnp.where(jnp.isinf(bound), bound, jnp.clip(bound, -most, most))


def whole_bounds(
    dtype: Any, high: jax.Array, low: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Both bounds in an integer dtype: rounded inwards, within its range."""
    info = jnp.iinfo(dtype)

    def held(bound: jax.Array) -> jax.Array:
        if jnp.issubdtype(bound.dtype, jnp.floating):
            ends = float(info.min), float(info.max)
            inside = jnp.clip(bound, *ends)
            return inside.astype(dtype)
        # The ends of an int32 leaf would wrap in the dtype of an int8 bound.
        own = jnp.iinfo(bound.dtype)
        ends = max(own.min, info.min), min(own.max, info.max)
        return jnp.clip(bound, *np.array(ends, own.dtype)).astype(dtype)

    # Rounded inwards: a bound of 2.5 allows -2 to 2.
    top = held(jnp.floor(high))
    if low is not None:
        return top, held(jnp.ceil(low))
    if jnp.issubdtype(high.dtype, jnp.floating):
        return top, held(jnp.ceil(-high))
    # 2^31 is no int32, but it wraps to -2^31, which is its own negative.
    own = jnp.iinfo(high.dtype)
    end = np.array(min(own.max, -int(info.min)), own.dtype)
    return top, -jnp.minimum(high, end).astype(dtype)
