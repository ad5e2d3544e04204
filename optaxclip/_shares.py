"""Which share of all elements was clipped, where a clipper counts it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._exported import exported
from ._mesh import axes_size, joined, varying
from ._state import moving_average


@exported
class ClippedElements(NamedTuple):
    """Which share of all elements was clipped, in [0, 1]."""

    last: jax.Array  # float32[]: in the last step
    mean: jax.Array  # float32[]: over all steps
    # float32[]: moving average of `last`, of about 100 steps
    recent: jax.Array


def no_elements_clipped() -> ClippedElements:
    """The shares before the first step."""
    # Each number is its own array, so that the state can be donated.
    return ClippedElements(*(jnp.zeros((), jnp.float32) for _ in range(3)))


# Jitted, since without jit each leaf would take several calls.
@jax.jit
def count_clipped(
    old: ClippedElements, step: jax.Array, pairs: list[tuple[Any, jax.Array]]
) -> ClippedElements:
    """The shares after a step, from each leaf (before, after) that step."""
    share = _share_clipped(pairs)
    mean = old.mean + (share - old.mean) / (step.astype(jnp.float32) + 1)
    return ClippedElements(
        share, mean, moving_average(old.recent, share, step)
    )


def _share_clipped(pairs: list[tuple[Any, jax.Array]]) -> jax.Array:
    # Mesh axes are known where JAX tracks types. Elsewhere inside shard_map and pmap
    # the share is that of the leaves on one device.
    counts, names, size = [], [], 0.0
    for before, after in pairs:
        over = tuple(sorted(varying(after)))
        counts.append(_count_different(before, after))
        names.append(over)
        # Floats, since int32 ends at 2^31. A size of jax.export may be a symbol.
        size += _float(math.prod(after.shape)) * axes_size(over)
    total = sum(joined(lax.psum, counts, names), jnp.zeros((), jnp.float32))
    return total / jnp.maximum(size, 1.0)


def _float(size: Any) -> Any:
    if isinstance(size, int):
        return float(size)
    return jnp.asarray(size).astype(jnp.float32)


def _count_different(before: Any, after: jax.Array) -> jax.Array:
    is_number = before == before  # NaN stays NaN
    differs = (before != after) & is_number
    size = math.prod(after.shape)
    # As integers, because float32 cannot count beyond 2^24, as far as these reach.
    is_small = not isinstance(size, int) or size < 2**32
    kind = jnp.uint32 if is_small else jnp.float32
    return jnp.sum(differs, dtype=kind).astype(jnp.float32)
