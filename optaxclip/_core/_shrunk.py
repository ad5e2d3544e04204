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
    value = lax.stop_gradient(new)
    # Such as norm * (limit / norm), it may be NaN or inf at 0.
    value = jnp.where((norm == 0) & ~jnp.isfinite(value), long, value)
    # There, and where all becomes 0, its derivative may be NaN too, and is not asked.
    fixed = (norm == 0) | ((limit == 0) & (value == 0))
    moved = shrink(*(jnp.where(fixed, 1.0, x) for x in (long, finite)))
    return jnp.where(fixed, value, moved)
