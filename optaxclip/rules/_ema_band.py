"""AGGC's rule: the norm itself, brought into a band about its running average."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp

from ._memory import Average, blend, empty_average
from ._rule import Number, Rule, at_step, flag, multiple, number


class EmaBand(Rule):
    """limit = the norm, within [max(floor, low * average), high * average].

        limit within [down * norm, up * norm]
        average <- decay * average + (1 - decay) * limit

    The limit may be above the norm, so use it with `shrink=shrinks.normalize`, as
    `aggc` does. In the published runs `high` is below 1: every step is shortened, and
    the bound on a single step, `down`, decides by how much. The public code starts the
    average at 0, so that the band is next to nothing in the first steps. Here it starts
    at the first norm, which passes as it is.

    Args:
      low, high: the edges, as multiples of the average. At least 0. Numbers or
        schedules. A norm above `high` is brought down to it, even where `low` is
        higher. In the public scripts for LoRA both move linearly to later values,
        `low` to 0.98 and `high` to 0.7, over 0.3 of the steps after the first 0.4:
        `high=optax.linear_schedule(0.6, 0.7, int(0.3 * steps), int(0.4 * steps))`.
      decay: of the average, in [0, 1]. With 1 it stays at the first norm. A number or a
        schedule.
      floor: the lower edge is at least this, in units of the norm.
      up: how far one step is lengthened at most, at least 1.
      down: how far one step is shortened at most, in [0, 1].
      raise_small: whether norms below the band are lifted. Otherwise they pass.

    Raises:
      ValueError: a number out of its range. TypeError: something that is no number.

    Example:
      >>> rule = optaxclip.rules.ema_band(0.5, 1.0, 0.5, down=0.5)
      >>> print(optaxclip.replay.run(rule, [2.0, 3.0, 9.0]).limits)
      [2.  2.  4.5]

    Reference: Li, Wu, Chang, AGGC: adaptive group gradient clipping for stabilizing
    large language model training, 2026 (arXiv 2601.11864).
    """

    low: Number = number(default=0.95)
    high: Number = number(default=0.6)
    decay: Number = number(default=0.95, highest=1.0)
    _: KW_ONLY
    floor: Number = number(default=0.01)
    up: Number = number(default=1.1, lowest=1.0)
    down: Number = number(default=0.9, highest=1.0)
    raise_small: Any = flag(default=False)

    def init(self, norm: jax.Array) -> Average:
        return empty_average(norm)

    def update(
        self, norm: jax.Array, average: Average, step: jax.Array
    ) -> tuple[jax.Array, Average]:
        low, high, decay = at_step(step, norm, self.low, self.high, self.decay)
        floor, up, down = at_step(step, norm, self.floor, self.up, self.down)
        lower = jnp.maximum(floor, low * average.estimate)
        upper = high * average.estimate
        short = jnp.asarray(self.raise_small) & (norm < lower)
        # The upper edge is asked first, since by default it is below the lower one.
        target = jnp.where(norm > upper, upper, jnp.where(short, lower, norm))
        # However far the band is, a norm is multiplied by 0.9 to 1.1 by default.
        target = jnp.clip(target, down * norm, multiple(up, norm))
        # The first norm has no band yet.
        target = jnp.where(average.weight > 0, target, norm)
        return target, blend(average, target, decay, corrected=False)
