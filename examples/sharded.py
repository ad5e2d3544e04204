"""Trains one network in three ways on eight devices, clipped by the global norm, and
shows that all three are the same run.

What it shows. A norm over devices counts every part of a split leaf, and a replicated
leaf only once. The run is the same on one device and on eight (parts of one CPU):

    jit          matrices are split (FSDP). XLA sees to the communication
    shard_map    the same by hand. Types tell the clipper which leaves are split
    zero         each device updates an eighth of each leaf (ZeRO). Without types,
                 mesh_axes="devices" says that leaves are split

What it prints. The first and last norm and loss, and how far all are from one device's.

    python examples/sharded.py --steps 50
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import cross_entropy, new_perceptron, perceptron, read_digits, run
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

DEVICES, AXIS, BATCH, MAX_NORM = 8, "devices", 64, 0.25
new_mesh = partial(jax.make_mesh, (DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))


def main(steps: int = 50) -> dict[str, np.ndarray]:
    """Trains in all ways. Returns float[steps, 2] of each: norms and losses."""
    (images, labels), _ = read_digits(held_out=0)
    chosen = np.random.default_rng(0).integers(len(labels), size=(steps, BATCH))
    runs: dict[str, np.ndarray] = {}
    print("            first norm and loss  last norm and loss   apart")
    for way in (one_device, jit, shard_map, zero):
        step, params, state = way(new_perceptron(64, 128, 128, 16))
        runs[way.__name__] = numbers = np.zeros((steps, 2))
        for row, batch in zip(numbers, chosen):
            params, state, row[:] = step(params, state, images[batch], labels[batch])
        apart = np.abs(numbers / runs["one_device"] - 1).max()
        print(
            f"{way.__name__:10}  {numbers[0]}  {numbers[-1]}  {apart:.0e}", flush=True
        )
    return runs


def mean_loss(params: Any, images: Any, labels: Any) -> jax.Array:
    return cross_entropy(perceptron(params, images), labels)


def new_optimizer(mesh_axes: str = "auto") -> Any:
    clipper = optaxclip.clip_by_global_norm(MAX_NORM, mesh_axes=mesh_axes)
    # Not Adam: where a gradient is almost zero, each rounding changes Adam's step.
    return optax.chain(clipper, optax.sgd(0.5, momentum=0.9))


def take_step(loss_of: Any, params: Any, state: Any, images: Any, labels: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(params, images, labels)
    updates, state = new_optimizer().update(grads, state, params)
    norm = optaxclip.metrics(state)["clip/norm_before"]
    return optax.apply_updates(params, updates), state, jnp.array([norm, loss])


def one_device(params: Any) -> Any:
    """Returns a step, and its first weights and state, as all ways do."""
    return jax.jit(partial(take_step, mean_loss)), params, new_optimizer().init(params)


def jit(params: Any) -> Any:
    """The step of one device. Nothing in it says that arrays are split."""
    layout = jax.tree.map(lambda leaf: NamedSharding(new_mesh(), spec(leaf)), params)
    return one_device(jax.device_put(params, layout))


def shard_map(params: Any) -> Any:
    """Averages the loss inside the differentiated function. Then JAX itself scatters
    the gradient of a gathered leaf, and sums the gradient of a replicated leaf.
    """
    start = params, new_optimizer().init(params)
    specs = jax.tree.map(spec, start)

    def loss_of(shards: Any, images: Any, labels: Any) -> jax.Array:
        params = jax.tree.map(gathered, shards, specs[0])
        return lax.pmean(mean_loss(params, images, labels), AXIS)

    return mapped(partial(take_step, loss_of), specs), *start


def zero(params: Any) -> Any:
    """Each device clips, remembers and updates an eighth of each leaf."""
    optimizer = new_optimizer(mesh_axes=AXIS)

    def step(params: Any, state: Any, images: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(mean_loss)(params, images, labels)
        add_up = partial(lax.psum_scatter, axis_name=AXIS, tiled=True)
        grads = jax.tree.map(lambda leaf: add_up(leaf) / DEVICES, grads)
        place = lax.axis_index(AXIS)
        shard = jax.tree.map(lambda x: jnp.stack(jnp.split(x, DEVICES))[place], params)
        updates, state = optimizer.update(grads, state, shard)
        params = jax.tree.map(gathered, optax.apply_updates(shard, updates))
        norm = optaxclip.metrics(state)["clip/norm_before"]
        return params, state, jnp.array([norm, lax.pmean(loss, AXIS)])

    state = optimizer.init(params)
    # Moments are split, and the state of the clipper is not.
    split = optax.tree_map_params(
        optimizer, lambda _: P(AXIS), state, transform_non_params=lambda _: P()
    )
    return mapped(step, (P(), split), check_vma=False), params, state


def mapped(step: Any, specs: tuple[Any, Any], check_vma: bool = True) -> Any:
    """A jitted shard_map over weights, state and batch."""
    sides = {"in_specs": (*specs, P(AXIS), P(AXIS)), "out_specs": (*specs, P())}
    return jax.jit(jax.shard_map(step, mesh=new_mesh(), check_vma=check_vma, **sides))


def spec(leaf: Any) -> P:
    return P(AXIS) if leaf.ndim == 2 else P()  # matrices are split, the rest is not


def gathered(part: jax.Array, spec: Any = (AXIS,)) -> jax.Array:
    return lax.all_gather(part, AXIS, tiled=True) if AXIS in spec else part


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_platforms", "cpu")
    run(main)
