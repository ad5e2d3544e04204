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
spikes. But if norms rise for good it may not accept them for a long time, and no weight
moves while it skips: give it room (`z_score(4.0)`) or `max_consecutive`.

The gradient is measured as it comes in, so clippers go inside. Behind a clipper no norm
is above its limit, and no step is skipped for its norm.

Clippers inside the optimizer report the last step that was not skipped. `metrics` shows
what was skipped as `skip/...`. `judge.py` decides, for `record_spikes` as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from .._arguments import checks
from .._clippers.by_value import ClipByValueState
from .._clippers.spam import SpamState
from .._devices.mesh import MeshAxes
from .._numbers import number_for_jit
from .._state.interop import exported
from .._state.state import ClipState
from .._trees import PyTree, arrays_of
from ..rules._limits import Constant, Limit, rule_of_norm_alone
from ..rules._memory import count_up, has_reached, in_buffer_of, moving_average
from ..rules._rule import Number
from ..rules._windows import skip_step_rule
from .carry import CarryState
from .judge import Judge, Judgement
from .rows import RowNames, StateArrays, pack, row_property, unpack
from .select_early import update_unless


@exported
class SkipState(NamedTuple):
    """What a skipping optimizer knows after a step. `metrics` reads it by name.

    Attributes:
      skip_counts: int32[4 + n]: `step`, `skipped`, `nonfinite` and `consecutive`, and
        then n numbers that rules remember.
      skip_numbers: float32[5 + n] (float64 where a leaf has 64 bits): `norm`, `limit`,
        `loss`, `loss_limit` and `skipped_recently`, and then n numbers that rules
        remember.
      windows, loss_windows: what the rules of norm and loss remember beyond that.
      inner_state: the optimizer's state after the last step that was not skipped.
      step: updates seen, skipped ones counted.
      norm: the global norm of the last gradient.
      limit: what the norm was held against.
      loss: the last loss that was judged. -inf before the first, and where no rule
        looks at it.
      loss_limit: what the loss was held against.
      skipped: steps skipped.
      skipped_recently: the share of skipped steps among about the last 100.
      nonfinite: steps whose norm or loss was NaN or inf.
      consecutive: steps skipped in a row, up to now.
    """

    skip_counts: Array
    skip_numbers: Array
    windows: PyTree
    loss_windows: PyTree
    inner_state: PyTree

    ROWS = RowNames(
        counts=("step", "skipped", "nonfinite", "consecutive"),
        numbers=("norm", "limit", "loss", "loss_limit", "skipped_recently"),
    )
    step = row_property(ROWS, "step")
    skipped = row_property(ROWS, "skipped")
    nonfinite = row_property(ROWS, "nonfinite")
    consecutive = row_property(ROWS, "consecutive")
    norm = row_property(ROWS, "norm")
    limit = row_property(ROWS, "limit")
    loss = row_property(ROWS, "loss")
    loss_limit = row_property(ROWS, "loss_limit")
    skipped_recently = row_property(ROWS, "skipped_recently")

    @property
    def memories(self) -> tuple[PyTree, PyTree]:
        """What the rules of norm and loss remember."""
        return unpack(self.ROWS, self)


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
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`.

    Returns:
      A transformation with a `SkipState`. All extra arguments of its `update` go on to
      the optimizer, and `grad_norm=`, a norm measured elsewhere, is used here too. A
      derivative that is taken through a skipped step, such as by a learning rate, is
      NaN. With `optax.apply_if_finite` it is finite.

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
    # Without a limit only NaN and inf are rejected. No loss is looked at.
    judge = Judge("skip_nonfinite", Constant(None), None, mesh_axes)
    return _without_rejected_steps(inner, judge, max_consecutive)


def skip_step(
    inner: optax.GradientTransformation,
    sigmas: Number = 6.0,
    window: int | Array = 128,
    *,
    on_loss: bool | None = None,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose norm or loss is more than six deviations above the mean of the
    last 128, as OLMo-core does.

    The loss must be the same on all devices, so average it with `lax.pmean`. In pmap
    and in shard_map(check_vma=False) a loss that differs is not noticed, and the
    replicas drift apart: see the second example.

    The gradient is measured as it comes in. So the clipper goes inside,
    `skip_step(optax.chain(clip, adam))`. Behind a clipper no norm is above its limit,
    and a broken batch passes.

    The deviation is the sample's (ddof 1). Skipped norms and losses enter the
    window too. So a lasting change is accepted within 128 steps, and after many spikes
    a later one may get through. NaN does not enter the window, where in OLMo-core it
    rejects every step until it has left. A run that only has NaN is skipped without
    end: `skip/consecutive_count` of `metrics` says how long.

    Args:
      inner: the whole optimizer. Around a clipper alone, the optimizer after it would
        still move in a skipped step, by its momentum and weight decay.
      sigmas: how many standard deviations above the mean are allowed. At least 0. A
        number or a schedule.
      window: how many norms and losses are remembered. A whole number, at least 2. The
        first step that can be skipped is step max(3, window // 2), counted from 1: 64
        by default. The length is part of the state: a restored state goes on with its
        own.
      on_loss: whether to look at the loss too. None looks at it in the steps in which
        `update(..., value=loss)` is given it, True demands it, False ignores it.
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`.

    Returns:
      A transformation with a `SkipState`. All extra arguments of its `update` go on to
      the optimizer, and `grad_norm=`, a norm measured elsewhere, is used here too: the
      one before any clip.

    Raises:
      ValueError: a number out of its range, `update` without `value` with
        `on_loss=True`, or with a `value` that is not a scalar, or that differs between
        devices where types show it.
      TypeError: something that is not a number, an `on_loss` that is not None, True or
        False, or a loss that `update` gets as `loss`, `losses`, `loss_value` or
        `train_loss`, and not as `value`.

    Example:
      >>> optimizer = optaxclip.skip_step(optax.sgd(0.5), window=4)
      >>> state = optimizer.init(jnp.zeros(1))
      >>> for grads in jnp.array([[1.0], [2.0], [9.0]]):
      ...     updates, state = optimizer.update(grads, state)
      >>> print(updates, f"{state.limit:.4f}", state.skipped)
      [0.] 5.7426 1

      Do two devices have the same loss? Here vmap stands for pmap:

      >>> def same(loss):
      ...     return optaxclip.check_replicated(loss, "devices")
      >>> print(jax.vmap(same, axis_name="devices")(jnp.array([0.5, 0.7])))
      [False False]

    Reference: OLMo-core, `optim/skip_step_optimizer.py`. OLMo 2, 2025 (arXiv
    2501.00656).
    """
    call = "skip_step"
    if on_loss is not None:
        checks.check_flag(f"{call}: on_loss", on_loss, "None, True or False")
    # Norm and loss share the rule, and each has a memory in the state.
    rule = skip_step_rule(call, sigmas, window)
    # With None a step without a loss is judged by its norm alone. True demands one.
    loss_rule = rule if on_loss is None or on_loss else None
    loss_argument = "on_loss=True" if on_loss else ""
    return _without_rejected_steps(
        inner, Judge(call, rule, loss_rule, mesh_axes, loss_argument)
    )


def skip_spikes(
    inner: optax.GradientTransformation,
    rule: Limit,
    loss_rule: Limit = None,
    *,
    max_consecutive: ArrayLike | None = None,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose gradient norm, or loss, is over the limit of a rule, or is NaN
    or inf.

    The loss must be the same on all devices, so average it with `lax.pmean`. In pmap
    and in shard_map(check_vma=False) a loss that differs is not noticed, and the
    replicas drift apart: `check_replicated` shows it, as in `skip_step`.

    The gradient is measured as it comes in. So the clipper goes inside,
    `skip_spikes(optax.chain(clip, adam), rule)`. Behind a clipper no norm is above its
    limit, and a broken batch passes.

    The updates of a skipped step are 0, and the optimizer keeps its state bit for bit.

    Args:
      inner: the whole optimizer, since what comes after it would still move in a
        skipped step. It is always traced, so `nonfinite="raise"` inside needs
        `checkify`.
      rule: the limit of the global norm: a rule of `optaxclip.rules`, a number at least
        0, a schedule, or None for no limit.
      loss_rule: likewise for the loss, which `update(..., value=loss)` must be given
        then, a scalar. For a loss that may be 0 or negative take `windowed_mean`,
        `z_score` or a number. The limit of most other rules is a multiple of earlier
        values, and twice -1 is below -1.
      max_consecutive: after this many skipped steps in a row the next is not skipped,
        whatever it is, because a run that only skips should fail visibly. At least 0.
        None for never.
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`.

    Returns:
      A transformation with a `SkipState`. All extra arguments of its `update` go on to
      the optimizer, and `grad_norm=`, a norm measured elsewhere, is used here too: the
      one before any clip.

    Raises:
      ValueError: a limit or `max_consecutive` that is negative or NaN, a rule that
        compares norms with weights, `update` without `value` where there is a rule for
        the loss, or with a `value` that differs between devices where types show it.
      TypeError: a limit that is not a number, the state of another transformation, or
        a loss that `update` gets as `loss`, `losses`, `loss_value` or `train_loss`,
        and not as `value`.

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
    rule = rule_of_norm_alone(rule, f"{call}: rule")
    # loss_rule=None looks at no loss. rule=None still looks for NaN and inf.
    if loss_rule is not None:
        loss_rule = rule_of_norm_alone(loss_rule, f"{call}: loss_rule")
    judge = Judge(call, rule, loss_rule, mesh_axes, "loss_rule")
    return _without_rejected_steps(inner, judge, max_consecutive)


def _without_rejected_steps(
    inner: optax.GradientTransformation,
    judge: Judge,
    max_consecutive: ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer without the steps that the judge rejects."""
    call = judge.call
    optimizer = checks.with_extra_args(f"{call}: inner", inner)
    if max_consecutive is not None:
        argument = f"{call}: max_consecutive"
        checks.check_number(argument, max_consecutive, is_scalar=True)
        max_consecutive = number_for_jit(max_consecutive)

    def init(params: PyTree) -> SkipState:
        inner_state = optimizer.init(params)
        _warn_of_clippers(call, inner_state)
        arrays = pack(SkipState.ROWS, *judge.before_first_step(params))
        return judge.varying_if_trained_alone(SkipState(*arrays, inner_state), params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        checks.check_state(call, state, SkipState)
        judgement = judge.judgement_of(state, updates, extra_args)
        skip = judgement.is_rejected
        if max_consecutive is not None:
            skip = skip & ~has_reached(state.consecutive, max_consecutive)
        updates, inner_state = update_unless(
            skip, optimizer, updates, state.inner_state, arrays_of(params), extra_args
        )
        return updates, _next_state(state, judgement, skip, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _next_state(
    state: SkipState, judgement: Judgement, skip: Array, inner_state: PyTree
) -> SkipState:
    """The state after a step."""
    step = count_up(state.step)
    arrays = pack(
        SkipState.ROWS,
        judgement.norm,
        judgement.loss,
        step=step,
        skipped=count_up(state.skipped, skip),
        nonfinite=count_up(state.nonfinite, judgement.is_nonfinite),
        consecutive=jnp.where(skip, count_up(state.consecutive), 0),
        skipped_recently=moving_average(state.skipped_recently, skip, step),
    )
    # All fields but the inner state.
    old_arrays = StateArrays(*state[:-1])
    arrays: StateArrays = jax.tree.map(in_buffer_of, arrays, old_arrays)
    return SkipState(*arrays, inner_state)


# EmptyState is missing: optax's clippers have it, but so does `optax.scale(-0.1)`.
STATES_OF_CLIPPERS = (ClipState, ClipByValueState, SpamState, CarryState)


def _warn_of_clippers(call: str, inner_state: PyTree) -> None:
    """Warns where only clippers are skipped, and not the optimizer behind them."""
    # The state of a chain is a tuple, which may be empty.
    states = inner_state if type(inner_state) is tuple else (inner_state,)
    if states and all(isinstance(state, STATES_OF_CLIPPERS) for state in states):
        checks.warn_user(
            f"{call}: inner has only a {type(states[-1]).__name__}. In a skipped step "
            "the optimizer behind it still moves, by its momentum and weight decay. "
            f"Put it around the whole: {call}(optax.chain(clipper, optimizer))."
        )
