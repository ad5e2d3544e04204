"""Clips the same gradients in two processes, as on two machines, and checks that both
did the same.

What it shows. With `jax.distributed` every process runs the same program and holds only
its part of the arrays. If the processes measured different norms, they would clip by
different factors, and weights that ought to be the same would drift apart without a
word. Here two processes with two devices each clip under jit with sharded arrays, in a
typed shard_map, and in pmap after the gradients are averaged. No mode needs an argument
that says how many processes there are.

How long it takes. About ten seconds: two processes start JAX. They find each other on
the loopback interface and talk through gloo, as JAX does on CPU.

What it prints. For each mode and process the norm that the clipper measured, the norm
of what it let through, and a digest of the clipped gradients: two equal digests are
equal bits. The process that started them raises if they differ.

    python examples/multi_process.py
"""

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

PROCESSES, DEVICES_EACH, AXIS, MAX_NORM = 2, 2, "devices", 1.0
DEVICES = PROCESSES * DEVICES_EACH

Seen = dict[str, dict[str, Any]]  # by mode: "norm_before", "norm_after" and "digest"


def main(timeout: float = 300.0) -> list[Seen]:
    """Starts the processes, prints what each saw, and returns it.

    Raises:
      RuntimeError: a process failed, with what it wrote, or they saw different things.
        TimeoutError: they were not done in `timeout` seconds.
    """
    seen = [json.loads(line) for line in run_processes(timeout)]
    print(
        "mode       process  norm before   norm after  digest of the clipped gradients"
    )
    for mode in seen[0]:
        for process, modes in enumerate(seen):
            found = modes[mode]
            print(
                f"{mode:9}  {process:7}  {found['norm_before']:11.7f}  "
                f"{found['norm_after']:11.7f}  {found['digest']}"
            )
        if any(modes[mode] != seen[0][mode] for modes in seen):
            raise RuntimeError(
                f"{mode}: the processes saw different things, "
                f"{[modes[mode] for modes in seen]}"
            )
    return seen


def run_processes(timeout: float) -> list[str]:
    """The last line that each process wrote. When one fails or time is up, all are
    stopped.
    """
    deadline, port = time.monotonic() + timeout, free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [
            Path(folder, f"{process}.{stream}")
            for process in range(PROCESSES)
            for stream in ("out", "err")
        ]
        children = [
            start(process, port, *logs[2 * process : 2 * process + 2])
            for process in range(PROCESSES)
        ]
        try:
            while any(child.poll() is None for child in children):
                failed = [
                    process for process, child in enumerate(children) if child.poll()
                ]
                if failed or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            check(children, logs[1::2], timeout)
        finally:
            for child in children:
                child.kill()
                child.wait()
        return [log.read_text().splitlines()[-1] for log in logs[::2]]


def start(process: int, port: int, out: Path, err: Path) -> subprocess.Popen[bytes]:
    """One process, with files for what it writes: a pipe that nobody empties would stop
    it.
    """
    flags = f"--xla_force_host_platform_device_count={DEVICES_EACH}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, __file__, "--process", str(process), "--port", str(port)]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )


def check(
    children: list[subprocess.Popen[bytes]], errors: list[Path], timeout: float
) -> None:
    """Raises unless all processes ended well."""
    codes = [child.poll() for child in children]
    if not any(code is None or code for code in codes):
        return
    written = "\n".join(
        f"--- process {process}, exit code {code}\n{log.read_text()[-4000:]}"
        for process, (code, log) in enumerate(zip(codes, errors))
    )
    if any(codes):
        raise RuntimeError(f"a process failed:\n{written}")
    raise TimeoutError(
        f"the processes were not done in {timeout:g} seconds:\n{written}"
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def one_process(process: int, port: int) -> Seen:
    """What a process does: the same as the other, on its own devices."""
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)
    seen = {
        mode: described(*clip())
        for mode, clip in {
            "jit": clip_in_jit,
            "shard_map": clip_in_shard_map,
            "pmap": clip_in_pmap,
        }.items()
    }
    jax.distributed.shutdown()
    return seen


