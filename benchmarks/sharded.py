"""The norm and the clip on several devices: in a typed shard_map, where one collective
serves all leaves, against jit on the same mesh, where XLA adds them.

Another process measures, since the number of devices must be set before JAX starts and
would change every other table. Its devices are virtual, parts of one CPU: what is seen
is the cost of starting many small collectives, not of a network.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

from . import models, timing
from .report import Table

PARAMETERS, AXIS = 2**22, "devices"
DEVICES, LEAVES = (4, 8), (8, 64, 512)
MOST = max(DEVICES)


def table(quick: bool) -> Table:
    """One row for each number of devices and of leaves."""
    return Table(
        "norm and clip_by_global_norm alone, jitted, every leaf split over all "
        "devices, float32",
        (
            "devices",
            "leaves",
            "norm",
            "clip",
            "clip, jit",
            "all-reduces",
            "all-reduces, jit",
            "all-reduces, optax",
        ),
        _rows_of_another_process(quick),
        "norm, clip: optaxclip in a typed shard_map against optax under jit. Clip, "
        "jit: both under jit. All-reduces of the compiled clip, as calls x operands."
        f" {2**14 if quick else PARAMETERS:,} parameters on virtual devices of one "
        "CPU. Calls of one operand under jit stand in branches that are only"
        " run where the squares of a large leaf have left the range of float32.",
    )


def measure(quick: bool) -> None:
    """What the other process does: prints the rows as JSON."""
    sizes = (
        [(2, 2)]
        if quick
        else [(devices, leaves) for devices in DEVICES for leaves in LEAVES]
    )
    print(json.dumps([_row(devices, leaves, quick) for devices, leaves in sizes]))


def _rows_of_another_process(quick: bool) -> list[dict[str, Any]]:
    given = os.environ.get("XLA_FLAGS", "")
    flags = f"{given} --xla_force_host_platform_device_count={MOST}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    program = f"from benchmarks import sharded; sharded.measure({quick})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the process that measures failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _row(devices: int, leaves: int, quick: bool) -> dict[str, Any]:
    mesh = jax.make_mesh(
        (devices,),
        (AXIS,),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    tree = models.equal_leaves(2**14 if quick else PARAMETERS, leaves)
    grads = jax.device_put(models.normal(tree), NamedSharding(mesh, P(AXIS)))
    programs = {
        name: jax.jit(function).lower(grads).compile()
        for name, function in _functions(mesh).items()
    }
    seconds = timing.race(
        {name: _contestant(program, grads) for name, program in programs.items()},
        2 if quick else 9,
    )
    return {
        "devices": devices,
        "leaves": leaves,
        "norm": timing.ratio(seconds["norm, shard_map"], seconds["norm, optax"]),
        "clip": timing.ratio(seconds["clip, shard_map"], seconds["clip, optax"]),
        "clip, jit": timing.ratio(seconds["clip, jit"], seconds["clip, optax"]),
        "all-reduces": _all_reduces(programs["clip, shard_map"]),
        "all-reduces, jit": _all_reduces(programs["clip, jit"]),
        "all-reduces, optax": _all_reduces(programs["clip, optax"]),
        "seconds": seconds,
    }


def _functions(mesh: Mesh) -> dict[str, Callable[[Any], Any]]:
    def clip(clipper: Any) -> Callable[[Any], Any]:
        return lambda grads: clipper.update(grads, clipper.init(grads))[0]

    ours = clip(optaxclip.clip_by_global_norm(1.0))
    return {
        "norm, shard_map": jax.shard_map(
            optaxclip.global_norm, mesh=mesh, in_specs=P(AXIS), out_specs=P()
        ),
        "norm, optax": optax.tree.norm,
        "clip, shard_map": jax.shard_map(
            ours, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)
        ),
        "clip, jit": ours,
        "clip, optax": clip(optax.clip_by_global_norm(1.0)),
    }


def _contestant(program: Callable[[Any], Any], grads: Any) -> timing.Contestant:
    calls = 5  # one is too short to be timed

    def run() -> Any:
        for _ in range(calls):
            last = jax.block_until_ready(program(grads))
        return last

    return timing.Contestant(run, calls=calls)


def _all_reduces(program: Any) -> str:
    """The collectives of a compiled program, as `calls x operands of each`."""
    operands = [
        len(found.split(","))
        for found in re.findall(r" all-reduce(?:-start)?\((.*?)\)", program.as_text())
    ]
    return " + ".join(
        f"{operands.count(width)} x {width}" for width in sorted(set(operands))
    )
