"""Trains a pipeline of four stages whose global norm is clipped without a message of
its own, by the budget of `optaxclip.release`.

What it shows. Each stage lives on a device of its own (parts of one CPU). The clip of
the global norm needs the norms of all stages before any of them can update. A budget
needs only the rest of the limit, which goes down with the cotangent:

    forward     activation, sum of all squares, sum of the shares below
    backward    cotangent, rest of the limit, sum of the squares above

A stage clips its gradient by what it may spend, and updates at once. All stages
together never step by more than the limit. Shares are averages of earlier steps.

What it prints. Loss, norm before the clip, and norm after it over the limit.

    python examples/pipeline.py --steps 100
"""

import os

# Read when JAX looks for devices.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _shared import run
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optaxclip

STAGES, WIDTH, BATCH, LIMIT, RATE, KEEP = 4, 16, 32, 0.5, 0.2, 0.9
# Clips one stage. Each step passes its limit.
CLIPPER = optaxclip.clip_by_global_norm(1.0, mesh_axes=None)


class Message(NamedTuple):
    """A stage sends it to the next stage, or to the stage before."""

    array: Array  # an activation or its cotangent
    numbers: Array  # float[2]


def main(steps: int = 100, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns losses, the squares of all stages, and the limits that they had."""
    random = np.random.default_rng(seed)
    weights = random.normal(size=(STAGES, WIDTH, WIDTH)) / WIDTH**0.5
    weights = jnp.asarray(weights, jnp.float32)
    target = np.float32(random.normal(size=(WIDTH, WIDTH)))
    shares, total = jnp.full(STAGES, 1 / STAGES), jnp.zeros(STAGES)
    squares = jnp.zeros(STAGES)
    log: dict[str, list[Any]] = {"loss": [], "squares": [], "limits": []}
    for number in range(steps):
        x = jnp.asarray(random.normal(size=(BATCH, WIDTH)), jnp.float32)
        # One batch in twenty is broken.
        y = jnp.sin(x @ target) * (30 if number % 20 == 19 else 1)
        weights, shares, squares, total, loss, limits = step(
            weights, shares, squares, total, x, y
        )
        for name, value in zip(log, (loss[-1], squares, limits)):
            log[name].append(np.asarray(value))
        if number % 10 == 9:
            after = np.minimum(squares, limits**2).sum() ** 0.5
            before = float(squares.sum() ** 0.5)
            print(f"{loss[-1]:.3f}  {before:.3f}  {after / LIMIT:.6f}", flush=True)
    return {name: np.array(values) for name, values in log.items()}


def stage(weights: Array, x: Array) -> Array:
    return x + jnp.tanh(x @ weights)


def sent(message: Message, to: int) -> Message:
    """The message of the stage before (to=1) or after (to=-1)."""
    pairs = [(k, k + to) for k in range(STAGES) if 0 <= k + to < STAGES]
    return jax.tree.map(lambda x: lax.ppermute(x, "stage", pairs), message)


@jax.jit
@partial(
    jax.shard_map,
    mesh=jax.make_mesh((STAGES,), ("stage",), axis_types=(AxisType.Auto,)),
    in_specs=(P("stage"), P("stage"), P("stage"), P("stage"), P(), P()),
    out_specs=P("stage"),
)
def step(
    weights: Array, share: Array, square: Array, total: Array, x: Array, y: Array
) -> tuple[Array, ...]:
    """One step. Every stage has one entry of all arrays but x and y."""
    here = lax.axis_index("stage")
    (weights,), (share,), (square,), (total,) = weights, share, square, total
    zero = jnp.zeros_like(total)
    inputs = lax.pcast(x, "stage", to="varying")
    message = Message(inputs, jnp.stack([total, zero]))
    portion = limits = zero
    output = message
    # Forward: all devices compute in every turn, and one of them counts.
    for turn in range(STAGES):
        is_turn = here == turn
        total, below = message.numbers
        # The shares after the step before, whose sum of squares has come up.
        is_known = total > 0
        average = KEEP * share + (1 - KEEP) * square / jnp.where(is_known, total, 1)
        share = jnp.where(is_turn & is_known, average, share)
        portion = jnp.where(is_turn, share / (share + below), portion)
        inputs = jnp.where(is_turn, message.array, inputs)
        output = Message(stage(weights, inputs), jnp.stack([total, below + share]))
        message = sent(output, 1)
    loss, cotangent = jax.value_and_grad(lambda x: jnp.mean((x - y) ** 2))(output.array)
    message = Message(cotangent, jnp.stack([zero + LIMIT**2, zero]))
    for turn in reversed(range(STAGES)):
        is_turn = here == turn
        left, above = message.numbers
        _, pull = jax.vjp(stage, weights, inputs)
        grads, cotangent = pull(message.array)
        norm = jnp.sqrt(jnp.sum(grads**2))
        limit = jnp.sqrt(left * portion)
        updates: Any
        updates, _ = CLIPPER.update(grads, CLIPPER.init(grads), limit=limit)
        weights = jnp.where(is_turn, weights - RATE * updates, weights)
        left = jnp.maximum(left - jnp.minimum(norm, limit) ** 2, 0)
        square = jnp.where(is_turn, norm**2, square)
        limits = jnp.where(is_turn, limit, limits)
        total = above + norm**2
        message = sent(Message(cotangent, jnp.stack([left, total])), -1)
    values = weights, share, square, total, loss, limits
    return tuple(value[None] for value in values)


if __name__ == "__main__":
    run(main)
