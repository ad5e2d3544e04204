"""Sums of squares on a CPU: in float64, or in float32 where that is as right.

    if leaves are large, float32, and of a shape that XLA sums accurately:
        totals = sums of squares in float32
        if no square can have left the range: return totals
    return sums of squares in float64

XLA's float32 sums on a CPU are trees, right to 3e-7, and take half the time of float64.
Leaves of one type share a branch, and small ones a sum: kernels are what takes XLA long
to compile.
"""

from collections.abc import Callable, Iterable
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._in_blocks import alike
from ._three_sums import Dims, sum_at_once
from ._types import is_known, is_on_one_device

# Elements of a leaf from which on float32 is tried first. Below there is little time to
# win and much to compile.
LARGE = 65_536
SMALL = 4096  # elements of a leaf that is summed with others
# Leaves in one sum or branch. XLA's time for a branch grows faster than its operands.
TOGETHER = 16

Leaves = list[jax.Array]


def sums_of_squares(leaves: Leaves, dims: Iterable[Dims]) -> Leaves:
    """The sum of squares of each real or complex leaf, float64."""
    parts: list[tuple[jax.Array, Dims]] = []
    of_leaf = []  # for each leaf the places of its parts
    for leaf, over in zip(leaves, dims):
        # |a + bi|^2 = a^2 + b^2, without the root of the modulus.
        own = [leaf]
        if jnp.iscomplexobj(leaf):
            own = [jnp.real(leaf), jnp.imag(leaf)]
        of_leaf.append(range(len(parts), len(parts) + len(own)))
        parts += [(part, over) for part in own]
    kinds = []
    for place, (part, over) in enumerate(parts):
        way = _way(part, over)
        # Norms that a mesh splits differently would be sent from device to device.
        kind = jax.typeof(part) if is_on_one_device(part) else place
        kinds.append((way, over, kind))
    sums: dict[int, jax.Array] = {}
    for (way, over, _), places in alike(kinds).items():
        for begin in range(0, len(places), TOGETHER):
            some = places[begin : begin + TOGETHER]
            sums.update(zip(some, way(over, [parts[i][0] for i in some])))
    return [reduce(add, [sums[i] for i in own]) for own in of_leaf]


def _way(leaf: jax.Array, dims: Dims) -> Callable[[Dims, Leaves], Leaves]:
    """How the leaf is summed, together with those of its type."""
    if not is_known(leaf):
        return _one_by_one
    if dims is None and leaf.size <= SMALL:
        return _at_once
    return _float32_first if _is_right_in_float32(leaf, dims) else _one_by_one


def _is_right_in_float32(leaf: jax.Array, dims: Dims) -> bool:
    """Whether XLA's float32 sum on a CPU is right to 3e-7 for this shape.

    Seen to be wrong: 1.2e-5 at rank 17 and, in JAX 0.10.2, 4e-6 over the rows of more
    than 32,768 columns.
    """
    if leaf.dtype != np.float32 or leaf.size < LARGE:
        return False
    over_rows = dims is not None and leaf.ndim - 1 not in dims
    return leaf.ndim <= 4 and not (over_rows and leaf.shape[-1] > 2**15)


def _one_by_one(dims: Dims, leaves: Leaves) -> Leaves:
    return [_in_float64(dims, leaf) for leaf in leaves]


# Jitted, so that it is traced once for all leaves of one shape.
@partial(jax.jit, static_argnums=0)
def _in_float64(dims: Dims, leaf: jax.Array) -> jax.Array:
    return jnp.sum(_squares(leaf), dims, keepdims=dims is not None)


def _squares(leaf: jax.Array) -> jax.Array:
    # Converted before it is squared. That is exact, and keeps it apart from the float32
    # copy that an optimizer makes of 16-bit gradients.
    return lax.square(lax.convert_element_type(leaf, np.float64))


@jax.jit
def _at_once(_: Dims, leaves: Leaves) -> Leaves:
    """The sums of small leaves of one type, over all of each."""
    return sum_at_once(
        [_squares(leaf) for leaf in leaves], range(leaves[0].ndim)
    )


@partial(jax.jit, static_argnums=0)
def _float32_first(dims: Dims, leaves: Leaves) -> Leaves:
    @jax.custom_batching.custom_vmap
    def of_one(leaves: Leaves) -> Leaves:
        # Without the barrier XLA makes one product of these squares and Adam's, and
        # keeps it: a copy of the gradients.
        barred = map(lax.optimization_barrier, leaves)
        keep = dims is not None
        totals = [jnp.sum(x * x, dims, keepdims=keep) for x in barred]
        # What squares that are too small for float32 can add up to.
        lost = leaves[0].size * 2.0**-126
        return lax.cond(
            _are_between(2.0**26 * lost, totals, jnp.inf),
            lambda leaves: [x.astype(np.float64) for x in totals],
            partial(_one_by_one, dims),
            leaves,
        )

    @of_one.def_vmap
    def of_many(_: int, batched: Any, leaves: Leaves) -> Any:
        axes = ([0 if own else None for own in batched[0]],)
        # vmap turns cond into select, which would compute both sums.
        sums = jax.vmap(partial(_one_by_one, dims), axes)
        # The rule is called later than the function.
        with jax.enable_x64(True):
            return sums(leaves), [True] * len(leaves)

    return of_one(leaves)


def _are_between(low: float, arrays: Leaves, high: float) -> jax.Array:
    """Whether all numbers are more than `low` and less than `high`."""
    least, most = reduce(jnp.minimum, arrays), reduce(jnp.maximum, arrays)
    large, small = least > low, most < high
    # jit joins a reduction with several operands by more collectives than one.
    if not is_on_one_device(least):
        return jnp.all(large & small)
    # Of a reduction with one operand XLA on a CPU makes four kernels.
    axes, true = tuple(range(least.ndim)), np.True_
    return jnp.logical_and(
        *lax.reduce((large, small), (true, true), _anded, axes)
    )


def _anded(one: Any, other: Any) -> tuple[jax.Array, ...]:
    return tuple(a & b for a, b in zip(one, other))
