"""The rules of the doctor: which steps of a log show a cause.

Each takes the signals of a log and returns `Hits`, or None where the log lacks the
columns that the rule needs. Rows are compared with medians of rows before, so that no
row hides behind another.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .._logs import Column, clipped_share, in_common, listed
from ._signals import Recorder, Signals, Tensors, in_order

# The limits of the rules. Each was set on one half of benchmarks/doctor.py.
OVERFLOWS = 0.1  # of the rows, under a dynamic loss scale
BEFORE = 20  # rows whose median a row is compared with
MEDIAN = 5  # rows, of numbers of tensors
SPIKE = 10.0  # medians
BACK = 20  # rows after a spike in which the norm is usual again
LOST_GAIN = 0.5  # of what the loss had gained
RISE = 1.4  # the loss at the end over its best
NOISE = 2.0  # times what the loss moves at its best
SCALE = 1.7  # the factor of a change that lasts
GROWTH = 10.0  # of the norm over the log
VANISHED = 1e-3  # of the norm of the first rows
CLIPPED = 0.95  # of the rows
SHORTENED = 10.0  # norm over limit, of clipped rows
RATE = 0.1  # updates over weights
SUBNORMAL = 0.25  # of the elements that are not 0
DEAD = 0.2  # of the rows of an embedding
GROWN = 2.5  # times, the growth of weights in 100 steps
LOST = 0.25  # of the rounding of weights, updates over weights
LOGIT = 100.0  # of Kimi K2
SKIP_ROWS = 100  # in which a skip is compared with a clipper
ROUNDING = 0.01  # more than bfloat16 gradients lose


class Hits(NamedTuple):
    """The steps that show a cause. None of them where it was looked for in vain."""

    steps: np.ndarray  # int64[hits]
    values: np.ndarray  # float64[hits]: what was held against the limit
    subject: str = ""  # the columns or tensors, for the text
    detail: str = ""  # what stands beside it


def no_hits() -> Hits:
    return Hits(np.zeros(0, np.int64), np.zeros(0))


def hits_of(
    column: Column, is_hit: np.ndarray, values: np.ndarray, **text: str
) -> Hits:
    return Hits(column.steps[is_hit], values[is_hit], **text)


def earliest(candidates: Sequence[Hits]) -> Hits:
    """The hits that begin first. The text of a finding has room for one subject."""
    found = [hits for hits in candidates if hits.steps.size]
    return min(found, key=lambda hits: hits.steps[0], default=no_hits())


# --------------------------------------------------------------- of rows and their past


def medians_before(values: np.ndarray, rows: int = BEFORE) -> np.ndarray:
    """The median of the finite numbers in the rows before each, from the third on."""
    finite_values = np.where(np.isfinite(values), values, np.nan)
    padded = np.concatenate([np.full(rows, np.nan), finite_values])
    windows = sliding_window_view(padded, rows)[: len(values)].copy()
    has_numbers = np.isfinite(windows).any(axis=1) & (np.arange(len(values)) >= 2)
    medians = np.full(len(values), np.nan)
    medians[has_numbers] = np.nanmedian(windows[has_numbers], axis=1)
    return medians


def medians_until(values: np.ndarray, rows: int = MEDIAN) -> np.ndarray:
    """The median of the last rows, NaN before there are as many."""
    medians = np.full(len(values), np.nan)
    if len(values) >= rows:
        medians[rows - 1 :] = np.median(sliding_window_view(values, rows), axis=1)
    return medians


def finite(column: Column) -> Column:
    is_finite = np.isfinite(column.values)
    return column._replace(
        steps=column.steps[is_finite], values=column.values[is_finite]
    )


def spread(values: np.ndarray) -> float:
    """A standard deviation that single rows do not move."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


# -------------------------------------------------------------------- loss and one norm


