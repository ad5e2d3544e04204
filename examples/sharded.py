"""Trains one network in three ways on eight devices, clipped by the global norm, and
shows that all three are the same run.

What it shows. A norm over devices counts every part of a split leaf, and a replicated
leaf only once. The run is the same on one device and on eight (parts of one CPU):

    jit          matrices are split (FSDP). XLA sees to the communication
    shard_map    the same by hand. Types tell the clipper which leaves are split
    zero         each device updates an eighth of each leaf (ZeRO). Without types,
                 mesh_axes="devices" says that leaves are split

What it prints. The first and last norm and loss, and how far all are from one device's.

    pip install scikit-learn
    python examples/sharded.py --steps 50
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    error.add_note("Install what this program needs: pip install scikit-learn")
    raise

STEPS = 50
DEVICES = 8
AXIS = "devices"
BATCH = 64
MAX_NORM = 0.25

Params = dict[str, Array]
Step = Callable[..., Any]  # (params, state, images, labels) -> (params, state, numbers)
# A jitted step, the weights and the state.
Start = tuple[Step, Params, Any]


def main(steps: int = STEPS) -> dict[str, np.ndarray]:
    """Trains in all ways. Returns float[steps, 2] of each: norms and losses."""
    images, labels = load_digits(return_X_y=True)
    images = images / 16
    random = np.random.default_rng(0)
    size = steps, BATCH
    batches = random.integers(len(labels), size=size)
    tables: dict[str, np.ndarray] = {}
    print("            first norm and loss  last norm and loss   apart")
    for start in (one_device, jit, shard_map, zero):
        name = start.__name__
        step, params, state = start(new_params())
        table = np.zeros((steps, 2))
        for number, batch in enumerate(batches):
            chosen = images[batch], labels[batch]
            params, state, numbers = step(params, state, *chosen)
            table[number] = numbers
        tables[name] = table
        ratios = table / tables["one_device"]
        apart = np.abs(ratios - 1).max()
        print(f"{name:10}  {table[0]}  {table[-1]}  {apart:.0e}", flush=True)
    return tables


def new_params() -> Params:
    """One hidden layer."""
    first_key, second_key = jax.random.split(jax.random.key(0))
    normal = jax.nn.initializers.lecun_normal()
    return {
        "hidden": normal(first_key, (64, 128)),
        "bias": jnp.zeros(128),
        "output": normal(second_key, (128, 16)),
    }


def mean_loss(params: Params, images: Array, labels: Array) -> Array:
    hidden = jnp.tanh(images @ params["hidden"] + params["bias"])
    logits = hidden @ params["output"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def new_optimizer(mesh_axes: str = "auto") -> optax.GradientTransformation:
    clipper = optaxclip.clip_by_global_norm(MAX_NORM, mesh_axes=mesh_axes)
    # Not Adam: where a gradient is almost zero, each rounding changes Adam's step.
    sgd = optax.sgd(0.5, momentum=0.9)
    return optax.chain(clipper, sgd)


def take_step(
    loss_of: Callable[..., Array],
    params: Params,
    state: Any,
    images: Array,
    labels: Array,
) -> tuple[Any, Any, Array]:
    optimizer = new_optimizer()
    loss_and_grads = jax.value_and_grad(loss_of)
    loss, grads = loss_and_grads(params, images, labels)
    updates, state = optimizer.update(grads, state, params)
    report = optaxclip.metrics(state)
    norm = report["clip/norm_before"]
    numbers = jnp.array([norm, loss])
    return optax.apply_updates(params, updates), state, numbers


def one_device(params: Params) -> Start:
    optimizer = new_optimizer()
    state = optimizer.init(params)
    step = partial(take_step, mean_loss)
    return jax.jit(step), params, state


def jit(params: Params) -> Start:
    """The step of one device. Nothing in it says that arrays are split."""
    mesh = new_mesh()

    def sharding_of(leaf: Array) -> NamedSharding:
        return NamedSharding(mesh, spec_of(leaf))

    shardings = jax.tree.map(sharding_of, params)
    params = jax.device_put(params, shardings)
    return one_device(params)


def shard_map(params: Params) -> Start:
    """Averages the loss inside the differentiated function. Then JAX itself scatters
    the gradient of a gathered leaf, and sums the gradient of a replicated leaf.
    """
    state = new_optimizer().init(params)
    param_specs = jax.tree.map(spec_of, params)
    state_specs = jax.tree.map(spec_of, state)

    def loss_of(shards: Params, images: Array, labels: Array) -> Array:
        params = jax.tree.map(whole_leaf, shards, param_specs)
        loss = mean_loss(params, images, labels)
        return lax.pmean(loss, AXIS)

    step = partial(take_step, loss_of)
    step = mapped(step, param_specs, state_specs)
    return step, params, state


def zero(params: Params) -> Start:
    """Each device clips, remembers and updates an eighth of each leaf."""
    split = P(AXIS)
    optimizer = new_optimizer(mesh_axes=AXIS)

    def mean_shard(grad: Array) -> Array:
        total = lax.psum_scatter(grad, AXIS, tiled=True)
        return total / DEVICES

    def shard_of(leaf: Array) -> Array:
        shards = jnp.split(leaf, DEVICES)
        shards = jnp.stack(shards)
        device = lax.axis_index(AXIS)
        return shards[device]

    loss_and_grads = jax.value_and_grad(mean_loss)

    def step(params: Params, state: Any, images: Array, labels: Array) -> Any:
        loss, grads = loss_and_grads(params, images, labels)
        loss = lax.pmean(loss, AXIS)
        grads = jax.tree.map(mean_shard, grads)
        shards = jax.tree.map(shard_of, params)
        updates, state = optimizer.update(grads, state, shards)
        shards = optax.apply_updates(shards, updates)
        gathered = partial(whole_leaf, spec=split)
        params = jax.tree.map(gathered, shards)
        report = optaxclip.metrics(state)
        norm = report["clip/norm_before"]
        numbers = jnp.array([norm, loss])
        return params, state, numbers

    state = optimizer.init(params)
    # Moments are split, and the state of the clipper is not.
    state_specs = optax.tree_map_params(
        optimizer, lambda _: split, state, transform_non_params=lambda _: P()
    )
    mapped_step = mapped(step, P(), state_specs, check_vma=False)
    return mapped_step, params, state


def new_mesh() -> jax.sharding.Mesh:
    axis_types = (AxisType.Auto,)
    shape = (DEVICES,)
    names = (AXIS,)
    return jax.make_mesh(shape, names, axis_types)


def mapped(
    step: Step, param_specs: Any, state_specs: Any, check_vma: bool = True
) -> Step:
    """A jitted shard_map over weights, state and batch."""
    in_specs = param_specs, state_specs, P(AXIS), P(AXIS)
    out_specs = param_specs, state_specs, P()
    step = jax.shard_map(
        step,
        mesh=new_mesh(),
        in_specs=in_specs,
        out_specs=out_specs,
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"(default: {STEPS})")
    main(parser.parse_args().steps)
