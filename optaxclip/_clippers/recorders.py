"""Recording without clipping: norms, and steps that stand out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from .._arguments.checks import check_norm_function, check_state
from .._arguments.functions import with_hash
from .._devices.mesh import MeshAxes
from .._norm_clipper import make_clipper, without_overrides
from .._norms.norms import UserNorm, global_norm
from .._state.interop import exported
from .._state.state import RecordState
from .._trees import PyTree
from .._wrappers.judge import Judge
from .._wrappers.rows import RowNames, pack, row_property, unpack
from ..rules._memory import count_up, in_buffer_of, moving_average
from ..rules._rule import Number
from ..rules._windows import spike_rule


def record_norm(
    norm: Callable[[Any], Any] = global_norm,
) -> optax.GradientTransformationExtraArgs:
    """Clips nothing, and keeps the norms for `metrics`: `record/norm`, and the steps in
    which it was NaN or inf, `record/nonfinite_count`.

    `grad_norm=` and `limit=` that a chain is given are for its clippers, and change
    nothing here. A clipper in the same jitted step may need the same sums. XLA on a CPU
    then computes them once, so the recorder reads nothing more.

    Args:
      norm: from a tree to its norms: `global_norm`, `tensor_norm`, or a function of
        your own.

    Returns:
      A transformation whose state is a `ClipState` (of the subclass `RecordState`),
      with limits of inf.

    Raises:
      TypeError: a norm that is not a function.

    Example:
      >>> recorder = optaxclip.record_norm()
      >>> grads = jnp.array([3.0, 4.0])
      >>> _, state = recorder.update(grads, recorder.init(grads))
      >>> print(optaxclip.metrics(state, floats=True))
      {'record/norm': 5.0, 'record/nonfinite_count': 0.0}
    """
    call = "record_norm"
    check_norm_function(call, norm)
    # With a limit of None nothing is multiplied, not even by 1. XLA would write the
    # product to a new array, which the next clipper of the chain would have to read.
    measure = UserNorm(with_hash(norm), call)
    clipper: Any = make_clipper(measure, None, call=call, limit_argument="norm")

    def init(params: PyTree) -> RecordState:
        return RecordState(*clipper.init(params))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        # A recorder shows what it measured itself.
        extra_args = without_overrides(extra_args)
        updates, new_state = clipper.update(updates, state, params, **extra_args)
        return updates, RecordState(*new_state)

    return optax.GradientTransformationExtraArgs(init, update)


RECENT_STEPS = 10_000  # as in OLMo-core


@exported
class SpikeState(NamedTuple):
    """The state of `record_spikes`.

    Attributes:
      spike_counts: int32[3 + n]: `step`, `spiked` and `spikes`, and then n numbers that
        rules remember.
      spike_numbers: float32[5 + n] (float64 where a leaf has 64 bits): `norm`, `limit`,
        `loss`, `loss_limit` and `spiked_recently`, and then n numbers that rules
        remember.
      windows, loss_windows: what the rules of norm and loss remember beyond that.
      step: updates seen.
      spiked: 1 if the last step was a spike, else 0.
      spikes: steps that were spikes.
      norm: the global norm of the last gradient.
      limit: what the norm was held against.
      loss: the last loss, -inf until one is given.
      loss_limit: what the loss was held against.
      spiked_recently: the share of spikes among about the last 10,000 steps.
    """

    spike_counts: Array
    spike_numbers: Array
    windows: PyTree
    loss_windows: PyTree

    ROWS = RowNames(
        counts=("step", "spiked", "spikes"),
        numbers=("norm", "limit", "loss", "loss_limit", "spiked_recently"),
    )
    step = row_property(ROWS, "step")
    spiked = row_property(ROWS, "spiked")
    spikes = row_property(ROWS, "spikes")
    norm = row_property(ROWS, "norm")
    limit = row_property(ROWS, "limit")
    loss = row_property(ROWS, "loss")
    loss_limit = row_property(ROWS, "loss_limit")
    spiked_recently = row_property(ROWS, "spiked_recently")

    @property
    def memories(self) -> tuple[PyTree, PyTree]:
        """What the rules of norm and loss remember."""
        return unpack(self.ROWS, self)


def record_spikes(
    sigmas: Number = 6.0, window: int | Array = 128, *, mesh_axes: MeshAxes = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Counts the steps whose norm or loss stands out, for `metrics`. Changes nothing.

    The loss must be the same on all devices, so average it with `lax.pmean`. In pmap
    and in shard_map(check_vma=False) a loss that differs is not noticed, and each
    replica counts its own spikes: `check_replicated` shows it, as in `skip_step`.

    The gradient is measured as it comes in, so the recorder goes before the clipper.
    Behind one no norm is above its limit.

        spike    if x > mean + sigmas * deviation, both of the `window` values before x,
                 for x the global norm, or the loss where update(..., value=loss) has it
        score    spikes / steps

    Args:
      sigmas: how many standard deviations above the mean a value may be. At least 0. A
        number or a schedule.
      window: how many norms and losses are remembered. A whole number, at least 1.
        Nothing is a spike before there are as many.
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`.

    Returns:
      A transformation with a `SpikeState`. Its `update` also takes `grad_norm=`, a norm
      measured elsewhere: the one before any clip. A norm or loss that is NaN or inf is
      a spike, and is not remembered.

    Raises:
      ValueError: a number out of its range, or a `value` that differs between devices
        where types show it.
      TypeError: something that is not a number, or a loss that `update` gets as
        `loss`, `losses`, `loss_value` or `train_loss`, and not as `value`.

    Example:
      >>> recorder = optaxclip.record_spikes(2.0, window=4)
      >>> state = recorder.init(jnp.zeros(1))
      >>> for grads in jnp.array([[1.0], [2.0], [1.0], [2.0], [9.0], [2.0]]):
      ...     _, state = recorder.update(grads, state)
      >>> print(f"{optaxclip.metrics(state)['spike/score']:.3f}")
      0.167

    Reference: OLMo-core, `train/callbacks/stability_monitor.py`. There NaN is no spike,
    and no spike is seen until the NaN has left the window, nor while the deviation is
    below 1e-10. Here any value above a window of equal ones is a spike. OLMo 2, 2025
    (arXiv 2501.00656) and AdaGC, 2025 (arXiv 2502.11034) count with 7 deviations and
    1000 values.
    """
    call = "record_spikes"
    rule = spike_rule(call, sigmas, window)
    # Norm and loss share the rule, and each has a memory in the state.
    judge = Judge(call, rule, rule, mesh_axes)

    def init(params: PyTree) -> SpikeState:
        arrays = pack(SpikeState.ROWS, *judge.before_first_step(params))
        return judge.varying_if_trained_alone(SpikeState(*arrays), params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        check_state(call, state, SpikeState)
        judgement = judge.judgement_of(state, updates, extra_args)
        is_spike = judgement.is_rejected
        step = count_up(state.step)
        arrays = pack(
            SpikeState.ROWS,
            judgement.norm,
            judgement.loss,
            step=step,
            spiked=is_spike.astype(jnp.int32),
            spikes=count_up(state.spikes, is_spike),
            spiked_recently=moving_average(
                state.spiked_recently, is_spike, step, RECENT_STEPS
            ),
        )
        return updates, jax.tree.map(in_buffer_of, SpikeState(*arrays), state)

    return optax.GradientTransformationExtraArgs(init, update)
