"""What rules and states share: counters, averages, the choice between an old and a new
memory, and arithmetic.

All arrays of a memory have the norm's shape, followed by axes of their own. Deviations
are kept and joined as roots of squares (`hypot`), which can neither become negative by
rounding nor leave the range of the norm's dtype.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._devices.mesh_types import resharded_as
from .._trees import PyTree


def count_up(counter: Array, happened: ArrayLike = True) -> Array:
    """The counter, one higher where `happened`. It stays at the largest int32."""
    counter = jnp.asarray(counter)
    has_room = counter < jnp.iinfo(counter.dtype).max
    is_counted = happened & has_room
    return counter + is_counted.astype(counter.dtype)


def has_reached(counter: Array, number: ArrayLike) -> Array:
    """Whether a counter is at least a number, which may be of any real dtype."""
    # Strict promotion has no common dtype of an integer and a float.
    with jax.numpy_dtype_promotion("standard"):
        return counter >= number


def moving_average(old: Array, new: Array, steps: Array, reach: int = 100) -> Array:
    """The moving average over about the last `reach` steps: `old` is the average before
    this step, and `new` the value of this step. `steps` counts this step too.

    In the first `reach` steps it is the mean of all, so it needs no correction for its
    start.
    """
    count = jnp.minimum(steps, reach).astype(old.dtype)
    change = new.astype(old.dtype) - old
    return old + change / count


def exponential_average(old: Array, new: Array, decay: Array) -> Array:
    """decay * old + (1 - decay) * new."""
    # The change is added to the value with the larger weight. So equal values give
    # exactly that value, which a sum of two products would round, and a value that is
    # tiny beside the other is not lost where it has all the weight.
    change = new - old
    from_new = new - decay * change
    from_old = old + (1 - decay) * change
    return jnp.where(decay < 0.5, from_new, from_old)


def root(x: Array) -> Array:
    """sqrt(x), with the derivative 0 at 0, where `jnp.sqrt` has an infinite one."""
    positive = jnp.where(x == 0, 1.0, x)
    return jnp.where(x == 0, 0.0, jnp.sqrt(positive))


def hypot(x: Array, y: Array) -> Array:
    """sqrt(x^2 + y^2), with the derivative 0 at 0, where JAX 0.12 has NaN."""
    is_zero = (x == 0) & (y == 0)
    safe_x = jnp.where(is_zero, 1.0, x)
    return jnp.where(is_zero, 0.0, jnp.hypot(safe_x, y))


def multiple(factor: Array, norm: Array) -> Array:
    """factor * norm, and inf where either is infinite, which means no limit."""
    # inf * 0 is NaN, and updates under a limit of NaN become NaN.
    is_infinite = jnp.maximum(factor, norm) == jnp.inf
    product = factor * norm
    return jnp.where(is_infinite, jnp.inf, product)


def remembered(remember: str, norm: Array, limit: Array) -> Array:
    """What a rule remembers of a norm: all of it ("raw"), or min(norm, limit)."""
    if remember == "raw":
        return norm
    return jnp.minimum(norm, limit)


def new_unless_zero(remember: str, value: Array, new: PyTree, old: PyTree) -> Any:
    """The new memory, or the old one where the remembered value is 0. It is 0 under a
    limit of 0. If it were remembered, limits that are multiples of remembered values
    could never leave 0.
    """
    # A raw value is the norm. `limit_and_memory_of` keeps the old memory if it is 0.
    if remember == "raw":
        return new
    return new_where(value != 0, new, old)


def in_buffer_of(new: Array, old: Array) -> Array:
    """Returns the new array, and reads the old one. Under jit with `donate_argnums`
    XLA may then write the new one into the memory of the old one.

    JAX drops an argument that nothing reads. The new array would then have another
    address in each step, and a CUDA graph, which holds addresses, would be built anew.
    """
    # In shard_map the types of both may differ in the first step.
    if jax.typeof(new) != jax.typeof(old):
        return new
    # It always selects `new`. XLA drops the selection.
    return jax.lax.select_n(np.True_, old, new)


@jax.jit
def new_where(is_new: Array, new: PyTree, old: PyTree) -> Any:
    """The new memory where `is_new`, elementwise by norm, and the old one elsewhere."""

    def choose(new: ArrayLike, old: Array) -> Array:
        new = jnp.asarray(new).astype(old.dtype)
        new = resharded_as(new, jax.typeof(old))
        # A scalar fits every array. On an Explicit mesh it goes with any sharding.
        if not is_new.ndim:
            return jnp.where(is_new, new, old)
        # A memory may have more axes than the norms: [N, window] for N norms.
        more_axes = (1,) * (new.ndim - is_new.ndim)
        condition = is_new.reshape(is_new.shape + more_axes)
        return jnp.where(condition, new, old)

    return jax.tree.map(choose, new, old)
