"""U-Clip: what clipping cuts off is carried over and added to the next gradient.

    u_t         = clip(g_t + carry_t)
    carry_{t+1} = g_t + carry_t - u_t

    so that   u_1 + ... + u_T = g_1 + ... + g_T - carry_{T+1}

Clipping alone is biased: what is cut off never arrives. With the carry, the mean of the
updates tends to the mean of the gradients as long as the carry stays bounded. It does
when the limit is above the norm of the mean gradient.

Reference: Elesedy, Hutter, U-Clip: on-average unbiased stochastic gradient clipping,
2023 (arXiv 2302.02971).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import check_state, with_extra_args
from .._exported import exported
from .._factors import cast_like
from .._mesh import typed_as, types_of
from .._sums import wide_dtype
from .._trees import check_kept, clipped_leaves, is_none, put_back


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
        # From types alone: params may be jax.ShapeDtypeStruct.
        carry = jax.tree.map(_no_carry, types_of(clipped_leaves, params))
        return CarryState(carry, clipper.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        check_state(call, state, CarryState)
        if extra_args.get("grad_norm") is not None:
            raise ValueError(
                f"{call}: grad_norm cannot be given: what is clipped is the sum of "
                "gradient and carry, whose norm is another."
            )
        tree, old = clipped_leaves(updates), state.carry
        check_kept(call, tree, old)
        total = jax.tree.map(_add_carry, tree, old, is_leaf=is_none)
        clipped, clip = clipper.update(total, state.clip_state, params, **extra_args)
        # Rounded before the carry is computed, so that it takes the rounding as well.
        clipped = jax.tree.map(_held_in_type, clipped, tree)
        carry = jax.tree.map(_cut_off, total, clipped, old, is_leaf=is_none)
        return put_back(clipped, updates), CarryState(carry, clip)

    return optax.GradientTransformationExtraArgs(init, update)


def _no_carry(kind: Any) -> jax.Array:
    """The carry of a leaf of this type before the first step."""
    return typed_as(jnp.zeros(kind.shape, wide_dtype(kind)), kind)


def _add_carry(grad: Any, carry: jax.Array) -> jax.Array | None:
    # In float32: 255 + 0.25 is 255 in bfloat16.
    return None if grad is None else jnp.asarray(grad).astype(carry.dtype) + carry


def _held_in_type(clipped: jax.Array, grad: Any) -> jax.Array:
    """What was clipped, in the dtype of the gradient. No finite number becomes inf."""
    if not jnp.iscomplexobj(clipped):
        most = float(jnp.finfo(jnp.result_type(grad)).max)
        held = jnp.clip(clipped, -most, most)
        clipped = jnp.where(jnp.isfinite(clipped), held, clipped)
    return cast_like(clipped, grad)


def _cut_off(total: Any, clipped: Any, carry: jax.Array) -> jax.Array:
    # A leaf without a gradient in this step keeps its carry.
    if total is None:
        return carry
    left = total - clipped.astype(carry.dtype)
    return jnp.where(jnp.isfinite(left), left, carry)
