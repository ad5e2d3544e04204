"""A fresh optimizer state every so many steps, as SPAM resets Adam's moments."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from .._checks import (
    LAST_STEP,
    check_length,
    check_number,
    check_state,
    number_for_jit,
    with_extra_args,
)
from .._exported import exported
from .._factors import cast_like
from .._sums import wide_dtype
from .._trees import clipped_leaves, put_back
from ..rules._memory import keep_where


@exported
class ResetState(NamedTuple):
    """The state of `reset_momentum`."""

    step: jax.Array  # int32[]: updates seen
    inner_state: Any  # the inner transformation's


def reset_momentum(
    inner: optax.GradientTransformation, every: Any = 500, warmup: Any = 150
) -> optax.GradientTransformationExtraArgs:
    """Gives an optimizer a fresh state every `every` steps.

    After a reset its updates rise again from a hundredth to their full size:

        1 - 0.99 (1 + cos(pi k / warmup)) / 2    k steps after a reset

    All of the inner state starts anew, step counts and schedules too. So wrap
    `optax.scale_by_adam()`, not the whole optimizer. Leaves that are not floats or
    complex numbers come out as the inner transformation returns them.

    Args:
      inner: the transformation whose state is reset.
      every: the state starts anew before each update whose number is a multiple of
        this. A whole number, at least 1.
      warmup: over how many steps after a reset the updates rise to their full size. At
        the start of training they do not. At least 0.

    Returns:
      A transformation with a `ResetState`.

    Raises:
      ValueError: an `every` that is not whole or below 1, or a negative warmup.
      TypeError: something else that is not a number.

    Example:
      >>> optimizer = optaxclip.reset_momentum(optax.trace(0.9), every=3, warmup=0)
      >>> state = optimizer.init(jnp.zeros(()))
      >>> for _ in range(4):
      ...     update, state = optimizer.update(jnp.ones(()), state)
      ...     print(update)
      1.0
      1.9
      1.0
      1.9

    Reference: Huang et al., SPAM: spike-aware Adam with momentum reset for stable LLM
    training, 2025 (arXiv 2501.06842). The public code has k / (warmup + 1) in the
    cosine. It resets the moments but not Adam's step count, so they are not corrected
    for their new start. Here the count starts anew as well.
    """
    call = "reset_momentum"
    check_length(f"{call}: every", every)
    check_number(f"{call}: warmup", warmup)
    every, warmup = number_for_jit(every), number_for_jit(warmup)
    optimizer = with_extra_args(f"{call}: inner", inner)

    def init(params: Any) -> ResetState:
        return ResetState(jnp.zeros((), jnp.int32), optimizer.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ResetState]:
        check_state(call, state, ResetState)
        since = steps_since_reset(state.step, every)
        # From the weights, which some optimizers keep a copy of in their state.
        fresh = optimizer.init(updates if params is None else params)
        inner_state = keep_where(since == 0, fresh, state.inner_state)
        given = updates, inner_state, params
        updates, inner_state = optimizer.update(*given, **extra_args)
        step = jnp.asarray(optax.safe_increment(state.step))
        # At the start of training there was no reset, so nothing rises.
        rising = (step >= every) & (since < warmup)
        factor = jnp.where(rising, _rise(since, warmup), 1.0)

        def scaled(x: Any) -> jax.Array:
            wide = jnp.asarray(x).astype(wide_dtype(x))
            return cast_like(wide * factor.astype(wide.dtype), x)

        tree = jax.tree.map(scaled, clipped_leaves(updates))
        return put_back(tree, updates), ResetState(step, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def steps_since_reset(step: jax.Array, every: Any) -> jax.Array:
    """Steps since the last reset, which is before the updates number `every`,
    2 `every` and so on. Without resets, the number of the update.
    """
    # After the largest int32 the number stays, as the step does.
    number = jnp.asarray(optax.safe_increment(step))
    if every is None:
        return number
    if not isinstance(every, Tracer):
        every = min(int(every), LAST_STEP)
    # every=3: the steps 0, 1, 2, 3, 4, 5 give 1, 2, 0, 1, 2, 0.
    return number % jnp.asarray(every, jnp.int32)


def _rise(since: jax.Array, warmup: Any) -> jax.Array:
    """The factor so many steps after a reset."""
    # A warmup of 0 has no rise. It must only not divide by 0.
    done = since.astype(float) / jnp.maximum(jnp.asarray(warmup, float), 1)
    # 0.01 right after a reset, 0.505 half way.
    return 1 - 0.99 * (1 + jnp.cos(jnp.pi * done)) / 2
