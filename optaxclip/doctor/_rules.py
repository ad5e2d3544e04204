"""The rules of the doctor.

A rule takes columns, float64[rows], and returns a number for each row, or one for all
rows. A row shows the cause if its number is above the limit in the table of causes. NaN
is above no limit. Rows are compared with medians of other rows, so that no spike hides
behind another one.
"""

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .._logs import are_largest, clipped_share

Array = np.ndarray

# What rules compare with stands before them, and the limits of their numbers stand in
# the table of causes. Both were set on one half of the trainings in benchmarks/doctor.

# How many rows a median is of.
LONG = 20
SHORT = 5


def medians(values: Array, rows: int) -> Array:
    """For each row the median of the last `rows` rows, itself among them. NaN in the
    first rows, which have fewer before them.
    """
    return np.median(windows_behind(values, rows), axis=1)


def medians_ahead(values: Array, rows: int) -> Array:
    """For each row the median of the next `rows` rows, itself among them."""
    backwards = values[::-1]
    return medians(backwards, rows)[::-1]


def windows_behind(values: Array, rows: int) -> Array:
    """For each row the last `rows` rows. They are NaN before the log begins."""
    padded = np.pad(values, (rows - 1, 0), constant_values=np.nan)
    return sliding_window_view(padded, rows)


def lowest_ahead(values: Array) -> Array:
    """For each row the lowest of it and all rows to come."""
    backwards = values[::-1]
    return np.minimum.accumulate(backwards)[::-1]


def shifted(values: Array) -> Array:
    """For each row the number of the row before."""
    return np.append(np.nan, values[:-1])


# -------------------------------------------------------------------- loss and one norm

CAME_BACK = 5.0  # a norm that has come back, over the median before the spike
LOST_GAIN = 0.5  # the rise of the loss over its fall
LOSS_NOISE = 2.0  # the rise of the loss over its noise
STEADY = 1.3  # a fifth of the log over the fifth before it
SOLVED = 0.2  # the last losses over the first ones
VANISHED = 1000.0  # the first norms over the last ones


def not_finite(values: Array) -> Array:
    return np.where(np.isfinite(values), 0.0, np.inf)


def bad_batch(norm: Array) -> Array:
    """Norms over the median of those before, if a low norm follows within 20 rows, or
    the log ends.
    """
    medians_so_far = np.nanmedian(windows_behind(norm, LONG), axis=1)
    usual_norm = shifted(medians_so_far)
    # One row before is too few to judge by.
    usual_norm[1] = np.nan
    # Rows behind the end of a log are unknown. They are taken for low.
    next_rows = np.pad(norm[1:], (0, LONG))
    windows = sliding_window_view(next_rows, LONG)
    comes_back = windows.min(axis=1) < CAME_BACK * usual_norm
    ratios = norm / usual_norm
    return np.where(comes_back, ratios, 0.0)


