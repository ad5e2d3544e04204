"""A clipper of your own, and clipping once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.typing import ArrayLike

from .._arguments.checks import Nonfinite, check_norm_function
from .._arguments.functions import with_hash
from .._devices.mesh import MeshAxes
from .._norm_clipper import clip_once, make_clipper
from .._norms.norms import GlobalNorm, UserNorm
from .._norms.options import Ord, checked_options
from .._trees import Tree
from ..rules._limits import LimitTree
from ..shrinks import Shrink


def clip_by(
    norm: Callable[[Any], Any],
    limit: LimitTree,
    shrink: Shrink | None = None,
    *,
    eps: ArrayLike = 0.0,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """Makes a clipper of a norm, a limit and a shrink.

    Every part of the updates that has a norm is multiplied by new_norm / norm, where
    new_norm = shrink(norm + eps, limit).

    Args:
      norm: from a tree to its norms: `global_norm`, `tensor_norm`, `unitwise_norm`, or
        any function whose result is a tree prefix of its argument.
      limit: a number at least 0, an array, a schedule, a rule of `optaxclip.rules`,
        None for no limit, or a tree prefix of numbers and schedules.
      shrink: from norm and limit to the norm that the updates get. None is
        `shrinks.hard`. A shrink that returns the norm itself leaves the updates bit for
        bit.
      eps: added to each norm, as in `clip_by_global_norm`. At least 0.
      nonfinite: what becomes of updates whose norm is NaN or inf: "propagate" makes
        them NaN, "zero" makes them 0, "raise" raises FloatingPointError (under jit it
        is a `checkify.check`). Updates that share a norm break together. A limit that
        is set to inf or None touches nothing.

    Returns:
      A transformation with a `ClipState`. Its `update` also takes `grad_norm=`, norms
      measured elsewhere, and `limit=`, limits for this step alone. Both have the
      structure that `norm` returns.

    Raises:
      ValueError: a negative or NaN limit or eps, or an unknown `nonfinite`.
      TypeError: a limit that is not a number, or a norm or shrink that is not a
        function.

    Example:
      >>> smooth = optaxclip.shrinks.smooth()
      >>> clipper = optaxclip.clip_by(optaxclip.global_norm, 1.0, smooth)
      >>> grads = jnp.array([3.0, 4.0])
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(f"{optaxclip.global_norm(updates):.4f}")
      0.8333
    """
    # Checked here, because `norm` is not called before `init`.
    check_norm_function("clip_by", norm)
    # The functions norm and shrink are static arguments of the jitted update: lambdas
    # that are made anew in every step compile in every step.
    return make_clipper(
        UserNorm(with_hash(norm)),
        limit,
        call="clip_by",
        limit_argument="limit",
        shrink=shrink,
        eps=eps,
        nonfinite=nonfinite,
    )


def clip_grads(
    grads: Tree,
    max_norm: ArrayLike | None,
    *,
    ord: Ord = None,
    eps: ArrayLike = 0.0,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> tuple[Tree, jax.Array]:
    """Clips one tree of gradients and returns it with its norm:
    g * min(1, max_norm / |g|).

    This function is for training loops without an optimizer of optax. In one, put
    `clip_by_global_norm` into the chain, whose norms `metrics` reads.

    Args:
      grads: a pytree of arrays, the gradients alone: of `(value, grads)`, which
        `jax.value_and_grad` returns, it would clip the value too.
      max_norm: the limit: a number at least 0, a scalar array, or None to only measure.
        It may be traced.
      ord: the order of the norm: a number above 0, `math.inf`, "rms" or "average".
        None means 2.
      eps: added to each norm, as in `clip_by_global_norm`. At least 0.
      nonfinite: what becomes of gradients whose norm is NaN or inf: "propagate" makes
        them NaN, "zero" makes them 0, "raise" raises FloatingPointError (under jit it
        is a `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`.

    Returns:
      (grads, norm): the gradients in their dtypes, and their norm before clipping, a
      scalar, float32 (float64 if a leaf has 64 bits).

    Raises:
      ValueError: a negative or NaN limit or eps, an order that is not above 0, an
        unknown `nonfinite`.
      TypeError: a limit that is not a number.

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0])}
      >>> grads, norm = optaxclip.clip_grads(grads, 1.0)
      >>> print(grads["w"], norm)
      [0.6 0.8] 5.0

    Reference: Pascanu, Mikolov, Bengio, On the difficulty of training recurrent neural
    networks, 2013 (arXiv 1211.5063).
    """
    call = "clip_grads"
    # The clipper is built in every call. Its program is not compiled again, since equal
    # measures are equal static arguments.
    measure = GlobalNorm(**checked_options(call, ord=ord, mesh_axes=mesh_axes))
    # The norm that comes back is without eps: the number to log.
    return clip_once(
        grads,
        max_norm,
        measure,
        call=call,
        limit_argument="max_norm",
        eps=eps,
        nonfinite=nonfinite,
    )
