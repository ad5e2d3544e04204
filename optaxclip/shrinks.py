"""What becomes of a norm that is over its limit: hard, smooth, drop, normalize.

    hard        min(n, c)                        what everyone means by clipping
    smooth(p)   n / (1 + (n/c)^p)^(1/p)          never a corner; p=1 is n / (1 + n/c),
                                                 p=2 is n / sqrt(1 + n^2/c^2), p=inf is
                                                 hard
    drop        n if n <= c, else 0              an overlong gradient is not believed at
                                                 all
    normalize   c                                always this long, shorter ones too (a
                                                 norm of 0 stays 0)

A shrink is a function (norm, limit) -> new norm of two arrays of one shape, and goes
into `clip_by` or any norm clipper as `shrink=`. `hard` and `drop` leave alone what is
within the limit, bit for bit; `smooth` shortens everything a little: by at most the
factor 2^(1/p) against `hard`, which is reached at n = c.

Reference: Zhang, He, Sra, Jadbabaie, Why gradient clipping accelerates training, 2020
(arXiv 1905.11881) for the soft form; DI-engine and PPOxFamily (grad_ignore_norm) and
axlearn (drop_norm) for the drop.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from .arguments import check_number

Shrink = Callable[[jax.Array, jax.Array], jax.Array]


def hard(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """min(norm, limit)."""
    return jnp.minimum(norm, limit)


def drop(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """The norm within the limit, 0 beyond it."""
    return jnp.where(norm > limit, jnp.zeros_like(norm), norm)


def normalize(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """The limit, but 0 for a norm of 0, which has no direction."""
    return jnp.where(norm == 0, norm, limit)


def smooth(power: Any = 1.0) -> Shrink:
    """norm / (1 + (norm / limit)^power)^(1 / power).

    Args:
      power: how sharp the bend at the limit is: 1 the gentlest in use, 2 that of
        SPECTRA. At least 1, known when the clipper is built.

    Raises:
      ValueError: a power below 1.

    Example:
      >>> import optaxclip
      >>> clipper = optaxclip.clip_by_global_norm(5.0, shrink=optaxclip.smooth())
      >>> grads = jnp.array([3.0, 4.0])
      >>> updates, _ = clipper.update(grads, clipper.init(grads))
      >>> print(*(f"{x:.4f}" for x in updates))
      1.5000 2.0000
    """
    check_number("smooth: power", power, lowest=1.0)
    return _smooth(float(power))


@cache  # equal powers give one function, so that a rebuilt clipper is not compiled anew
def _smooth(power: float) -> Shrink:
    def shrink(norm: jax.Array, limit: jax.Array) -> jax.Array:
        short, long = jnp.minimum(norm, limit), jnp.maximum(norm, limit)
        # Written in the smaller by the larger, which can not overflow. Two wheres: the
        # unused quotient must be finite for the derivative's sake.
        share = short / jnp.where((long == 0) | jnp.isinf(long), 1.0, long)
        share = jnp.where(jnp.isinf(long), 0.0, share)
        return short / (1 + share**power) ** (1 / power)

    return shrink
