"""What rules remember: a window of past norms, and running averages.

All arrays of a memory have the norm's shape, followed by axes of their own. Deviations
are kept and joined as roots of squares (`jnp.hypot`), which can neither become negative
by rounding nor leave the range of the norm's dtype.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from .._checks import LAST_STEP
from .._exported import exported
from .._mesh import split_as


def count_up(counter: jax.Array, happened: Any = True) -> jax.Array:
    """The counter after a step. It stays at the largest int32."""
    more = counter < jnp.iinfo(counter.dtype).max
    return counter + (happened & more).astype(counter.dtype)


@exported
class Window(NamedTuple):
    """The last norms, in a ring."""

    # float32[norm, length]: filled from the left, then the oldest is overwritten
    past: jax.Array
    seen: jax.Array  # int32[norm]: norms remembered so far


@exported
class Average(NamedTuple):
    """An exponential average of the norms seen so far."""

    estimate: jax.Array  # float32[norm]: corrected for its start
    # float32[norm]: the share of an endless average that was seen, in [0, 1]
    weight: jax.Array


def empty_window(argument: str, length: Any, norm: jax.Array) -> Window:
    """A window without norms."""
    if isinstance(length, Tracer):
        raise TypeError(
            f"{argument} must be known when the state is made: under jit and "
            "inject_hyperparams name it in static_args."
        )
    past = jnp.zeros((*norm.shape, int(length)), norm.dtype)
    return Window(past, jnp.zeros(norm.shape, jnp.int32))


def places(window: Window) -> jax.Array:
    """The number of each place in the window, int32[norm, length]."""
    return lax.broadcasted_iota(jnp.int32, window.past.shape, window.past.ndim - 1)


def next_place(window: Window) -> jax.Array:
    """The place that the next norm takes, int32[norm, 1]."""
    # In a ring of 3 the norms 0, 1, 2, 3 take the places 0, 1, 2, 0.
    return (window.seen % window.past.shape[-1])[..., None]


def push(window: Window, norm: jax.Array) -> Window:
    """Adds a norm. A full window loses its oldest."""
    here = places(window) == next_place(window)
    past = jnp.where(here, norm[..., None], window.past)
    # At its largest number the counter goes back by whole rounds of the ring, to one
    # that is still beyond every warm-up that a run can have.
    length = past.shape[-1]
    rounds = (LAST_STEP // 2 // length) * length
    seen = jnp.where(window.seen == LAST_STEP, LAST_STEP - rounds, window.seen)
    return Window(past, seen + 1)


def empty_average(norm: jax.Array) -> Average:
    """An average before the first value."""
    return Average(jnp.zeros_like(norm), jnp.zeros_like(norm))


def blend(
    average: Average, value: jax.Array, decay: jax.Array, corrected: Any = True
) -> Average:
    """Adds a value to an average.

    Corrected, it is Adam's: all values since the first, with weights that fall by
    `decay`. Otherwise the first value counts as if it had always been there.
    """
    started = (average.weight > 0) | jnp.asarray(corrected)
    decay = jnp.where(started, decay, jnp.zeros_like(decay))
    weight, share = weigh(average.weight, decay)
    return Average(between(average.estimate, value, 1 - share), weight)


def between(old: jax.Array, new: jax.Array, keep: jax.Array) -> jax.Array:
    """keep * old + (1 - keep) * new."""
    # As a difference from the nearer of both, and not as a sum of products: exact while
    # the norm does not change, and right where one of both is nothing beside the other.
    change = new - old
    return jnp.where(keep < 0.5, new - keep * change, old + (1 - keep) * change)


def weigh(weight: jax.Array, decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weight of an average after one more value, and the share of that value.

    The first value becomes the average, whatever the decay.
    """
    # With a decay of 1 the first weight would be 0, and that of all values after it.
    # As small numbers they make the mean, and are nothing beside 2^-24, the least
    # weight that a decay below 1 gives in float32.
    is_first = weight < 2.0**-30
    own = jnp.where(is_first, jnp.maximum(1 - decay, 2.0**-60), 1 - decay)
    weight = decay * weight + own
    return weight, (own / weight).astype(weight.dtype)


def root(x: jax.Array) -> jax.Array:
    """sqrt(x), with the derivative 0 at 0, where that of `jnp.sqrt` is infinite."""
    positive = jnp.where(x == 0, 1.0, x)
    return jnp.where(x == 0, 0.0, jnp.sqrt(positive))


def remembered(remember: str, norm: jax.Array, limit: jax.Array) -> jax.Array:
    """The norm as it came ("raw"), or as it was let through ("clipped")."""
    return jnp.minimum(norm, limit) if remember == "clipped" else norm


def unless_gone(remember: str, value: jax.Array, new: Any, old: Any) -> Any:
    """The new memory, or the old one where a limit of 0 let nothing through: a norm of
    0 is not remembered, since limits could never leave it.
    """
    # No rule is asked about a norm of 0, so norms as they came are not 0.
    return keep_where(value != 0, new, old) if remember == "clipped" else new


@jax.jit
def keep_where(wanted: jax.Array, new: Any, old: Any) -> Any:
    """The new memory where it is wanted, elementwise by norm, and the old elsewhere."""

    def choose(new: Any, old: jax.Array) -> jax.Array:
        new = split_as(jnp.asarray(new).astype(old.dtype), jax.typeof(old))
        # A memory has further dimensions, such as [N, window] for N norms.
        mask = wanted.reshape(wanted.shape + (1,) * (new.ndim - wanted.ndim))
        return jnp.where(mask, new, old)

    return jax.tree.map(choose, new, old)
