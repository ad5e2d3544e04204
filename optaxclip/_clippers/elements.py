"""The share of all elements that were clipped, for clippers of single elements."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._arguments.checks import BEGIN_ANEW
from .._devices import mesh, mesh_types
from .._numbers import element_count
from ..rules._memory import moving_average

# float32[3]: which share of all elements was clipped, in [0, 1], in the last step, over
# all steps, and over about the last 100. () where nothing is counted.
Shares = Array | tuple[()]


def no_elements_clipped() -> Array:
    """The shares before the first step."""
    return jnp.zeros(3, jnp.float32)


# Jitted, since without jit each leaf would take several calls.
@partial(jax.jit, static_argnums=0)
def shares_after(
    call: str, shares: Shares, step: Array, before_and_after: list[tuple[Any, Array]]
) -> Array:
    """The shares after an update, from the shares before it.

    Args:
      call: the function that made the clipper, for the error.
      shares: those of the state.
      step: the number of this update, counted from 1.
      before_and_after: each leaf as it came, and as it was clipped.

    Raises:
      ValueError: the state was made without a count.
    """
    if isinstance(shares, tuple):
        raise ValueError(
            f"{call}: count=True needs a state that counts, and this one was made "
            f"without. {BEGIN_ANEW}"
        )
    # Counts are summed over the mesh axes that the types of arrays show. Where JAX
    # tracks no types (pmap, shard_map(check_vma=False)), each device has the shares of
    # its own part.
    clipped_counts = []
    axes_of_counts = []
    total_size = 0.0  # of all leaves, on all devices
    for before, after in before_and_after:
        mesh_axes = tuple(sorted(mesh_types.varying(after)))
        local_size = element_count(after.shape, np.float32)
        total_size += local_size * mesh.device_count(mesh_axes)
        clipped_counts.append(_clipped_count(before, after))
        axes_of_counts.append(mesh_axes)
    total_counts = mesh.joined_over_devices(lax.psum, clipped_counts, axes_of_counts)
    total_count = sum(total_counts, jnp.zeros((), jnp.float32))
    # A tree without elements has the share 0.
    share = total_count / jnp.maximum(total_size, 1.0)
    _, old_mean, old_recent = shares
    mean = old_mean + (share - old_mean) / step.astype(jnp.float32)
    recent = moving_average(old_recent, share, step)
    return jnp.stack([share, mean, recent])


def _clipped_count(before: Any, after: Array) -> Array:
    """How many elements the clip changed, float32[]. NaN does not count."""
    # NaN differs from every number, also from itself.
    is_clipped = (before != after) & (before == before)
    # float32 counts to 2^24, and uint32 to 2^32. In jax.export a size may be a symbol,
    # whose number is not known yet.
    size = math.prod(after.shape)
    is_small = isinstance(size, int) and size < 2**32
    with jax.enable_x64(True):
        count = jnp.sum(is_clipped, dtype=np.uint32 if is_small else np.int64)
        return lax.convert_element_type(count, np.float32)
