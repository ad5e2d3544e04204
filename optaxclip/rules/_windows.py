"""Rules of the last norms: their quantile, or their mean and deviation."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from .._exported import exported
from ._memory import (
    Window,
    empty_window,
    next_place,
    places,
    push,
    remembered,
    unless_gone,
)
from ._rule import (
    Answer,
    Number,
    Rule,
    at_step,
    check_length,
    choice,
    flag,
    multiple,
    number,
    rule_in,
    warn_of_falling,
)


@exported
class QuantileMemory(NamedTuple):
    """The last norms, by age and by size."""

    recent: Window
    ordered: Array  # float32[norm, length]: inf where there is none yet


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
      remember: "raw" for the norm as it came, "clipped" for what was let through. With
        "clipped" and a factor of at most 1 limits can only fall.
      warmup: how many norms are seen before there is a limit, the current one counted
        if it is in the window. It may be longer than the window. At least 0, and there
        is no limit before the first norm.

    Raises:
      ValueError: a number out of its range, or an unknown `remember`. TypeError:
        something that is no number.

    Warns:
      UserWarning: a factor of at most 1 with `remember="clipped"`.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remember == "clipped":
            name = "windowed_quantile: factor"
            warn_of_falling(name, self.factor, stacklevel=4)

    def init(self, norm: Array) -> QuantileMemory:
        recent = empty_window("windowed_quantile: window", self.window, norm)
        return QuantileMemory(recent, jnp.full_like(recent.past, jnp.inf))

    def update(self, norm: Array, memory: QuantileMemory, step: Array) -> Answer:
        quantile, factor = at_step(step, norm, self.quantile, self.factor)
        held = choose(self.current, push_ordered(memory, norm), memory)
        known = held.recent.seen >= jnp.maximum(self.warmup, 1)
        edge = multiple(factor, interpolated(quantile, held))
        limit = jnp.where(known, edge, jnp.inf)
        value = remembered(self.remember, norm, limit)
        new = push_ordered(memory, value)
        return limit, unless_gone(self.remember, value, new, memory)


def push_ordered(memory: QuantileMemory, norm: Array) -> QuantileMemory:
    """Adds a norm: the oldest leaves its place in the order, the new one takes its own.

    That is one pass over the window, where sorting it would be many.
    """
    recent, ordered = memory
    place, new = places(recent), norm[..., None]
    is_full = recent.seen[..., None] >= ordered.shape[-1]
    oldest = jnp.take_along_axis(recent.past, next_place(recent), axis=-1)
    # Until the window is full nothing leaves but an inf at the end.
    old = jnp.where(is_full, oldest, jnp.inf)
    # [1, 3, 5] without 1, with 4: gap 0, own 1, source [1, 2, 2], result [3, 4, 5].
    gap = jnp.sum(ordered < old, axis=-1, keepdims=True, dtype=jnp.int32)
    own = jnp.sum(ordered < new, axis=-1, keepdims=True, dtype=jnp.int32)
    # The rank of the new norm once the old one has left.
    own = own - (old < new).astype(jnp.int32)
    # Where each place takes its norm from: those after the gap move down by one, those
    # after the new norm up by one.
    source = place - (place > own).astype(jnp.int32)
    source = source + (source >= gap).astype(jnp.int32)
    # Beyond the last place there is no norm yet.
    beyond = {"mode": "fill", "fill_value": jnp.inf}
    moved = jnp.take_along_axis(ordered, source, axis=-1, **beyond)
    moved = jnp.where(place == own, new, moved)
    return QuantileMemory(push(recent, norm), moved)


def interpolated(quantile: Array, memory: QuantileMemory) -> Array:
    """The quantile, between the two nearest norms."""
    last = jnp.clip(memory.recent.seen, 1, memory.ordered.shape[-1]) - 1
    # As numpy.percentile: quantile 0 is the first of the norms, 1 the last.
    place = quantile * last.astype(quantile.dtype)

    def norm_at(place: Array) -> Array:
        index = place.astype(jnp.int32)[..., None]
        return jnp.take_along_axis(memory.ordered, index, axis=-1)[..., 0]

    low, high = norm_at(jnp.floor(place)), norm_at(jnp.ceil(place))
    # Without any norm both are inf, whose difference is NaN. `update` then takes inf.
    most = jnp.finfo(low.dtype).max
    low, high = jnp.minimum(low, most), jnp.minimum(high, most)
    return low + (place - jnp.floor(place)) * (high - low)


class WindowedMean(Rule):
    """limit = mean + sigmas * max(deviation, floor) of the last norms.

    Raw norms are remembered by default, so that the limit follows a lasting change
    within the length of the window.

    Args:
      sigmas: how many standard deviations are allowed. At least 0. A number or a
        schedule.
      window: how many norms are remembered. A whole number, at least 1. The length is
        part of the state: a restored state goes on with its own.
      ddof: what is taken off the count in the variance: 0 the population's, 1 the
        sample's. Below the length of the window.
      floor: the deviation counts as at least this much, in units of the norm. At least
        0. A number or a schedule.
      current: whether the norm of this step is in the statistic that it is held
        against. With True a first spike raises its own limit.
      remember: "raw" for the norm as it came, "clipped" for what was let through.
      warmup: how many norms are seen before there is a limit, the current one counted
        if it is in the statistic. It may be longer than the window. At least 0.

    Raises:
      ValueError: a number out of its range, or an unknown `remember`. TypeError:
        something that is no number.

    Example:
      >>> rule = optaxclip.rules.windowed_mean(2.0, 2)
      >>> print(optaxclip.replay.run(rule, [1.0, 3.0, 2.0, 9.0]).limits)
      [inf inf 4.  3.5]

    Reference: Levanter, `optim/clip_update_norm.py` (3 sigmas of 128, warmup 64, ddof
    0, floor 1e-6). OLMo-core, `optim/skip_step_optimizer.py` (6 sigmas of 128, ddof 1,
    which is `optaxclip.skip_step`).
    """

    sigmas: Number = number(default=3.0)
    window: Any = number(default=128, whole=True)
    _: KW_ONLY
    ddof: Any = number(default=0, schedule=False)
    floor: Number = number(default=0.0)
    current: Any = flag(default=False)
    remember: str = choice("raw", "clipped", default="raw")
    warmup: Any = number(default=2, schedule=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A window of ddof norms has no deviation, however many norms were seen.
        traced = isinstance(self.window, Tracer) or isinstance(self.ddof, Tracer)
        if not traced and self.window <= self.ddof:
            raise ValueError(
                f"windowed_mean: window must be above ddof={self.ddof!r}, got "
                f"{self.window!r}."
            )

    def init(self, norm: Array) -> Window:
        return empty_window("windowed_mean: window", self.window, norm)

    def update(self, norm: Array, past: Window, step: Array) -> Answer:
        sigmas, floor = at_step(step, norm, self.sigmas, self.floor)
        # Both are made, since `current` is a leaf of the rule and may be traced.
        held = choose(self.current, push(past, norm), past)
        mean, deviation = moments(self.ddof, held)
        edge = mean + multiple(sigmas, jnp.maximum(deviation, floor))
        # With ddof 1 a deviation takes two norms, whatever the warmup is.
        known = held.seen >= jnp.maximum(self.warmup, 1 + self.ddof)
        limit = jnp.where(known, edge, jnp.inf)
        # Onto `past`: `held` may have the norm already, as it came.
        return limit, push(past, remembered(self.remember, norm, limit))


def step_rule(
    sigmas: Number = 6.0, window: Any = 128, *, call: str = "windowed_mean"
) -> Rule:
    """The rule of `skip_step`: the first limit comes after half a window."""
    check_length(f"{call}: window", window, least=2)
    # OLMo-core counts the current norm too, which is not in the statistic: one less.
    # Under inject_hyperparams the window is traced.
    larger = jnp.maximum if isinstance(window, Array) else max
    numbers = {"ddof": 1, "warmup": larger(2, window // 2) - 1}
    return rule_in(call, WindowedMean, sigmas=sigmas, window=window, **numbers)


def spike_rule(call: str, sigmas: Number, window: Any) -> Rule:
    """The rule of OLMo-core's spike score: what is over its limit is a spike."""
    check_length(f"{call}: window", window)
    # A warmup of the whole window: before that nothing is a spike.
    numbers = {"sigmas": sigmas, "window": window, "warmup": window}
    return rule_in(call, WindowedMean, **numbers)


