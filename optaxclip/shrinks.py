"""What a norm that is over its limit becomes.

    hard        min(n, c)                        what everyone means by clipping
    smooth(p)   n / (1 + (n/c)^p)^(1/p)          never a corner
    drop        n if n <= c, else 0              a gradient above the limit becomes 0
    normalize   c                                always this long, 0 stays 0
    auto_s(y)   c n / (n + y)                    about c, and shorter for small norms
    psac(r)     c n / (n + r / (n + r))          likewise. About c n for vanishing norms

A shrink is a function (norm, limit) -> new norm. All three are arrays of one shape. It
goes as `shrink=` into `clip_by`, the clippers by global, tensor, unit, group, average
and spectral norm and RMS, AGC, and `clipped_grad`. It is called for norms below the
limit too, which `hard` returns as they are. Where one of your own returns NaN, inf or a
number below 0, clippers do what `nonfinite` says, and count the step as broken.
`shrink=smooth`, a factory without parentheses, is `shrink=smooth()`.

A limit of inf clips nothing, whatever the shrink: clippers do not call the shrink then.
So a shrink may be NaN there, as `auto_s` and `psac` are for a norm of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ._arguments.checks import check_concrete, check_number, check_takes, shown
from ._arguments.functions import with_hash
from ._arguments.helpful_errors import with_helpful_errors

Shrink = Callable[[Array, Array], Array]

__all__ = ["auto_s", "drop", "hard", "normalize", "psac", "smooth"]


def hard(norm: Array, limit: ArrayLike) -> Array:
    """Returns min(norm, limit). Norms within the limit keep their bits.

    Example:
      >>> print(optaxclip.shrinks.hard(jnp.array([1.0, 3.0]), 2.0))
      [1. 2.]
    """
    return jnp.minimum(norm, limit)


def drop(norm: Array, limit: ArrayLike) -> Array:
    """Returns the norm within the limit, and 0 beyond it.

    Example:
      >>> print(optaxclip.shrinks.drop(jnp.array([1.0, 3.0]), 2.0))
      [1. 0.]

    Reference: DI-engine and PPOxFamily (grad_ignore_norm), axlearn (drop_norm).
    """
    # NaN is not above the limit. `nonfinite` decides what becomes of it.
    return jnp.where(norm > limit, jnp.zeros_like(norm), norm)


def normalize(norm: Array, limit: ArrayLike) -> Array:
    """Returns the limit, but 0 for a norm of 0, which has no direction.

    Example:
      >>> print(optaxclip.shrinks.normalize(jnp.array([0.0, 1.0, 3.0]), 2.0))
      [0. 2. 2.]

    Reference: Bu et al., Automatic clipping, 2023 (arXiv 2206.07136), AUTO-V.
    """
    # Without the exception the factor limit / 0 would be inf, and inf * 0 is NaN.
    return jnp.where(norm == 0, norm, limit)


def smooth(power: float = 1.0) -> Shrink:
    """Returns the shrink norm / (1 + (norm / limit)^power)^(1 / power).

    It shortens everything a little. The new norm is that of `hard` divided by at most
    2^(1/power), which is reached at norm = limit.

    Args:
      power: how sharp the bend at the limit is: 1 is the gentlest in use, 2 is
        SPECTRA's, inf is `hard`. At least 1, known when the clipper is built.

    Raises:
      ValueError: a power below 1 or NaN. TypeError: one that is not a number.

    Example:
      >>> print(optaxclip.shrinks.smooth()(jnp.array([1.0, 3.0]), jnp.array(3.0)))
      [0.75 1.5 ]

    Reference: Zhang, He, Sra, Jadbabaie, Why gradient clipping accelerates training,
    2020 (arXiv 1905.11881). SPECTRA, 2026 (arXiv 2603.14315).
    """
    power = _static_number("smooth: power", power, lowest=1.0)
    # At p = inf the derivative of the formula is NaN.
    return hard if power == math.inf else _Smooth(power)


def auto_s(gamma: float = 0.01) -> Shrink:
    """Returns the shrink limit * norm / (norm + gamma).

    It normalizes, gently with small gradients: the factor new norm / norm stays at most
    limit / gamma.

    Args:
      gamma: the norm that is brought to half the limit. At least 0, known when the
        shrink is built. 0, or a gamma below 1e-19, gives `normalize`.

    Raises:
      ValueError: a gamma that is negative or NaN. TypeError: one that is not a number.

    Example:
      >>> norms = jnp.array([0.0, 0.01, 0.99])
      >>> print(optaxclip.shrinks.auto_s()(norms, jnp.array(2.0)))
      [0.   1.   1.98]

    Reference: Bu, Wang, Zha, Karypis, Automatic clipping: differentially private deep
    learning made easier and stronger, 2023 (arXiv 2206.07136).
    """
    gamma = _static_number("auto_s: gamma", gamma)
    # The derivative divides by (norm + gamma)^2, which float32 may flush to 0.
    return normalize if gamma < 1e-19 else _AutoS(gamma)


def psac(r: float = 0.1) -> Shrink:
    """Returns the shrink limit * norm / (norm + r / (norm + r)).

    It normalizes, but a vanishing gradient is multiplied by about the limit, and
    not by an unbounded factor. The factor is largest at norm = sqrt(r) - r, and at 0
    for r above 1.

    Args:
      r: how soon the factor falls with the norm. At least 0, known when the shrink is
        built. The paper tunes it. inf gives `auto_s(1)`, and 0, or an r below 1.2e-38,
        gives `normalize`.

    Raises:
      ValueError: an r that is negative or NaN. TypeError: one that is not a number.

    Example:
      >>> print(optaxclip.shrinks.psac(0.5)(jnp.array([0.0, 0.5]), jnp.array(1.0)))
      [0.  0.5]

    Reference: Xia et al., Differentially private learning with per-sample adaptive
    clipping, 2023 (arXiv 2212.00328).
    """
    r = _static_number("psac: r", r)
    # Float32 may flush a smaller r to 0.
    return normalize if r < float(jnp.finfo(jnp.float32).tiny) else _Psac(r)


# The shrinks that factories make. Equal numbers are equal shrinks, so a clipper that is
# built again compiles nothing anew. `factor_per_limit` is explained at the function
# `factor_per_limit_of`.


@dataclass(frozen=True)
class _Smooth:
    """norm / (1 + (norm / limit)^power)^(1 / power)."""

    power: float

    factor_per_limit = 0.0

    def __call__(self, norm: Array, limit: Array) -> Array:
        # n / (1 + (n/c)^p)^(1/p) stays the same with n and c exchanged. So the smaller
        # is divided by the larger, which cannot overflow.
        smaller = jnp.minimum(norm, limit)
        larger = jnp.maximum(norm, limit)
        # Both may be 0.
        quotient = smaller / jnp.where(larger == 0, 1.0, larger)
        return smaller / (1 + quotient**self.power) ** (1 / self.power)

    def __repr__(self) -> str:
        return f"smooth({self.power:g})"


@dataclass(frozen=True)
class _AutoS:
    """limit * norm / (norm + gamma)."""

    gamma: float

    @property
    def factor_per_limit(self) -> float:
        # The factor limit / (norm + gamma) is largest for a norm of 0.
        return 1 / self.gamma

    def __call__(self, norm: Array, limit: Array) -> Array:
        return limit * (norm / (norm + self.gamma))

    def __repr__(self) -> str:
        return f"auto_s({self.gamma:g})"


@dataclass(frozen=True)
class _Psac:
    """limit * norm / (norm + r / (norm + r))."""

    r: float

    @property
    def factor_per_limit(self) -> float:
        # norm + r / (norm + r) is least for the norm sqrt(r) - r, or for 0.
        least_divisor = 1.0 if self.r > 1 else 2 * self.r**0.5 - self.r
        return 1 / least_divisor

    def __call__(self, norm: Array, limit: Array) -> Array:
        # This is r / (norm + r). The derivative of that quotient would divide by the
        # square of norm + r, which may round to 0.
        bend = 1 / (1 + norm / self.r)
        return limit * (norm / (norm + bend))

    def __repr__(self) -> str:
        return f"psac({self.r:g})"


def _static_number(argument: str, number: Any, lowest: float = 0.0) -> float:
    """The number as a Python float, checked."""
    check_number(argument, number, lowest=lowest, is_scalar=True)
    check_concrete(argument, number)
    return float(number)


def is_ours(shrink: Shrink) -> bool:
    """Whether it is a shrink of this module. They return finite norms of at least 0."""
    return getattr(shrink, "__module__", None) == __name__


def factor_per_limit_of(shrink: Shrink) -> float:
    """A bound k on the factor of a shrink: new norm / norm <= max(1, k * limit).

    It is finite only for shrinks that also return at most the limit. It is inf for
    functions of users, of which neither is known, and for `normalize`, whose factor
    limit / norm has no bound.
    """
    if shrink is hard or shrink is drop:
        return 0.0
    if isinstance(shrink, (_Smooth, _AutoS, _Psac)):
        return shrink.factor_per_limit
    return math.inf


def shrink_of(shrink: Any, call: str) -> Shrink:
    """The shrink that a user means: `hard` for None, a factory's default for a factory.

    Raises:
      TypeError: a string or something else that is not a function.
    """
    if shrink is None:
        return hard
    # Called as a shrink, a factory would take the norm for its power.
    if any(shrink is factory for factory in (smooth, auto_s, psac)):
        return shrink()
    if not callable(shrink):
        raise TypeError(
            f"{call}: shrink must be a function of norm and limit, such as "
            f"optaxclip.shrinks.{', '.join(__all__)}, got {shown(shrink)}."
        )
    check_takes(f"{call}: shrink must take norm and limit", shrink, 2)
    return with_hash(shrink)


# `shrinks.norm` raises an AttributeError that lists the shrinks.
with_helpful_errors(__name__)
