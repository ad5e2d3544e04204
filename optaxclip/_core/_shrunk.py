"""The last step of an update: from norms and limits to new norms."""

import jax
import jax.numpy as jnp
from jax import lax

from .._arguments import check_shrunk
from ..shrinks import Shrink, is_ours


def shrunk_by(
    shrink: Shrink,
    norm: jax.Array,
    long: jax.Array,
    limit: jax.Array,
    call: str,
) -> jax.Array:
    """What norms become under their limits, where those are finite.

    `long` is the norm with the eps of a clipper.

    Raises:
      TypeError: a shrink that returns no number for each norm.
    """
    # A limit of inf clips nothing, and the derivative of a shrink there may be NaN.
    finite = jnp.where(limit == jnp.inf, 1.0, limit)
    new = shrink(long, finite)
    if is_ours(shrink):
        return new
    # One of the user's.
    check_shrunk(call, new, norm)
    # At 0, and where all becomes 0, its derivative may be NaN, and is not asked for.
    fixed = (norm == 0) | ((limit == 0) & (new == 0))
    moved = shrink(*(jnp.where(fixed, 1.0, x) for x in (long, finite)))
    # At 0 it may be NaN or inf itself, such as norm * (limit / norm).
    value = lax.stop_gradient(jnp.where(jnp.isfinite(new), new, long))
    return jnp.where(fixed, value, moved)
