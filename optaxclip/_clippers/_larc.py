"""LARC: the layer-wise learning rate of LARS, but never above the global one.

    v = g + weight_decay * p        g <- v * min(1, trust * |p| / (|g| + weight_decay *
                                    |p| + eps) / learning_rate)        for each tensor

So the step learning_rate * v of a tensor is at most trust * |p| long. Without weight
decay this is `clip_by_tensor_norm` with the limit trust * |p| / learning_rate, and it
is built as that: LARC is tensor clipping whose limit follows the weights and the
schedule of the learning rate.

Reference: You, Gitman, Ginsburg, Large batch training of convolutional networks, 2017
(arXiv 1708.03888); the minimum with the learning rate is NVIDIA's apex.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

from .._arguments import as_partial, check_limit, check_params
from .._core._kernel import clip_by
from .._norms._leaves import Stacked, cast_like, clipped_leaves, params_of, put_back
from .._norms._norms import measure_of, tensor_norm
from .._norms._types import MeshAxes
from ..rules._constant import Threshold, remember_nothing


def larc(
    learning_rate: Any,
    trust: Any = 0.02,
    *,
    weight_decay: Any = 0.0,
    eps: Any = 1e-8,
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips each tensor of the gradient so that its step with this learning rate is at
    most `trust` times as long as the weights.

    It stands before SGD with the same learning rate: `optax.chain(optaxclip.larc(0.1),
    optax.sgd(0.1, momentum=0.9))`. Its `update` needs params.

        weights 0, or gradient 0   untouched: neither clipped nor decayed
        at or below the limit      without weight decay bit for bit the input
        gradient NaN or inf        the whole tensor becomes NaN (nonfinite="propagate")

    Args:
      learning_rate: that of the optimizer behind it: a number at least 0 or a schedule.
      trust: how long a step may be against the weights. At least 0; apex has 0.02, the
        paper 0.001.
      weight_decay: added as weight_decay * p before clipping, so leave it out of the
        optimizer. At least 0.
      eps: added to the norm of the gradient before dividing. At least 0.
      stacked, nonfinite, mesh_axes: as in `clip_by_tensor_norm`.

    Returns:
      A transformation with a `ClipState`, read by `metrics`: the norm is |g| +
      weight_decay * |p|, the limit trust * |p| / learning_rate.

    Raises:
      TypeError, ValueError: numbers that are negative, NaN or none; ValueError:
        `update` without params.

    Example:
      >>> import optaxclip
      >>> params, grads = jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0])
      >>> clipper = optaxclip.larc(0.1)
      >>> updates, state = clipper.update(grads, clipper.init(params), params)
      >>> print(*(f"{x:.4f}" for x in (*updates, state.limit)))
      0.0000 1.0000 1.0000

    Reference: You, Gitman, Ginsburg, 2017 (arXiv 1708.03888).
    """
    call = "larc"
    for name, value in (
        ("trust", trust),
        ("weight_decay", weight_decay),
        *(() if callable(learning_rate) else (("learning_rate", learning_rate),)),
    ):
        check_limit(f"{call}: {name}", value)
    rate = as_partial(learning_rate) if callable(learning_rate) else learning_rate
    rule = Threshold(Partial(remember_nothing), Partial(_limit, rate, trust))
    measure = measure_of(call, tensor_norm, mesh_axes=mesh_axes, stacked=stacked)
    kernel = clip_by(
        measure, rule, eps=eps, nonfinite=nonfinite, argument=f"{call}: limit"
    )

    def update(
        updates: Any, state: Any, params: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        check_params(call, params)
        tree = clipped_leaves(updates)
        weights = params_of(tree, params)
        norms, lengths = measure(tree), measure(weights)
        decayed = jax.tree.map(
            lambda *each: _decay(weight_decay, *each), tree, weights, norms, lengths
        )
        norms = jax.tree.map(
            lambda norm, length: norm + _as(weight_decay, norm) * length, norms, lengths
        )
        return kernel.update(
            put_back(decayed, updates), state, params, grad_norm=norms
        )

    return optax.GradientTransformationExtraArgs(kernel.init, update)


@jax.jit
def _decay(
    weight_decay: Any, grad: Any, weight: Any, norm: jax.Array, length: jax.Array
) -> jax.Array:
    """The gradient with weight decay, in its own dtype; as it is where either is 0."""
    wide = np.promote_types(jnp.result_type(grad), norm.dtype)
    decayed = jnp.asarray(grad).astype(wide) + _as(weight_decay, norm).astype(
        wide
    ) * jnp.asarray(weight).astype(wide)
    return jnp.where(
        (norm == 0) | (length == 0) | (_as(weight_decay, norm) == 0),
        grad,
        cast_like(decayed, grad),
    )


def _limit(rate, trust, norm, memory, step, params_norm):
    """trust * |p| / rate; inf, which clips nothing, where there are no weights to
    compare with or the rate is 0.
    """
    length, rate = (
        params_norm().astype(norm.dtype),
        _as(rate(step) if callable(rate) else rate, norm),
    )
    free = (length == 0) | (rate == 0)
    return jnp.where(
        free, jnp.inf, _as(trust, norm) * length / jnp.where(free, 1.0, rate)
    ), memory


def _as(number: Any, norm: jax.Array) -> jax.Array:
    return jnp.asarray(number).astype(norm.dtype)
