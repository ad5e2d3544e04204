"""AdaGC: each tensor against the running average of its own norm."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._exported import exported
from .._mesh import MeshAxes
from .._trees import Stacked
from ..rules._memory import between, one_more
from ..rules._rule import Number, Rule, at_step, number
from ._scope import Scope, clip_at


def adagc(
    ratio: Number = 1.05,
    decay: Number = 0.98,
    *,
    max_norm: Number = 1.0,
    warmup: ArrayLike = 100,
    scope: Scope = "tensor",
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips each tensor to `ratio` times the running average of its norm.

        warm-up     h = min(1, max_norm / |all|)       average <- min(average, h |g|)
        afterwards  h = min(1, ratio * average / |g|)  average <- decay * average +
                                                         (1 - decay) * h |g|

    After the warm-up one tensor that spikes is clipped alone. All others pass bit for
    bit, where a global clip would shorten them too. What is let through grows by at
    most 1 + (1 - decay) * (ratio - 1) a step. Both norms come from one reading of the
    gradients: the global norm is the norm of the tensors' norms.

    In the warm-up one factor shortens all tensors, and the averages become the
    shortened norms. So a spike of 10,000 times the limit there holds every tensor back
    for thousands of steps. Put `skip_step` around the optimizer, or choose `max_norm`
    so that the warm-up clips little.

    Args:
      ratio: at least 0. The paper's code has 1.05 with a decay of 0.98, later runs 1.04
        with 0.99. A number or a schedule.
      decay: of the average, in [0, 1]. A number or a schedule.
      max_norm: the global limit of the warm-up, at least 0. A number or a schedule.
      warmup: how many norms are seen under the global limit. At least 1.
      scope: "tensor", "global", or labels: a tree prefix of them, or a function of path
        and leaf.
      stacked: with scope="tensor", which axes of a leaf count layers, each of which has
        a norm of its own: 1 for the leading axis, 2 for the two leading ones, (1,) for
        axis 1, a tree prefix of these, or a function of path and leaf.
      nonfinite: what a norm that is NaN or inf makes of all that it measured:
        "propagate" NaN, "zero" zeros. "raise" raises FloatingPointError (in jit a
        `checkify.check`). In the warm-up one broken tensor breaks all.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which stacked leaves that are split need.

    Returns:
      A transformation with a `ClipState`. For each norm it remembers two numbers.

    Raises:
      ValueError: a number out of its range, an unknown scope, or `stacked` at another
        scope than "tensor".
      TypeError: something that is not a number.

    Example:
      >>> clipper = optaxclip.adagc(1.5, 0.5, warmup=1)
      >>> state = clipper.init({"w": jnp.zeros(1), "b": jnp.zeros(1)})
      >>> for spike in (0.4, 8.0):
      ...     grads = {"w": jnp.array([spike]), "b": jnp.array([0.3])}
      ...     updates, state = clipper.update(grads, state)
      >>> print(updates["w"], updates["b"])
      [0.6] [0.3]

    Reference: Wang et al., AdaGC: improving training stability for large language model
    pretraining, 2025 (arXiv 2502.11034). The authors' code for Megatron adds 1e-6 to
    norms. Paddle's code seeds the averages with norms before the global clip and warms
    up one step longer. A norm of 0, or one that is shortened to 0, would hold a tensor
    at 0 for good in both, and is not remembered here.
    """
    rule = Adagc(ratio, decay, max_norm, warmup)
    return clip_at(scope, rule, "adagc", nonfinite, mesh_axes, stacked=stacked)


@exported
class AdaGCMemory(NamedTuple):
    """The average of what was let through."""

    seen: jax.Array  # int32[norm]: norms remembered
    average: jax.Array  # float32[norm]: inf before the first


class Adagc(Rule):
    """The rule of AdaGC."""

    ratio: Number = number()
    decay: Number = number(highest=1.0)
    max_norm: Number = number()
    warmup: Any = number(100, lowest=1, schedule=False)

    @property
    def needs_total(self) -> bool:
        # The warm-up clips all tensors by their norm together.
        return True

    def init(self, norm: jax.Array) -> AdaGCMemory:
        seen = jnp.zeros(norm.shape, jnp.int32)
        # With inf the first minimum of the warm-up is the first norm itself.
        return AdaGCMemory(seen, jnp.full_like(norm, jnp.inf))

    def update(
        self,
        norm: jax.Array,
        memory: AdaGCMemory,
        step: jax.Array,
        total: jax.Array,
    ) -> tuple[jax.Array, AdaGCMemory]:
        numbers = self.ratio, self.decay, self.max_norm
        ratio, decay, max_norm = at_step(step, norm, *numbers)
        seen, average = memory
        warming = seen < self.warmup
        over = total > max_norm
        # h = min(1, max_norm / |all|). The inner where keeps 0 out of the division.
        share = jnp.where(over, max_norm / jnp.where(over, total, 1.0), 1.0)
        # As the limit of a tensor, h |g| multiplies it by h.
        early = jnp.where(over, norm * share, jnp.inf)
        # NaN breaks every tensor that is clipped together.
        early = jnp.where(jnp.isfinite(total), early, jnp.nan)
        # Before the first norm the average is inf, times which a derivative is NaN.
        past = jnp.where(warming, 0.0, average)
        limit = jnp.where(warming, early, ratio * past)
        # h |g|, what was let through: the spike itself never enters the average.
        value = jnp.minimum(norm, limit)
        later = between(past, value, decay)
        # During the warm-up the average is the smallest h |g| so far.
        new = jnp.where(warming, jnp.minimum(average, value), later)
        # From an average of 0 no tensor would come back.
        learns = value > 0
        average = jnp.where(learns, new, average)
        return limit, AdaGCMemory(one_more(seen, learns), average)
