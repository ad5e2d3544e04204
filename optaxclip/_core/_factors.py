"""From a norm to a new one: the factors, and the multiplication of the updates.

    root     sqrt(new_norm / norm), a hair less      one number for each norm
    update   x * root * root

The quotient of the norms may leave the range of the dtype, and its root does not. So
updates are multiplied twice, always, which takes no decision for each leaf.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arguments import check_shape
from .._norms._in_blocks import Norms, Place, alike, in_blocks, norms_of_tree
from .._norms._leaves import clipped_leaves, put_back
from .._norms._modulus import as_float
from .._norms._platform import per_platform
from .._other_names import with_our_names

ALL_READ = 65_536  # numbers that a CPU reads again for each leaf
# Kernels of the optimizer that XLA merges on a GPU. For an H100 it compiles a clipped
# Adam step of 148 tensors in 4.3 s with 6, 5.2 s with 12, and 5.7 s with no bound.
MERGED = 6


@with_our_names
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

    Raises:
      ValueError: norms that are no tree prefix of the updates, or new norms that have
        another structure or do not broadcast to the norms.

    Example:
      >>> print(optaxclip.rescale(jnp.array([3.0, 4.0]), 5.0, 1.0))
      [0.6 0.8]
    """
    # Integers and empty leaves are not measured, and come back as they were.
    tree = clipped_leaves(updates)
    norms, new_norms = jax.tree.map(as_float, (norms, new_norms))
    before = norms_of_tree(norms, tree, "rescale: norms")
    wanted, found = map(jax.tree.structure, (norms, new_norms))
    if wanted != found:
        raise ValueError(
            f"rescale: new_norms must have the structure of norms, {wanted}, got "
            f"{found}."
        )
    each = []
    for norm, one in zip(*map(jax.tree.leaves, (norms, new_norms))):
        check_shape(one.shape, norm.shape, "rescale: new_norms")
        each.append(jnp.broadcast_to(one, norm.shape))
    new = in_blocks(each, before.places)
    pairs = zip(before.blocks, new)
    roots = [factor_between(*each).root for each in pairs]
    return put_back(multiply(tree, before, roots), updates)


class Factor(NamedTuple):
    """What updates are multiplied by, to bring a norm to a new one."""

    root: jax.Array  # its square, which ends a few eps below the quotient
    reported: jax.Array  # for states: within the normal numbers of its dtype


@jax.custom_jvp
def _factor(norm: jax.Array, new_norm: jax.Array) -> Factor:
    """The factor from a norm to a new one.

    Both its numbers are exactly 1 where the norms are equal, 0 only where the new norm
    is 0, and NaN for a broken norm. Otherwise the square of the root ends 3 eps below
    the quotient, or 5 where that is far from 1. This covers the rounding of limit,
    norm, roots and products, so that the result never exceeds the limit.
    """
    same, gone = new_norm == norm, new_norm == 0
    long = jnp.where(norm == 0, 1.0, norm)
    quotient = new_norm / long
    info = jnp.finfo(norm.dtype)
    # Beyond the range it would round to 0, which means that updates were made 0.
    reported = jnp.where(gone, 0.0, jnp.clip(quotient, info.tiny, info.max))
    # A quotient that may leave the range is made of roots, which rounds more often:
    # below 2^-100 in float32, whose normal numbers end at 2^-126.
    low, eps = 2.0 ** (int(info.minexp) + 26), info.eps
    far = (quotient < low) | (quotient > 1 / low)
    distant = jnp.sqrt(new_norm) * (1 - 2.5 * eps)
    root = jnp.where(far, distant, jnp.sqrt(quotient * (1 - 3 * eps)))
    root = jnp.where(same, 1.0, jnp.where(gone, 0.0, root))
    # Selected after the root: of a division by a root XLA makes a product, with rsqrt.
    divisor = jnp.where(far & ~gone, jnp.sqrt(long), 1.0)
    # The division comes last: what came after it XLA would do again for every element.
    return Factor(root / divisor, jnp.where(same, 1.0, reported))


