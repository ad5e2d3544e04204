"""The one place where updates are multiplied: from a norm to a new one, in every
precision, without ever coming out longer than wanted.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .leaves import measured, with_unmeasured
from .prefix import is_none


def rescale(updates: Any, norms: Any, new_norms: Any) -> Any:
    """Stretches every part of `updates` from its norm to a new one.

    Args:
      updates: a pytree of arrays.
      norms: a tree prefix of `updates`: their norms. None in it leaves a part alone.
      new_norms: what the norms become, in the same structure.

    Returns:
      The updates in their own dtypes, multiplied in the norm's dtype. Where both norms
      are equal, bit for bit the input; where the new one is NaN, all NaN. The result is
      never longer than the new norm but for the rounding to the leaf's dtype.
    """
    return multiply(updates, jax.tree.map(factor_of, norms, new_norms))


def multiply(updates: Any, factors: Any) -> Any:
    """Every part of the updates times its factor, one of `factor_of`."""

    def part(factor: jax.Array | None, subtree: Any) -> Any:
        if factor is None:
            return subtree
        return with_unmeasured(
            jax.tree.map(lambda x: stretch(x, factor), measured(subtree)), subtree
        )

    return jax.tree.map(part, factors, updates, is_leaf=is_none)


def factor_of(norm: jax.Array, new_norm: jax.Array) -> jax.Array:
    """Returns what `stretch` needs to lead from a norm to a new one: 1 exactly where
    nothing is to be done, NaN for a broken step.

    The factor is the quotient new_norm / norm, except where the quotient, or a product
    with it, could leave the range of the dtype: of 1 and 1e38 it would be subnormal,
    which hardware flushes to 0, and of 1e10 and 1e-30 infinite. There the factor is
    negative, -2 * sqrt(quotient), which is a normal number for any two normal norms.
    It is one number because the factors of units are read again for every element.
    """
    info = jnp.finfo(norm.dtype)
    low = 2.0 ** (info.minexp + 26)
    same = new_norm == norm
    down = (new_norm > 0) & (new_norm < norm * low)
    up = (norm > 0) & (norm < new_norm * low)
    far = down | up
    # Two wheres: sqrt must not be taken of 0 for the derivative's sake.
    root = -2 * jnp.sqrt(jnp.where(far, new_norm, 1.0))
    # A hair less than the quotient, so that the roundings of limit, norm, quotient and
    # products never add up to more than the limit.
    short = jnp.where(far, root, new_norm) * (1 - 3 * info.eps)
    long = jnp.where(far, jnp.sqrt(jnp.where(far, norm, 1.0)), norm)
    # The division comes last: what came after it XLA would do again for every element.
    return ratio(
        jnp.where(same, 1.0, short), jnp.where(same | (new_norm == 0), 1.0, long)
    )


def scale_of(norm: jax.Array, new_norm: jax.Array) -> jax.Array:
    """Returns new_norm / norm for reports: 1 where both are equal, 0 only where the new
    norm is 0, and else held within the normal numbers of the dtype.
    """
    info = jnp.finfo(norm.dtype)
    quotient = jnp.clip(ratio(new_norm, norm), info.tiny, info.max)
    quotient = jnp.where(new_norm == 0, 0.0, quotient)
    return jnp.where(new_norm == norm, 1.0, quotient)


@jax.jit
def stretch(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns x times the quotient that a factor of `factor_of` stands for, in the
    dtype of x.
    """
    x = jnp.asarray(x)
    # A negative factor is -2 * sqrt(quotient): x * factor * 0.25 * factor. In this
    # order no product overflows or is flushed unless the last one is as well.
    quarter = jnp.where(factor < 0, 0.25, 1.0).astype(factor.dtype)
    again = jnp.where(factor < 0, factor, 1.0)
    if x.weak_type:  # what is made of weakly typed arrays alone stays weakly typed
        first, quarter, again = (_as_weak_as(x, y) for y in (factor, quarter, again))
        stretched = x * first * quarter * again
    else:
        wide = np.promote_types(x.dtype, factor.dtype)
        first, quarter, again = (y.astype(wide) for y in (factor, quarter, again))
        stretched = (x.astype(wide) * first * quarter * again).astype(x.dtype)
    # Selected where nothing is to be done: a product would flush subnormal numbers.
    return jnp.where(factor == 1, x, stretched)


def _as_weak_as(x: jax.Array, factor: jax.Array) -> jax.Array:
    """The factor in the dtype of a weakly typed array, weakly typed: only filling with
    a scalar makes that.
    """

    def fill(number: jax.Array) -> jax.Array:
        return lax.full_like(x, number, shape=())

    for _ in range(factor.ndim):
        fill = jax.vmap(fill)
    return fill(factor)


@jax.custom_jvp
def ratio(short: jax.Array, long: jax.Array) -> jax.Array:
    """short / long, and 0 / 0 = 0."""
    # Two wheres: the quotient of the unused branch must be finite for the derivative's
    # sake.
    return short / jnp.where(long == 0, 1.0, long)


@ratio.defjvp
def _ratio_jvp(primals, tangents):
    """d(s/l) = (ds - (s/l) dl) / l. The rule of division itself squares l, which
    overflows.
    """
    short, long = primals
    quotient = ratio(short, long)
    return quotient, ratio(tangents[0] - quotient * tangents[1], long)


def zero_where_zero(updates: Any, factors: Any) -> Any:
    """Zeros in the place of a part whose factor is 0, since 0 times inf is NaN."""

    def part(factor: jax.Array | None, subtree: Any) -> Any:
        return (
            subtree
            if factor is None
            else jax.tree.map(
                lambda x: jnp.where(factor == 0, jnp.zeros_like(x), x), subtree
            )
        )

    return jax.tree.map(part, factors, updates, is_leaf=is_none)
