"""ZClip's rule: a norm with too high a z-score is clipped."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._exported import exported
from ._memory import between, hypot, one_more, root
from ._rule import Number, Rule, at_step, choice, multiple, number


@exported
class ZScoreMemory(NamedTuple):
    """Mean and deviation of the clipped norms."""

    seen: jax.Array  # int32[norm]: norms remembered
    mean: jax.Array  # float32[norm]
    deviation: jax.Array  # float32[norm]


class ZScore(Rule):
    """limit = mean + (z^2 / score) * deviation for a norm with a score above z.

        score = (norm - mean) / (deviation + eps)
        mean, deviation     exponential averages of the clipped norms, the deviation
                            about the new mean

    The first `warmup` norms are not clipped. They give the mean and the population
    deviation to start from. Until a norm is over it, the limit in the state is the one
    at which clipping begins, mean + z * (deviation + eps). The public code adds a fixed
    cap of 1.0 in every step: `rules.minimum(rules.z_score(), 1.0)`. Its averages stay
    NaN after the first NaN norm. Here such a norm is not remembered.

    Args:
      z: a norm with a score above it is clipped. At least 0. A number or a schedule.
      decay: of mean and variance, in [0, 1]. A number or a schedule.
      target: what a clipped norm is brought to: "adaptive" is the equation above,
        "mean" the mean, "max" z deviations above it.
      warmup: how many norms are seen before the first is clipped. At least 1.
      eps: added to the deviation when the score is computed, in units of the norm. It
        must be above 0 for the first norms after a constant warm-up.

    Raises:
      ValueError: a number out of its range, or an unknown target. TypeError: something
        that is no number.

    Example:
      >>> rule = optaxclip.rules.z_score(2.0, 0.5, warmup=3)
      >>> print(optaxclip.replay.run(rule, [1.0, 3.0, 2.0, 9.0]).limits)
      [  inf   inf   inf 2.381]

    Reference: Kumar, Owen, Chowdhury, Gura, ZClip: adaptive spike mitigation for LLM
    pre-training, 2025 (arXiv 2504.02507).
    """

    z: Number = number(default=2.5)
    decay: Number = number(default=0.97, highest=1.0)
    _: KW_ONLY
    target: str = choice("adaptive", "mean", "max", default="adaptive")
    warmup: Any = number(default=25, lowest=1, schedule=False)
    eps: Number = number(default=1e-6)

    def init(self, norm: jax.Array) -> ZScoreMemory:
        seen = jnp.zeros(norm.shape, jnp.int32)
        return ZScoreMemory(seen, jnp.zeros_like(norm), jnp.zeros_like(norm))

    def update(
        self, norm: jax.Array, memory: ZScoreMemory, step: jax.Array
    ) -> tuple[jax.Array, ZScoreMemory]:
        z, decay, eps = at_step(step, norm, self.z, self.decay, self.eps)
        seen, mean, deviation = memory
        warm = seen >= self.warmup
        spread = deviation + eps
        edge = mean + multiple(z, spread)
        # Without any spread it is inf above the edge, and target is the mean.
        score = (norm - mean) / spread
        target = mean + self._target(score, z) * deviation
        limit = jnp.where(warm, jnp.where(norm > edge, target, edge), jnp.inf)
        # In the warm-up every norm counts alike: mean and variance of them all.
        alike = seen.astype(norm.dtype) / (seen + 1).astype(norm.dtype)
        keep = jnp.where(warm, decay, alike)
        value = jnp.minimum(norm, limit)
        apart = value - mean
        mean = between(mean, value, keep)
        # The paper's deviation is about the new mean. In the warm-up the geometric mean
        # of the distances to the old and the new one gives the exact variance.
        distance = jnp.where(warm, keep, root(keep)) * apart
        old, new = root(keep) * deviation, root(1 - keep) * distance
        return limit, ZScoreMemory(one_more(seen), mean, hypot(old, new))

    def _target(self, score: jax.Array, z: jax.Array) -> jax.Array:
        """How many deviations above the mean a clipped norm is brought to."""
        if self.target == "adaptive":
            return z * z / jnp.maximum(score, z)
        return jnp.zeros_like(score) if self.target == "mean" else z
