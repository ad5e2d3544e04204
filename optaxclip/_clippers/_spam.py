"""SPAM: a coordinate whose square is thousands of times its usual square is a spike,
and is cut down.

    g_i <- sign(g_i) sqrt(threshold * v_i)    where g_i^2 > threshold * v_i
    v_i <- decay * v_i + (1 - decay) * g_i^2      the clipped g_i

The paper pairs it with a reset of Adam's moments every `every` steps, after which the
learning rate rises again along a cosine:

    optax.chain(spam(), reset_momentum(optax.scale_by_adam(), every=500, warmup=150),
    optax.scale_by_learning_rate(1e-3))

v is Adam's own in the paper. Here it is kept beside it, a buffer as large as the
parameters, unless `update(..., second_moment=v)` hands one in. Before update number
`warmup`, in the first `warmup` updates from each reset on, and where v is still 0,
nothing is clipped: v has seen too little. (The public code makes a coordinate 0 whose v
is 0, and does not reset the count that corrects Adam's moments; here the whole state
starts anew.)

Reference: Huang et al., SPAM: spike-aware Adam with momentum reset for stable LLM
training, 2025 (arXiv 2501.06842).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import sharding
from .._arguments import check_number, check_state
from .._core._kernel import keep_where
from .._norms._leaves import cast_like, clipped_leaves, put_back
from .._norms._prefix import is_none
from .._norms._modulus import direction, norm_dtype
from .memory import at, check_length, parameter


class SpamState(NamedTuple):
    """The state of `spam`."""

    step: jax.Array  # int32[]: updates seen
    # float32, a leaf for each leaf of the updates: the average of squares, not
    # corrected for its start
    second_moment: Any


class ResetState(NamedTuple):
    """The state of `reset_momentum`."""

    step: jax.Array  # int32[]: updates seen
    inner_state: Any


def spam(
    threshold: Any = 5000.0, *, decay: Any = 0.999, warmup: Any = 20, every: Any = 500
) -> optax.GradientTransformationExtraArgs:
    """Cuts coordinates down to sqrt(threshold * v), v the average of their squares.

    A coordinate that is NaN stays NaN, an infinite one becomes the bound; neither
    enters the average. Complex coordinates are limited by modulus.

    Args:
      threshold: how many times its usual square a square may be. At least 0. A number
        or a schedule.
      decay: of the average, in [0, 1]. A number or a schedule.
      warmup: the first update that is clipped, and how many are not clipped from each
        reset on. At least 0.
      every: the average starts anew before each update whose number is a multiple of
        this, as in `reset_momentum`; None for never. At least 1.

    Returns:
      A transformation with a `SpamState`. `update(..., second_moment=v)` uses another
      average, a tree like the updates, and leaves its own alone.

    Reference: Huang et al., 2025 (arXiv 2501.06842).
    """
    call = "spam"
    threshold, decay = (
        parameter(f"{call}: threshold", threshold),
        parameter(f"{call}: decay", decay, highest=1.0),
    )
    check_number(f"{call}: warmup", warmup)
    if every is not None:
        check_length(f"{call}: every", every)

    def init(params: Any) -> SpamState:
        return SpamState(
            jnp.zeros((), jnp.int32),
            jax.tree.map(
                lambda x: typed_as(jnp.zeros(x.shape, norm_dtype([x])), x),
                types_of(clipped_leaves, params),
            ),
        )

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        second_moment: Any = None,
        **_: Any,
    ) -> tuple[Any, SpamState]:
        check_state(call, state, SpamState)
        tree = clipped_leaves(updates)
        since = _since_reset(state.step, every)
        own = jax.tree.map(
            lambda v: jnp.where(since == 0, jnp.zeros_like(v), v), state.second_moment
        )
        usual = own if second_moment is None else second_moment

        def clip(x: Any, v: jax.Array) -> Any:
            if x is None:
                return None
            (limit,) = at(state.step, v, threshold)
            bound, wide = jnp.sqrt(limit) * jnp.sqrt(v), _widened(x)
            spike = (_size(x, v) > bound) & (v > 0) & (since >= warmup)
            cut = direction(wide) * bound.astype(jnp.finfo(wide.dtype).dtype)
            return jnp.where(spike, cast_like(cut, x), x)

        def blend(x: Any, clipped: Any, v: jax.Array) -> jax.Array:
            if x is None:
                return v
            (keep,) = at(state.step, v, decay)
            return jnp.where(
                jnp.isfinite(_widened(x)),
                keep * v + (1 - keep) * _size(clipped, v) ** 2,
                v,
            )

        clipped = jax.tree.map(clip, tree, usual, is_leaf=is_none)
        moment = (
            jax.tree.map(blend, tree, clipped, own, is_leaf=is_none)
            if second_moment is None
            else state.second_moment
        )
        return put_back(clipped, updates), SpamState(
            jnp.asarray(optax.safe_increment(state.step)), moment
        )

    return optax.GradientTransformationExtraArgs(init, update)


def reset_momentum(
    inner: optax.GradientTransformation, every: Any = 500, warmup: Any = 150
) -> optax.GradientTransformationExtraArgs:
    """Gives an optimizer a fresh state every `every` steps, and lets its updates rise
    again from a hundredth along a cosine.

    Everything in the inner state starts anew, step counts and schedules too: wrap
    `optax.scale_by_adam()`, not the whole optimizer. Leaves that are no floats and no
    complex numbers come out as the inner transformation gives them.

    Args:
      inner: the transformation whose state is reset.
      every: the state starts anew before each update whose number is a multiple of
        this. At least 1.
      warmup: over how many steps after a reset the updates rise to their full size, by
        1 - 0.99 (1 + cos(pi k / warmup)) / 2 with k from 0; not at the start. At least
        0.

    Returns:
      A transformation with a `ResetState`.

    Reference: Huang et al., 2025 (arXiv 2501.06842).
    """
    check_length("reset_momentum: every", every)
    check_number("reset_momentum: warmup", warmup)
    optimizer = optax.with_extra_args_support(inner)

    def init(params: Any) -> ResetState:
        return ResetState(jnp.zeros((), jnp.int32), optimizer.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ResetState]:
        check_state("reset_momentum", state, ResetState)
        since = _since_reset(state.step, every)
        inner_state = keep_where(
            since == 0,
            optimizer.init(updates if params is None else params),
            state.inner_state,
        )
        updates, inner_state = optimizer.update(
            updates, inner_state, params, **extra_args
        )
        rising = (state.step + 1 >= every) & (since < warmup)
        done = since.astype(float) / jnp.maximum(jnp.asarray(warmup, float), 1)
        scale = jnp.where(rising, 1 - 0.99 * (1 + jnp.cos(jnp.pi * done)) / 2, 1.0)

        def scaled(x: Any) -> jax.Array:
            wide = _widened(x)
            return cast_like(wide * scale.astype(wide.dtype), x)

        updates = put_back(jax.tree.map(scaled, clipped_leaves(updates)), updates)
        return updates, ResetState(
            jnp.asarray(optax.safe_increment(state.step)), inner_state
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _widened(x: Any) -> jax.Array:
    """In 32 bits at least. NumPy also promotes floats of 8 bits, which JAX refuses."""
    x = jnp.asarray(x)
    return x.astype(np.promote_types(x.dtype, np.float32))


def _size(x: Any, like: jax.Array) -> jax.Array:
    return jnp.abs(_widened(x)).astype(like.dtype)


def _since_reset(step: jax.Array, every: Any) -> jax.Array:
    """Steps since the last reset, which is before the update number `every`, 2 `every`
    and so on.
    """
    return step + 1 if every is None else (step + 1) % jnp.asarray(every, jnp.int32)
