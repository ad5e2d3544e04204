"""A batch, processed a few examples at a time."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._weights import along_batch


def in_microbatches(
    step: Callable[..., Any],
    total: Any,
    batch: tuple[Any, ...],
    microbatch: int | None,
) -> tuple[Any, Any]:
    """Runs `step(total, is_real, *examples) -> (total, found)` on each microbatch, of
    at most `microbatch` examples.

    `is_real` is False for examples that only fill up the last microbatch.

    Returns:
      The last total, and what was found for each example.

    Raises:
      ValueError: fewer examples at once than devices that share the batch.
    """
    leaves = jax.tree.leaves(batch)
    size = leaves[0].shape[0]
    shards = max(map(_shards, leaves))
    if microbatch is not None and microbatch < shards:
        raise ValueError(
            f"clipped_grad: microbatch must be at least {shards} on a mesh with "
            f"Explicit axes, where {shards} devices share the batch, got {microbatch}."
        )
    # On such a mesh each device has as many examples of a microbatch.
    width = shards * evened(size // shards, (microbatch or size) // shards)
    count = -(-size // width)
    if count == 1:
        return step(total, jnp.ones(size, bool), *batch)
    split = jax.tree.map(lambda x: _split(x, width, count), batch)

    def body(total: Any, turn: jax.Array) -> tuple[Any, Any]:
        # Entry k of turn n is example k * count + n of the batch.
        is_real = jnp.arange(width) * count + turn < size

        def take(x: jax.Array) -> jax.Array:
            # lax.scan slices first axes, and would need a transposed copy of the batch.
            return lax.dynamic_index_in_dim(x, turn, 1, keepdims=False)

        return step(total, is_real, *jax.tree.map(take, split))

    total, found = lax.scan(body, total, jnp.arange(count))
    return total, jax.tree.map(lambda x: _joined(x)[:size], found)


def _shards(x: jax.Array) -> int:
    """Over how many devices Explicit axes of the mesh split the batch."""
    # Other axes are not in the type.
    sharding = jax.typeof(x).sharding
    names = sharding.spec[0] or ()
    names = names if isinstance(names, tuple) else (names,)
    return math.prod(sharding.mesh.shape[name] for name in names)


def evened(size: int, most: int) -> int:
    """How many examples are in each of the fewest microbatches of at most some.

    32 examples, 9 at once, would be 4 microbatches with 4 examples to spare. 8 at once
    they are 4 microbatches as well, with none.
    """
    count = -(-size // min(most, size))
    return -(-size // count)


def _split(x: jax.Array, width: int, count: int) -> jax.Array:
    """[batch, ...] as [width, count, ...].

    Each microbatch gets every count-th example instead of neighbours. Devices that
    share a batch then have a part of every microbatch, and need not send any.
    """
    missing = width * count - x.shape[0]
    if missing:
        # Fewer than width, so the batch has as many to fill up with.
        x = jnp.concatenate([x, x[:missing]])
    return x.reshape(width, count, *x.shape[1:])


def _joined(x: jax.Array) -> jax.Array:
    """[count, width, ...] as [width * count, ...], in the order of the batch."""
    count, width, *shape = x.shape
    return jnp.swapaxes(x, 0, 1).reshape(width * count, *shape)


def replace_uncounted(example: Any, counts: jax.Array) -> Any:
    """The microbatch, with the first example that counts in the place of those that do
    not. Times 0 a healthy gradient is 0, but a broken one is NaN.
    """
    # 0 if none counts. Callers then make the whole sum 0.
    first = jnp.argmax(counts)

    def replace(x: jax.Array) -> jax.Array:
        return jnp.where(along_batch(counts, x), x, _example(x, first))

    return jax.tree.map(replace, example)


def _example(x: jax.Array, number: jax.Array) -> jax.Array:
    """One example, with a first axis of size 1."""
    if not jnp.issubdtype(x.dtype, jnp.number):
        # Booleans and random keys are not summed.
        return lax.dynamic_index_in_dim(x, number, 0)
    # A sum, since devices that share a batch would send each other all of it to take
    # one example out.
    chosen = jnp.arange(x.shape[0]) == number
    return jnp.sum(
        jnp.where(along_batch(chosen, x), x, 0), 0, x.dtype, keepdims=True
    )
