"""Products of many matrices of one width, for a TPU in one program for all of them.

A TPU's compiler takes seconds for each product of float32 matrices, and shares nothing
between equal ones. So its program must hold few products, however many matrices there
are: those of one loop over all matrices. Matrices of different height are cut into
tiles of one height, and form one pile:

    X1 [5, k]    X2 [3, k]    ->    tiles of 2 rows   X1 X1 X1 X2 X2
                                    from                0        3
                                    how many            3        2

The loop replaces each matrix in the pile by the clipped one. Only one matrix at a time
has Gram matrices and powers, so memory for them does not grow with the number of
matrices. The pile itself takes as much as the leaves.

On CPUs, GPUs and meshes each leaf has products of its own.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._mesh import is_on_one_device, varying, varying_as
from .._sums import per_platform
from ._tiles import Tiled, Whole, adjoint, exact_product

HIGHEST = 1024  # rows of a tile


class Place(NamedTuple):
    """Where the matrices of a leaf are in a pile, each with `rows` rows there."""

    layers: int
    rows: int
    is_wide: bool  # transposed in the pile
    start: int  # its first tile
    size: int  # tiles of each matrix

    @property
    def end(self) -> int:
        """The tile behind its last one."""
        return self.start + self.layers * self.size


class Pile(NamedTuple):
    """How leaves are cut into an array [tiles, height, width]."""

    places: list[Place]
    height: int
    width: int

    @property
    def spare(self) -> int:
        """How many tiles are free at the beginning."""
        return self.places[0].start

    @property
    def matrices(self) -> int:
        return sum(place.layers for place in self.places)

    def matrix(self, number: jax.Array, spare: int = 0) -> Tiled:
        """The matrix of this number, over all leaves."""
        layers = [place.layers for place in self.places]
        sizes = np.repeat([place.size for place in self.places], layers)
        starts = self.spare + np.cumsum(sizes) - sizes
        start, size = jnp.asarray(starts), jnp.asarray(sizes)
        return Tiled(start[number], size[number], spare)

    def cut(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The tiles of all leaves."""
        tiles = self.places[-1].end
        pile = jnp.zeros((tiles * self.height, self.width), leaves[0].dtype)
        pile = varying_as(pile, jax.typeof(leaves[0]))
        # Leaf by leaf, since XLA would store all leaves before it joins them.
        for leaf, place in zip(map(_upright, leaves), self.places):
            missing = place.size * self.height - place.rows
            # One matrix needs no zeros below it, for which XLA would copy it.
            if place.layers > 1:
                leaf = jnp.pad(leaf, ((0, 0), (0, missing), (0, 0)))
            rows = leaf.reshape(-1, self.width)
            start = place.start * self.height
            pile = lax.dynamic_update_slice(pile, rows, (start, 0))
        return pile.reshape(tiles, self.height, self.width)

    def leaves(self, tiles: jax.Array) -> list[jax.Array]:
        """The leaves that these are the tiles of."""
        pile = tiles.reshape(-1, self.width)
        leaves = []
        for place in self.places:
            start, end = place.start * self.height, place.end * self.height
            # Zeros below one matrix are left out at once, or XLA would copy it.
            end = start + place.rows if place.layers == 1 else end
            own = pile[start:end].reshape(place.layers, -1, self.width)
            own = own[:, : place.rows]
            leaves.append(_transposed(own) if place.is_wide else own)
        return leaves


def _transposed(x: jax.Array) -> jax.Array:
    """The conjugate transpose, as an array of its own."""
    # Imported here: JAX does not import it by itself.
    from jax.experimental.layout import Layout, with_layout_constraint

    # XLA would store the whole pile transposed, or else compute the optimizer's
    # update in the transposed layout, with copies of its state. Seen in libtpu 0.0.40.
    rows_first = Layout(tuple(range(x.ndim)))
    x = with_layout_constraint(x, rows_first)
    return with_layout_constraint(adjoint(x), rows_first)


