"""The rules of the doctor.

A rule takes columns, float64[rows], and returns a number for each row, or one for all
rows. A row shows the cause if its number is above the limit in the table of causes. NaN
is above no limit. Rows are compared with medians of other rows, so that no spike hides
behind another one. The rules are the functions that the table of causes (_causes.py)
names.
"""

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .._logs.after_clip import are_largest, clipped_share

Array = np.ndarray

# Constants of this module and limits of the table of causes were set on one half of the
# trainings in benchmarks/doctor.

# Numbers of rows.
LONG_WINDOW = 20
SHORT_WINDOW = 5


def _medians(values: Array, rows: int) -> Array:
    """For each row the median of the last `rows` rows, itself among them. NaN at the
    start, where there are fewer rows.
    """
    return np.median(_windows_up_to(values, rows), axis=1)


def _medians_ahead(values: Array, rows: int) -> Array:
    """For each row the median of the next `rows` rows, itself among them. NaN at the
    end, where there are fewer rows.
    """
    backwards = values[::-1]
    return _medians(backwards, rows)[::-1]


def _windows_up_to(values: Array, rows: int) -> Array:
    """For each row the last `rows` rows. They are NaN before the log begins."""
    padded = np.pad(values, (rows - 1, 0), constant_values=np.nan)
    return sliding_window_view(padded, rows)


def _lowest_ahead(values: Array) -> Array:
    """For each row the lowest number in it and all rows to come."""
    backwards = values[::-1]
    return np.minimum.accumulate(backwards)[::-1]


def _shifted(values: Array) -> Array:
    """For each row the number of the row before, NaN for the first."""
    return np.append(np.nan, values[:-1])


# -------------------------------------------------------------------- loss and one norm


def not_finite(values: Array) -> Array:
    return np.where(np.isfinite(values), 0.0, np.inf)


# A spike exceeds the median of the rows before it by this factor.
LEAST_SPIKE = 15.0
# The median counts as at least this part of the first norms: in a network that knows
# all its examples the usual norm is that of rounding errors.
LEAST_USUAL_NORM = 1e-6
# A norm below this multiple of the median before a spike has come back.
LOW_AGAIN_OVER_USUAL = 5.0
# A burst of bad batches has so many rows at most. After it the norm falls by a factor,
# and below a multiple of the median before the burst.
LONGEST_BURST = 100
FALL_AFTER_BURST = 5.0
LEVEL_AFTER_BURST = 15.0


def bad_batch(norm: Array) -> Array:
    """The norm over the median of up to 20 rows before. 0 unless the norm is high for a
    short time:

    - a low norm follows within 20 rows,
    - a burst ends within 100 rows, or
    - the log ends within 20 rows, the row before is low, and no change of scale
      begins.
    """
    least_norm = LEAST_USUAL_NORM * np.median(norm[:LONG_WINDOW])
    usual_norm = np.maximum(usual_before(norm), least_norm)
    low_norm = LOW_AGAIN_OVER_USUAL * usual_norm
    next_rows = _next_rows(norm, LONG_WINDOW)
    comes_back = next_rows.min(axis=1) < low_norm
    log_ends = np.isinf(next_rows[:, -1])
    lowest_level = _next_rows(_levels_after_bursts(norm), LONGEST_BURST).min(axis=1)
    burst_ends = lowest_level < LEVEL_AFTER_BURST * usual_norm
    # Norms that grow until the log ends, or until they are NaN, are not a bad batch.
    # Nor are norms that leap and stay up for ten rows or more.
    keeps_scale = growth_of_scale(norm) == 0
    leaps_at_end = log_ends & (_shifted(norm) < low_norm) & keeps_scale
    is_bad = comes_back | burst_ends | leaps_at_end
    return np.where(is_bad, norm / usual_norm, 0.0)


def _levels_after_bursts(norm: Array) -> Array:
    """The median of the next five rows, where it is far below that of the five rows
    before: a burst of bad batches ends at once. inf in other rows, also after a change
    of data, where norms fall step by step.
    """
    past = _shifted(_medians(norm, SHORT_WINDOW))
    future = _medians_ahead(norm, SHORT_WINDOW)
    return np.where(past > FALL_AFTER_BURST * future, future, np.inf)


