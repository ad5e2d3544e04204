"""A clipper of your own norm, limit and shrink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax
from jax.typing import ArrayLike

from .._checks import check_norm, with_hash
from .._kernel import make_clipper
from .._norms import OwnNorm
from ..rules._constant import LimitTree
from ..shrinks import Shrink


def clip_by(
    norm: Callable[[Any], Any],
    limit: LimitTree,
    shrink: Shrink | str | None = None,
    *,
    eps: ArrayLike = 0.0,
    nonfinite: str = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """Makes a clipper of a norm, a limit and a shrink.

    Every part of the updates that has a norm is multiplied by new_norm / norm, where
    new_norm = shrink(norm + eps, limit).

    Args:
      norm: from a tree to its norms: `global_norm`, `tensor_norm`, `unitwise_norm`, or
        any function whose result is a tree prefix of its argument.
      limit: a number at least 0, an array, a schedule, a rule of `optaxclip.rules`,
        None for no limit, or a tree prefix of these.
      shrink: from norm and limit to the norm that the updates get. None is
        `shrinks.hard`. A shrink that returns the norm itself leaves the updates bit for
        bit.
      eps: added to the norm before it is compared and divided by. 1e-6 gives torch's
        numbers. At least 0.
      nonfinite: what becomes of updates whose norm is NaN or inf. "propagate" makes all
        that was measured together NaN, so that a broken step is seen and never half
        applied. "zero" makes it zero. "raise" raises FloatingPointError outside jit and
        is a `checkify.check` inside. A limit that is set to inf or None touches
        nothing.

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
    # `norm` is called first in `init`. A number in its place is named here.
    check_norm("clip_by", norm)
    names = {"call": "clip_by", "name": "limit"}
    options = {"shrink": shrink, "eps": eps, "nonfinite": nonfinite}
    # The norm and shrink functions are static keys of the program: a lambda that
    # is made anew in every step compiles in every step.
    return make_clipper(OwnNorm(with_hash(norm)), limit, **names, **options)
