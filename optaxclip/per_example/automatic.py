"""Shrinks for per-example gradients that bring nearly every gradient to the limit, so
that the limit and the learning rate are one number to tune.

    normalize       C                            AUTO-V: a tiny gradient weighs as much
                                                 as a large one (`optaxclip.normalize`)
    auto_s(gamma)   C n / (n + gamma)            AUTO-S: below gamma the weight stays
                                                 bounded, by C / gamma
    psac(r)         C n / (n + r / (n + r))      DP-PSAC: tiny gradients weigh about C,
                                                 the weight is largest at n = sqrt(r) -
                                                 r

All are at most C for every norm n. They are functions (norm, limit) -> new norm as in
`optaxclip.shrinks`, and go wherever a shrink goes.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from ..arguments import check_number
from ..shrinks import Shrink


def auto_s(gamma: Any = 0.01) -> Shrink:
    """limit * norm / (norm + gamma): normalizing that is gentle with small gradients.

    Args:
      gamma: the norm that is brought to half the limit. At least 0, known when the
        shrink is built; 0 gives `normalize`.

    Returns:
      A shrink.

    Raises:
      ValueError: a negative gamma.

    Example:
      >>> import optaxclip
      >>> norms = jnp.array([0.0, 0.01, 0.99])
      >>> print(optaxclip.per_example.auto_s()(norms, jnp.array(2.0)))
      [0.   1.   1.98]

    Reference: Bu, Wang, Zha, Karypis, Automatic clipping: differentially private deep
    learning made easier and stronger, 2023 (arXiv 2206.07136).
    """
    check_number("auto_s: gamma", gamma)
    return _auto_s(float(gamma))


def psac(r: Any = 0.1) -> Shrink:
    """limit * norm / (norm + r / (norm + r)): normalizing where a vanishing gradient
    keeps a weight of about the limit in place of an infinite one.

    Args:
      r: how soon the weight falls with the norm. Above 0, known when the shrink is
        built. 0.1 is the default of Opacus; the paper tunes it.

    Returns:
      A shrink.

    Raises:
      ValueError: an r that is 0 or negative.

    Example:
      >>> import optaxclip
      >>> print(optaxclip.per_example.psac(0.5)(jnp.array([0.0, 0.5]), jnp.array(1.0)))
      [0.  0.5]

    Reference: Xia et al., Differentially private learning with per-sample adaptive
    clipping, 2023 (arXiv 2212.00328).
    """
    check_number("psac: r", r)
    if float(r) == 0:
        raise ValueError(
            f"psac: r must be above 0, got {r!r}: normalize is the limit for r = 0."
        )
    return _psac(float(r))


# equal numbers give one function, so that a rebuilt clipper is not compiled anew
@cache
def _auto_s(gamma: float) -> Shrink:
    return lambda norm, limit: limit * _share(norm, norm + gamma)


@cache
def _psac(r: float) -> Shrink:
    return lambda norm, limit: limit * _share(norm, norm + r / (norm + r))


def _share(norm: jax.Array, whole: jax.Array) -> jax.Array:
    """norm / whole, 0 / 0 = 0."""
    return norm / jnp.where(whole == 0, 1.0, whole)
