"""The rows that `metrics` reports of one state, computed in compiled calls."""

import itertools
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .._clippers._by_value import ClipByValueState
from .._clippers._record_spikes import SpikeState
from .._clippers._spam import SpamState
from .._core._state import (
    ClipState,
    Entry,
    check_names_of_layers,
    has_rows,
    names_of_layers,
    unpack,
)
from .._norms._types import gathered
from .._norms._unstack import unstacked
from .._wrappers._skipping import SkipState
from ._numbers import (
    WORST_NAME,
    ClipNumbers,
    ElementNumbers,
    Row,
    SkipNumbers,
    SpikeNumbers,
    SummaryNumbers,
)


def elements_rows(state: ClipByValueState | SpamState) -> Iterator[Row]:
    """The rows of a clipper of elements."""
    yield from _without_path(ElementNumbers(*state.elements))


def skip_rows(state: SkipState) -> Iterator[Row]:
    """The rows of one skipping optimizer."""
    # Without memories and moments one compiled call serves all rules and optimizers.
    bare = state._replace(memory=(), loss_memory=(), inner_state=())
    yield from _without_path(_skip_numbers(bare))


def spike_rows(state: SpikeState) -> Iterator[Row]:
    """The rows of `record_spikes`."""
    bare = state._replace(memory=(), loss_memory=())
    yield from _without_path(_spike_numbers(bare))


def clip_rows(
    state: ClipState, only: frozenset[str], *, layers: bool = False
) -> Iterator[Row]:
    """The rows of each norm of one clipper, or of each layer of a norm."""
    names, entries = state.names, unpack(state)
    if layers:
        names = [_layers_of(*each) for each in zip(names, entries)]
        every = itertools.chain.from_iterable(names)
        check_names_of_layers("metrics", list(every))
    counts = tuple(len(block) for block in names)
    # The counts are static, because shapes depend on them.
    found = _numbers_of_blocks(counts, state.step, _without_memory(entries))
    # Chosen before rows are cut out, since each number of each row is an operation.
    wanted = [name for name in ClipNumbers._fields if name in only]
    for block, numbers in zip(names, found):
        chosen = [getattr(numbers, name) for name in wanted]
        for path, row in zip(block, _rows_of(chosen, len(block))):
            for name, value in zip(wanted, row):
                yield name, path, value


def _layers_of(names: Collection[str], entry: Entry) -> Collection[str]:
    """The names of the entries of a block, one for each layer of each norm."""
    shape = jnp.shape(entry.norm)
    shape = shape[has_rows(names, shape) :]
    if not shape:
        return names
    # Units "w" of shape [1, 5] have w/0 to w/4.
    found = [names_of_layers(name, shape) for name in names]
    return tuple(itertools.chain.from_iterable(found))


def summary_rows(state: ClipState, *, with_name: bool) -> Iterator[Row]:
    """The rows of all norms of one clipper together."""
    names, entries = state.names, unpack(state)
    if not names:
        return
    counts = tuple(len(block) for block in names)
    numbers, more = _summary(counts, state.step, _without_memory(entries))
    yield from _without_path(numbers)
    yield from _without_path(more)
    if with_name:
        every = [name for block in names for name in block]
        # Only outside jit, since `int` needs the number.
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
        # Those of a single norm are scalars already.
        return [numbers]
    # Under jit each call of `_row` would become a part of the program.
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
    # All norms in one row, [1, norms]: the worst of it is that of all.
    fields = list(zip(*blocks))[:-1]
    rows = Entry(*map(_in_one_row, fields), memory=())
    worst = _worst(rows)
    numbers = _numbers_of_rows(step, rows, worst)
    # Blocks of [2, 1] and [1, 3] have of_unit = [0, 1, 2, 2, 2]: the norm of each.
    units = [block.norm.shape[1] for block in blocks for _ in block.norm]
    of_unit = jnp.asarray(np.repeat(np.arange(len(units)), units))
    norm, limit = (_shown(x, worst) for x in (rows.norm, rows.limit))
    more = SummaryNumbers(
        norms_clipped=jnp.mean(_is_clipped(rows.norm, rows.factor), axis=1),
        # 0 over a limit of 0 is 0, and not NaN.
        worst_ratio=jnp.where(norm == 0, 0.0, norm / limit),
        worst_index=of_unit[worst[:, 0]],
    )
    first = [jax.tree.map(lambda x: x[0], each) for each in (numbers, more)]
    return first[0], _in_float32(first[1])


def _in_rows(count: int, entry: Entry) -> Entry:
    """A block with one row for each norm, [count, units]."""
    # JAX does not reshape dimensions that an Explicit mesh splits: it raises.
    fields = entry._replace(memory=())
    return jax.tree.map(lambda x: gathered(x, 0).reshape(count, -1), fields)


def _in_one_row(blocks: tuple[jax.Array, ...]) -> jax.Array:
    # Norms of 64-bit leaves are float64, beside float32 ones.
    dtype = jnp.result_type(*blocks)
    return jnp.concatenate(
        [x.reshape(1, -1).astype(dtype) for x in blocks], axis=1
    )


def _worst(rows: Entry) -> jax.Array:
    """For each row, [rows, 1], where the norm is furthest over its limit."""
    # A limit of 0 would hide all differences, so it counts as tiny.
    ratio = rows.norm / jnp.maximum(rows.limit, 2.0**-60)
    # Norms without a limit are compared where none has one.
    free = rows.limit == jnp.inf
    all_free = jnp.all(free, axis=1, keepdims=True)
    ratio = jnp.where(
        free, jnp.where(all_free, rows.norm, 0 * rows.norm), ratio
    )
    # argmax takes NaN for the largest, so a broken norm is the worst.
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
    # A factor of 64 bits may be 1e-99. 0 is kept for updates that were made 0.
    within = jnp.clip(factor, float(float32.tiny), float(float32.max))
    numbers = ClipNumbers(
        norm_before=norm,
        limit=limit,
        factor=jnp.where(factor == 0, 0.0, within),
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
    # A broken step may have a factor of NaN or 0, and was not clipped.
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
        loss=state.loss,
        loss_limit=state.loss_limit,
        # Steps skipped in a row until now, the last one included.
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
        loss=state.loss,
        loss_limit=state.loss_limit,
        spiked=state.spiked,
        spiked_count=state.spikes,
        score=state.spikes.astype(jnp.float32) / steps,
        score_recent=state.spiked_recently,
    )
    return _in_float32(numbers)


def _in_float32(numbers: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), numbers)
