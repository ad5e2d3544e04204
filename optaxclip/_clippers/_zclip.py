"""ZClip: the limit is so many deviations above the mean of the norms let through."""

from __future__ import annotations

import optax
from jax.typing import ArrayLike

from .._mesh import MeshAxes
from .._trees import Stacked
from ..rules._constant import rule_of
from ..rules._joined import minimum
from ..rules._rule import Number, rule_in
from ..rules._z_score import ZScore
from ._scope import Scope, clip_at


def zclip(
    z: Number = 2.5,
    decay: Number = 0.97,
    *,
    cap: ArrayLike | None = None,
    target: str = "adaptive",
    warmup: ArrayLike = 25,
    eps: ArrayLike = 1e-6,
    scope: Scope = "global",
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips norms with a z-score above `z`, the further off the more.

        score = (norm - mean) / (deviation + eps)
        limit = mean + (z^2 / score) * deviation    where score > z

    Mean and deviation are those of the clipped norms, as moving averages.

    Args:
      z: a norm with a score above it is clipped. At least 0. A number or a schedule.
      decay: of the averages for mean and variance, in [0, 1]. A number or a schedule.
      cap: a fixed limit besides, as the public code has with 1.0. None for the paper's
        rule. The averages do not depend on it.
      target: what a clipped norm is brought to: "adaptive" is the equation above,
        "mean" the mean, "max" z deviations above it.
      warmup: how many norms are seen before the first is clipped. At least 1.
      eps: added to the deviation when the score is computed, in units of the norm.
      scope: "global", "tensor", or labels: a tree prefix of them, or a function of path
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
      A transformation with a `ClipState`. For each norm it remembers three numbers.

    Raises:
      ValueError: a number out of its range, an unknown target or scope, or `stacked` at
        another scope than "tensor".
      TypeError: something that is not a number.

    Example:
      >>> clipper = optaxclip.zclip(2.0, 0.5, warmup=3)
      >>> state = clipper.init(jnp.zeros(1))
      >>> for norm in (1.0, 3.0, 2.0, 9.0):
      ...     updates, state = clipper.update(jnp.array([norm]), state)
      >>> print(f"{state.limit:.3f} {updates[0]:.3f}")
      2.381 2.381

    Reference: Kumar, Owen, Chowdhury, Gura, ZClip: adaptive spike mitigation for LLM
    pre-training, 2025 (arXiv 2504.02507).
    """
    numbers = {
        "z": z,
        "decay": decay,
        "target": target,
        "warmup": warmup,
        "eps": eps,
    }
    # Errors then name zclip, the call that the user knows, instead of z_score.
    rule = rule_in("zclip", ZScore, **numbers)
    # The cap is a rule beside this one, so mean and deviation do not depend on it.
    limit = rule if cap is None else minimum(rule, rule_of(cap, "zclip: cap"))
    return clip_at(
        scope, limit, "zclip", nonfinite, mesh_axes, stacked=stacked
    )
