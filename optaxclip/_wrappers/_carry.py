"""U-Clip: what clipping cuts off is carried over and added to the next gradient.

    u_t     = clip(g_t + carry_t)
    carry_{t+1} = g_t + carry_t - u_t        so that   u_1 + ... + u_T = g_1 + ... + g_T
                                                       - carry_{T+1}

Clipping alone is biased: what is cut off never arrives. With the carry, the mean of the
updates tends to the mean of the gradients as long as the carry stays bounded, which it
does when the limit lies above the length of the mean gradient.

Reference: Elesedy, Hutter, U-Clip: on-average unbiased stochastic gradient clipping,
2023 (arXiv 2302.02971).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import sharding
from .._arguments import check_state
from .._norms._leaves import cast_like, clipped_leaves, put_back
from .._norms._prefix import is_none


class CarryState(NamedTuple):
    """The state of `carry_clipped`."""

    carry: Any  # float32, a leaf for each leaf of the updates: what was cut off so far
    clip_state: Any  # the clipper's


def carry_clipped(
    clipper: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Adds to each gradient what the clipper has cut off before.

    Args:
      clipper: any clipper of gradients. It sees the sum of gradient and carry.

    Returns:
      A transformation with a `CarryState`, whose buffer is as large as the parameters,
      in float32 (float64 for 64-bit leaves). A coordinate that comes out as NaN or inf
      keeps its carry, and so does a leaf that is None in a step; where the clipper
      makes a broken step zero, its finite coordinates are carried over like all else
      that was cut off.

    Raises:
      ValueError: `update` with `grad_norm`, the norm of the gradient: another one is
        clipped.

    Example:
      >>> import optaxclip
      >>> clipper = optaxclip.carry_clipped(optaxclip.clip_by_value(1.0))
      >>> state = clipper.init(jnp.zeros(()))
      >>> for grad in (3.0, 0.0, 0.0, 0.0):
      ...     update, state = clipper.update(jnp.float32(grad), state)
      ...     print(update)
      1.0
      1.0
      1.0
      0.0

    Reference: Elesedy, Hutter, 2023 (arXiv 2302.02971).
    """
    clipper = optax.with_extra_args_support(clipper)

    def init(params: Any) -> CarryState:
        carry = jax.tree.map(
            # NumPy also promotes floats of 8 bits, which JAX refuses to.
            lambda x: typed_as(
                jnp.zeros(x.shape, np.promote_types(x.dtype, np.float32)), x
            ),
            types_of(clipped_leaves, params),
        )
        return CarryState(carry, clipper.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, CarryState]:
        check_state("carry_clipped", state, CarryState)
        if "grad_norm" in extra_args:
            raise ValueError(
                "carry_clipped: grad_norm cannot be given: what is clipped is the sum "
                "of gradient and carry, whose norm is another."
            )
        tree = clipped_leaves(updates)
        total = jax.tree.map(_add_carry, tree, state.carry, is_leaf=is_none)
        clipped, clip_state = clipper.update(
            total, state.clip_state, params, **extra_args
        )
        clipped = jax.tree.map(cast_like, clipped, tree)
        carry = jax.tree.map(_cut_off, total, clipped, state.carry, is_leaf=is_none)
        return put_back(clipped, updates), CarryState(carry, clip_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _add_carry(grad: Any, carry: jax.Array) -> jax.Array | None:
    return None if grad is None else jnp.asarray(grad).astype(carry.dtype) + carry


def _cut_off(total: jax.Array | None, clipped: Any, carry: jax.Array) -> jax.Array:
    if total is None:  # not in this step: it waits
        return carry
    left = total - clipped.astype(carry.dtype)
    return jnp.where(jnp.isfinite(left), left, carry)
