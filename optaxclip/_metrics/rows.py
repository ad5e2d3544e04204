"""The numbers of one state, as rows of the report of `metrics`.

Each number is a `ReportRow`. Most states have one number of each metric. The state of a
clipper has an entry for each norm, and the report shows a span of entries together: a
tensor, all layers of a stacked leaf, or all entries. A row of a span shows:

    norm_before, limit, factor, norm_after, clipped    those of the worst entry
    shares                                             the mean over the span
    counts                                             the largest

The worst entry is the one furthest above its limit.
"""

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._clippers.by_value import ClipByValueState
from .._clippers.health import HealthState, health_numbers
from .._clippers.recorders import SpikeState
from .._clippers.spam import SpamState
from .._state.outcome import are_sound, severity
from .._state.state import ClipState, RecordState, Span, entries_at, spans_of_names
from .._trees import PyTree
from .._wrappers.skipping import SkipState


class ReportRow(NamedTuple):
    """A number of the report."""

    metric: str  # "norm_before"
    path: str  # of a tensor, or the label of a group: "blocks/w". "" for everything
    value: Any  # a scalar, or a WorstName


class WorstName(NamedTuple):
    """One of several names, whose index is still on the device."""

    names: tuple[str, ...]
    index: Any  # float32[]

    def chosen(self) -> str:
        """The name. It waits for the device, so all numbers are fetched before."""
        return self.names[int(self.index)]


class Options(NamedTuple):
    """The options of `metrics` that say which numbers are reported. Each function in
    the table of states.py takes them, used or not.
    """

    summary: bool
    layers: bool
    top: int | None
    quantiles: np.ndarray
    # Whether `worst_name` is reported. A jitted function cannot return strings.
    with_names: bool


def _rows_without_path(numbers: Mapping[str, Any]) -> Iterator[ReportRow]:
    """Rows for numbers that are shown without a path, from a dict by metric."""
    return (ReportRow(metric, "", value) for metric, value in numbers.items())


# -------------------------------------- states whose numbers are reported as they are


def element_rows(
    state: ClipByValueState | SpamState, options: Options
) -> Iterator[ReportRow]:
    """The rows of a clipper of elements."""
    # () where nothing is counted.
    if isinstance(state.elements, tuple):
        return iter(())
    share, mean, recent = state.elements
    return _rows_without_path(
        {
            "elements_clipped": share,
            "elements_clipped_mean": mean,
            "elements_clipped_recent": recent,
        }
    )


def skip_rows(state: SkipState, options: Options) -> Iterator[ReportRow]:
    """The rows of an optimizer that skips steps."""
    return _rows_without_path(
        {
            "norm": state.norm,
            "limit": state.limit,
            "loss": state.loss,
            "loss_limit": state.loss_limit,
            # Whether the last step was skipped. `state.skipped` counts steps.
            "skipped": _float32(state.consecutive > 0),
            "skipped_share": _float32(state.skipped) / _steps(state),
            "skipped_share_recent": _float32(state.skipped_recently),
            "skipped_count": _float32(state.skipped),
            "consecutive_count": _float32(state.consecutive),
            "nonfinite_count": _float32(state.nonfinite),
        }
    )


def spike_rows(state: SpikeState, options: Options) -> Iterator[ReportRow]:
    """The rows of `record_spikes`."""
    return _rows_without_path(
        {
            "norm": state.norm,
            "limit": state.limit,
            "loss": state.loss,
            "loss_limit": state.loss_limit,
            "spiked": _float32(state.spiked),
            "spiked_count": _float32(state.spikes),
            # OLMo-core calls the share of spikes the spike score.
            "score": _float32(state.spikes) / _steps(state),
            "score_recent": _float32(state.spiked_recently),
        }
    )


def health_rows(state: HealthState, options: Options) -> Iterator[ReportRow]:
    """The rows of `record_health`."""
    rows = health_numbers(state, summary=options.summary, layers=options.layers)
    return itertools.starmap(ReportRow, rows)


def _steps(state: PyTree) -> Array:
    """The steps that shares are counted over: 1 before the first step."""
    return _float32(jnp.maximum(state.step, 1))


