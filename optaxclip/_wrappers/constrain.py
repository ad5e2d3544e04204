"""A clipper that clips weights: it gets the weights after a step.

    u' = clip(W + u) - W

u' is rounded to the dtype of the update, and W + u' to the dtype of the weight. Where W
is far from its limit, such as 100 that is clipped to 1.2, these roundings may carry
W + u' beyond the limit. `_real_update_to_clipped` corrects that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import DTypeLike

from .._arguments.checks import with_extra_args
from .._arguments.updates import weights_of
from .._devices.mesh_types import varying
from .._norm_clipper import without_overrides
from .._norms.moduli import wide_dtype
from .._numbers import kept_finite
from .._state.state import clip_states
from .._trees import PyTree, leaves_to_clip, put_back


def constrain(
    clipper: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Clips the weights after each step instead of the gradient.

        u' = clip(W + u) - W

    It changes the update, so it comes last in a chain, after the learning rate.
    `optax.apply_updates` then gives clip(W + u), exact up to one rounding to the
    weights' dtype. Weights that are within their limit get the update as it came, and
    so do integer leaves.

    | constraint                        | clipper                                     |
    |-----------------------------------|---------------------------------------------|
    | max-norm of each unit             | `clip_by_unitwise_norm(2.0)`                |
    | unit norm: weights on a sphere    | the same with `shrink=shrinks.normalize`    |
    | each weight in a range (WGAN)     | `clip_by_value(0.01)`                       |
    | no weight below 0                 | `clip_by_value(math.inf, 0.0)`              |
    | largest singular value            | `clip_by_spectral_norm(1.0)`                |

    Where W is far beyond its limit, as in a first step, the rounding of the update is
    corrected, towards 0 only. So an upper bound of the size is kept, and so is a bound
    of 0. A bound away from 0, such as the lower one of `clip_by_value(1.0, 0.3)`, may
    be missed by one rounding. If the update's dtype has fewer bits than the weight's,
    the weight may stay beyond its limit.

    Args:
      clipper: any clipper, or another transformation that maps a tree to one that is
        allowed. It gets the moved weights where it usually gets gradients. To constrain
        some weights only, wrap the result in `optax.masked`.

    Returns:
      A transformation with the state of the clipper, which has the norms of the moved
      weights. `update` needs params, and passes extra arguments on, but for `grad_norm`
      and `limit`, which are about gradients. Where a clipper with nonfinite="zero"
      clears a broken step, the weights stay as they are. In such a step weights of
      sound leaves that the clipper brings to 0 stay too.

    Raises:
      ValueError: `update` without params.
      TypeError: something that is not a transformation.

    Example:
      >>> max_norm = optaxclip.constrain(optaxclip.clip_by_unitwise_norm(1.0))
      >>> optimizer = optax.chain(optax.sgd(1.0), max_norm)
      >>> params = jnp.array([[0.6, 0.1], [0.8, 0.0]])
      >>> grads = jnp.array([[-3.0, -0.2], [-4.0, 0.0]])
      >>> updates, _ = optimizer.update(grads, optimizer.init(params), params)
      >>> print(optax.apply_updates(params, updates).round(3))
      [[0.6 0.3]
       [0.8 0. ]]

    Reference: Srebro, Shraibman, Rank, trace-norm and max-norm, 2005, and Srivastava et
    al., Dropout, JMLR 2014, for max-norm. Arjovsky, Chintala, Bottou, Wasserstein GAN,
    2017 (arXiv 1701.07875), for values. `keras.constraints`.
    """
    call = "constrain"
    clipper = with_extra_args(f"{call}: clipper", clipper)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        inexact_updates = leaves_to_clip(updates, call)
        weights = weights_of(call, inexact_updates, params)
        # Norms and limits of gradients say nothing of weights.
        extra_args = without_overrides(extra_args)
        moved = jax.tree.map(_moved_weight, weights, inexact_updates)
        clipped, new_state = clipper.update(moved, state, params, **extra_args)
        new_counts = _counts_of_broken_steps(new_state)
        old_counts = _counts_of_broken_steps(state)
        if not old_counts:
            # A state of None, as for a clipper of optax, begins anew.
            old_counts = [jnp.zeros_like(count) for count in new_counts]
        # Where a count rose, this step broke the norm.
        broken_norms = [new != old for new, old in zip(new_counts, old_counts)]
        update_to_clipped = partial(_update_to_clipped, broken_norms)
        changes = jax.tree.map(
            update_to_clipped, inexact_updates, weights, moved, clipped
        )
        return put_back(changes, updates), new_state

    return optax.GradientTransformationExtraArgs(clipper.init, update)


def _counts_of_broken_steps(state: PyTree) -> list[Array]:
    """For each clipper in a state: in how many steps each of its norms was broken. A
    norm is broken if it is not finite, if its limit is NaN, or if the shrink returns no
    norm for it.
    """
    return [clip_state.nonfinite for clip_state in clip_states(state)]