def new_gradients() -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients in NumPy, of which every process places its part on its devices, and
    how they are split: along the first dimension, the last, and not at all.
    """
    random = np.random.default_rng(0)
    shapes = {"embedding": (6, 12), "weight": (8, 5), "scale": (5,)}
    specs = {"embedding": P(None, AXIS), "weight": P(AXIS, None), "scale": P()}
    return {
        name: random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }, specs


def clip_in_jit() -> tuple[Any, Any]:
    """Arrays know how they are split, and XLA adds the communication."""
    mesh, gradients, _ = on_devices()
    return whole(jax.jit(clipped)(gradients), mesh)


def clip_in_shard_map() -> tuple[Any, Any]:
    """Every device sees its part. Types tell the clipper which leaves are parts."""
    mesh, gradients, specs = on_devices()
    return whole(
        jax.jit(
            jax.shard_map(clipped, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()))
        )(gradients),
        mesh,
    )


def clip_in_pmap() -> tuple[Any, Any]:
    """Every device has gradients of its own, which are averaged and then clipped. A
    process hands in those of its devices only.
    """
    gradients, _ = new_gradients()
    first = jax.process_index() * DEVICES_EACH
    shares = np.array([0.5, 1.5, 0.25, 1.75], np.float32)[first : first + DEVICES_EACH]
    own = {
        name: np.stack([share * leaf for share in shares])
        for name, leaf in gradients.items()
    }
    return jax.pmap(
        lambda gradients: clipped(jax.lax.pmean(gradients, AXIS)), AXIS, out_axes=None
    )(own)


def clipped(gradients: Any) -> tuple[Any, Any]:
    """The clipped gradients, and the norm before."""
    clipper = optaxclip.clip_by_global_norm(MAX_NORM)
    updates, state = clipper.update(gradients, clipper.init(gradients))
    return updates, optaxclip.metrics(state)["clip/norm_before"]


def on_devices() -> tuple[Mesh, Any, Any]:
    """A mesh of all devices of all processes, the gradients on it, and how they are
    split.
    """
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))
    gradients, specs = new_gradients()
    placed = {
        name: jax.make_array_from_callback(
            leaf.shape,
            NamedSharding(mesh, specs[name]),
            lambda index, leaf=leaf: leaf[index],
        )
        for name, leaf in gradients.items()
    }
    return mesh, placed, specs


def whole(tree: Any, mesh: Mesh) -> Any:
    """The same arrays with all of each on every device. What was replicated stays where
    it is, so that a process sees its own copy.
    """
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(tree)


def described(gradients: Any, norm: Any) -> dict[str, Any]:
    """What this process holds, on each of its devices, in a few numbers."""
    copies = [
        [
            np.asarray(leaf.addressable_data(device))
            for leaf in jax.tree.leaves((gradients, norm))
        ]
        for device in range(DEVICES_EACH)
    ]
    digests = [
        hashlib.sha256(b"".join(leaf.tobytes() for leaf in copy)).hexdigest()[:16]
        for copy in copies
    ]
    if len(set(digests)) > 1:
        raise RuntimeError(
            f"the devices of one process hold different things, {digests}"
        )
    *leaves, norm = copies[0]
    after = np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in leaves))
    return {
        "norm_before": float(norm),
        "norm_after": float(after),
        "digest": digests[0],
    }


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--process",
        type=int,
        help="used by the program itself: which of the processes this is "
        "(default: the one that starts them)",
    )
    parser.add_argument(
        "--port",
        type=int,
        help="used by the program itself: where the processes meet (default: a "
        "free port)",
    )
    return parser


if __name__ == "__main__":
    options = command_line().parse_args()
    if options.process is None:
        main()
    else:
        print(json.dumps(one_process(options.process, options.port)))
