"""The rules of the doctor: which number of each row is held against the limit of a
cause.

A rule takes columns, float64[rows], and returns a number for each row, or one for all
rows. NaN is above no limit. Rows are compared with medians of other rows, so that no
spike hides behind another one.
"""

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .._logs import clipped_share

Array = np.ndarray

# Limits, set on one half of the trainings in benchmarks/doctor.py.
SPIKE = 15.0  # a norm over the median of those before
BACK = 5.0  # a norm that has come back, over the same median
RISE = 1.4  # the loss over its lowest
LOST_GAIN = 0.5  # the rise of the loss over its fall
LOSS_NOISE = 2.0  # the rise of the loss over its noise
SCALE = 1.7  # a norm over those before it, from one row to the next
LEAP = 3.7  # the logarithm of that factor over the noise of logarithms
VANISHED = 1000.0  # the first norms over the last ones
RATE = 0.075  # updates over weights
LOST = 0.25  # updates over weights, over the rounding of the weights
CLOSE = 0.01  # a relative difference, more than bfloat16 makes
# How many rows a median is of.
LONG = 20
SHORT = 5


def medians(values: Array, rows: int, least: int | None = None) -> Array:
    """For each row the median of the last `rows` rows, itself among them. NaN where
    fewer than `least` of them are numbers: all, if None.
    """
    padding = np.full(rows - 1, np.nan)
    padded = np.append(padding, values)
    windows = sliding_window_view(padded, rows)
    number_counts = np.sum(~np.isnan(windows), axis=1)
    is_enough = number_counts >= (rows if least is None else least)
    result = np.full(len(values), np.nan)
    result[is_enough] = np.nanmedian(windows[is_enough], axis=1)
    return result


def medians_ahead(values: Array, rows: int) -> Array:
    """For each row the median of the next `rows` rows, itself among them."""
    return medians(values[::-1], rows)[::-1]


def medians_around(values: Array) -> Array:
    """For each row the median of five rows, of which it is the middle one."""
    padded = np.append(values, [np.nan, np.nan])
    return medians(padded, 5, least=3)[2:]


def before(values: Array) -> Array:
    """For each row the number of the row before."""
    return np.append(np.nan, values[:-1])


# -------------------------------------------------------------------- loss and one norm


def itself(values: Array) -> Array:
    return values


def not_finite(values: Array) -> Array:
    return np.where(np.isfinite(values), 0.0, np.inf)


def bad_batch(norm: Array) -> Array:
    """Norms over the median of those before, if a low norm follows within 20 rows."""
    usual_norm = before(medians(norm, LONG, least=2))
    # Behind the end of a log the rows to come are unknown, and taken for low.
    rows_to_come = np.append(norm[1:], np.zeros(LONG))
    lowest_to_come = sliding_window_view(rows_to_come, LONG).min(axis=1)
    comes_back = lowest_to_come < BACK * usual_norm
    return np.where(comes_back, norm / usual_norm, 0.0)


