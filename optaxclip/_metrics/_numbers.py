"""What `metrics` reports of one state: names and numbers, all float32."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .._clippers._by_value import ClipByValueState
from .._clippers._record_spikes import SpikeState
from .._clippers._spam import SpamState
from .._core._state import ClipState, Entry, has_rows, names_of_layers, unpack
from .._norms._types import gathered
from .._wrappers._skipping import SkipState
from ._unstack import unstacked


class ClipNumbers(NamedTuple):
    """Of one norm."""

    norm_before: jax.Array
    limit: jax.Array
    factor: jax.Array
    norm_after: jax.Array
    clipped: jax.Array
    clipped_share: jax.Array
    clipped_share_recent: jax.Array
    clipped_count: jax.Array
    nonfinite_count: jax.Array


class SummaryNumbers(NamedTuple):
    """Of all norms of a clipper, besides the numbers of the worst."""

    norms_clipped: jax.Array
    worst_ratio: jax.Array
    worst_index: jax.Array


class ElementNumbers(NamedTuple):
    """Of a clipper of elements."""

    elements_clipped: jax.Array
    elements_clipped_mean: jax.Array
    elements_clipped_recent: jax.Array


class SkipNumbers(NamedTuple):
    """Of an optimizer that skips steps."""

    norm: jax.Array
    limit: jax.Array
    value: jax.Array
    value_limit: jax.Array
    skipped: jax.Array
    skipped_share: jax.Array
    skipped_share_recent: jax.Array
    skipped_count: jax.Array
    consecutive_count: jax.Array
    nonfinite_count: jax.Array


class SpikeNumbers(NamedTuple):
    """Of `record_spikes`."""

    norm: jax.Array
    limit: jax.Array
    value: jax.Array
    value_limit: jax.Array
    spiked: jax.Array
    spiked_count: jax.Array
    score: jax.Array
    score_recent: jax.Array


# (name of the number, path of the tensor, number)
Row = tuple[str, str, Any]
WORST_NAME = "worst_name"


def elements_rows(state: ClipByValueState | SpamState) -> Iterator[Row]:
    """The rows of a clipper of elements."""
    yield from _without_path(ElementNumbers(*state.elements))


def skip_rows(state: SkipState) -> Iterator[Row]:
    """The rows of one skipping optimizer."""
    bare = state._replace(memory=(), value_memory=(), inner_state=())
    yield from _without_path(_skip_numbers(bare))


def spike_rows(state: SpikeState) -> Iterator[Row]:
    """The rows of `record_spikes`."""
    bare = state._replace(memory=(), value_memory=())
    yield from _without_path(_spike_numbers(bare))


def clip_rows(
    state: ClipState, only: frozenset[str], *, layers: bool = False
) -> Iterator[Row]:
    """The rows of each norm of one clipper, or of each layer of a norm."""
    names, entries = unpack(state)
    if layers:
        names = [_layers_of(*each) for each in zip(names, entries)]
    counts = tuple(len(block) for block in names)
    found = _numbers_of_blocks(counts, state.step, _without_memory(entries))
    wanted = [name for name in ClipNumbers._fields if name in only]
    for block, numbers in zip(names, found):
        chosen = [getattr(numbers, name) for name in wanted]
        for path, row in zip(block, _rows_of(chosen, len(block))):
            for name, value in zip(wanted, row):
                yield name, path, value


def _layers_of(names: list[str], entry: Entry) -> list[str]:
    """The names of the entries of a block, one for each layer of an array."""
    shape = jnp.shape(entry.norm)
    if has_rows(names, entry) or not shape:
        return names
    return names_of_layers(names[0], shape)


def summary_rows(state: ClipState, *, with_name: bool) -> Iterator[Row]:
    """The rows of all norms of one clipper together."""
    names, entries = unpack(state)
    if not names:
        return
    counts = tuple(len(block) for block in names)
    numbers, more = _summary(counts, state.step, _without_memory(entries))
    yield from _without_path(numbers)
    yield from _without_path(more)
    if with_name:
        every = [name for block in names for name in block]
        yield WORST_NAME, "", every[int(more.worst_index)]


def _without_path(numbers: Any) -> Iterator[Row]:
    for name, value in numbers._asdict().items():
        yield name, "", value


def _without_memory(entries: list[Entry]) -> list[Entry]:
    return [entry._replace(memory=()) for entry in entries]


def _rows_of(
    numbers: list[jax.Array], count: int
) -> Iterable[Iterable[jax.Array]]:
    """The numbers of each norm of a block."""
    if count == 1:
        return [numbers]
    if not any(isinstance(x, Tracer) for x in numbers):
        return (_row(numbers, row) for row in range(count))
    return zip(*(unstacked(x) for x in numbers))


# The row is traced: one program for all rows.
@jax.jit
def _row(numbers: list[jax.Array], row: ArrayLike) -> list[jax.Array]:
    return [x[row] for x in numbers]


# Jitted, since without jit each operation would be a call. One call serves all norms of
# a clipper.
@partial(jax.jit, static_argnums=0)
def _numbers_of_blocks(
    counts: tuple[int, ...], step: jax.Array, entries: list[Entry]
) -> list[ClipNumbers]:
    """The numbers of each block: float32[count], or float32[] of a single norm."""
    found = []
    for count, entry in zip(counts, entries):
        rows = _in_rows(count, entry)
        numbers = _numbers_of_rows(step, rows, _worst(rows))
        if count == 1:
            numbers = ClipNumbers(*(x[0] for x in numbers))
        found.append(numbers)
    return found


@partial(jax.jit, static_argnums=0)
def _summary(
    counts: tuple[int, ...], step: jax.Array, entries: list[Entry]
) -> tuple[ClipNumbers, SummaryNumbers]:
    """The numbers of all blocks together: float32[]."""
    blocks = [_in_rows(count, entry) for count, entry in zip(counts, entries)]
    rows = Entry(*(_in_one_row(x) for x in list(zip(*blocks))[:-1]), memory=())
    worst = _worst(rows)
    numbers = _numbers_of_rows(step, rows, worst)
    units = [block.norm.shape[1] for block in blocks for _ in block.norm]
    of_unit = jnp.asarray(np.repeat(np.arange(len(units)), units))
    norm, limit = (_shown(x, worst) for x in (rows.norm, rows.limit))
    more = SummaryNumbers(
        norms_clipped=jnp.mean(_is_clipped(rows.norm, rows.factor), axis=1),
        worst_ratio=jnp.where(norm == 0, 0.0, norm / limit),
        worst_index=of_unit[worst[:, 0]],
    )
    first = [jax.tree.map(lambda x: x[0], each) for each in (numbers, more)]
    return first[0], _in_float32(first[1])


def _in_rows(count: int, entry: Entry) -> Entry:
    """A block with one row for each norm, [count, units]."""
    fields = entry._replace(memory=())
    return jax.tree.map(lambda x: gathered(x, 0).reshape(count, -1), fields)


def _in_one_row(blocks: tuple[jax.Array, ...]) -> jax.Array:
    dtype = jnp.result_type(*blocks)
    return jnp.concatenate(
        [x.reshape(1, -1).astype(dtype) for x in blocks], axis=1
    )


def _worst(rows: Entry) -> jax.Array:
    """For each row, [rows, 1], where the norm is furthest over its limit."""
    # An infinite limit would hide all differences, so it counts as merely huge.
    ratio = rows.norm / jnp.clip(rows.limit, 2.0**-60, 2.0**60)
    return jnp.argmax(ratio, axis=1, keepdims=True)


def _shown(x: jax.Array, worst: jax.Array) -> jax.Array:
    if x.shape[1] == 1:  # An operation less to compile, of some hundred.
        return x[:, 0]
    return jnp.take_along_axis(x, worst, axis=1)[:, 0]


def _numbers_of_rows(
    step: jax.Array, rows: Entry, worst: jax.Array
) -> ClipNumbers:
    """float32[rows]: of the worst norm in each row, counted over all of them."""
    norm, limit, factor = (_shown(x, worst) for x in rows[:3])
    steps = jnp.maximum(step, 1).astype(jnp.float32)
    float32 = jnp.finfo(jnp.float32)
    numbers = ClipNumbers(
        norm_before=norm,
        limit=limit,
        factor=jnp.where(
            factor == 0, 0.0, jnp.clip(factor, float32.tiny, float32.max)
        ),
        norm_after=_norm_after(norm, limit, factor),
        clipped=_is_clipped(norm, factor),
        clipped_share=jnp.mean(
            rows.clipped.astype(jnp.float32) / steps, axis=1
        ),
        clipped_share_recent=jnp.mean(rows.clipped_recently, axis=1),
        clipped_count=jnp.max(rows.clipped, axis=1),
        nonfinite_count=jnp.max(rows.nonfinite, axis=1),
    )
    return _in_float32(numbers)


def _is_clipped(norm: jax.Array, factor: jax.Array) -> jax.Array:
    return (factor != 1) & jnp.isfinite(norm)


def _norm_after(
    norm: jax.Array, limit: jax.Array, factor: jax.Array
) -> jax.Array:
    # At the ends of its range the factor is not the whole quotient. So far from its
    # limit, what a shrink leaves is the limit.
    info = jnp.finfo(factor.dtype)
    at_end = (factor == info.tiny) | (factor == info.max)
    product = jnp.where(factor == 0, 0.0, norm * factor)
    return jnp.where(at_end, limit, product)


@jax.jit
def _skip_numbers(state: SkipState) -> SkipNumbers:
    steps = jnp.maximum(state.step, 1).astype(jnp.float32)
    numbers = SkipNumbers(
        norm=state.norm,
        limit=state.limit,
        value=state.value,
        value_limit=state.value_limit,
        skipped=state.consecutive > 0,
        skipped_share=state.skipped.astype(jnp.float32) / steps,
        skipped_share_recent=state.skipped_recently,
        skipped_count=state.skipped,
        consecutive_count=state.consecutive,
        nonfinite_count=state.nonfinite,
    )
    return _in_float32(numbers)


@jax.jit
def _spike_numbers(state: SpikeState) -> SpikeNumbers:
    steps = jnp.maximum(state.step, 1).astype(jnp.float32)
    numbers = SpikeNumbers(
        norm=state.norm,
        limit=state.limit,
        value=state.value,
        value_limit=state.value_limit,
        spiked=state.spiked,
        spiked_count=state.spikes,
        score=state.spikes.astype(jnp.float32) / steps,
        score_recent=state.spiked_recently,
    )
    return _in_float32(numbers)


def _in_float32(numbers: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), numbers)
