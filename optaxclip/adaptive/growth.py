"""The norm-growth limiter: a norm may be at most a little longer than the one before.

    limit_t = rate * (norm_{t-1} as it was let through)

Fira, APOLLO, RACS and Alice apply it to each tensor of the update with 1.01:
`clip_by_tensor_norm(growth())` after the preconditioner. From one step to the next the
norm grows by at most 1 %, however large the spike; a lasting rise by a factor f takes
log(f) / log(rate) steps to pass.

Reference: Chen et al., Fira: can we achieve full-rank training of LLMs under low-rank
constraint?, 2024 (arXiv 2410.01623).
"""

from typing import Any

import jax.numpy as jnp
from jax.tree_util import Partial

from ..thresholds import Threshold
from .memory import at, parameter


def growth(rate: Any = 1.01, *, floor: Any = 0.0) -> Threshold:
    """limit = rate * max(last norm, floor); none in the first step.

    Args:
      rate: growth allowed in a step, at least 0; 1.01 is 1 %. A number or a schedule.
      floor: a shorter last norm counts as this long, so that one tiny gradient does not
        hold back hundreds of steps. At least 0.
    """
    return Threshold(
        Partial(_unlimited),
        Partial(
            _update, parameter("growth: rate", rate), parameter("growth: floor", floor)
        ),
    )


def _unlimited(norm):
    return jnp.full_like(norm, jnp.inf)


def _update(rate, floor, norm, last, step, params_norm):
    rate, floor = at(step, norm, rate, floor)
    limit = rate * jnp.maximum(last, floor)
    return limit, jnp.minimum(norm, limit)
