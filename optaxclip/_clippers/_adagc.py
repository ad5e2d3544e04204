"""AdaGC: each tensor against the running average of its own norm, after a warm-up under
a global limit.

    warm-up     h_l = min(1, max_norm / |g|)               average_l <- min(average_l,
                |h_l g_l|)
    afterwards  h_l = min(1, ratio * average_l / |g_l|)    average_l <- decay *
                average_l + (1 - decay) * |h_l g_l|

One tensor that spikes is clipped alone: all others pass bit for bit, where a global
clip would shorten them too. After the warm-up what is let through grows by at most 1 +
(1 - decay) * (ratio - 1) a step. Both measures come from one reading of the gradients:
the global norm is the norm of the tensors' norms.

Paddle's code seeds the averages with norms before the global clip and warms up one step
longer; a norm of 0 in the warm-up, which would hold a tensor at 0 for ever there, is
not remembered here.

Reference: Wang et al., AdaGC: improving training stability for large language model
pretraining, 2025 (arXiv 2502.11034).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import Partial

from ..arguments import check_number, check_state
from ..core import ClipState
from ..norms import global_norm
from ..prefix import is_none
from ..sharding import Axes
from ..thresholds import Threshold
from .memory import at, parameter
from .scope import Scope, clip_at


class AdaGCMemory(NamedTuple):
    """The average of what was let through."""

    seen: jax.Array  # int32[norm]: norms remembered
    average: jax.Array  # float32[norm]: inf before the first


def adagc(
    ratio: Any = 1.05,
    decay: Any = 0.98,
    *,
    max_norm: Any = 1.0,
    warmup: Any = 100,
    scope: Scope = "tensor",
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips each tensor to `ratio` times the average of its norm.

    Args:
      ratio: at least 0; the paper's code has 1.05 with a decay of 0.98, later runs 1.04
        with 0.99. A number or a schedule.
      decay: of the average, in [0, 1]. A number or a schedule.
      max_norm: the global limit of the warm-up, at least 0. A number or a schedule.
      warmup: how many norms are seen under the global limit. At least 1.
      scope: "tensor", "global", or labels as for `clip_by_group_norm`.
      nonfinite, axes: as in `clip_by_global_norm`. In the warm-up one broken tensor
        breaks them all, as under any global clip.

    Returns:
      A transformation with a `ClipState`; for each norm it remembers two numbers.

    Reference: Wang et al., 2025 (arXiv 2502.11034).
    """
    call = "adagc"
    ratio, decay = (
        parameter(f"{call}: ratio", ratio),
        parameter(f"{call}: decay", decay, highest=1.0),
    )
    max_norm = parameter(f"{call}: max_norm", max_norm)
    check_number(f"{call}: warmup", warmup, lowest=1)

    def clipper(share: Any) -> optax.GradientTransformationExtraArgs:
        rule = Threshold(
            Partial(_nothing), Partial(_update, share, ratio, decay, warmup)
        )
        return clip_at(scope, rule, call, nonfinite, axes)

    def measure(updates: Any, grad_norm: Any) -> Any:
        unlimited: Any = clip_at(scope, None, call, "propagate", axes)
        return unlimited.update(updates, unlimited.init(updates), grad_norm=grad_norm)[
            1
        ].norm

    def init(params: Any) -> Any:
        return clipper(1.0).init(params)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        grad_norm: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        check_state(call, state, ClipState)
        norms = measure(updates, grad_norm)
        if not isinstance(scope, str) and isinstance(
            state.norm, dict
        ):  # all of a group may be missing in a step
            norms |= {
                label: jnp.zeros_like(norm)
                for label, norm in state.norm.items()
                if label not in norms
            }
        together = global_norm(norms, axes=None)
        (limit,) = at(state.step, together, max_norm)
        share = jnp.where(
            together > limit, limit / jnp.where(together > limit, together, 1.0), 1.0
        )
        # In the warm-up a broken tensor breaks every one that is measured with it.
        norms = jax.tree.map(
            lambda norm, memory: (
                None
                if norm is None
                else jnp.where(
                    (memory.seen < warmup) & ~jnp.isfinite(together), jnp.nan, norm
                )
            ),
            norms,
            state.memory,
            is_leaf=is_none,
        )
        return clipper(share).update(
            updates, state, params, grad_norm=norms, **extra_args
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _nothing(norm):
    return AdaGCMemory(jnp.zeros(norm.shape, jnp.int32), jnp.full_like(norm, jnp.inf))


def _update(share, ratio, decay, warmup, norm, memory, step, params_norm):
    share, ratio, decay = at(step, norm, share, ratio, decay)
    return _judge(share, ratio, decay, warmup, norm, memory)


@jax.jit
def _judge(share, ratio, decay, warmup, norm, memory):
    count, average = memory
    warming = count < warmup
    limit = jnp.where(
        warming, jnp.where(share < 1, norm * share, jnp.inf), ratio * average
    )
    seen = jnp.minimum(norm, limit)
    return limit, AdaGCMemory(
        count + 1,
        jnp.where(
            warming,
            jnp.minimum(average, seen),
            average + (1 - decay) * (seen - average),
        ),
    )
