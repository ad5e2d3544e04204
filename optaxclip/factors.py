"""The one place where updates are multiplied: from a norm to a new one, in every precision, without ever coming out longer than wanted."""

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
      The updates in their own dtypes, multiplied in the norm's dtype. Where both norms are equal, bit for bit the input; where the new one is NaN, all NaN.
      The result is never longer than the new norm but for the rounding to the leaf's dtype.
    """
    return multiply(updates, jax.tree.map(factor_of, norms, new_norms))


def multiply(updates: Any, factors: Any) -> Any:
    """Every part of the updates times its factor."""

    def part(factor: jax.Array | None, subtree: Any) -> Any:
        if factor is None:
            return subtree
        return with_unmeasured(jax.tree.map(lambda x: _stretch(x, factor), measured(subtree)), subtree)

    return jax.tree.map(part, factors, updates, is_leaf=is_none)


def factor_of(norm: jax.Array, new_norm: jax.Array) -> jax.Array:
    """What leads from a norm to a new one: 1 exactly where nothing is to be done, NaN for a broken step.

    The quotient of 1 and 1e38 would be subnormal, which hardware flushes to 0. A way that is so far is gone in two steps, the first of which is `_stride`; such a factor holds the second and is
    negative. One number, and not two, since the factors of units are read again for every element.
    """
    info = jnp.finfo(norm.dtype)
    same, far = new_norm == norm, (new_norm > 0) & (new_norm < norm * 2.0 ** (info.minexp + 26))
    # A hair less than the quotient, so that the roundings of limit, norm, quotient and products never add up to more than the limit.
    short = jnp.where(far, -new_norm, new_norm) * (1 - 3 * info.eps)
    long = jnp.where(far, norm * _stride(norm), norm)
    # The division comes last: what came after it XLA would do again for every element.
    return ratio(jnp.where(same, 1.0, short), jnp.where(same | (new_norm == 0), 1.0, long))


def _stride(factor: jax.Array) -> float:
    """The square root of the smallest number, about."""
    return 2.0 ** (int(jnp.finfo(factor.dtype).minexp) // 2 - 1)


@jax.jit
def _stretch(x: jax.Array, factor: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    first, then = jnp.where(factor < 0, _stride(factor), 1.0).astype(factor.dtype), jnp.where(factor < 0, -factor, factor)
    if x.weak_type:  # what is made of weakly typed arrays alone stays weakly typed
        first, then = _as_weak_as(x, first), _as_weak_as(x, then)
        stretched = x * first * then
    else:
        wide = np.promote_types(x.dtype, then.dtype)
        stretched = (x.astype(wide) * first.astype(wide) * then.astype(wide)).astype(x.dtype)
    # Selected where nothing is to be done: a product would flush subnormal numbers.
    return jnp.where(then == 1, x, stretched)


def _as_weak_as(x: jax.Array, factor: jax.Array) -> jax.Array:
    """The factor in the dtype of a weakly typed array, weakly typed: only filling with a scalar makes that."""

    def fill(number: jax.Array) -> jax.Array:
        return lax.full_like(x, number, shape=())

    for _ in range(factor.ndim):
        fill = jax.vmap(fill)
    return fill(factor)


@jax.custom_jvp
def ratio(short: jax.Array, long: jax.Array) -> jax.Array:
    """short / long, and 0 / 0 = 0."""
    # Two wheres: the quotient of the unused branch must be finite for the derivative's sake.
    return short / jnp.where(long == 0, 1.0, long)


@ratio.defjvp
def _ratio_jvp(primals, tangents):
    """d(s/l) = (ds - (s/l) dl) / l. The rule of division itself squares l, which overflows."""
    short, long = primals
    quotient = ratio(short, long)
    return quotient, ratio(tangents[0] - quotient * tangents[1], long)


def zero_where_zero(updates: Any, factors: Any) -> Any:
    """Zeros in the place of a part whose factor is 0, since 0 times inf is NaN."""

    def part(factor: jax.Array | None, subtree: Any) -> Any:
        return subtree if factor is None else jax.tree.map(lambda x: jnp.where(factor == 0, jnp.zeros_like(x), x), subtree)

    return jax.tree.map(part, factors, updates, is_leaf=is_none)
