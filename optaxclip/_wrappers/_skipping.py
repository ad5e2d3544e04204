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

The norm is that of the gradient as it comes in. Clippers go inside: behind one of them
no norm is above its limit, and nothing is skipped by its norm.

Clippers inside the optimizer report the last step that was not skipped. `metrics` shows
what was skipped as `skip/...`. `record_spikes` uses the same judge, and skips nothing.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from .. import _checks as checks
from .._exported import exported
from .._mesh import MeshAxes, typed_as_varying, varying
from .._names import OF_UPDATE
from .._norms import GlobalNorm
from .._packed import PyTree, packed, rows_from, unpacked
from .._state import ClipState
from .._trees import arrays_of, clipped_leaves
from ..rules._limits import Constant, rule_without_params
from ..rules._memory import count_up, in_place, moving_average
from ..rules._rule import Number, Rule, limit_of, limit_of_jitted
from ..rules._windows import step_rule
from ._select_early import update_unless


@exported
class SkipState(NamedTuple):
    """What a skipping optimizer knows after a step. `metrics` reads it by name.

    Attributes:
      skip_counts: int32[4]: `step`, `skipped`, `nonfinite` and `consecutive`. Further
        numbers are what rules remember.
      skip_numbers: float32[5] (float64 where a leaf has 64 bits): `norm`, `limit`,
        `loss`, `loss_limit` and `skipped_recently`. Further numbers are what rules
        remember.
      windows, loss_windows: what the rules of norm and loss remember beyond that.
      inner_state: the optimizer's state after the last step that was not skipped.
      step: updates seen, skipped ones counted.
      norm: the global norm of the last gradient.
      limit: what the norm was held against.
      loss: the last loss, -inf until one arrives, and without a rule for it.
      loss_limit: what the loss was held against.
      skipped: steps skipped.
      skipped_recently: their share of about the last 100 steps.
      nonfinite: steps whose norm or loss was NaN or inf.
      consecutive: steps skipped in a row, up to now.
    """

    skip_counts: jax.Array
    skip_numbers: jax.Array
    windows: PyTree
    loss_windows: PyTree
    inner_state: PyTree

    ROWS = (
        ("skip_counts", ("step", "skipped", "nonfinite", "consecutive")),
        ("skip_numbers", ("norm", "limit", "loss", "loss_limit", "skipped_recently")),
    )

    # States of several models have axes in front.
    step = property(lambda self: self.skip_counts[..., 0])
    skipped = property(lambda self: self.skip_counts[..., 1])
    nonfinite = property(lambda self: self.skip_counts[..., 2])
    consecutive = property(lambda self: self.skip_counts[..., 3])
    norm = property(lambda self: self.skip_numbers[..., 0])
    limit = property(lambda self: self.skip_numbers[..., 1])
    loss = property(lambda self: self.skip_numbers[..., 2])
    loss_limit = property(lambda self: self.skip_numbers[..., 3])
    skipped_recently = property(lambda self: self.skip_numbers[..., 4])

    @property
    def memories(self) -> tuple[PyTree, PyTree]:
        """What the rules of norm and loss remember."""
        return unpacked(
            (self.windows, self.loss_windows),
            counts=rows_from(self.skip_counts, 4),
            numbers=rows_from(self.skip_numbers, 5),
        )


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
      A transformation with a `SkipState`. All extra arguments of its `update` go on to
      the optimizer, and `grad_norm=`, a norm measured elsewhere, is used here too. A
      derivative through a step that it skips, such as that by a learning rate, is NaN:
      `optax.apply_if_finite` has one.

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
    # No limit: only NaN and inf are over it. `value` only goes on to the optimizer.
    judge = Judge("skip_nonfinite", Constant(None), None, mesh_axes)
    return _skipping(inner, judge, max_consecutive)


