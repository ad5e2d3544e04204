"""Whole training steps on the device at hand: forward, backward, clip, Adam.

Every step has weights and optimizer states of its own, in several sets of arrays that
take turns from round to round: one program may be 10 % faster with its arrays in one
place than in another. Each set goes on training. Batches are random, so a loss falls as
far as they can be memorised.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import networks, steps, timing
from .compiled import program
from .report import Table

COLUMNS = (
    "network",
    "clipped by",
    "time",
    "middle half",
    "over optax's",
    "arguments",
    "kernels",
    "scalars",
    "temporary MB",
    "compile",
)
BATCHES = 8
SETS = 3  # of weights and states of each step
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
    functions = {}
    trainings: dict[str, list[Training]] = {name: [] for name in names}
    # All steps get their first set, then all get the second one, and so on.
    for _ in range(SETS):
        for name in names:
            params = networks.started(network.params)
            optimizer = steps.STEPS[name]()
            # Copied, since a state may hold one array twice, which cannot be donated.
            state = jax.tree.map(jnp.copy, optimizer.init(params))
            step = steps.whole_step(network.loss, optimizer)
            functions[name] = step, params, state, *batches[0]
            trainings[name].append(Training(params, state, batches))
    programs = timing.compiled_in_turns(functions, donate=(0, 1))
    contestants = {}
    for name in names:
        for training in trainings[name]:
            training.call = programs[name].call
        runs = [training.step for training in trainings[name]]
        contestants[name] = timing.repeated(runs, LONG)
    rows = steps.raced(programs, contestants, rounds)
    for row in rows:
        name = row["clipped by"]
        row["losses"] = [float(loss) for loss in trainings[name][0].losses]
        text = programs[name].call.as_text()
        counts = program.counts_of(text or "")
        row["kernels"] = counts.kernels
        row["scalars"] = counts.scalars
        _, *arguments = functions[name]
        row["arguments"] = len(jax.tree.leaves(arguments))
    return rows


class Training:
    """A run, one step after the other."""

    call: Callable[..., Any]  # the compiled step

    def __init__(self, params: Any, state: Any, batches: list[Any]) -> None:
        self.params = params
        self.state = state
        self.batches = itertools.cycle(batches)
        self.losses: list[Any] = []  # before the first step and before the last

    def step(self) -> Any:
        """Takes a step. Returns what has to be waited for."""
        batch = next(self.batches)
        self.params, self.state, loss = self.call(self.params, self.state, *batch)
        self.losses = [*self.losses[:1], loss]
        return self.params, loss
