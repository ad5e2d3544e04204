"""A multiple of the running average of the norms.

    limit_t = ratio * average                                           one rate (OLMo
        1, and AdaGC after its warm-up)
    limit_t = target * average'     where norm_t > ratio * average      two rates
                                    (PDE-Transformer): the trigger is not the target

What was let through is remembered, not what came, so one spike does not excuse the
next; with a ratio near 1 the norm then grows by at most 1 + (1 - decay) * (ratio - 1) a
step.

Reference: OLMo 1, `olmo/optim.py` (max_grad_norm_ratio); PDE-Transformer,
`callback/ema_clip.py` (2.0 and 1.1, decays 0.99 and 0.9).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from ..arguments import check_number
from ..thresholds import Threshold
from .memory import at, average, blend, is_clipped, parameter


def ema_ratio(
    ratio: Any = 2.0,
    decay: Any = 0.99,
    *,
    target: Any = None,
    target_decay: Any = None,
    corrected: Any = False,
    remember: str = "clipped",
    warmup: Any = 1,
) -> Threshold:
    """limit = ratio * exponential average of the norms; above it, if a target is given,
    target * a second average.

    Args:
      ratio: from this multiple of the average on a norm is clipped. At least 0. A
        number or a schedule.
      decay: of the average, in [0, 1]. A number or a schedule.
      target: the multiple that clipped norms are brought to; None for `ratio`.
      target_decay: of the average that `target` multiplies; None for `decay`.
      corrected: start the averages at 0 and correct for it, as Adam does; otherwise
        they start at the first norm.
      remember, warmup: see `optaxclip.adaptive`.
    """
    call = "ema_ratio"
    target, target_decay = (
        (ratio if target is None else target),
        (decay if target_decay is None else target_decay),
    )
    ratio, target = (
        parameter(f"{call}: ratio", ratio),
        parameter(f"{call}: target", target),
    )
    decay, target_decay = (
        parameter(f"{call}: decay", decay, highest=1.0),
        parameter(f"{call}: target_decay", target_decay, highest=1.0),
    )
    check_number(f"{call}: warmup", warmup)
    return Threshold(
        Partial(_nothing),
        Partial(
            _update,
            ratio,
            decay,
            target,
            target_decay,
            corrected,
            is_clipped(call, remember),
            warmup,
        ),
    )


def _nothing(norm):
    return jnp.zeros(norm.shape, jnp.int32), average(norm), average(norm)


def _update(
    ratio,
    decay,
    target,
    target_decay,
    corrected,
    clipped,
    warmup,
    norm,
    memory,
    step,
    params_norm,
):
    ratio, decay, target, target_decay = at(
        step, norm, ratio, decay, target, target_decay
    )
    return _judge(
        ratio, decay, target, target_decay, corrected, clipped, warmup, norm, memory
    )


@jax.jit
def _judge(
    ratio, decay, target, target_decay, corrected, clipped, warmup, norm, memory
):
    count, slow, fast = memory
    edge = ratio * slow.value
    limit = jnp.where(
        count >= jnp.maximum(warmup, 1),
        jnp.where(norm > edge, target * fast.value, edge),
        jnp.inf,
    )
    seen = jnp.where(clipped, jnp.minimum(norm, limit), norm)
    return limit, (
        count + 1,
        blend(slow, seen, decay, corrected),
        blend(fast, seen, target_decay, corrected),
    )
