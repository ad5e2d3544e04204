"""Clips the same gradients in two processes, as on two machines, and checks that both
did the same.

What it shows. With `jax.distributed` every process runs the same program and holds only
its part of the arrays. If the processes measured different norms, weights that ought to
be the same would drift apart without a word. Here two processes with two devices each
clip under jit with sharded arrays, in a typed shard_map, and in pmap after gradients
are averaged. No mode needs an argument that says how many processes there are.

What it prints. For each mode and process the norm before the clip, the norm after it,
and a digest of the clipped bits. It raises if processes differ.

    python examples/multi_process.py
"""

import hashlib
import multiprocessing
import socket
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import numpy as np
from _shared import run
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

PROCESSES, DEVICES_EACH, AXIS, MAX_NORM = 2, 2, "devices", 1.0
SHAPES = {"embedding": (6, 12), "weight": (8, 5), "scale": (5,)}
SPECS = {"embedding": P(None, AXIS), "weight": P(AXIS, None), "scale": P()}

Report = dict[str, tuple[float, float, str]]  # of each mode: two norms and a digest


def main() -> list[Report]:
    """Starts the processes, prints what each saw, and returns it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, context) as pool:
        tasks = [pool.submit(one_process, n, port) for n in range(PROCESSES)]
        reports = [task.result() for task in tasks]
    print("mode               process  norm before  norm after  digest")
    for mode, first in reports[0].items():
        for process, modes in enumerate(reports):
            before, after, digest = modes[mode]
            print(f"{mode:17}  {process:7}  {before:11.7f}  {after:10.7f}  {digest}")
            if modes[mode] != first:
                raise RuntimeError(f"{mode}: the processes saw different things")
    return reports


def one_process(process: int, port: int) -> Report:
    """Does in each process the same as in the other, on its own devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES_EACH)
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)
    modes = clip_in_jit, clip_in_shard_map, clip_in_pmap
    reports = {clip.__name__: described(*clip()) for clip in modes}
    jax.distributed.shutdown()
    return reports


def new_gradients() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=SHAPES[name]).astype("float32") for name in SHAPES}


def clip_in_jit() -> Any:
    """Arrays know how they are split, and XLA adds the communication."""
    return replicated(jax.jit(clipped)(on_devices()))


def clip_in_shard_map() -> Any:
    """Every device sees its part. Types tell the clipper which leaves are parts."""
    split = jax.shard_map(clipped, in_specs=(SPECS,), out_specs=(SPECS, P()))
    with jax.set_mesh(new_mesh()):
        return replicated(jax.jit(split)(on_devices()))


def clip_in_pmap() -> Any:
    """Every device has gradients of its own, which are averaged and then clipped."""
    # A process passes only the gradients of its devices.
    shares = np.array([[0.5, 1.5], [0.25, 1.75]], np.float32)[jax.process_index()]
    gradients = new_gradients()
    gradients = {name: np.multiply.outer(shares, x) for name, x in gradients.items()}
    clip = jax.pmap(lambda x: clipped(jax.lax.pmean(x, AXIS)), AXIS, out_axes=None)
    return clip(gradients)


def clipped(gradients: Any) -> tuple[Any, Any]:
    """The clipped gradients, and the norm before."""
    clipper = optaxclip.clip_by_global_norm(MAX_NORM)
    updates, state = clipper.update(gradients, clipper.init(gradients))
    return updates, optaxclip.metrics(state)["clip/norm_before"]


def new_mesh() -> jax.sharding.Mesh:
    """Of all devices of all processes."""
    size = PROCESSES * DEVICES_EACH
    return jax.make_mesh((size,), (AXIS,), axis_types=(AxisType.Auto,))


def on_devices() -> Any:
    """The gradients. Every process places its part on its devices."""

    def place(leaf: np.ndarray, spec: P) -> jax.Array:
        split = NamedSharding(new_mesh(), spec)
        return jax.make_array_from_callback(leaf.shape, split, leaf.__getitem__)

    return jax.tree.map(place, new_gradients(), SPECS)


def replicated(tree: Any) -> Any:
    """The same arrays, whole on every device."""
    everywhere = NamedSharding(new_mesh(), P())
    return jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)


def described(gradients: Any, norm: Any) -> tuple[float, float, str]:
    leaves = [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(gradients)]
    after = np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in leaves))
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
    return float(norm.addressable_data(0)), float(after), digest[:16]


if __name__ == "__main__":
    run(main)
