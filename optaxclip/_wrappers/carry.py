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
from jax import Array

from .._arguments.checks import check_one_model, check_state, with_extra_args
from .._arguments.updates import check_fits_stored
from .._norms.moduli import wide_dtype
from .._numbers import rounded_like
from .._state.interop import exported
from .._trees import PyTree, is_none, leaves_to_clip, put_back


@exported
class CarryState(NamedTuple):
    """The state of `carry_clipped`."""

    # float32[...] for each clipped leaf (float64 if it has 64 bits): what was cut off
    # so far
    carry: PyTree
    clip_state: PyTree  # of the clipper


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
    clipper = with_extra_args(f"{call}: clipper", clipper)

    def init(params: PyTree) -> CarryState:
        # zeros_like, so that the carry is split over devices as the weights are. These
        # may be jax.ShapeDtypeStruct.
        tree = leaves_to_clip(params, call)
        carry = jax.tree.map(lambda x: jnp.zeros_like(x, wide_dtype(x)), tree)
        return CarryState(carry, clipper.init(params))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        check_state(call, state, CarryState)
        check_one_model(f"{call}: state", state.clip_state)
        if extra_args.get("grad_norm") is not None:
            raise ValueError(
                f"{call}: grad_norm cannot be given: what is clipped is the sum of "
                "gradient and carry, whose norm is another."
            )
        tree = leaves_to_clip(updates, call)
        check_fits_stored(call, tree, state.carry)
        total = jax.tree.map(_add_carry, tree, state.carry, is_leaf=is_none)
        clipped, new_clip_state = clipper.update(
            total, state.clip_state, params, **extra_args
        )
        # Rounded first, so that what rounding cuts off is carried as well.
        clipped = jax.tree.map(rounded_like, clipped, tree)
        carry = jax.tree.map(_new_carry, total, clipped, state.carry, is_leaf=is_none)
        return put_back(clipped, updates), CarryState(carry, new_clip_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _add_carry(grad: Array | None, carry: Array) -> Array | None:
    """The sum that is clipped. None for a leaf without a gradient in this step."""
    if grad is None:
        return None
    # In float32: 255 + 0.25 is 255 in bfloat16.
    return jnp.asarray(grad).astype(carry.dtype) + carry


def _new_carry(total: Array | None, clipped: Array, carry: Array) -> Array:
    """The carry after a step: what was cut off."""
    # A leaf without a gradient in this step keeps its carry.
    if total is None:
        return carry
    new_carry = total - clipped.astype(carry.dtype)
    return jnp.where(jnp.isfinite(new_carry), new_carry, carry)
