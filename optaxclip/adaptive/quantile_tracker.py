"""A limit that finds a quantile of the norms by itself and remembers nothing else.

    limit_{t+1} = limit_t * exp(-rate * ([norm_t <= limit_t] - quantile))

A norm within the limit lowers it by rate * (1 - quantile), one beyond it raises it by
rate * quantile: in balance a share `quantile` of the norms is within. From a start that
is wrong by a factor f it arrives after about log(f) / (rate * quantile) steps when too
low, log(f) / (rate * (1 - quantile)) when too high. The paper does it with noise, for
privacy, on the shares of a batch; without noise and norm by norm it is a percentile
clip in one number.

Reference: Andrew, Thakkar, McMahan, Ramaswamy, Differentially private learning with
adaptive clipping, 2021 (arXiv 1905.03871).
"""

from typing import Any

import jax.numpy as jnp
from jax.tree_util import Partial

from ..thresholds import Threshold
from .memory import at, parameter


def quantile_tracker(
    quantile: Any = 0.5, rate: Any = 0.2, *, start: Any = 0.1
) -> Threshold:
    """A limit that a share `quantile` of the norms stays within.

    Args:
      quantile: in [0, 1]; 0.5 is the median. A number or a schedule.
      rate: how fast the limit moves, relative to itself. At least 0. A number or a
        schedule.
      start: the first limit, above 0 to be able to move.
    """
    call = "quantile_tracker"
    quantile, rate = (
        parameter(f"{call}: quantile", quantile, highest=1.0),
        parameter(f"{call}: rate", rate),
    )
    return Threshold(
        Partial(_start, parameter(f"{call}: start", start)),
        Partial(_update, quantile, rate),
    )


def _start(start, norm):
    return jnp.full_like(norm, start)


def _update(quantile, rate, norm, limit, step, params_norm):
    quantile, rate = at(step, norm, quantile, rate)
    info = jnp.finfo(norm.dtype)
    moved = limit * jnp.exp(-rate * ((norm <= limit).astype(norm.dtype) - quantile))
    return limit, jnp.clip(
        moved, info.tiny, info.max
    )  # at 0 or inf it would stay for ever
