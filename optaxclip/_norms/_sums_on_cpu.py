"""Sums of squares on a CPU: in float64, or in float32 where that is as right.

    if the leaf is large, float32, and of a shape that XLA sums accurately:
        total = sum of squares in float32
        if no square can have left the range: return total
    return sum of squares in float64

XLA's float32 sums on a CPU are trees, right to 3e-7, and take half the time of float64.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._bins import Dims

# Elements of a leaf from which on float32 is tried first. Below there is little time to
# win and much to compile.
LARGE = 65_536


def sum_squares(leaf: jax.Array, dims: Dims) -> jax.Array:
    """The sum of squares of a real leaf, float64."""
    if (
        leaf.dtype == np.float32
        and _is_large(leaf)
        and _is_accurate(leaf, dims)
    ):
        return _float32_first(leaf, dims)
    return sum_in_float64(leaf, dims)


def sum_in_float64(leaf: jax.Array, dims: Dims) -> jax.Array:
    # Converted before it is squared. That is exact, and keeps it apart from the float32
    # copy that an optimizer makes of 16-bit gradients.
    x = lax.convert_element_type(leaf, np.float64)
    return jnp.sum(lax.square(x), dims, keepdims=dims is not None)


def _is_large(leaf: jax.Array) -> bool:
    # A symbolic dimension, of jax.export, is not compared: float64 is always right.
    return all(isinstance(n, int) for n in leaf.shape) and leaf.size >= LARGE


def _is_accurate(leaf: jax.Array, dims: Dims) -> bool:
    """Whether XLA's float32 sum on a CPU is right to 3e-7 for this shape.

    Seen to be wrong: 1.2e-5 at rank 17 and, in JAX 0.10.2, 4e-6 over the rows of more
    than 32,768 columns.
    """
    columns = 1 if dims is None or leaf.ndim - 1 in dims else leaf.shape[-1]
    return leaf.ndim <= 4 and columns <= 2**15


def _float32_first(leaf: jax.Array, dims: Dims) -> jax.Array:
    @jax.custom_batching.custom_vmap
    def of_one(leaf: jax.Array) -> jax.Array:
        # Without the barrier XLA makes one product of these squares and Adam's, and
        # keeps it: a copy of the gradients.
        x = lax.optimization_barrier(leaf)
        totals = jnp.sum(x * x, dims, keepdims=dims is not None)
        # What squares that are too small for float32 can add up to.
        lost = leaf.size // totals.size * 2.0**-126
        right = jnp.all((totals > 2.0**26 * lost) & (totals < jnp.inf))
        return lax.cond(
            right,
            lambda leaf: totals.astype(np.float64),
            lambda leaf: sum_in_float64(leaf, dims),
            leaf,
        )

    @of_one.def_vmap
    def of_many(axis_size: int, batched: Any, leaves: jax.Array) -> Any:
        # vmap turns cond into select, which would compute both sums.
        with jax.enable_x64(
            True
        ):  # the rule is called later than the function
            return jax.vmap(lambda leaf: sum_in_float64(leaf, dims))(
                leaves
            ), True

    return of_one(leaf)
