"""Trains a pipeline of four stages whose global norm is clipped without a message of
its own, by the budget of `optaxclip.release`.

What it shows. Each stage lives on a device of its own (parts of one CPU). The clip of
the global norm needs the norms of all stages before any of them can update. A budget
needs only the rest of the limit, which goes down with the cotangent:

    forward     activation, sum of all squares, sum of the shares below
    backward    cotangent, rest of the limit, sum of the squares above

A stage clips its gradient by what it may spend, and updates at once. All stages
together never step by more than the limit. Shares are averages of earlier steps.

What it prints. For each tenth step its loss, the norm before the clip, and the norm
after it over the limit.

    python examples/pipeline.py --steps 100
"""

import argparse
import os

# Read when JAX looks for devices: eight parts of the CPU.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optaxclip

STEPS = 100
STAGES = 4
WIDTH = 16
BATCH = 32
LIMIT = 0.5
RATE = 0.2
KEEP = 0.9  # of a share, from step to step
# Clips one stage. Each step passes its limit.
CLIPPER = optaxclip.clip_by_global_norm(1.0, mesh_axes=None)
AXIS_TYPES = (AxisType.Auto,)


class Stages(NamedTuple):
    """The arrays that stay on the devices. Each has an entry for each stage."""

    weights: Array  # float32[STAGES, WIDTH, WIDTH]
    shares: Array  # float32[STAGES]: averages of squares over their sum
    squares: Array  # float32[STAGES]: of the norms before the last clip
    totals: Array  # float32[STAGES]: the sum of squares of this stage and those above


class Message(NamedTuple):
    """A stage sends it to the next stage, or to the stage before."""

    array: Array  # an activation or its cotangent
    numbers: Array  # float[2]


