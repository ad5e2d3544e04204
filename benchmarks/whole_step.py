"""Whole training steps on the device at hand: forward, backward, clip, Adam.

Every step has weights and an optimizer state of its own, and goes on training them from
round to round. Batches are random, so a loss falls as far as they can be memorised.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import networks, steps, timing
from .report import Table

COLUMNS = (
    "network",
    "clipped by",
    "time",
    "middle half",
    "over optax's",
    "temporary MB",
    "compile",
)
BATCHES = 8
# Seconds of a run of a step, and how often all of them run in turns.
LONG, ROUNDS = 0.1, 41


def table(quick: bool) -> Table:
    """Each network with each clip. The quick one has a few clips of a toy."""
    rows = []
    names = list(steps.STEPS)[: 3 if quick else None]
    for title, network in networks.at_hand(quick).items():
        for row in rows_of(network, names, 2 if quick else ROUNDS):
            rows.append({"network": title} | row)
    note = (
        "Time: medians of the ratios to the step without a clip, and the middle half "
        "of all rounds. Over optax's: the same to the step with optax's global norm. "
        "Temporary memory is all that the step needs beside weights, state and batch. "
        "Compile: processor time to trace and compile, over that of optax's clip of "
        "the same kind."
    )
    return Table("whole training steps", COLUMNS, rows, note)


def rows_of(
    network: networks.Network, names: list[str], rounds: int
) -> list[dict[str, Any]]:
    """The rows of one network."""
    generator = np.random.default_rng(1)
    batches = [jax.device_put(network.draw(generator)) for _ in range(BATCHES)]
    functions, contestants, trainings = {}, {}, {}
    for name in names:
        optimizer, params = steps.STEPS[name](), networks.started(network.params)
        # Arrays of its own: a state may hold one twice, which cannot be donated.
        state = jax.tree.map(jnp.copy, optimizer.init(params))
        step = steps.whole_step(network.loss, optimizer)
        functions[name] = step, params, state, *batches[0]
    programs = timing.compiled_in_turns(functions, donate=(0, 1))
    for name, (_, params, state, *_) in functions.items():
        trainings[name] = Training(programs[name].call, params, state, batches)
        contestants[name] = timing.repeated(trainings[name].step, LONG)
    rows = steps.raced(programs, contestants, rounds)
    for row in rows:
        losses = trainings[row["clipped by"]].losses
        row["losses"] = [float(loss) for loss in losses]
    return rows


class Training:
    """A run, one step after the other."""

    def __init__(
        self, call: Callable[..., Any], params: Any, state: Any, batches: list[Any]
    ) -> None:
        self.call, self.params, self.state = call, params, state
        self.batches = itertools.cycle(batches)
        self.losses = []  # before the first step and before the last

    def step(self) -> Any:
        """Takes a step. Returns what has to be waited for."""
        batch = next(self.batches)
        self.params, self.state, loss = self.call(self.params, self.state, *batch)
        self.losses = [*self.losses[:1], loss]
        return self.params, loss
