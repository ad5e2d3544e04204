"""Products of many matrices with equally many rows, in one program for all of them.

A TPU's compiler takes seconds for each product of float32 matrices, and shares nothing
between equal ones. So the program must hold few products, however many matrices there
are. Wide matrices are cut into tiles of one width:

    X1 [k, 5]    X2 [k, 3]    ->    tiles of 2 columns    X1 X1 X1 X2 X2
                                    their owners           0  0  0  1  1

    X X^H    the sum of T T^H over the tiles of a matrix
    S X      S T for each tile, with the S of its owner

Missing columns of a last tile are zeros, which change neither.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._norms._platform import per_platform
from .._norms._types import is_on_one_device, varying, varying_as

# A tile has at most so many numbers, or so many columns if that is more.
LARGEST, WIDEST = 2**20, 1024
# So many numbers are in the tiles that are multiplied at once, or in their factors.
CHUNK = 2**23
STRIP = 256  # rows that a TPU multiplies at once


class Tiling(NamedTuple):
    """How leaves [layers, rows, columns] are cut into tiles [rows, width]."""

    sizes: tuple[tuple[int, int], ...]  # (layers, columns) of each leaf
    rows: int
    width: int

    @property
    def counts(self) -> list[int]:
        """How many tiles a matrix of each leaf has."""
        return [-(-columns // self.width) for _, columns in self.sizes]

    @property
    def is_whole(self) -> bool:
        """Whether each matrix is one tile."""
        return max(self.counts) == 1

    @property
    def is_one_leaf(self) -> bool:
        """Whether the tiles are the matrices of a leaf as it is."""
        return len(self.sizes) == 1 and self.sizes[0][1] == self.width

    @property
    def owners(self) -> np.ndarray:
        """The number of the matrix that each tile belongs to, [chunks, tiles]."""
        counts = [
            np.full(layers, count)
            for (layers, _), count in zip(self.sizes, self.counts)
        ]
        tiles = np.concatenate(counts)
        owners = np.repeat(np.arange(len(tiles)), tiles)
        # Chunks of equal size, the last of which is filled up with tiles of zeros.
        area = self.rows * max(self.rows, self.width)
        chunks = -(-len(owners) * area // CHUNK)
        each = -(-len(owners) // chunks)
        return np.resize(owners, (-(-len(owners) // each), each))

    def cut(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The tiles of all leaves, [matrices, rows, width] if each matrix is one tile,
        [chunks, tiles, rows, width] if not.
        """
        if self.is_one_leaf:
            return leaves[0]
        parts = []
        for leaf, count in zip(leaves, self.counts):
            filled = _filled(leaf.mT, count * self.width)
            parts += [part.reshape(-1, self.rows) for part in filled]
        shape: tuple[int, ...] = (-1,)
        if not self.is_whole:
            shape = self.owners.shape
            missing = self.owners.size * self.width - sum(map(len, parts))
            parts.append(jnp.zeros((missing, self.rows), leaves[0].dtype))
        # One array from all parts: XLA would store what is joined in steps.
        tiles = jnp.concatenate(parts)
        return tiles.reshape(*shape, self.width, self.rows).mT

    def joined(self, tiles: jax.Array) -> list[jax.Array]:
        """The leaves that these are the tiles of."""
        if self.is_one_leaf:
            return [tiles]
        upright = tiles.mT.reshape(-1, self.width, self.rows)
        leaves, start = [], 0
        for (layers, columns), count in zip(self.sizes, self.counts):
            own = upright[start : start + layers * count]
            own = own.reshape(layers, count * self.width, self.rows)
            leaves.append(own[:, :columns].mT)
            start += layers * count
        return leaves

    def gram(self, tiles: jax.Array) -> jax.Array:
        """X X^H of each matrix, [matrices, rows, rows]."""
        if self.is_whole:
            return product(tiles, adjoint(tiles))

        def add(
            total: jax.Array, chunk: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, None]:
            own, owners = chunk
            return total.at[owners].add(product(own, adjoint(own))), None

        matrices = sum(layers for layers, _ in self.sizes)
        zeros = jnp.zeros((matrices, self.rows, self.rows), tiles.dtype)
        zeros = varying_as(zeros, jax.typeof(tiles))
        return lax.scan(add, zeros, (tiles, jnp.asarray(self.owners)))[0]

    def times(self, squares: jax.Array, tiles: jax.Array) -> jax.Array:
        """The tiles of S X, where each matrix has its own S [rows, rows]."""
        if self.is_whole:
            return product(squares, tiles)
        owners = jnp.asarray(self.owners)

        # In place, since a second array of all tiles would double the memory.
        def replace(chunk: int, tiles: jax.Array) -> jax.Array:
            new = product(squares[owners[chunk]], tiles[chunk])
            return tiles.at[chunk].set(new)

        return lax.fori_loop(0, len(owners), replace, tiles)


