"""AGGC: each group of parameters is held in a band about the running average of its own
norm.

    target_t = norm_t, within [max(floor, low * average), high * average]
    target_t within [down * norm_t, up * norm_t]
    average <- decay * average + (1 - decay) * target_t

A group that explodes does not shorten the others, and one that dies away can be lifted.
In the published runs `high` is below 1: every step is shortened, and the bound on a
single step, `down`, decides by how much. `low` and `high` move linearly from early to
late values over a part of the run: hand in schedules, such as
`optax.linear_schedule(0.6, 0.7, transition_steps=int(0.3 * steps),
transition_begin=int(0.25 * steps))`.

The public code starts the average at 0 without correction, so that the band is next to
nothing in the first steps; here it starts at the first norm, which passes as it is.

Reference: Li, Wu, Chang, AGGC: adaptive group gradient clipping for stabilizing large
language model training, 2026 (arXiv 2601.11864).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import Partial

from ..sharding import Axes
from ..shrinks import normalize
from ..thresholds import Threshold
from .memory import at, average, blend, parameter
from .scope import Scope, clip_at


def aggc(
    low: Any = 0.95,
    high: Any = 0.6,
    *,
    scope: Scope,
    decay: Any = 0.95,
    floor: Any = 0.01,
    up: Any = 1.1,
    down: Any = 0.9,
    raise_small: Any = False,
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Holds the norm of each group in a band about its own average.

    Args:
      scope: labels as for `clip_by_group_norm`, such as the kind of the layer; or
        "tensor" or "global".
      low, high, decay, floor, up, down, raise_small: see `ema_band`.
      nonfinite, axes: as in `clip_by_global_norm`.

    Returns:
      A transformation with a `ClipState`, whose `limit` is the norm that was aimed at;
      for each norm it remembers two numbers.

    Reference: Li, Wu, Chang, 2026 (arXiv 2601.11864).
    """
    rule = ema_band(
        low, high, decay, floor=floor, up=up, down=down, raise_small=raise_small
    )
    return clip_at(scope, rule, "aggc", nonfinite, axes, shrink=normalize)


def ema_band(
    low: Any = 0.95,
    high: Any = 0.6,
    decay: Any = 0.95,
    *,
    floor: Any = 0.01,
    up: Any = 1.1,
    down: Any = 0.9,
    raise_small: Any = False,
) -> Threshold:
    """The norm itself, brought into a band about its average. Use it with
    `shrink=normalize`, since it may be above the norm.

    Args:
      low, high: the edges, as multiples of the average. At least 0. Numbers or
        schedules. A norm above `high` is brought down to it, even where `low` is
        higher.
      decay: of the average, in [0, 1]. A number or a schedule.
      floor: the lower edge is at least this, in units of the norm.
      up, down: how far one step is lifted or shortened at most: up at least 1, down in
        [0, 1].
      raise_small: lift norms below the band; otherwise they are left alone.
    """
    call = "ema_band"
    low, high, floor = (
        parameter(f"{call}: {name}", value)
        for name, value in (("low", low), ("high", high), ("floor", floor))
    )
    decay, up, down = (
        parameter(f"{call}: decay", decay, highest=1.0),
        parameter(f"{call}: up", up, lowest=1.0),
        parameter(f"{call}: down", down, highest=1.0),
    )
    return Threshold(
        Partial(average),
        Partial(_update, low, high, decay, floor, up, down, raise_small),
    )


def _update(
    low, high, decay, floor, up, down, raise_small, norm, memory, step, params_norm
):
    numbers = at(step, norm, low, high, decay, floor, up, down)
    return _judge(*numbers, raise_small, norm, memory)


@jax.jit
def _judge(low, high, decay, floor, up, down, raise_small, norm, memory):
    lower, upper = jnp.maximum(floor, low * memory.value), high * memory.value
    target = jnp.where(
        norm > upper,
        upper,
        jnp.where(jnp.asarray(raise_small) & (norm < lower), lower, norm),
    )
    target = jnp.where(
        memory.weight > 0, jnp.clip(target, down * norm, up * norm), norm
    )
    return target, blend(memory, target, decay, corrected=False)
