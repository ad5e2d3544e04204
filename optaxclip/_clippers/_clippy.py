"""Clippy: no weight moves by more than a share of itself."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from .._checks import check_limit, check_params, number_for_jit
from .._kernel import make_clipper
from .._mesh import MeshAxes
from .._norms import TensorNorm, check_measure
from .._trees import Stacked, clipped_leaves, values_of

TINY = 2.0**-126  # the smallest normal float32: bounds below it count as 0


def clippy(
    relative: ArrayLike = 0.1,
    absolute: ArrayLike = 1e-7,
    *,
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Scales each tensor so that |u_i| <= relative * |p_i| + absolute for each element.

        s = min(1, min_i (relative * |p_i| + absolute) / |u_i|)        u <- s u

    A norm does not see one coordinate that blows up in a large tensor. The largest
    ratio of change to weight does. Clippy compares what is added to the weights, so it
    comes last, after the learning rate: `optax.chain(optax.adagrad(0.001),
    optaxclip.clippy())`. Its `update` needs params.

        update 0            stays 0, whatever the weights
        weight 0            moves by at most `absolute`. With absolute=0 its tensor
                            stays, as it does where |u_i| / bound leaves the dtype
        within the bounds   bit for bit the input
        update NaN or inf   the whole tensor becomes NaN (nonfinite="propagate"), and so
                            it does where a weight is NaN

    One weight near 0 holds its whole tensor to `absolute`, which therefore decides how
    fast weights leave 0. In a jitted step on a CPU it needs memory for one to two
    copies of the updates, and for up to two of the largest leaf.

    Args:
      relative: the share of itself that a weight may move by. At least 0. The code has
        0.1, the paper also 0.5 with absolute=1e-2.
      absolute: how far every weight may move. At least 0.
      stacked: which axes of a leaf count layers: 1 for the leading axis, 2 for the two
        leading ones, (1,) for axis 1, a tree prefix of these, or a function of path and
        leaf. Each layer is scaled separately.
      nonfinite: what a norm that is NaN or inf makes of its tensor: "propagate" NaN,
        "zero" zeros. "raise" raises FloatingPointError (in jit a `checkify.check`).
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which stacked leaves that are split need.

    Returns:
      A transformation with a `ClipState`, read by `metrics`: the norm is the largest
      |u_i| / (relative * |p_i| + absolute) of a tensor, and the limit is 1.

    Raises:
      ValueError: a negative or NaN bound, an unknown `nonfinite`, or `update` without
        params.
      TypeError: a bound that is not a number.

    Example:
      >>> params, updates = jnp.array([4.0, 1.0]), jnp.array([2.0, 0.1])
      >>> clipper = optaxclip.clippy(0.1, 0.02)
      >>> updates, state = clipper.update(updates, clipper.init(params), params)
      >>> print(updates, f"{state.factor:.4f}")
      [0.42  0.021] 0.2100

    Reference: Tang et al., Improving training stability for multitask ranking models in
    recommender systems, 2023 (arXiv 2302.09178). Defaults of TensorFlow Recommenders'
    ClippyAdagrad.
    """
    call = "clippy"
    check_limit(f"{call}: relative", relative)
    check_limit(f"{call}: absolute", absolute)
    relative, absolute = number_for_jit(relative), number_for_jit(absolute)
    numbers = {"stacked": stacked, "mesh_axes": mesh_axes}
    # Order inf: the largest of what each element strains its bound.
    measure = TensorNorm(**check_measure(call, math.inf, **numbers))
    # The limit depends on single weights, so each update hands it to the kernel.
    kernel = make_clipper(
        measure, None, call=call, name="limit", nonfinite=nonfinite
    )

    def update(
        updates: Any, state: Any, params: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        check_params(call, params, "updates")
        tree = clipped_leaves(updates)
        weights = values_of(call, "params", tree, params)
        free = jnp.isinf(relative) | jnp.isinf(absolute)
        strain = partial(_strain, relative, absolute, free)
        strains = measure(jax.tree.map(strain, tree, weights)).tree()
        given = {
            "grad_norm": jax.tree.map(_finite, strains),
            "limit": jax.tree.map(partial(_limit, free), strains),
        }
        return kernel.update(updates, state, **given)

    return optax.GradientTransformationExtraArgs(kernel.init, update)


@jax.jit
def _strain(
    relative: Any, absolute: Any, free: jax.Array, update: Any, weight: Any
) -> jax.Array:
    """How many times its bound each element is: inf if the bound is 0, and NaN if the
    update is inf or NaN.
    """
    # The default bound of 1e-7 is next to the smallest float16 above 0, 6e-8.
    wide = np.promote_types(
        jnp.finfo(jnp.result_type(update)).dtype, np.float32
    )
    relative, absolute = (
        jnp.asarray(x).astype(wide) for x in (relative, absolute)
    )
    bound = relative * jnp.abs(weight).astype(wide) + absolute
    # Without a bound, inf * |0| would be NaN.
    bound = jnp.where(free, jnp.inf, bound)
    size = jnp.abs(update).astype(wide)
    # Two wheres: a quotient that is not taken must be finite for the derivative.
    is_zero = bound < TINY
    strain = size / jnp.where(is_zero, 1.0, bound)
    strain = jnp.where(is_zero & (size > 0), jnp.inf, strain)
    zeros = size * 0  # NaN where size is inf
    return strain + zeros


def _finite(strain: jax.Array) -> jax.Array:
    """The strain of a tensor as its norm. NaN stays."""
    return jnp.minimum(strain, jnp.finfo(strain.dtype).max)


def _limit(free: jax.Array, strain: jax.Array) -> jax.Array:
    limit = jnp.where(free, jnp.inf, 1.0)
    # A bound of 0 lets nothing move.
    return jnp.where(strain == jnp.inf, 0.0, limit).astype(strain.dtype)
