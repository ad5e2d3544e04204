"""Trainings of one task by one method: all faults, rates and seeds in one program."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from .clippers import Method
from .tasks import GAMES, ROUND, Batch, Params, Task


class Fault(NamedTuple):
    """What goes wrong from a third of the run on."""

    batches: bool = False  # the data of every 25th batch are broken
    elements: bool = False  # one element in 10,000 of each gradient is times 1,000
    layer: bool = False  # one tensor of every 25th gradient is times 1,000


FAULTS = {
    "no fault": Fault(),
    "broken batches": Fault(batches=True),
    "elements x 1000": Fault(elements=True),
    "a layer x 1000": Fault(layer=True),
}


def costs(
    task: Task, methods: list[Method], rates: list[float], seeds: int
) -> jax.Array:
    """The costs at the end of all runs: float[methods, faults, rates, seeds]."""
    faults = stacked(list(FAULTS.values()))
    starts = stacked([task.start(seed=seed) for seed in range(seeds)])
    each_seed = jax.vmap(partial(train, task, methods), in_axes=(None, None, 0, 0))
    each_rate = jax.vmap(each_seed, in_axes=(None, 0, None, None))
    each_fault = jax.jit(jax.vmap(each_rate, in_axes=(0, None, None, None)))
    final_costs = each_fault(faults, jnp.array(rates), starts, jnp.arange(seeds))
    return jnp.moveaxis(final_costs, -1, 0)


def untrained(task: Task, seeds: int) -> list[float]:
    """The costs before the first step."""
    return [float(task.cost(task.start(seed=seed))) for seed in range(seeds)]


def train(
    task: Task,
    methods: list[Method],
    fault: Fault,
    highest_rate: jax.Array | float,
    start: Params,
    seed: ArrayLike,
) -> jax.Array:
    """One run by several methods. They stand in one program, which compiles in less
    time than a program for each. Returns float[methods]: the costs at the end.
    """
    steps = task.rounds * ROUND

    def rate(step: jax.Array) -> jax.Array:
        """Rises over a twelfth of the run, and falls to 0."""
        rise = jnp.minimum(12 * (step + 1) / steps, 1)
        return highest_rate * rise * (1 - step / steps)

    optimizers = [method(task.optimizer, rate) for method in methods]
    draw = jax.vmap(task.draw, in_axes=(0, 0, None), out_axes=(1, 0))
    gradients = jax.vmap(partial(gradient, task, fault), in_axes=(0, 0, None, None))

    def step(trained: Any, inputs: Any) -> tuple[Any, None]:
        params, states = trained
        grads = gradients(params, *inputs)
        all_updates = []
        new_states = []
        for place, optimizer in enumerate(optimizers):
            updates, state = optimizer.update(
                entry(grads, place), states[place], entry(params, place)
            )
            all_updates.append(updates)
            new_states.append(state)
        params = optax.apply_updates(params, stacked(all_updates))
        return (params, new_states), None

    def round_of_steps(carry: Any, numbers: jax.Array) -> tuple[Any, None]:
        trained, games, key = carry
        key, draw_key, *keys = random.split(key, ROUND + 2)
        params, _ = trained
        batches, games = draw(params, games, draw_key)
        trained, _ = lax.scan(step, trained, (batches, numbers, jnp.stack(keys)))
        return (trained, games, key), None

    params = stacked([start] * len(methods))
    states = [optimizer.init(start) for optimizer in optimizers]
    games = jnp.zeros((len(methods), GAMES, 4))
    numbers = jnp.arange(steps).reshape(-1, ROUND)
    carry = (params, states), games, random.key(seed)
    ((params, _), _, _), _ = lax.scan(round_of_steps, carry, numbers)
    return jax.vmap(task.cost)(params)


def gradient(
    task: Task,
    fault: Fault,
    params: Params,
    batch: Batch,
    number: jax.Array,
    key: jax.Array,
) -> Params:
    """The gradient of the step of this number, with its fault."""
    is_late = number >= task.rounds * ROUND // 3
    is_spike = is_late & (number % 25 == 0)
    is_broken = fault.batches & is_spike
    broken_batch = task.spoil(key, batch)
    batch = jax.tree.map(partial(jnp.where, is_broken), broken_batch, batch)
    grads = jax.grad(task.loss)(params, batch)
    place = jnp.where(fault.layer & is_spike, number // 25, -1)
    share = jnp.where(fault.elements & is_late, 1e-4, 0.0)
    return with_spikes(grads, place, share, key)


def stacked(trees: list[Any]) -> Any:
    """One tree, whose leaves have one more axis in front."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def entry(tree: Params, place: int) -> Params:
    """One of the trees of a stacked tree."""
    return jax.tree.map(lambda leaf: leaf[place], tree)


def with_spikes(
    grads: Params, place: jax.Array | int, share: ArrayLike, key: jax.Array
) -> Params:
    """The gradient, with a share of its elements and one of its tensors times 1,000.

    Args:
      grads: the gradient.
      place: of the tensor among all tensors, which are counted round and round. -1 for
        none.
      share: of the elements, which are drawn.
      key: for the draw.
    """
    gradient, unravel = ravel_pytree(grads)
    sizes = [leaf.size for leaf in jax.tree.leaves(grads)]
    tensors = np.repeat(np.arange(len(sizes)), sizes)  # the tensor of each element
    is_of_tensor = (place >= 0) & (tensors == place % len(sizes))
    is_spike = is_of_tensor | random.bernoulli(key, share, gradient.shape)
    return unravel(gradient * jnp.where(is_spike, 1000.0, 1.0))