def _moved_weight(weight: Array, update: Array) -> Array:
    """The weight after the update as it came, in float32 or wider."""
    weight = jnp.asarray(weight)
    update = jnp.asarray(update)
    # W + u in bfloat16 would lose a small u before it is clipped.
    wide = jnp.promote_types(wide_dtype(weight), wide_dtype(update))
    return weight.astype(wide) + update.astype(wide)


# Where the user does not call jit, this is one program for a leaf instead of dozens.
@jax.jit
def _update_to_clipped(
    broken_norms: list[Array],
    update: Array,
    weight: Array,
    moved: Array,
    clipped: Array,
) -> Array:
    """The update that takes a weight to its clipped value:

        the update as it came       where the clipper changed nothing
        0                           where the clipper made 0 of a broken step
        _real_update_to_clipped     elsewhere

    Args:
      broken_norms: for each clipper a bool array: which of its norms were broken in
        this step.
      update, weight: a leaf of the updates, and its weights.
      moved: the weights after the update as it came.
      clipped: what the clipper made of `moved`.
    """
    weight = jnp.asarray(weight)
    update = jnp.asarray(update)
    arguments = clipped, moved, weight, update
    if jnp.iscomplexobj(moved):
        # Each part is rounded by itself. reduce_precision takes no complex numbers.
        real = _real_update_to_clipped(*(jnp.real(x) for x in arguments))
        imag = _real_update_to_clipped(*(jnp.imag(x) for x in arguments))
        change = lax.complex(real, imag)
    else:
        change = _real_update_to_clipped(*arguments)
    change = change.astype(update.dtype)
    # Where the clipper changed nothing, the update keeps its bits.
    is_unchanged = clipped == moved
    change = jnp.where(is_unchanged, update, change)
    # Zeros that a clipper returns for a broken step, as with nonfinite="zero", are not
    # new weights, so the weights stay. Which leaves share a norm is not known here: one
    # broken norm counts for every leaf.
    for is_broken in broken_norms:
        # In shard_map the update must not come to differ over further mesh axes.
        if varying(is_broken) <= varying(update):
            is_cleared = (clipped == 0) & jnp.any(is_broken)
            change = jnp.where(is_cleared, jnp.zeros_like(change), change)
    return change


def _real_update_to_clipped(
    clipped: Array, moved: Array, weight: Array, update: Array
) -> Array:
    """The update from `weight` to `clipped`, for real numbers.

        goal       clipped, as the weight's dtype has it
        change     goal - weight, as the update's dtype has it
        arrived    weight + change, as `optax.apply_updates` rounds it

    Returns `change`. Where `arrived` is beyond `goal`, on the side of `moved`, it
    returns `change` moved by one ulp towards the other side.
    """

    def in_update_dtype(change: Array) -> Array:
        # A weight of 1e5 may be further from its goal than float16 reaches.
        if change.dtype != update.dtype:
            change = kept_finite(update.dtype, change)
        return _rounded(change, update.dtype)

    start = weight.astype(clipped.dtype)
    goal = _rounded(clipped, weight.dtype)
    change = in_update_dtype(goal - start)
    arrived = _rounded(start + change, weight.dtype)
    # 1 or -1: the side of the goal where weights are beyond the limit.
    outward = jnp.sign(moved)
    is_beyond = (arrived - goal) * outward > 0
    # eps * |change| is between one ulp and two. So 0.75 of it is between 0.75 and 1.5,
    # and the rounding makes it one ulp. Small changes of float16 are subnormal numbers,
    # which all have the same ulp.
    info = jnp.finfo(update.dtype)
    least_ulp = float(info.smallest_subnormal)
    one_to_two_ulps = jnp.maximum(float(info.eps) * jnp.abs(change), least_ulp)
    inward_change = in_update_dtype(change - outward * (0.75 * one_to_two_ulps))
    # Near 0 the step inward may cross 0 and end further from it than before. Then it is
    # taken only if the goal is 0, since no weight may stay beyond a bound of 0.
    arrived_inward = _rounded(start + inward_change, weight.dtype)
    is_nearer_0 = jnp.abs(arrived_inward) <= jnp.abs(arrived)
    is_better = (goal == 0) | is_nearer_0
    return jnp.where(is_beyond & is_better, inward_change, change)


def _rounded(x: Array, dtype: DTypeLike) -> Array:
    """The number rounded to what a narrower dtype can hold. It keeps its own dtype."""
    info = jnp.finfo(dtype)
    wide_info = jnp.finfo(x.dtype)
    if info.bits >= wide_info.bits:
        return x
    # reduce_precision knows IEEE formats only, and 8-bit dtypes have other ranges.
    if info.bits < 16:
        return x.astype(dtype).astype(x.dtype)
    # XLA may drop a cast and the cast back, but it keeps reduce_precision.
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == wide_info.nexp:
        return rounded
    # reduce_precision turns subnormal numbers into 0. Small changes of float16 are
    # subnormal.
    ulp = float(info.smallest_subnormal)
    subnormal = jnp.round(x / ulp) * ulp
    is_subnormal = jnp.abs(x) < float(info.tiny)
    return jnp.where(is_subnormal, subnormal, rounded)
