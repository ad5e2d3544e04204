"""Which share of all elements was clipped, by clips of values that count them."""

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
    old: ClippedElements, steps: jax.Array, pairs: list[tuple[Any, jax.Array]]
) -> ClippedElements:
    """The shares after `steps` steps, from each leaf before and after the last one."""
    if not old:
        raise ValueError(f"count=True: state was made without a count. {BEGIN_ANEW}")
    # Mesh axes are known where JAX tracks types. Elsewhere inside shard_map and pmap
    # the share is that of the leaves on one device.
    counts, names, total = [], [], 0.0
    for before, after in pairs:
        over = tuple(sorted(mesh.varying(after)))
        names.append(over)
        size = math.prod(after.shape)
        is_known = isinstance(size, int)
        # float32 counts to 2^24, and uint32 to 2^32.
        kind = np.int64 if is_known and size >= 2**32 else np.uint32
        # NaN stays NaN.
        differs = (before != after) & (before == before)
        with jax.enable_x64(True):
            count = jnp.sum(differs, dtype=kind)
            counts.append(lax.convert_element_type(count, np.float32))
        # Floats, since int32 ends at 2^31. A size of jax.export may be a symbol.
        whole = float(size) if is_known else jnp.asarray(size).astype(jnp.float32)
        total += whole * mesh.axes_size(over)
    clipped = sum(mesh.joined(lax.psum, counts, names), jnp.zeros((), jnp.float32))
    share = clipped / jnp.maximum(total, 1.0)
    mean = old.mean + (share - old.mean) / steps.astype(jnp.float32)
    return ClippedElements(share, mean, moving_average(old.recent, share, steps))
