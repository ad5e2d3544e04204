"""The entries of a vector as scalars.

CPU    by one reduction with many results
GPU    by maxima of two equal numbers, whose kernels XLA merges
TPU    by slices, each of which would be a kernel of its own on the other two
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ._platform import per_platform

# Entries that a GPU reads in one kernel. XLA compares each with all others.
MERGED = 32

# Whether the norms that a function returns become one vector again: of slices XLA makes
# the vector itself.
stacked_again = jax.make_user_context(False)


def entries_of(vector: jax.Array) -> Any:
    """The entries of a vector of norms, which a function returns."""
    # As results of a program, slices would be a kernel each.
    is_compiled = isinstance(vector, Tracer) and not stacked_again.value
    return unstacked(vector) if is_compiled else vector


@jax.custom_jvp
@jax.jit
def unstacked(vector: jax.Array) -> list[jax.Array]:
    """The entries of a float vector, as scalars."""
    # Without the barrier XLA computes all numbers again for each entry.
    vector = lax.optimization_barrier(vector)
    branches = {"cpu": _by_reduction, "gpu": _by_maxima, "tpu": _by_slices}
    return per_platform(vector, **branches)


@unstacked.defjvp
def _unstacked_jvp(primals: Any, tangents: Any) -> Any:
    # JAX has no derivative of a reduction with many results.
    return unstacked(*primals), list(jnp.unstack(*tangents))


def _by_reduction(vector: jax.Array) -> list[jax.Array]:
    zeros = lax.full_like(vector, 0)
    # `lax` and not `jnp`: a quarter of the time to trace some hundred entries.
    alone = [
        lax.select(row, vector, zeros)
        for row in np.eye(vector.size, dtype=bool)
    ]
    zero = vector.dtype.type(0)
    return list(lax.reduce(alone, [zero] * vector.size, _sums, (0,)))


def _sums(one: Any, other: Any) -> Any:
    return [a + b for a, b in zip(one, other)]


def _by_maxima(vector: jax.Array) -> list[jax.Array]:
    found: list[jax.Array] = []
    for begin in range(0, vector.size, MERGED):
        twice = lax.broadcast(vector[begin : begin + MERGED], (2,))
        one, other = map(jnp.unstack, lax.optimization_barrier(twice))
        found += map(lax.max, one, other)
    return found


def _by_slices(vector: jax.Array) -> list[jax.Array]:
    entries = lax.split(vector, [1] * vector.size)
    return [lax.reshape(entry, ()) for entry in entries]