def groups_of(leaves: Sequence[jax.Array]) -> list[list[int]]:
    """The numbers of the leaves [layers, rows, columns] that may be joined."""
    groups: dict[object, list[int]] = {}
    for number, leaf in enumerate(leaves):
        kind = leaf.shape[-2], leaf.dtype, jax.typeof(leaf).sharding
        key = (*kind, varying(leaf)) if may_be_joined(leaf) else number
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def whole(leaf: jax.Array, more: int = 0) -> Tiling:
    """A tiling that cuts no matrix of a leaf with `more` columns than this one."""
    *layers, rows, columns = leaf.shape
    width = columns + more
    return Tiling(((math.prod(layers), width),), rows, width)


def tiling_of(leaves: Sequence[jax.Array], more: int = 0) -> Tiling:
    """A tiling with little waste for leaves with `more` columns than these."""
    each = [whole(leaf, more) for leaf in leaves]
    if not may_be_joined(leaves[0]):
        return each[0]
    sizes = tuple(tiling.sizes[0] for tiling in each)
    rows = leaves[0].shape[-2]
    matrices: Counter[int] = Counter()
    for layers, columns in sizes:
        matrices[columns] += layers

    def cost(width: int) -> int:
        tiles = (-(-columns // width) * n for columns, n in matrices.items())
        # Fetching the factor of a tile takes about as long as multiplying 64 columns.
        return sum(tiles) * (width + 64)

    widest = max(WIDEST, LARGEST // rows)
    parts = {-(-columns // n) for columns in matrices for n in range(1, 17)}
    widths = {width for width in parts if width < widest} | {widest}
    return Tiling(sizes, rows, min(sorted(widths), key=cost))


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b for each pair of [matrices, rows, columns]."""
    if not may_be_joined(a):
        return exact_product(a, b)
    return per_platform(
        a, b, cpu=exact_product, gpu=exact_product, tpu=_by_strips
    )


def adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of each matrix."""
    return jnp.conj(x.mT)


def exact_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b, whose factors are not rounded."""
    # By default accelerators round float32 factors to bfloat16 or TF32.
    return jnp.matmul(a, b, precision="highest")


def _by_strips(a: jax.Array, b: jax.Array) -> jax.Array:
    """The same by loops over matrices and strips of rows.

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
    """Whether matrices may be cut, and joined with those of other leaves.

    On several devices that would send them from one to another.
    """
    is_typed = jax.sharding.get_abstract_mesh().explicit_axes
    return is_on_one_device(x) and not is_typed


def _filled(x: jax.Array, rows: int) -> list[jax.Array]:
    """The parts of matrices with zeros below them, up to a number of rows."""
    missing = rows - x.shape[-2]
    if not missing:
        return [x]
    zeros = jnp.zeros((*x.shape[:-2], missing, x.shape[-1]), x.dtype)
    # The parts of several layers would not lie one behind the other.
    return [x, zeros] if len(x) == 1 else [jnp.concatenate([x, zeros], -2)]
