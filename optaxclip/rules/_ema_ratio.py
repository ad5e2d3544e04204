"""A multiple of the running average of the norms."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp

from ._memory import (
    Average,
    blend,
    empty_average,
    one_more,
    remembered,
    unless_gone,
)
from ._rule import (
    Number,
    Rule,
    at_step,
    choice,
    flag,
    number,
)

# int32[norm]: norms seen. Then the averages of `ratio` and of `target`.
Memory = tuple[jax.Array, Average, Average]


class EmaRatio(Rule):
    """limit = ratio * average of the norms.

    With a target there are two rates: a norm above ratio * average is brought to
    target * a second average.

        limit = ratio * average                                   one rate
        limit = target * second    where norm > ratio * average   two rates

    The defaults remember the smaller of norm and limit, so that a spike does not raise
    the limit for the next one. With a ratio near 1 the norm then grows by at most
    1 + (1 - decay) * (ratio - 1) a step.

    Args:
      ratio: a norm above this multiple of the average is clipped. At least 0. A number
        or a schedule.
      decay: of the average, in [0, 1]. With 1 it stays at the first norm, or corrected
        is the mean of all. A number or a schedule.
      target: the multiple that clipped norms are brought to. None for `ratio`.
      target_decay: of the average that `target` multiplies. None for `decay`.
      corrected: whether the averages start at 0 and are corrected for it, as Adam's.
        Otherwise they start at the first norm.
      remember: "clipped" for the smaller of the norm and this rule's limit, whatever
        the clipper's shrink makes of them. "raw" for the norm as it came.
      warmup: how many norms are seen before there is a limit. At least 0. There is no
        limit before the first norm.

    Raises:
      ValueError: a number out of its range, or an unknown `remember`. TypeError:
        something that is no number.

    Example:
      >>> rule = optaxclip.rules.ema_ratio(2.0, 0.5)
      >>> print(optaxclip.replay.run(rule, [1.0, 1.0, 9.0, 9.0]).limits)
      [inf  2.  2.  3.]

    Reference: OLMo 1, `olmo/optim.py` (max_grad_norm_ratio, one rate). Its average
    starts with the second norm, which is not clipped, and the first is thrown away.
    Here it starts with the first. PDE-Transformer, `callback/ema_clip.py` (two rates,
    2.0 and 1.1, decays 0.99 and 0.9).
    """

    ratio: Number = number(default=2.0)
    decay: Number = number(default=0.99, highest=1.0)
    _: KW_ONLY
    target: Number | None = number(default=None, optional=True)
    target_decay: Number | None = number(
        default=None, highest=1.0, optional=True
    )
    corrected: Any = flag(default=False)
    remember: str = choice("clipped", "raw", default="clipped")
    warmup: Any = number(default=1, schedule=False)

    def init(self, norm: jax.Array) -> Memory:
        seen = jnp.zeros(norm.shape, jnp.int32)
        return seen, empty_average(norm), empty_average(norm)

    def update(
        self, norm: jax.Array, memory: Memory, step: jax.Array
    ) -> tuple[jax.Array, Memory]:
        ratio, decay = at_step(step, norm, self.ratio, self.decay)
        target, target_decay = ratio, decay
        if self.target is not None:
            (target,) = at_step(step, norm, self.target)
        if self.target_decay is not None:
            (target_decay,) = at_step(step, norm, self.target_decay)
        seen, average, second = memory
        edge = ratio * average.estimate
        # With one rate both averages are the same, and so are both limits.
        limit = jnp.where(norm > edge, target * second.estimate, edge)
        # Without a norm there is no average, also with a warmup of 0.
        limit = jnp.where(seen >= jnp.maximum(self.warmup, 1), limit, jnp.inf)
        # Clipped by default, so that one spike does not raise the limit of the next.
        value = remembered(self.remember, norm, limit)
        average = blend(average, value, decay, self.corrected)
        second = blend(second, value, target_decay, self.corrected)
        new = one_more(seen), average, second
        return limit, unless_gone(self.remember, value, new, memory)