def skip_step(
    inner: optax.GradientTransformation,
    sigmas: Number = 6.0,
    window: Any = 128,
    *,
    on_loss: bool | None = None,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose norm or loss is more than six deviations above the mean of the
    last 128, as OLMo-core does. The loss must be the same on all devices, so average it
    with `lax.pmean`. In pmap and in shard_map(check_vma=False) nothing shows that it
    differs, and the replicas part silently: see the second example.

    The norm is that of the gradient as it comes in. So the clipper goes inside,
    `skip_step(optax.chain(clip, adam))`. Behind a clipper no norm is above its limit,
    and a broken batch passes.

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
        `update(..., value=loss)` is given it, True demands it, False ignores it.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec.

    Returns:
      A transformation with a `SkipState`. All extra arguments of its `update` go on to
      the optimizer, and `grad_norm=`, a norm measured elsewhere, is used here too: the
      one before any clip.

    Raises:
      ValueError: a number out of its range, `update` without `value` with
        `on_loss=True`, or with a `value` that is no scalar, or that differs between
        devices where types show it.
      TypeError: something that is no number, an `on_loss` that is not one of these, or
        a loss under another name than `value`.

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
    rule = step_rule(sigmas, window, call=call)
    # With None a step without a loss is judged by its norm alone.
    loss_rule = rule if on_loss is None or on_loss else None
    demanded_by = "on_loss=True" if on_loss else ""
    return _skipping(inner, Judge(call, rule, loss_rule, mesh_axes, demanded_by))


def skip_spikes(
    inner: optax.GradientTransformation,
    rule: Any,
    loss_rule: Any = None,
    *,
    max_consecutive: ArrayLike | None = None,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose gradient norm, or loss, is over the limit of a rule, or is NaN
    or inf. The loss must be the same on all devices, so average it with `lax.pmean`. In
    pmap and in shard_map(check_vma=False) nothing shows that it differs, and the
    replicas part silently: `check_replicated` shows it, as in `skip_step`.

    The norm is that of the gradient as it comes in. So the clipper goes inside,
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
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec.

    Returns:
      A transformation with a `SkipState`. All extra arguments of its `update` go on to
      the optimizer, and `grad_norm=`, a norm measured elsewhere, is used here too: the
      one before any clip.

    Raises:
      ValueError: a limit or `max_consecutive` that is negative or NaN, a rule that
        compares norms with weights, `update` without `value` where there is a rule for
        the loss, or with a `value` that differs between devices where types show it.
      TypeError: a limit that is not a number, the state of another transformation, or
        a loss under another name than `value`.

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
    rule = rule_without_params(rule, f"{call}: rule")
    # loss_rule=None looks at no loss. rule=None still looks for NaN and inf.
    if loss_rule is not None:
        loss_rule = rule_without_params(loss_rule, f"{call}: loss_rule")
    judge = Judge(call, rule, loss_rule, mesh_axes, "loss_rule")
    return _skipping(inner, judge, max_consecutive)


def _skipping(
    inner: optax.GradientTransformation, judge: Judge, most: Any = None
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose steps are judged, and at most so many skipped in a row."""
    call = judge.call
    optimizer = checks.with_extra_args(f"{call}: inner", inner)
    if most is not None:
        checks.check_number(f"{call}: max_consecutive", most, is_scalar=True)
        most = checks.number_for_jit(most)

    def init(params: Any) -> SkipState:
        inner_state = optimizer.init(params)
        _warn_of_clippers(call, inner_state)
        first = judge.first_judgement(params)
        no_steps = jnp.zeros((), jnp.int32)
        arrays = judge.packed(
            first, counts=[no_steps] * 4, shares=[jnp.zeros((), jnp.float32)]
        )
        return judge.typed(SkipState(*arrays, inner_state), params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        checks.check_state(call, state, SkipState)
        norm, loss = judge.numbers_of(updates, extra_args)
        judgement = judge.judged(state, norm, loss)
        skip = judgement.over
        if most is not None:
            skip = skip & (state.consecutive < most)
        step = count_up(state.step)
        run = partial(optimizer.update, **extra_args)
        updates, inner_state = update_unless(
            skip, run, updates, state.inner_state, arrays_of(params)
        )
        arrays = judge.packed(
            judgement,
            counts=[
                step,
                count_up(state.skipped, skip),
                count_up(state.nonfinite, judgement.broken),
                jnp.where(skip, count_up(state.consecutive), 0),
            ],
            shares=[moving_average(state.skipped_recently, skip, step)],
        )
        counts, numbers, windows, loss_windows = jax.tree.map(
            in_place, arrays, tuple(state[:4])
        )
        new_state = SkipState(counts, numbers, windows, loss_windows, inner_state)
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _warn_of_clippers(call: str, inner_state: Any) -> None:
    """Warns where only clippers are skipped, and not the optimizer behind them."""
    # A chain has a tuple of them. That of an optimizer may be empty.
    states = inner_state if type(inner_state) is tuple else (inner_state,)
    if states and all(isinstance(state, ClipState) for state in states):
        warnings.warn(
            f"{call}: inner has only a ClipState. In a skipped step the optimizer "
            "behind it still moves, by its momentum and weight decay. Put it around "
            f"the whole: {call}(optax.chain(clipper, optimizer)).",
            stacklevel=4,
        )


class Judgement(NamedTuple):
    """Norm and loss of a step, what they were held against, and what their rules
    remember from now on.
    """

    norm: jax.Array
    limit: jax.Array
    loss: jax.Array
    loss_limit: jax.Array
    memory: PyTree
    loss_memory: PyTree
    over: jax.Array  # bool[]: whether norm or loss is over its limit
    broken: jax.Array  # bool[]: whether norm or loss is NaN or inf


class Judge(NamedTuple):
    """What norm and loss of a step are held against."""

    call: str  # the function that errors name
    rule: Rule  # of the norm
    loss_rule: Rule | None
    mesh_axes: MeshAxes
    demanded_by: str = ""  # the argument that makes every step need a loss

    def first_judgement(self, params: Any) -> Judgement:
        """What is known before the first step."""
        # Only its dtype is needed: float64 if a leaf has 64 bits.
        tree = clipped_leaves(params, self.call)
        norm_type = jax.eval_shape(self._replace(mesh_axes=None).norm_of, tree)
        zero = jnp.zeros((), norm_type.dtype)
        return Judgement(
            norm=zero,
            limit=jnp.full_like(zero, jnp.inf),
            # Not NaN, at which `jax_debug_nans` would raise.
            loss=jnp.full_like(zero, -jnp.inf),
            loss_limit=jnp.full_like(zero, jnp.inf),
            memory=self.rule.init(zero),
            loss_memory=self.loss_rule.init(zero) if self.loss_rule else (),
            over=jnp.zeros((), bool),
            broken=jnp.zeros((), bool),
        )

    def packed(
        self, judgement: Judgement, counts: list[jax.Array], shares: list[jax.Array]
    ) -> tuple[jax.Array, jax.Array, PyTree, PyTree]:
        """The first four fields of a state: counts, numbers, windows of norm and loss.

        `counts` and `shares` are the numbers that the state counts itself.
        """
        norm = judgement.norm
        memory = packed((judgement.memory, judgement.loss_memory), norm)
        numbers = [norm, judgement.limit, judgement.loss, judgement.loss_limit]
        numbers += [share.astype(norm.dtype) for share in shares]
        return (
            jnp.stack(counts + memory.counts),
            jnp.stack(numbers + memory.numbers),
            *memory.rest,
        )

    def typed(self, values: Any, kinds: Any) -> Any:
        """The values, typed as differing between devices where each trains alone."""
        return typed_as_varying(kinds, values) if self.mesh_axes is None else values

    def norm_of(self, updates: Any) -> jax.Array:
        """The global norm of the updates."""
        measure = GlobalNorm(self.call, mesh_axes=self.mesh_axes)
        return measure(clipped_leaves(updates, self.call)).values[0]

    def numbers_of(self, updates: Any, extra_args: dict[str, Any]) -> tuple[Any, Any]:
        """Norm and loss of a step. None for a loss that is not looked at."""
        norm, loss = extra_args.get("grad_norm"), extra_args.get("value")
        norm = self.norm_of(updates) if norm is None else self._given("grad_norm", norm)
        if self.loss_rule is None:
            return norm, None
        if loss is not None:
            return norm, self._given("value", loss)
        for name in OF_UPDATE["value"].intersection(extra_args):
            raise TypeError(
                f"{self.call}: update has no argument {name!r}: the loss is value, as "
                "in optax. Call update(grads, state, params, value=loss)."
            )
        if self.demanded_by:
            raise ValueError(
                f"{self.call}: {self.demanded_by} looks at the loss: call "
                "update(grads, state, params, value=loss), or leave that argument out."
            )
        return norm, None

    def _given(self, name: str, number: Any) -> Any:
        """A norm or a loss that an update is given, as JAX can carry it."""
        argument = f"{self.call}: {name}"
        # A loss for each example or device would make arrays of limit and decision.
        checks.check_scalar(argument, number)
        if name == "grad_norm":
            checks.check_given_norm(argument, number)
        number = checks.number_for_jit(number)
        axes = tuple(sorted(varying(number)))
        # With None each device trains alone, so it may decide alone.
        if axes and self.mesh_axes is not None:
            over = axes[0] if len(axes) == 1 else axes
            raise ValueError(
                f"{argument} differs along the mesh axis {over!r}, so each device "
                f"would decide for itself: hand over lax.pmean({name}, {over!r}), or "
                "say with mesh_axes=None that each device trains alone."
            )
        return number

    def judged(self, state: Any, norm: Any, loss: Any) -> Judgement:
        """Holds norm and loss against their rules. A number that is NaN or inf is over
        every limit.

        `state` is a `SkipState` or a `SpikeState`.
        """
        memory, loss_memory = state.memories
        # A number that is given may have another dtype, and stays the user's own.
        norm = self.typed(jnp.array(norm, state.norm.dtype), state.norm)
        # Under a jit of the user's none of ours, whose cache would keep a schedule, and
        # what that refers to, alive.
        ask = limit_of if isinstance(state.step, Tracer) else limit_of_jitted
        argument = f"{self.call}: rule"
        limit, memory = ask(self.rule, norm, memory, state.step, argument=argument)
        # Not `norm > limit`, which is False for NaN. inf would pass a limit of inf.
        judgement = Judgement(
            norm=norm,
            limit=limit,
            loss=state.loss,
            loss_limit=state.loss_limit,
            memory=memory,
            loss_memory=loss_memory,
            over=~(norm <= limit),
            broken=~jnp.isfinite(norm),
        )
        if self.loss_rule is not None and loss is not None:
            loss = self.typed(jnp.array(loss, state.loss.dtype), norm)
            loss_limit, loss_memory = ask(
                self.loss_rule,
                loss,
                loss_memory,
                state.step,
                argument=f"{self.call}: loss_rule",
                signed=True,
            )
            judgement = judgement._replace(
                loss=loss,
                loss_limit=loss_limit,
                loss_memory=loss_memory,
                over=judgement.over | ~(loss <= loss_limit),
                broken=judgement.broken | ~jnp.isfinite(loss),
            )
        return judgement._replace(over=judgement.over | judgement.broken)
