"""Products of matrices: of all those of a leaf at once, or of one in a pile of tiles.

    X^H X    the sum of T^H T over the tiles T of the matrix
    X S      T S for each tile, in its place

What is missing in a last tile is zeros, which change neither. See `_piles`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._mesh import varying_as

STRIP = 256  # rows that a TPU multiplies at once


class Whole(NamedTuple):
    """Multiplies matrices [..., rows, width], each by itself."""

    product: Callable[[jax.Array, jax.Array], jax.Array]

    @property
    def squares(self) -> "Whole":
        """What multiplies matrices [..., width, width]."""
        return self

    def gram(self, x: jax.Array) -> jax.Array:
        """X^H X, [..., width, width]."""
        return self.product(adjoint(x), x)

    def times(self, x: jax.Array, square: jax.Array) -> jax.Array:
        """X S for each matrix and its S [width, width]."""
        return self.product(x, square)

    def stack(self, z: jax.Array, x: jax.Array) -> jax.Array:
        """[Z; X] with Z [..., width, width]."""
        return jnp.concatenate([z, x], -2)

    def top(self, zx: jax.Array) -> jax.Array:
        """Z of [Z; X]."""
        return zx[..., : zx.shape[-1], :]

    def rest(self, zx: jax.Array) -> jax.Array:
        """X of [Z; X]."""
        return zx[..., zx.shape[-1] :, :]


class Tiled(NamedTuple):
    """Multiplies one matrix of a pile, which is given and returned as the whole pile
    [tiles, height, width]. Squares are [1, width, width].
    """

    start: jax.Array  # int32[]: the first tile
    size: jax.Array  # int32[]: how many tiles
    spare: int  # how many tiles at the beginning of the pile hold Z of [Z; X]

    @property
    def squares(self) -> Whole:
        return Whole(_by_strips)

    def gram(self, tiles: jax.Array) -> jax.Array:
        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            tile = tiles[self._place(number)][None]
            return total + _by_strips(adjoint(tile), tile)

        width = tiles.shape[-1]
        zeros = jnp.zeros((1, width, width), tiles.dtype)
        zeros = varying_as(zeros, jax.typeof(tiles))
        return lax.fori_loop(0, self.spare + self.size, add, zeros)

    def times(self, tiles: jax.Array, square: jax.Array) -> jax.Array:
        # In place, since a second array of all tiles would double the memory.
        def replace(number: jax.Array, tiles: jax.Array) -> jax.Array:
            place = self._place(number)
            new = _by_strips(tiles[place][None], square)[0]
            return tiles.at[place].set(new)

        return lax.fori_loop(0, self.spare + self.size, replace, tiles)

    def stack(self, z: jax.Array, tiles: jax.Array) -> jax.Array:
        _, height, width = tiles.shape
        missing = self.spare * height - width
        own = jnp.pad(z[0], ((0, missing), (0, 0)))
        own = own.reshape(self.spare, height, width)
        return lax.dynamic_update_slice(tiles, own, (0, 0, 0))

    def top(self, tiles: jax.Array) -> jax.Array:
        width = tiles.shape[-1]
        return tiles[: self.spare].reshape(1, -1, width)[:, :width]

    def rest(self, tiles: jax.Array) -> jax.Array:
        return tiles

    def _place(self, number: jax.Array) -> jax.Array:
        """Which tile of the pile a tile of [Z; X] is."""
        of_x = self.start + number - self.spare
        return jnp.where(number < self.spare, number, of_x)


Matrices = Whole | Tiled


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
