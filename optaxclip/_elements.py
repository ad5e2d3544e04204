"""The share of all elements that were clipped, for clippers of single elements."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _mesh as mesh
from ._checks import BEGIN_ANEW
from ._exported import exported
from .rules._memory import moving_average


@exported
class ClippedElements(NamedTuple):
    """The share of all elements that were clipped, in [0, 1]."""

    last: jax.Array  # float32[]: in the last step
    mean: jax.Array  # float32[]: over all steps
    # float32[]: moving average of `last`, of about 100 steps
    recent: jax.Array


def no_elements_clipped() -> ClippedElements:
    """The shares before the first step."""

    # An array for each field, so that the state can be donated.
    def zero() -> jax.Array:
        return jnp.zeros((), jnp.float32)

    return ClippedElements(last=zero(), mean=zero(), recent=zero())


# Jitted, since without jit each leaf would take several calls.
@jax.jit
def count_clipped(
    old: ClippedElements | tuple[()],
    steps: jax.Array,
    pairs: list[tuple[Any, jax.Array]],
) -> ClippedElements:
    """The shares after `steps` steps. `pairs` are the leaves before and after the clip
    of the last step.
    """
    if not old:
        raise ValueError(f"count=True: state was made without a count. {BEGIN_ANEW}")
    # JAX tells the mesh axes where it tracks types. Without types, inside shard_map and
    # pmap, the shares are those of the leaves on one device.
    counts = []
    axes_of_counts = []
    size_of_all = 0.0
    for before, after in pairs:
        mesh_axes = tuple(sorted(mesh.varying(after)))
        size = math.prod(after.shape)
        # A size of `jax.export` may be a symbol. Floats, since int32 ends at 2^31.
        if isinstance(size, int):
            float_size = float(size)
        else:
            float_size = jnp.asarray(size).astype(jnp.float32)
        size_of_all += float_size * mesh.axes_size(mesh_axes)
        # float32 counts to 2^24, and uint32 to 2^32.
        is_large = isinstance(size, int) and size >= 2**32
        # NaN stays NaN.
        differs = (before != after) & (before == before)
        with jax.enable_x64(True):
            count = jnp.sum(differs, dtype=np.int64 if is_large else np.uint32)
            counts.append(lax.convert_element_type(count, np.float32))
        axes_of_counts.append(mesh_axes)
    counts = mesh.joined(lax.psum, counts, axes_of_counts)
    share = sum(counts, jnp.zeros((), jnp.float32)) / jnp.maximum(size_of_all, 1.0)
    mean = old.mean + (share - old.mean) / steps.astype(jnp.float32)
    return ClippedElements(share, mean, moving_average(old.recent, share, steps))
