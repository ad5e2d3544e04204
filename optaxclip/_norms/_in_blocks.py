"""The norms of a tree, in blocks: norms of one shape are the rows of one array.

    norm of everything               float32[]
    norms of N leaves                float32[N]
    norms of the units of N leaves   float32[N, 1, units], for each number of units
    norms of the units of one leaf   float32[1, units]

What a clipper computes for each norm, it computes once for all norms of a block. N is
at most 2 for arrays.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _prefix as prefix
from ._unstack import entries_of

# Norms that are arrays in one block. All leaves of a block are read before the first of
# them is multiplied, and a TPU reads those again that it could not keep on its chip. Of
# AGC on GPT-2 small a v5e moves 3.80 GB with 1, 3.81 with 2, 3.95 with 5 and 4.20 with
# any number. With 2 its program takes a sixth less time to compile than with 5. With 1
# the state has twice as many arrays.
ARRAYS = 2


class Place(NamedTuple):
    """Where a norm is: its block, and its row. No row: the block is that one norm."""

    block: int
    row: int | None


class Row(NamedTuple):
    """An entry of a vector that is not taken out of it. Rows of a vector in order are
    that vector again. Slices and their stack are three operations for each to XLA.
    """

    vector: jax.Array
    row: int


Number = jax.Array | Row


class Norms(NamedTuple):
    """The norms of a tree."""

    blocks: list[jax.Array]
    places: list[Place]  # of each norm
    paths: list[Any]  # of each norm: its key path in the tree of norms
    of_leaf: list[int | None]  # for each clipped leaf, the number of its norm
    treedef: Any  # of the tree of norms, as norm functions return it
    # The mesh axes that split the units or layers of each block. Empty: none of them.
    kept: tuple[tuple[str, ...], ...] = ()
    noun: str = "leaf"  # what errors call that which has a norm

    def pick(self, blocks: list[Any], number: int) -> Any:
        """The entry of one norm in blocks of this form."""
        return entry_at(blocks, self.places[number])

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape of one norm."""
        block, row = self.places[number]
        return self.blocks[block].shape[row is not None :]

    def tree(self) -> Any:
        """The norms as a tree, for what is computed with them."""
        each = [entry_at(self.blocks, place) for place in self.places]
        return self.treedef.unflatten(each)

    def returned(self) -> Any:
        """The norms as norm functions return them."""
        rows = {place.block for place in self.places if place.row is not None}
        blocks: list[Any] = list(self.blocks)
        for number in rows:
            if blocks[number].ndim == 1:
                blocks[number] = entries_of(blocks[number])
        return self._replace(blocks=blocks).tree()

    def shapes(self) -> Any:
        """The shapes of the norms in their tree."""
        numbers = range(len(self.places))
        return self.treedef.unflatten(map(self.shape, numbers))


# To JAX only blocks are arrays. The rest of some norms belongs to their structure.
jax.tree_util.register_pytree_node(
    Norms,
    lambda norms: ((norms.blocks,), norms._replace(blocks=[])),
    lambda rest, blocks: rest._replace(blocks=blocks[0]),
)


def are_rows(names: Collection[str], shape: tuple[int, ...]) -> bool:
    """Whether norms of this shape are rows of their block. One that is alone is a row
    if it is a number with a name, and otherwise the whole block.
    """
    return len(names) > 1 or ("" not in names and not shape)


def norms_of_tree(norms: Any, tree: Any, argument: str = "norms") -> Norms:
    """The blocks of a tree of norms.

    Raises:
      ValueError: norms that are no tree prefix of the updates.
    """
    # None as a norm leaves its part of the tree alone. As a leaf it keeps its place.
    treedef = jax.tree.structure(norms, is_leaf=prefix.is_none)
    of_leaf: list[int | None] = []
    number = 0
    flat = jax.tree.leaves(norms, is_leaf=prefix.is_none)
    try:
        parts = treedef.flatten_up_to(tree)
    except (TypeError, ValueError):
        raise ValueError(
            f"{argument} must be a tree prefix of the updates, "
            f"{jax.tree.structure(tree)}, got {treedef}."
        ) from None
    for norm, part in zip(flat, parts):
        own = None if norm is None else number
        of_leaf += [own] * len(jax.tree.leaves(part))
        number += norm is not None
    entries, treedef = jax.tree_util.tree_flatten_with_path(norms)
    paths, each = [path for path, _ in entries], [norm for _, norm in entries]
    # One norm of everything: a block without rows, with the empty path.
    if treedef == jax.tree.structure(0):
        return Norms(each, [Place(0, None)], paths, of_leaf, treedef)
    places = places_of(list(map(_kind, each)))
    blocks = in_blocks(each, places)
    return Norms(blocks, places, paths, of_leaf, treedef)


