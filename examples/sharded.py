"""Trains one small transformer in four ways on eight devices, clipped by the global
norm, and shows that all four are the same run.

What it shows. A gradient norm over several devices has to count what is split over them
once for each part and what is replicated only once. The same transformer reads the same
batches of the English prose of Python's own help pages, from the same seed, on one
device and then four times on eight:

    jit            matrices split over the devices (FSDP), the rest replicated. XLA's
                   partitioner sees to the communication
    shard_map      the same layout by hand: matrices are gathered before they are used,
                   their gradients come back scattered. The types know what is split
    pmap           replicated weights, gradients averaged before they are clipped
    pmap, ZeRO     replicated weights, but every device keeps and updates an eighth of
                   each leaf. mesh_axes="devices" says that these are shards

Every run sees the same gradient norm and the same losses, to float32 accuracy. Beside
it stands what `optax.clip_by_global_norm` does in the same place: the norm of the first
gradient after its clipping, which ought to be the limit.

The optimizer is SGD with momentum, on purpose: the order of additions differs from run
to run, and Adam divides by the size of the gradient, so that where a gradient is almost
zero it turns another rounding into another step. A comparison of loss curves would then
measure Adam.

How long it takes. About half a minute on two CPU cores, most of it compilation. The
devices are virtual: the CPU counts as eight.

What it prints. The table.

    python examples/sharded.py --steps 50
"""

import os

# Before JAX is imported: eight devices out of one CPU.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import argparse
import functools
import math
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

SEED, DEVICES, AXIS = 0, 8, "devices"
WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 32, 4, 2, 16, 16
MAX_NORM, LEARNING_RATE, MOMENTUM = 0.25, 0.5, 0.9


class Onlooker(NamedTuple):
    """The state of `beside`."""

    would_be: Any  # as the updates: what the clipper would have made of them


class Run(NamedTuple):
    """A way to train, ready to start."""

    step: Callable[
        ..., Any
        # (model, optimizer state, int32[BATCH, LENGTH + 1]) -> (model, optimizer state,
        # loss)
    ]
    model: Any  # placed on the devices, as the state is
    state: Any


class Row(NamedTuple):
    """One line of the table."""

    mode: str
    mesh_axes: str  # what the clipper is told
    norms: np.ndarray  # float32[steps]: global norm of the gradient, before clipping
    # float32[steps]: cross entropy in nats per character, before the step
    losses: np.ndarray
    # norm of the first clipped gradient, measured in NumPy on all that the devices hold
    clipped_norm: float
    # the same with optax's clipper, or the exception that it leads to
    optax_norm: float | str


def main(steps: int = 50) -> list[Row]:
    """Trains in all ways, prints the table, and returns it. The first row is the run on
    one device.
    """
    text, alphabet = read_text()
    starts = np.random.default_rng(SEED + 1).integers(
        len(text) - LENGTH, size=(steps, BATCH, 1)
    )
    batches = text[starts + np.arange(LENGTH + 1)]
    model = new_model(len(alphabet))
    print(
        f"{sum(leaf.size for leaf in jax.tree.leaves(model))} weights in "
        f"{len(jax.tree.leaves(model))} leaves, limit {MAX_NORM}, {steps} steps"
    )
    rows = [
        train(mode, start, mesh_axes, model, batches)
        for mode, (start, mesh_axes) in MODES.items()
    ]
    print_table(rows)
    return rows


def read_text() -> tuple[np.ndarray, str]:
    """The help pages as prose, without what is no word: the numbers of its characters,
    and the alphabet.
    """
    words = " ".join(dict.fromkeys("\n\n".join(topics.values()).split("\n\n"))).split()
    prose = " ".join(
        word for word in words if word.isascii() and word.strip("().,:;").isalpha()
    )
    alphabet, numbers = np.unique(np.array(list(prose)), return_inverse=True)
    return numbers.astype(np.int32), "".join(alphabet)


def new_model(characters: int) -> dict[str, Any]:
    """Weights of a transformer with RMS norms before attention and perceptron."""
    random = np.random.default_rng(SEED)

    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / math.sqrt(WIDTH), jnp.float32)

    def block() -> dict[str, jax.Array]:
        attention = {
            "attention_scale": jnp.ones(WIDTH),
            "query_key_value": matrix(WIDTH, 3 * WIDTH),
            "project": matrix(WIDTH, WIDTH),
        }
        return attention | {
            "perceptron_scale": jnp.ones(WIDTH),
            "widen": matrix(WIDTH, 4 * WIDTH),
            "narrow": 0.5 * matrix(4 * WIDTH, WIDTH),
        }

    ends = {
        "embedding": matrix(characters, WIDTH),
        "position": matrix(LENGTH, WIDTH),
        "scale": jnp.ones(WIDTH),
        "readout": matrix(WIDTH, characters),
    }
    return ends | {"blocks": [block() for _ in range(BLOCKS)]}


