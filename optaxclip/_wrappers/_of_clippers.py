"""Wrappers of a clipper: what it cuts off is carried over, or it clips weights.

U-Clip: what clipping cuts off is carried over and added to the next gradient.

    u_t         = clip(g_t + carry_t)
    carry_{t+1} = g_t + carry_t - u_t

    so that   u_1 + ... + u_T = g_1 + ... + g_T - carry_{T+1}

Clipping alone is biased: what is cut off never arrives. With the carry, the mean of the
updates tends to the mean of the gradients as long as the carry stays bounded. It does
when the limit is above the norm of the mean gradient.

Reference: Elesedy, Hutter, U-Clip: on-average unbiased stochastic gradient clipping,
2023 (arXiv 2302.02971).

Constraints on weights: a clipper that is held against what a step makes of them.

    u' = clip(W + u) - W

A weight plus its update is rounded to the weight's dtype, and so is the update. Where W
is far from what it becomes, such as 100 that is clipped to 1.2, the second rounding may
carry it beyond the limit. The update is then made one unit of rounding shorter.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import check_state, kept_finite, with_extra_args
from .._exported import exported
from .._mesh import varying
from .._state import ClipState, clip_states
from .._sums import wide_dtype
from .._trees import check_kept, clipped_leaves, is_none, put_back, weights_of


@exported
class CarryState(NamedTuple):
    """The state of `carry_clipped`."""

    # float32[...] for each clipped leaf (float64 if it has 64 bits): what was cut off
    # so far
    carry: Any
    clip_state: Any  # the clipper's


def carry_clipped(
    clipper: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Adds to each gradient what the clipper has cut off before.

    Each step returns u = clip(g + carry), and then the carry becomes g + carry - u.

    Args:
      clipper: any clipper of gradients. It gets the sum of gradient and carry. Integer
        leaves are not clipped.

    Returns:
      A transformation with a `CarryState`, whose buffer is as large as the parameters,
      in float32 (float64 for 64-bit leaves). A coordinate that comes out as NaN or inf
      keeps its carry, and so does a leaf that is None in a step. Where the clipper
      makes a broken step zero, the finite coordinates of the gradient are carried over
      like all else that was cut off.

    Raises:
      ValueError: `update` with `grad_norm`. It is the norm of the gradient, but the sum
        of gradient and carry is clipped.
      TypeError: `update` with the state of another transformation.

    Example:
      >>> clipper = optaxclip.carry_clipped(optaxclip.clip_by_value(1.0))
      >>> state = clipper.init(jnp.zeros(()))
      >>> for grad in (3.0, 0.0, 0.0, 0.0):
      ...     update, state = clipper.update(jnp.float32(grad), state)
      ...     print(update)
      1.0
      1.0
      1.0
      0.0

    Reference: Elesedy, Hutter, U-Clip: on-average unbiased stochastic gradient
    clipping, 2023 (arXiv 2302.02971).
    """
    call = "carry_clipped"
    clipper = with_extra_args(f"{call}: clipper", clipper, "a clipper")

    def init(params: Any) -> CarryState:
        # Split over devices as the weights are, which may be jax.ShapeDtypeStruct.
        tree = clipped_leaves(params, call)
        carry = jax.tree.map(lambda x: jnp.zeros_like(x, wide_dtype(x)), tree)
        return CarryState(carry, clipper.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        check_state(call, state, CarryState)
        # The carry has no counter of steps.
        for own in clip_states(state.clip_state):
            check_state(call, own, ClipState)
        if extra_args.get("grad_norm") is not None:
            raise ValueError(
                f"{call}: grad_norm cannot be given: what is clipped is the sum of "
                "gradient and carry, whose norm is another."
            )
        tree = clipped_leaves(updates, call)
        check_kept(call, tree, state.carry)
        total = jax.tree.map(_add_carry, tree, state.carry, is_leaf=is_none)
        clipped, clip_state = clipper.update(
            total, state.clip_state, params, **extra_args
        )
        # Rounded before the carry is computed, so that it takes the rounding as well.
        clipped = jax.tree.map(_in_dtype_of, clipped, tree)
        carry = jax.tree.map(_cut_off, total, clipped, state.carry, is_leaf=is_none)
        return put_back(clipped, updates), CarryState(carry, clip_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _add_carry(grad: Any, carry: jax.Array) -> jax.Array | None:
    # In float32: 255 + 0.25 is 255 in bfloat16.
    return None if grad is None else jnp.asarray(grad).astype(carry.dtype) + carry


def _in_dtype_of(clipped: jax.Array, grad: Any) -> jax.Array:
    """The clipped leaf in the dtype of the gradient. No finite number becomes inf."""
    dtype = jnp.result_type(grad)
    if not jnp.iscomplexobj(clipped):
        clipped = kept_finite(dtype, clipped)
    return clipped.astype(dtype)


def _cut_off(total: Any, clipped: Any, carry: jax.Array) -> jax.Array:
    # A leaf without a gradient in this step keeps its carry.
    if total is None:
        return carry
    new_carry = total - clipped.astype(carry.dtype)
    return jnp.where(jnp.isfinite(new_carry), new_carry, carry)


# ----------------------------------------------------------- constraints on weights

# Arguments of `update` about the gradient. Here weights are clipped.
OF_GRADIENTS = ("grad_norm", "limit")


def constrain(
    clipper: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Clips the weights after each step instead of the gradient.

        u' = clip(W + u) - W

    It changes the update, so it comes last in a chain, after the learning rate.
    `optax.apply_updates` then gives clip(W + u), rounded once to the weights' dtype,
    and not longer by more than that rounding. Where W is far longer than its limit, as
    in a first step, the update itself is rounded too, to no longer weights, and not
    across a bound of 0. Where the update has fewer bits than W, its rounding may leave
    weights beyond the limit. Weights that are within their limit get the update as it
    came, and integer leaves too.

    | constraint                        | clipper                                     |
    |-----------------------------------|---------------------------------------------|
    | max-norm of each unit             | `clip_by_unitwise_norm(2.0)`                |
    | unit norm: weights on a sphere    | the same with `shrink=shrinks.normalize`    |
    | each weight in a range (WGAN)     | `clip_by_value(0.01)`                       |
    | no weight below 0                 | `clip_by_value(math.inf, 0.0)`              |
    | largest singular value            | `clip_by_spectral_norm(1.0)`                |

    Args:
      clipper: any clipper, or another transformation that maps a tree to one that is
        allowed. It gets the moved weights where it usually gets gradients. To constrain
        some weights only, wrap the result in `optax.masked`.

    Returns:
      A transformation with the state of the clipper, whose norms are those of the moved
      weights. `update` needs params, and passes extra arguments on, but for `grad_norm`
      and `limit`, which are about gradients. Where a clipper with nonfinite="zero"
      clears a broken step, the weights stay as they are.

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
    clipper = with_extra_args(f"{call}: clipper", clipper, "a clipper")

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        tree = clipped_leaves(updates, call)
        weights = weights_of(call, tree, params, "updates")
        extra_args = {k: v for k, v in extra_args.items() if k not in OF_GRADIENTS}
        moved = jax.tree.map(_moved, weights, tree)
        clipped, new_state = clipper.update(moved, state, params, **extra_args)
        broken = []
        for clip_state in clip_states(new_state):
            is_broken = ~jnp.isfinite(clip_state.norm) | jnp.isnan(clip_state.limit)
            broken.append(is_broken)
        step_to = partial(_step_to, broken)
        steps = jax.tree.map(step_to, tree, weights, moved, clipped)
        return put_back(steps, updates), new_state

    return optax.GradientTransformationExtraArgs(clipper.init, update)


def _moved(weight: Any, update: Any) -> jax.Array:
    weight, update = jnp.asarray(weight), jnp.asarray(update)
    # Wide, since W + u in bfloat16 would lose a small u before it is clipped.
    wide = jnp.promote_types(wide_dtype(weight), wide_dtype(update))
    return weight.astype(wide) + update.astype(wide)


@jax.jit
def _step_to(
    broken: Any, update: Any, weight: Any, moved: jax.Array, clipped: jax.Array
) -> jax.Array:
    """The update that takes a weight to its clipped value. `moved` is the weight after
    the update as it came.
    """
    weight = jnp.asarray(weight)
    update = jnp.asarray(update)
    arguments = clipped, moved, weight, update
    if jnp.iscomplexobj(moved):
        # Each part is rounded by itself. reduce_precision takes no complex numbers.
        real = _real_step(*(jnp.real(x) for x in arguments))
        imag = _real_step(*(jnp.imag(x) for x in arguments))
        step = lax.complex(real, imag)
    else:
        step = _real_step(*arguments)
    # Zeros of a broken step are no weights.
    for flags in broken:
        # In shard_map a flag that differs over more mesh axes than the update would
        # make it differ over them too.
        if varying(flags) <= varying(update):
            cleared = (clipped == 0) & jnp.any(flags)
            step = jnp.where(cleared, jnp.zeros_like(step), step)
    # Where the clipper changed nothing, the update keeps its bits.
    return jnp.where(clipped == moved, update, step.astype(update.dtype))


def _real_step(
    clipped: jax.Array, moved: jax.Array, weight: jax.Array, update: jax.Array
) -> jax.Array:
    start = weight.astype(clipped.dtype)
    goal = _rounded(clipped, weight.dtype)
    step = _rounded(goal - start, update.dtype)
    # The weight that `optax.apply_updates` makes of weight and update.
    arrived = _rounded(start + step, weight.dtype)
    # Weights beyond the goal lie on the side where the weight would have gone.
    outside = jnp.sign(moved)
    # Between 3/4 and 3/2 units of rounding, so that rounding makes it one. Subnormal
    # numbers have one unit, which float16 needs for small steps.
    info = jnp.finfo(update.dtype)
    least = float(info.smallest_subnormal)
    unit = 0.75 * jnp.maximum(float(info.eps) * jnp.abs(step), least)
    shorter = _rounded(step - outside * unit, update.dtype)
    # Where 0 is between both, the unit may make the weight longer. It is crossed only
    # where it is no bound.
    arrived_by_shorter = _rounded(start + shorter, weight.dtype)
    helps = (goal == 0) | (jnp.abs(arrived_by_shorter) <= jnp.abs(arrived))
    return jnp.where(((arrived - goal) * outside > 0) & helps, shorter, step)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounded to a narrower dtype, in its own."""
    info = jnp.finfo(dtype)
    wide_info = jnp.finfo(x.dtype)
    if info.bits >= wide_info.bits:
        return x
    if info.bits < 16:  # Their ranges are not those of IEEE formats.
        return x.astype(dtype).astype(x.dtype)
    # XLA may drop two casts in a row, and keeps this.
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == wide_info.nexp:
        return rounded
    # It makes subnormal numbers 0, which float16 needs for small steps.
    unit = float(info.smallest_subnormal)
    return jnp.where(jnp.abs(x) < float(info.tiny), jnp.round(x / unit) * unit, rounded)
