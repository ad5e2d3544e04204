"""A limit that finds a quantile of the norms and remembers only itself."""

from __future__ import annotations

from dataclasses import KW_ONLY

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._rule import Number, Rule, at_step, number


class QuantileTracker(Rule):
    """limit <- limit * exp(-rate * ([norm <= limit] - quantile)).

    A norm within the limit lowers it by rate * (1 - quantile), and one beyond it raises
    it by rate * quantile. In balance a share `quantile` of the norms is within. A start
    that is too low by a factor f takes about log(f) / (rate * quantile) steps, one that
    is too high log(f) / (rate * (1 - quantile)). The paper adds noise for privacy and
    counts the share of a batch. Without noise and norm by norm it is a percentile clip
    that remembers one number.

    Args:
      quantile: in [0, 1], 0.5 is the median. A number or a schedule.
      rate: how fast the limit moves, relative to itself. At least 0, and finite. A
        number or a schedule.
      start: the first limit. It must be above 0 to be able to move.

    Raises:
      ValueError: a number out of its range. TypeError: something that is no number.

    Example:
      >>> rule = optaxclip.rules.quantile_tracker(0.5, 0.2, start=1.0)
      >>> print(optaxclip.replay.run(rule, [2.0, 2.0, 1.0]).limits)
      [1.     1.1052 1.2214]

    Reference: Andrew, Thakkar, McMahan, Ramaswamy, Differentially private learning with
    adaptive clipping, 2021 (arXiv 1905.03871).
    """

    quantile: Number = number(default=0.5, highest=1.0)
    rate: Number = number(default=0.2, highest=float(np.finfo(np.float32).max))
    _: KW_ONLY
    start: ArrayLike = number(default=0.1, schedule=False)

    def init(self, norm: jax.Array) -> jax.Array:
        return jnp.full_like(norm, self.start)

    def update(
        self, norm: jax.Array, limit: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        quantile, rate = at_step(step, norm, self.quantile, self.rate)
        within = (norm <= limit).astype(norm.dtype)
        # At 0 or inf it would stay for good, or become NaN.
        info = jnp.finfo(norm.dtype)
        held = jnp.clip(limit, info.tiny, info.max)
        # within - quantile is 1 - quantile or -quantile: a step down or up.
        moved = held * jnp.exp(-rate * (within - quantile))
        return limit, jnp.clip(moved, info.tiny, info.max)