def mean_loss(model: dict[str, Any], windows: jax.Array) -> jax.Array:
    """Cross entropy, in nats, of every character of int[batch, LENGTH + 1] but the
    first, given those before it.
    """
    x = model["embedding"][windows[:, :-1]] + model["position"]
    for block in model["blocks"]:
        heads = (
            normalized(x, block["attention_scale"]) @ block["query_key_value"]
        ).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        seen = jax.nn.dot_product_attention(
            heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True
        )
        x = x + seen.reshape(x.shape) @ block["project"]
        x = (
            x
            + jax.nn.gelu(normalized(x, block["perceptron_scale"]) @ block["widen"])
            @ block["narrow"]
        )
    logits = normalized(x, model["scale"]) @ model["readout"]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, windows[:, 1:]
    ).mean()


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def new_optimizer(clipper: Any) -> Any:
    return optax.chain(clipper, optax.sgd(LEARNING_RATE, momentum=MOMENTUM))


def one_device(clipper: Any, model: Any) -> Run:
    """What all others are held against."""
    optimizer = new_optimizer(clipper)

    def step(model: Any, state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(mean_loss)(model, windows)
        updates, state = optimizer.update(gradient, state, model)
        return optax.apply_updates(model, updates), state, loss

    return Run(jax.jit(step), model, optimizer.init(model))


def jit_fsdp(clipper: Any, model: Any) -> Run:
    """The step of one device, with the arrays split. Nothing in it says so but the
    layout of the batch.
    """
    optimizer, mesh = new_optimizer(clipper), new_mesh()

    def step(model: Any, state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array]:
        windows = lax.with_sharding_constraint(windows, NamedSharding(mesh, P(AXIS)))
        loss, gradient = jax.value_and_grad(mean_loss)(model, windows)
        updates, state = optimizer.update(gradient, state, model)
        return optax.apply_updates(model, updates), state, loss

    start = model, optimizer.init(model)
    model, state = placed(start, mesh, jax.tree.map(spec, start))
    layout = jax.tree.map(lambda leaf: leaf.sharding, (model, state))
    return Run(
        jax.jit(step, out_shardings=(*layout, NamedSharding(mesh, P()))), model, state
    )


def shard_map_fsdp(clipper: Any, model: Any) -> Run:
    """The loss is averaged inside the differentiated function: then the gradient of a
    gathered leaf is scattered, and that of a replicated one summed, by itself.
    """
    optimizer, mesh = new_optimizer(clipper), new_mesh()
    start = model, optimizer.init(model)
    specs = jax.tree.map(spec, start)

    def step(shards: Any, state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_of(shards: Any) -> jax.Array:
            return lax.pmean(
                mean_loss(jax.tree.map(gathered, shards, specs[0]), windows), AXIS
            )

        loss, gradient = jax.value_and_grad(loss_of)(shards)
        updates, state = optimizer.update(gradient, state, shards)
        return optax.apply_updates(shards, updates), state, loss

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(*specs, P(AXIS)), out_specs=(*specs, P())
    )
    return Run(jax.jit(mapped), *placed(start, mesh, specs))


def pmap_replicated(clipper: Any, model: Any) -> Run:
    """The gradients are averaged first, so that every device clips the same ones."""
    optimizer = new_optimizer(clipper)

    def step(model: Any, state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradient = lax.pmean(jax.value_and_grad(mean_loss)(model, windows), AXIS)
        updates, state = optimizer.update(gradient, state, model)
        return optax.apply_updates(model, updates), state, loss

    mapped = jax.pmap(
        step,
        AXIS,
        in_axes=(None, None, 0),
        out_axes=None,
        devices=jax.devices()[:DEVICES],
    )
    return Run(
        lambda model, state, windows: mapped(model, state, parts(windows)),
        *placed((model, optimizer.init(model)), new_mesh(), P()),
    )


def pmap_zero(clipper: Any, model: Any) -> Run:
    """Each device gets an eighth of the averaged gradient, clips it as a part of the
    whole, keeps that part's momentum and updates that part of the weights.
    """
    optimizer = new_optimizer(clipper)

    def init(_: jax.Array, model: Any) -> Any:
        return optimizer.init(jax.tree.map(own_part, model))

    def step(model: Any, state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(mean_loss)(model, windows)
        gradient = jax.tree.map(
            lambda leaf: lax.psum_scatter(rows(leaf), AXIS) / DEVICES, gradient
        )
        shards = jax.tree.map(own_part, model)
        updates, state = optimizer.update(gradient, state, shards)
        return (
            jax.tree.map(whole, optax.apply_updates(shards, updates), model),
            state,
            lax.pmean(loss, AXIS),
        )

    mapping = functools.partial(
        jax.pmap, axis_name=AXIS, devices=jax.devices()[:DEVICES]
    )
    mapped = mapping(step, in_axes=(None, 0, 0), out_axes=(None, 0, None))
    state = mapping(init, in_axes=(0, None))(
        np.arange(DEVICES), model
    )  # pmap wants something to map over
    return Run(
        lambda model, state, windows: mapped(model, state, parts(windows)),
        placed(model, new_mesh(), P()),
        state,
    )


MODES = {
    "one device": (one_device, "auto"),
    "jit": (jit_fsdp, "auto"),
    "shard_map": (shard_map_fsdp, "auto"),
    "pmap": (pmap_replicated, "auto"),
    "pmap, ZeRO": (pmap_zero, AXIS),
}


def new_mesh() -> Mesh:
    return jax.make_mesh(
        (DEVICES,),
        (AXIS,),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:DEVICES],
    )


def spec(leaf: Any) -> P:
    """A matrix is split along the first dimension that the devices divide. Vectors, and
    the scalars of the clipper's state, are replicated.
    """
    if leaf.ndim < 2:
        return P()
    split = next(
        dimension for dimension, size in enumerate(leaf.shape) if size % DEVICES == 0
    )
    return P(*[None] * split, AXIS)


def placed(tree: Any, mesh: Mesh, specs: Any) -> Any:
    return jax.device_put(
        tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    )


def gathered(shard: jax.Array, spec: P) -> jax.Array:
    return (
        lax.all_gather(shard, AXIS, axis=spec.index(AXIS), tiled=True)
        if AXIS in spec
        else shard
    )


def parts(windows: Any) -> Any:
    return windows.reshape(DEVICES, -1, *windows.shape[1:])


def rows(leaf: jax.Array) -> jax.Array:
    """A leaf as one row for each device, filled up with zeros."""
    return jnp.pad(leaf.ravel(), (0, -leaf.size % DEVICES)).reshape(DEVICES, -1)


def own_part(leaf: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(rows(leaf), lax.axis_index(AXIS), keepdims=False)


def whole(part: jax.Array, leaf: jax.Array) -> jax.Array:
    """The parts of all devices in the shape of `leaf`."""
    return lax.all_gather(part, AXIS, tiled=True)[: leaf.size].reshape(leaf.shape)


def train(
    mode: str,
    start: Callable[..., Run],
    mesh_axes: Any,
    model: Any,
    batches: np.ndarray,
) -> Row:
    """One run from the common seed, with optax's clipper looking on. Where that is not
    possible, one without it.
    """
    clipper = optaxclip.clip_by_global_norm(MAX_NORM, mesh_axes=mesh_axes)
    try:
        seen, first = follow(
            start(
                optax.chain(beside(optax.clip_by_global_norm(MAX_NORM)), clipper), model
            ),
            batches,
        )
        optax_norm = norm_of(optax.tree.get(first, "would_be"))
    except ValueError as error:
        seen, first = follow(start(clipper, model), batches)
        optax_norm = f"raises {type(error).__name__}"
    norms, losses = np.array(seen, np.float32).T
    # After the first step the momentum is the clipped gradient itself.
    return Row(
        mode,
        repr(mesh_axes),
        norms,
        losses,
        norm_of(optax.tree.get(first, "trace")),
        optax_norm,
    )


def follow(run: Run, batches: np.ndarray) -> tuple[list[Any], Any]:
    """Gradient norm and loss of every step, and the optimizer's state after the
    first.
    """
    model, state, seen, first = run.model, run.state, [], None
    for windows in batches:
        model, state, loss = run.step(model, state, windows)
        first = first or state
        seen.append((np.ravel(optax.tree.get(state, "norm"))[0], np.asarray(loss)))
    return seen, first


def beside(clipper: Any) -> optax.GradientTransformation:
    """Keeps what a clipper would make of the updates and hands them on as they are, so
    that two clippers see the same gradient of one program.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Onlooker]:
        return updates, Onlooker(clipper.update(updates, clipper.init(updates))[0])

    return optax.GradientTransformation(
        lambda params: Onlooker(optax.tree.zeros_like(params)), update
    )


def norm_of(tree: Any) -> float:
    """The global norm in float64, of all that the devices hold."""
    return math.sqrt(
        sum(
            np.square(np.asarray(leaf, np.float64)).sum()
            for leaf in jax.tree.leaves(tree)
        )
    )


def print_table(rows: list[Row]) -> None:
    print(
        f"\n{'':24} {'gradient norm':>19}   {'loss':>17}   "
        f"{'apart from one device':>21}   first gradient clipped to"
    )
    print(
        f"{'mode':11} {'mesh_axes':12} {'first':>9} {'last':>9}   {'first':>8} "
        f"{'last':>8}   {'norms':>10} {'losses':>10}   {'optaxclip':>9}  optax"
    )
    for row in rows:
        norms, losses = (
            apart(row.norms, rows[0].norms),
            apart(row.losses, rows[0].losses),
        )
        curves = (
            f"{row.norms[0]:9.6f} {row.norms[-1]:9.6f}   "
            f"{row.losses[0]:8.6f} {row.losses[-1]:8.6f}   {norms:10.1e} {losses:10.1e}"
        )
        optax_norm = row.optax_norm
        if not isinstance(optax_norm, str):
            optax_norm = f"{optax_norm:.6f}"
        clipped = f"{row.clipped_norm:9.6f}  {optax_norm}"
        print(f"{row.mode:11} {row.mesh_axes:12} {curves}   {clipped}")


def apart(curve: np.ndarray, reference: np.ndarray) -> float:
    """The largest relative difference at any step."""
    return float(np.max(np.abs(curve / reference - 1)))


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=50,
        help="how many steps to train (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
