"""AGGC: norms are brought into a band about their average."""

from __future__ import annotations

import optax
from jax.typing import ArrayLike

from .._mesh import MeshAxes
from .._trees import Stacked
from ..rules._ema_band import EmaBand
from ..rules._rule import Number, rule_in
from ..shrinks import normalize
from ._scope import Scope, clip_at


def aggc(
    low: Number = 0.95,
    high: Number = 0.6,
    *,
    scope: Scope,
    decay: Number = 0.95,
    floor: Number = 0.01,
    up: Number = 1.1,
    down: Number = 0.9,
    raise_small: ArrayLike = False,
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Holds the norm of each group in a band about its own running average.

        new norm = the norm, within [max(floor, low * average), high * average]
                   and within [down * norm, up * norm]
        average <- decay * average + (1 - decay) * new norm

    A group that explodes does not shorten the others, and one that dies away can be
    lifted.

    Args:
      low, high: the edges, as multiples of the average. At least 0. Numbers or
        schedules.
      scope: labels, such as the kind of the layer, as a tree prefix or a function of
        path and leaf, or "tensor" or "global".
      decay: of the average, in [0, 1]. A number or a schedule.
      floor: the lower edge is at least this, in units of the norm. At least 0.
      up: how far one step is lengthened at most, at least 1.
      down: how far one step is shortened at most, in [0, 1].
      raise_small: whether norms below the band are lifted. Otherwise they pass.
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
      For each norm it remembers two numbers.

    Raises:
      ValueError: a number out of its range, an unknown scope, or `stacked` at another
        scope than "tensor".
      TypeError: something that is not a number.

    Example:
      >>> clipper = optaxclip.aggc(0.5, 1.0, scope="tensor", decay=0.5, down=0.5)
      >>> state = clipper.init(jnp.zeros(1))
      >>> for norm in (2.0, 3.0, 9.0):
      ...     updates, state = clipper.update(jnp.array([norm]), state)
      ...     print(f"{updates[0]:.4f}")
      2.0000
      2.0000
      4.5000

    Reference: Li, Wu, Chang, AGGC: adaptive group gradient clipping for stabilizing
    large language model training, 2026 (arXiv 2601.11864).
    """
    # The published low, 0.95, is above the published high, 0.6. There the upper edge
    # wins, and `down` decides how far a step is shortened.
    edges = {"low": low, "high": high, "floor": floor, "up": up, "down": down}
    numbers = {**edges, "decay": decay, "raise_small": raise_small}
    rule = rule_in("aggc", EmaBand, **numbers)
    # The limit is the norm aimed at, and `hard` would lift no norm to it.
    options = {"stacked": stacked, "shrink": normalize}
    return clip_at(scope, rule, "aggc", nonfinite, mesh_axes, **options)
