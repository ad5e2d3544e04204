"""The quotient of the norm's first and second moment."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._exported import exported
from ._memory import Average, blend, empty_average, hypot, root, weigh
from ._rule import Number, Rule, at_step, number


@exported
class Moments(NamedTuple):
    """First and second moment of the norm."""

    mean: Average
    # float32[norm]: the root of the average square, corrected for its start
    root: jax.Array
    # float32[norm]: the share of an endless average that was seen
    weight: jax.Array


class MomentsRatio(Rule):
    """limit = mean / (sqrt(mean of squares) + eps), the current norm included.

        mean <- decay1 * mean + (1 - decay1) * norm          corrected for their starts
        square <- decay2 * square + (1 - decay2) * norm^2

    The limit is about 1, and less where norms vary. Use it with
    `shrink=shrinks.normalize`, as `adagn` does.

    Args:
      decay1, decay2: of the two moments, in [0, 1]. 1 is the mean of all norms. Numbers
        or schedules.
      eps: at least 0, in units of the norm. A number or a schedule.

    Raises:
      ValueError: a number out of its range. TypeError: something that is no number.

    Example:
      >>> rule = optaxclip.rules.moments_ratio(0.5, 0.5)
      >>> print(optaxclip.replay.run(rule, [1.0, 1.0, 3.0]).limits)
      [1.     1.     0.9078]

    Reference: Huang et al., Stable-SPAM: how to train in 4-bit more stably than 16-bit
    Adam, 2025 (arXiv 2502.17055), AdaGN.
    """

    decay1: Number = number(default=0.7, highest=1.0)
    decay2: Number = number(default=0.9, highest=1.0)
    _: KW_ONLY
    eps: Number = number(default=1e-8)

    def init(self, norm: jax.Array) -> Moments:
        return Moments(
            empty_average(norm), jnp.zeros_like(norm), jnp.zeros_like(norm)
        )

    def update(
        self, norm: jax.Array, memory: Moments, step: jax.Array
    ) -> tuple[jax.Array, Moments]:
        decay1, decay2, eps = at_step(
            step, norm, self.decay1, self.decay2, self.eps
        )
        mean = blend(memory.mean, norm, decay1)
        weight, share = weigh(memory.weight, decay2)
        # Roots of squares: the square of a norm may leave the range of float32.
        size = hypot(root(1 - share) * memory.root, root(share) * norm)
        # That of a first norm of 0 is 0, and eps may be 0 too.
        limit = mean.estimate / jnp.where(size > 0, size + eps, 1.0)
        return limit, Moments(mean, size, weight)