def _next_rows(values: Array, rows: int) -> Array:
    """For each row the rows after it. They are inf after the end of the log."""
    padded = np.pad(values[1:], (0, rows), constant_values=np.inf)
    return sliding_window_view(padded, rows)


def usual_before(values: Array) -> Array:
    """The median of up to 20 rows before each row. NaN in the first two rows: one row
    before is too few to judge by.
    """
    medians_so_far = np.nanmedian(_windows_up_to(values, LONG_WINDOW), axis=1)
    usual_values = _shifted(medians_so_far)
    usual_values[1:2] = np.nan
    return usual_values


# Rows that a loss needs for its levels, and to say that it never falls.
LEAST_ROWS_OF_LOSS = 20
LEAST_ROWS_OF_HEIGHT = 10
# A loss diverges if its rise exceeds these multiples of the lowest level, of the whole
# fall (a loss near 0 may rise many times over), and of the error of a level.
LEAST_RISE = 0.1
LEAST_RISE_OVER_FALL = 0.01
LEAST_RISE_OVER_ERROR = 5.0
# A loss never falls if both hold, as multiples of its first losses: its lowest level is
# above LOWEST_OVER_FIRST, and nearly all losses of its last two thirds are above
# NEVER_FALLS. A log of fewer than FEW_ROWS needs more than that.
LOWEST_OVER_FIRST = 0.9
NEVER_FALLS = 1.03
NEVER_FALLS_IN_FEW_ROWS = 2.0
FEW_ROWS = 100
# The first row alone is the first level if the loss stays above this multiple of it.
BLOWN_UP = 5.0


class LossLevels(NamedTuple):
    """Where a loss begins, how low it comes, and where it ends."""

    first: float
    second_tenth: float
    lowest: float
    last: float
    error: float  # of the lowest level
    # What nearly all losses of the last two thirds exceed, over the first losses. 0
    # unless the loss never falls.
    kept_height: float
    rise_row: int  # near the row in which the loss leaves its lowest level

    @property
    def fall(self) -> float:
        return self.first - self.lowest

    @property
    def rise(self) -> float:
        return self.last - self.lowest

    @property
    def is_rise(self) -> bool:
        """Whether the loss ends far above its lowest level."""
        return self.rise > max(
            LEAST_RISE * self.lowest,
            LEAST_RISE_OVER_FALL * self.fall,
            LEAST_RISE_OVER_ERROR * self.error,
        )


