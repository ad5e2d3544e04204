"""Spike score: how often gradient norm or loss stood out, as OLMo-core counts it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import check_state
from .._exported import exported
from .._mesh import MeshAxes
from .._state import moving_average
from .._wrappers._skipping import Judge, counted
from ..rules._rule import Number, Rule
from ..rules._windowed_mean import spike_rule

CALL = "record_spikes"
RECENT = 10_000  # steps, as in OLMo-core


@exported
class SpikeState(NamedTuple):
    """The state of `record_spikes`."""

    step: jax.Array  # int32[]: updates seen
    norm: jax.Array  # float32[]: the global norm of the last gradient
    limit: jax.Array  # float32[]: what it was held against
    loss: jax.Array  # float32[]: the last loss, NaN until one is given
    loss_limit: jax.Array  # float32[]: what it was held against
    spiked: jax.Array  # int32[]: 1 if the last step was a spike, else 0
    spikes: jax.Array  # int32[]: steps that were
    # float32[]: their share of about the last 10,000 steps
    spiked_recently: jax.Array
    memory: Any  # the last norms
    loss_memory: Any  # the last losses


def record_spikes(
    sigmas: Number = 6.0, window: Any = 128, *, mesh_axes: MeshAxes = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Counts the steps whose norm or loss stands out, for `metrics`. Changes nothing.
    The loss must be the same on all devices, so average it with `lax.pmean`. In pmap
    and in shard_map(check_vma=False) nothing shows that it differs, and each replica
    counts its own: `check_replicated` shows it, as in `skip_step`.

        spike    if x > mean + sigmas * deviation, both of the `window` values before x,
                 for x the global norm, or the loss where update(..., value=loss) has it
        score    spikes / steps

    Args:
      sigmas: how many standard deviations above the mean are no spike. At least 0. A
        number or a schedule.
      window: how many norms and losses are remembered. A whole number, at least 1.
        Nothing is a spike before there are as many.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec.

    Returns:
      A transformation with a `SpikeState`. Its `update` also takes `grad_norm=`, a norm
      measured elsewhere. A norm or loss that is NaN or inf is a spike, and is not
      remembered.

    Raises:
      ValueError: a number out of its range, or a `value` that differs between devices
        where types show it.
      TypeError: something that is not a number, or a loss under another name than
        `value`.

    Example:
      >>> recorder = optaxclip.record_spikes(2.0, window=4)
      >>> state = recorder.init(jnp.zeros(1))
      >>> for grads in jnp.array([[1.0], [2.0], [1.0], [2.0], [9.0], [2.0]]):
      ...     _, state = recorder.update(grads, state)
      >>> print(f"{optaxclip.metrics(state)['spike/score']:.3f}")
      0.167

    Reference: OLMo-core, `train/callbacks/stability_monitor.py`. There NaN is no spike,
    and none is seen until it has left the window. Nor is there a spike while the
    deviation is below 1e-10. Here any value above a window of equal ones is a spike.
    OLMo 2, 2025 (arXiv 2501.00656) and AdaGC, 2025 (arXiv 2502.11034) count with 7
    deviations and 1000 values.
    """
    rule = spike_rule(CALL, sigmas, window)
    # Norm and loss share the rule, and each has a memory in the state.
    judge = Judge(CALL, rule, rule, mesh_axes)

    def init(params: Any) -> SpikeState:
        # Each counter is its own array, so that the state can be donated.
        return SpikeState(
            **judge.first_fields(params),
            spiked=jnp.zeros((), jnp.int32),
            spikes=jnp.zeros((), jnp.int32),
            spiked_recently=jnp.zeros((), jnp.float32),
        )

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, SpikeState]:
        check_state(CALL, state, SpikeState)
        norm, loss = judge.numbers_of(updates, extra_args)
        return updates, _after_step(rule, state, norm, loss)

    return optax.GradientTransformationExtraArgs(init, update)


@jax.jit
def _after_step(
    rule: Rule, state: SpikeState, norm: Any, loss: Any
) -> SpikeState:
    # Without mesh axes, since the norm is measured.
    judge = Judge(CALL, rule, rule, None)
    state, spiked, _ = judge.judged(state, norm, loss)
    share = moving_average(state.spiked_recently, spiked, state.step, RECENT)
    return state._replace(
        step=counted(state.step),
        spiked=spiked.astype(jnp.int32),
        spikes=counted(state.spikes, spiked),
        spiked_recently=share,
    )
