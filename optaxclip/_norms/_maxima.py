"""The largest modulus of groups of leaves: their norms of order inf.

A NaN among the elements survives, which takes care: a maximum on a CPU, and one over
devices, drops it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._collectives import join_devices
from ._groups import (
    Blocks,
    Layout,
    gather,
    max_of_stack,
    maximum,
    names_of,
    sum_over,
    take_max,
)
from ._three_sums import Dims


def largest_moduli(
    dtype: Any, layout: Layout, groups: list[list[jax.Array]]
) -> Blocks:
    """max |x|. NaN is counted separately, since a maximum over devices drops it."""
    sizes, broken = [], []
    for group, part in zip(groups, layout):
        found = [_max_and_broken(part.dims, dtype, leaf) for leaf in group]
        sizes.append([most for most, _ in found])
        broken.append([nan for _, nan in found])
    # Both kinds travel as one vector: largest moduli, and 1 where there is a NaN.
    names = names_of(layout)
    blocks = gather(sizes, layout, dtype, maximum) + gather(
        broken, layout, dtype, maximum
    )
    blocks = join_devices(lax.pmax, blocks, names + names)
    half = len(blocks) // 2
    pairs = zip(blocks[:half], blocks[half:])
    return [jnp.where(broken > 0, jnp.nan, most) for most, broken in pairs]


def largest_moduli_by_bits(
    layout: Layout, groups: list[list[jax.Array]]
) -> Blocks:
    """max |x| of float32 numbers, from their bits as integers.

    Those of numbers at least 0 are in the same order, and those of NaN come last. So
    one maximum finds both, where XLA makes a kernel of each.
    """
    bits = []
    for group, part in zip(groups, layout):
        bits.append([_max_of_bits(part.dims, leaf) for leaf in group])
    blocks = take_max(bits, layout, np.int32, max_of_stack)
    return [lax.bitcast_convert_type(block, np.float32) for block in blocks]


@partial(jax.jit, static_argnums=0)
def _max_of_bits(dims: Dims, leaf: jax.Array) -> jax.Array:
    x = jnp.abs(leaf).astype(np.float32)
    # Without the sign, which NaN may have too.
    bits = lax.bitcast_convert_type(x, np.int32) & np.int32(0x7FFFFFFF)
    return jnp.max(bits, dims, keepdims=dims is not None)


@partial(jax.jit, static_argnums=(0, 1))
def _max_and_broken(dims: Dims, dtype: Any, leaf: jax.Array) -> Any:
    # XLA on a CPU fuses a maximum or a sum with what made its operand only if that
    # contains no comparison. So NaN is found by a sum of zeros: 0 / (1 + inf) is 0, and
    # 0 / (1 + NaN) is not. Some floats of 8 bits have no inf: their squares are wide.
    x = jnp.abs(leaf).astype(dtype)
    broken = jnp.isnan(sum_over(0 / (1 + x * x), dims))
    most = jnp.where(broken, 0, largest_modulus(leaf, dims, dtype))
    return most, broken.astype(dtype)


@partial(jax.jit, static_argnums=(1, 2))
def largest_modulus(leaf: jax.Array, dims: Dims, dtype: Any) -> jax.Array:
    """max |x|, from which XLA on a CPU drops a NaN."""
    if jnp.iscomplexobj(leaf):
        leaf = jnp.abs(leaf)
    # Some floats of 8 bits have no sign and no inf.
    x = leaf.astype(dtype)
    axes = tuple(range(x.ndim)) if dims is None else dims
    # max |x| = max(max x, -min x)
    most = lax.max(lax.reduce_max(x, axes), -lax.reduce_min(x, axes))
    return most if dims is None else lax.expand_dims(most, axes)
