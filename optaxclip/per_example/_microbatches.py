"""A batch, fed a few examples at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .weights import beside


def in_microbatches(
    step: Callable[..., Any], total: Any, batch: tuple[Any, ...], microbatch: int | None
) -> tuple[Any, Any]:
    """Feeds a batch to `step(total, here, *microbatch) -> (total, found)`: the last
    total, and what was found for each example. `here` is False for what only fills up
    the last one.
    """
    size = jax.tree.leaves(batch)[0].shape[0]
    width = min(microbatch or size, size)
    count = -(-size // width)

    def dealt(x: jax.Array) -> jax.Array:
        # To each microbatch every count-th example, and not neighbours: devices that
        # share a batch then have a part of every microbatch, and need not send any.
        filled = (
            x
            if width * count == size
            else jnp.concatenate([x, x[: width * count - size]])
        )
        return filled.reshape(width, count, *x.shape[1:])

    def collected(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, 0, 1).reshape(width * count, *x.shape[2:])[:size]

    hands = jax.tree.map(dealt, batch)

    def body(total: Any, turn: jax.Array) -> tuple[Any, Any]:
        here = jnp.arange(width) * count + turn < size
        return step(
            total,
            here,
            *jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(x, turn, 1, keepdims=False), hands
            ),
        )

    total, found = lax.scan(body, total, jnp.arange(count))
    return total, jax.tree.map(collected, found)


def stand_in(example: Any, counts: jax.Array) -> Any:
    """The microbatch, with the first example that counts in the place of those that do
    not: the factor 0 takes nothing from a healthy gradient, but makes NaN of a broken
    one.
    """
    first = jnp.argmax(counts)
    return jax.tree.map(
        lambda x: jnp.where(
            beside(counts, x), x, lax.dynamic_index_in_dim(x, first, 0)
        ),
        example,
    )