def main(steps: int = STEPS) -> dict[str, np.ndarray]:
    """Returns losses, the squares of all stages, and the limits that they had."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(STAGES, WIDTH, WIDTH))
    weights = weights / WIDTH**0.5
    stages = Stages(
        weights=jnp.asarray(weights, jnp.float32),
        shares=jnp.full(STAGES, 1 / STAGES),
        squares=jnp.zeros(STAGES),
        totals=jnp.zeros(STAGES),
    )
    target = random.normal(size=(WIDTH, WIDTH))
    target = target.astype(np.float32)
    losses = np.zeros(steps, np.float32)
    squares = np.zeros((steps, STAGES), np.float32)
    limits = np.zeros((steps, STAGES), np.float32)
    print("  step    loss  norm before  norm after / limit")
    for number in range(steps):
        x = random.normal(size=(BATCH, WIDTH))
        x = jnp.asarray(x, jnp.float32)
        y = jnp.sin(x @ target)
        # One batch in twenty is broken.
        is_broken = number % 20 == 19
        if is_broken:
            y = 30 * y
        stages, losses_of_stages, limits_of_stages = take_step(stages, x, y)
        losses[number] = losses_of_stages[-1]
        squares[number] = stages.squares
        limits[number] = limits_of_stages
        if number % 10 == 9:
            loss = losses[number]
            print_line(number + 1, loss, squares[number], limits[number], is_broken)
    return {"loss": losses, "squares": squares, "limits": limits}


def print_line(
    step: int,
    loss: np.float32,
    squares: np.ndarray,
    limits: np.ndarray,
    is_broken: bool,
) -> None:
    squares_after = np.minimum(squares, limits**2)
    before = squares.sum() ** 0.5
    after = squares_after.sum() ** 0.5
    share = after / LIMIT
    note = "  broken batch" if is_broken else ""
    print(f"{step:6}  {loss:6.3f}  {before:11.3f}  {share:18.6f}{note}", flush=True)


def apply_layer(weights: Array, x: Array) -> Array:
    return x + jnp.tanh(x @ weights)


def mean_loss(outputs: Array, y: Array) -> Array:
    squared_errors = (outputs - y) ** 2
    return jnp.mean(squared_errors)


def sent(message: Message, to: int) -> Message:
    """The message of the stage before (to=1) or after (to=-1)."""
    pairs = []
    for stage in range(STAGES):
        target = stage + to
        if 0 <= target < STAGES:
            pairs.append((stage, target))
    send = partial(lax.ppermute, axis_name="stage", perm=pairs)
    return jax.tree.map(send, message)


@jax.jit
@partial(
    jax.shard_map,
    mesh=jax.make_mesh((STAGES,), ("stage",), AXIS_TYPES),
    in_specs=(P("stage"), P(), P()),
    out_specs=P("stage"),
)
def take_step(stages: Stages, x: Array, y: Array) -> tuple[Stages, Array, Array]:
    """Returns the stages after a step, and the loss and the limit that each saw."""
    stage = jax.tree.map(lambda leaf: leaf[0], stages)
    inputs, outputs, share, portion = forward(stage, x)
    loss, cotangent = jax.value_and_grad(mean_loss)(outputs, y)
    stage = stage._replace(shares=share)
    stage, limit = backward(stage, inputs, cotangent, portion)
    results = stage, loss, limit
    return jax.tree.map(lambda leaf: leaf[None], results)


def forward(stage: Stages, x: Array) -> tuple[Array, Array, Array, Array]:
    """Activations go up, and the sum of shares with them.

    All devices compute in every turn, and one of them counts.

    Returns: inputs and outputs of the stage, its share, and the portion of the rest of
      the limit that it may spend.
    """
    here = lax.axis_index("stage")
    share = stage.shares
    portion = jnp.zeros_like(share)
    inputs = lax.pcast(x, "stage", to="varying")
    outputs = inputs
    numbers = jnp.stack([stage.totals, portion])
    message = Message(inputs, numbers)
    for turn in range(STAGES):
        is_turn = here == turn
        # `total`: the sum of all squares of the step before, from the first stage.
        total, shares_below = message.numbers
        is_known = total > 0
        last_share = stage.squares / jnp.where(is_known, total, 1)
        average = KEEP * share + (1 - KEEP) * last_share
        share = jnp.where(is_turn & is_known, average, share)
        # Frozen stages have a share of 0. With none below it a stage spends the rest.
        shares_so_far = shares_below + share
        is_frozen = shares_so_far == 0
        part = share / jnp.where(is_frozen, 1, shares_so_far)
        part = jnp.where(is_frozen, 1, part)
        portion = jnp.where(is_turn, part, portion)
        inputs = jnp.where(is_turn, message.array, inputs)
        outputs = apply_layer(stage.weights, inputs)
        numbers = jnp.stack([total, shares_so_far])
        message = Message(outputs, numbers)
        message = sent(message, to=1)
    return inputs, outputs, share, portion


def backward(
    stage: Stages, inputs: Array, cotangent: Array, portion: Array
) -> tuple[Stages, Array]:
    """Cotangents go down, and the rest of the limit with them.

    Returns: the stage after its update, and its limit.
    """
    here = lax.axis_index("stage")
    limit_of_stage = jnp.zeros_like(portion)
    numbers = jnp.stack([limit_of_stage + LIMIT**2, limit_of_stage])
    message = Message(cotangent, numbers)
    for turn in reversed(range(STAGES)):
        is_turn = here == turn
        remaining, squares_above = message.numbers
        _, pull = jax.vjp(apply_layer, stage.weights, inputs)
        grads, cotangent = pull(message.array)
        square = jnp.sum(grads**2)
        norm = jnp.sqrt(square)
        limit = jnp.sqrt(remaining * portion)
        clip_state = CLIPPER.init(grads)
        updates: Any
        updates, _ = CLIPPER.update(grads, clip_state, limit=limit)
        norm_after = jnp.minimum(norm, limit)
        spent = norm_after**2
        total = squares_above + norm**2
        updated = Stages(
            weights=stage.weights - RATE * updates,
            shares=stage.shares,
            squares=norm**2,
            totals=total,
        )
        in_turn = partial(jnp.where, is_turn)
        stage = jax.tree.map(in_turn, updated, stage)
        limit_of_stage = jnp.where(is_turn, limit, limit_of_stage)
        remaining = jnp.maximum(remaining - spent, 0)
        numbers = jnp.stack([remaining, total])
        message = Message(cotangent, numbers)
        message = sent(message, to=-1)
    return stage, limit_of_stage


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"(default: {STEPS})")
    main(parser.parse_args().steps)