def divergence(loss: Array) -> Array | float:
    """The loss over its lowest, from the row on from which it stays high."""
    width = max(SHORT, len(loss) // 20)
    levels = medians(loss, width)
    lowest_row = np.nanargmin(levels)
    lowest = levels[lowest_row]
    fall = np.median(loss[:SHORT]) - lowest
    rise = np.median(loss[-2 * width :]) - lowest
    # The two losses of a GAN take turns, which looks like noise.
    rows_at_lowest = loss[max(0, lowest_row - LONG) : lowest_row + 1]
    low, high = np.quantile(rows_at_lowest, (0.2, 0.8))
    noise = high - low
    if rise <= LOST_GAIN * fall or rise <= LOSS_NOISE * noise:
        return 0.0
    middles = medians_around(loss)
    lowest_to_come = np.minimum.accumulate(middles[::-1])[::-1]
    stays_high = lowest_to_come > lowest + rise / 2
    return np.where(stays_high, middles / lowest, 0.0)


def growth(values: Array) -> Array | float:
    """Medians over that of the second fifth, if each fifth after it is higher."""
    fifths = np.array_split(values, 5)
    levels = np.array([np.median(fifth) for fifth in fifths])
    is_rising = levels[2:] > 1.3 * levels[1:-1]
    if not is_rising.all():
        return 0.0
    # A few high rows in the middle are not yet growth.
    values = np.minimum(medians(values, SHORT), levels[-1])
    return values / levels[1]


def vanishing(norm: Array, loss: Array) -> Array | float:
    """The first norms over those of each row, if the loss stays and they do not."""
    tenth = max(SHORT, len(loss) // 10)
    first_loss = np.median(loss[:SHORT])
    last_loss = np.median(loss[-tenth:])
    is_solved = last_loss < 0.2 * first_loss
    # A norm may be 0 in the first steps.
    first_norm = np.median(norm[2:LONG]) or 1.0
    falls = first_norm / medians(norm, SHORT)
    comes_back = falls[-1] < VANISHED
    if is_solved or comes_back:
        return 0.0
    return falls


# --------------------------------------------------------------------- change of scale


class Change(NamedTuple):
    """How values change at a row: the 20 rows before it, and the 20 from it on."""

    rise: float  # from the median before to the median from the row on
    drift: float  # the rise within the rows before, and within those from the row on
    noise: float  # the median distance from these medians


def change_at(row: int, values: Array) -> Change:
    past = values[max(0, row - LONG) : row]
    future = values[row : row + LONG]
    rise = np.median(future) - np.median(past)
    noise = max(noise_of(past), noise_of(future))
    return Change(rise, drift_of(past) + drift_of(future), noise)


def noise_of(values: Array) -> float:
    distances = np.abs(values - np.median(values))
    return float(np.median(distances))


def drift_of(values: Array) -> float:
    first_half, second_half = np.array_split(values, 2)
    return float(np.median(second_half) - np.median(first_half))


def growth_of_scale(norm: Array, loss: Array | None = None) -> Array | float:
    """The factor by which the norm grows at one row, if it stays so, and the loss does
    not change, or by the same factor. 0 in all other rows.
    """
    logs = np.log(norm)
    row = _row_of_leap(logs)
    if row is None:
        return 0.0
    change = change_at(row, logs)
    # A norm that grows step by step has not leaped.
    leap = change.rise - max(0.0, change.drift)
    if leap < LEAP * change.noise:
        return 0.0
    # A norm that only comes back to what it was has not changed.
    rise_of_all_rows = np.median(logs[row:]) - np.median(logs[:row])
    if rise_of_all_rows < 0.6 * change.rise:
        return 0.0
    if loss is not None:
        loss_change = change_at(row, np.log(loss))
        difference = min(abs(loss_change.rise), abs(loss_change.rise - change.rise))
        if difference > min(0.3 * change.rise, max(0.3, 6 * loss_change.noise)):
            return 0.0
    factors = np.zeros(len(norm))
    factors[row] = np.exp(change.rise)
    return factors


def fall_of_scale(norm: Array, loss: Array | None = None) -> Array | float:
    """The factor by which the norm falls at one row, likewise."""
    if loss is None:
        return growth_of_scale(1 / norm)
    return growth_of_scale(1 / norm, 1 / loss)


def _row_of_leap(logs: Array) -> int | None:
    """The row with the largest rise over the row before. None if nothing rises."""
    # NaN at the ends of a log, where there are too few rows to compare with.
    past = before(medians(logs, LONG // 2))
    future = medians_ahead(logs, LONG // 2)
    # Medians see a leap in the rows beside it as well.
    rises = np.minimum(future - past, logs - before(logs))
    rises = np.where(np.isfinite(rises), rises, 0.0)
    row = int(np.argmax(rises))
    return row if rises[row] > 0 else None


# --------------------------------------------------------------------- clips and skips


def clipped_always(norm: Array, limit: Array) -> float:
    """The median of norms over limits, for all rows."""
    return np.median(norm / limit)


def norm_after_clip(norm: Array) -> Array:
    """The share of norms that are the largest, in the rows that have it."""
    is_largest = norm >= norm.max() * (1 - 1e-3)
    return np.where(is_largest, clipped_share(norm), 0.0)


def skip_behind_clip(
    skip_norm: Array, skip_limit: Array, clip_norm: Array, clip_limit: Array
) -> Array | float:
    """Norms over the limit of a clipper, where a skip sees this limit instead."""
    # A skip that has skipped a step, or sees more than the limit, sees the norm itself.
    lower_limit = np.minimum(clip_limit, skip_limit)
    if np.any(skip_norm > (1 + CLOSE) * lower_limit):
        return 0.0
    sees_limit = np.isclose(skip_norm, clip_limit, rtol=CLOSE)
    is_clipped = clip_norm > (1 + CLOSE) * clip_limit
    return np.where(sees_limit & is_clipped, clip_norm / clip_limit, 0.0)


# ---------------------------------------------------------------------- record_health


def learning_rate(update_norm: Array, weight_norm: Array) -> Array:
    """Updates over weights, where three of five rows are long or broken."""
    # Weights of 0 have no ratio.
    ratios = np.where(weight_norm == 0, 0.0, update_norm / weight_norm)
    is_finite = np.isfinite(ratios)
    # Rows with NaN or inf count as long.
    lengths = np.where(is_finite, ratios, np.inf)
    past = medians(lengths, SHORT)
    future = medians_ahead(lengths, SHORT)
    is_long = np.fmax(past, future) > RATE
    return np.where(is_finite & is_long, ratios, 0.0)


def lost_updates(ratio: Array, rounding: Array) -> Array | float:
    """Roundings over updates, if most are lost from the beginning of the log on. At the
    end of a schedule they are in every run.
    """
    # A step without an update loses nothing.
    ratio = np.where(ratio == 0, np.nan, ratio)
    shortfalls = LOST * rounding / ratio
    first_rows = shortfalls[: max(LONG, len(ratio) // 4)]
    first_updates = first_rows[~np.isnan(first_rows)]
    if len(first_updates) < LONG // 2 or np.median(first_updates) <= 1:
        return 0.0
    return shortfalls


def no_gradient(norm: Array) -> Array | float:
    """1 in the rows behind the last gradient, if there are many."""
    highest_to_come = np.maximum.accumulate(norm[::-1])[::-1]
    is_gone = highest_to_come == 0
    if is_gone.sum() < max(LONG, len(norm) // 10):
        return 0.0
    return np.where(is_gone, 1.0, 0.0)


def underflow(subnormals: Array, zeros: Array | float = 0.0) -> Array:
    """The share of subnormal elements among those that are not 0."""
    shares = subnormals / (1 - zeros)
    return medians(shares, SHORT)


def dead_rows(share: Array) -> Array:
    """The share of rows that are dead, beyond those that were at first."""
    return share - share[0]


def first_row(norm: Array) -> Array:
    return np.where(np.arange(len(norm)) == 0, 1.0, 0.0)
