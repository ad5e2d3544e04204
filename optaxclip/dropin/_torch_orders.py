"""What torch computes for orders of 0 and below, which are not norms.

order 0    how many leaves have an element other than 0
order p    (sum |x|^p)^(1/p), which is min |x| for -inf
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._norms import Norms, global_norm, norms_of_tree, tensor_norm
from .._sums import norm_dtype


class TorchNorm(NamedTuple):
    """What torch calls the norm of an order of 0 or less. It has no derivative."""

    ord: float

    def __call__(self, tree: Any) -> Norms:
        # A count does not change with x, and |x|^p has no slope at 0 for p < 0.
        fixed = jax.tree.map(jax.lax.stop_gradient, tree)
        if self.ord == 0:
            return norms_of_tree(_leaves_not_zero(fixed), tree)
        return norms_of_tree(_norm_below_order_zero(fixed, self.ord), tree)


def _leaves_not_zero(tree: Any) -> jax.Array:
    """How many leaves have an element that is not 0, which is the norm of order 0 of
    the norms of the leaves.
    """
    # max |x| is 0 only where all are. The squares of tiny numbers would be 0 too.
    largest = tensor_norm(tree, ord=math.inf)
    counts = jax.tree.map(lambda norm: (norm != 0).astype(norm.dtype), largest)
    # No mesh axes: the norms that are counted are the same on all devices.
    return global_norm(counts, ord=1, mesh_axes=None)


def _norm_below_order_zero(tree: Any, ord: float) -> jax.Array:
    """(sum |x|^ord)^(1/ord) = 1 / (sum (1/|x|)^-ord)^(-1/ord)."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        # torch raises. Here a tree without leaves has norm 0 in every order.
        return jnp.zeros(())
    info = jnp.finfo(norm_dtype(leaves))
    # With this instead of 1 the reciprocals of all normal numbers are normal: that of
    # the largest is the smallest, and that of the smallest the largest.
    one = info.max * info.tiny

    def reciprocal(x: jax.Array) -> jax.Array:
        # inf for 0, so that one element of 0 makes the result 0.
        return one / jnp.abs(x).astype(info.dtype)

    reciprocals = jax.tree.map(reciprocal, tree)
    return one / global_norm(reciprocals, ord=-ord)
