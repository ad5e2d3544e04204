"""Rules that remember single norms, or their own last limit.

WindowedQuantile, WindowedMean    the last norms
Growth                            the last norm
QuantileTracker                   its own last limit
"""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from .._arguments.checks import check_whole_number
from .._state.interop import exported
from ._memory import count_up, has_reached, multiple, new_unless_zero, remembered
from ._rule import (
    LimitAndMemory,
    Number,
    Rule,
    call_name,
    choice_field,
    flag_field,
    length_field,
    number_field,
    numbers_at_step,
    rule_for_clipper,
    warn_if_limits_fall,
)


@exported
class Window(NamedTuple):
    """The last norms, in a ring."""

    # float32[norm, length]: the norms fill it from the left. In a full ring each new
    # one overwrites the oldest.
    past: Array
    seen: Array  # int32[norm]: norms remembered so far


def empty_window(rule: Any, norm: Array) -> Window:
    """The window of a rule, without norms."""
    # The length is the shape of an array, so it cannot be traced.
    if isinstance(rule.window, Tracer):
        raise TypeError(
            f"{call_name(type(rule))}: window must be known when the state is made: "
            "under jit and inject_hyperparams name it in static_args."
        )
    length = int(rule.window)
    past = jnp.zeros((*norm.shape, length), norm.dtype)
    seen = jnp.zeros(norm.shape, jnp.int32)
    return Window(past, seen)


def place_numbers(window: Window) -> Array:
    """The number of each place in the window, int32[norm, length]."""
    shape = window.past.shape
    return lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)


def next_place(window: Window) -> Array:
    """The place that the next norm takes, int32[norm, 1]."""
    # In a ring of 3 the norms 0, 1, 2, 3 take the places 0, 1, 2, 0.
    length = window.past.shape[-1]
    place = window.seen % length
    return place[..., None]


def push(window: Window, norm: Array) -> Window:
    """Adds a norm. A full window loses its oldest."""
    is_next = place_numbers(window) == next_place(window)
    past = jnp.where(is_next, norm[..., None], window.past)
    return Window(past, count_up(window.seen))


