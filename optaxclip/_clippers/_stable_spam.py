"""AdaClip and AdaGN, the two clips of Stable-SPAM.

    AdaClip    T <- gamma T + (1 - gamma) max|g|,  corrected for its start       g_i <-
                                                   g_i T / max|g|  where |g_i| > T
    AdaGN      m <- gamma1 m + (1 - gamma1) |g|,  v <- gamma2 v + (1 - gamma2) |g|^2,
                                                  both corrected       g <- g / |g| * m
                                                  / (sqrt(v) + eps)

AdaClip shortens the largest coordinates of a tensor and leaves the others; AdaGN makes
every gradient about as long as 1, less where norms vary, whatever the scale of the
loss. The paper puts AdaClip first, then AdaGN, then Adam with momentum that is reset:
`optax.chain(adaclip(), adagn(), reset_momentum(optax.scale_by_adam(), every=1000),
...)`.

In both the current step is in the average. The public code resets Adam's step count but
not the averages', and then corrects them wrongly; here each keeps its own count.

Reference: Huang et al., Stable-SPAM: how to train in 4-bit more stably than 16-bit
Adam, 2025 (arXiv 2502.17055).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import Partial

from ..core import ClipState
from ..fixed import clip_by_tensor_norm
from ..leaves import Stacked, measured, with_unmeasured
from ..prefix import is_none
from ..sharding import Axes
from ..shrinks import normalize
from ..thresholds import Threshold
from .memory import Average, at, average, blend, gain, parameter
from .scope import Scope, clip_at


class MomentsMemory(NamedTuple):
    """First and second moment of the norm."""

    mean: Average
    root: (
        jax.Array
    )  # float32[norm]: the root of the average square, corrected for its start
    weight: (
        jax.Array
    )  # float32[norm]: how much of an endless average of squares was seen


def adaclip(
    decay: Any = 0.999,
    *,
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Shortens the coordinates of each tensor that are over the average of its largest
    ones.

    Args:
      decay: of the average, in [0, 1]. A number or a schedule.
      stacked: how many leading axes of a leaf count layers (see `tensor_norm`).
      nonfinite, axes: as in `clip_by_tensor_norm`.

    Returns:
      A transformation with a `ClipState`: `norm` is the largest coordinate, `scale`
      what those over the limit were multiplied by. For each tensor it remembers two
      numbers.

    Reference: Huang et al., 2025 (arXiv 2502.17055).
    """
    largest = clip_by_tensor_norm(
        ema(decay), ord=math.inf, stacked=stacked, nonfinite=nonfinite, axes=axes
    )

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ClipState]:
        scaled, state = largest.update(updates, state, params, **extra_args)
        shaped = jax.tree.map(
            _where_over,
            measured(updates),
            measured(scaled),
            state.norm,
            state.limit,
            is_leaf=is_none,
        )
        return with_unmeasured(shaped, updates), state

    return optax.GradientTransformationExtraArgs(largest.init, update)


def adagn(
    decay1: Any = 0.7,
    decay2: Any = 0.9,
    *,
    eps: Any = 1e-8,
    scope: Scope = "tensor",
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Makes each tensor as long as the quotient of its norm's moments, about 1.

    Args:
      decay1, decay2, eps: see `moments_ratio`.
      scope: "tensor", "global", or labels as for `clip_by_group_norm`.
      nonfinite, axes: as in `clip_by_global_norm`.

    Returns:
      A transformation with a `ClipState`, whose `limit` is the norm that was aimed at;
      for each norm it remembers four numbers.

    Reference: Huang et al., 2025 (arXiv 2502.17055).
    """
    return clip_at(
        scope,
        moments_ratio(decay1, decay2, eps=eps),
        "adagn",
        nonfinite,
        axes,
        shrink=normalize,
    )


def ema(decay: Any = 0.999) -> Threshold:
    """limit = exponential average of the norms, the current one included, corrected for
    its start.

    Args:
      decay: in [0, 1]. A number or a schedule.
    """
    return Threshold(
        Partial(average), Partial(_average, parameter("ema: decay", decay, highest=1.0))
    )


def moments_ratio(
    decay1: Any = 0.7, decay2: Any = 0.9, *, eps: Any = 1e-8
) -> Threshold:
    """limit = mean / (sqrt(mean of squares) + eps) of the norms, the current one
    included. Use it with `shrink=normalize`.

    Args:
      decay1, decay2: of the two moments, in [0, 1]. Numbers or schedules.
      eps: at least 0, in units of the norm.
    """
    call = "moments_ratio"
    decay1, decay2 = (
        parameter(f"{call}: {name}", value, highest=1.0)
        for name, value in (("decay1", decay1), ("decay2", decay2))
    )
    return Threshold(
        Partial(_no_moments),
        Partial(_moments, decay1, decay2, parameter(f"{call}: eps", eps)),
    )


def _where_over(update, scaled, norm, limit):
    if update is None:
        return None
    within = (jnp.abs(update).astype(norm.dtype) <= limit) & jnp.isfinite(norm)
    return jnp.where(within, update, scaled)


def _average(decay, norm, memory, step, params_norm):
    (decay,) = at(step, norm, decay)
    memory = blend(memory, norm, decay)
    return memory.value, memory


def _no_moments(norm):
    return MomentsMemory(average(norm), jnp.zeros_like(norm), jnp.zeros_like(norm))


def _moments(decay1, decay2, eps, norm, memory, step, params_norm):
    return _judge(*at(step, norm, decay1, decay2, eps), norm, memory)


@jax.jit
def _judge(decay1, decay2, eps, norm, memory):
    mean = blend(memory.mean, norm, decay1)
    weight = decay2 * memory.weight + (1 - decay2)
    share = gain(decay2, weight)
    root = jnp.hypot(jnp.sqrt(1 - share) * memory.root, jnp.sqrt(share) * norm)
    return mean.value / jnp.where(root > 0, root + eps, 1.0), MomentsMemory(
        mean, root, weight
    )
