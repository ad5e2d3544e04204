"""The norms of a tree, in blocks: all scalar norms as one vector, and norms that are
arrays (of units, of stacked layers) as they are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _prefix as prefix
from ._collectives import Split
from ._powers import Group, group_norms


class Place(NamedTuple):
    """Where a norm is: its block, and its row if the block is a vector of norms."""

    block: int
    row: int | None


class Norms(NamedTuple):
    """The norms of a tree.

    Blocks are arrays. A block without rows is one norm, which may be an array of units
    or layers. A block with rows is a vector of scalar norms.
    """

    blocks: list[jax.Array]
    places: list[Place]  # of each norm
    paths: list[Any]  # of each norm: its key path in the tree of norms
    of_leaf: list[int | None]  # for each clipped leaf, the number of its norm
    treedef: Any  # of the tree of norms, as norm functions return it
    # The mesh axes that split the units or layers of each block. Empty: none of them.
    kept: tuple[tuple[str, ...], ...] = ()

    def pick(self, blocks: list[Any], number: int) -> Any:
        """The entry of one norm in blocks of this form."""
        block, row = self.places[number]
        return blocks[block] if row is None else blocks[block][row]

    def tree(self) -> Any:
        """The norms as norm functions return them."""
        each = [
            self.pick(self.blocks, number) for number in range(len(self.places))
        ]
        return self.treedef.unflatten(each)

    def names(self) -> list[list[str]]:
        """The names of the norms in each block."""
        found: list[list[str]] = [[] for _ in self.blocks]
        for place, name in zip(self.places, prefix.names(self.paths)):
            found[place.block].append(name)
        return found


def norms_of_tree(norms: Any, tree: Any) -> Norms:
    """The blocks of a tree of norms, which is a tree prefix of the updates."""
    # None as a norm leaves its part of the tree alone. As a leaf it keeps its place.
    treedef = jax.tree.structure(norms, is_leaf=prefix.is_none)
    of_leaf: list[int | None] = []
    number = 0
    flat = jax.tree.leaves(norms, is_leaf=prefix.is_none)
    for norm, part in zip(flat, treedef.flatten_up_to(tree)):
        own = None if norm is None else number
        of_leaf += [own] * len(jax.tree.leaves(part))
        number += norm is not None
    entries, treedef = jax.tree_util.tree_flatten_with_path(norms)
    paths, each = [path for path, _ in entries], [norm for _, norm in entries]
    # One norm of everything: a block without rows, with the empty path.
    if treedef == jax.tree.structure(0):
        return Norms(each, [Place(0, None)], paths, of_leaf, treedef)
    places = places_of([jnp.ndim(norm) == 0 for norm in each])
    blocks = in_blocks(each, places)
    return Norms(blocks, places, paths, of_leaf, treedef)


def places_of(scalar: list[bool]) -> list[Place]:
    """Where each norm goes: scalars into one vector, and each array by itself."""
    # Block 0 is the vector, where there is one: [s, a, s] -> (0, 0), (1, None), (0, 1).
    places, rows, arrays = [], 0, int(any(scalar))
    for is_scalar in scalar:
        places.append(Place(0, rows) if is_scalar else Place(arrays, None))
        rows += is_scalar
        arrays += not is_scalar
    return places


def in_blocks(each: list[Any], places: list[Place]) -> list[jax.Array]:
    """The blocks of norms, or of other numbers for each norm, given one by one."""
    rows: dict[int, list[Any]] = {}
    for place, value in zip(places, each):
        rows.setdefault(place.block, []).append(value)
    vectors = {place.block for place in places if place.row is not None}
    blocks = []
    for block in sorted(rows):
        values = [jnp.asarray(value) for value in rows[block]]
        blocks.append(jnp.stack(values) if block in vectors else values[0])
    return blocks


def norm_of_norms(norms: Norms) -> jax.Array:
    """The norm of all norms together, without a derivative."""
    # Each device has the norms of its own units, whose squares are then summed over
    # devices. Norms of whole leaves are the same everywhere and count once.
    kept = norms.kept or ((),) * len(norms.blocks)
    splits = [Split(names) for names in kept]
    (total,) = group_norms(2.0, [Group(norms.blocks, None, splits)])
    return lax.stop_gradient(total)
