"""Spike score of recorded norms or losses."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._limits import limit_of
from ..rules._rule import Number, Rule
from ..rules._windowed_mean import spike_rule
from ._replay import array_of_norms, first_memory

CALL = "spike_score"


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
    # float32, or float64 where jax_enable_x64 is set, also for integers.
    arrays = [array_of_norms(CALL, history) for history in histories]
    series = [jnp.asarray(array, jnp.result_type(float)) for array in arrays]
    shapes = sorted({each.shape for each in series})
    if len(shapes) != 1 or len(shapes[0]) != 1 or 0 in shapes[0]:
        raise ValueError(
            f"{CALL}: histories must be [steps] of one length, got shapes "
            f"{', '.join(map(str, shapes)) or 'of nothing'}."
        )
    rule = spike_rule(CALL, sigmas, window)
    spiked = [_spikes(rule, first_memory(rule, each), each) for each in series]
    # A step at which norm and loss both stand out counts once.
    return jnp.mean(jnp.stack(spiked).any(axis=0))


@jax.jit
def _spikes(rule: Rule, memory: Any, values: jax.Array) -> jax.Array:
    """bool[steps]: which values stand out."""

    def step(carry: Any, value: jax.Array) -> tuple[Any, jax.Array]:
        count, memory = carry
        asked = rule, value, memory, count
        # Signed: a loss of 0 or below is remembered like any other.
        limit, memory = limit_of(*asked, argument=CALL, signed=True)
        # Not `value > limit`, which is False for NaN.
        return (count + 1, memory), ~(value <= limit) | ~jnp.isfinite(value)

    first = jnp.zeros((), jnp.int32), memory
    return jax.lax.scan(step, first, values)[1]
