"""ZClip: a norm whose z-score against the running mean and deviation is too high is
brought back, the further off the more.

    z_t     = (norm_t - mean) / (deviation + eps)
    limit_t = mean + xi * deviation        where z_t > z;    xi = z^2 / z_t
                                           ("adaptive"), 0 ("mean") or z ("max")
    mean, deviation <- exponential averages of the clipped norms, the deviation about
    the new mean

The first `warmup` norms are not clipped; they give the mean and the population
deviation to start from. The public code adds a fixed cap of 1.0 in every step, warm-up
too: `cap=1.0`. Its averages become NaN for ever at the first NaN norm, ours do not take
notice of it.

Reference: Kumar, Owen, Chowdhury, Gura, ZClip: adaptive spike mitigation for LLM
pre-training, 2025 (arXiv 2504.02507).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import Partial

from ..arguments import check_number
from ..sharding import Axes
from ..thresholds import Threshold, least
from .memory import at, parameter
from .scope import Scope, clip_at


class ZScoreMemory(NamedTuple):
    """Mean and deviation of the clipped norms."""

    seen: jax.Array  # int32[norm]: norms remembered
    mean: jax.Array  # float32[norm]
    deviation: jax.Array  # float32[norm]


def zclip(
    z: Any = 2.5,
    decay: Any = 0.97,
    *,
    cap: Any = None,
    target: str = "adaptive",
    warmup: Any = 25,
    eps: Any = 1e-6,
    scope: Scope = "global",
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips norms with a z-score above `z`.

    Args:
      z, decay, target, warmup, eps: see `z_score`.
      cap: a fixed limit besides, as the public code has with 1.0; None for the paper's
        rule. The averages do not hear of it.
      scope: "global", "tensor", or labels as for `clip_by_group_norm`.
      nonfinite, axes: as in `clip_by_global_norm`.

    Returns:
      A transformation with a `ClipState`; for each norm it remembers three numbers.

    Reference: Kumar et al., 2025 (arXiv 2504.02507).
    """
    rule = z_score(z, decay, target=target, warmup=warmup, eps=eps)
    return clip_at(
        scope, rule if cap is None else least(rule, cap), "zclip", nonfinite, axes
    )


def z_score(
    z: Any = 2.5,
    decay: Any = 0.97,
    *,
    target: str = "adaptive",
    warmup: Any = 25,
    eps: Any = 1e-6,
) -> Threshold:
    """The rule of ZClip.

    Args:
      z: the score from which on a norm is clipped, at least 0. A number or a schedule.
      decay: of mean and variance, in [0, 1]. A number or a schedule.
      target: what a clipped norm is brought to: "adaptive" z^2/z_t deviations above the
        mean, "mean" the mean, "max" z deviations above it.
      warmup: how many norms are seen before the first is clipped. At least 1.
      eps: added to the deviation when the score is computed, in units of the norm. Must
        be above 0 for the first norms after a constant warm-up.

    Until a norm is over it, the limit in the state is the one from which on clipping
    begins.
    """
    call = "z_score"
    if target not in _TARGETS:
        raise ValueError(
            f"{call}: target must be 'adaptive', 'mean' or 'max', got {target!r}."
        )
    z, decay, eps = (
        parameter(f"{call}: z", z),
        parameter(f"{call}: decay", decay, highest=1.0),
        parameter(f"{call}: eps", eps),
    )
    check_number(f"{call}: warmup", warmup, lowest=1)
    return Threshold(
        Partial(_nothing),
        Partial(_update, Partial(_TARGETS[target]), z, decay, warmup, eps),
    )


def _adaptive(score, z):
    return z * z / jnp.maximum(score, z)


def _to_mean(score, z):
    return jnp.zeros_like(score)


def _to_edge(score, z):
    return z


_TARGETS = {"adaptive": _adaptive, "mean": _to_mean, "max": _to_edge}


def _nothing(norm):
    return ZScoreMemory(
        jnp.zeros(norm.shape, jnp.int32), jnp.zeros_like(norm), jnp.zeros_like(norm)
    )


def _update(target, z, decay, warmup, eps, norm, memory, step, params_norm):
    z, decay, eps = at(step, norm, z, decay, eps)
    return _judge(target, z, decay, eps, warmup, norm, memory)


@jax.jit
def _judge(target, z, decay, eps, warmup, norm, memory):
    count, mean, deviation = memory
    warm = count >= warmup
    spread = deviation + eps
    edge = mean + z * spread
    score = (norm - mean) / jnp.where(spread > 0, spread, 1.0)
    limit = jnp.where(
        warm, jnp.where(norm > edge, mean + target(score, z) * deviation, edge), jnp.inf
    )
    # Before the end of the warm-up every norm counts alike, which gives mean and
    # variance of them all.
    keep = jnp.where(
        warm, decay, count.astype(norm.dtype) / (count + 1).astype(norm.dtype)
    )
    apart = jnp.minimum(norm, limit) - mean
    moved = mean + (1 - keep) * apart
    # About the new mean in the paper; all norms that count alike are as far from the
    # old mean as from the new one, in effect.
    distance = jnp.where(warm, keep, jnp.sqrt(keep)) * apart
    return limit, ZScoreMemory(
        count + 1,
        moved,
        jnp.hypot(jnp.sqrt(keep) * deviation, jnp.sqrt(1 - keep) * distance),
    )
