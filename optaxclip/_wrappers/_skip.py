"""Skipping whole steps: where a gradient or a loss is out of the ordinary, nothing
moves.

    skip    if norm is NaN or inf, or norm > limit, or loss > limit of the loss
            limits from any rule
    then    updates = 0, and the inner optimizer's state stays bit for bit: moments,
            counters, weight decay

Clipping makes a bad gradient shorter but keeps its direction. Skipping lets the run go
on as if the batch had not come. The inner optimizer is computed in every step, and its
result is selected or not. There is no branch, so collectives inside run on all devices,
and under jit nothing is copied.

    skip_nonfinite(optimizer)                    a gradient with NaN or inf
    skip_spikes(optimizer, 20.0)                 a norm above a fixed limit, as
                                                 Megatron's grad_norm_skip_threshold
    skip_step(optimizer)                         OLMo-core: six deviations above the
                                                 mean of the last 128
    skip_spikes(optimizer, rules.log_z_score())  RNMT+: four deviations of the logarithm

Which rule? One that remembers raw norms (a window, as in `skip_step`) accepts a lasting
change within its length, but frequent spikes raise its limit. One that remembers what
it would have let through (`z_score`, `log_z_score`, `ema_ratio`) does not learn from
spikes. But while it skips nothing moves, so where norms rise for good it can stand
still for long: give it room (`z_score(4.0)`) or `max_consecutive`.

Clippers inside report the last step that was not skipped, `metrics` also what was.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._arguments import check_number, check_state
from .._core._limits import limit_of
from .._core._shares import moving_average
from .._norms._mesh_axes import MeshAxes
from .._norms._norms import global_norm
from ..rules._rule import Number, Rule
from ..rules._windowed_mean import step_rule
from ..rules._without_params import rule_without_params
from ._select_early import update_unless

CALL = "skip_spikes"


class SkipState(NamedTuple):
    """What a skipping optimizer knows after a step."""

    step: jax.Array  # int32[]: updates seen, skipped ones counted
    norm: jax.Array  # float32[]: the global norm of the last gradient
    limit: jax.Array  # float32[]: what it was held against
    value: jax.Array  # float32[]: the loss, 0 without a rule for it
    value_limit: jax.Array  # float32[]: what it was held against
    skipped: jax.Array  # int32[]: steps skipped
    skipped_recently: jax.Array  # float32[]: their share of about the last 100
    nonfinite: jax.Array  # int32[]: steps whose norm or loss was NaN or inf
    consecutive: jax.Array  # int32[]: steps skipped in a row, up to now
    memory: Any  # the rule's
    value_memory: Any  # the loss rule's
    inner_state: Any  # the optimizer's, after the last step that was not skipped


class _Rules(NamedTuple):
    """The rules of a skipping optimizer."""

    norm: Rule
    value: Rule  # of the loss


def skip_nonfinite(
    inner: optax.GradientTransformation,
    max_consecutive: ArrayLike | None = 100,
    *,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose gradient has a NaN or inf, or a norm beyond float32.

    The updates of a skipped step are 0, and the optimizer keeps its state.

    Args:
      inner: the optimizer.
      max_consecutive: after this many skipped steps in a row the next is not skipped,
        whatever it is. At least 0. None for never.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto", None, names, or a tree prefix of PartitionSpec.

    Returns:
      A transformation with a `SkipState`.

    Raises:
      ValueError: a `max_consecutive` that is negative or NaN. TypeError: one that is
        not a number.

    Example:
      >>> optimizer = optaxclip.skip_nonfinite(optax.sgd(0.5))
      >>> state = optimizer.init(jnp.zeros(2))
      >>> for grads in jnp.array([[1.0, 2.0], [jnp.nan, 2.0]]):
      ...     updates, state = optimizer.update(grads, state)
      ...     print(updates, state.skipped)
      [-0.5 -1. ] 0
      [0. 0.] 1
    """
    options = {"max_consecutive": max_consecutive, "mesh_axes": mesh_axes}
    return skip_spikes(inner, None, **options)


