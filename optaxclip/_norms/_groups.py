"""Groups of leaves that share a norm, and the sums over them, in blocks."""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._collectives import Split, counted_once, join_devices, names_of_blocks
from ._in_blocks import (
    Number,
    Place,
    entry_at,
    in_blocks,
    places_of,
    stacked,
    taken_out,
)
from ._three_sums import Dims


class Group(NamedTuple):
    """Leaves that share a norm, or one leaf with an array of norms."""

    leaves: list[Any]
    # The dimensions of each leaf that are summed, which stay with size 1. None: all,
    # and none stays.
    dims: Dims
    splits: list[Split]  # of each leaf


class Part(NamedTuple):
    """What is static of a group."""

    dims: Dims
    splits: tuple[Split, ...]
    place: Place  # of its norm


Layout = tuple[Part, ...]
Blocks = list[jax.Array]
Terms = Sequence[Sequence[Number]]  # what each group adds up


def layout_of(groups: list[Group]) -> Layout:
    """The layout of some groups. The norm of a single one is a block without rows."""
    places = [Place(0, None)]
    if len(groups) != 1:
        places = places_of([_kind(group) for group in groups])
    return tuple(
        Part(group.dims, tuple(group.splits), place)
        for group, place in zip(groups, places)
    )


def _kind(group: Group) -> Any:
    """What groups in one block have in common: the type of their norms."""
    if group.dims is None:
        return ()
    # A leaf [in, out] that is summed over dimension 0 has norms [1, out].
    (leaf,), dims = group.leaves, group.dims
    shape = [1 if i in dims else size for i, size in enumerate(leaf.shape)]
    spec = jax.typeof(leaf).sharding.spec
    names = [None if i in dims else name for i, name in enumerate(spec)]
    return tuple(shape), tuple(names), group.splits[0]


def scatter(blocks: Blocks, layout: Layout) -> Blocks:
    """For each group its own norm, out of the blocks."""
    return [entry_at(blocks, part.place) for part in layout]


def sum_over(x: jax.Array, dims: Dims) -> jax.Array:
    return jnp.sum(x, dims, keepdims=dims is not None)


# A chain of adds: XLA on a CPU merges the all-reduces of a chain, not of a stack.
_total = partial(reduce, jnp.add)


def add_up(
    kinds: Sequence[Terms],
    layout: Layout,
    dtype: Any,
    join: Callable[[Any], Number] = _total,
    stack: Callable[[list[jax.Array]], jax.Array] = jnp.stack,
) -> list[Blocks]:
    """Sums of several kinds of terms, in one collective."""
    # Nothing to ask other devices for. The parts of a global array are added by XLA.
    if not any(split.summed for part in layout for split in part.splits):
        return [gather(terms, layout, dtype, join, stack) for terms in kinds]
    names = names_of(layout)
    blocks: Blocks = []
    for terms in kinds:
        once = _counted_once(terms, layout, names)
        blocks += gather(once, layout, dtype, join, stack)
    # Three sums of N norms travel as one vector of 3 N numbers.
    blocks = join_devices(lax.psum, blocks, names * len(kinds))
    size = len(names)
    return [blocks[i * size : (i + 1) * size] for i in range(len(kinds))]


maximum = partial(reduce, jnp.maximum)


def take_max(
    sizes: Terms,
    layout: Layout,
    dtype: Any,
    join: Callable[[Any], Number] = maximum,
) -> Blocks:
    blocks = gather(sizes, layout, dtype, join)
    return join_devices(lax.pmax, blocks, names_of(layout))


def names_of(layout: Layout) -> list[tuple[str, ...]]:
    """For each block, the mesh axes that it is joined over."""
    blocks: dict[int, list[Split]] = {}
    for part in layout:
        blocks.setdefault(part.place.block, []).extend(part.splits)
    return names_of_blocks([blocks[number] for number in sorted(blocks)])


def _counted_once(
    terms: Terms, layout: Layout, names: list[tuple[str, ...]]
) -> Terms:
    found = []
    for group, part in zip(terms, layout):
        over, pairs = names[part.place.block], zip(group, part.splits)
        found.append(
            [counted_once(taken_out(x), split, over) for x, split in pairs]
        )
    return found


def gather(
    terms: Terms,
    layout: Layout,
    dtype: Any,
    join: Callable[[Any], Number],
    stack: Callable[[list[jax.Array]], jax.Array] = jnp.stack,
) -> Blocks:
    """Joins the terms of each group, in blocks."""
    zero = jnp.zeros((), dtype)
    joined = [join(group) if group else zero for group in terms]
    return in_blocks(joined, [part.place for part in layout], stack)


def total_of_stack(terms: list[Number]) -> Number:
    return terms[0] if len(terms) == 1 else jnp.sum(_stacked(terms))


def max_of_stack(terms: list[Number]) -> Number:
    return terms[0] if len(terms) == 1 else jnp.max(_stacked(terms))


def _stacked(terms: list[Number]) -> jax.Array:
    # Several leaves have one norm, so that each term is a number.
    # A TPU runs each add of a chain by itself. Without the barrier XLA makes a chain of
    # the sum of a stack.
    return lax.optimization_barrier(stacked(terms))
