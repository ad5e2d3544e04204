"""Groups of leaves, and the blocks of numbers that belong to them.

Blocks are the numbers of groups that are summed whole, as one vector, and after it an
array for each group that keeps dimensions. The number of a single group is a scalar.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._bins import Dims
from ._collectives import Split, counted_once, join_devices, names_of_blocks


class Group(NamedTuple):
    """Leaves that share a norm, or one leaf with an array of norms."""

    leaves: list[Any]
    # The dimensions of each leaf that are summed, which stay with size 1. None: all,
    # and none stays.
    dims: Dims
    splits: list[Split]  # of each leaf


# Of each group, without its leaves.
Layout = tuple[tuple[Dims, tuple[Split, ...]], ...]
Blocks = list[jax.Array]


def scatter(blocks: Blocks, layout: Layout) -> Blocks:
    """For each group its own norm, out of the blocks."""
    # Block 0 is the vector of scalars, where there is one. The arrays follow.
    arrays = iter(blocks[any(dims is None for dims, _ in layout) :])
    row, found = 0, []
    for dims, _ in layout:
        if dims is None:
            found.append(blocks[0][row] if blocks[0].ndim else blocks[0])
            row += 1
        else:
            found.append(next(arrays))
    return found


def sum_over(x: jax.Array, dims: Dims) -> jax.Array:
    return jnp.sum(x, dims, keepdims=dims is not None)


def add_up(terms: list[list[jax.Array]], layout: Layout, dtype: Any) -> Blocks:
    return add_up_all([terms], layout, dtype, _total)[0]


def add_up_all(
    kinds: list[list[list[jax.Array]]],
    layout: Layout,
    dtype: Any,
    join: Callable[[list[jax.Array]], jax.Array],
) -> list[Blocks]:
    """Sums of several kinds of terms, in one collective."""
    # Nothing to ask other devices for. The parts of a global array are added by XLA.
    if not any(split.summed for _, splits in layout for split in splits):
        return [gather(terms, layout, dtype, join) for terms in kinds]
    names = names_of(layout)
    blocks: Blocks = []
    for terms in kinds:
        once = _counted_once(terms, layout, names)
        blocks += gather(once, layout, dtype, join)
    # Three bins of N norms travel as one vector of 3 N numbers.
    blocks = join_devices(lax.psum, blocks, names * len(kinds))
    size = len(names)
    return [blocks[i * size : (i + 1) * size] for i in range(len(kinds))]


def maximum(terms: list[jax.Array]) -> jax.Array:
    most = terms[0]
    for term in terms[1:]:
        most = jnp.maximum(most, term)
    return most


def take_max(
    sizes: list[list[jax.Array]],
    layout: Layout,
    dtype: Any,
    join: Callable[[list[jax.Array]], jax.Array] = maximum,
) -> Blocks:
    blocks = gather(sizes, layout, dtype, join)
    return join_devices(lax.pmax, blocks, names_of(layout))


def names_of(layout: Layout) -> list[tuple[str, ...]]:
    """For each block, the mesh axes that it is joined over."""
    scalars = [splits for dims, splits in layout if dims is None]
    blocks = (
        [[split for splits in scalars for split in splits]] if scalars else []
    )
    arrays = [list(splits) for dims, splits in layout if dims is not None]
    return names_of_blocks(blocks + arrays)


def _counted_once(
    terms: list[list[jax.Array]], layout: Layout, names: list[tuple[str, ...]]
) -> list[list[jax.Array]]:
    has_vector = any(dims is None for dims, _ in layout)
    arrays = iter(names[has_vector:])
    found = []
    for group, (dims, splits) in zip(terms, layout):
        over = names[0] if dims is None else next(arrays)
        found.append([counted_once(*each, over) for each in zip(group, splits)])
    return found


def gather(
    terms: list[list[jax.Array]],
    layout: Layout,
    dtype: Any,
    join: Callable[[list[jax.Array]], jax.Array],
) -> Blocks:
    """Joins the terms of each group, and stacks those of whole leaves."""
    zero = jnp.zeros((), dtype)
    joined = [join(group) if group else zero for group in terms]
    scalars = [x for x, (dims, _) in zip(joined, layout) if dims is None]
    arrays = [x for x, (dims, _) in zip(joined, layout) if dims is not None]
    if len(layout) == 1 and scalars:
        return scalars
    return ([jnp.stack(scalars)] if scalars else []) + arrays


def _total(terms: list[jax.Array]) -> jax.Array:
    # A chain of adds: XLA on a CPU merges the all-reduces of a chain, not of a stack.
    return sum(terms[1:], start=terms[0])


def total_of_stack(terms: list[jax.Array]) -> jax.Array:
    return terms[0] if len(terms) == 1 else jnp.sum(_stacked(terms), 0)


def max_of_stack(terms: list[jax.Array]) -> jax.Array:
    return terms[0] if len(terms) == 1 else jnp.max(_stacked(terms), 0)


def _stacked(terms: list[jax.Array]) -> jax.Array:
    # A TPU runs each add of a chain by itself. Without the barrier XLA makes a chain of
    # the sum of a stack.
    return lax.optimization_barrier(jnp.stack(terms))