def skip_step(
    inner: optax.GradientTransformation,
    sigmas: Number = 6.0,
    window: Any = 128,
    *,
    on_loss: bool = True,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose norm or loss is more than six deviations above the mean of the
    last 128, as OLMo-core does.

    The deviation is that of a sample (ddof 1). What was skipped enters the window too,
    so that a lasting change is accepted within 128 steps. So do frequent spikes, and
    those that follow may get through. NaN does not enter it: in the public code one NaN
    loss rejects every step until it has left the window.

    Args:
      inner: the optimizer.
      sigmas: how many standard deviations above the mean are allowed. At least 0. A
        number or a schedule.
      window: how many norms and losses are remembered. A whole number, at least 1. The
        first step that can be skipped is number window / 2, 64 by default. The length
        is part of the state: a restored state goes on with its own.
      on_loss: whether to look at the loss too, which needs `update(..., value=loss)`.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto", None, names, or a tree prefix of PartitionSpec.

    Returns:
      A transformation with a `SkipState`.

    Raises:
      ValueError: a number out of its range, or `update` without `value` with `on_loss`.

    Example:
      >>> optimizer = optaxclip.skip_step(optax.sgd(0.5), window=4, on_loss=False)
      >>> state = optimizer.init(jnp.zeros(1))
      >>> for grads in jnp.array([[1.0], [2.0], [9.0]]):
      ...     updates, state = optimizer.update(grads, state)
      >>> print(updates, f"{state.limit:.4f}", state.skipped)
      [0.] 5.7426 1

    Reference: OLMo-core, `optim/skip_step_optimizer.py`. OLMo 2, 2025 (arXiv
    2501.00656).
    """
    rule = step_rule(sigmas, window)
    return skip_spikes(inner, rule, rule if on_loss else None, mesh_axes=mesh_axes)


def skip_spikes(
    inner: optax.GradientTransformation,
    rule: Any,
    loss_rule: Any = None,
    *,
    max_consecutive: ArrayLike | None = None,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose gradient norm, or loss, is over the limit of a rule, or is NaN
    or inf.

    The updates of a skipped step are 0, and the optimizer keeps its state bit for bit.

    Args:
      inner: the optimizer. It may need extra arguments, and gets `value`. It is always
        traced, so `nonfinite="raise"` inside needs `checkify`.
      rule: the limit of the global norm: a rule of `optaxclip.rules`, a number at least
        0, a schedule, or None for no limit.
      loss_rule: likewise for the loss, which `update(..., value=loss)` must be given
        then: a scalar, the same on all devices. It may be 0 or negative.
      max_consecutive: after this many skipped steps in a row the next is not skipped,
        whatever it is, because a run that only skips should fail visibly. At least 0.
        None for never.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto", None, names, or a tree prefix of PartitionSpec.

    Returns:
      A transformation with a `SkipState`. Its `update` also takes `grad_norm=`, a norm
      measured elsewhere.

    Raises:
      ValueError: a limit or `max_consecutive` that is negative or NaN, a rule that
        compares norms with weights, or `update` without `value` where there is a rule
        for the loss.
      TypeError: a limit that is not a number, or the state of another transformation.

    Example:
      >>> optimizer = optaxclip.skip_spikes(optax.adam(0.1), 10.0)
      >>> params = jnp.zeros(2)
      >>> state = optimizer.init(params)
      >>> for grads in jnp.array([[3.0, 4.0], [3e5, 4e5], [jnp.nan, 1.0]]):
      ...     updates, state = optimizer.update(grads, state, params)
      >>> print(updates, state.skipped, state.inner_state[0].count)
      [0. 0.] 2 1
    """
    optimizer = optax.with_extra_args_support(inner)
    norm_rule = rule_without_params(rule, f"{CALL}: rule")
    value_rule = rule_without_params(loss_rule, f"{CALL}: loss_rule")
    rules = _Rules(norm_rule, value_rule)
    if max_consecutive is not None:
        check_number(f"{CALL}: max_consecutive", max_consecutive)

    def init(params: Any) -> SkipState:
        return _first_state(rules, params, optimizer.init(params))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value: Any = None,
        grad_norm: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, SkipState]:
        check_state(CALL, state, SkipState)
        norm, loss = grad_norm, state.value
        if norm is None:
            norm = global_norm(updates, mesh_axes=mesh_axes)
        if loss_rule is not None:
            loss = _check_value(value)
        skip, new = _judge(rules, max_consecutive, state, norm, loss)
        if value is not None:
            extra_args["value"] = value
        run = partial(optimizer.update, **extra_args)
        updates, inner = update_unless(skip, run, updates, state.inner_state, params)
        return updates, new._replace(inner_state=inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _first_state(rules: _Rules, params: Any, inner_state: Any) -> SkipState:
    measure = partial(global_norm, mesh_axes=None)
    norm = jnp.zeros((), jax.eval_shape(measure, params).dtype)
    loss = jnp.zeros(())
    # Each counter is its own array, so that the state can be donated.
    return SkipState(
        step=jnp.zeros((), jnp.int32),
        norm=norm,
        limit=jnp.full_like(norm, jnp.inf),
        value=loss,
        value_limit=jnp.full_like(loss, jnp.inf),
        skipped=jnp.zeros((), jnp.int32),
        skipped_recently=jnp.zeros((), jnp.float32),
        nonfinite=jnp.zeros((), jnp.int32),
        consecutive=jnp.zeros((), jnp.int32),
        memory=rules.norm.init(jnp.zeros_like(norm)),
        value_memory=rules.value.init(jnp.zeros_like(loss)),
        inner_state=inner_state,
    )


def _judge(
    rules: _Rules, max_consecutive: Any, state: SkipState, norm: Any, loss: Any
) -> tuple[jax.Array, SkipState]:
    """Whether to skip the step, and the new state but for the optimizer's."""
    norm = jnp.asarray(norm).astype(state.norm.dtype)
    loss = jnp.asarray(loss).astype(state.value.dtype)
    asked = rules.norm, norm, state.memory, state.step
    limit, memory = limit_of(*asked, argument=f"{CALL}: rule")
    asked = rules.value, loss, state.value_memory, state.step
    found = limit_of(*asked, argument=f"{CALL}: loss_rule", signed=True)
    value_limit, value_memory = found

    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    skip = ~(finite & (norm <= limit) & (loss <= value_limit))
    if max_consecutive is not None:
        skip = skip & (state.consecutive < max_consecutive)
    return skip, SkipState(
        step=jnp.asarray(optax.safe_increment(state.step)),
        norm=norm,
        limit=limit,
        value=loss,
        value_limit=value_limit,
        skipped=state.skipped + skip.astype(jnp.int32),
        skipped_recently=moving_average(state.skipped_recently, skip, state.step),
        nonfinite=state.nonfinite + (~finite).astype(jnp.int32),
        consecutive=jnp.where(skip, state.consecutive + 1, 0),
        memory=memory,
        value_memory=value_memory,
        inner_state=state.inner_state,
    )


def _check_value(value: Any) -> Any:
    """The loss, if `update` was given it."""
    if value is None:
        raise ValueError(
            f"{CALL}: loss_rule judges the loss: call update(grads, state, params, "
            "value=loss)."
        )
    return value