def pile_of(leaves: Sequence[jax.Array]) -> Pile:
    """A pile of leaves, with spare tiles for a matrix [width, width]."""
    width = min(leaves[0].shape[1:])
    height = _height(leaves)
    end = -(-width // height)
    places = []
    for leaf in leaves:
        rows = max(leaf.shape[1:])
        size = -(-rows // height)
        places.append(Place(len(leaf), rows, _is_wide(leaf), end, size))
        end = places[-1].end
    return Pile(places, height, width)


def _height(leaves: Sequence[jax.Array]) -> int:
    """The height of tiles that wastes little."""
    width = min(leaves[0].shape[1:])
    matrices: Counter[int] = Counter()
    for leaf in leaves:
        matrices[max(leaf.shape[1:])] += len(leaf)
    counts = matrices.items()

    def cost(height: int) -> int:
        # Each matrix X is multiplied as [Z; X], with Z [width, width].
        spare = -(-width // height)
        tiles = ((-(-rows // height) + spare) * n for rows, n in counts)
        # Fetching the factor of a tile takes about as long as multiplying 64 rows.
        return sum(tiles) * (height + 64)

    parts = {-(-rows // n) for rows in matrices for n in range(1, 17)}
    heights = {height for height in parts if height < HIGHEST} | {HIGHEST}
    return min(sorted(heights), key=cost)


def of_each(
    function: Callable[..., tuple[jax.Array, jax.Array]],
    leaves: Sequence[jax.Array],
) -> list[tuple[jax.Array, jax.Array]]:
    """For each leaf the two numbers that a function of `Matrices` and an array finds
    for each matrix, [layers, 1, 1].
    """

    def alone(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
        return function(Whole(exact_product), _upright(leaf))

    def in_turn(leaves: list[jax.Array]) -> list[Any]:
        pile = pile_of(leaves)
        tiles = pile.cut(leaves)
        found = lax.map(
            lambda number: function(pile.matrix(number), tiles),
            jnp.arange(pile.matrices),
        )
        ends = np.cumsum([len(leaf) for leaf in leaves])[:-1]
        parts = [jnp.split(values.reshape(-1, 1, 1), ends) for values in found]
        return list(zip(*parts))

    return _in_groups(alone, in_turn, leaves)


def each_replaced(
    function: Callable[..., jax.Array],
    leaves: Sequence[jax.Array],
    *numbers: Sequence[jax.Array],
) -> list[jax.Array]:
    """Leaves with each matrix replaced by what a function of `Matrices`, an array and
    numbers returns. The numbers of a leaf are [layers, 1, 1].
    """

    def alone(leaf: jax.Array, *numbers: jax.Array) -> jax.Array:
        new = function(Whole(exact_product), _upright(leaf), *numbers)
        return adjoint(new) if _is_wide(leaf) else new

    def in_turn(leaves: list[jax.Array], *numbers: Any) -> list[jax.Array]:
        # The same pile as in `of_each`, so that XLA builds it once.
        pile = pile_of(leaves)
        values = [jnp.concatenate(each) for each in numbers]

        def replace(number: jax.Array, tiles: jax.Array) -> jax.Array:
            own = [each[number][None] for each in values]
            matrix = pile.matrix(number, pile.spare)
            return function(matrix, tiles, *own)

        # One after another, so that only one has Gram matrices and powers.
        tiles = pile.cut(leaves)
        tiles = lax.fori_loop(0, pile.matrices, replace, tiles)
        return pile.leaves(tiles)

    # In shard_map the limits of a matrix may differ between devices where it does not.
    for own in numbers:
        kinds = map(jax.typeof, own)
        leaves = [varying_as(x, kind) for x, kind in zip(leaves, kinds)]
    return _in_groups(alone, in_turn, leaves, *numbers)


def _in_groups(
    alone: Callable[..., Any],
    in_turn: Callable[..., list[Any]],
    *lists: Any,
) -> list[Any]:
    """Calls `alone` for each leaf, on a TPU `in_turn` for all leaves of one width.

    Compilers for a CPU or a GPU are fast, and programs of separate leaves faster.
    """
    apart = partial(_apart, alone)
    # On several devices matrices would be sent from one to another. Reshaping layers
    # on an Explicit mesh could move them.
    if not all(map(_may_be_joined, lists[0])):
        return apart(*lists)

    joined = jax.custom_jvp(partial(_joined, in_turn))

    # The derivative is that of separate leaves: JAX cannot run a loop in reverse whose
    # length depends on the matrix.
    @joined.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(apart, primals, tangents)

    flat = jax.tree.map(partial(_stacked, (-1,)), lists)
    found = per_platform(*flat, cpu=apart, gpu=apart, tpu=joined)
    return [
        jax.tree.map(partial(_stacked, leaf.shape[:-2]), one)
        for leaf, one in zip(lists[0], found)
    ]


def _stacked(layers: tuple[int, ...], x: jax.Array) -> jax.Array:
    return x.reshape(*layers, *x.shape[-2:])


def _apart(alone: Callable[..., Any], *lists: Any) -> list[Any]:
    return [alone(*entries) for entries in zip(*lists)]


def _joined(in_turn: Callable[..., list[Any]], *lists: Any) -> list[Any]:
    groups: dict[object, list[int]] = {}
    # The first leaf of a pile is stored before the pile is, so it is the smallest.
    order = sorted(range(len(lists[0])), key=lambda n: lists[0][n].size)
    for number in order:
        leaf = lists[0][number]
        kind = min(leaf.shape[1:]), leaf.dtype, jax.typeof(leaf).sharding
        groups.setdefault((*kind, varying(leaf)), []).append(number)
    found: dict[int, Any] = {}
    for group in groups.values():
        own = []
        for entries in lists:
            own.append([entries[number] for number in group])
        found |= zip(group, in_turn(*own))
    return [found[number] for number in range(len(found))]


def _may_be_joined(x: jax.Array) -> bool:
    """Whether matrices lie on one device, where they may be cut and joined."""
    is_typed = jax.sharding.get_abstract_mesh().explicit_axes
    return is_on_one_device(x) and not is_typed


def _is_wide(x: jax.Array) -> bool:
    """Whether matrices have more columns than rows."""
    return x.shape[-2] < x.shape[-1]


def _upright(x: jax.Array) -> jax.Array:
    """Matrices with at least as many rows as columns."""
    return adjoint(x) if _is_wide(x) else x
