"""The running average of the norms itself."""

from __future__ import annotations

import jax

from ._memory import Average, blend, empty_average
from ._rule import Number, Rule, at_step, number


class Ema(Rule):
    """limit = exponential average of the norms, the current one included.

    The average is corrected for its start, so the first norm passes as it is.
    `adaclip` is this rule on the largest coordinate of each tensor.

    Args:
      decay: in [0, 1]. 1 is the mean of all norms. A number or a schedule.

    Raises:
      ValueError: a decay out of its range. TypeError: something that is no number.

    Example:
      >>> rule = optaxclip.rules.ema(0.5)
      >>> print(optaxclip.replay.run(rule, [1.0, 4.0, 4.0]).limits)
      [1.     3.     3.5714]

    Reference: Huang et al., Stable-SPAM: how to train in 4-bit more stably than 16-bit
    Adam, 2025 (arXiv 2502.17055).
    """

    decay: Number = number(default=0.999, highest=1.0)

    def init(self, norm: jax.Array) -> Average:
        return empty_average(norm)

    def update(
        self, norm: jax.Array, average: Average, step: jax.Array
    ) -> tuple[jax.Array, Average]:
        (decay,) = at_step(step, norm, self.decay)
        # Blended first: the norm counts in the limit that it is held against.
        average = blend(average, norm, decay)
        return average.estimate, average
