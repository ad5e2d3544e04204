"""Skipping whole steps: where the gradient (or the loss) is not to be believed, nothing
moves.

    skip    if norm is NaN or inf, or norm > limit, or loss > limit of the loss
            limits from any rule
    then    updates = 0, and the inner optimizer's state stays bit for bit: moments,
            counters, weight decay

Clipping makes a bad gradient shorter but keeps its direction; skipping lets the run go
on as if the batch had not come. The inner optimizer is computed in every step, and its
result is chosen or not: no branch, so collectives inside run on all devices, and under
jit nothing is copied.

    skip_nonfinite(optimizer)                        a gradient with NaN or inf
    skip_spikes(optimizer, 20.0)                     a norm above a fixed limit
                                                     (Megatron's
                                                     grad_norm_skip_threshold)
    skip_step(optimizer)                             OLMo-core: six deviations above the
                                                     last 128
    skip_spikes(optimizer, log_z_score())            RNMT+: four deviations of the
                                                     logarithm

Which rule: one that remembers raw norms (a window, as in `skip_step`) accepts a lasting
change within its length, but frequent spikes raise its limit; one that remembers what
it would have let through (`z_score`, `log_z_score`, `ema_ratio`) does not hear of
spikes, but while it skips nothing moves, so where norms rise for good it can stand
still for long: give it room (`z_score(4.0)`) or `max_consecutive`.

Clippers inside the optimizer report the last step that was not skipped; `metrics` shows
what was skipped as `skip/...`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .adaptive import windowed_mean
from .._arguments import check_number, check_state
from .._core._kernel import ask
from .._norms._norms import global_norm
from .._wrappers._select_early import update_unless
from .._norms._types import MeshAxes
from ..rules._constant import Threshold, rule_of


class SkipState(NamedTuple):
    """What a skipping optimizer knows after a step."""

    step: jax.Array  # int32[]: updates seen, skipped ones counted
    norm: jax.Array  # float32[]: the global norm of the last gradient
    limit: jax.Array  # float32[]: what it was held against
    value: jax.Array  # float32[]: the loss, 0 without a rule for it
    value_limit: jax.Array  # float32[]: what it was held against
    skipped: jax.Array  # int32[]: steps skipped
    nonfinite: jax.Array  # int32[]: steps whose norm or loss was NaN or inf
    consecutive: jax.Array  # int32[]: steps skipped in a row, up to now
    memory: Any  # the rule's
    value_memory: Any  # the loss rule's
    inner_state: Any  # the optimizer's, after the last step that was not skipped


def skip_nonfinite(
    inner: optax.GradientTransformation,
    max_consecutive: Any = 100,
    *,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose gradient has a NaN or inf, or a norm beyond float32.

    Args:
      inner: the optimizer.
      max_consecutive, axes: as in `skip_spikes`.
    """
    return skip_spikes(inner, None, max_consecutive=max_consecutive, mesh_axes=mesh_axes)