def _float32(number: Array) -> Array:
    return number.astype(jnp.float32)


# ----------------------------------------------------------------- states of many norms


Spans = tuple[Span, ...]


class ClipNumbers(NamedTuple):
    """The numbers of a clipper, by the names of their metrics.

    Each is a vector with a number for each entry, a vector with a number for each span,
    or in a summary a scalar.
    """

    norm_before: Array
    limit: Array
    factor: Array
    norm_after: Array
    clipped: Array
    clipped_share: Array
    clipped_share_recent: Array
    clipped_count: Array
    nonfinite_count: Array
    units_clipped: Array  # the share of the units. Without units it equals `clipped`
    # Only in a summary.
    norms_clipped: Array | None = None
    worst_ratio: Array | None = None
    worst_index: Array | None = None


def clip_rows(state: ClipState, options: Options) -> Iterator[ReportRow]:
    """The rows of a clipper, or of `record_norm`."""
    by_layer = options.layers and not options.summary
    span_of_name = spans_of_names(state, by_layer=by_layer, call="metrics")
    # An empty tree has no norm.
    if not span_of_name:
        return
    yield from _quantile_rows(state, options.quantiles)
    names = tuple(span_of_name)
    spans = tuple(span_of_name.values())
    if options.summary:
        summary = _summary(spans, state)
        yield from _rows_without_path(_reported(summary, state))
        if options.with_names:
            yield ReportRow("worst_name", "", WorstName(names, summary.worst_index))
        return
    vectors = _reported(_numbers_of_spans(spans, state), state)
    # The vectors become lists outside of jit: as separate outputs of the compiled call,
    # scalars of 148 tensors took 22 seconds to compile on a CPU.
    values_of_metric = {metric: list(vector) for metric, vector in vectors.items()}
    span_indices = range(len(spans))
    if options.top is not None:
        span_indices = _spans_worst_first(spans, state)[: int(options.top)]
    for index in span_indices:
        for metric, values in values_of_metric.items():
            yield ReportRow(metric, names[index], values[index])


def _quantile_rows(state: ClipState, levels: np.ndarray) -> Iterator[ReportRow]:
    """The quantiles of all norms of a state."""
    if not levels.size:
        return
    # A quantile between two norms is a weighted mean, in which 0 * inf would be NaN.
    norms = jnp.minimum(state.norm, jnp.finfo(state.norm.dtype).max)
    # JAX takes no ints as levels.
    quantiles = jnp.nanquantile(norms, levels.astype(float))
    for level, quantile in zip(levels, quantiles):
        # "0.9" of 0.9 in any dtype, and "1" of 1.0.
        yield ReportRow("norm_quantile", str(level).removesuffix(".0"), quantile)


def _spans_worst_first(spans: Spans, state: ClipState) -> np.ndarray:
    """The indices of all spans, beginning with the one furthest above its limit."""
    severities = np.ravel(severity(state.norm, state.limit))
    largest_of_span = np.maximum.reduceat(severities, [span.start for span in spans])
    # NaN comes first, as `argmax` has it in a summary. `lexsort` sorts by its last key
    # first.
    return np.lexsort((-largest_of_span, ~np.isnan(largest_of_span)))


def _numbers_of_entries(state: ClipState) -> ClipNumbers:
    """The numbers of all entries of a state: vectors with a number for each entry."""
    # A leaf with units is changed if one unit was.
    has_units = bool(state.names.unit_leaves)
    is_changed = state.units_clipped > 0 if has_units else state.factor != 1
    # A broken step was not clipped. With nonfinite="propagate" its factor is NaN. With
    # "zero" it is 0, as that of a norm that `drop` clips. So if only a shrink of the
    # user's returned NaN, the step counts as clipped with "zero".
    is_sound = are_sound(state.norm, state.limit) & jnp.isfinite(state.factor)
    is_clipped = is_changed & is_sound
    clipped_count = _float32(state.clipped)
    # The factor new_norm / norm is cut to the range of its dtype, and norm * factor is
    # then not the new norm. The state does not have that norm. It is the limit, except
    # with some shrinks of users.
    factor = state.factor
    factor_range = jnp.finfo(factor.dtype)
    is_cut = (factor == factor_range.tiny) | (factor == factor_range.max)
    # Updates with a factor of 0 became 0, whatever their norm. 0 * inf is NaN.
    product = jnp.where(factor == 0, 0.0, state.norm * factor)
    numbers = ClipNumbers(
        norm_before=state.norm,
        limit=state.limit,
        factor=factor,
        norm_after=jnp.where(is_cut, state.limit, product),
        clipped=_float32(is_clipped),
        clipped_share=clipped_count / _steps(state),
        clipped_share_recent=_float32(state.clipped_recently),
        clipped_count=clipped_count,
        nonfinite_count=_float32(state.nonfinite),
        units_clipped=_float32(state.units_clipped if has_units else is_clipped),
    )
    # One norm of everything is a scalar.
    return jax.tree.map(jnp.atleast_1d, numbers)


