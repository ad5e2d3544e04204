"""Spike score of recorded norms or losses."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..rules._rule import Number
from ..rules._windows import spike_rule
from ._run import history_of, limits_over


def spike_score(
    *histories: ArrayLike, sigmas: Number = 6.0, window: Any = 128
) -> jax.Array:
    """The share of steps at which a recorded number stands out.

        spike    if x > mean + sigmas * deviation, both of the `window` values before x
        score    spikes / steps

    Args:
      histories: norms, losses or both, [steps] each. A step counts as a spike if any of
        them is one. NaN and inf are spikes, and are not remembered.
      sigmas: how many standard deviations above the mean are no spike. At least 0.
      window: how many values before x are looked at. A whole number, at least 1.
        Nothing is a spike before there are as many.

    Returns:
      float32[]: the score, in [0, 1].

    Raises:
      ValueError: no history, histories that are not [steps] of one length, or a number
        out of its range. TypeError: something that is not a number.

    Example:
      >>> norms = [1.0, 2.0, 1.0, 2.0, 9.0, 2.0, 1.0, 2.0]
      >>> print(optaxclip.replay.spike_score(norms, sigmas=2.0, window=4))
      0.125

    Reference: OLMo-core, `train/callbacks/stability_monitor.py`, counts with 6
    deviations of 128 values. OLMo 2, 2025 (arXiv 2501.00656) and AdaGC, 2025 (arXiv
    2502.11034) count with 7 of 1000.
    """
    call = "spike_score"
    series = [history_of(call, each, signed=True) for each in histories]
    shapes = sorted({each.shape for each in series})
    if len(shapes) != 1 or len(shapes[0]) != 1 or 0 in shapes[0]:
        must = "histories must be [steps] of one length"
        raise ValueError(f"{call}: {must}, got shapes {shapes}.")
    values = jnp.stack(series, axis=1)
    # Signed: a loss of 0 or below is remembered like any other.
    rule = spike_rule(call, sigmas, window)
    limits = limits_over(rule, values, call, signed=True)
    # Not `values > limits`, which is False for NaN.
    spiked = ~(values <= limits) | ~jnp.isfinite(values)
    # A step at which norm and loss both stand out counts once.
    return jnp.mean(spiked.any(axis=1))