def not_finite(signals: Signals) -> Hits | None:
    """NaN or inf, with what was broken first."""
    if signals.loss is None and not signals.norms:
        return None
    columns = [] if signals.loss is None else [signals.loss]
    candidates: list[Hits] = []
    if not _is_of_a_loss_scale(signals):
        columns += signals.norms
        candidates += map(_broken_tensors, signals.gradients)
    for column in columns:
        is_broken = ~np.isfinite(column.values)
        subject = repr(column.name)
        candidates.append(hits_of(column, is_broken, column.values, subject=subject))
    first = earliest(candidates)
    if first.detail:
        return first
    # Which came first is what a reader asks next.
    later = [
        f"{hits.subject} from step {hits.steps[0]} on"
        for hits in candidates
        if hits.steps.size and hits.subject != first.subject
    ]
    return first._replace(detail=", ".join(later))


def _is_of_a_loss_scale(signals: Signals) -> bool:
    """Whether norms are infinite now and then, as under a dynamic loss scale."""
    is_scaled = any(re.search(r"loss.?scale|scaler", name) for name in signals.columns)
    for column in signals.norms:
        is_broken = ~np.isfinite(column.values)
        is_rare = is_broken.mean() <= OVERFLOWS and not is_broken[-1]
        if not is_rare or (np.isnan(column.values).any() and not is_scaled):
            return False
    return True


def _broken_tensors(recorder: Recorder) -> Hits:
    """The tensors with NaN or inf in the first broken step, and those beside them."""
    columns = recorder.tensors("nonfinite") or recorder.tensors("norm")
    broken: dict[str, Hits] = {}
    for name, column in columns.items():
        counts = column.values
        is_broken = ~np.isfinite(counts)
        if "nonfinite" in recorder.signs:
            # Where norms are null in JSON, so are counts.
            is_broken |= counts > 0
        if is_broken.any():
            broken[name] = hits_of(column, is_broken, counts)
    if not broken:
        return no_hits()
    first = min(hits.steps[0] for hits in broken.values())
    names = in_order(list(columns))
    is_first = [name in broken and broken[name].steps[0] == first for name in names]
    tensors = [name for name, is_one in zip(names, is_first) if is_one]
    beside = [
        name
        for place, name in enumerate(names)
        if not is_first[place] and any(is_first[max(0, place - 1) : place + 2])
    ]
    detail = f"finite beside them: {listed(beside) or 'none'}"
    if tensors == [""]:
        detail = "a summary does not tell which tensors"
    merged = _merged(broken)
    subject = listed([name or recorder.name for name in tensors])
    return merged._replace(subject=subject, detail=detail)


def bad_batch(signals: Signals) -> Hits | None:
    """Norms far above the usual ones, which come back within some rows."""
    if not signals.norms:
        return None
    # What follows a divergence is no news.
    rises = [divergence(signals), data_change(signals)]
    ends = [hits.steps[0] for hits in rises if hits is not None and hits.steps.size]
    candidates = []
    for column in signals.norms:
        ratios = _ratios_to_medians(column)
        is_hit = (ratios > SPIKE) & (column.steps < min(ends, default=np.inf))
        for row in np.flatnonzero(is_hit):
            median = column.values[row] / ratios[row]
            after = column.values[row + 1 : row + 1 + BACK]
            # At the end of a log nobody knows yet.
            is_at_end = len(after) < BACK
            is_hit[row] = is_at_end or (after < SPIKE / 3 * median).any()
        candidates.append(hits_of(column, is_hit, ratios, subject=repr(column.name)))
    return earliest(candidates)


def _ratios_to_medians(column: Column) -> np.ndarray:
    """Norms over the median of those before, 0 where there is none."""
    medians = medians_before(column.values)
    is_compared = np.isfinite(column.values) & (medians > 0)
    ratios = np.zeros(len(medians))
    ratios[is_compared] = column.values[is_compared] / medians[is_compared]
    return ratios


