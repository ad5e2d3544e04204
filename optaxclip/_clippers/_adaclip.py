"""AdaClip: the largest coordinates of a tensor against their running average."""

from __future__ import annotations

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from .._kernel import make_clipper
from .._mesh import MeshAxes
from .._norms import TensorNorm, check_measure
from .._state import ClipState, limits_of
from .._trees import Stacked, clipped_leaves, is_none, put_back
from ..rules._ema import Ema
from ..rules._rule import Number, rule_in


def adaclip(
    decay: Number = 0.999,
    *,
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Shortens the coordinates of each tensor that are over the average of its largest.

        T <- decay * T + (1 - decay) * max|g|      corrected for its start
        g_i <- g_i * T / max|g|                    where |g_i| > T

    Args:
      decay: of the average, in [0, 1]. 1 is the mean of all steps. A number or a
        schedule.
      stacked: which axes of a leaf count layers: 1 for the leading axis, 2 for the two
        leading ones, (1,) for axis 1, a tree prefix of these, or a function of path and
        leaf.
      nonfinite: what a norm that is NaN or inf makes of its tensor: "propagate" NaN,
        "zero" zeros. "raise" raises FloatingPointError (in jit a `checkify.check`).
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which stacked leaves that are split need.

    Returns:
      A transformation with a `ClipState`: `norm` is the largest coordinate, `factor`
      what those over the limit were multiplied by. For each tensor it remembers two
      numbers.

    Raises:
      ValueError: a decay out of its range, an unknown `nonfinite`, or an axis in
        `stacked` that a leaf does not have. TypeError: a decay that is no number.

    Example:
      >>> clipper = optaxclip.adaclip(0.5)
      >>> state = clipper.init(jnp.zeros(2))
      >>> for largest in (1.0, 4.0):
      ...     updates, state = clipper.update(jnp.array([largest, 2.0]), state)
      >>> print(updates)
      [3.3333 2.    ]

    Reference: Huang et al., Stable-SPAM: how to train in 4-bit more stably than 16-bit
    Adam, 2025 (arXiv 2502.17055). The public code resets Adam's step count but not the
    average's. Here the average keeps its own count.
    """
    call = "adaclip"
    numbers = {"stacked": stacked, "mesh_axes": mesh_axes}
    # Order inf: the norm of a tensor is its largest coordinate, max|g|.
    measure = TensorNorm(**check_measure(call, math.inf, **numbers))
    rule = rule_in(call, Ema, decay=decay)
    largest = make_clipper(
        measure, rule, call=call, name="limit", nonfinite=nonfinite
    )

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        grad_norm: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        tree = clipped_leaves(updates)
        # Needed below as well, to know which tensors are broken.
        norms = measure(tree)
        if grad_norm is None:
            grad_norm = norms.tree()
        # extra_args may hold `limit=`, which the kernel takes for this step.
        given = {"grad_norm": grad_norm, **extra_args}
        scaled, new_state = largest.update(tree, state, params, **given)
        new = cast(ClipState, new_state)
        # `scaled` is the whole tensor times T / max|g|. Coordinates up to T get back
        # their own bits.
        each = tree, scaled, grad_norm, limits_of(new, norms)
        shaped = jax.tree.map(_scaled_over_limit, *each, is_leaf=is_none)
        return put_back(shaped, updates), new

    return optax.GradientTransformationExtraArgs(largest.init, update)


def _scaled_over_limit(update: Any, scaled: Any, norm: Any, limit: Any) -> Any:
    # A leaf that is missing in this step, or does not count.
    if update is None:
        return None
    # Compared in the dtype of the limit, since bfloat16 would round the limit. A
    # broken tensor is what the kernel made of it: all NaN, or all 0.
    within = (jnp.abs(update).astype(limit.dtype) <= limit) & jnp.isfinite(
        norm
    )
    return jnp.where(within, update, scaled)
