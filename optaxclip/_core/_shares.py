"""Shares of steps, and shares of elements, that were clipped."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._exported import exported
from .._norms._collectives import axes_size, join_devices
from .._norms._platform import per_platform
from .._norms._types import varying

RECENT = 100  # how many steps a moving average reaches back, about


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


def moving_average(
    old: jax.Array, new: jax.Array, step: jax.Array, reach: int = RECENT
) -> jax.Array:
    """The moving average of a number after step number `step`, counted from 0.

    It is the mean of all steps while these are at most `reach`, so it needs no
    correction for its start.
    """
    count = jnp.minimum(step, reach - 1).astype(jnp.float32) + 1
    return old + (new.astype(jnp.float32) - old) / count


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


def _share_clipped(pairs: Iterable[tuple[Any, jax.Array]]) -> jax.Array:
    # Mesh axes are known where JAX tracks types. Elsewhere inside shard_map and pmap
    # the share is that of the leaves on one device.
    counts, names, size = [], [], 0
    for before, after in pairs:
        over = tuple(sorted(varying(after)))
        counts.append(_count_different(before, after))
        names.append(over)
        size += after.size * axes_size(over)
    joined = join_devices(lax.psum, counts, names)
    return sum(joined, jnp.zeros((), jnp.float32)) / max(size, 1)


def _count_different(before: Any, after: jax.Array) -> jax.Array:
    is_number = before == before  # NaN stays NaN
    differs = (before != after) & is_number
    # For a sum of integers a TPU v5e would read the gradients once more. A sum of
    # floats it joins with what else reads them. A CPU is slow at sums of floats.
    return per_platform(differs, cpu=_count, gpu=_count, tpu=_count_in_floats)


def _count(whole: jax.Array) -> jax.Array:
    # As integers, because float32 cannot count beyond 2^24.
    return jnp.sum(whole.astype(jnp.uint32), dtype=jnp.uint32).astype(
        jnp.float32
    )


def _count_in_floats(flags: jax.Array) -> jax.Array:
    """Counts in float32 as long as that is exact, and the rest in integers."""
    axes, size = [], 1
    for axis in reversed(range(flags.ndim)):
        size *= flags.shape[axis]
        # A size of jax.export may be a symbol, which is not compared.
        if isinstance(size, int) and size <= 2**24:
            axes.append(axis)
    counts = jnp.sum(flags.astype(jnp.float32), axis=tuple(axes))
    # A TPU runs each operation on a single number by itself.
    return _count(counts) if counts.ndim else counts
