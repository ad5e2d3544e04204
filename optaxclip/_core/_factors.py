"""From a norm to a new one: the factors, and the multiplication of the updates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._norms._leaves import cast_like, clipped_leaves, put_back
from .._norms._measures import Norms, in_blocks, norms_of_tree
from .._norms._platform import per_platform


class Factor(NamedTuple):
    """What updates are multiplied by, first by one number and then by the other.

    The second is 1 unless the quotient of the norms is so far from 1 that it, or a
    product with it, could leave the range of the dtype. Then both are twice its root,
    and a quarter comes between them. Each of these products is a normal number.
    """

    first: jax.Array
    second: jax.Array


def rescale(updates: Any, norms: Any, new_norms: Any) -> Any:
    """Stretches every part of `updates` from its norm to a new one.

    Args:
      updates: a pytree of arrays.
      norms: a tree prefix of `updates`: their norms. None in it leaves a part alone.
      new_norms: what the norms become, in the same structure.

    Returns:
      The updates in their own dtypes, multiplied in the norm's dtype. Where both norms
      are equal, bit for bit the input. Where the new one is NaN, all NaN. The result is
      never longer than the new norm but for the rounding to the leaf's dtype.

    Example:
      >>> print(optaxclip.rescale(jnp.array([3.0, 4.0]), 5.0, 1.0).round(6))
      [0.6 0.8]
    """
    tree = clipped_leaves(updates)
    before = norms_of_tree(norms, tree)
    new = in_blocks(jax.tree.leaves(new_norms), before.places)
    factors = [factor_between(*each) for each in zip(before.blocks, new)]
    return put_back(multiply(tree, before, factors), updates)


def factor_between(norm: jax.Array, new_norm: jax.Array) -> Factor:
    """The factor from a norm to a new one.

    It is exactly 1 where they are equal, and NaN for a broken norm. Otherwise it ends
    3 eps below the quotient, which covers the rounding of limit, norm, quotient and
    product, so that the result never exceeds the limit.
    """
    far = is_far(norm, new_norm)
    root = ratio(*(jnp.sqrt(jnp.where(far, x, 1.0)) for x in (new_norm, norm)))
    # Two wheres: the quotient of the unused branch must stay finite for the derivative.
    near = far | (new_norm == norm)
    quotient = ratio(jnp.where(near, 1.0, new_norm), jnp.where(near, 1.0, norm))
    short = 1 - 3 * jnp.finfo(norm.dtype).eps
    first = jnp.where(far, 2 * root, quotient)
    first = jnp.where(new_norm == norm, 1.0, first * short)
    return Factor(first, jnp.where(far, 2 * root, 1.0))


def is_far(norm: jax.Array, new_norm: jax.Array) -> jax.Array:
    """Whether the quotient is too far from 1 for one multiplication."""
    low = 2.0 ** (int(jnp.finfo(norm.dtype).minexp) + 26)
    down = (new_norm > 0) & (new_norm < norm * low)
    return down | ((norm > 0) & (norm < new_norm * low))


def reported(norm: jax.Array, new_norm: jax.Array) -> jax.Array:
    """new_norm / norm for the state: 1 where both are equal, 0 only where the new norm
    is 0, and else within the normal numbers of the dtype.
    """
    info = jnp.finfo(norm.dtype)
    quotient = jnp.clip(ratio(new_norm, norm), info.tiny, info.max)
    quotient = jnp.where(new_norm == 0, 0.0, quotient)
    return jnp.where(new_norm == norm, 1.0, quotient)


def multiply(tree: Any, norms: Norms, factors: list[Factor]) -> Any:
    """Multiplies each clipped leaf by the factor of its norm."""
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return tree
    spread = [Factor(*(_spread(x, len(leaves)) for x in f)) for f in factors]
    changed = []
    for place, (leaf, number) in enumerate(zip(leaves, norms.of_leaf)):
        if number is not None:
            block, row = norms.places[number]
            lone = row is None and factors[block].first.ndim == 0
            row = place if lone else row
            leaf = stretch(leaf, *(_entry(x, row) for x in spread[block]))
        changed.append(leaf)
    return treedef.unflatten(changed)


def _spread(factor: jax.Array, count: int) -> jax.Array:
    """A factor of all leaves, as a vector with one entry for each leaf.

    On a GPU, XLA merges kernels of an optimizer that read the same vector. The barrier
    keeps it one. Elsewhere the vector disappears.
    """
    if factor.ndim:
        return factor

    def behind_barrier(factor: jax.Array) -> jax.Array:
        return lax.optimization_barrier(jnp.broadcast_to(factor, (count,)))

    def vanishing(factor: jax.Array) -> jax.Array:
        return jnp.broadcast_to(factor, (count,))

    return per_platform(factor, cpu=vanishing, gpu=behind_barrier, tpu=vanishing)


def _entry(factor: jax.Array, row: int | None) -> jax.Array:
    """The entry of one norm in a block of factors."""
    return factor if row is None else factor[row]


@jax.jit
def stretch(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """x * first * second, rounded once to the dtype of x."""
    x = jnp.asarray(x)
    quarter = jnp.where(second == 1, 1.0, 0.25).astype(second.dtype)
    wide = np.promote_types(x.dtype, first.dtype)
    factors = [y.astype(wide) for y in (first, quarter, second)]
    stretched = cast_like(x.astype(wide) * factors[0] * factors[1] * factors[2], x)
    # Selected where nothing is to be done: a product would flush subnormal numbers.
    return jnp.where(first == 1, x, stretched)


@jax.custom_jvp
def ratio(short: jax.Array, long: jax.Array) -> jax.Array:
    """short / long, and 0 / 0 = 0."""
    # Two wheres: the quotient of the unused branch must be finite for the derivative.
    return short / jnp.where(long == 0, 1.0, long)


@ratio.defjvp
def _ratio_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """d(s/l) = (ds - (s/l) dl) / l. The rule of division squares l, which overflows."""
    short, long = primals
    quotient = ratio(short, long)
    return quotient, ratio(tangents[0] - quotient * tangents[1], long)


def zero_where_zero(tree: Any, norms: Norms, factors: list[Factor]) -> Any:
    """Zeros in leaves whose factor is 0, since 0 times inf is NaN."""
    leaves, treedef = jax.tree.flatten(tree)
    changed = []
    for leaf, number in zip(leaves, norms.of_leaf):
        if number is not None:
            factor = norms.pick([f.first for f in factors], number)
            leaf = jnp.where(factor == 0, jnp.zeros_like(leaf), leaf)
        changed.append(leaf)
    return treedef.unflatten(changed)
