"""A z-score of the logarithm of the norm, which is nearer to a normal distribution."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._exported import exported
from ._memory import (
    Average,
    blend,
    empty_average,
    hypot,
    one_more,
    root,
    weigh,
)
from ._rule import Number, Rule, at_step, multiple, number

MOST = float(np.finfo(np.float32).max)


@exported
class LogNormMemory(NamedTuple):
    """Mean and deviation of the logarithm."""

    seen: jax.Array  # int32[norm]: norms remembered
    mean: Average
    deviation: jax.Array  # float32[norm]


class LogZScore(Rule):
    """limit = exp(mean + z * max(deviation, spread)) - 1, of log(1 + norm).

    Mean and deviation are exponential averages, corrected for their start. The clipped
    norm is remembered, and in the warm-up, where nothing is clipped, the norm as it
    came. RNMT+ drops the whole step beyond four deviations:
    `skip_spikes(optimizer, rules.log_z_score())`.

    Args:
      z: how many deviations are allowed, at least 0. A number or a schedule.
      decay: of mean and variance, in [0, 1]. 1 counts all norms alike. A number or a
        schedule.
      floor: shorter norms count as this long. At least 0, and finite. A number or a
        schedule.
      spread: the deviation counts as at least this much, so that norms that hardly
        differ are not outliers of one another. At least 0. A number or a schedule.
      warmup: how many norms are seen before there is a limit. At least 1. With the
        default decay, 277 is where 0.75 of the weight of an endless average is reached.

    Raises:
      ValueError: a number out of its range. TypeError: something that is no number.

    Example:
      >>> rule = optaxclip.rules.log_z_score(2.0, 0.5, warmup=2)
      >>> print(optaxclip.replay.run(rule, [1.0, 2.0, 9.0]).limits)
      [  inf   inf 2.841]

    Reference: Chen et al., The best of both worlds: combining recent advances in neural
    machine translation, 2018 (arXiv 1804.09849). Lingvo, `core/layers.py`,
    GradNormTracker, holds the norms of the warm-up to the limit as well, which begins
    near 0 there. So it learns less from a spike in the warm-up, and its limits are
    lower for some hundred steps after it.
    """

    z: Number = number(default=4.0)
    decay: Number = number(default=0.995, highest=1.0)
    _: KW_ONLY
    # With an infinite one the logarithms would differ by inf - inf.
    floor: Number = number(default=0.01, highest=MOST)
    spread: Number = number(default=1e-3)
    warmup: Any = number(default=277, lowest=1, schedule=False)

    def init(self, norm: jax.Array) -> LogNormMemory:
        seen = jnp.zeros(norm.shape, jnp.int32)
        return LogNormMemory(seen, empty_average(norm), jnp.zeros_like(norm))

    def update(
        self, norm: jax.Array, memory: LogNormMemory, step: jax.Array
    ) -> tuple[jax.Array, LogNormMemory]:
        z, decay = at_step(step, norm, self.z, self.decay)
        floor, spread = at_step(step, norm, self.floor, self.spread)
        seen, mean, deviation = memory
        # expm1 and log1p keep the digits of norms far below 1.
        edge = jnp.expm1(
            mean.estimate + multiple(z, jnp.maximum(deviation, spread))
        )
        limit = jnp.where(seen >= self.warmup, edge, jnp.inf)
        value = jnp.log1p(jnp.maximum(jnp.minimum(norm, limit), floor))
        moved = blend(mean, value, decay)
        _, share = weigh(mean.weight, decay)
        # The variance of a mixture of old values and the new one, never negative.
        apart = root(share) * jnp.abs(value - mean.estimate)
        deviation = root(1 - share) * hypot(deviation, apart)
        return limit, LogNormMemory(one_more(seen), moved, deviation)