def divergence(loss: Array) -> Array | float:
    """The loss over its lowest, from the row on from which it stays high."""
    width = max(SHORT, len(loss) // 20)
    # A thousand windows are enough: all of a long log would not fit into memory.
    stride = max(1, len(loss) // 1000)
    windows = sliding_window_view(loss, width)[::stride]
    levels = np.median(windows, axis=1)
    lowest = levels.min()
    end_of_lowest = width + stride * np.argmin(levels)
    first_rows = loss[:SHORT]
    last_rows = loss[-2 * width :]
    fall = np.median(first_rows) - lowest
    rise = np.median(last_rows) - lowest
    # Quantiles, since the two losses of a GAN take turns.
    start = max(0, end_of_lowest - LONG - 1)
    lowest_rows = loss[start:end_of_lowest]
    low, high = np.quantile(lowest_rows, (0.2, 0.8))
    noise = high - low
    if rise <= max(LOST_GAIN * fall, LOSS_NOISE * noise):
        return 0.0
    # Around each row five rows, fewer at the ends of the log.
    padded = np.pad(loss, 2, constant_values=np.nan)
    rows_around = sliding_window_view(padded, 5)
    middles = np.nanmedian(rows_around, axis=1)
    stays_high = lowest_ahead(middles) > lowest + rise / 2
    ratios = middles / lowest
    return np.where(stays_high, ratios, 0.0)


def growth(values: Array) -> Array | float:
    """Medians over the median of the second fifth, if each fifth after it is at least
    1.3 times the fifth before.
    """
    fifths = np.array_split(values, 5)
    _, *levels = [np.median(fifth) for fifth in fifths]
    second = levels[0]
    last = levels[-1]
    factors = np.divide(levels[1:], levels[:-1])
    # A rise from 0 has no factor.
    if second == 0 or not np.all(factors > STEADY):
        return 0.0
    # A few high rows in the middle are not yet growth.
    lengths = np.minimum(medians(values, SHORT), last)
    return lengths / second


def vanishing(norm: Array, loss: Array) -> Array | float:
    """The first norms over the norm of each row, if the loss does not fall as well."""
    tail = max(SHORT, len(loss) // 10)
    first_loss = np.median(loss[:SHORT])
    last_loss = np.median(loss[-tail:])
    is_solved = last_loss < SOLVED * first_loss
    first_norm = np.median(norm[2:LONG])
    # Adapters may begin with norms of 0, which no norm falls below.
    if is_solved or first_norm == 0:
        return 0.0
    factors = first_norm / medians(norm, SHORT)
    comes_back = factors[-1] < VANISHED
    if comes_back:
        return 0.0
    return factors


# --------------------------------------------------------------------- change of scale

LEAP = 3.7  # the rise of log(norm), in units of its noise
LEAP_LEFT = 0.6  # the part of a leap that is left in all rows behind it
SAME_LOG = 0.3  # a difference of log(loss), or its part of the leap of log(norm)


class Change(NamedTuple):
    """How values change at a row: the 20 rows before it, and the 20 from it on."""

    rise: float  # from the median before to the median from the row on
    drift: float  # the rise within the rows before, and within those from the row on
    noise: float  # the median distance from these medians


def change_at(values: Array, row: int) -> Change:
    start = max(0, row - LONG)
    past = values[start:row]
    future = values[row : row + LONG]
    return Change(
        rise=np.median(future) - np.median(past),
        drift=drift_of(past) + drift_of(future),
        noise=np.maximum(noise_of(past), noise_of(future)),
    )


def drift_of(values: Array) -> float:
    first_half, second_half = np.array_split(values, 2)
    return np.median(second_half) - np.median(first_half)


def noise_of(values: Array) -> float:
    middle = np.median(values)
    return np.median(np.abs(values - middle))


def growth_of_scale(norm: Array, loss: Array | None = None) -> Array | float:
    """The factor by which the norm grows at one row, if it stays so, and the loss does
    not change, or by the same factor. 0 in all other rows.
    """
    logs = np.log(norm)
    row = _row_of_leap(logs)
    if row == 0:
        return 0.0
    change = change_at(logs, row)
    # A norm that grows step by step has not leaped.
    leap = change.rise - max(0.0, change.drift)
    # A norm that only comes back to where it was does not stay.
    rows_before, rows_behind = np.split(logs, [row])
    rise_of_all_rows = np.median(rows_behind) - np.median(rows_before)
    # Among norms of 0, before or behind, the noise is NaN, and then this is False.
    is_leap = leap >= LEAP * change.noise
    stays = rise_of_all_rows >= LEAP_LEFT * change.rise
    if not is_leap or not stays:
        return 0.0
    if loss is not None and not _fits(np.log(loss), row, change.rise):
        return 0.0
    factors = np.zeros(len(norm))
    factors[row] = np.exp(change.rise)
    return factors


def _fits(logs_of_loss: Array, row: int, rise_of_norm: float) -> bool:
    """Whether the loss does not change, or by the factor of the norm."""
    change = change_at(logs_of_loss, row)
    tolerance = max(SAME_LOG, 6 * change.noise)
    tolerance = min(tolerance, SAME_LOG * rise_of_norm)
    from_none = abs(change.rise)
    from_same = abs(change.rise - rise_of_norm)
    return min(from_none, from_same) <= tolerance


def fall_of_scale(*norm_and_loss: Array) -> Array | float:
    """The factor by which the norm falls at one row, likewise."""
    return growth_of_scale(*[1 / column for column in norm_and_loss])


def _row_of_leap(logs: Array) -> int:
    """The row with the largest rise over the row before. 0 if nothing rises."""
    # NaN at the ends of a log, where there are too few rows to compare with.
    past = shifted(medians(logs, LONG // 2))
    future = medians_ahead(logs, LONG // 2)
    rises_of_rows = logs - shifted(logs)
    # Medians rise in the rows beside a leap as well.
    rises = np.minimum(future - past, rises_of_rows)
    finite_rises = np.where(np.isfinite(rises), rises, 0.0)
    return int(np.argmax(finite_rises))


# --------------------------------------------------------------------- clips and skips

RTOL = 0.01  # a relative difference, more than bfloat16 makes


def clipped_always(norm: Array, limit: Array) -> float:
    """The median of norms over limits, for all rows."""
    ratios = norm / limit
    return np.median(ratios)


def norm_after_clip(norm: Array) -> Array:
    """The share of norms that are the largest, in the rows that have it."""
    share = clipped_share(norm)
    return np.where(are_largest(norm), share, 0.0)


def skip_behind_clip(
    skip_norm: Array, skip_limit: Array, clip_norm: Array, clip_limit: Array
) -> Array | float:
    """Norms over the limit of a clipper, in clipped rows where the norm of a skip is
    this limit: the skip is behind the clipper.
    """
    # A skip that has skipped a step, or sees more than the limit, sees the norm itself.
    lower_limit = np.minimum(clip_limit, skip_limit)
    if np.any(skip_norm > (1 + RTOL) * lower_limit):
        return 0.0
    sees_limit = np.isclose(skip_norm, clip_limit, rtol=RTOL)
    is_clipped = clip_norm > (1 + RTOL) * clip_limit
    ratios = clip_norm / clip_limit
    return np.where(sees_limit & is_clipped, ratios, 0.0)


# ---------------------------------------------------------------------- record_health

HIGH_RATIO = 0.075  # updates over weights
KEPT_PART = 0.25  # an update below this part of the rounding of its weights is lost


def learning_rate(update_norm: Array, weight_norm: Array) -> Array:
    """Updates over weights, in rows of a long stretch: three of the last five rows, or
    of the next five, are above HIGH_RATIO or not finite.
    """
    # Weights of 0 have no ratio.
    ratios = update_norm / weight_norm
    ratios = np.where(weight_norm == 0, 0.0, ratios)
    is_finite = np.isfinite(ratios)
    # Rows with NaN or inf count as above HIGH_RATIO.
    ratios_or_inf = np.where(is_finite, ratios, np.inf)
    past = medians(ratios_or_inf, SHORT)
    future = medians_ahead(ratios_or_inf, SHORT)
    is_in_stretch = np.fmax(past, future) > HIGH_RATIO
    return np.where(is_finite & is_in_stretch, ratios, 0.0)


def lost_updates(ratio: Array, rounding: Array) -> Array | float:
    """The smallest update that is kept over the update, if most updates are lost from
    the beginning of the log on. At the end of a schedule they are in every run.
    """
    # A step without an update loses nothing.
    ratio = np.where(ratio == 0, np.nan, ratio)
    shortfalls = KEPT_PART * rounding / ratio
    quarter = max(LONG, len(ratio) // 4)
    first_rows = shortfalls[:quarter]
    is_number = ~np.isnan(first_rows)
    early_shortfalls = first_rows[is_number]
    are_few = len(early_shortfalls) < LONG // 2
    if are_few or np.median(early_shortfalls) <= 1:
        return 0.0
    return shortfalls


def no_gradient(norm: Array) -> Array | float:
    """1 in the rows behind the last gradient, if there are many."""
    is_zero = norm == 0
    stays_zero = lowest_ahead(is_zero)
    least_rows = max(LONG, len(norm) // 10)
    if stays_zero.sum() < least_rows:
        return 0.0
    return stays_zero


def underflow(subnormals: Array, zeros: Array | float = 0.0) -> Array:
    """The share of subnormal elements among those that are not 0."""
    shares = subnormals / (1 - zeros)
    return medians(shares, SHORT)


def dead_rows(share: Array) -> Array:
    """The share of rows that are dead, beyond those that were at first."""
    return share - share[0]
