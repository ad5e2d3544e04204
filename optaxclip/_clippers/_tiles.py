"""Products of many matrices of one width, for a TPU in one program for all of them.

A TPU's compiler takes seconds for each product of float32 matrices, and shares nothing
between equal ones. So its program must hold few products, however many matrices there
are. Matrices of different height are cut into tiles of one height:

    X1 [5, k]    X2 [3, k]    ->    tiles of 2 rows   X1 X1 X1 X2 X2
                                    their owners       0  0  0  1  1

    X^H X    the sum of T^H T over the tiles of a matrix
    X S      T S for each tile, with the S of its owner

What is missing in a last tile is zeros, which change neither. On CPUs, GPUs and
meshes each matrix is one tile, and each leaf has products of its own.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._norms._platform import per_platform
from .._norms._types import is_on_one_device, varying, varying_as

HIGHEST = 1024  # rows of a tile
STRIP = 256  # rows that a TPU multiplies at once


class Tiling(NamedTuple):
    """How leaves [layers, rows, width] are cut into tiles [height, width]."""

    sizes: tuple[tuple[int, int], ...]  # (layers, rows) of each leaf
    width: int
    height: int
    is_joined: bool = False  # several leaves on one TPU

    @property
    def counts(self) -> list[int]:
        """How many tiles a matrix of each leaf has."""
        return [-(-rows // self.height) for _, rows in self.sizes]

    @property
    def is_whole(self) -> bool:
        """Whether each matrix is one tile."""
        return max(self.counts) == 1

    @property
    def is_one_leaf(self) -> bool:
        """Whether the tiles are the matrices of a leaf as it is."""
        return len(self.sizes) == 1 and self.sizes[0][1] == self.height

    @property
    def owners(self) -> np.ndarray:
        """The number of the matrix that each tile belongs to."""
        counts = [
            np.full(layers, count)
            for (layers, _), count in zip(self.sizes, self.counts)
        ]
        tiles = np.concatenate(counts)
        return np.repeat(np.arange(len(tiles)), tiles)

    def cut(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The tiles of all leaves, [tiles, height, width]."""
        if self.is_one_leaf:
            return leaves[0]
        parts = []
        for leaf, count in zip(leaves, self.counts):
            filled = _filled(leaf, count * self.height)
            parts += [part.reshape(-1, self.width) for part in filled]
        # One array from all parts: XLA would store what is joined in steps.
        return jnp.concatenate(parts).reshape(-1, self.height, self.width)

    def joined(self, tiles: jax.Array) -> list[jax.Array]:
        """The leaves that these are the tiles of."""
        if self.is_one_leaf:
            return [tiles]
        leaves, start = [], 0
        for (layers, rows), count in zip(self.sizes, self.counts):
            own = tiles[start : start + layers * count]
            own = own.reshape(layers, count * self.height, self.width)
            leaves.append(own[:, :rows])
            start += layers * count
        return leaves

    def gram(self, tiles: jax.Array) -> jax.Array:
        """X^H X of each matrix, [matrices, width, width]."""
        if self.is_whole:
            return self.product(adjoint(tiles), tiles)

        def add(
            total: jax.Array, one: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, None]:
            tile, owner = one
            square = self.product(adjoint(tile)[None], tile[None])[0]
            return total.at[owner].add(square), None

        matrices = sum(layers for layers, _ in self.sizes)
        zeros = jnp.zeros((matrices, self.width, self.width), tiles.dtype)
        zeros = varying_as(zeros, jax.typeof(tiles))
        return lax.scan(add, zeros, (tiles, jnp.asarray(self.owners)))[0]

    def times(self, tiles: jax.Array, squares: jax.Array) -> jax.Array:
        """The tiles of X S, where each matrix has its own S [width, width]."""
        if self.is_whole:
            return self.product(tiles, squares)
        owners = jnp.asarray(self.owners)

        # In place, since a second array of all tiles would double the memory.
        def replace(number: int, tiles: jax.Array) -> jax.Array:
            tile, square = tiles[number], squares[owners[number]]
            new = self.product(tile[None], square[None])[0]
            return tiles.at[number].set(new)

        return lax.fori_loop(0, len(owners), replace, tiles)

    def of_squares(self) -> "Tiling":
        """The tiling of a square matrix [width, width] for each of these."""
        matrices = sum(layers for layers, _ in self.sizes)
        sizes = ((matrices, self.width),)
        return Tiling(sizes, self.width, self.width, self.is_joined)

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """a @ b for each pair of matrices."""
        return _by_strips(a, b) if self.is_joined else exact_product(a, b)