# The last norms in a ring, and once more sorted: float32[norm, length], with inf for
# places that are still empty.
QuantileMemory = tuple[Window, Array]


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
        Limits can only fall where remember="clipped", current=False and factor <= 1.
      warmup: how many norms are seen before there is a limit, the current one counted
        if it is in the window. It may be longer than the window. At least 0, and there
        is no limit before the first norm.

    Raises:
      ValueError: a number out of its range, or an unknown `remember`. TypeError:
        something that is not a number.

    Warns:
      UserWarning: limits that can only fall, see `remember`.

    Example:
      >>> rule = optaxclip.rules.windowed_quantile(0.5, 3)
      >>> print(optaxclip.replay.run(rule, [1.0, 3.0, 2.0, 9.0]).limits)
      [inf  1.  2.  2.]

    Reference: Seetharaman, Wichern, Pardo, Le Roux, AutoClip: adaptive gradient
    clipping for source separation networks, 2020 (arXiv 2007.14469).
    """

    quantile: Number = number_field(default=0.5, highest=1.0)
    window: Any = length_field(default=100)
    _: KW_ONLY
    factor: Number = number_field(default=1.0)
    current: bool = flag_field(default=False)
    remember: str = choice_field("raw", "clipped", default="raw")
    warmup: Any = number_field(default=1, may_be_schedule=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A current norm counts as it came, and lets limits rise.
        if self.remember == "clipped" and not self.current:
            warn_if_limits_fall("windowed_quantile: factor", self.factor)

    def init(self, norm: Array) -> QuantileMemory:
        recent = empty_window(self, norm)
        ordered = jnp.full_like(recent.past, jnp.inf)
        return recent, ordered

    def update(
        self, norm: Array, memory: QuantileMemory, step: Array
    ) -> LimitAndMemory:
        quantile, factor = numbers_at_step(step, norm.dtype, self.quantile, self.factor)
        recent, ordered = push_ordered(memory, norm) if self.current else memory
        norm_at_quantile = interpolated_quantile(quantile, recent.seen, ordered)
        limit = multiple(factor, norm_at_quantile)
        is_past_warmup = has_reached(recent.seen, self.warmup) & (recent.seen > 0)
        limit = jnp.where(is_past_warmup, limit, jnp.inf)
        value = remembered(self.remember, norm, limit)
        new_memory = push_ordered(memory, value)
        memory = new_unless_zero(self.remember, value, new_memory, memory)
        return limit, memory


def push_ordered(memory: QuantileMemory, norm: Array) -> QuantileMemory:
    """Adds a norm to the ring and to the sorted norms. The oldest leaves both.

    Only the sorted norms between the two move, by one place. That is one pass over the
    window, where sorting it anew would be many.
    """
    recent, ordered = memory
    new_norm = norm[..., None]
    is_full = recent.seen[..., None] >= ordered.shape[-1]
    oldest = jnp.take_along_axis(recent.past, next_place(recent), axis=-1)
    # Until the window is full, an inf at the end leaves.
    leaving = jnp.where(is_full, oldest, jnp.inf)
    infinity = jnp.full_like(ordered[..., :1], jnp.inf)
    padded = jnp.concatenate([-infinity, ordered, infinity], axis=-1)
    previous = padded[..., :-2]
    following = padded[..., 2:]
    # 1 leaves [1, 3, 5], and 4 comes: the norms between them move down, [3, 4, 5].
    moved_down = jnp.clip(new_norm, ordered, following)
    moved_down = jnp.where(ordered < leaving, ordered, moved_down)
    # 5 leaves [1, 3, 5], and 2 comes: the norms between them move up, [1, 2, 3].
    moved_up = jnp.clip(new_norm, previous, ordered)
    moved_up = jnp.where(ordered > leaving, ordered, moved_up)
    new_recent = push(recent, norm)
    new_ordered = jnp.where(new_norm < leaving, moved_up, moved_down)
    return new_recent, new_ordered


def interpolated_quantile(quantile: Array, seen: Array, ordered: Array) -> Array:
    """The quantile of the sorted norms, interpolated between the two nearest.

    `seen` counts the norms that were remembered, also those that left the window.
    """
    last_place = jnp.clip(seen, 1, ordered.shape[-1]) - 1
    # Quantile 0 is the first of the norms, 1 the last, as in numpy.percentile.
    place = quantile * last_place.astype(quantile.dtype)

    def norm_at(place: Array) -> Array:
        index = place.astype(jnp.int32)[..., None]
        norms = jnp.take_along_axis(ordered, index, axis=-1)
        return norms[..., 0]

    # An empty window holds inf only, and inf - inf is NaN. So the largest number stands
    # for inf. `update` sets no limit before the first norm, and drops the result.
    largest_number = jnp.finfo(ordered.dtype).max
    floor = jnp.floor(place)
    low = norm_at(floor)
    low = jnp.minimum(low, largest_number)
    high = norm_at(jnp.ceil(place))
    high = jnp.minimum(high, largest_number)
    share_of_high = place - floor
    return low + share_of_high * (high - low)


class WindowedMean(Rule):
    """limit = mean + sigmas * max(deviation, floor) of the last norms.

    Raw norms are remembered by default, so that the limit follows a lasting change
    within the length of the window.

    Args:
      sigmas: how many standard deviations are allowed. At least 0. A number or a
        schedule.
      window: how many norms are remembered. A whole number, at least 1. The length is
        part of the state: a restored state goes on with its own.
      ddof: what is subtracted from the count in the variance: 0 for the population's,
        1 for the sample's.
      floor: the deviation counts as at least this much, in units of the norm. At least
        0. A number or a schedule.
      current: whether the norm of this step is in the statistic that it is held
        against. With True a first spike raises its own limit.
      remember: "raw" for the norm as it came, "clipped" for what was let through.
      warmup: how many norms are seen before there is a limit, the current one counted
        if it is in the statistic. It may be longer than the window. At least 0.

    Raises:
      ValueError: a number out of its range, or an unknown `remember`. TypeError:
        something that is not a number.

    Example:
      >>> rule = optaxclip.rules.windowed_mean(2.0, 2)
      >>> print(optaxclip.replay.run(rule, [1.0, 3.0, 2.0, 9.0]).limits)
      [inf inf 4.  3.5]

    Reference: Levanter, `optim/clip_update_norm.py` (3 sigmas of 128, warmup 64, ddof
    0, floor 1e-6). OLMo-core, `optim/skip_step_optimizer.py` (6 sigmas of 128, ddof 1,
    which is `optaxclip.skip_step`).
    """

    sigmas: Number = number_field(default=3.0)
    window: Any = length_field(default=128)
    _: KW_ONLY
    ddof: Any = number_field(default=0, highest=1.0, may_be_schedule=False)
    floor: Number = number_field(default=0.0)
    current: bool = flag_field(default=False)
    remember: str = choice_field("raw", "clipped", default="raw")
    warmup: Any = number_field(default=2, may_be_schedule=False)

    def init(self, norm: Array) -> Window:
        return empty_window(self, norm)

    def update(self, norm: Array, memory: Window, step: Array) -> LimitAndMemory:
        sigmas, floor, ddof = numbers_at_step(
            step, norm.dtype, self.sigmas, self.floor, self.ddof
        )
        window = push(memory, norm) if self.current else memory
        mean, deviation = mean_and_deviation(ddof, window)
        deviation = jnp.maximum(deviation, floor)
        limit = mean + multiple(sigmas, deviation)
        # With a ddof of 1 a deviation needs two norms, whatever the warmup is.
        has_deviation = has_reached(window.seen, 1 + ddof)
        is_past_warmup = has_reached(window.seen, self.warmup) & has_deviation
        limit = jnp.where(is_past_warmup, limit, jnp.inf)
        # Not `push(window, ...)`: with current=True the window has this norm already.
        return limit, push(memory, remembered(self.remember, norm, limit))


def mean_and_deviation(ddof: ArrayLike, window: Window) -> tuple[Array, Array]:
    """Mean and standard deviation of the norms in a window.

    One of the norms is subtracted from all, and the differences are divided by the
    largest of them. So the mean of equal norms is exactly that norm, their deviation is
    exactly 0, and no square leaves the range.
    """
    # An empty window counts as one norm of 0, since the mean of nothing is NaN.
    length = window.past.shape[-1]
    count = jnp.clip(window.seen, 1, length)[..., None]
    is_filled = place_numbers(window) < count
    # A float32 sum of norms such as 8192 and 8192 + 2^-9 would lose their difference.
    anchor = window.past[..., :1]
    differences = jnp.where(is_filled, window.past - anchor, 0.0)
    largest = jnp.max(jnp.abs(differences), axis=-1, keepdims=True)
    # XLA divides by multiplying with the reciprocal. That of a divisor above 2^126 is
    # subnormal, and flushed to 0.
    largest = jnp.minimum(largest, jnp.finfo(differences.dtype).max / 8)
    divisor = jnp.where(largest > 0, largest, 1.0)
    quotients = differences / divisor
    mean_quotient = jnp.mean(quotients, axis=-1, keepdims=True, where=is_filled)
    variance = jnp.var(quotients, axis=-1, keepdims=True, where=is_filled)
    # As a float: under strict promotion JAX multiplies no float with an integer.
    count = count.astype(variance.dtype)
    # With as many norms as ddof, `count - ddof` is 0.
    variance = variance * count / jnp.maximum(count - ddof, 1)
    mean = anchor + largest * mean_quotient
    deviation = largest * jnp.sqrt(variance)
    return mean[..., 0], deviation[..., 0]


def skip_step_rule(call: str, sigmas: Number = 6.0, window: int | Array = 128) -> Rule:
    """The rule of `skip_step`: the first limit comes after half a window."""
    check_whole_number(f"{call}: window", window, least=2)
    return rule_for_clipper(
        call,
        WindowedMean,
        sigmas=sigmas,
        window=window,
        ddof=1,
        # OLMo-core counts the current norm too, and we do not, hence - 1.
        warmup=window // 2 - 1,
    )


def spike_rule(call: str, sigmas: Number, window: int | Array) -> Rule:
    """The rule of OLMo-core's spike score: a norm over its limit is a spike."""
    # Nothing is a spike before the window is full.
    return rule_for_clipper(
        call, WindowedMean, sigmas=sigmas, window=window, warmup=window
    )


