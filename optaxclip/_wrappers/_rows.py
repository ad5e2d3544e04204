"""The rows of the states of `skip_step`, its relatives and `record_spikes`.

What was judged is kept as rows of two arrays, and the `ROWS` of a state name them:

    counts     what the state counts, then integers that the rules remember
    numbers    norm, limit, loss, loss_limit, a share, then floats that rules remember

Those of `SkipState`:

    ROWS = StateRows(
        counts=ArrayRows("skip_counts", ("step", "skipped", ...)),
        numbers=ArrayRows("skip_numbers", ("norm", "limit", ...)),
    )
    skipped = row_property(ROWS, "skipped")
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .._packed import packed, rows_from, unpacked
from .._trees import PyTree
from ._judge import ComparedNumber


class ArrayRows(NamedTuple):
    """The rows of an array of a state that do not belong to rules."""

    field: str  # of the state: "skip_counts"
    names: tuple[str, ...]  # of the rows: ("step", "skipped", ...)


class StateRows(NamedTuple):
    """The rows of both arrays of a state."""

    counts: ArrayRows
    numbers: ArrayRows


class StateArrays(NamedTuple):
    """The first fields of a `SkipState` or a `SpikeState`."""

    counts: Array  # int32[rows]
    numbers: Array  # float[rows]
    windows: PyTree  # what the rule of the norm remembers beyond its rows
    loss_windows: PyTree  # likewise of the rule of the loss


def row_property(rows: StateRows, name: str) -> property:
    """The property of a state that reads a row."""
    field, names = rows.counts if name in rows.counts.names else rows.numbers
    index = names.index(name)
    # States of several models have axes in front.
    return property(lambda state: getattr(state, field)[..., index])


def pack(
    rows: StateRows,
    norm: ComparedNumber,
    loss: ComparedNumber,
    **counts_and_shares: Array,
) -> StateArrays:
    """The arrays of a state.

    `counts_and_shares` are the other rows by name. Without them, before the first step,
    they are 0.
    """
    value_of_row = {
        "norm": norm.value,
        "limit": norm.limit,
        "loss": loss.value,
        "loss_limit": loss.limit,
        **counts_and_shares,
    }
    memory = packed((norm.memory, loss.memory), norm.value)
    zero = jnp.zeros((), jnp.int32)
    dtype = norm.value.dtype
    counts = [value_of_row.get(name, zero) for name in rows.counts.names]
    numbers = [
        value_of_row.get(name, zero).astype(dtype) for name in rows.numbers.names
    ]
    windows, loss_windows = memory.windows
    return StateArrays(
        counts=jnp.stack(counts + memory.counts),
        numbers=jnp.stack(numbers + memory.numbers),
        windows=windows,
        loss_windows=loss_windows,
    )


def unpack(rows: StateRows, arrays: StateArrays) -> tuple[PyTree, PyTree]:
    """What the rules of norm and loss remember."""
    return unpacked(
        (arrays.windows, arrays.loss_windows),
        counts=rows_from(arrays.counts, len(rows.counts.names), is_global=True),
        numbers=rows_from(arrays.numbers, len(rows.numbers.names), is_global=True),
    )
