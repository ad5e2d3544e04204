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

Clippers inside the optimizer report the last step that was not skipped. `metrics` shows
what was skipped as `skip/...`.
"""

from __future__ import annotations

from typing import Any

import optax
from jax.typing import ArrayLike

from .._checks import check_flag
from .._mesh import MeshAxes
from ..rules._constant import rule_of
from ..rules._rule import Number
from ..rules._windowed_mean import step_rule
from ..rules._without_params import rule_without_params
from ._skipping import Skipper, skipping


def skip_nonfinite(
    inner: optax.GradientTransformation,
    max_consecutive: ArrayLike | None = 100,
    *,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose gradient has a NaN or inf, or a norm beyond its dtype.

    The updates of a skipped step are 0, and the optimizer keeps its state.

    Args:
      inner: the whole optimizer. Around a clipper alone, the optimizer after it would
        still move in a skipped step, by its momentum and weight decay.
      max_consecutive: after this many skipped steps in a row the next is not skipped,
        whatever it is. At least 0. None for never.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec.

    Returns:
      A transformation with a `SkipState`. A derivative through a step that it skips,
      such as that by a learning rate, is NaN: `optax.apply_if_finite` has one.

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
    call = "skip_nonfinite"
    # No limit: only NaN and inf are over it.
    rule = rule_of(None, f"{call}: rule")
    # Without a rule for the loss. `value` only goes on to the optimizer.
    skipper = Skipper(call, rule, None, False, max_consecutive, mesh_axes)
    return skipping(inner, skipper)


def skip_step(
    inner: optax.GradientTransformation,
    sigmas: Number = 6.0,
    window: Any = 128,
    *,
    on_loss: bool | None = None,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose norm or loss is more than six deviations above the mean of the
    last 128, as OLMo-core does.

    The deviation is that of a sample (ddof 1). Skipped norms and losses enter the
    window too. So a lasting change is accepted within 128 steps, and after many spikes
    a later one may get through. NaN does not enter the window: in the public code one
    NaN loss rejects every step until it has left the window. Here a run that only has
    NaN is skipped without end, and `skip/consecutive_count` in `metrics` says how long.

    Args:
      inner: the whole optimizer. Around a clipper alone, the optimizer after it would
        still move in a skipped step, by its momentum and weight decay.
      sigmas: how many standard deviations above the mean are allowed. At least 0. A
        number or a schedule.
      window: how many norms and losses are remembered. A whole number, at least 2. The
        first step that can be skipped is number max(3, window // 2), 64 by default,
        counted from 1. The length is part of the state: a restored state goes on with
        its own.
      on_loss: whether to look at the loss too. None looks at it in the steps in which
        `update(..., value=loss)` is given it, True demands it, False ignores it. Its
        name is `value`, as in optax: under another, such as `loss`, it only goes on to
        the optimizer.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec.

    Returns:
      A transformation with a `SkipState`.

    Raises:
      ValueError: a number out of its range, `update` without `value` with
        `on_loss=True`, or with a `value` that is no scalar.
      TypeError: something that is no number, or an `on_loss` that is not one of these.

    Example:
      >>> optimizer = optaxclip.skip_step(optax.sgd(0.5), window=4)
      >>> state = optimizer.init(jnp.zeros(1))
      >>> for grads in jnp.array([[1.0], [2.0], [9.0]]):
      ...     updates, state = optimizer.update(grads, state)
      >>> print(updates, f"{state.limit:.4f}", state.skipped)
      [0.] 5.7426 1

    Reference: OLMo-core, `optim/skip_step_optimizer.py`. OLMo 2, 2025 (arXiv
    2501.00656).
    """
    call = "skip_step"
    if on_loss is not None:
        check_flag(f"{call}: on_loss", on_loss, "None, True or False")
    # Norm and loss share the rule, and each has a memory in the state.
    rule = step_rule(sigmas, window, call=call)
    # With None a step without a loss is judged by its norm alone.
    loss_rule = rule if on_loss is None or on_loss else None
    skipper = Skipper(call, rule, loss_rule, bool(on_loss), None, mesh_axes)
    return skipping(inner, skipper)


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
      inner: the whole optimizer, since what comes after it would still move in a
        skipped step. It may need extra arguments, and gets `value`. It is always
        traced, so `nonfinite="raise"` inside needs `checkify`.
      rule: the limit of the global norm: a rule of `optaxclip.rules`, a number at least
        0, a schedule, or None for no limit.
      loss_rule: likewise for the loss, which `update(..., value=loss)` must be given
        then: a scalar, the same on all devices. For a loss that may be 0 or negative
        take `windowed_mean`, `z_score` or a number. The limit of most other rules is a
        multiple of earlier values, and twice -1 is below -1.
      max_consecutive: after this many skipped steps in a row the next is not skipped,
        whatever it is, because a run that only skips should fail visibly. At least 0.
        None for never.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec.

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
    call = "skip_spikes"
    # The norm of the weights is not measured here, so `share_of_params` is refused.
    judged = rule_without_params(rule, f"{call}: rule")
    loss_judged = None
    # loss_rule=None looks at no loss. rule=None still looks for NaN and inf.
    if loss_rule is not None:
        loss_judged = rule_without_params(loss_rule, f"{call}: loss_rule")
    has_loss = loss_judged is not None
    skipper = Skipper(
        call, judged, loss_judged, has_loss, max_consecutive, mesh_axes
    )
    return skipping(inner, skipper)