@_factor.defjvp
def _derivative(primals: Any, tangents: Any) -> tuple[Factor, Factor]:
    """Of sqrt(new_norm) / sqrt(norm), and of its square. 0 where a number is fixed."""
    norm, new_norm = primals
    factor = _factor(norm, new_norm)
    fixed = (norm == new_norm) | (norm == 0) | (new_norm == 0)
    # Two wheres: the unused branch must be finite for the derivative of this one.
    below, above = (jnp.sqrt(jnp.where(fixed, 1.0, x)) for x in primals)
    longer, newer = tangents
    change = (newer / above - factor.root * (longer / below)) / (2 * below)
    change = jnp.where(fixed, 0.0, change)
    return factor, Factor(change, 2 * factor.root * change)


# Jitted, so that it is one call without jit. Inlined, so that no program has a call.
factor_between = jax.jit(_factor, inline=True)


def multiply(tree: Any, norms: Norms, roots: list[jax.Array]) -> Any:
    """Multiplies each clipped leaf twice by the root of its norm."""
    leaves, treedef = jax.tree.flatten(tree)
    norms = norms._replace(blocks=[])  # Tracers must not outlive the trace.
    changed = per_platform(
        leaves,
        roots,
        cpu=partial(_multiply, norms, _entry_on_cpu),
        gpu=partial(_multiply_on_gpu, norms),
        tpu=partial(_multiply, norms, _entry),
    )
    return treedef.unflatten(changed)


def _multiply(
    norms: Norms,
    entry: Callable[[jax.Array, int], jax.Array],
    leaves: list[jax.Array],
    roots: list[jax.Array],
) -> list[jax.Array]:
    roots = [_computed_once(root) for root in roots]
    changed = []
    for leaf, number in zip(leaves, norms.of_leaf):
        if number is not None:
            block, row = norms.places[number]
            root = roots[block] if row is None else entry(roots[block], row)
            leaf = stretch(leaf, root)
        changed.append(leaf)
    return changed


def _computed_once(root: jax.Array) -> jax.Array:
    """The same numbers, which XLA then does not compute again for every leaf."""
    ones = [axis for axis, size in enumerate(root.shape) if size == 1]
    # Without axes of size 1, which XLA on a TPU drops in two kernels of their own.
    barred = lax.optimization_barrier(lax.squeeze(root, ones))
    return lax.expand_dims(barred, ones)


def _multiply_on_gpu(
    norms: Norms, leaves: list[jax.Array], roots: list[jax.Array]
) -> list[jax.Array]:
    """Takes the root of all leaves out of a vector with one entry for each leaf, or out
    of one for `MERGED` leaves of their shape.

    XLA merges kernels of an optimizer that read the same vector.
    """
    lone = [root.ndim == 0 for root in roots]
    count = len(leaves)
    spread = [
        jnp.broadcast_to(x, (count,)) if x.ndim == 0 else x for x in roots
    ]
    spread = [_computed_once(root) for root in spread]
    places, of_leaf = list(norms.places), []
    for row, number in enumerate(norms.of_leaf):
        # A scalar root becomes a vector too, with a row for each leaf.
        if number is not None and lone[norms.places[number].block]:
            places.append(Place(norms.places[number].block, row))
            number = len(places) - 1
        of_leaf.append(number)
    norms = norms._replace(of_leaf=of_leaf, places=places)
    merged = _out_of_small_vectors(norms, leaves, spread)
    changed = []
    for place, (leaf, number) in enumerate(zip(leaves, of_leaf)):
        if place in merged:
            leaf = _times_twice(leaf, merged[place])
        elif number is not None:
            leaf = _times_twice(leaf, norms.pick(spread, number))
        changed.append(leaf)
    return changed


