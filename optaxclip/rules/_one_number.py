"""Rules that remember one number: the last norm, or their own limit."""

from __future__ import annotations

from dataclasses import KW_ONLY

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ._rule import (
    Answer,
    Number,
    Rule,
    at_step,
    multiple,
    number,
    warn_of_falling,
)


class Growth(Rule):
    """limit = min(cap, rate * max(last norm, floor)), in the first step the cap alone.

    The last norm is what a hard clip let through, the smaller of norm and limit, unless
    that is 0. From one step to the next the norm grows by at most 1 %, however large
    the spike. A lasting rise by a factor f takes
    log(f) / log(rate) steps to pass. Fira, APOLLO, RACS and Alice apply this to each
    tensor of the update: `clip_by_tensor_norm(rules.growth())` after the
    preconditioner.

    Args:
      rate: growth allowed in a step, at least 0. 1.01 is 1 %. A number or a schedule.
      floor: a shorter last norm counts as this long, so that one tiny gradient does not
        hold back hundreds of steps. At least 0. A number or a schedule.
      cap: a fixed limit besides. Without one the first norm passes, whatever it is, and
        all later limits begin at it. At least 0, None for none. A number or a schedule.

    Raises:
      ValueError: a number out of its range. TypeError: something that is no number.

    Warns:
      UserWarning: a rate of at most 1 without a floor, with which norms can only fall.

    Example:
      >>> rule = optaxclip.rules.growth(1.5)
      >>> print(optaxclip.replay.run(rule, [2.0, 9.0, 9.0, 3.0]).limits)
      [ inf 3.   4.5  6.75]

    Reference: Chen et al., Fira: can we achieve full-rank training of LLMs under
    low-rank constraint?, 2024 (arXiv 2410.01623).
    """

    rate: Number = number(default=1.01)
    _: KW_ONLY
    floor: Number = number(default=0.0)
    cap: Number | None = number(default=None, optional=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A floor above 0 holds limits up.
        if isinstance(self.floor, (int, float)) and self.floor == 0:
            warn_of_falling("growth: rate", self.rate, stacklevel=4)

    def init(self, norm: Array) -> Array:
        # The first norm has no limit: inf times a rate above 0 is inf.
        return jnp.full_like(norm, jnp.inf)

    def update(self, norm: Array, memory: Array, step: Array) -> Answer:
        cap = jnp.inf if self.cap is None else self.cap
        rate, floor, cap = at_step(step, norm, self.rate, self.floor, cap)
        # Without a last norm there is no limit, also at a rate of 0: 0 * inf is NaN.
        known = memory < jnp.inf
        last = jnp.maximum(jnp.where(known, memory, 0.0), floor)
        longest = multiple(rate, last)
        limit = jnp.minimum(jnp.where(known, longest, jnp.inf), cap)
        # What a hard clip lets through. A rule does not know the clipper's shrink.
        passed = jnp.minimum(norm, limit)
        # From a last norm of 0 there would be no growth.
        return limit, jnp.where(passed > 0, passed, memory)


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

    def init(self, norm: Array) -> Array:
        return jnp.full_like(norm, self.start)

    def update(self, norm: Array, limit: Array, step: Array) -> Answer:
        quantile, rate = at_step(step, norm, self.quantile, self.rate)
        within = (norm <= limit).astype(norm.dtype)
        # At 0 or inf it would stay for good, or become NaN.
        info = jnp.finfo(norm.dtype)
        held = jnp.clip(limit, info.tiny, info.max)
        # within - quantile is 1 - quantile or -quantile: a step down or up.
        moved = held * jnp.exp(-rate * (within - quantile))
        return limit, jnp.clip(moved, info.tiny, info.max)
