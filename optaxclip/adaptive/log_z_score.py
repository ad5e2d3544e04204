"""A z-score of the logarithm of the norm, whose distribution is nearer to a normal one.

    x_t     = log(1 + max(norm_t, floor))
    limit_t = exp(mean + z * max(deviation, spread)) - 1        exponential averages of
                                                                x, corrected for their
                                                                start

RNMT+ drops the whole step beyond four deviations, which is `skip_spikes(optimizer,
log_z_score())`; Lingvo's GradNormTracker is the public code.

Reference: Chen et al., The best of both worlds: combining recent advances in neural
machine translation, 2018 (arXiv 1804.09849); Lingvo, `core/layers.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from ..arguments import check_number
from ..thresholds import Threshold
from .memory import Average, at, average, blend, gain, parameter


class LogNormMemory(NamedTuple):
    """Mean and deviation of the logarithm."""

    seen: jax.Array  # int32[norm]: norms remembered
    mean: Average
    deviation: jax.Array  # float32[norm]


def log_z_score(
    z: Any = 4.0,
    decay: Any = 0.995,
    *,
    floor: Any = 0.01,
    spread: Any = 1e-3,
    warmup: Any = 277,
) -> Threshold:
    """limit = exp(mean + z * max(deviation, spread)) - 1, of log(1 + norm).

    Args:
      z: how many deviations are allowed, at least 0. A number or a schedule.
      decay: of mean and variance, in [0, 1]. A number or a schedule.
      floor: shorter norms count as this long. At least 0.
      spread: the deviation counts as at least this much, so that norms that hardly
        differ are not outliers of one another. At least 0.
      warmup: how many norms are seen before there is a limit; 277 is where 0.75 of the
        weight of an endless average is reached. At least 1.

    The clipped norm is remembered.
    """
    call = "log_z_score"
    z, decay, floor = (
        parameter(f"{call}: z", z),
        parameter(f"{call}: decay", decay, highest=1.0),
        parameter(f"{call}: floor", floor),
    )
    spread = parameter(f"{call}: spread", spread)
    check_number(f"{call}: warmup", warmup, lowest=1)
    return Threshold(
        Partial(_nothing), Partial(_update, z, decay, floor, spread, warmup)
    )


def _nothing(norm):
    return LogNormMemory(
        jnp.zeros(norm.shape, jnp.int32), average(norm), jnp.zeros_like(norm)
    )


def _update(z, decay, floor, spread, warmup, norm, memory, step, params_norm):
    z, decay, floor, spread = at(step, norm, z, decay, floor, spread)
    return _judge(z, decay, floor, spread, warmup, norm, memory)


@jax.jit
def _judge(z, decay, floor, spread, warmup, norm, memory):
    count, mean, deviation = memory
    limit = jnp.where(
        count >= warmup,
        jnp.expm1(mean.value + z * jnp.maximum(deviation, spread)),
        jnp.inf,
    )
    value = jnp.log1p(jnp.maximum(jnp.minimum(norm, limit), floor))
    moved = blend(mean, value, decay)
    share = gain(decay, moved.weight)
    # The variance of a mixture of the old values and the new one, which can not become
    # negative.
    apart = jnp.sqrt(share) * jnp.abs(value - mean.value)
    return limit, LogNormMemory(
        count + 1, moved, jnp.sqrt(1 - share) * jnp.hypot(deviation, apart)
    )