def loss_levels(loss: Array) -> LossLevels:
    """The levels of a loss: the medians of the first five rows, of the second tenth of
    the log and of the last one, and the lowest median of a twentieth. If the loss stays
    above five times its first row, that row is the first level.
    """
    width = max(SHORT_WINDOW, len(loss) // 20)
    # A thousand windows are enough. All windows of a long log do not fit into memory.
    stride = max(1, len(loss) // 1000)
    windows = sliding_window_view(loss, width)[::stride]
    levels = np.median(windows, axis=1)
    lowest = levels.min()
    lowest_end = width + stride * int(np.argmin(levels))
    error = _error_of_median(loss[:lowest_end], width)
    last_low_window = np.flatnonzero(levels <= lowest + 2 * error)[-1]
    # What nearly all losses of the last two thirds exceed.
    kept_level = np.quantile(loss[len(loss) // 3 :], 0.01)
    first = np.median(loss[:SHORT_WINDOW])
    # The steps after the first row may have blown the loss up for good.
    if kept_level > BLOWN_UP * loss[0]:
        first = min(first, loss[0])
    kept_height = kept_level / first
    least_height = NEVER_FALLS if len(loss) >= FEW_ROWS else NEVER_FALLS_IN_FEW_ROWS
    never_falls = lowest > LOWEST_OVER_FIRST * first and kept_height > least_height
    return LossLevels(
        first=first,
        second_tenth=np.median(loss[len(loss) // 10 : len(loss) // 5]),
        lowest=lowest,
        last=np.median(loss[-2 * width :]),
        error=error,
        kept_height=kept_height if never_falls else 0.0,
        rise_row=stride * int(last_low_window) + width // 2,
    )


def _error_of_median(loss: Array, width: int) -> float:
    """How far chance moves the median of `width` rows, by the spread of the last 21."""
    # If two losses take turns, as in a GAN, each quantile is one of them. Of 21 rows
    # both quantiles are entries, so nothing is interpolated.
    low, high = np.quantile(loss[-LONG_WINDOW - 1 :], (0.2, 0.8))
    # Where losses take turns, a median over many rows is no more exact than over fifty.
    return (high - low) / np.sqrt(min(width, 50))


def height_of_loss(loss: Array) -> float:
    """The last losses over the first ones, if the loss never falls. Else 0."""
    levels = loss_levels(loss)
    return levels.last / levels.first if levels.kept_height else 0.0


BLOWN_UP_AT_ONCE = 4.0  # the median of rows two to six over the first row


def blown_up_at_once(loss: Array) -> Array | float:
    """The loss over its first row, in rows two to six, if their median is far above it.
    0 if the loss never falls, which `height_of_loss` finds.
    """
    factors = loss / loss[0]
    # A noisy loss may begin low by chance.
    late_loss = loss[max(LONG_WINDOW, len(loss) // 2) :]
    spread = 1.0
    if late_loss.size:
        spread = np.median(late_loss) / np.quantile(late_loss, 0.1)
    never_falls = len(loss) >= LEAST_ROWS_OF_HEIGHT and height_of_loss(loss) > 0
    early_factors = factors[1 : 1 + SHORT_WINDOW]
    if never_falls or np.median(early_factors) <= BLOWN_UP_AT_ONCE * spread:
        return 0.0
    factors[1 + SHORT_WINDOW :] = 0.0
    return factors


# So many separate spikes before a NaN speak of the rate or the weights. A spike ends
# where five rows show none.
MANY_SPIKES = 5


def spikes_before_nan(norm: Array) -> Array | float:
    """The numbers of `bad_batch`, if the norm is NaN or inf soon after the last spike
    and to the end, and at least MANY_SPIKES spikes are separate.
    """
    finite_rows = np.flatnonzero(np.isfinite(norm))
    if finite_rows.size == 0:
        return 0.0
    last_finite_row = finite_rows[-1]
    if last_finite_row == len(norm) - 1:
        return 0.0
    values = np.zeros(len(norm))
    values[finite_rows] = bad_batch(norm[finite_rows])
    spike_rows = np.flatnonzero(values > LEAST_SPIKE)
    spikes = 1 + np.count_nonzero(np.diff(spike_rows) > SHORT_WINDOW)
    is_soon = spike_rows.size > 0 and last_finite_row - spike_rows[-1] <= LONG_WINDOW
    return values if is_soon and spikes >= MANY_SPIKES else 0.0


# A sum of all gradients so far: the third norm over the first one, the median of all
# over the first one, and the change from one row to the next. Gradients of batches
# change by a tenth and more.
GROWTH_IN_THREE_ROWS = 1.5
GROWTH_OF_SUM = 3.0
LARGEST_CHANGE_OF_SUM = 0.03


def gradients_added_up(norm: Array) -> Array | float:
    """The norm over its first row, if it grows at once, stays far above it, and hardly
    changes from one row to the next, as the sum of all gradients so far does.
    """
    changes = np.abs(np.diff(np.log(norm)))
    factors = norm / norm[0]
    # In norms after a clip most rows are equal.
    is_sum = (
        factors[2] > GROWTH_IN_THREE_ROWS
        and np.median(factors) > GROWTH_OF_SUM
        and np.median(changes) < LARGEST_CHANGE_OF_SUM
        and clipped_share(norm) == 0
    )
    return factors if is_sum else 0.0


def divergence(loss: Array) -> Array | float:
    """The loss over its lowest level, in the rows from which on it stays high."""
    levels = loss_levels(loss)
    if not levels.is_rise:
        return 0.0
    values = np.zeros(len(loss))
    row = row_of_rise(loss, levels)
    values[row:] = _medians_around(loss, SHORT_WINDOW)[row:] / levels.lowest
    return values


def row_of_rise(loss: Array, levels: LossLevels) -> int:
    """The first row from which on the loss stays above a quarter of its rise, and that
    is itself above the noise. The number of rows if the loss does not rise for good.
    """
    if not levels.is_rise and levels.kept_height == 0:
        return len(loss)
    # A loss that never falls begins below its lowest median.
    low_level = min(levels.first, levels.lowest)
    rise = levels.last - low_level
    lowest_to_come = _lowest_ahead(_medians_around(loss, LONG_WINDOW + 1))
    stays_high = lowest_to_come > low_level + rise / 4
    # A noisy loss that leaps raises medians a few rows before the leap. So the loss
    # itself must be high as well.
    least_rise = np.clip(LEAST_RISE_OVER_ERROR * levels.error, rise / 4, rise / 2)
    heights = np.minimum(loss, _medians_around(loss, SHORT_WINDOW))
    is_high = heights > low_level + least_rise
    return int(np.argmax(np.append(stays_high & is_high, True)))


def leaps_at(row: int, loss: Array, levels: LossLevels) -> bool:
    """Whether a loss that rises for good makes most of its rise at one row: from the
    median of the five rows before it to the median of the five from it on.
    """
    past = np.median(loss[max(0, row - SHORT_WINDOW) : row]) if row else np.inf
    future = np.median(loss[row : row + SHORT_WINDOW])
    return bool(future - past > (levels.last - past) / 2)


def _medians_around(values: Array, rows: int) -> Array:
    """For each row the median of `rows` rows around it, of fewer at the ends of the
    log. Where values leap, this median leaps in the same row.
    """
    padded = np.pad(values, rows // 2, constant_values=np.nan)
    return np.nanmedian(sliding_window_view(padded, rows), axis=1)


LEAP = 5.0  # a level over the level five rows before, if it does not grow row by row


def leap_of_rate(rate: Array) -> Array:
    """The rate over that of the row before, or over the median of up to 20 rows before
    if that is higher. A linear warm-up from 0 stays below LEAP. 0 in the first two
    rows, and where a rate leaves 0.
    """
    factors = rate / np.maximum(usual_before(rate), _shifted(rate))
    return np.where(np.isfinite(factors), factors, 0.0)


STEADY_GROWTH = 1.3  # the median of a fifth of the log over the fifth before it


def growth(values: Array) -> Array | float:
    """The level that each row and all rows to come keep, over the median of the second
    fifth of the log, if each fifth after it is more than 1.3 times the fifth before.
    """
    _, *fifths = np.array_split(values, 5)
    levels = [np.median(fifth) for fifth in fifths]
    second_level = levels[0]
    factors = np.divide(levels[1:], levels[:-1])
    # A rise from 0 has no factor.
    if second_level == 0 or not np.all(factors > STEADY_GROWTH):
        return 0.0
    return _kept_levels(values) / second_level


SHRUNK = 10.0  # the first norm of the weights over the last one, if they shrink


def shrinking(weights: Array) -> Array | float:
    """The first norm of the weights over that of each row, if it ends far below it."""
    factors = weights[0] / np.maximum(weights, np.finfo(float).tiny)
    return factors if factors[-1] > SHRUNK else 0.0


def late_growth(norm: Array) -> Array | float:
    """The level that each row and all rows to come keep, over the median of the log. 0
    if the level leaps, as where a scale changes.
    """
    levels = _kept_levels(norm)
    leaps = levels[SHORT_WINDOW:] / levels[:-SHORT_WINDOW]
    if np.any(leaps > LEAP):
        return 0.0
    return levels / np.median(norm)


def _kept_levels(values: Array) -> Array:
    """For each row the lowest median of five rows, in it and all rows to come. A few
    high rows in the middle are not a level.
    """
    return _lowest_ahead(_medians(values, SHORT_WINDOW))


SOLVED = 0.2  # the last losses over the first ones, if the task is solved
VANISHED = 1000.0  # the first norms over the last ones, if the gradient vanishes


def vanishing(norm: Array, loss: Array) -> Array | float:
    """The first norms over the median of five rows, if the last norms are low and the
    loss does not fall as well.
    """
    last_rows = max(SHORT_WINDOW, len(loss) // 10)
    first_loss = np.median(loss[:SHORT_WINDOW])
    last_loss = np.median(loss[-last_rows:])
    is_solved = last_loss < SOLVED * first_loss
    first_norm = np.median(norm[2:LONG_WINDOW])
    # Adapters may begin with norms of 0, which no norm falls below.
    if is_solved or first_norm == 0:
        return 0.0
    factors = first_norm / _medians(norm, SHORT_WINDOW)
    is_high_at_end = factors[-1] < VANISHED
    if is_high_at_end:
        return 0.0
    return factors


# --------------------------------------------------------------------- change of scale

LEAP_OVER_NOISE = 3.7  # of log(norm)
LASTING_PART = 0.6  # of a leap: the median of all rows after it must keep so much
# How far the rise of log(loss) may be from 0, or from the rise of log(norm): this much,
# or more if the loss is noisy, but at most this part of the rise of log(norm).
LOSS_TOLERANCE = 0.3


class Change(NamedTuple):
    """How values change between the 20 rows before a row and the 20 rows from it on."""

    rise: float  # from the median before to the median from the row on
    drift: float  # the rise within the rows before, plus the rise within those after
    noise: float  # the median distance from these medians, the larger of the two


def _change_at(values: Array, row: int) -> Change:
    start = max(0, row - LONG_WINDOW)
    past = values[start:row]
    future = values[row : row + LONG_WINDOW]
    return Change(
        rise=np.median(future) - np.median(past),
        drift=_drift_of(past) + _drift_of(future),
        noise=np.maximum(_noise_of(past), _noise_of(future)),
    )


def _drift_of(values: Array) -> float:
    first_half, second_half = np.array_split(values, 2)
    return np.median(second_half) - np.median(first_half)


def _noise_of(values: Array) -> float:
    middle = np.median(values)
    return np.median(np.abs(values - middle))


def growth_of_scale(norm: Array, loss: Array | None = None) -> Array | float:
    """The factor by which the norm grows at one row, and 0 in all others. The norm must
    stay so, and the loss must stay as it was or change by the same factor.
    """
    logs = np.log(norm)
    row = _row_of_leap(logs)
    if row == 0:
        return 0.0
    change = _change_at(logs, row)
    # Growth step by step, before or after the row, is not part of the leap.
    leap = change.rise - max(0.0, change.drift)
    # All rows after it must be higher too: a norm that only comes back to its usual
    # value is no leap.
    rows_before, rows_after = np.split(logs, [row])
    rise_of_all = np.median(rows_after) - np.median(rows_before)
    # If most norms on a side are 0 the noise is NaN, and then this is False.
    is_leap = leap >= LEAP_OVER_NOISE * change.noise
    stays = rise_of_all >= LASTING_PART * change.rise
    if not is_leap or not stays:
        return 0.0
    if loss is not None and not _loss_fits(np.log(loss), row, change.rise):
        return 0.0
    factors = np.zeros(len(norm))
    factors[row] = np.exp(change.rise)
    return factors


def fall_of_scale(norm: Array, loss: Array | None = None) -> Array | float:
    """The factor by which the norm falls at one row, on the conditions of
    `growth_of_scale`.
    """
    return growth_of_scale(1 / norm, None if loss is None else 1 / loss)


def _row_of_leap(logs: Array) -> int:
    """The row with the largest rise, both of the row over the row before and of the
    medians of ten rows. 0 if nothing rises.
    """
    # Both are NaN at one end of the log, where no leap is looked for.
    past = _shifted(_medians(logs, LONG_WINDOW // 2))
    future = _medians_ahead(logs, LONG_WINDOW // 2)
    rises_of_rows = logs - _shifted(logs)
    # The rise of medians alone would not tell a leap from the rows next to it.
    rises = np.minimum(future - past, rises_of_rows)
    finite_rises = np.where(np.isfinite(rises), rises, 0.0)
    return int(np.argmax(finite_rises))


def _loss_fits(logs_of_loss: Array, row: int, rise_of_norm: float) -> bool:
    """Whether the loss stays as it was, or changes by the factor of the norm."""
    change = _change_at(logs_of_loss, row)
    tolerance = max(LOSS_TOLERANCE, 6 * change.noise)
    tolerance = min(tolerance, LOSS_TOLERANCE * rise_of_norm)
    stays = abs(change.rise) <= tolerance
    rises_with_norm = abs(change.rise - rise_of_norm) <= tolerance
    return stays or rises_with_norm


# --------------------------------------------------------------------- clips and skips

RTOL = 0.01  # a relative difference, more than bfloat16 makes


def clipped_always(norm: Array, limit: Array) -> float:
    """The median of norm over limit."""
    return np.median(norm / limit)


def norm_after_clip(norm: Array) -> Array:
    """In rows with the largest norm, the share of such rows. 0 elsewhere, and in all
    rows if norms do not look clipped.
    """
    share = clipped_share(norm)
    return np.where(are_largest(norm), share, 0.0)


def skip_behind_clip(
    skip_norm: Array, skip_limit: Array, clip_norm: Array, clip_limit: Array
) -> Array | float:
    """The norm over the limit of a clipper, in the rows in which the clipper clips and
    the skip sees just this limit.
    """
    # A norm above the clip limit says that the skip is not behind the clipper. A norm
    # above its own limit says that it skips.
    lower_limit = np.minimum(clip_limit, skip_limit)
    if np.any(skip_norm > (1 + RTOL) * lower_limit):
        return 0.0
    sees_limit = np.isclose(skip_norm, clip_limit, rtol=RTOL)
    is_clipped = clip_norm > (1 + RTOL) * clip_limit
    return np.where(sees_limit & is_clipped, clip_norm / clip_limit, 0.0)


# ---------------------------------------------------------------------- record_health

HIGH_RATIO = 0.075  # updates over weights
KEPT_PART = 0.25  # an update below this part of the rounding of its weights is lost


def high_update_ratio(update_norm: Array, weight_norm: Array) -> Array:
    """Updates over weights, in rows where they stay high: three of the last five rows,
    or of the next five, are above HIGH_RATIO or not finite.
    """
    # Weights of 0 have no ratio.
    ratios = update_norm / weight_norm
    ratios = np.where(weight_norm == 0, 0.0, ratios)
    is_finite = np.isfinite(ratios)
    # Rows with NaN or inf count as above HIGH_RATIO.
    ratios_or_inf = np.where(is_finite, ratios, np.inf)
    past = _medians(ratios_or_inf, SHORT_WINDOW)
    future = _medians_ahead(ratios_or_inf, SHORT_WINDOW)
    stays_high = np.fmax(past, future) > HIGH_RATIO
    return np.where(is_finite & stays_high, ratios, 0.0)


def lost_updates(ratio: Array, rounding: Array) -> Array | float:
    """How many times larger an update must be to survive rounding, if most updates in
    the first quarter of the log are lost. At the end of a schedule every run loses
    them.
    """
    # A step without an update loses nothing: with `optax.MultiSteps` these are most.
    ratio = np.where(ratio == 0, np.nan, ratio)
    shortfalls = KEPT_PART * rounding / ratio
    quarter = max(LONG_WINDOW, len(ratio) // 4)
    first_rows = shortfalls[:quarter]
    is_number = ~np.isnan(first_rows)
    early_shortfalls = first_rows[is_number]
    are_few = len(early_shortfalls) < LONG_WINDOW // 2
    if are_few or np.median(early_shortfalls) <= 1:
        return 0.0
    return shortfalls


def no_gradient(norm: Array) -> Array | float:
    """True in the rows after the last gradient that is not 0, if there are many."""
    is_zero = norm == 0
    stays_zero = _lowest_ahead(is_zero)
    if stays_zero.sum() < max(LONG_WINDOW, len(norm) // 10):
        return 0.0
    return stays_zero


def underflow(subnormals: Array, zeros: Array | float = 0.0) -> Array:
    """The share of subnormal elements among those that are not 0, the median of five
    rows. Without the share of zeros: among all elements.
    """
    shares = subnormals / (1 - zeros)
    return _medians(shares, SHORT_WINDOW)


def dead_embeddings(share: Array) -> Array:
    """The share of dead embeddings, beyond the share in the first row of the log."""
    return share - share[0]
