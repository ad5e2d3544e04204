"""Clippers with a paper whose limit is a rule: AutoClip, ZClip, AGGC, AdaGN."""

import warnings
from typing import Any

import optax
from jax.tree_util import Partial

from .._norms._mesh_axes import MeshAxes
from .._norms._stacked import Stacked
from .._other_names import with_our_names
from ..rules._constant import rule_of
from ..rules._ema_band import EmaBand
from ..rules._joined import minimum
from ..rules._moments_ratio import MomentsRatio
from ..rules._rule import check_field, number, rule_in
from ..rules._windowed_quantile import WindowedQuantile
from ..rules._z_score import ZScore
from ..shrinks import normalize
from ._scope import Scope, clip_at


@with_our_names
def autoclip(
    percentile: Any = 10.0,
    window: Any = 10_000,
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
      scope: "global", "tensor", or labels as for `clip_by_group_norm`.
      stacked: with scope="tensor", which axes of a leaf count layers. Each layer has a
        norm of its own. 1 for the leading axis, (1,) for axis 1 (see `tensor_norm`).
      nonfinite, mesh_axes: as in `clip_by_global_norm`.

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


@with_our_names
def zclip(
    z: Any = 2.5,
    decay: Any = 0.97,
    *,
    cap: Any = None,
    target: str = "adaptive",
    warmup: Any = 25,
    eps: Any = 1e-6,
    scope: Scope = "global",
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips norms with a z-score above `z`, the further off the more.

        limit_t = mean + (z^2 / score) * deviation    where score > z

    Args:
      z: a norm with a score above it is clipped. At least 0. A number or a schedule.
      decay: of the averages for mean and variance, in [0, 1]. A number or a schedule.
      cap: a fixed limit besides, as the public code has with 1.0. None for the paper's
        rule. The averages do not depend on it.
      target: what a clipped norm is brought to: "adaptive" is the equation above,
        "mean" the mean, "max" z deviations above it.
      warmup: how many norms are seen before the first is clipped. At least 1.
      eps: added to the deviation when the score is computed, in units of the norm.
      scope: "global", "tensor", or labels as for `clip_by_group_norm`.
      stacked: with scope="tensor", which axes of a leaf count layers. Each layer has a
        norm of its own. 1 for the leading axis, (1,) for axis 1 (see `tensor_norm`).
      nonfinite, mesh_axes: as in `clip_by_global_norm`.

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


@with_our_names
def aggc(
    low: Any = 0.95,
    high: Any = 0.6,
    *,
    scope: Scope,
    decay: Any = 0.95,
    floor: Any = 0.01,
    up: Any = 1.1,
    down: Any = 0.9,
    raise_small: Any = False,
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Holds the norm of each group in a band about its own running average.

        new norm = the norm, within [max(floor, low * average), high * average]
                   and within [down * norm, up * norm]

    A group that explodes does not shorten the others, and one that dies away can be
    lifted.

    Args:
      low, high: the edges, as multiples of the average. At least 0. Numbers or
        schedules.
      scope: labels as for `clip_by_group_norm`, such as the kind of the layer, or
        "tensor" or "global".
      decay: of the average, in [0, 1]. A number or a schedule.
      floor: the lower edge is at least this, in units of the norm.
      up: how far one step is lengthened at most, at least 1.
      down: how far one step is shortened at most, in [0, 1].
      raise_small: whether norms below the band are lifted. Otherwise they pass.
      stacked: with scope="tensor", which axes of a leaf count layers. Each layer has a
        norm of its own. 1 for the leading axis, (1,) for axis 1 (see `tensor_norm`).
      nonfinite, mesh_axes: as in `clip_by_global_norm`.

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


@with_our_names
def adagn(
    decay1: Any = 0.7,
    decay2: Any = 0.9,
    *,
    eps: Any = 1e-8,
    scope: Scope = "tensor",
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Makes each tensor as long as the quotient of its norm's moments, about 1.

        new norm = mean / (sqrt(mean of squares) + eps)

    Every gradient becomes about as long as 1, and less where norms vary, whatever the
    scale of the loss. Stable-SPAM puts `adaclip` first, then this, then Adam with
    `reset_momentum`. GradientStabilizer is this alone, before any optimizer, with
    `adagn(0.6, 0.999, eps=1e-12)`.

    Args:
      decay1, decay2: of the two moments, in [0, 1]. 1 is the mean of all steps. Numbers
        or schedules.
      eps: at least 0, in units of the norm. A number or a schedule.
      scope: "tensor", "global", or labels as for `clip_by_group_norm`.
      stacked: with scope="tensor", which axes of a leaf count layers. Each layer has a
        norm of its own. 1 for the leading axis, (1,) for axis 1 (see `tensor_norm`).
      nonfinite, mesh_axes: as in `clip_by_global_norm`.

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
    Adam, 2025 (arXiv 2502.17055). GradientStabilizer is the third version of that
    paper, ICML 2026.
    """
    numbers = {"decay1": decay1, "decay2": decay2, "eps": eps}
    rule = rule_in("adagn", MomentsRatio, **numbers)
    # With `normalize` every norm becomes its limit, whether it was longer or shorter.
    options = {"stacked": stacked, "shrink": normalize}
    return clip_at(scope, rule, "adagn", nonfinite, mesh_axes, **options)
