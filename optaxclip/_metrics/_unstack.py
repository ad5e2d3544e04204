"""The entries of a vector as scalars.

XLA on a CPU compiles each slice as a program of its own, and one reduction with many
results as one.
"""

from typing import Any

import jax
import numpy as np
from jax import lax

from .._norms._platform import per_platform


def unstacked(vector: jax.Array) -> list[jax.Array]:
    """The entries of a float32 vector, as scalars."""
    # Without the barrier XLA computes all numbers again for each entry.
    vector = lax.optimization_barrier(vector)
    branches = {"cpu": _by_reduction, "gpu": _by_slices, "tpu": _by_slices}
    return per_platform(vector, **branches)


def _by_reduction(vector: jax.Array) -> list[jax.Array]:
    zeros = lax.full_like(vector, 0)
    # `lax` and not `jnp`: a quarter of the time to trace some hundred entries.
    alone = [
        lax.select(row, vector, zeros)
        for row in np.eye(vector.size, dtype=bool)
    ]
    return list(lax.reduce(alone, [np.float32(0)] * vector.size, _sums, (0,)))


def _sums(one: Any, other: Any) -> Any:
    return [a + b for a, b in zip(one, other)]


def _by_slices(vector: jax.Array) -> list[jax.Array]:
    entries = lax.split(vector, [1] * vector.size)
    return [lax.reshape(entry, ()) for entry in entries]
