"""LARC: the layer-wise learning rate of LARS, but never above the global one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from .._checks import check_limit, check_params, number_for_jit
from .._factors import cast_like
from .._kernel import make_clipper
from .._mesh import MeshAxes
from .._norms import TensorNorm, check_measure
from .._trees import Stacked, clipped_leaves, put_back, values_of
from ..rules._rule import Number, Rule, at_step, number


def larc(
    learning_rate: Number,
    trust: ArrayLike = 0.02,
    *,
    weight_decay: ArrayLike = 0.0,
    eps: ArrayLike = 1e-8,
    stacked: Stacked = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips each tensor so that its step is at most `trust` times as long as the
    weights.

        v = g + weight_decay * p
        g <- v * min(1, trust * |p| / (|g| + weight_decay * |p| + eps) / learning_rate)

    It stands before SGD with the same learning rate: `optax.chain(optaxclip.larc(0.1),
    optax.sgd(0.1, momentum=0.9))`. Its `update` needs params. Without weight decay it
    is `clip_by_tensor_norm` with the limit trust * |p| / learning_rate.

        weights 0, or gradient 0   untouched: neither clipped nor decayed
        at or below the limit      without weight decay bit for bit the input
        gradient NaN or inf        the whole tensor becomes NaN (nonfinite="propagate")

    Args:
      learning_rate: that of the optimizer after it: a number at least 0 or a schedule.
      trust: how long a step may be against the weights. At least 0. apex has 0.02, the
        paper 0.001.
      weight_decay: added as weight_decay * p before clipping, so leave it out of the
        optimizer. At least 0.
      eps: added to the norm of the gradient before dividing. At least 0.
      stacked: which axes of a leaf count layers, each of which is clipped separately: 1
        for the leading axis, 2 for the two leading ones, (1,) for axis 1, a tree prefix
        of these, or a function of path and leaf.
      nonfinite: what a norm that is NaN or inf makes of its tensor: "propagate" NaN,
        "zero" zeros. "raise" raises FloatingPointError (in jit a `checkify.check`).
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which stacked leaves that are split need.

    Returns:
      A transformation with a `ClipState`, read by `metrics`: the norm is |g| +
      weight_decay * |p|, or 0 for a gradient of 0. The limit is
      trust * |p| / learning_rate.

    Raises:
      ValueError: a negative or NaN number, an infinite `weight_decay`, or `update`
        without params.
      TypeError: something that is not a number.

    Example:
      >>> params, grads = jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0])
      >>> clipper = optaxclip.larc(0.1)
      >>> updates, state = clipper.update(grads, clipper.init(params), params)
      >>> print(updates, f"{state.limit:.4f}")
      [0. 1.] 1.0000

    Reference: You, Gitman, Ginsburg, Large batch training of convolutional networks,
    2017 (arXiv 1708.03888). The minimum with the learning rate is NVIDIA's apex.
    """
    call = "larc"
    # Numbers only: the learning rate alone may be a schedule.
    check_limit(f"{call}: trust", trust)
    check_limit(f"{call}: weight_decay", weight_decay)
    # An infinite one makes 0 * inf of weights that are 0.
    known = not isinstance(weight_decay, Tracer)
    if known and np.any(np.isinf(weight_decay)):
        raise ValueError(f"{call}: weight_decay must be finite, got inf.")
    weight_decay = number_for_jit(weight_decay)
    rule = Larc(learning_rate, trust)
    numbers = {"stacked": stacked, "mesh_axes": mesh_axes}
    measure = TensorNorm(**check_measure(call, None, **numbers))
    # eps joins both norms in the divisor: |g| + weight_decay * |p| + eps.
    options = {"eps": eps, "nonfinite": nonfinite}
    kernel = make_clipper(measure, rule, call=call, name="limit", **options)

    def update(
        updates: Any, state: Any, params: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        check_params(call, params)
        tree = clipped_leaves(updates)
        weights = values_of(call, "params", tree, params)
        # |g| and |p| of each tensor, as trees.
        norms, lengths = measure(tree).tree(), measure(weights).tree()

        def decay(*each: Any) -> jax.Array:
            return _decayed(weight_decay, *each)

        def lengthen(norm: jax.Array, length: jax.Array) -> jax.Array:
            decay = jnp.asarray(weight_decay).astype(norm.dtype)
            # A gradient of 0 gets no weight decay.
            return jnp.where(norm == 0, norm, norm + decay * length)

        # apex divides by |g| + weight_decay * |p|, which is at least the norm of the
        # decayed gradient. So that is what the kernel takes for its norm.
        decayed = jax.tree.map(decay, tree, weights, norms, lengths)
        longer = jax.tree.map(lengthen, norms, lengths)
        changed = put_back(decayed, updates)
        clipped, state = kernel.update(
            changed, state, params, grad_norm=longer
        )
        rounded = jax.tree.map(cast_like, clipped_leaves(clipped), tree)
        return put_back(rounded, updates), state

    return optax.GradientTransformationExtraArgs(kernel.init, update)


class Larc(Rule):
    """limit = trust * |p| / learning_rate, and none for weights or a rate of 0."""

    learning_rate: Number = number()
    trust: Number = number()

    @property
    def needs_params(self) -> bool:
        return True

    def update(
        self,
        norm: jax.Array,
        memory: Any,
        step: jax.Array,
        params_norm: jax.Array,
    ) -> Any:
        # Weights of 0 would get a limit of 0 and never move. A rate of 0 moves nothing.
        rate, trust = at_step(step, norm, self.learning_rate, self.trust)
        length = params_norm.astype(norm.dtype)
        free = (length == 0) | (rate == 0)
        limit = trust * length / jnp.where(free, 1.0, rate)
        return jnp.where(free, jnp.inf, limit), memory


@jax.jit
def _decayed(
    weight_decay: Any,
    grad: Any,
    weight: Any,
    norm: jax.Array,
    length: jax.Array,
) -> jax.Array:
    """The gradient with weight decay, in float32 at least: it is rounded once it is
    clipped. As it is where either is 0.
    """
    decay = jnp.asarray(weight_decay).astype(norm.dtype)
    wide = np.promote_types(jnp.result_type(grad), norm.dtype)
    grad = jnp.asarray(grad).astype(wide)
    decayed = grad + decay.astype(wide) * jnp.asarray(weight).astype(wide)
    # As in apex, where weights or gradients are all 0 nothing decays. Without decay
    # -0.0 stays -0.0, where -0.0 + 0.0 would be 0.0.
    return jnp.where((norm == 0) | (length == 0) | (decay == 0), grad, decayed)