def _out_of_small_vectors(
    norms: Norms, leaves: list[jax.Array], roots: list[jax.Array]
) -> dict[int, jax.Array]:
    """The roots of leaves of one shape, by the places of the leaves. Those that fill no
    vector are not among them.
    """
    kinds: list[Any] = []
    rows: list[int | None] = []
    for place, (leaf, number) in enumerate(zip(leaves, norms.of_leaf)):
        block, row = (0, None) if number is None else norms.places[number]
        is_in_vector = row is not None and roots[block].ndim == 1
        kind = block, leaf.shape, leaf.dtype
        kinds.append(kind if is_in_vector else place)
        rows.append(row)
    found: dict[int, jax.Array] = {}
    for kind, same in alike(kinds).items():
        for begin in range(0, len(same) - MERGED + 1, MERGED):
            places = same[begin : begin + MERGED]
            own = roots[kind[0]][np.array([rows[place] for place in places])]
            # Entries alone would be a kernel each. No root is below 0.
            own = lax.optimization_barrier(jnp.maximum(own, -1))
            found.update(zip(places, jnp.unstack(own)))
    return found


def _entry(roots: jax.Array, row: int) -> jax.Array:
    """The entry of one norm in a block."""
    return roots[row]


def _entry_on_cpu(roots: jax.Array, row: int) -> jax.Array:
    """The entry of one norm in a block, by a reduction.

    XLA on a CPU fuses a slice into the kernels of the optimizer, which then no longer
    share their code: 148 tensors took 14 s to compile instead of 4.
    """
    # XLA makes three kernels of a reduction of more than 32 numbers.
    first = row // 32 * 32
    some = roots[first : first + 32]
    # Reading all of them for each leaf costs time where they are large: 32 leaves with
    # 4096 units.
    if some.size > ALL_READ:
        return roots[row]
    own = np.arange(len(some)) == row - first
    own = own.reshape(-1, *(1,) * (roots.ndim - 1))
    return jnp.sum(jnp.where(own, some, 0), 0)


# Jitted, so that it is traced once for all leaves of one shape.
@jax.jit
def stretch(x: jax.Array, root: jax.Array) -> jax.Array:
    """x * root * root, rounded once to the dtype of x, and x where the root is 1."""
    # Selected, since on a CPU and a TPU a product of 1 flushes subnormal numbers.
    return jnp.where(root == 1, x, _times_twice(x, root))


@jax.jit
def _times_twice(x: jax.Array, root: jax.Array) -> jax.Array:
    """x * root * root. A GPU keeps the bits of a finite x where the root is 1."""
    # bfloat16 * float32 is float32, and is rounded once at the end.
    wide = np.promote_types(x.dtype, root.dtype)
    # Spread once, as each product would do it.
    root = jnp.broadcast_to(root.astype(wide), x.shape)
    return cast_like(x.astype(wide) * root * root, x)


def cast_like(x: jax.Array, leaf: Any) -> jax.Array:
    """An array in the dtype of a leaf, weakly typed where the leaf is."""
    leaf = jnp.asarray(leaf)
    x = x.astype(leaf.dtype)
    if not leaf.weak_type:
        return x

    # The only public way to a weakly typed array is to fill one with a scalar.
    def fill(number: jax.Array) -> jax.Array:
        return lax.full_like(leaf, number, shape=())

    for _ in range(x.ndim):
        fill = jax.vmap(fill)
    return fill(x)


def zero_where_zero(tree: Any, norms: Norms, roots: list[jax.Array]) -> Any:
    """Zeros in leaves whose factor is 0, since 0 times inf is NaN."""
    leaves, treedef = jax.tree.flatten(tree)
    changed = []
    for leaf, number in zip(leaves, norms.of_leaf):
        if number is not None:
            factor = norms.pick(roots, number)
            leaf = jnp.where(factor == 0, jnp.zeros_like(leaf), leaf)
        changed.append(leaf)
    return treedef.unflatten(changed)
