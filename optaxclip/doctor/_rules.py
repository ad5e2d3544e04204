"""The rules of the doctor: which numbers are held against the limit of a cause.

Each takes arrays, float64[rows], and returns one. NaN is above no limit. Rows are
compared with medians of others, so that no row hides behind another.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .._logs import clipped_share

Array = np.ndarray

# Limits, set on one half of benchmarks/doctor.py.
SPIKE = 15.0  # medians of the rows before
LOST_GAIN = 0.5  # of what the loss had gained
RISE = 1.4  # the loss over its best
NOISE = 2.0  # times what the loss moves at its best
SCALE = 1.7  # the factor of a change that lasts
VANISHED = 1000.0  # the first norms over the last ones
RATE = 0.1  # updates over weights
LOST = 0.25  # of the rounding of weights, updates over weights
CLOSE = 0.01  # more than bfloat16 gradients lose
# Rows of a median.
LONG = 20
SHORT = 5


def medians(values: Array, rows: int, least: int) -> Array:
    """The median of each row and those before it, `rows` of them together. NaN where
    there are less than `least` numbers.
    """
    padded = np.append(np.full(rows, np.nan), values)
    windows = sliding_window_view(padded, rows)[1:]
    has_numbers = np.sum(~np.isnan(windows), axis=1) >= least
    result = np.full(len(values), np.nan)
    result[has_numbers] = np.nanmedian(windows[has_numbers], axis=1)
    return result


def medians_ahead(values: Array, rows: int, least: int) -> Array:
    """The median of each row and those behind it."""
    return medians(values[::-1], rows, least)[::-1]


def before(values: Array) -> Array:
    """For each row the number of the row before."""
    return np.append(np.nan, values[:-1])


# -------------------------------------------------------------------- loss and one norm


def itself(values: Array) -> Array:
    return values


def not_finite(values: Array) -> Array:
    return np.where(np.isfinite(values), 0.0, np.inf)


def bad_batch(norm: Array) -> Array:
    """Norms over the median of those before, if they come back within some rows."""
    usual = before(medians(norm, LONG, least=2))
    # At the end of a log nobody knows yet: rows of 0 stand for those to come.
    ahead = np.append(norm[1:], np.zeros(LONG))
    lowest = sliding_window_view(ahead, LONG).min(axis=1)
    comes_back = lowest < SPIKE / 3 * usual
    return np.where(comes_back, norm / usual, 0.0)


def divergence(loss: Array) -> Array:
    """The loss over its best, from the row on from which it stays high."""
    width = max(SHORT, len(loss) // 20)
    if len(loss) < 4 * SHORT:
        return np.zeros(len(loss))
    smooth = medians(loss, width, least=width)
    best_row = np.nanargmin(smooth)
    best = smooth[best_row]
    gain = np.median(loss[:SHORT]) - best
    rise = np.median(loss[-2 * width :]) - best
    # How far the best rows are apart: the losses of a GAN take turns.
    best_rows = loss[max(0, best_row - LONG) : best_row + 1]
    noise = np.ptp(np.quantile(best_rows, (0.2, 0.8)))
    if rise <= max(LOST_GAIN * gain, NOISE * noise):
        return np.zeros(len(loss))
    # Each row in the middle of five.
    middles = medians(np.append(loss, [np.nan, np.nan]), SHORT, least=3)[2:]
    low_rows = np.flatnonzero(middles <= best + rise / 2)
    stays_high = np.arange(len(loss)) > low_rows.max(initial=-1)
    return stays_high * middles / best


def growth_of_scale(norm: Array, loss: Array | None = None) -> Array:
    """The factor by which the norm grows from one row to the next, if it stays so, and
    the loss does not change, or by the same factor. Of one row, 0 in all others.
    """
    factors = np.zeros(len(norm))
    logs = np.log(norm)
    rises = medians_ahead(logs, SHORT, SHORT) - before(medians(logs, SHORT, SHORT))
    # Medians see a rise some rows too early and too late.
    rises = np.minimum(rises, logs - before(logs))
    # At the ends of a log there are too few rows to compare with.
    rises[: LONG // 2] = 0
    rises[len(logs) - LONG // 2 + 1 :] = 0
    row = int(np.argmax(np.where(np.isfinite(rises), rises, 0)))
    if rises[row] <= 0:
        return factors
    rise, noise = _rise(logs, row)
    # A norm that only comes back to what it was has not changed.
    is_new = np.median(logs[row:]) - np.median(logs[:row]) > 0.6 * rise
    # One that grows step by step has not leaped.
    leap = min(rise, rise - _drift(logs, row))
    is_new &= leap > 4 * noise
    if loss is not None:
        rise_of_loss, noise = _rise(np.log(loss), row)
        difference = min(abs(rise_of_loss), abs(rise_of_loss - rise))
        is_new &= difference < min(0.3 * rise, max(0.3, 4 * noise))
    factors[row] = np.exp(rise) * is_new
    return factors


def _beside(values: Array, row: int) -> tuple[Array, Array]:
    """The rows before a row, and those from it on."""
    return values[max(0, row - LONG) : row], values[row : row + LONG]


def _drift(values: Array, row: int) -> float:
    """The rise within the rows before a row, and within those from it on. If values
    rise by the same in each row, this is the rise between both.
    """
    drift = 0.0
    for rows in _beside(values, row):
        first_half, second_half = np.array_split(rows, 2)
        drift += np.median(second_half) - np.median(first_half)
    return drift


def _rise(values: Array, row: int) -> tuple[float, float]:
    """The median of the rows from one on minus that of those before, and their noise:
    a standard deviation that single rows do not move.
    """
    past, future = _beside(values, row)
    rise = np.median(future) - np.median(past)
    distances = [np.abs(rows - np.median(rows)) for rows in (past, future)]
    return rise, 1.4826 * max(np.median(rows) for rows in distances)


def fall_of_scale(norm: Array, loss: Array | None = None) -> Array:
    return growth_of_scale(1 / norm, None if loss is None else 1 / loss)


def growth(values: Array) -> Array:
    """Medians over that of the second fifth, if each fifth after it is higher."""
    if len(values) < 2 * LONG:
        return np.zeros(len(values))
    fifths = np.array([np.median(fifth) for fifth in np.array_split(values, 5)])
    is_rising = (fifths[2:] > 1.3 * fifths[1:-1]).all()
    # A few high rows in the middle are not yet growth.
    levels = np.minimum(medians(values, SHORT, least=SHORT), fifths[4])
    return is_rising * levels / fifths[1]


def vanishing(norm: Array, loss: Array) -> Array:
    """The first norms over those of each row, if the loss stays and they do not."""
    if len(norm) < LONG:
        return np.zeros(len(norm))
    rows = max(SHORT, len(loss) // 10)
    is_solved = np.median(loss[-rows:]) < 0.2 * np.median(loss[:SHORT])
    # Norms may be 0 from the beginning.
    first = np.median(norm[2:LONG]) or 1.0
    falls = first / medians(norm, SHORT, least=SHORT)
    return np.where(is_solved | (falls[-1] < VANISHED), 0.0, falls)


# --------------------------------------------------------------------- clips and skips


def clipped_always(norm: Array, limit: Array) -> Array:
    """The median of norms over limits, in all rows of a log that is not short."""
    return np.full(len(norm), np.median(norm / limit)) * (len(norm) >= LONG)


def norm_after_clip(norm: Array) -> Array:
    """The share of norms that are the largest, in the rows that have it."""
    return (norm >= norm.max() * (1 - 1e-3)) * clipped_share(norm)


def skip_behind_clip(seen: Array, highest: Array, norm: Array, limit: Array) -> Array:
    """Norms over the limit of a clipper, where a skip sees this limit instead."""
    # A skip around the clipper sees the norm itself, and one that skips works.
    works = seen > (1 + CLOSE) * np.minimum(limit, highest)
    is_hit = np.isclose(seen, limit, rtol=CLOSE) & (norm > (1 + CLOSE) * limit)
    return is_hit * (not works.any()) * norm / limit


# ---------------------------------------------------------------------- record_health


def learning_rate(lengths: Array, weights: Array) -> Array:
    """Updates over weights, where they are long for some rows or until they break."""
    # Weights of 0 have no ratio.
    ratios = np.where(weights == 0, 0.0, lengths / weights)
    is_finite = np.isfinite(ratios)
    lengths = np.where(is_finite, ratios, np.inf)
    past = medians(lengths, SHORT, least=SHORT)
    future = medians_ahead(lengths, SHORT, least=SHORT)
    is_long = np.fmax(past, future) > RATE
    return np.where(is_finite & is_long, ratios, 0.0)


def lost_updates(ratios: Array, rounding: Array) -> Array:
    """Roundings over updates, if they are lost from the beginning of the log on. At the
    end of a schedule they are in every run.
    """
    # A tensor without an update loses nothing.
    shortfalls = LOST * rounding / np.where(ratios == 0, np.nan, ratios)
    first_rows = shortfalls[: max(LONG, len(ratios) // 4)]
    updates = first_rows[~np.isnan(first_rows)]
    is_lost = len(updates) >= LONG // 2 and np.median(updates) > 1
    return is_lost * shortfalls


def no_gradient(norm: Array) -> Array:
    """1 in the rows behind the last gradient, if there are many."""
    is_at_end = np.cumprod(norm[::-1] == 0)[::-1]
    return is_at_end * (is_at_end.sum() >= max(LONG, len(norm) // 10))


def underflow(subnormals: Array, zeros: Array | float = 0.0) -> Array:
    """The share of subnormal elements among those that are not 0."""
    return medians(subnormals / (1 - zeros), SHORT, least=SHORT)


def dead_rows(shares: Array) -> Array:
    """The share of rows that are dead, beyond those that were at first."""
    return shares - shares[:1]


def first_row(norm: Array) -> Array:
    return np.arange(len(norm)) == 0
