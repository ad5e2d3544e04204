"""AutoClip: the limit is a percentile of the norms so far."""

from __future__ import annotations

import warnings
from typing import Any

import optax
from jax.tree_util import Partial
from jax.typing import ArrayLike

from .._mesh import MeshAxes
from .._trees import Stacked
from ..rules._rule import Number, check_field, number, rule_in
from ..rules._windowed_quantile import WindowedQuantile
from ._scope import Scope, clip_at


def autoclip(
    percentile: Number = 10.0,
    window: ArrayLike = 10_000,
    *,
    scope: Scope = "global",
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips to a percentile of the norms so far, the current one included.

        limit_t = quantile(norm_1 ... norm_t)

    No norm has to be known beforehand, and the loss may be scaled at will: multiply it
    by a constant, and limits and norms follow together. A low percentile (the paper's
    10) makes nearly every step as long as a short one. Norms that grow stay clipped to
    old values for long.

    Args:
      percentile: in [0, 100]: 0 clips to the shortest gradient, 100 never clips. A
        number or a schedule.
      window: how many norms are kept, at least 1. The paper keeps all: give the number
        of steps of the run to have that. The length is part of the state: a restored
        state goes on with its own.
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
      A transformation with a `ClipState`. For each norm it remembers `window` numbers
      twice, by age and by size.

    Raises:
      ValueError: a percentile or window out of its range, an unknown scope, or
        `stacked` at another scope than "tensor".
      TypeError: something that is not a number.

    Example:
      >>> clipper = optaxclip.autoclip(50)
      >>> state = clipper.init(jnp.zeros(2))
      >>> for norm in (1.0, 3.0, 9.0):
      ...     updates, state = clipper.update(jnp.array([norm, 0.0]), state)
      ...     print(f"{state.limit:.4f} {updates[0]:.4f}")
      1.0000 1.0000
      2.0000 2.0000
      3.0000 3.0000

    Reference: Seetharaman, Wichern, Pardo, Le Roux, AutoClip: adaptive gradient
    clipping for source separation networks, 2020 (arXiv 2007.14469).
    """
    # Checked as a percentile, because the rule would check a share in [0, 1].
    call = "autoclip"
    percentile = check_field(
        call, "percentile", number(highest=100.0), percentile
    )
    # `windowed_quantile` takes shares, so 0.1 for ten percent is an easy slip.
    # 0 is no slip: it clips to the shortest gradient.
    if isinstance(percentile, (int, float)) and 0 < percentile < 1:
        warnings.warn(
            f"{call}: percentile={percentile} is less than one percent. Percentiles "
            f"go from 0 to 100: for the share {percentile} of the norms write "
            f"percentile={100 * percentile:g}.",
            # This function, the check of argument names around it, then the user.
            stacklevel=3,
        )
    # A Partial of a function at module level, so that clippers built alike share
    # a program. A lambda would compile anew for each.
    share = (
        Partial(_hundredth, percentile)
        if callable(percentile)
        else percentile / 100
    )
    # AutoClip's percentile is of the norms up to and including the current one.
    numbers = {"quantile": share, "window": window, "current": True}
    rule = rule_in(call, WindowedQuantile, **numbers)
    return clip_at(scope, rule, call, nonfinite, mesh_axes, stacked=stacked)


def _hundredth(percentile: Any, step: Any) -> Any:
    return percentile(step) / 100
