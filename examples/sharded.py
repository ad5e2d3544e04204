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

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import Layers, cross_entropy, new_perceptron, perceptron, read_digits, run
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

DEVICES = 8
AXIS = "devices"
BATCH = 64
MAX_NORM = 0.25

Step = Callable[..., Any]  # (params, state, images, labels) -> (params, state, numbers)
# A jitted step, the weights and the state.
Start = tuple[Step, Layers, Any]


def main(steps: int = 50) -> dict[str, np.ndarray]:
    """Trains in all ways. Returns float[steps, 2] of each: norms and losses."""
    (images, labels), _ = read_digits(held_out=0)
    batches = np.random.default_rng(0).integers(len(labels), size=(steps, BATCH))
    tables: dict[str, np.ndarray] = {}
    print("            first norm and loss  last norm and loss   apart")
    for start in (one_device, jit, shard_map, zero):
        name = start.__name__
        step, params, state = start(new_perceptron(64, 128, 128, 16))
        table = np.zeros((steps, 2))
        for number, batch in enumerate(batches):
            params, state, numbers = step(params, state, images[batch], labels[batch])
            table[number] = numbers
        tables[name] = table
        apart = np.abs(table / tables["one_device"] - 1).max()
        print(f"{name:10}  {table[0]}  {table[-1]}  {apart:.0e}", flush=True)
    return tables


def mean_loss(params: Layers, images: Array, labels: Array) -> Array:
    return cross_entropy(perceptron(params, images), labels)


def new_optimizer(mesh_axes: str = "auto") -> optax.GradientTransformation:
    clipper = optaxclip.clip_by_global_norm(MAX_NORM, mesh_axes=mesh_axes)
    # Not Adam: where a gradient is almost zero, each rounding changes Adam's step.
    return optax.chain(clipper, optax.sgd(0.5, momentum=0.9))


def take_step(
    loss_of: Callable[..., Array],
    params: Layers,
    state: Any,
    images: Array,
    labels: Array,
) -> tuple[Any, Any, Array]:
    loss, grads = jax.value_and_grad(loss_of)(params, images, labels)
    updates, state = new_optimizer().update(grads, state, params)
    norm = optaxclip.metrics(state)["clip/norm_before"]
    return optax.apply_updates(params, updates), state, jnp.array([norm, loss])


def one_device(params: Layers) -> Start:
    state = new_optimizer().init(params)
    return jax.jit(partial(take_step, mean_loss)), params, state


def jit(params: Layers) -> Start:
    """The step of one device. Nothing in it says that arrays are split."""
    mesh = new_mesh()
    layout = jax.tree.map(lambda leaf: NamedSharding(mesh, spec_of(leaf)), params)
    return one_device(jax.device_put(params, layout))


def shard_map(params: Layers) -> Start:
    """Averages the loss inside the differentiated function. Then JAX itself scatters
    the gradient of a gathered leaf, and sums the gradient of a replicated leaf.
    """
    state = new_optimizer().init(params)
    param_specs = jax.tree.map(spec_of, params)
    state_specs = jax.tree.map(spec_of, state)

    def loss_of(shards: Layers, images: Array, labels: Array) -> Array:
        params = jax.tree.map(whole_leaf, shards, param_specs)
        return lax.pmean(mean_loss(params, images, labels), AXIS)

    step = partial(take_step, loss_of)
    return mapped(step, param_specs, state_specs), params, state


def zero(params: Layers) -> Start:
    """Each device clips, remembers and updates an eighth of each leaf."""
    optimizer = new_optimizer(mesh_axes=AXIS)

    def mean_shard(grad: Array) -> Array:
        return lax.psum_scatter(grad, AXIS, tiled=True) / DEVICES

    def shard_of(leaf: Array) -> Array:
        return jnp.stack(jnp.split(leaf, DEVICES))[lax.axis_index(AXIS)]

    def step(params: Layers, state: Any, images: Array, labels: Array) -> Any:
        loss, grads = jax.value_and_grad(mean_loss)(params, images, labels)
        grads = jax.tree.map(mean_shard, grads)
        shards = jax.tree.map(shard_of, params)
        updates, state = optimizer.update(grads, state, shards)
        shards = optax.apply_updates(shards, updates)
        params = jax.tree.map(lambda shard: whole_leaf(shard, P(AXIS)), shards)
        norm = optaxclip.metrics(state)["clip/norm_before"]
        return params, state, jnp.array([norm, lax.pmean(loss, AXIS)])

    state = optimizer.init(params)
    # Moments are split, and the state of the clipper is not.
    state_specs = optax.tree_map_params(
        optimizer, lambda _: P(AXIS), state, transform_non_params=lambda _: P()
    )
    return mapped(step, P(), state_specs, check_vma=False), params, state


def new_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))


def mapped(
    step: Step, param_specs: Any, state_specs: Any, check_vma: bool = True
) -> Step:
    """A jitted shard_map over weights, state and batch."""
    step = jax.shard_map(
        step,
        mesh=new_mesh(),
        in_specs=(param_specs, state_specs, P(AXIS), P(AXIS)),
        out_specs=(param_specs, state_specs, P()),
        check_vma=check_vma,
    )
    return jax.jit(step)


def spec_of(leaf: Array) -> P:
    """Splits matrices, and nothing else."""
    return P(AXIS) if leaf.ndim == 2 else P()


def whole_leaf(shard: Array, spec: P) -> Array:
    if spec == P():
        return shard
    return lax.all_gather(shard, AXIS, tiled=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_platforms", "cpu")
    run(main)
