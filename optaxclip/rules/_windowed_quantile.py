"""A quantile of the last norms."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._exported import exported
from ._memory import (
    Window,
    empty_window,
    oldest,
    places,
    push,
    remembered,
    unless_gone,
)
from ._rule import (
    Number,
    Rule,
    at_step,
    choice,
    flag,
    multiple,
    number,
)
from ._windowed_mean import choose


@exported
class QuantileMemory(NamedTuple):
    """The last norms, by age and by size."""

    recent: Window
    ordered: jax.Array  # float32[norm, length]: inf where there is none yet


class WindowedQuantile(Rule):
    """limit = factor * quantile of the last norms.

    The quantile is interpolated linearly, as in `numpy.percentile`. `autoclip` is this
    rule with the current norm in the window. PyPI's `autoclip` is
    `clip_by_tensor_norm(rules.windowed_quantile(0.9, 1000))`.

    Args:
      quantile: in [0, 1], 0.5 is the median. A number or a schedule.
      window: how many norms are remembered. A whole number, at least 1. The length is
        part of the state: a restored state goes on with its own.
      factor: what the quantile is multiplied by. At least 0. A number or a schedule.
      current: whether the norm of this step is in the window that it is held against.
        With True a first spike raises its own limit.
      remember: "raw" for the norm as it came, "clipped" for what was let through.
      warmup: how many norms are seen before there is a limit, the current one counted
        if it is in the window. It may be longer than the window. At least 0, and there
        is no limit before the first norm.

    Raises:
      ValueError: a number out of its range, or an unknown `remember`. TypeError:
        something that is no number.

    Example:
      >>> rule = optaxclip.rules.windowed_quantile(0.5, 3)
      >>> print(optaxclip.replay.run(rule, [1.0, 3.0, 2.0, 9.0]).limits)
      [inf  1.  2.  2.]

    Reference: Seetharaman, Wichern, Pardo, Le Roux, AutoClip: adaptive gradient
    clipping for source separation networks, 2020 (arXiv 2007.14469).
    """

    quantile: Number = number(default=0.5, highest=1.0)
    window: Any = number(default=100, whole=True)
    _: KW_ONLY
    factor: Number = number(default=1.0)
    current: Any = flag(default=False)
    remember: str = choice("raw", "clipped", default="raw")
    warmup: Any = number(default=1, schedule=False)

    def init(self, norm: jax.Array) -> QuantileMemory:
        recent = empty_window("windowed_quantile: window", self.window, norm)
        return QuantileMemory(recent, jnp.full_like(recent.past, jnp.inf))

    def update(
        self, norm: jax.Array, memory: QuantileMemory, step: jax.Array
    ) -> tuple[jax.Array, QuantileMemory]:
        quantile, factor = at_step(step, norm, self.quantile, self.factor)
        held = choose(self.current, push_ordered(memory, norm), memory)
        known = held.recent.seen >= jnp.maximum(self.warmup, 1)
        edge = multiple(factor, interpolated(quantile, held))
        limit = jnp.where(known, edge, jnp.inf)
        value = remembered(self.remember, norm, limit)
        new = push_ordered(memory, value)
        return limit, unless_gone(self.remember, value, new, memory)


def push_ordered(memory: QuantileMemory, norm: jax.Array) -> QuantileMemory:
    """Adds a norm: the oldest leaves its place in the order, the new one takes its own.

    That is one pass over the window, where sorting it would be many.
    """
    recent, ordered = memory
    place, length = places(recent), recent.past.shape[-1]
    new = norm[..., None]
    # Until the window is full nothing leaves but an inf at the end.
    old = jnp.where(recent.seen >= length, oldest(recent), jnp.inf)[..., None]
    # [1, 3, 5] without 1, with 4: gap 0, own 1, source [1, 2, 2], result [3, 4, 5].
    gap, own = ranks(ordered, old, new)
    # The rank of the new norm once the old one has left.
    own = own - (old < new).astype(jnp.int32)
    # Where each place takes its norm from: those after the gap move down by one, those
    # after the new norm up by one.
    source = place - (place > own).astype(jnp.int32)
    source = source + (source >= gap).astype(jnp.int32)
    moved = jnp.take_along_axis(
        ordered, jnp.minimum(source, length - 1), axis=-1
    )
    moved = jnp.where(source < length, moved, jnp.inf)
    return QuantileMemory(
        push(recent, norm), jnp.where(place == own, new, moved)
    )


def ranks(ordered: jax.Array, *norms: jax.Array) -> list[jax.Array]:
    """How many are smaller than each of some norms, counted in one pass."""

    def add(one: Any, other: Any) -> Any:
        return [a + b for a, b in zip(one, other)]

    smaller = [(ordered < norm).astype(jnp.int32) for norm in norms]
    zeros = [np.int32(0)] * len(norms)
    counts = lax.reduce(smaller, zeros, add, (ordered.ndim - 1,))
    return [count[..., None] for count in counts]


def interpolated(quantile: jax.Array, memory: QuantileMemory) -> jax.Array:
    """The quantile, between the two nearest norms."""
    last = jnp.clip(memory.recent.seen, 1, memory.ordered.shape[-1]) - 1
    # As numpy.percentile: quantile 0 is the first of the norms, 1 the last.
    place = quantile * last.astype(quantile.dtype)

    def norm_at(place: jax.Array) -> jax.Array:
        index = place.astype(jnp.int32)[..., None]
        return jnp.take_along_axis(memory.ordered, index, axis=-1)[..., 0]

    low, high = norm_at(jnp.floor(place)), norm_at(jnp.ceil(place))
    # Without any norm both are inf, whose difference is NaN. `update` then takes inf.
    most = jnp.finfo(low.dtype).max
    low, high = jnp.minimum(low, most), jnp.minimum(high, most)
    return low + (place - jnp.floor(place)) * (high - low)
