"""A limit that follows the weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._rule import Number, Rule, at_step, multiple, number


class ShareOfParams(Rule):
    """limit = share * max(norm of the weights, floor).

    Updates stay short against the weights that they change. `adaptive_grad_clip` is
    this rule on unit norms. The clipper's `update` needs params.

    Args:
      share: how long an update may be, relative to the weights. At least 0. A number,
        an array or a schedule.
      floor: weights shorter than this count as this long, so that weights that start
        at 0 can leave it. At least 0.

    Raises:
      ValueError: a negative or NaN number, or `update` without params.
      TypeError: something that is not a number.

    Example:
      >>> grads, params = jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0])
      >>> rule = optaxclip.rules.share_of_params(0.5)
      >>> clipper = optaxclip.clip_by_global_norm(rule)
      >>> updates, state = clipper.update(grads, clipper.init(params), params)
      >>> print(updates, state.limit)
      [0.6 0.8] 1.0
    """

    share: Number = number()
    floor: Number = number(default=0.0)

    @property
    def needs_params(self) -> bool:
        # `limit_of` then hands over the norm of the weights.
        return True

    def update(
        self,
        norm: jax.Array,
        memory: Any,
        step: jax.Array,
        params_norm: jax.Array,
    ) -> Any:
        share, floor = at_step(step, norm, self.share, self.floor)
        # Weights may have 64 bits where updates have 32.
        weights = jnp.maximum(params_norm.astype(norm.dtype), floor)
        return multiple(share, weights), memory
