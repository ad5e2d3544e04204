"""Trainings of one task by one method: all faults, rates and seeds in one program."""

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random
from jax.flatten_util import ravel_pytree

from .clippers import Method
from .tasks import GAMES, ROUND, Batch, Params, Task


class Fault(NamedTuple):
    """What goes wrong from a third of the run on."""

    batches: bool = False  # the data of every 25th batch are spoilt
    elements: bool = False  # one element in 10,000 of each gradient is times 1,000
    layer: bool = False  # one tensor of every 25th gradient is times 1,000


FAULTS = {
    "no fault": Fault(),
    "broken batches": Fault(batches=True),
    "elements x 1000": Fault(elements=True),
    "a layer x 1000": Fault(layer=True),
}


class Run(NamedTuple):
    """One training. In `runs` each number is an array, of all trainings."""

    fault: Fault
    rate: Any
    seed: Any


class Step(NamedTuple):
    """The inputs of one step of training."""

    number: Any
    batch: Batch
    key: Any


def runs(rates: list[float], seeds: int) -> Run:
    """All faults with all rates and all seeds, in this order."""
    rows = itertools.product(FAULTS.values(), rates, range(seeds))
    records = [Run(*row) for row in rows]
    return jax.tree.map(lambda *numbers: np.asarray(numbers), *records)


def costs(task: Task, method: Method, rates: list[float], seeds: int) -> np.ndarray:
    """What every run ends at: float[faults, rates, seeds]."""
    starts = [task.start(seed=seed) for seed in range(seeds)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    program = jax.jit(jax.vmap(partial(train, task, method, params)))
    return np.reshape(program(runs(rates, seeds)), (len(FAULTS), len(rates), seeds))


def untrained(task: Task, seeds: int) -> list[float]:
    """What the runs start from."""
    return [float(task.cost(task.start(seed=seed))) for seed in range(seeds)]


def train(task: Task, method: Method, starts: Params, run: Run) -> jax.Array:
    """One run. Returns the cost of data that were never trained on."""
    steps = task.rounds * ROUND

    def rate(step: Any) -> Any:
        """Rises over a twelfth of the run, and falls to 0."""
        return run.rate * jnp.minimum(12 * (step + 1) / steps, 1) * (1 - step / steps)

    optimizer = method(task.optimizer, rate)

    def step(trained: Any, inputs: Step) -> tuple[Any, None]:
        params, state = trained
        batch = broken_batch(task, run.fault, steps, inputs)
        grads = jax.grad(task.loss)(params, batch)
        grads = broken_gradient(grads, run.fault, steps, inputs)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def round_of_steps(carry: Any, numbers: jax.Array) -> tuple[Any, None]:
        trained, games, key = carry
        key, key_draw, *keys = random.split(key, ROUND + 2)
        batches, games = task.draw(trained[0], games, key_draw)
        trained, _ = lax.scan(step, trained, Step(numbers, batches, jnp.stack(keys)))
        return (trained, games, key), None

    params = jax.tree.map(lambda leaves: leaves[run.seed], starts)
    trained = params, optimizer.init(params)
    carry = trained, jnp.zeros((GAMES, 4)), random.key(run.seed)
    numbers = jnp.arange(steps).reshape(-1, ROUND)
    ((params, _), _, _), _ = lax.scan(round_of_steps, carry, numbers)
    return task.cost(params)


def broken_batch(task: Task, fault: Fault, steps: int, inputs: Step) -> Batch:
    """The batch, or what is broken in its place."""
    is_broken = fault.batches & is_late(steps, inputs) & (inputs.number % 25 == 0)
    spoilt = task.spoil(inputs.key, inputs.batch)
    return jax.tree.map(partial(jnp.where, is_broken), spoilt, inputs.batch)


def broken_gradient(grads: Params, fault: Fault, steps: int, inputs: Step) -> Params:
    """The gradient, with single elements or one tensor times 1,000."""
    late = is_late(steps, inputs)
    gradient, unravel = ravel_pytree(grads)
    sizes = [leaf.size for leaf in jax.tree.leaves(grads)]
    tensors = np.repeat(np.arange(len(sizes)), sizes)  # the tensor of each element
    of_layer = tensors == inputs.number // 25 % len(sizes)
    spikes = fault.layer & late & (inputs.number % 25 == 0) & of_layer
    chance = random.bernoulli(inputs.key, 1e-4, gradient.shape)
    spikes = spikes | (fault.elements & late & chance)
    return unravel(gradient * jnp.where(spikes, 1000.0, 1.0))


def is_late(steps: int, inputs: Step) -> Any:
    """Whether a third of the run is over."""
    return inputs.number >= steps // 3
