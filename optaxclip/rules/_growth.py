"""The norm-growth limiter: a norm may be a little longer than the one before."""

from __future__ import annotations

from dataclasses import KW_ONLY

import jax
import jax.numpy as jnp

from ._rule import Number, Rule, at_step, multiple, number


class Growth(Rule):
    """limit = rate * max(last norm, floor), without a limit in the first step.

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

    Raises:
      ValueError: a number out of its range. TypeError: something that is no number.

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

    def init(self, norm: jax.Array) -> jax.Array:
        # The first norm has no limit: inf times a rate above 0 is inf.
        return jnp.full_like(norm, jnp.inf)

    def update(
        self, norm: jax.Array, memory: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        rate, floor = at_step(step, norm, self.rate, self.floor)
        # Without a last norm there is no limit, also at a rate of 0: 0 * inf is NaN.
        known = memory < jnp.inf
        last = jnp.maximum(jnp.where(known, memory, 0.0), floor)
        longest = multiple(rate, last)
        limit = jnp.where(known, longest, jnp.inf)
        # What a hard clip lets through. A rule does not know the clipper's shrink.
        passed = jnp.minimum(norm, limit)
        # From a last norm of 0 there would be no growth.
        return limit, jnp.where(passed > 0, passed, memory)
