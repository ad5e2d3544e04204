"""The numbers of a state as two arrays.

A small step on a GPU waits for the host, which takes about 5 us for each array of a
state (H100). So a state keeps its numbers as rows:

    counts    int32[rows, N]    or int32[rows] where there is one norm of everything
    numbers   float[rows, N]    or float[rows]

What a rule remembers of each norm is a row as well, behind those of the state. In the
structure of its memory `InCounts` or `InNumbers` stands for such a row. Larger arrays,
such as a window of norms, stay where they are.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from .._trees import PyTree
from .interop import exported


@exported
class InCounts(NamedTuple):
    """Stands for a number that is the next row of `counts`."""


@exported
class InNumbers(NamedTuple):
    """Stands for a number that is the next row of `numbers`."""


@exported
class InWindows(NamedTuple):
    """Stands in `Names.windows_structure` for an array of `ClipState.windows`."""


class Packed(NamedTuple):
    """A memory, taken apart."""

    windows: PyTree  # the memory, with marks in the place of rows
    counts: list[Array]  # rows
    numbers: list[Array]  # rows


def packed(memory: PyTree, row_type: Array | jax.ShapeDtypeStruct) -> Packed:
    """Takes all numbers out of the memory of a rule that have the type of a row."""
    counts = []
    numbers = []
    windows = []
    leaves, treedef = jax.tree.flatten(memory)
    for leaf in leaves:
        fits_a_row = leaf.shape == row_type.shape
        if fits_a_row and leaf.dtype == np.int32:
            counts.append(leaf)
            windows.append(InCounts())
        elif fits_a_row and leaf.dtype == row_type.dtype:
            numbers.append(leaf)
            windows.append(InNumbers())
        else:
            windows.append(leaf)
    return Packed(treedef.unflatten(windows), counts, numbers)


def unpacked(
    windows: PyTree, counts: Iterator[Array], numbers: Iterator[Array]
) -> PyTree:
    """The memory, with the next rows of `counts` and `numbers` for its marks."""

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, InCounts):
            return next(counts)
        if isinstance(leaf, InNumbers):
            return next(numbers)
        return leaf

    return jax.tree.map(filled, windows, is_leaf=is_mark)


def rows_from(array: Array, first: int, is_global: bool) -> Iterator[Array]:
    """The rows of an array, from number `first` on."""
    for index in range(first, array.shape[-1 if is_global else -2]):
        yield row_at(array, index, is_global)


def row_at(array: Array, index: int, is_global: bool) -> Array:
    """A row of an array. Of one norm of everything a row is a scalar."""
    # States of several models have axes in front.
    return array[..., index] if is_global else array[..., index, :]


def is_mark(x: object) -> bool:
    """Whether it is `InCounts`, `InNumbers` or `InWindows`."""
    return isinstance(x, (InCounts, InNumbers, InWindows))