def _kind(norm: Any) -> Any:
    """What norms in one block have in common. Scalars of any dtype are one vector."""
    kind = jax.typeof(norm)
    return (kind.shape, kind.dtype, kind.sharding.spec) if kind.shape else ()


def places_of(kinds: list[Any]) -> list[Place]:
    """Where each norm goes: those of one kind are the rows of a block.

    The kind of scalars is (), whose block has any number of rows. Arrays go into blocks
    of at most `ARRAYS`, and one that is alone in its block has no row.
    """
    rows: dict[int, tuple[Any, int | None]] = {}
    for kind, same in alike(kinds).items():
        for part in evenly(same, ARRAYS if kind else len(same)):
            alone = kind and len(part) == 1
            # The first place of a part stands for its block.
            for row, place in enumerate(part):
                rows[place] = part[0], None if alone else row
    firsts = sorted({first for first, _ in rows.values()})
    blocks = {first: number for number, first in enumerate(firsts)}
    # Kinds [a, b, a] -> (0, 0), (1, None), (0, 1).
    each = (rows[place] for place in range(len(kinds)))
    return [Place(blocks[first], row) for first, row in each]


def alike(kinds: Iterable[Hashable]) -> dict[Any, list[int]]:
    """The places of each kind."""
    places: dict[Any, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    return places


def evenly(places: list[int], most: int) -> Iterator[list[int]]:
    """The places in parts of at most so many, which are as even as can be: XLA shares
    the code of those of one size.
    """
    count = math.ceil(len(places) / most)
    ends = [-(-len(places) * part // count) for part in range(count + 1)]
    return (places[begin:end] for begin, end in pairwise(ends))


def in_blocks(
    each: list[Any],
    places: list[Place],
    stack: Callable[[list[Any]], Any] = jnp.stack,
) -> list[jax.Array]:
    """The blocks of norms, or of other numbers for each norm, given one by one."""
    rows: dict[int, list[Any]] = {}
    for place, value in zip(places, each):
        rows.setdefault(place.block, []).append(value)
    alone = {place.block for place in places if place.row is None}
    blocks = []
    for block in sorted(rows):
        own = rows[block]
        blocks.append(
            taken_out(own[0]) if block in alone else stacked(own, stack)
        )
    return blocks


def stacked(
    numbers: list[Number],
    stack: Callable[[list[Any]], Any] = jnp.stack,
) -> jax.Array:
    """The numbers as one array. Rows of one vector are taken out together."""
    rows = [number for number in numbers if isinstance(number, Row)]
    vectors = {id(row.vector) for row in rows}
    if len(rows) < len(numbers) or len(vectors) != 1:
        return stack([taken_out(number) for number in numbers])
    vector, places = rows[0].vector, [row for _, row in rows]
    # All of them as they are, which spares a gather.
    if places == list(range(vector.size)):
        return vector
    return vector[np.array(places)]


def taken_out(number: Number) -> jax.Array:
    is_row = isinstance(number, Row)
    return number.vector[number.row] if is_row else number


def stack_by_selects(rows: list[jax.Array]) -> jax.Array:
    """The rows as one array. A TPU makes a kernel of each row of a stack, and one of
    all these selects.
    """
    if not rows[0].ndim:
        return jnp.stack(rows)
    block = jnp.repeat(rows[0][None], len(rows), 0)
    for number, row in enumerate(rows[1:], 1):
        here = np.arange(len(rows)) == number
        here = here.reshape(-1, *(1,) * row.ndim)
        block = jnp.where(here, row[None], block)
    return block


def entry_at(blocks: list[Any], place: Place) -> Any:
    """The entry of one norm in blocks."""
    block = blocks[place.block]
    return block if place.row is None else block[place.row]