def choose(wanted: Any, new: Any, old: Any) -> Any:
    """The new memory if it is wanted, else the old one."""

    def chosen(one: Array, other: Array) -> Array:
        return jnp.where(wanted, one, other)

    return jax.tree.map(chosen, new, old)


def moments(ddof: Any, window: Window) -> tuple[Array, Array]:
    """Mean and standard deviation of the norms in a window.

    Both are taken of differences from one of the norms, divided by the largest
    difference. So equal norms have exactly their mean and no deviation, and no square
    leaves the range.
    """
    held = places(window) < window.seen[..., None]
    count = jnp.clip(window.seen, 1, window.past.shape[-1])
    count = count.astype(window.past.dtype)
    # A float32 sum of norms such as 8192 + 2^-9 would lose what they differ by.
    anchor = window.past[..., :1]
    # Empty places hold 0, which is no norm.
    apart = jnp.where(held, window.past - anchor, 0.0)
    largest = jnp.max(jnp.abs(apart), axis=-1, keepdims=True)
    apart = apart / jnp.where(largest > 0, largest, 1.0)
    shift = jnp.sum(apart, axis=-1, keepdims=True) / count[..., None]
    squares = jnp.sum(jnp.where(held, apart - shift, 0.0) ** 2, axis=-1)
    # At least 1, since ddof norms would divide by 0.
    variance = squares / jnp.maximum(count - jnp.asarray(ddof, count.dtype), 1)
    mean = anchor[..., 0] + (largest * shift)[..., 0]
    return mean, largest[..., 0] * jnp.sqrt(variance)
