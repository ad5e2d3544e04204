"""What the rules share: parameters that may follow a schedule, a window of past norms,
and running averages.

All arrays of a memory have the norm's shape, followed by axes of their own. Deviations
are kept and joined as roots of squares (`jnp.hypot`), which can neither become negative
by rounding nor leave the range of the norm's dtype.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..arguments import as_partial, check_limit, check_number, held_in

REMEMBER = ("raw", "clipped")


class Window(NamedTuple):
    """The last norms, in a ring."""

    past: (
        jax.Array
    )  # float32[norm, length]: filled from the left, then overwritten, the oldest first
    seen: jax.Array  # int32[norm]: norms remembered so far


class Average(NamedTuple):
    """An exponential average of the norms seen so far."""

    value: jax.Array  # float32[norm]: the average itself, corrected for its start
    # float32[norm]: how much of an endless average was seen, in [0, 1]; 0 before the
    # first
    weight: jax.Array


def parameter(
    argument: str, value: Any, lowest: float = 0.0, highest: float = float("inf")
) -> Any:
    """A number that was checked, or a schedule, as a leaf or node of a pytree.

    Raises:
      TypeError, ValueError: what is no number between `lowest` and `highest`.
    """
    if callable(value):
        return as_partial(value)
    check_limit(argument, value, lowest=lowest)
    if (
        not isinstance(value, Tracer)
        and (np.asarray(value, np.float64) > highest).any()
    ):
        raise ValueError(f"{argument} must be at most {highest:g}, got {value!r}.")
    return value


def at(step: jax.Array, norm: jax.Array, *parameters: Any) -> list[jax.Array]:
    """The parameters at this step, in the norm's dtype."""
    return [
        held_in(norm.dtype, value(step) if callable(value) else value)
        for value in parameters
    ]


def is_clipped(call: str, remember: str) -> bool:
    """Is the clipped norm remembered, or the raw one?"""
    if remember not in REMEMBER:
        raise ValueError(
            f"{call}: remember must be 'raw' or 'clipped', got {remember!r}."
        )
    return remember == "clipped"


def check_length(argument: str, length: Any) -> None:
    """Refuses what is no length of a window."""
    check_number(argument, length, lowest=1)
    if not isinstance(length, Tracer) and (np.ndim(length) or length != int(length)):
        raise ValueError(f"{argument} must be a whole number, got {length!r}.")


def window(argument: str, length: Any, norm: jax.Array) -> Window:
    """An empty window."""
    if isinstance(length, Tracer):
        raise TypeError(
            f"{argument} must be known when the state is made: under jit and "
            "inject_hyperparams name it in static_args."
        )
    return Window(
        jnp.zeros((*norm.shape, int(length)), norm.dtype),
        jnp.zeros(norm.shape, jnp.int32),
    )


def places(memory: Window) -> jax.Array:
    """The number of each place in the window: int32[norm, length]."""
    return lax.broadcasted_iota(jnp.int32, memory.past.shape, memory.past.ndim - 1)


def oldest(memory: Window) -> jax.Array:
    """The norm that the next one takes the place of, once the window is full."""
    return jnp.take_along_axis(
        memory.past, (memory.seen % memory.past.shape[-1])[..., None], axis=-1
    )[..., 0]


def push(memory: Window, norm: jax.Array) -> Window:
    """The window with one norm more, in the place of the oldest when it is full."""
    here = places(memory) == (memory.seen % memory.past.shape[-1])[..., None]
    return Window(jnp.where(here, norm[..., None], memory.past), memory.seen + 1)


def valid(memory: Window) -> jax.Array:
    """Which places of the window are filled: bool[norm, length]."""
    return places(memory) < memory.seen[..., None]


def include(current: Any, memory: Window, norm: jax.Array) -> Window:
    """The window that the statistic is taken of: with or without the current norm."""
    return jax.tree.map(
        lambda new, old: jnp.where(current, new, old), push(memory, norm), memory
    )


def average(norm: jax.Array) -> Average:
    """An average of nothing."""
    return Average(jnp.zeros_like(norm), jnp.zeros_like(norm))


def blend(
    memory: Average, value: jax.Array, decay: jax.Array, corrected: Any = True
) -> Average:
    """The average with one value more. Corrected, it is Adam's: all values since the
    first, with weights that fall by `decay`; otherwise the first value counts as if it
    had always been there.
    """
    decay = jnp.where(
        (memory.weight > 0) | jnp.asarray(corrected), decay, jnp.zeros_like(decay)
    )
    weight = decay * memory.weight + (1 - decay)
    # In steps from the average, not as a sum of products: exact while the norm does not
    # change.
    return Average(memory.value + gain(decay, weight) * (value - memory.value), weight)


def gain(decay: jax.Array, weight: jax.Array) -> jax.Array:
    """How far the average goes towards a new value; `weight` counts it already. The
    first value is the average, whatever the decay.
    """
    return jnp.where(
        weight > 0, (1 - decay) / jnp.where(weight > 0, weight, 1.0), 1.0
    ).astype(weight.dtype)