def divergence(signals: Signals) -> Hits | None:
    """The loss rises and stays, step by step or after a spike of the norm."""
    return _hits_of_rise(signals, of_data=False)


def data_change(signals: Signals) -> Hits | None:
    """The loss leaps from one row to the next and stays, and no norm stands out."""
    return _hits_of_rise(signals, of_data=True) if signals.norms else None


def _hits_of_rise(signals: Signals, *, of_data: bool) -> Hits | None:
    loss = signals.loss
    if loss is None or not _is_positive(loss):
        return None
    rise = _rise_of_loss(finite(loss))
    if rise is None:
        return no_hits()
    spike = _spike_near(signals, rise.step)
    rate = learning_rate(signals)
    is_of_rate = rate is not None and (np.abs(rate.steps - rise.step) <= MEDIAN).any()
    # Without a norm nobody knows whether it stood out.
    is_calm = bool(signals.norms) and spike < SPIKE and not is_of_rate
    is_of_data = rise.is_sudden and is_calm
    if is_of_data != of_data:
        return no_hits()
    return Hits(
        np.array([rise.step]),
        np.array([rise.end_over_best]),
        subject=repr(loss.name),
        detail=f"a norm of {spike:.3g} medians came with it" if spike >= SPIKE else "",
    )


def _is_positive(loss: Column) -> bool:
    """Losses that change their sign, as in reinforcement learning, have no best."""
    return bool((finite(loss).values > 0).all())


class Rise(NamedTuple):
    """A loss that goes up and stays above its best."""

    step: int  # the first one above
    end_over_best: float
    is_sudden: bool  # from one row to the next


