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
from typing import Any, NamedTuple

import jax
import numpy as np
from _shared import run
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

PROCESSES = 2
DEVICES_EACH = 2
AXIS = "devices"
MAX_NORM = 1.0
SHAPES = {"embedding": (6, 12), "weight": (8, 5), "scale": (5,)}
SPECS = {"embedding": P(None, AXIS), "weight": P(AXIS, None), "scale": P()}

Gradients = dict[str, Any]  # a jax.Array or a np.ndarray for each name


class Report(NamedTuple):
    """What a process saw of one clip."""

    norm_before: float
    norm_after: float
    digest: str  # of the bits of the clipped gradients


def main() -> list[dict[str, Report]]:
    """Starts the processes, and prints and returns the report of each mode."""
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
            report = modes[mode]
            print(
                f"{mode:17}  {process:7}  {report.norm_before:11.7f}  "
                f"{report.norm_after:10.7f}  {report.digest}"
            )
            if report != first:
                raise RuntimeError(f"{mode}: the processes saw different things")
    return reports


def one_process(process: int, port: int) -> dict[str, Report]:
    """Does in each process the same as in the other, on its own devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES_EACH)
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)
    reports = {}
    for clip in (clip_in_jit, clip_in_shard_map, clip_in_pmap):
        gradients, norm_before = clip()
        reports[clip.__name__] = report_of(gradients, norm_before)
    jax.distributed.shutdown()
    return reports


def new_gradients() -> Gradients:
    random = np.random.default_rng(0)
    gradients = {}
    for name, shape in SHAPES.items():
        gradients[name] = random.normal(size=shape).astype("float32")
    return gradients


def clip_in_jit() -> tuple[Gradients, Array]:
    """Arrays know how they are split, and XLA adds the communication."""
    return replicated(jax.jit(clipped)(split_gradients()))


def clip_in_shard_map() -> tuple[Gradients, Array]:
    """Every device sees its part. Types tell the clipper which leaves are parts."""
    clip = jax.shard_map(clipped, in_specs=(SPECS,), out_specs=(SPECS, P()))
    with jax.set_mesh(new_mesh()):
        return replicated(jax.jit(clip)(split_gradients()))


def clip_in_pmap() -> tuple[Gradients, Array]:
    """Every device has gradients of its own, which are averaged and then clipped."""
    # A process passes only the gradients of its devices.
    factors = np.array([[0.5, 1.5], [0.25, 1.75]], np.float32)[jax.process_index()]
    gradients = new_gradients()
    for name, leaf in gradients.items():
        gradients[name] = np.multiply.outer(factors, leaf)
    clip = jax.pmap(lambda x: clipped(jax.lax.pmean(x, AXIS)), AXIS, out_axes=None)
    return clip(gradients)


def clipped(gradients: Gradients) -> tuple[Any, Any]:
    """The clipped gradients, and the norm before."""
    clipper = optaxclip.clip_by_global_norm(MAX_NORM)
    updates, state = clipper.update(gradients, clipper.init(gradients))
    return updates, optaxclip.metrics(state)["clip/norm_before"]


def new_mesh() -> jax.sharding.Mesh:
    """All devices of all processes."""
    size = PROCESSES * DEVICES_EACH
    return jax.make_mesh((size,), (AXIS,), axis_types=(AxisType.Auto,))


def split_gradients() -> Gradients:
    """Every process places its part on its devices."""
    mesh = new_mesh()
    gradients = {}
    for name, leaf in new_gradients().items():
        sharding = NamedSharding(mesh, SPECS[name])
        gradients[name] = jax.make_array_from_callback(
            leaf.shape, sharding, leaf.__getitem__
        )
    return gradients


def replicated(tree: Any) -> Any:
    """The same arrays, all of each on every device."""
    everywhere = NamedSharding(new_mesh(), P())
    return jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)


def report_of(gradients: Gradients, norm_before: Array) -> Report:
    leaves = [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(gradients)]
    square = sum(np.square(leaf, dtype=np.float64).sum() for leaf in leaves)
    bits = b"".join(leaf.tobytes() for leaf in leaves)
    return Report(
        norm_before=float(norm_before.addressable_data(0)),
        norm_after=float(np.sqrt(square)),
        digest=hashlib.sha256(bits).hexdigest()[:16],
    )


if __name__ == "__main__":
    run(main)
