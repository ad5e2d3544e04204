"""Clippy: no weight moves by more than a share of itself.

    s = min(1, min_i (relative * |p_i| + absolute) / |u_i|)        u <- s u        for
                                                                   each tensor

A norm does not see one coordinate that blows up in a large tensor; the largest ratio of
change to weight does. It compares what is added to the weights, so it comes last, after
the learning rate: `optax.chain(optax.adagrad(0.001), optaxclip.clippy())`.

In a jitted step on CPU it needs temporary memory of about three times the updates. One
weight near 0 holds its whole tensor to `absolute`, which therefore decides how fast
weights leave 0.

Reference: Tang et al., Improving training stability for multitask ranking models in
recommender systems, 2023 (arXiv 2302.09178).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

from .._arguments import check_limit, check_params
from .._core._kernel import clip_by
from .._norms._leaves import Stacked, clipped_leaves, params_of
from .._norms._norms import measure_of, tensor_norm
from .._norms._types import MeshAxes
from ..rules._constant import constant

TINY = 2.0**-126  # the smallest normal float32: bounds below it count as this


def clippy(
    relative: Any = 0.1,
    absolute: Any = 1e-7,
    *,
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Scales each tensor of the update so that |u_i| <= relative * |p_i| + absolute for
    all of its elements.

        update 0            stays 0, whatever the weights
        weight 0            moves by at most `absolute`; with absolute=0 its tensor
                            moves by no more than 2^-126, as a rule not at all
        within the bounds   bit for bit the input
        update NaN or inf   the whole tensor becomes NaN (nonfinite="propagate"); so it
                            does where a weight is NaN

    Its `update` needs params.

    Args:
      relative: the share of itself that a weight may move by. At least 0; the code's
        0.1 (the paper also uses 0.5 with absolute=1e-2).
      absolute: how far every weight may move. At least 0.
      stacked: how many leading axes of a leaf count layers (see `tensor_norm`); each
        layer is scaled by itself.
      nonfinite, mesh_axes: as in `clip_by_tensor_norm`.

    Returns:
      A transformation with a `ClipState`, read by `metrics`: the norm is the largest
      |u_i| of a tensor, the limit how large it may be.

    Raises:
      TypeError, ValueError: bounds that are negative, NaN or no numbers; ValueError:
        `update` without params.

    Example:
      >>> import optaxclip
      >>> params, updates = jnp.array([4.0, 1.0]), jnp.array([2.0, 0.1])
      >>> clipper = optaxclip.clippy(0.1, 0.02)
      >>> updates, state = clipper.update(updates, clipper.init(params), params)
      >>> print(*(f"{x:.4f}" for x in (*updates, state.scale)))
      0.4200 0.0210 0.2100

    Reference: Tang et al., 2023 (arXiv 2302.09178); defaults of TensorFlow
    Recommenders' ClippyAdagrad.
    """
    call = "clippy"
    check_limit(f"{call}: relative", relative)
    check_limit(f"{call}: absolute", absolute)
    measure = measure_of(call, tensor_norm, math.inf, axes, stacked=stacked)

    def init(params: Any) -> Any:
        return clip_by(
            measure, None, nonfinite=nonfinite, argument=f"{call}: limit"
        ).init(params)

    def update(
        updates: Any, state: Any, params: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        check_params(call, params, "updates")
        tree = clipped_leaves(updates)
        strains = jax.tree.map(
            lambda u, p: _strain(u, p, relative, absolute),
            tree,
            params_of(tree, params),
        )
        norms, strains = measure(tree), measure(strains)
        limits = jax.tree.map(
            lambda norm, strain: constant(
                Partial(_at_any_step, _limit(norm, strain, relative, absolute))
            ),
            norms,
            strains,
        )
        return clip_by(
            measure, limits, nonfinite=nonfinite, argument=f"{call}: limit"
        ).update(updates, state, params, grad_norm=norms)

    return optax.GradientTransformationExtraArgs(init, update)


@jax.jit
def _strain(update: Any, weight: Any, relative: Any, absolute: Any) -> jax.Array:
    """How many times its bound each element is."""
    wide = np.promote_types(jnp.finfo(jnp.result_type(update)).dtype, np.float32)
    bound = jnp.asarray(relative).astype(wide) * jnp.abs(weight).astype(
        wide
    ) + jnp.asarray(absolute).astype(wide)
    return jnp.abs(update).astype(wide) / jnp.maximum(bound, TINY)


@jax.jit
def _limit(
    norm: jax.Array, strain: jax.Array, relative: Any, absolute: Any
) -> jax.Array:
    """How large the largest update may be: inf, which touches nothing, where a bound
    was set to inf.
    """
    free = jnp.isinf(jnp.asarray(relative)) | jnp.isinf(jnp.asarray(absolute))
    most = norm / jnp.maximum(strain, 1)
    return jnp.where(free, jnp.inf, jnp.where(most <= TINY, 0.0, most))


def _at_any_step(limit: jax.Array, step: jax.Array) -> jax.Array:
    return limit