def _rise_of_loss(loss: Column) -> Rise | None:
    """Compares the last rows with the best ones."""
    values = loss.values
    if len(values) < 4 * MEDIAN:
        return None
    width = max(MEDIAN, len(values) // 20)
    smooth = medians_until(values, width)
    first = float(np.median(values[:MEDIAN]))
    last = float(np.median(values[-2 * width :]))
    best_row = int(np.nanargmin(smooth))
    best = float(smooth[best_row])
    # How far the best rows are apart: the losses of a GAN take turns.
    near = values[max(0, best_row - BEFORE) : best_row + 1]
    noise = float(np.ptp(np.quantile(near, (0.2, 0.8))))
    gain = max(first - best, 0.0)
    rise = last - best
    if rise <= max(LOST_GAIN * gain, NOISE * noise, (RISE - 1) * best):
        return None
    # Smoothing sees a rise later than it is: from the last row that was still good.
    last_good = int(np.flatnonzero(smooth <= best + 0.25 * rise)[-1])
    start = max(1, last_good - width)
    # The medians of the rows from each on, so that a single high one does not count.
    ahead = np.append(medians_until(values)[MEDIAN - 1 :], np.full(MEDIAN - 1, last))
    is_high = np.minimum(values, ahead)[start:] > best + 0.5 * rise
    row = start + int(np.argmax(is_high))
    before = float(np.median(values[max(0, row - MEDIAN) : row]))
    after = float(np.median(values[row : row + MEDIAN]))
    is_sudden = after - before >= 0.5 * rise and row >= MEDIAN
    return Rise(int(loss.steps[row]), last / best, is_sudden)


def _spike_near(signals: Signals, step: int) -> float:
    """The largest norm around a step, in medians of those before."""
    largest = 0.0
    for column in signals.norms:
        row = int(np.searchsorted(column.steps, step))
        near = _ratios_to_medians(column)[max(0, row - 3) : row + 4]
        largest = max(largest, float(near.max(initial=0.0)))
    return largest


def scale_change(signals: Signals) -> Hits | None:
    """The norm changes by a factor from one row to the next, and keeps it, while the
    loss does not change, or by the same factor.
    """
    loss = signals.loss
    if not signals.norms or (loss is not None and not _is_positive(loss)):
        return None
    candidates = [_scale_change_of(column, loss) for column in signals.norms]
    return earliest(candidates)


def _scale_change_of(norm: Column, loss: Column | None) -> Hits:
    # A norm of 0 has no factor to the one before.
    norm = finite(norm._replace(values=np.where(norm.values == 0, np.nan, norm.values)))
    logs = np.log(norm.values)
    rows = BEFORE // 2
    if len(logs) < 2 * rows:
        return no_hits()
    # Of so many rows before and after each row.
    long = medians_until(logs, rows)
    short = medians_until(logs, 3)
    places = np.arange(rows, len(logs) - rows + 1)
    changes = long[places + rows - 1] - long[places - 1]
    at_once = short[places + 2] - short[places - 1]
    is_sudden = np.abs(at_once) > 0.8 * np.abs(changes)
    largest = int(np.argmax(np.abs(changes) * is_sudden))
    change = float(changes[largest] * is_sudden[largest])
    # Medians see a change a row or two too early or too late.
    near = np.arange(places[largest] - 3, places[largest] + 4).clip(1, len(logs) - 1)
    row = int(near[np.argmax(np.abs(logs[near] - logs[near - 1]))])
    before = logs[max(0, row - BEFORE) : row]
    after = logs[row : row + BEFORE]
    if abs(change) < np.log(SCALE):
        return no_hits()
    noise = max(spread(before), spread(after))
    # A norm that only comes back to what it was has not changed.
    earlier = (np.median(before), np.median(logs[:row]))
    lasting = min((np.median(logs[row:]) - level) / change for level in earlier)
    if abs(change) < 4 * noise or lasting < 0.6:
        return no_hits()
    if loss is not None and not _agrees(loss, int(norm.steps[row]), change):
        return no_hits()
    factor = float(np.exp(abs(change)))
    return Hits(
        np.array([norm.steps[row]]),
        np.array([factor]),
        subject=repr(norm.name),
        detail=f"{factor:.4g} times as {'long' if change > 0 else 'short'}",
    )


def _agrees(loss: Column, step: int, change: float) -> bool:
    """Whether the loss stays at a step, or changes by the same factor as the norm."""
    loss = finite(loss)
    row = int(np.searchsorted(loss.steps, step))
    before = loss.values[max(0, row - BEFORE // 2) : row]
    after = loss.values[row : row + BEFORE // 2]
    if not before.size or not after.size:
        return False
    noise = spread(np.log(before)) + spread(np.log(after))
    change_of_loss = np.log(np.median(after)) - np.log(np.median(before))
    is_equal = abs(change_of_loss) < min(max(0.1, 2 * noise), 0.3 * abs(change))
    return bool(is_equal or abs(change_of_loss - change) < 0.3)


def steady_growth(signals: Signals) -> Hits | None:
    """Medians of the norm that rise over most of the log."""
    if not signals.norms:
        return None
    return earliest([_growth_of(column) for column in signals.norms])


def _growth_of(column: Column) -> Hits:
    column = finite(column)
    if len(column.values) < 2 * BEFORE:
        return no_hits()
    fifths = np.array_split(column.values, 5)
    medians = np.array([np.median(fifth) for fifth in fifths])
    is_rising = bool((medians[2:] > 1.1 * medians[1:-1]).all())
    growth = float(medians[-1] / medians[1]) if medians[1] > 0 else 0.0
    if not is_rising or growth < GROWTH:
        return no_hits()
    start = 2 * len(column.values) // 5
    is_above = medians_before(column.values)[start:] > 2 * medians[1]
    row = start + int(np.argmax(is_above))
    return Hits(
        column.steps[row : row + 1], np.array([growth]), subject=repr(column.name)
    )


def vanishing(signals: Signals) -> Hits | None:
    """The norm falls to nothing although the loss does not."""
    if not signals.norms or signals.loss is None:
        return None
    loss = finite(signals.loss).values
    if len(loss) < BEFORE or not _is_positive(signals.loss):
        return None
    rows = max(MEDIAN, len(loss) // 10)
    is_solved = np.median(loss[-rows:]) < 0.2 * np.median(loss[:MEDIAN])
    if is_solved:
        return no_hits()
    candidates = []
    for column in signals.norms:
        norm = finite(column)
        if len(norm.values) >= BEFORE:
            first = np.median(norm.values[2:BEFORE])
            shares = medians_until(norm.values) / first
            # 0 / 0 is a norm that is 0 from the beginning.
            is_hit = np.nan_to_num(shares, nan=0.0) < VANISHED
            is_hit[: MEDIAN - 1] = False
            is_hit &= is_hit[-1]
            subject = repr(norm.name)
            candidates.append(hits_of(norm, is_hit, -shares, subject=subject))
    return earliest(candidates)


# --------------------------------------------------------------------- clips and skips


class Clip(NamedTuple):
    """The columns of one clipper."""

    name: str
    norm: Column
    limit: Column


# "train/clip/outer/norm_before", and "train/skip_2/norm".
CLIPS = re.compile(r"(.*[/. ])?clip(_\d+)?/(.*/)?norm_before")
SKIPS = re.compile(r"(.*[/. ])?(skip|spike)(_\d+)?/(.*/)?norm")


def _clips(signals: Signals) -> Iterator[Clip]:
    for name, column in signals.columns.items():
        limit = signals.columns.get(f"{name.removesuffix('norm_before')}limit")
        if CLIPS.fullmatch(name) and limit is not None:
            yield Clip(name, column, limit)


def clipped_always(signals: Signals) -> Hits | None:
    """Nearly all rows are far above the limit, so that it is a second learning rate."""
    clips = list(_clips(signals))
    if not clips:
        return None
    candidates = []
    for clip in clips:
        steps, (norms, limits) = in_common([clip.norm, clip.limit])
        with np.errstate(all="ignore"):
            ratios = norms / limits
        is_hit = ratios > 1
        is_always = len(steps) >= BEFORE and is_hit.mean() >= CLIPPED
        if is_always and np.median(ratios[is_hit]) >= SHORTENED:
            column = clip.norm._replace(steps=steps)
            median = np.full(len(steps), np.median(ratios[is_hit]))
            candidates.append(hits_of(column, is_hit, median, subject=repr(clip.name)))
    return earliest(candidates)


def norm_after_clip(signals: Signals) -> Hits | None:
    """Many norms are exactly the largest one, or the limit of a clipper."""
    if not signals.norms:
        return None
    columns = {column.name: column for column in signals.norms}
    for recorder in signals.gradients:
        total = recorder.total("norm")
        if total is not None:
            columns[total.name] = total
    candidates = []
    for column in columns.values():
        share = clipped_share(column.values)
        if share:
            largest = finite(column).values.max()
            is_hit = column.values >= largest * (1 - 1e-3)
            shares = np.full(len(is_hit), share)
            hits = hits_of(
                column,
                is_hit,
                shares,
                subject=repr(column.name),
                detail=f"{largest:.4g}",
            )
            candidates.append(hits)
    return earliest(candidates)


def skip_behind_clip(signals: Signals) -> Hits | None:
    """A skip that judges what a clipper left, also in steps that this one clips."""
    skips = [name for name in signals.columns if SKIPS.fullmatch(name)]
    pairs = list(product(skips, _clips(signals)))
    if not pairs:
        return None
    candidates = []
    for skip, clip in pairs:
        highest = signals.columns.get(f"{skip.removesuffix('norm')}limit")
        if highest is None:
            continue
        columns = [signals.columns[skip], highest, clip.norm, clip.limit]
        steps, (seen, highest_norms, raw, limits) = in_common(columns)
        most = (1 + ROUNDING) * limits
        # A skip around the clipper sees the raw norm. Where both are the same number,
        # the skip is behind the clipper, and the clipper is not one of other leaves.
        is_hit = (raw > most) & np.isclose(seen, limits, rtol=ROUNDING)
        # A rule that has not seen enough steps has no limit yet.
        is_hit &= np.isfinite(highest_norms)
        is_skipped = seen > (1 + ROUNDING) * highest_norms
        if len(steps) >= SKIP_ROWS and not (is_skipped | (seen > most)).any():
            column = clip.norm._replace(steps=steps)
            candidates.append(hits_of(column, is_hit, raw / limits, subject=repr(skip)))
    return earliest(candidates)


def unnamed_recorders(signals: Signals) -> Hits | None:
    """Two recorders, of which none says that it sees updates."""
    recorders = signals.gradients
    if len(recorders) < 2 or signals.updates:
        return None if len(recorders) + len(signals.updates) < 2 else no_hits()
    column = next(iter(recorders[0].tensors("norm").values()))
    names = [recorder.name for recorder in recorders]
    return Hits(column.steps[:1], np.array([2.0]), subject=listed(names))


# --------------------------------------------------------------------- record_health


def learning_rate(signals: Signals) -> Hits | None:
    """Updates that are long beside the weights, for some rows or right before NaN."""
    candidates = []
    is_judged = False
    for recorder in signals.updates:
        lengths = recorder.total("norm")
        weights = recorder.total("weight_norm")
        if lengths is None or weights is None:
            continue
        is_judged = True
        steps, numbers = in_common([lengths, weights])
        with np.errstate(all="ignore"):
            ratios = numbers[0] / numbers[1]
        ratios[~np.isfinite(numbers).all(axis=0) | (numbers[1] == 0)] = np.nan
        # Of the rows behind a median those count that are above the limit themselves.
        is_long = medians_until(ratios) > RATE
        is_hit = np.zeros(len(steps), bool)
        for row in np.flatnonzero(is_long):
            is_hit[row + 1 - MEDIAN : row + 1] = True
        is_hit &= ratios > RATE
        broken = np.flatnonzero(~np.isfinite(numbers).all(axis=0))
        if broken.size:
            is_last = np.zeros(len(steps), bool)
            is_last[max(0, broken[0] - MEDIAN) : broken[0]] = True
            is_hit |= is_last & (ratios > RATE)
        candidates.append(hits_of(lengths._replace(steps=steps), is_hit, ratios))
    return earliest(candidates) if is_judged else None


def underflow(signals: Signals) -> Hits | None:
    """Elements too small for all digits of their dtype, among those that are not 0."""
    columns: Tensors = {}
    for recorder in signals.gradients:
        zeros = recorder.tensors("zeros")
        for name, subnormals in recorder.tensors("subnormals").items():
            if name in zeros:
                steps, numbers = in_common([subnormals, zeros[name]])
                with np.errstate(all="ignore"):
                    shares = numbers[0] / (1 - numbers[1])
                columns[name] = Column(name, steps, medians_until(shares))
    return _of_tensors(columns, SUBNORMAL)


def _of_tensors(columns: Tensors, limit: float) -> Hits | None:
    """Tensors above a limit in the first step that shows one."""
    if not columns:
        return None
    hits = {
        name: hits_of(column, column.values > limit, column.values)
        for name, column in columns.items()
    }
    hits = {name: one for name, one in hits.items() if one.steps.size}
    if not hits:
        return no_hits()
    first = min(one.steps[0] for one in hits.values())
    tensors = in_order([name for name, one in hits.items() if one.steps[0] == first])
    subject = listed([name or "a summary" for name in tensors])
    return _merged(hits)._replace(subject=subject)


def _merged(hits: dict[str, Hits]) -> Hits:
    """The steps of all tensors, with the largest value of each step."""
    largest: dict[int, float] = {}
    for tensor in hits.values():
        for step, value in zip(tensor.steps.tolist(), tensor.values.tolist()):
            # NaN is larger than all numbers.
            largest[step] = float(np.maximum(value, largest.get(step, -np.inf)))
    steps = sorted(largest)
    return Hits(np.array(steps), np.array([largest[step] for step in steps]))


def dead_embedding(signals: Signals) -> Hits | None:
    """Rows that had gradients in the first rows of the log, and have none any more."""
    columns: Tensors = {}
    for recorder in signals.gradients:
        for name, column in recorder.tensors("dead_rows").items():
            # NaN until as many steps have passed as the recorder waits.
            shares = finite(column)
            if shares.values.size:
                first = shares.values[0]
                columns[name] = shares._replace(values=shares.values - first)
    return _of_tensors(columns, DEAD)


def no_gradient(signals: Signals) -> Hits | None:
    """Tensors whose norm is 0 in the whole log, or from a step to its end."""
    columns: Tensors = {}
    for recorder in signals.gradients:
        for name, column in recorder.tensors("norm").items():
            if len(column.steps) < BEFORE:
                continue
            is_zero = column.values == 0
            # The rows after the last one with a gradient.
            is_at_end = is_zero[::-1].cumprod()[::-1].astype(bool)
            is_long = is_at_end.sum() >= max(BEFORE, len(is_zero) // 10)
            columns[name] = column._replace(values=1.0 * (is_at_end & is_long))
    return _of_tensors(columns, 0.5)


def growing_weights(signals: Signals) -> Hits | None:
    """Weights that grow many times in 100 steps, after the first tenth of the log."""
    candidates = []
    for recorder in (*signals.updates, *signals.gradients):
        weights = recorder.total("weight_norm")
        if weights is None:
            continue
        weights = finite(weights)
        growths = np.ones(len(weights.steps))
        # Over 100 steps, or as many as a shorter log has.
        rows = np.searchsorted(weights.steps, weights.steps - 100, side="right") - 1
        for row, start in enumerate(rows):
            span = weights.steps[row] - weights.steps[max(start, 0)]
            if start >= len(rows) // 10 and span >= 50 and weights.values[start] > 0:
                growth = weights.values[row] / weights.values[start]
                growths[row] = growth ** (100 / span)
        candidates.append(hits_of(weights, growths > GROWN, growths))
    return earliest(candidates) if candidates else None


def lost_updates(signals: Signals) -> Hits | None:
    """Updates that the dtype of the weights rounds away, from the beginning of the log.
    At the end of a schedule they are in every run.
    """
    columns: Tensors = {}
    for recorder in signals.updates:
        ratios = recorder.tensors("ratio")
        for name, rounding in recorder.tensors("rounding").items():
            if name not in ratios:
                continue
            steps, (lengths, roundings) = in_common([ratios[name], rounding])
            # A tensor without an update loses nothing.
            lengths = np.where(lengths == 0, np.nan, lengths)
            shortfalls = LOST * roundings / lengths
            early = shortfalls[: max(BEFORE, len(steps) // 4)]
            is_lost = len(early) >= BEFORE and np.median(early) > 1
            columns[name] = Column(name, steps, is_lost * shortfalls)
    return _of_tensors(columns, 1.0)


# Of attention by their names, or of qk_clip under a name with "logit" or "qk".
LOGITS = re.compile(
    r"(?!.*(limit|factor|count|num|share|mean|std|entropy))"
    r"(.*(attn|attention|(^|[/._])qk).*logit.*|.*logit.*(attn|attention).*"
    r"|(.*[/. ])?(clip|record)(_\d+)?/[^/]*(logit|qk)[^/]*/norm(_before)?(/.*)?)"
)


def attention_logits(signals: Signals) -> Hits | None:
    candidates = [
        hits_of(column, column.values > LOGIT, column.values, subject=repr(name))
        for name, column in signals.columns.items()
        if LOGITS.fullmatch(name.lower())
    ]
    return earliest(candidates) if candidates else None
