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

import argparse
import hashlib
import multiprocessing
import socket
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
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
# For each process, what the gradients of its devices are multiplied by in pmap. The
# mean is 1.
FACTORS = np.array([[0.5, 1.5], [0.25, 1.75]], np.float32)

Gradients = dict[str, Any]  # an Array or a np.ndarray for each name


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
        tasks = []
        for process in range(PROCESSES):
            task = pool.submit(one_process, process, port)
            tasks.append(task)
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
        gradient = random.normal(size=shape)
        gradients[name] = gradient.astype("float32")
    return gradients


def clip_in_jit() -> tuple[Gradients, Array]:
    """Arrays know how they are split, and XLA adds the communication."""
    gradients = split_gradients()
    result = jax.jit(clipped)(gradients)
    return replicated(result)


def clip_in_shard_map() -> tuple[Gradients, Array]:
    """Every device sees its part. Types tell the clipper which leaves are parts."""
    in_specs = (SPECS,)
    out_specs = SPECS, P()
    clip = jax.shard_map(clipped, in_specs=in_specs, out_specs=out_specs)
    gradients = split_gradients()
    with jax.set_mesh(new_mesh()):
        result = jax.jit(clip)(gradients)
        return replicated(result)


def clip_in_pmap() -> tuple[Gradients, Array]:
    """Every device has gradients of its own, which are averaged and then clipped."""
    # A process passes only the gradients of its devices.
    process = jax.process_index()
    factors = FACTORS[process]
    gradients = new_gradients()
    for name, leaf in gradients.items():
        gradients[name] = np.multiply.outer(factors, leaf)

    def clip(gradients: Gradients) -> tuple[Any, Any]:
        means = jax.lax.pmean(gradients, AXIS)
        return clipped(means)

    return jax.pmap(clip, AXIS, out_axes=None)(gradients)


def clipped(gradients: Gradients) -> tuple[Any, Any]:
    """The clipped gradients, and the norm before."""
    clipper = optaxclip.clip_by_global_norm(MAX_NORM)
    state = clipper.init(gradients)
    updates, state = clipper.update(gradients, state)
    report = optaxclip.metrics(state)
    return updates, report["clip/norm_before"]


def new_mesh() -> jax.sharding.Mesh:
    """All devices of all processes."""
    size = PROCESSES * DEVICES_EACH
    axis_types = (AxisType.Auto,)
    return jax.make_mesh((size,), (AXIS,), axis_types)


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
    copy = jax.jit(lambda tree: tree, out_shardings=everywhere)
    return copy(tree)


def report_of(gradients: Gradients, norm_before: Array) -> Report:
    digest = hashlib.sha256()
    square = 0.0
    for gradient in jax.tree.leaves(gradients):
        leaf = np.asarray(gradient.addressable_data(0))
        squares = np.square(leaf, dtype=np.float64)
        square += squares.sum()
        digest.update(leaf.tobytes())
    text = digest.hexdigest()
    norm = norm_before.addressable_data(0)
    return Report(
        norm_before=float(norm), norm_after=float(np.sqrt(square)), digest=text[:16]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    main()
