"""AdaGN: the norm becomes the quotient of its moments."""

from __future__ import annotations

import optax

from .._mesh import MeshAxes
from .._trees import Stacked
from ..rules._moments_ratio import MomentsRatio
from ..rules._rule import Number, rule_in
from ..shrinks import normalize
from ._scope import Scope, clip_at


def adagn(
    decay1: Number = 0.7,
    decay2: Number = 0.9,
    *,
    eps: Number = 1e-8,
    scope: Scope = "tensor",
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Makes each tensor as long as the quotient of its norm's moments, about 1.

        mean   <- decay1 * mean + (1 - decay1) * |g|       both corrected for their
        square <- decay2 * square + (1 - decay2) * |g|^2   start, as in Adam
        new norm = mean / (sqrt(square) + eps)

    Every gradient becomes about as long as 1, and less where norms vary, whatever the
    scale of the loss. Stable-SPAM puts `adaclip` first, then this, then Adam with
    `reset_momentum`. GradientStabilizer is this alone, before any optimizer, with
    `adagn(0.6, 0.999, eps=1e-12)`.

    Args:
      decay1, decay2: of the two moments, in [0, 1]. 1 is the mean of all steps. Numbers
        or schedules.
      eps: at least 0, in units of the norm. A number or a schedule.
      scope: "tensor", "global", or labels: a tree prefix of them, or a function of path
        and leaf.
      stacked: with scope="tensor", which axes of a leaf count layers, each of which has
        a norm of its own: 1 for the leading axis, 2 for the two leading ones, (1,) for
        axis 1, a tree prefix of these, or a function of path and leaf.
      nonfinite: what a norm that is NaN or inf makes of all that it measured:
        "propagate" NaN, "zero" zeros. "raise" raises FloatingPointError (in jit a
        `checkify.check`).
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which stacked leaves that are split need.

    Returns:
      A transformation with a `ClipState`, whose `limit` is the norm that was aimed at.
      For each norm it remembers four numbers.

    Raises:
      ValueError: a number out of its range, an unknown scope, or `stacked` at another
        scope than "tensor".
      TypeError: something that is not a number.

    Example:
      >>> clipper = optaxclip.adagn(0.5, 0.5)
      >>> state = clipper.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.0, 3.0):
      ...     updates, state = clipper.update(jnp.array([norm]), state)
      >>> print(f"{updates[0]:.3f}")
      0.908

    Reference: Huang et al., Stable-SPAM: how to train in 4-bit more stably than 16-bit
    Adam, 2025 (arXiv 2502.17055). The public code corrects the two moments for their
    start with Adam's step count, which it resets, but does not reset the moments. Here
    they keep their own count. GradientStabilizer is the third version of that paper,
    ICML 2026.
    """
    numbers = {"decay1": decay1, "decay2": decay2, "eps": eps}
    rule = rule_in("adagn", MomentsRatio, **numbers)
    # With `normalize` every norm becomes its limit, whether it was longer or shorter.
    options = {"stacked": stacked, "shrink": normalize}
    return clip_at(scope, rule, "adagn", nonfinite, mesh_axes, **options)
