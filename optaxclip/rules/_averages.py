"""Rules of running averages: of the norm, its deviation, its square."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._state.interop import exported
from ._memory import (
    count_up,
    exponential_average,
    has_reached,
    hypot,
    multiple,
    new_unless_zero,
    new_where,
    remembered,
    root,
)
from ._rule import (
    LimitAndMemory,
    Number,
    Rule,
    choice_field,
    flag_field,
    is_at_most_1,
    number_field,
    numbers_at_step,
    warn_if_limits_fall,
)


@exported
class Average(NamedTuple):
    """An exponential average of the norms, or other values, seen so far."""

    estimate: Array  # float32[norm]: corrected for its start
    # float32[norm]: the weights of all values seen, added up. From 0 it approaches 1.
    weight: Array


def empty_average(norm: Array) -> Average:
    """An average before the first value."""
    # Two arrays, since one array is not donated twice.
    return Average(estimate=jnp.zeros_like(norm), weight=jnp.zeros_like(norm))


def average_with(
    average: Average, value: Array, decay: Array, *, corrected: bool = True
) -> Average:
    """The average after one more value.

    A corrected average is Adam's: all values since the first, with weights that fall by
    `decay`. Otherwise the first value counts as if it had always been there.
    """
    if not corrected:
        decay = jnp.where(average.weight > 0, decay, 0.0)
    weight, share = weight_and_share(average.weight, decay)
    estimate = exponential_average(average.estimate, value, 1 - share)
    return Average(estimate, weight)


def weight_and_share(weight: Array, decay: Array) -> tuple[Array, Array]:
    """The weight of an average after one more value, and that value's share of it.

    The first value has the share 1, whatever the decay.
    """
    # With a decay of 1 each value would have the weight 0, and the share 0 / 0. So as
    # long as the sum of all weights is below 2^-30, a value has at least the weight
    # 2^-60. If all decays so far are 1, all weights are equal, and the average is the
    # mean. The first lower decay gives its value the weight 1 - decay, at least 2^-24
    # in float32. The weights of the mean, 2^-60 each, hardly count beside it.
    is_tiny = weight < 2.0**-30
    least_weight = jnp.maximum(1 - decay, 2.0**-60)
    value_weight = jnp.where(is_tiny, least_weight, 1 - decay)
    new_weight = decay * weight + value_weight
    share = value_weight / new_weight
    return new_weight, share


class Ema(Rule):
    """limit = exponential average of the norms, the current one included.

    The average is corrected for its start, so the first norm passes as it is.
    `adaclip` is this rule on the largest coordinate of each tensor.

    Args:
      decay: in [0, 1]. A number or a schedule. 1 in all steps is the mean of all norms.
        If a schedule begins with 1, its first lower decay forgets that mean. A decay of
        1 after a lower one keeps the average as it is.

    Raises:
      ValueError: a decay out of its range. TypeError: something that is not a number.

    Example:
      >>> rule = optaxclip.rules.ema(0.5)
      >>> print(optaxclip.replay.run(rule, [1.0, 4.0, 4.0]).limits)
      [1.     3.     3.5714]

    Reference: Huang et al., Stable-SPAM: how to train in 4-bit more stably than 16-bit
    Adam, 2025 (arXiv 2502.17055).
    """

    decay: Number = number_field(default=0.999, highest=1.0)

    def init(self, norm: Array) -> Average:
        return empty_average(norm)

    def update(self, norm: Array, average: Average, step: Array) -> LimitAndMemory:
        (decay,) = numbers_at_step(step, norm.dtype, self.decay)
        # The norm counts in the limit that it is held against.
        average = average_with(average, norm, decay)
        return average.estimate, average


@exported
class EmaRatioMemory(NamedTuple):
    """What `EmaRatio` remembers: the averages that `ratio` and `target` multiply."""

    seen: Array  # int32[norm]: norms remembered
    average: Average
    target_average: Average


class EmaRatio(Rule):
    """limit = ratio * average of the norms.

    With a target a norm above ratio * average is brought to target * a second average,
    which has a decay of its own.

        edge = ratio * average
        limit = target * second average     with a target, for a norm above the edge
                edge                        otherwise

    By default the smaller of norm and limit is remembered, so that a spike does not
    raise the limit for the next one. In each step the limit then grows by at most the
    factor 1 + (1 - decay) * (ratio - 1).

    Args:
      ratio: a norm above this multiple of the average is clipped. At least 0. With
        remember="clipped" and no target a ratio of at most 1 lets limits only fall. A
        number or a schedule.
      decay: of the average, in [0, 1]. A number or a schedule. 1 keeps the average as
        it is. If all decays so far are 1, the average is the first norm. With
        corrected=True it is the mean of all norms, which the first lower decay forgets.
      target: the multiple that clipped norms are brought to. None for `ratio`.
      target_decay: of the average that `target` multiplies. None for `decay`.
      corrected: whether the averages start at 0 and are corrected for it, as Adam's.
        Otherwise they start at the first norm.
      remember: "clipped" for the smaller of the norm and this rule's limit, whatever
        the clipper's shrink makes of them. "raw" for the norm as it came.
      warmup: how many norms are seen before there is a limit. At least 0. There is no
        limit before the first norm.

    Raises:
      ValueError: a number out of its range, or an unknown `remember`. TypeError:
        something that is not a number.

    Warns:
      UserWarning: a ratio of at most 1, and no target above 1, with
        `remember="clipped"`.

    Example:
      >>> rule = optaxclip.rules.ema_ratio(2.0, 0.5)
      >>> print(optaxclip.replay.run(rule, [1.0, 1.0, 9.0, 9.0]).limits)
      [inf  2.  2.  3.]

    Reference: OLMo 1, `olmo/optim.py` (max_grad_norm_ratio, no target). Its average
    starts with the second norm, which is not clipped, and the first is thrown away.
    Here it starts with the first. PDE-Transformer, `callback/ema_clip.py` (ratio 2.0,
    target 1.1, decays 0.99 and 0.9).
    """

    ratio: Number = number_field(default=2.0)
    decay: Number = number_field(default=0.99, highest=1.0)
    _: KW_ONLY
    target: Number | None = number_field(default=None, may_be_none=True)
    target_decay: Number | None = number_field(
        default=None, highest=1.0, may_be_none=True
    )
    corrected: bool = flag_field(default=False)
    remember: str = choice_field("clipped", "raw", default="clipped")
    warmup: ArrayLike = number_field(default=1, may_be_schedule=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A target above 1 lets limits rise.
        target = self.ratio if self.target is None else self.target
        if self.remember == "clipped" and is_at_most_1(target):
            warn_if_limits_fall("ema_ratio: ratio", self.ratio)

    def init(self, norm: Array) -> EmaRatioMemory:
        seen = jnp.zeros(norm.shape, jnp.int32)
        return EmaRatioMemory(seen, empty_average(norm), empty_average(norm))

    def update(
        self, norm: Array, memory: EmaRatioMemory, step: Array
    ) -> LimitAndMemory:
        target = self.ratio if self.target is None else self.target
        target_decay = self.decay if self.target_decay is None else self.target_decay
        ratio, decay, target, target_decay = numbers_at_step(
            step, norm.dtype, self.ratio, self.decay, target, target_decay
        )
        seen, average, target_average = memory
        edge = ratio * average.estimate
        # Without target and target_decay both averages are equal, and so are both
        # limits. The second average is kept all the same, two numbers for each norm,
        # so that all memories have one structure.
        limit_of_spike = target * target_average.estimate
        limit = jnp.where(norm > edge, limit_of_spike, edge)
        # Without a norm there is no average, also with a warmup of 0.
        is_past_warmup = has_reached(seen, self.warmup) & (seen > 0)
        limit = jnp.where(is_past_warmup, limit, jnp.inf)
        kept_norm = remembered(self.remember, norm, limit)
        new_memory = EmaRatioMemory(
            seen=count_up(seen),
            average=average_with(average, kept_norm, decay, corrected=self.corrected),
            target_average=average_with(
                target_average, kept_norm, target_decay, corrected=self.corrected
            ),
        )
        memory = new_unless_zero(self.remember, kept_norm, new_memory, memory)
        return limit, memory


class EmaBand(Rule):
    """limit = the norm, brought towards a band about the average.

        target = high * average             where the norm is above it
                 max(floor, low * average)  for a norm below it, with raise_small=True
                 norm                       for all others
        limit = target, within [down * norm, up * norm]
        average <- decay * average + (1 - decay) * limit

    The limit may be above the norm, so use it with `shrink=shrinks.normalize`, as
    `aggc` does. In the published runs `high` is below 1: every step is shortened, and
    the bound on a single step, `down`, decides by how much. The public code starts the
    average at 0, so that the band is next to nothing in the first steps. Here it starts
    at the first norm, which passes as it is.

    Args:
      low, high: the edges, as multiples of the average. At least 0. Numbers or
        schedules. `low` counts with raise_small=True only. A norm above `high` is
        brought down to it, even where `low` is higher. In the public scripts for LoRA
        both move linearly to later values, `low` to 0.98 and `high` to 0.7, over 0.3 of
        the steps after the first 0.4:
        `high=optax.linear_schedule(0.6, 0.7, int(0.3 * steps), int(0.4 * steps))`.
      decay: of the average, in [0, 1]. A number or a schedule. 1 keeps the average as
        it is: at the first norm, if all decays are 1.
      floor: the lower edge is at least this, in units of the norm, with
        raise_small=True. At least 0. A number or a schedule.
      up: how far one step is lengthened at most, at least 1. A number or a schedule.
      down: how far one step is shortened at most, in [0, 1]. A number or a schedule.
      raise_small: whether norms below the band are lifted. Otherwise they pass.

    Raises:
      ValueError: a number out of its range. TypeError: something that is not a number.

    Example:
      >>> rule = optaxclip.rules.ema_band(0.5, 1.0, 0.5, down=0.5)
      >>> print(optaxclip.replay.run(rule, [2.0, 3.0, 9.0]).limits)
      [2.  2.  4.5]

    Reference: Li, Wu, Chang, AGGC: adaptive group gradient clipping for stabilizing
    large language model training, 2026 (arXiv 2601.11864).
    """

    low: Number = number_field(default=0.95)
    high: Number = number_field(default=0.6)
    decay: Number = number_field(default=0.95, highest=1.0)
    _: KW_ONLY
    floor: Number = number_field(default=0.01)
    up: Number = number_field(default=1.1, lowest=1.0)
    down: Number = number_field(default=0.9, highest=1.0)
    raise_small: bool = flag_field(default=False)

    def init(self, norm: Array) -> Average:
        return empty_average(norm)

    def update(self, norm: Array, average: Average, step: Array) -> LimitAndMemory:
        low, high, decay = numbers_at_step(
            step, norm.dtype, self.low, self.high, self.decay
        )
        floor, up, down = numbers_at_step(
            step, norm.dtype, self.floor, self.up, self.down
        )
        lower = low * average.estimate
        lower = jnp.maximum(floor, lower)
        upper = high * average.estimate
        raised = jnp.maximum(norm, lower) if self.raise_small else norm
        # The upper edge wins where it is below the lower one, as it is by default.
        target = jnp.where(norm > upper, upper, raised)
        # By default a step multiplies the norm by 0.9 to 1.1, however far the band is.
        limit = jnp.clip(target, down * norm, multiple(up, norm))
        # The first norm has no band yet.
        limit = jnp.where(average.weight > 0, limit, norm)
        # The limit is what the clipped norm will be, and that is remembered. From 0 the
        # limits could never rise.
        new_average = average_with(average, limit, decay, corrected=False)
        return limit, new_where(limit != 0, new_average, average)


class MomentsRatio(Rule):
    """limit = mean / (sqrt(mean of squares) + eps), the current norm included.

        mean <- decay1 * mean + (1 - decay1) * norm          corrected for their starts
        square <- decay2 * square + (1 - decay2) * norm^2

    A steady norm has the limit 1, and a falling norm has a lower one. A norm that rises
    after a long steady run has a higher one, at most
    sqrt(decay1^2 / decay2 + (1 - decay1)^2 / (1 - decay2)). That is 1.20 by default,
    and 12.7 with decays of 0.6 and 0.999. Use the rule with `shrink=shrinks.normalize`,
    as `adagn` does.

    Args:
      decay1, decay2: of the two moments, in [0, 1]. Numbers or schedules. 1 in all
        steps is the mean of all norms. If a schedule begins with 1, its first lower
        decay forgets that mean. A decay of 1 after a lower one keeps the moment as it
        is.
      eps: at least 0, in units of the norm. A number or a schedule.

    Raises:
      ValueError: a number out of its range. TypeError: something that is not a number.

    Example:
      >>> rule = optaxclip.rules.moments_ratio(0.5, 0.5)
      >>> print(optaxclip.replay.run(rule, [1.0, 1.0, 3.0]).limits)
      [1.     1.     0.9078]

    Reference: Huang et al., Stable-SPAM: how to train in 4-bit more stably than 16-bit
    Adam, 2025 (arXiv 2502.17055), AdaGN.
    """

    decay1: Number = number_field(default=0.7, highest=1.0)
    decay2: Number = number_field(default=0.9, highest=1.0)
    _: KW_ONLY
    eps: Number = number_field(default=1e-8)

    def init(self, norm: Array) -> tuple[Average, Average]:
        return empty_average(norm), empty_average(norm)

    def update(
        self, norm: Array, memory: tuple[Average, Average], step: Array
    ) -> LimitAndMemory:
        decay1, decay2, eps = numbers_at_step(
            step, norm.dtype, self.decay1, self.decay2, self.eps
        )
        # The memory keeps the root of the mean of squares, since the square of a norm
        # may leave the range of float32.
        mean, rms = memory
        new_mean = average_with(mean, norm, decay1)
        weight, share = weight_and_share(rms.weight, decay2)
        old_part = root(1 - share) * rms.estimate
        new_part = root(share) * norm
        new_rms = hypot(old_part, new_part)
        # After a first norm of 0 and with an eps of 0 the divisor would be 0.
        divisor = jnp.where(new_rms > 0, new_rms + eps, 1.0)
        limit = new_mean.estimate / divisor
        new_memory = new_mean, Average(new_rms, weight)
        return limit, new_memory


@exported
class ZScoreMemory(NamedTuple):
    """Mean and deviation of the clipped norms."""

    seen: Array  # int32[norm]: norms remembered
    mean: Array  # float32[norm]
    deviation: Array  # float32[norm]


class ZScore(Rule):
    """limit = mean + (z^2 / score) * deviation for a norm with a score above z.

        score = (norm - mean) / (deviation + eps)
        mean, deviation     exponential averages of the clipped norms, the deviation
                            about the new mean

    The first `warmup` norms are not clipped. They give the mean and the population
    deviation to start from. For a norm that is not clipped, the limit in the state is
    mean + z * (deviation + eps), where clipping begins. The public code adds a fixed
    cap of 1.0 in every step: `rules.minimum(rules.z_score(), 1.0)`. Its averages stay
    NaN after the first NaN norm. Here such a norm is not remembered.

    Args:
      z: a norm with a score above it is clipped. At least 0. A number or a schedule.
      decay: of mean and variance, in [0, 1]. A number or a schedule.
      target: what a clipped norm is brought to: "adaptive" is the equation above,
        "mean" the mean, "max" z deviations above it.
      warmup: how many norms are seen before the first is clipped. At least 1.
      eps: added to the deviation when the score is computed, in units of the norm. At
        least 0. A number or a schedule. With 0, every norm above the mean is clipped
        after a warm-up of equal norms.

    Raises:
      ValueError: a number out of its range, or an unknown target. TypeError: something
        that is not a number.

    Example:
      >>> rule = optaxclip.rules.z_score(2.0, 0.5, warmup=3)
      >>> print(optaxclip.replay.run(rule, [1.0, 3.0, 2.0, 9.0]).limits)
      [  inf   inf   inf 2.381]

    Reference: Kumar, Owen, Chowdhury, Gura, ZClip: adaptive spike mitigation for LLM
    pre-training, 2025 (arXiv 2504.02507).
    """

    z: Number = number_field(default=2.5)
    decay: Number = number_field(default=0.97, highest=1.0)
    _: KW_ONLY
    target: str = choice_field("adaptive", "mean", "max", default="adaptive")
    warmup: ArrayLike = number_field(default=25, lowest=1, may_be_schedule=False)
    eps: Number = number_field(default=1e-6)

    def init(self, norm: Array) -> ZScoreMemory:
        seen = jnp.zeros(norm.shape, jnp.int32)
        mean = jnp.zeros_like(norm)
        deviation = jnp.zeros_like(norm)
        return ZScoreMemory(seen, mean, deviation)

    def update(self, norm: Array, memory: ZScoreMemory, step: Array) -> LimitAndMemory:
        z, decay, eps = numbers_at_step(step, norm.dtype, self.z, self.decay, self.eps)
        seen, mean, deviation = memory
        is_past_warmup = has_reached(seen, self.warmup)
        unit_of_score = deviation + eps
        edge = mean + multiple(z, unit_of_score)
        # With a unit of 0 the score is inf above the edge, and the target is the mean.
        score = (norm - mean) / unit_of_score
        if self.target == "adaptive":
            target_score = z * z / jnp.maximum(score, z)
        elif self.target == "max":
            target_score = z
        else:
            target_score = 0.0
        target = mean + target_score * deviation
        limit = jnp.where(norm > edge, target, edge)
        limit = jnp.where(is_past_warmup, limit, jnp.inf)
        clipped_norm = jnp.minimum(norm, limit)
        # In the warm-up all norms count alike, in the mean and in the variance.
        count = seen.astype(norm.dtype)
        new_count = (seen + 1).astype(norm.dtype)
        decay = jnp.where(is_past_warmup, decay, count / new_count)
        new_mean = exponential_average(mean, clipped_norm, decay)
        # With d = clipped_norm - mean, clipped_norm is decay * d from the new mean.
        # The variance of the paper is an average of (decay * d)^2. In the warm-up it is
        # the population variance, by Welford an average of d * (decay * d).
        distance_factor = jnp.where(is_past_warmup, decay, root(decay))
        distance = distance_factor * (clipped_norm - mean)
        old_part = root(decay) * deviation
        new_part = root(1 - decay) * distance
        new_deviation = hypot(old_part, new_part)
        new_memory = ZScoreMemory(count_up(seen), new_mean, new_deviation)
        return limit, new_memory


@exported
class LogZScoreMemory(NamedTuple):
    """Mean and deviation of log(1 + norm), of the clipped norms."""

    seen: Array  # int32[norm]: norms remembered
    mean: Average
    deviation: Array  # float32[norm]


class LogZScore(Rule):
    """limit = exp(mean + z * max(deviation, spread)) - 1, of log(1 + norm).

    Mean and deviation are exponential averages, of log(1 + clipped norm), corrected for
    their start. In the warm-up nothing is clipped. RNMT+ drops the whole step beyond
    four deviations: `skip_spikes(optimizer, rules.log_z_score())`.

    Args:
      z: how many deviations are allowed, at least 0. A number or a schedule.
      decay: of mean and variance, in [0, 1]. A number or a schedule. 1 in all steps
        counts all norms alike. If a schedule begins with 1, its first lower decay
        forgets all earlier norms, and the deviation is then 0. A decay of 1 after a
        lower one keeps mean and deviation as they are.
      floor: shorter norms count as this long. At least 0, and finite. A number or a
        schedule.
      spread: the deviation counts as at least this much, so that norms that hardly
        differ are not outliers of one another. At least 0. A number or a schedule.
      warmup: how many norms are seen before there is a limit. At least 1. After 277
        norms the default average has 0.75 of its final weight, 1 - 0.995^277.

    Raises:
      ValueError: a number out of its range. TypeError: something that is not a number.

    Example:
      >>> rule = optaxclip.rules.log_z_score(2.0, 0.5, warmup=2)
      >>> print(optaxclip.replay.run(rule, [1.0, 2.0, 9.0]).limits)
      [  inf   inf 2.841]

    Reference: Chen et al., The best of both worlds: combining recent advances in neural
    machine translation, 2018 (arXiv 1804.09849). Lingvo, `core/layers.py`,
    GradNormTracker, clips the norms of the warm-up too, by a limit that begins near 0.
    So it learns less from a spike in the warm-up, and for some hundred steps after the
    spike its limits are lower.
    """

    z: Number = number_field(default=4.0)
    decay: Number = number_field(default=0.995, highest=1.0)
    _: KW_ONLY
    # With an infinite floor the logarithms would differ by inf - inf.
    floor: Number = number_field(default=0.01, highest=float(np.finfo(np.float32).max))
    spread: Number = number_field(default=1e-3)
    warmup: ArrayLike = number_field(default=277, lowest=1, may_be_schedule=False)

    def init(self, norm: Array) -> LogZScoreMemory:
        seen = jnp.zeros(norm.shape, jnp.int32)
        deviation = jnp.zeros_like(norm)
        return LogZScoreMemory(seen, empty_average(norm), deviation)

    def update(
        self, norm: Array, memory: LogZScoreMemory, step: Array
    ) -> LimitAndMemory:
        z, decay = numbers_at_step(step, norm.dtype, self.z, self.decay)
        floor, spread = numbers_at_step(step, norm.dtype, self.floor, self.spread)
        seen, mean, deviation = memory
        deviation_or_spread = jnp.maximum(deviation, spread)
        log_limit = mean.estimate + multiple(z, deviation_or_spread)
        is_past_warmup = has_reached(seen, self.warmup)
        # expm1 and log1p keep the digits of norms far below 1.
        limit = jnp.where(is_past_warmup, jnp.expm1(log_limit), jnp.inf)
        clipped_norm = jnp.minimum(norm, limit)
        floored_norm = jnp.maximum(clipped_norm, floor)
        log_norm = jnp.log1p(floored_norm)
        new_mean = average_with(mean, log_norm, decay)
        _, share = weight_and_share(mean.weight, decay)
        # variance <- (1 - share) * (variance + share * (x - mean)^2), never negative.
        distance = root(share) * (log_norm - mean.estimate)
        new_deviation = root(1 - share) * hypot(deviation, distance)
        new_memory = LogZScoreMemory(count_up(seen), new_mean, new_deviation)
        return limit, new_memory
