"""From a norm to a new one: the factors, and the multiplication of the updates.

    root     sqrt(new_norm / norm), rounded down     one number for each norm
    update   x * root * root

The quotient of the norms may leave the range of the dtype, but its root does not. So
every update is multiplied twice by the root. To choose for each leaf between one
product and two would cost more than the second product.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ._arguments.checks import (
    NUMBER_TYPES,
    broadcasts_to,
    check_real,
    check_shape,
    shown,
)
from ._devices.mesh_types import entries_of
from ._devices.platforms import FEW_NORMS_ON_A_TPU, per_platform, traced_once
from ._norms.norms import Norms, given_norms
from ._numbers import as_float
from ._trees import PyTree, leaves_to_clip, put_back
from .shrinks import Shrink, hard

# XLA on a CPU splits a reduction of more numbers than this into three kernels.
MOST_IN_A_KERNEL = 32


class Factor(NamedTuple):
    """What updates are multiplied by, to bring a norm to a new one."""

    root: Array  # its square is the quotient of the norms, less 4 eps
    reported: Array  # for states: within the normal numbers of its dtype


@traced_once
def factor_between(norm: Array, new_norm: Array) -> Factor:
    """The factor from a norm to a new one.

    Both numbers are exactly 1 where the norms are equal, and exactly 0 where the new
    norm is 0. In all other cases a NaN in either norm makes both NaN. From inf to a
    finite norm the root is 0, and `reported` the smallest normal number. The 4 eps
    cover the rounding of limit, norm, roots and products, so that the result never
    exceeds the limit.
    """
    stays_same = new_norm == norm
    becomes_zero = new_norm == 0
    info = jnp.finfo(norm.dtype)
    # The derivative of jnp.where is NaN where that of the branch not taken is, so
    # unused quotients are 1 / 1. A norm of 0 becomes 1 as well: its updates are 0
    # whatever the factor.
    is_exact = stays_same | becomes_zero
    norm = jnp.where(is_exact | (norm == 0), 1.0, norm)
    new_norm = jnp.where(is_exact, 1.0, new_norm)
    # Not rounded to 0, because a reported 0 says that updates became 0.
    quotient = jnp.clip(new_norm / norm, info.tiny, info.max)
    # Where the root must be exact it is divided by 1: on a device sqrt(1) may be off.
    denominator = jnp.where(is_exact, 1.0, jnp.sqrt(norm))
    numerator = jnp.sqrt(new_norm) * (1 - 2 * info.eps)

    def with_exact_values(x: Array) -> Array:
        x = jnp.where(becomes_zero, 0.0, x)
        return jnp.where(stays_same, 1.0, x)

    # The division comes last. XLA on a CPU repeats all operations after a division for
    # every element of the updates, even behind a barrier.
    root = with_exact_values(numerator) / denominator
    return Factor(root, reported=with_exact_values(quotient))


def times_squares(
    tree: PyTree, norms: Norms, roots: list[Any], *, zero_at_zero: bool = False
) -> Any:
    """Multiplies each clipped leaf twice by its root. `roots` has one for each norm.

    `zero_at_zero`: elements that are inf or NaN become 0 as well where the root is 0.
    Otherwise they become NaN.
    """
    arrays, treedef = jax.tree.flatten(tree)
    for index, spec in enumerate(norms.specs):
        if spec.norm_index is not None:
            root = spec.local_value(roots)
            product = times_square(arrays[index], root)
            if zero_at_zero:
                product = jnp.where(root == 0, jnp.zeros_like(product), product)
            arrays[index] = product
    return treedef.unflatten(arrays)


# Jitted, so that it is traced once for all leaves of one shape. In `lax`, because most
# functions of `jnp` are jitted, and JAX would trace each for every shape.
@jax.jit
def times_square(x: Array, root: Array) -> Array:
    """x * root * root, rounded once to the dtype of x, and x where the root is 1."""
    if jnp.iscomplexobj(x):
        # Real and imaginary parts by themselves: (inf + 0i) * (1 + 0i) is inf + NaN i.
        real = times_square(jnp.real(x), root)
        return lax.complex(real, times_square(jnp.imag(x), root))
    # Products of bfloat16 and float32 are float32, and are rounded once at the end.
    dtype = np.promote_types(x.dtype, root.dtype)
    # Broadcast once, instead of in each product.
    roots = jnp.broadcast_to(root.astype(dtype), x.shape)
    wide_x = x.astype(dtype)
    wide_product = lax.mul(lax.mul(wide_x, roots), roots)
    product = wide_product.astype(x.dtype)
    # Where the root is 1, x is selected: on a CPU and a TPU a product with 1 flushes
    # subnormal numbers. With the scalar condition root == 1 LLVM would duplicate the
    # optimizer's loops, so the condition is elementwise: x * 0 == root - 1. It is False
    # where x is inf or NaN, but there the product with 1 is x as well.
    zeros = lax.mul(wide_x, jnp.zeros_like(wide_x))
    is_unchanged = lax.eq(zeros, lax.sub(roots, jnp.ones_like(roots)))
    return lax.select(is_unchanged, x, product)


def shrunk_by(shrink: Shrink, norm: Array, limit: Array, call: str) -> Any:
    """What norms become under their limits.

    Raises:
      TypeError: a shrink that returns no number for each norm.
    """
    if shrink is hard:
        return jnp.minimum(norm, limit)
    # Zeros stay zeros, and a limit of inf clips nothing. There a shrink such as
    # norm * (limit / norm), or its derivative, may be NaN. So it gets 1 for both.
    stays = (norm == 0) | (limit == jnp.inf)
    safe_norm = jnp.where(stays, 1.0, norm)
    safe_limit = jnp.where(stays, 1.0, limit)
    new_norm = shrink(safe_norm, safe_limit)
    is_number = isinstance(new_norm, NUMBER_TYPES)
    if not is_number or not broadcasts_to(jnp.shape(new_norm), norm.shape):
        raise TypeError(
            f"{call}: shrink must return the new norm of each norm, in the shape "
            f"{norm.shape}, got {shown(new_norm)}."
        )
    return jnp.where(stays, norm, new_norm)


def roots_of_norms(
    roots: Array,
    norms: list[Array],
    limits: list[Array],
    root_of: Callable[[Array, Array], Array],
) -> list[Array]:
    """The root of the factor of each norm, out of the vector of all roots.

        GPU            slices of the vector
        CPU            sums of the vector, see `_numbers_by_sums`
        TPU            slices, and for at most 64 norms computed again by `root_of`

    Computed again, no root waits until all leaves are measured, so each leaf is still
    on the chip when it is multiplied. A scanned decoder of width 1024 then moves
    5.28 GB on a v5e, instead of 5.61.

    Args:
      roots: the vector.
      norms, limits: from which the roots were computed, in the same order.
      root_of: returns the root for a norm and its limit.
    """
    norm_types = [jax.typeof(norm) for norm in norms]

    def slices(roots: Array) -> list[Array]:
        # Without the barrier XLA computes the vector again for each leaf.
        return entries_of(lax.optimization_barrier(roots), norm_types)

    def sums(roots: Array) -> list[Array]:
        roots = lax.optimization_barrier(roots)
        numbers = []
        for start in range(0, roots.size, MOST_IN_A_KERNEL):
            numbers += _numbers_by_sums(roots[start : start + MOST_IN_A_KERNEL])
        return entries_of(roots, norm_types, numbers)

    def computed_again(roots: Array) -> list[Array]:
        # Jitted, so that it is traced once.
        return list(map(jax.jit(root_of), norms, limits))

    are_few = len(norms) <= FEW_NORMS_ON_A_TPU
    tpu = computed_again if are_few else slices
    return per_platform(roots, cpu=sums, gpu=slices, plain=tpu)


@jax.jit
def _numbers_by_sums(vector: Array) -> list[Array]:
    """The numbers of a vector. Each is the sum of a copy in which all others are 0.

    XLA on a CPU would fuse a slice into the kernels of the optimizer, which would then
    no longer share their code: 148 tensors took 14 s to compile instead of 4.
    """
    zeros = jnp.zeros_like(vector)
    numbers = []
    for one_hot in np.eye(vector.size, dtype=bool):
        terms = lax.select(one_hot, vector, zeros)
        numbers.append(lax.reduce_sum(terms, [0]))
    return numbers


def rescale(updates: PyTree, norms: PyTree, new_norms: PyTree) -> Any:
    """Scales every part of `updates` from its norm to a new one.

    Args:
      updates: a pytree of arrays.
      norms: a tree prefix of `updates`: their norms. A part whose norm is None stays as
        it is.
      new_norms: what the norms become, in the same structure.

    Returns:
      The updates in their own dtypes, multiplied in the wider of their dtype and the
      norm's. Where both norms are equal, bit for bit the input. Where the new one is
      NaN, all NaN. From a norm of inf to a finite one, zeros, with NaN for elements
      that are inf or NaN. The result is never longer than the new norm but for the
      rounding to the leaf's dtype.

    Raises:
      ValueError: norms that are not a tree prefix of the updates or do not broadcast to
        their leaves, or new norms that have another structure or do not broadcast to
        the norms.
      TypeError: a norm that is not a real number, such as a function.

    Example:
      >>> print(optaxclip.rescale(jnp.array([3.0, 4.0]), 5.0, 1.0))
      [0.6 0.8]
    """
    # Integers and empty leaves are not measured, and come back as they were.
    tree = leaves_to_clip(updates, "rescale")
    for name, numbers in (("norms", norms), ("new_norms", new_norms)):
        for number in jax.tree.leaves(numbers):
            check_real(f"rescale: {name}", number)
    norms, new_norms = jax.tree.map(as_float, (norms, new_norms))
    norms_before = given_norms(norms, tree, "rescale: norms")
    structure = jax.tree.structure(norms)
    new_structure = jax.tree.structure(new_norms)
    if structure != new_structure:
        raise ValueError(
            f"rescale: new_norms must have the structure of norms, {structure}, got "
            f"{new_structure}."
        )
    roots = []
    for norm, new_norm in zip(norms_before.values, jax.tree.leaves(new_norms)):
        check_shape("rescale: new_norms", new_norm.shape, norm.shape)
        new_norm = jnp.broadcast_to(new_norm, norm.shape)
        roots.append(factor_between(norm, new_norm).root)
    return put_back(times_squares(tree, norms_before, roots), updates)
