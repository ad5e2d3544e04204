"""Clipping one tree of gradients, without an optimizer."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import ArrayLike

from .._kernel import clip_once
from .._mesh import MeshAxes
from .._norms import GlobalNorm, Ord, check_measure


def clip_grads(
    grads: Any,
    max_norm: ArrayLike | None,
    *,
    ord: Ord = None,
    eps: ArrayLike = 0.0,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> tuple[Any, jax.Array]:
    """Clips one tree of gradients and returns it with its norm:
    g * min(1, max_norm / |g|).

    It is for training loops without an optimizer of optax. In one, put
    `clip_by_global_norm` into the chain, whose norms `metrics` reads.

    Args:
      grads: a pytree of arrays, at most as long as `max_norm` afterwards.
      max_norm: the limit: a number at least 0, a scalar array, or None to only measure.
        It may be traced.
      ord: the order of the norm: a number above 0, `math.inf`, "rms" or "average".
        None means 2.
      eps: added to the norm before it is compared and divided by. 1e-6 gives torch's
        numbers. At least 0.
      nonfinite: what becomes of gradients whose norm is NaN or inf: "propagate" makes
        all NaN, "zero" makes all zero, "raise" raises FloatingPointError outside jit
        and is a `checkify.check` inside.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec.

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
    # The clipper is built in every call. Its program is found again, since equal
    # measures are equal keys.
    measure = GlobalNorm(**check_measure(call, ord, mesh_axes=mesh_axes))
    options = {"eps": eps, "nonfinite": nonfinite}
    # Its norm is without eps: the number to log.
    return clip_once(
        grads, max_norm, measure, call=call, name="max_norm", **options
    )
