"""The one place where updates are multiplied: from a norm to a new one, in every precision, without ever coming out longer than wanted."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .leaves import measured, with_unmeasured
from .prefix import is_none


class Factors(NamedTuple):
    """What updates are multiplied by, in two steps: the quotient of 1 and 1e38 is subnormal, which hardware flushes to 0."""

    first: jax.Array  # float32[norm]: 1, or a power of 2 where the way is far
    then: jax.Array  # float32[norm]: 1 exactly where nothing is to be done, NaN for a broken step


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

    return multiply(updates, jax.tree.map(lambda norm, new: None if norm is None else factors_of(norm, new), norms, new_norms, is_leaf=is_none))


def multiply(updates: Any, factors: Any) -> Any:
    """Every part of the updates times its factors."""

    def part(factors: Factors | None, subtree: Any) -> Any:
        if factors is None:
            return subtree
        return with_unmeasured(jax.tree.map(lambda x: _stretch(x, factors), measured(subtree)), subtree)

    return jax.tree.map(part, factors, updates, is_leaf=_is_factors)


def factors_of(norm: jax.Array, new_norm: jax.Array) -> Factors:
    """The factors that lead from a norm to a new one."""
    info = jnp.finfo(norm.dtype)
    first = jnp.where(new_norm < norm * 2.0 ** (info.minexp + 26), 2.0 ** (info.minexp // 2 - 1), 1.0).astype(norm.dtype)
    # A hair less than the quotient, so that the roundings of limit, norm, quotient and products never add up to more than the limit.
    then = ratio(new_norm, norm * first) * (1 - 3 * info.eps)
    return Factors(first, jnp.where(new_norm == norm, 1.0, jnp.where(new_norm == 0, 0.0, then)))


@jax.jit
def _stretch(x: jax.Array, factors: Factors) -> jax.Array:
    x = jnp.asarray(x)
    first, then = factors
    if x.weak_type:  # what is made of weakly typed arrays alone stays weakly typed
        first, then = (_as_weak_as(x, factor) for factor in factors)
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

    def part(factors: Factors | None, subtree: Any) -> Any:
        return subtree if factors is None else jax.tree.map(lambda x: jnp.where(factors.then == 0, jnp.zeros_like(x), x), subtree)

    return jax.tree.map(part, factors, updates, is_leaf=_is_factors)


def _is_factors(x: Any) -> bool:
    return x is None or isinstance(x, Factors)
