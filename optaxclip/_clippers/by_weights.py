"""Clippers that hold a gradient or an update against the weights it changes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike

from .._arguments.checks import Nonfinite, check_flag, shown
from .._arguments.updates import weights_of
from .._devices.mesh import MeshAxes
from .._norm_clipper import make_clipper
from .._norms.axes import Axis, Stacked
from .._norms.moduli import widened
from .._norms.norms import TensorNorm, UnitwiseNorm
from .._norms.options import Ord, checked_options
from .._numbers import rounded_like
from .._trees import PyTree, leaves_to_clip, put_back
from ..rules._limits import ShareOfParams
from ..rules._rule import (
    LimitAndMemory,
    Number,
    Rule,
    checked_number,
    is_inf,
    number_field,
    numbers_at_step,
)
from ..shrinks import Shrink


def adaptive_grad_clip(
    clipping: Number | None = 0.01,
    eps: ArrayLike = 1e-3,
    axis: Axis = None,
    *,
    per_tensor: bool = False,
    ord: Ord = None,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips each unit's gradient against its weights: |G_i| <= clipping * max(|W_i|,
    eps).

    Its `update` needs params. The paper leaves out the final linear layer: wrap the
    clipper in `optax.masked`.

    Args:
      clipping: a number at least 0, an array or a schedule. None and inf are no limit.
        0.01 is the paper's for batches of 1024 to 4096. Smaller batches take a larger
        `clipping`.
      eps: weights shorter than this count as this long. At least 0.
      axis: the axes that are summed over: an int, a tuple, a tree prefix of these, or a
        function of path and leaf. None chooses by shape, as the paper's code and optax
        do: all axes where at most one is longer than 1, so that a bias or a kernel of
        shape (n, 1) or (1, n) is one unit. Otherwise those before the last, the output
        of a JAX kernel (axis 0 alone at rank 3). Of weights of shape (out, in), as
        equinox and torch have them, a unit would then be what one input feeds. For
        these: `axis=lambda path, x: tuple(range(1, x.ndim)) or None`.
      per_tensor: whether whole leaves are compared instead of units, as DreamerV3 does
        with clipping=0.3.
      ord: the order of the norms: a number above 0, `math.inf`, "rms" or "average".
        None means 2.
      stacked: which axes of a leaf index its layers: 1 for the leading axis, or another
        form that `clip_by_tensor_norm` takes.
      shrink: what a norm over its limit becomes. None is `shrinks.hard`.
      nonfinite: what becomes of a unit whose norm is NaN or inf: "propagate" makes it
        NaN, "zero" makes it 0, "raise" raises FloatingPointError (under jit it is a
        `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. PartitionSpecs are
        required for every split leaf except vectors.

    Returns:
      A transformation whose state is a `ClipState`, read by `metrics`. Its `update`
      also takes `grad_norm=` and `limit=`, in the structure that `unitwise_norm`
      returns, or `tensor_norm` with per_tensor=True.

    Raises:
      ValueError: a negative or NaN number, an order that is not above 0, an unknown
        `nonfinite`, or `axis` beside `per_tensor`. From init or update: an axis that a
        leaf does not have, a rank above 5 without `axis`, or no params.
      TypeError: something that is not a number, or a shrink that is not a function.

    Example:
      >>> params, grads = jnp.array([[3.0], [4.0]]), jnp.array([[0.6], [0.8]])
      >>> clipper = optaxclip.adaptive_grad_clip(0.1)
      >>> updates, state = clipper.update(grads, clipper.init(params), params)
      >>> print(updates.ravel())
      [0.3 0.4]

    Reference: Brock et al., High-performance large-scale image recognition without
    normalization, 2021 (arXiv 2102.06171). Hafner et al., Mastering diverse domains
    through world models, 2023 (arXiv 2301.04104).
    """
    call = "adaptive_grad_clip"
    check_flag(f"{call}: per_tensor", per_tensor)
    # A leaf as a whole has no axes to choose, so one of the two is a mistake.
    if per_tensor and axis is not None:
        raise ValueError(
            f"{call}: axis={shown(axis)} is for units, and per_tensor=True has none."
        )
    if clipping is None:
        clipping = math.inf
    # The rule checks its numbers too, but its errors name share_of_params.
    share = checked_number(f"{call}: clipping", clipping)
    eps = checked_number(f"{call}: eps", eps)
    # DreamerV3 compares |G| and |W| of whole leaves, NFNets of units.
    if per_tensor:
        options = checked_options(call, ord=ord, stacked=stacked, mesh_axes=mesh_axes)
        measure = TensorNorm(**options)
    else:
        options = checked_options(
            call, ord=ord, stacked=stacked, mesh_axes=mesh_axes, axis=axis
        )
        measure = UnitwiseNorm(**options)
    return make_clipper(
        measure,
        # limit = clipping * max(|W|, eps), with |W| measured as |G| is.
        ShareOfParams(share, eps),
        call=call,
        limit_argument="clipping",
        shrink=shrink,
        nonfinite=nonfinite,
    )