def _numbers_of_span(
    span: Span, entries: ClipNumbers, severities: Array
) -> ClipNumbers:
    """The numbers of one span, which are scalars, from those of all entries."""
    if span.size == 1:
        return entries_at(entries, span.start)
    entries_of_span = entries_at(entries, slice(*span))
    worst = jnp.argmax(severities[slice(*span)])
    return entries_at(entries_of_span, worst)._replace(
        clipped_share=jnp.mean(entries_of_span.clipped_share),
        clipped_share_recent=jnp.mean(entries_of_span.clipped_share_recent),
        clipped_count=jnp.max(entries_of_span.clipped_count),
        nonfinite_count=jnp.max(entries_of_span.nonfinite_count),
        units_clipped=jnp.mean(entries_of_span.units_clipped),
    )


# Jitted, since without jit each operation would be a call to the device. Spans are
# static, because shapes depend on them.
@partial(jax.jit, static_argnums=0)
def _numbers_of_spans(spans: Spans, state: ClipState) -> ClipNumbers:
    """The numbers of all spans: vectors with a number for each span."""
    entries = _numbers_of_entries(state)
    # The common case: each span is one entry.
    if all(span.size == 1 for span in spans):
        return entries
    severities = severity(entries.norm_before, entries.limit)
    numbers_of_spans = [_numbers_of_span(span, entries, severities) for span in spans]
    return jax.tree.map(lambda *scalars: jnp.stack(scalars), *numbers_of_spans)


@partial(jax.jit, static_argnums=0)
def _summary(spans: Spans, state: ClipState) -> ClipNumbers:
    """The numbers of all entries together: scalars."""
    entries = _numbers_of_entries(state)
    severities = severity(entries.norm_before, entries.limit)
    numbers = _numbers_of_span(Span(0, len(severities)), entries, severities)
    # The index of the span of each entry: spans of 2 and 1 entries are [0, 0, 1].
    span_of_entry = np.repeat(range(len(spans)), [span.size for span in spans])
    worst = jnp.argmax(severities)
    # A norm of 0 over a limit of 0 is 0, and over a limit of NaN it is NaN.
    is_zero = (numbers.norm_before == 0) & ~jnp.isnan(numbers.limit)
    ratio = jnp.where(is_zero, 0.0, numbers.norm_before / numbers.limit)
    return numbers._replace(
        # Without units `units_clipped` is `clipped`, so this is the mean of `clipped`.
        norms_clipped=numbers.units_clipped,
        worst_ratio=ratio,
        worst_index=_float32(jnp.asarray(span_of_entry)[worst]),
    )


def _reported(numbers: ClipNumbers, state: ClipState) -> dict[str, Array]:
    """The numbers that are reported for this state, by the names of their metrics."""
    numbers_by_metric = numbers._asdict()
    if isinstance(state, RecordState):
        numbers_by_metric = {
            "norm": numbers.norm_before,
            "nonfinite_count": numbers.nonfinite_count,
            "worst_index": numbers.worst_index,
        }
    elif not state.names.unit_leaves:
        del numbers_by_metric["units_clipped"]
    # Without a summary some are None.
    return {
        metric: number
        for metric, number in numbers_by_metric.items()
        if number is not None
    }
