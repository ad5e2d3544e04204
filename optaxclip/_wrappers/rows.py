"""The rows of the states of `skip_step`, its relatives and `record_spikes`.

What was judged is kept as rows of two arrays:

    counts     what the state counts, then integers that the rules remember
    numbers    norm, limit, loss, loss_limit, a share, then floats that rules remember

A state names the first rows of both, and has a property for each:

    ROWS = RowNames(counts=("step", "skipped", ...), numbers=("norm", "limit", ...))
    skipped = row_property(ROWS, "skipped")
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .._state.packed import packed, rows_from, unpacked
from .._trees import PyTree
from .judge import ComparedNumber


class RowNames(NamedTuple):
    """The names of the rows of a state that do not belong to rules."""

    counts: tuple[str, ...]
    numbers: tuple[str, ...]


class StateArrays(NamedTuple):
    """The first fields of a `SkipState` or a `SpikeState`."""

    counts: Array  # int32[rows]
    numbers: Array  # float[rows]
    windows: PyTree  # what the rule of the norm remembers beyond its rows
    loss_windows: PyTree  # likewise of the rule of the loss


def row_property(rows: RowNames, name: str) -> property:
    """The property of a state that reads a row."""

    def row(state: PyTree) -> Array:
        counts, numbers, *_ = state
        # States of several models have axes in front.
        if name in rows.counts:
            return counts[..., rows.counts.index(name)]
        return numbers[..., rows.numbers.index(name)]

    return property(row)


def pack(
    rows: RowNames,
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
    counts = [value_of_row.get(name, zero) for name in rows.counts]
    numbers = [value_of_row.get(name, zero).astype(dtype) for name in rows.numbers]
    windows, loss_windows = memory.windows
    return StateArrays(
        counts=jnp.stack(counts + memory.counts),
        numbers=jnp.stack(numbers + memory.numbers),
        windows=windows,
        loss_windows=loss_windows,
    )


def unpack(rows: RowNames, state: PyTree) -> tuple[PyTree, PyTree]:
    """What the rules of norm and loss remember, from a state."""
    counts, numbers, windows, loss_windows, *_ = state
    return unpacked(
        (windows, loss_windows),
        counts=rows_from(counts, len(rows.counts), is_global=True),
        numbers=rows_from(numbers, len(rows.numbers), is_global=True),
    )