def larc(
    learning_rate: Number,
    trust: ArrayLike = 0.02,
    *,
    weight_decay: ArrayLike = 0.0,
    eps: ArrayLike = 1e-8,
    stacked: Stacked = None,
    nonfinite: Nonfinite = "propagate",
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
      learning_rate: the rate of the optimizer after it: a number at least 0 or a
        schedule.
      trust: how long a step may be against the weights. At least 0. apex has 0.02, the
        paper 0.001. inf only measures.
      weight_decay: added as weight_decay * p before clipping, so leave it out of the
        optimizer. At least 0.
      eps: added to the norm of the gradient before dividing. At least 0.
      stacked: which axes of a leaf index its layers, each clipped separately: 1 for the
        leading axis, or another form that `clip_by_tensor_norm` takes.
      nonfinite: what becomes of a tensor whose norm is NaN or inf: "propagate" makes it
        NaN, "zero" makes it 0, "raise" raises FloatingPointError (under jit it is a
        `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. Stacked leaves that are
        split need PartitionSpecs.

    Returns:
      A transformation with a `ClipState`, read by `metrics`: the norm is |g| +
      weight_decay * |p|, or 0 for a gradient of 0. The limit is
      trust * |p| / learning_rate. Its `update` computes both, and does not look at a
      `grad_norm=` or `limit=` that a chain is given.

    Raises:
      ValueError: a negative or NaN number, a `weight_decay` that is infinite or an
        array, or `update` without params.
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
    # An infinite weight decay makes inf * 0, which is NaN, of weights that are 0.
    weight_decay = checked_number(
        f"{call}: weight_decay",
        weight_decay,
        highest=float(np.finfo(np.float64).max),
        may_be_schedule=False,
        is_scalar=True,
    )
    rule = Larc(learning_rate, trust)
    options = checked_options(call, ord=None, stacked=stacked, mesh_axes=mesh_axes)
    measure = TensorNorm(**options)
    norm_clipper = make_clipper(
        measure,
        rule,
        call=call,
        limit_argument="learning_rate",
        eps=eps,
        nonfinite=nonfinite,
    )

    # Norm and limit are computed here, so those that a chain hands over are dropped.
    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        tree = leaves_to_clip(updates, call)
        weights = weights_of(call, tree, params)
        grad_norms = measure(tree)
        # `norm_clipper` measures the weights again, for the limit of `Larc`. Under jit
        # XLA computes their norms once.
        weight_norms = measure(weights)
        # Lists, since a user's class may check the shapes of what it is built from, and
        # norms have other shapes than its arrays.
        grad_leaves, treedef = jax.tree.flatten(tree)
        decayed_leaves = jax.tree.map(
            partial(_grad_with_decay, weight_decay),
            grad_leaves,
            jax.tree.leaves(weights),
            grad_norms.local_values(),
            weight_norms.local_values(),
        )
        # As in apex, the norm is |g| + weight_decay * |p|, which is at least the norm
        # of the decayed gradient.
        norms_with_decay = [
            _norm_with_decay(weight_decay, grad_norm, weight_norm)
            for grad_norm, weight_norm in zip(grad_norms.values, weight_norms.values)
        ]
        clipped, new_state = norm_clipper.update(
            treedef.unflatten(decayed_leaves),
            state,
            params,
            grad_norm=grad_norms._replace(values=norms_with_decay),
        )
        rounded = jax.tree.map(rounded_like, clipped, tree)
        return put_back(rounded, updates), new_state

    return optax.GradientTransformationExtraArgs(norm_clipper.init, update)


# Not `LARC`: errors name a rule by its class, larc, and would make it l_a_r_c.
class Larc(Rule):
    """limit = trust * |p| / learning_rate, and none for weights or a rate of 0."""

    learning_rate: Number = number_field()
    trust: ArrayLike = number_field(may_be_schedule=False)

    needs_params = True

    @property
    def inf_is_off(self) -> bool:
        # Weights or a rate of 0 do not mean that the user wants no limit. A trust of
        # inf does.
        return is_inf(self.trust)

    def update(
        self, norm: Array, memory: PyTree, step: Array, params_norm: Array
    ) -> LimitAndMemory:
        rate, trust = numbers_at_step(step, norm.dtype, self.learning_rate, self.trust)
        weight_norm = params_norm.astype(norm.dtype)
        # Weights of 0 would get a limit of 0 and never move. A rate of 0 moves nothing.
        has_no_limit = (weight_norm == 0) | (rate == 0)
        limit = trust * weight_norm / jnp.where(has_no_limit, 1.0, rate)
        return jnp.where(has_no_limit, jnp.inf, limit), memory


def _norm_with_decay(decay: ArrayLike, grad_norm: Array, weight_norm: Array) -> Array:
    """|g| + decay * |p|, and 0 for a gradient of 0, which gets no weight decay."""
    decay = jnp.asarray(decay).astype(grad_norm.dtype)
    total = grad_norm + decay * weight_norm
    return jnp.where(grad_norm == 0, grad_norm, total)


@jax.jit
def _grad_with_decay(
    decay: ArrayLike,
    grad: ArrayLike,
    weight: ArrayLike,
    grad_norm: Array,
    weight_norm: Array,
) -> Array:
    """The gradient with weight decay, in at least float32: the clip comes before the
    rounding.
    """
    decay = jnp.asarray(decay).astype(grad_norm.dtype)
    grad = widened(grad)
    weight = jnp.asarray(weight).astype(grad.dtype)
    decayed = grad + decay.astype(grad.dtype) * weight
    # Where weights or gradients are all 0 nothing decays, as in apex. A decay of 0 is
    # not added, because -0.0 + 0.0 is 0.0.
    is_kept = (grad_norm == 0) | (weight_norm == 0) | (decay == 0)
    return jnp.where(is_kept, grad, decayed)


def clippy(
    relative: ArrayLike = 0.1,
    absolute: ArrayLike = 1e-7,
    *,
    stacked: Stacked = None,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Scales each tensor so that |u_i| <= relative * |p_i| + absolute for each element.

        s = min(1, min_i (relative * |p_i| + absolute) / |u_i|)        u <- s u

    A norm does not see one coordinate that blows up in a large tensor. The largest
    ratio of change to weight does. Clippy compares what is added to the weights, so it
    comes last, after the learning rate: `optax.chain(optax.adagrad(0.001),
    optaxclip.clippy())`. Its `update` needs params.

        update 0            stays 0, whatever the weights
        weight 0            moves by at most `absolute`. With absolute=0 its whole
                            tensor does not move. Nor does a tensor in which
                            |u_i| / bound overflows
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
      stacked: which axes of a leaf index its layers, each scaled separately: 1 for the
        leading axis, or another form that `clip_by_tensor_norm` takes.
      nonfinite: what becomes of a tensor whose norm is NaN or inf: "propagate" makes it
        NaN, "zero" makes it 0, "raise" raises FloatingPointError (under jit it is a
        `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. Stacked leaves that are
        split need PartitionSpecs.

    Returns:
      A transformation with a `ClipState`, read by `metrics`: the norm is the largest
      |u_i| / (relative * |p_i| + absolute) of a tensor, and the limit is 1. Its
      `update` computes both, and does not look at a `grad_norm=` or `limit=` that a
      chain is given.

    Raises:
      ValueError: a bound that is negative, NaN or an array, an unknown `nonfinite`, or
        `update` without params.
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
    checked_bound = partial(checked_number, may_be_schedule=False, is_scalar=True)
    relative = checked_bound(f"{call}: relative", relative)
    absolute = checked_bound(f"{call}: absolute", absolute)
    options = checked_options(call, ord=math.inf, stacked=stacked, mesh_axes=mesh_axes)
    # The norm of order inf is the largest ratio of an element to its bound.
    measure = TensorNorm(**options)
    # The limit depends on single weights, so each update hands it over.
    norm_clipper = make_clipper(
        measure, None, call=call, limit_argument="limit", nonfinite=nonfinite
    )

    # Norm and limit are computed here, so those that a chain hands over are dropped.
    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        tree = leaves_to_clip(updates, call)
        weights = weights_of(call, tree, params)
        has_no_limit = jnp.isinf(relative) | jnp.isinf(absolute)
        limit = jnp.where(has_no_limit, jnp.inf, 1.0)
        bound_ratio = partial(_bound_ratio, relative, absolute, has_no_limit)
        norms = measure(jax.tree.map(bound_ratio, tree, weights))
        # A norm is inf where an element has a bound of 0, or overflows when divided by
        # its bound. Such a tensor gets the limit 0 and does not move.
        limits = [jnp.where(x == jnp.inf, 0.0, limit) for x in norms.values]
        # A norm of inf would count as broken. NaN stays NaN.
        finite_norms = [jnp.minimum(x, jnp.finfo(x.dtype).max) for x in norms.values]
        return norm_clipper.update(
            updates,
            state,
            grad_norm=norms._replace(values=finite_norms),
            limit=norms._replace(values=limits),
        )

    return optax.GradientTransformationExtraArgs(norm_clipper.init, update)


@jax.jit
def _bound_ratio(
    relative: ArrayLike,
    absolute: ArrayLike,
    has_no_limit: Array,
    update: ArrayLike,
    weight: ArrayLike,
) -> Array:
    """|u| / bound for each element: 0 where the update is 0, inf where only the bound
    is 0, and NaN where the update is inf or NaN.
    """
    # In float16 the default bound of 1e-7 would have hardly a digit: the smallest
    # number is 6e-8.
    magnitude = jnp.abs(widened(update))
    weight_magnitude = jnp.abs(weight).astype(magnitude.dtype)
    relative = jnp.asarray(relative).astype(magnitude.dtype)
    absolute = jnp.asarray(absolute).astype(magnitude.dtype)
    bound = relative * weight_magnitude + absolute
    # A relative bound of inf times a weight of 0 is NaN.
    bound = jnp.where(has_no_limit, jnp.inf, bound)
    # For the derivative the quotient must be finite where it is not used, too.
    is_zero = bound == 0
    bound_ratio = magnitude / jnp.where(is_zero, 1.0, bound)
    bound_ratio = jnp.where(is_zero & (magnitude > 0), jnp.inf, bound_ratio)
    # magnitude * 0 is 0, and NaN where the magnitude is inf.
    return bound_ratio + magnitude * 0