def skip_step(
    inner: optax.GradientTransformation,
    sigmas: Any = 6.0,
    window: Any = 128,
    *,
    on_loss: bool = True,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose norm or loss is more than six deviations above the mean of the
    last 128, as OLMo-core does.

    The deviation is that of a sample (ddof 1). What was skipped enters the window too,
    so that a lasting change is accepted within 128 steps; so do frequent spikes, and
    those that follow may get through. NaN does not enter it: in the public code one NaN
    loss rejects every step until it has left the window.

    Args:
      inner: the optimizer.
      sigmas, window: see `windowed_mean`. The first step that can be skipped is number
        window / 2, 64 by default. The length of the window is part of the state: a
        restored state goes on with its own.
      on_loss: look at the loss too: call `update(..., value=loss)`.
      axes: as in `skip_spikes`.

    Reference: OLMo-core, `optim/skip_step_optimizer.py`; OLMo 2, 2025 (arXiv
    2501.00656).
    """
    rule = step_rule(sigmas, window)
    return skip_spikes(inner, rule, rule if on_loss else None, mesh_axes=mesh_axes)


def step_rule(sigmas: Any = 6.0, window: Any = 128) -> Threshold:
    """The rule of `skip_step`."""
    return windowed_mean(sigmas, window, ddof=1, warmup=max(2, window // 2) - 1)


def skip_spikes(
    inner: optax.GradientTransformation,
    rule: Any,
    loss_rule: Any = None,
    *,
    max_consecutive: Any = None,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose gradient norm, or loss, is over the limit of a rule, or is NaN
    or inf.

    Args:
      inner: the optimizer. It may need extra arguments; `value` is handed on to it. It
        is always traced, so `nonfinite="raise"` inside needs `checkify`.
      rule: a `Threshold` for the global norm, a number, a schedule, or None for no
        limit.
      loss_rule: likewise for the loss, which `update(..., value=loss)` must be given
        then: a scalar, the same on all devices. It may be 0 or negative.
      max_consecutive: after this many skipped steps in a row the next is not skipped,
        whatever it is: a run that only skips had better fail visibly. None for never.
        At least 0.
      axes: as in `clip_by_global_norm`.

    Returns:
      A transformation with a `SkipState`.

    Raises:
      ValueError: `update` without `value` where there is a rule for the loss.

    Example:
      >>> import optaxclip
      >>> optimizer = optaxclip.skip_spikes(optax.adam(0.1), 10.0)
      >>> params = jnp.zeros(2)
      >>> state = optimizer.init(params)
      >>> for grads in jnp.array([[3.0, 4.0], [3e5, 4e5], [jnp.nan, 1.0]]):
      ...     updates, state = optimizer.update(grads, state, params)
      >>> print(updates, state.skipped, state.inner_state[0].count)
      [0. 0.] 2 1
    """
    call = "skip_spikes"
    optimizer = optax.with_extra_args_support(inner)
    gate = rule_of(rule, f"{call}: rule")
    loss_gate = rule_of(loss_rule, f"{call}: loss_rule")
    if max_consecutive is not None:
        check_number(f"{call}: max_consecutive", max_consecutive)

    def init(params: Any) -> SkipState:
        norm = jnp.zeros(
            (), jax.eval_shape(lambda tree: global_norm(tree, mesh_axes=None), params).dtype
        )
        loss = jnp.zeros(())

        def count() -> (
            jax.Array
        ):  # each its own array, so that the state can be donated
            return jnp.zeros((), jnp.int32)

        return SkipState(
            step=count(),
            norm=norm,
            limit=jnp.full_like(norm, jnp.inf),
            value=loss,
            value_limit=jnp.full_like(loss, jnp.inf),
            skipped=count(),
            nonfinite=count(),
            consecutive=count(),
            memory=gate.init(jnp.zeros_like(norm)),
            value_memory=loss_gate.init(jnp.zeros_like(loss)),
            inner_state=optimizer.init(params),
        )

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value: Any = None,
        grad_norm: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, SkipState]:
        check_state(call, state, SkipState)
        if loss_rule is not None and value is None:
            raise ValueError(
                f"{call}: loss_rule judges the loss: call update(grads, state, params, "
                "value=loss)."
            )
        norm = (
            global_norm(updates, mesh_axes=mesh_axes)
            if grad_norm is None
            else jnp.asarray(grad_norm).astype(state.norm.dtype)
        )
        loss = (
            state.value
            if loss_rule is None
            else jnp.asarray(value).astype(state.value.dtype)
        )
        limit, memory = ask(
            gate, norm, state.memory, state.step, argument=f"{call}: rule"
        )
        value_limit, value_memory = ask(
            loss_gate,
            loss,
            state.value_memory,
            state.step,
            argument=f"{call}: loss_rule",
            signed=True,
        )
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        bad = ~(finite & (norm <= limit) & (loss <= value_limit))
        skip = (
            bad
            if max_consecutive is None
            else bad & (state.consecutive < max_consecutive)
        )

        if value is not None:
            extra_args["value"] = value
        new_updates, inner_state = update_unless(
            skip,
            partial(optimizer.update, **extra_args),
            updates,
            state.inner_state,
            params,
        )
        return new_updates, SkipState(
            step=jnp.asarray(optax.safe_increment(state.step)),
            norm=norm,
            limit=limit,
            value=loss,
            value_limit=value_limit,
            skipped=state.skipped + skip.astype(jnp.int32),
            nonfinite=state.nonfinite + (~finite).astype(jnp.int32),
            consecutive=jnp.where(skip, state.consecutive + 1, 0),
            memory=memory,
            value_memory=value_memory,
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)
