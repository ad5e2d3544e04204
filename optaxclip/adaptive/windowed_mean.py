"""Windowed mean and standard deviation: what lies far above the last norms is an
outlier.

    limit_t = mean + sigmas * std       of the norms in the window

Levanter clips updates by it (3 sigmas of 128, at least 64 of them seen, ddof 0, a floor
of 1e-6 under the deviation), OLMo-core skips steps by it (6 sigmas of 128, ddof 1:
`optaxclip.skip_step`). Raw norms are remembered in both, so that the limit follows a
lasting change within a window's length.

Reference: Levanter, `optim/clip_update_norm.py`; OLMo-core,
`optim/skip_step_optimizer.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from ..arguments import check_number
from ..thresholds import Threshold
from .memory import (
    Window,
    at,
    check_length,
    include,
    is_clipped,
    parameter,
    push,
    valid,
    window,
)


def windowed_mean(
    sigmas: Any = 3.0,
    window: Any = 128,
    *,
    ddof: Any = 0,
    floor: Any = 0.0,
    current: Any = False,
    remember: str = "raw",
    warmup: Any = 2,
) -> Threshold:
    """limit = mean + sigmas * max(std, floor) of the last norms.

    Args:
      sigmas: at least 0. A number or a schedule.
      window: how many norms are remembered, a whole number at least 1.
        The length is part of the state: a restored state goes on with its own.
      floor: the deviation counts as at least this much, in units of the norm.
      ddof, current, remember, warmup: see `optaxclip.adaptive`.
    """
    call = "windowed_mean"
    sigmas, floor = (
        parameter(f"{call}: sigmas", sigmas),
        parameter(f"{call}: floor", floor),
    )
    check_length(f"{call}: window", window)
    check_number(f"{call}: ddof", ddof)
    check_number(f"{call}: warmup", warmup)
    return Threshold(
        Partial(_empty, window),
        Partial(
            _update, sigmas, floor, ddof, current, is_clipped(call, remember), warmup
        ),
    )


def _empty(length, norm):
    return window("windowed_mean: window", length, norm)


def _update(
    sigmas, floor, ddof, current, clipped, warmup, norm, memory, step, params_norm
):
    sigmas, floor = at(step, norm, sigmas, floor)
    return _judge(sigmas, floor, ddof, current, clipped, warmup, norm, memory)


@jax.jit
def _judge(sigmas, floor, ddof, current, clipped, warmup, norm, memory):
    held = include(current, memory, norm)
    mean, deviation = _moments(ddof, held)
    known = held.seen >= jnp.maximum(warmup, 1 + ddof)
    limit = jnp.where(known, mean + sigmas * jnp.maximum(deviation, floor), jnp.inf)
    return limit, push(memory, jnp.where(clipped, jnp.minimum(norm, limit), norm))


def _moments(ddof: jax.Array, memory: Window) -> tuple[jax.Array, jax.Array]:
    """Mean and standard deviation. Both are taken of differences to one of the norms,
    and divided by the largest difference: norms that are all equal have exactly their
    mean and no deviation, and no square leaves the range.
    """
    filled = valid(memory)
    count = jnp.clip(memory.seen, 1, memory.past.shape[-1]).astype(memory.past.dtype)
    anchor = memory.past[..., :1]
    apart = jnp.where(filled, memory.past - anchor, 0.0)
    largest = jnp.max(jnp.abs(apart), axis=-1, keepdims=True)
    apart = apart / jnp.where(largest > 0, largest, 1.0)
    shift = jnp.sum(apart, axis=-1, keepdims=True) / count[..., None]
    variance = jnp.sum(
        jnp.where(filled, apart - shift, 0.0) ** 2, axis=-1
    ) / jnp.maximum(count - jnp.asarray(ddof, count.dtype), 1)
    return anchor[..., 0] + (largest * shift)[..., 0], largest[..., 0] * jnp.sqrt(
        variance
    )
