"""What rules share: counters, memories that are kept, and arithmetic.

All arrays of a memory have the norm's shape, followed by axes of their own. Deviations
are kept and joined as roots of squares (`hypot`), which can neither become negative by
rounding nor leave the range of the norm's dtype.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._mesh import split_as


def count_up(counter: jax.Array, happened: Any = True) -> jax.Array:
    """The counter after a step. It stays at the largest int32."""
    counter = jnp.asarray(counter)
    more = counter < jnp.iinfo(counter.dtype).max
    return counter + (happened & more).astype(counter.dtype)


def moving_average(
    old: jax.Array, new: jax.Array, steps: jax.Array, reach: int = 100
) -> jax.Array:
    """The moving average of a number, which is `new` in the last of `steps` steps.

    It is the mean of all steps while these are at most `reach`, so it needs no
    correction for its start.
    """
    count = jnp.minimum(steps, reach).astype(jnp.float32)
    return old + (new.astype(jnp.float32) - old) / count


def between(old: jax.Array, new: jax.Array, keep: jax.Array) -> jax.Array:
    """keep * old + (1 - keep) * new."""
    # As a difference from the nearer of both, and not as a sum of products: exact while
    # the norm does not change, and right where one of both is nothing beside the other.
    change = new - old
    return jnp.where(keep < 0.5, new - keep * change, old + (1 - keep) * change)


def root(x: jax.Array) -> jax.Array:
    """sqrt(x), with the derivative 0 at 0, where that of `jnp.sqrt` is infinite."""
    positive = jnp.where(x == 0, 1.0, x)
    return jnp.where(x == 0, 0.0, jnp.sqrt(positive))


def hypot(x: jax.Array, y: jax.Array) -> jax.Array:
    """sqrt(x^2 + y^2), with the derivative 0 at 0, where JAX 0.12 has NaN."""
    zero = (x == 0) & (y == 0)
    return jnp.where(zero, 0.0, jnp.hypot(jnp.where(zero, 1.0, x), y))


def multiple(factor: jax.Array, norm: jax.Array) -> jax.Array:
    """factor * norm, and inf where either is infinite, which means no limit."""
    # inf * 0 is NaN, and updates under a limit of NaN become NaN.
    is_free = jnp.maximum(factor, norm) == jnp.inf
    return jnp.where(is_free, jnp.inf, factor * norm)


def remembered(remember: str, norm: jax.Array, limit: jax.Array) -> jax.Array:
    """The norm as it came ("raw"), or as it was let through ("clipped")."""
    return jnp.minimum(norm, limit) if remember == "clipped" else norm


def unless_gone(remember: str, value: jax.Array, new: Any, old: Any) -> Any:
    """The new memory, or the old one where a limit of 0 let nothing through: a norm of
    0 is not remembered, since limits could never leave it.
    """
    # No rule is asked about a norm of 0, so norms as they came are not 0.
    return keep_where(value != 0, new, old) if remember == "clipped" else new


def in_place(new: jax.Array, old: jax.Array) -> jax.Array:
    """The new array, which jit may write where the old one is (`donate_argnums`).

    JAX drops an argument that nothing reads, so here the old one is read. The new one
    would be elsewhere in each step, and a CUDA graph, which holds addresses, made anew.
    """
    # XLA drops the choice. In shard_map types may differ in the first step.
    same = jax.typeof(new) == jax.typeof(old)
    return jax.lax.select_n(np.True_, old, new) if same else new


@jax.jit
def keep_where(wanted: jax.Array, new: Any, old: Any) -> Any:
    """The new memory where it is wanted, elementwise by norm, and the old elsewhere."""

    def choose(new: Any, old: jax.Array) -> jax.Array:
        new = split_as(jnp.asarray(new).astype(old.dtype), jax.typeof(old))
        # A memory has further dimensions, such as [N, window] for N norms.
        # A scalar stays one: on an explicit mesh it goes with any sharding.
        further = new.ndim - wanted.ndim if wanted.ndim else 0
        mask = wanted.reshape(wanted.shape + (1,) * further)
        return jnp.where(mask, new, old)

    return jax.tree.map(choose, new, old)
