"""Clippers by the mean: of squares, and the norm over the number of elements.

What `_by_norm` says of limits and broken norms holds here.
"""

from __future__ import annotations

from typing import Any

import optax
from jax.typing import ArrayLike

from .._kernel import make_clipper
from .._mesh import MeshAxes
from .._norms import TensorNorm, check_measure
from .._trees import Stacked
from ..rules._constant import LimitTree
from ..shrinks import Shrink


def clip_by_tensor_rms(
    max_rms: LimitTree,
    *,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    eps: ArrayLike = 0.0,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips the root mean square of each leaf: g * min(1, max_rms / rms(g)).

    Adafactor's clip is `clip_by_tensor_rms(1.0)` after the preconditioner.

    Args:
      max_rms: a number at least 0, an array, a schedule, None, a rule of
        `optaxclip.rules`, or a tree prefix of these.
      stacked: which axes of a leaf count layers, each of which is clipped separately: 1
        for the leading axis, 2 for the two leading ones, (1,) for axis 1, a tree prefix
        of these, or a function of path and leaf.
      shrink: what a norm over its limit becomes, of `optaxclip.shrinks`. None is
        `hard`.
      eps: added to the norm before it is compared and divided by. 1e-6 gives torch's
        numbers. At least 0.
      nonfinite: what a norm that is NaN or inf makes of its tensor: "propagate" NaN,
        "zero" zeros. "raise" raises FloatingPointError (in jit a `checkify.check`).
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which stacked leaves that are split need.

    Returns:
      A transformation whose state is a `ClipState`, read by `metrics`.

    Raises:
      ValueError: a negative or NaN limit or eps, an unknown `nonfinite`. From init or
        update: a leaf without a limit, an axis in `stacked` that a leaf does not have,
        leaves of one stack with different numbers of layers, or a mesh axis that is not
        bound.
      TypeError: a limit that is not a number, or a shrink that is not a function.

    Example:
      >>> grads = jnp.array([3.0, 4.0, 0.0, 0.0])
      >>> clipper = optaxclip.clip_by_tensor_rms(1.0)
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(state.norm, updates)
      2.5 [1.2 1.6 0.  0. ]

    Reference: Shazeer, Stern, Adafactor: adaptive learning rates with sublinear memory
    cost, 2018 (arXiv 1804.04235).
    """
    # [3, 4, 0, 0] has the norm 5, the RMS 5 / sqrt(4) and the average norm 5 / 4.
    call = "clip_by_tensor_rms"
    numbers = {"stacked": stacked, "mesh_axes": mesh_axes}
    # N counts the elements on all devices, also inside shard_map.
    measure = TensorNorm(**check_measure(call, "rms", **numbers))
    options = {"shrink": shrink, "eps": eps, "nonfinite": nonfinite}
    # An RMS does not grow with its leaf, so one limit suits leaves of all sizes.
    return make_clipper(measure, max_rms, call=call, name="max_rms", **options)


def clip_by_average_norm(
    max_norm: LimitTree,
    *,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    eps: ArrayLike = 0.0,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips the average norm of each leaf, |g| / N for N elements, as TensorFlow does.

    Args:
      max_norm: a number at least 0, an array, a schedule, None, a rule of
        `optaxclip.rules`, or a tree prefix of these.
      stacked: which axes of a leaf count layers, each of which is clipped separately: 1
        for the leading axis, 2 for the two leading ones, (1,) for axis 1, a tree prefix
        of these, or a function of path and leaf.
      shrink: what a norm over its limit becomes, of `optaxclip.shrinks`. None is
        `hard`.
      eps: added to the norm before it is compared and divided by. 1e-6 gives torch's
        numbers. At least 0.
      nonfinite: what a norm that is NaN or inf makes of its tensor: "propagate" NaN,
        "zero" zeros. "raise" raises FloatingPointError (in jit a `checkify.check`).
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which stacked leaves that are split need.

    Returns:
      A transformation whose state is a `ClipState`, read by `metrics`.

    Raises:
      ValueError: a negative or NaN limit or eps, an unknown `nonfinite`. From init or
        update: a leaf without a limit, an axis in `stacked` that a leaf does not have,
        leaves of one stack with different numbers of layers, or a mesh axis that is not
        bound.
      TypeError: a limit that is not a number, or a shrink that is not a function.

    Example:
      >>> grads = jnp.array([3.0, 4.0, 0.0, 0.0])
      >>> clipper = optaxclip.clip_by_average_norm(1.0)
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(state.norm, updates)
      1.25 [2.4 3.2 0.  0. ]

    Reference: `tf.compat.v1.clip_by_average_norm`.
    """
    call = "clip_by_average_norm"
    # Smaller than the RMS by another sqrt(N), so limits of one do not suit the other.
    numbers = {"stacked": stacked, "mesh_axes": mesh_axes}
    measure = TensorNorm(**check_measure(call, "average", **numbers))
    options = {"shrink": shrink, "eps": eps, "nonfinite": nonfinite}
    return make_clipper(
        measure, max_norm, call=call, name="max_norm", **options
    )


def clip_by_block_rms(threshold: Any) -> optax.GradientTransformationExtraArgs:
    """Clips the root mean square of each leaf, as `optax.clip_by_block_rms`.

    Args:
      threshold: the limit of the root mean square: a number at least 0, an array, a
        schedule, None, a rule of `optaxclip.rules`, or a tree prefix of these.

    Returns:
      A transformation whose state is a `ClipState`.

    Raises:
      ValueError: a negative or NaN threshold. TypeError: one that is not a number.

    Example:
      >>> grads = jnp.array([3.0, 4.0, 0.0, 0.0])
      >>> clipper = optaxclip.clip_by_block_rms(1.0)
      >>> print(clipper.update(grads, clipper.init(grads))[0])
      [1.2 1.6 0.  0. ]
    """
    # One argument, with optax's name for it. `clip_by_tensor_rms` has the options.
    call = "clip_by_block_rms"
    measure = TensorNorm(**check_measure(call, "rms"))
    return make_clipper(measure, threshold, call=call, name="threshold")