Planner = Callable[
    ..., Tiling
]  # of leaves, and of the rows that they get more


def whole(leaves: Sequence[jax.Array], more: int = 0) -> Tiling:
    """A tiling that cuts no matrix of a leaf with `more` rows than this one."""
    (leaf,) = leaves
    *layers, rows, width = leaf.shape
    return Tiling(((math.prod(layers), rows + more),), width, rows + more)


def together(leaves: Sequence[jax.Array], more: int = 0) -> Tiling:
    """A tiling with little waste for leaves with `more` rows than these."""
    sizes = tuple(whole([leaf], more).sizes[0] for leaf in leaves)
    width = leaves[0].shape[-1]
    matrices: Counter[int] = Counter()
    for layers, rows in sizes:
        matrices[rows] += layers

    def cost(height: int) -> int:
        tiles = (-(-rows // height) * n for rows, n in matrices.items())
        # Fetching the factor of a tile takes about as long as multiplying 64 rows.
        return sum(tiles) * (height + 64)

    parts = {-(-rows // n) for rows in matrices for n in range(1, 17)}
    heights = {height for height in parts if height < HIGHEST} | {HIGHEST}
    height = min(sorted(heights), key=cost)
    return Tiling(sizes, width, height, is_joined=True)


def in_groups(function: Callable[..., list[Any]], *lists: Any) -> Any:
    """Calls a function of a planner and lists with the entries of the leaves that are
    multiplied together: on a TPU all with equally many columns.

    Compilers for a CPU or a GPU are fast, and programs of separate leaves faster.
    """
    apart = partial(_apart, function)
    # On several devices matrices would be sent from one to another.
    if not all(map(may_be_joined, lists[0])):
        return apart(*lists)
    grouped = partial(_joined, function)
    return per_platform(*lists, cpu=apart, gpu=apart, tpu=grouped)


def _apart(function: Callable[..., list[Any]], *lists: Any) -> list[Any]:
    found = []
    for entries in zip(*lists):
        alone = [[entry] for entry in entries]
        found += function(whole, *alone)
    return found


def _joined(function: Callable[..., list[Any]], *lists: Any) -> list[Any]:
    groups: dict[object, list[int]] = {}
    for number, leaf in enumerate(lists[0]):
        kind = leaf.shape[-1], leaf.dtype, jax.typeof(leaf).sharding
        groups.setdefault((*kind, varying(leaf)), []).append(number)
    found: dict[int, Any] = {}
    for group in groups.values():
        own = []
        for entries in lists:
            own.append([entries[number] for number in group])
        found |= zip(group, function(together, *own))
    return [found[number] for number in range(len(found))]


def adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of each matrix."""
    return jnp.conj(x.mT)


def exact_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b, whose factors are not rounded."""
    # By default accelerators round float32 factors to bfloat16 or TF32.
    return jnp.matmul(a, b, precision="highest")


def _by_strips(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b for each pair, by loops over matrices and strips of rows.

    libtpu compiles it in 1 s where 10 products of 768 x 768 at once take 10 s.
    """
    matrices, rows, columns = a.shape
    strips = -(-rows // STRIP)
    each = -(-rows // strips)
    a = jnp.pad(a, ((0, 0), (0, strips * each - rows), (0, 0)))
    a = a.reshape(matrices, strips, each, columns)

    def of_matrix(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        strips, factor = pair
        return lax.map(lambda strip: exact_product(strip, factor), strips)

    found = lax.map(of_matrix, (a, b))
    return found.reshape(matrices, strips * each, -1)[:, :rows]


def may_be_joined(x: jax.Array) -> bool:
    """Whether matrices lie on one device, where they may be cut and joined."""
    is_typed = jax.sharding.get_abstract_mesh().explicit_axes
    return is_on_one_device(x) and not is_typed


def _filled(x: jax.Array, rows: int) -> list[jax.Array]:
    """The parts of matrices with zeros below them, up to a number of rows."""
    missing = rows - x.shape[-2]
    if not missing:
        return [x]
    zeros = jnp.zeros((*x.shape[:-2], missing, x.shape[-1]), x.dtype)
    if len(x) == 1:
        return [x, zeros]
    return [jnp.concatenate([x, varying_as(zeros, jax.typeof(x))], -2)]