class Growth(Rule):
    """limit = min(cap, rate * max(last norm, floor)), in the first step the cap alone.

    The last norm is what a hard clip let through, the smaller of norm and limit. A 0 is
    passed over, and the norm before it counts. From one step to the next the norm grows
    by at most the factor `rate`, however large the spike. A lasting rise by a factor f
    takes log(f) / log(rate) steps to pass. Fira, APOLLO, RACS and Alice apply this to
    each tensor of the update: `clip_by_tensor_norm(rules.growth())` after the
    preconditioner.

    Args:
      rate: growth allowed in a step, at least 0. 1.01 is 1 %. A number or a schedule.
      floor: a shorter last norm counts as this long, so that one tiny gradient does not
        hold back hundreds of steps. At least 0. A number or a schedule.
      cap: a fixed limit besides. Without one the first norm passes, whatever it is, and
        all later limits begin at it. At least 0, None for none. A number or a schedule.

    Raises:
      ValueError: a number out of its range. TypeError: something that is not a number.

    Warns:
      UserWarning: a rate of at most 1 without a floor, with which norms can only fall.

    Example:
      >>> rule = optaxclip.rules.growth(1.5)
      >>> print(optaxclip.replay.run(rule, [2.0, 9.0, 9.0, 3.0]).limits)
      [ inf 3.   4.5  6.75]

    Reference: Chen et al., Fira: can we achieve full-rank training of LLMs under
    low-rank constraint?, 2024 (arXiv 2410.01623).
    """

    rate: Number = number_field(default=1.01)
    _: KW_ONLY
    floor: Number = number_field(default=0.0)
    cap: Number | None = number_field(default=None, may_be_none=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A floor above 0 holds limits up.
        if isinstance(self.floor, (int, float, np.number)) and self.floor == 0:
            warn_if_limits_fall("growth: rate", self.rate)

    def init(self, norm: Array) -> Array:
        # inf stands for no last norm yet.
        return jnp.full_like(norm, jnp.inf)

    def update(self, norm: Array, memory: Array, step: Array) -> LimitAndMemory:
        cap = jnp.inf if self.cap is None else self.cap
        rate, floor, cap = numbers_at_step(step, norm.dtype, self.rate, self.floor, cap)
        # Without a last norm there is no limit. Then `last` is 0, since at a rate of 0
        # the product with inf would be NaN.
        has_last = memory < jnp.inf
        last = jnp.where(has_last, memory, 0.0)
        last = jnp.maximum(last, floor)
        limit = jnp.where(has_last, multiple(rate, last), jnp.inf)
        limit = jnp.minimum(limit, cap)
        # What a hard clip would let through. A rule does not know the shrink.
        passed = jnp.minimum(norm, limit)
        # From a last norm of 0 there would be no growth.
        new_memory = jnp.where(passed > 0, passed, memory)
        return limit, new_memory


class QuantileTracker(Rule):
    """limit <- limit * exp(-rate * ([norm <= limit] - quantile)).

    A norm within the limit lowers it by rate * (1 - quantile), and one beyond it raises
    it by rate * quantile. In balance a share `quantile` of the norms is within. A start
    that is too low by a factor f takes about log(f) / (rate * quantile) steps, one that
    is too high log(f) / (rate * (1 - quantile)). The paper adds noise for privacy and
    counts the share of a batch. Without noise and norm by norm it is a percentile clip
    that remembers one number.

    Args:
      quantile: in [0, 1], 0.5 is the median. A number or a schedule.
      rate: how fast the limit moves, relative to itself. At least 0, and finite. A
        number or a schedule.
      start: the first limit. The limit moves in proportion to itself, so from 0 it
        hardly moves.

    Raises:
      ValueError: a number out of its range. TypeError: something that is not a number.

    Example:
      >>> rule = optaxclip.rules.quantile_tracker(0.5, 0.2, start=1.0)
      >>> print(optaxclip.replay.run(rule, [2.0, 2.0, 1.0]).limits)
      [1.     1.1052 1.2214]

    Reference: Andrew, Thakkar, McMahan, Ramaswamy, Differentially private learning with
    adaptive clipping, 2021 (arXiv 1905.03871).
    """

    quantile: Number = number_field(default=0.5, highest=1.0)
    rate: Number = number_field(default=0.2, highest=float(np.finfo(np.float32).max))
    _: KW_ONLY
    start: ArrayLike = number_field(default=0.1, may_be_schedule=False)

    def init(self, norm: Array) -> Array:
        return jnp.full_like(norm, self.start)

    def update(self, norm: Array, limit: Array, step: Array) -> LimitAndMemory:
        quantile, rate = numbers_at_step(step, norm.dtype, self.quantile, self.rate)
        is_within = (norm <= limit).astype(norm.dtype)
        # A limit of 0 or inf would stay so, or become NaN.
        info = jnp.finfo(norm.dtype)
        old_limit = jnp.clip(limit, info.tiny, info.max)
        # A step down by 1 - quantile, or up by quantile.
        change = is_within - quantile
        new_limit = old_limit * jnp.exp(-rate * change)
        new_limit = jnp.clip(new_limit, info.tiny, info.max)
        return limit, new_limit
