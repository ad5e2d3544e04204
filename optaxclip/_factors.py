"""From a norm to a new one: the factors, and the multiplication of the updates.

    root     sqrt(new_norm / norm), a hair less      one number for each norm
    update   x * root * root

The quotient of the norms may leave the range of the dtype, and its root does not. So
updates are multiplied twice, always, which takes no decision for each leaf.
"""

from collections.abc import Callable
from functools import partial
from operator import getitem
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._checks import NUMBERS, broadcasts_to, check_shape, shown
from ._mesh import entries_of
from ._norms import norms_of_tree
from ._plan import Norms, entry_of_leaf
from ._sums import as_float, per_platform
from ._trees import clipped_leaves, put_back
from .shrinks import Shrink, hard


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
    roots = []
    for norm, new in zip(before.values, jax.tree.leaves(new_norms)):
        check_shape(new.shape, norm.shape, "rescale: new_norms")
        roots.append(factor_between(norm, jnp.broadcast_to(new, norm.shape)).root)
    return put_back(multiply(tree, before, roots), updates)


def shrunk_by(shrink: Shrink, norm: jax.Array, limit: jax.Array, call: str) -> Any:
    """What norms become under their limits.

    Raises:
      TypeError: a shrink that returns no number for each norm.
    """
    if shrink is hard:
        return jnp.minimum(norm, limit)
    # Zeros stay zeros, and a limit of inf clips nothing. A shrink, and its derivative,
    # may be NaN there, such as norm * (limit / norm), so it is asked about 1.
    fixed = (norm == 0) | (limit == jnp.inf)
    new = shrink(*(jnp.where(fixed, 1.0, x) for x in (norm, limit)))
    if not isinstance(new, NUMBERS) or not broadcasts_to(jnp.shape(new), norm.shape):
        raise TypeError(
            f"{call}: shrink must return the new norm of each norm, in the shape "
            f"{norm.shape}, got {shown(new)}."
        )
    return jnp.where(fixed, norm, new)


class Factor(NamedTuple):
    """What updates are multiplied by, to bring a norm to a new one."""

    root: jax.Array  # its square ends 4 eps below the quotient of the norms
    reported: jax.Array  # for states: within the normal numbers of its dtype


# Jitted, so that it is one call without jit. Inlined, so that no program has a call.
@partial(jax.jit, inline=True)
def factor_between(norm: jax.Array, new_norm: jax.Array) -> Factor:
    """The factor from a norm to a new one.

    Both its numbers are exactly 1 where the norms are equal, 0 only where the new norm
    is 0, and NaN for a broken norm. The 4 eps cover the rounding of limit, norm, roots
    and products, so that the result never exceeds the limit.
    """
    same, gone = new_norm == norm, new_norm == 0
    info = jnp.finfo(norm.dtype)
    # What is not taken must be finite, with a finite derivative.
    fixed = same | gone
    long = jnp.where(fixed | (norm == 0), 1.0, norm)
    short = jnp.where(fixed, 1.0, new_norm)
    # Beyond the range it would round to 0, which means that updates were made 0.
    quotient = jnp.clip(short / long, info.tiny, info.max)
    # Division comes last. XLA on a CPU computes what comes after one again for every
    # element of the updates, also behind a barrier.
    below = jnp.where(fixed, 1.0, jnp.sqrt(long))
    above = jnp.sqrt(short) * (1 - 2 * info.eps)
    above, factor = (
        jnp.where(same, 1.0, jnp.where(gone, 0.0, x)) for x in (above, quotient)
    )
    return Factor(above / below, factor)


def roots_of_numbers(
    roots: jax.Array,
    norms: list[jax.Array],
    limits: list[jax.Array],
    decide: Callable[..., Any],
) -> list[jax.Array]:
    """The roots of some norms one by one, from a vector of them.

    On a TPU each is decided from its own norm, so that no leaf waits until all are
    measured: it is still on the chip when it is multiplied. A scanned decoder of width
    1024 then moves 5.28 GB on a v5e, instead of 5.61.
    """

    def entries(roots: Any, norms: Any, _: Any, entry: Any = getitem) -> Any:
        # Without the barrier XLA computes the vector again for each leaf.
        kinds = list(map(jax.typeof, norms))
        return entries_of(lax.optimization_barrier(roots), kinds, entry)

    return per_platform(
        *(roots, norms, limits),
        cpu=partial(entries, entry=_entry_by_reduction),
        gpu=entries,
        # Jitted, so that it is traced once.
        plain=lambda _, *numbers: [x.root for x in map(jax.jit(decide), *numbers)],
    )


def _entry_by_reduction(roots: jax.Array, row: int) -> jax.Array:
    """XLA on a CPU fuses a slice into the kernels of the optimizer, which then no
    longer share their code: 148 tensors took 14 s to compile instead of 4.
    """
    # XLA makes three kernels of a reduction of more than 32 numbers.
    first = row // 32 * 32
    some = roots[first : first + 32]
    own = np.arange(some.size) == row - first
    return jnp.sum(jnp.where(own, some, 0))


def multiply(tree: Any, norms: Norms, roots: list[Any], *, zero: bool = False) -> Any:
    """Multiplies each clipped leaf twice by the root of its norm.

    `zero`: where the root is 0 leaves become zeros, since 0 times inf is NaN.
    """
    leaves, treedef = jax.tree.flatten(tree)
    own = [None if x.norm is None else entry_of_leaf(x, roots) for x in norms.leaves]
    for place, root in enumerate(own):
        if root is not None:
            x = stretch(leaves[place], root)
            leaves[place] = jnp.where(root == 0, jnp.zeros_like(x), x) if zero else x
    return treedef.unflatten(leaves)


# Jitted, so that it is traced once for all leaves of one shape.
@jax.jit
def stretch(x: jax.Array, root: jax.Array) -> jax.Array:
    """x * root * root, rounded once to the dtype of x, and x where the root is 1."""
    # bfloat16 * float32 is float32, and is rounded once at the end.
    wide = np.promote_types(x.dtype, root.dtype)
    # Spread once, as each product would do it.
    spread, long = jnp.broadcast_to(root.astype(wide), x.shape), x.astype(wide)
    product = (long * spread * spread).astype(x.dtype)
    # Selected, since on a CPU and a TPU a product of 1 flushes subnormal numbers. By
    # `long * 0` each element is asked: for one question about the root alone, LLVM
    # compiles the optimizer's loops twice.
    return jnp.where(long * 0 == spread - 1, x, product)
