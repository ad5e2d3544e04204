"""The table: which steps are compiled for which devices, each target in a process of
its own.
"""

import json
import os
import subprocess
import sys
from typing import Any

from ..report import Table
from . import step, targets

COLUMNS = (
    "device",
    "model",
    "gradients",
    "clipped by",
    "kernels",
    "scalars",
    "GB",
    "collectives",
    "float64",
    "temporary",
    "state",
    "compile",
)
SPECTRAL = "spectral norm, Newton-Schulz"
EVERY = [name for name in step.STEPS if name != SPECTRAL]
MAIN = [
    "none",
    "global norm",
    "optax, global norm",
    "tensor RMS",
    "optax, tensor RMS",
    "AGC",
    "optax, AGC",
]
SMALL = ["none", "global norm", "optax, global norm"]
# Of each target: model, dtypes of the gradients, steps.
CASES: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "h100": [
        ("GPT-2 small", ["float32"], EVERY),
        ("GPT-2 small", ["bfloat16"], MAIN),
        ("actor and critic", ["float32"], SMALL),
    ],
    "h100:8": [("GPT-2, 4 layers", ["float32", "bfloat16"], MAIN)],
    "v5e": [
        ("GPT-2 small", ["float32"], EVERY),
        ("GPT-2 small", ["bfloat16"], MAIN),
        ("GPT-2, 2 layers", ["float32"], [SPECTRAL]),
    ],
    "v5e:4x4": [
        ("GPT-2 small", ["float32"], EVERY),
        ("GPT-2 small", ["bfloat16"], MAIN),
    ],
}
QUICK = [("toy", ["float32"], SMALL)]


def table(quick: bool) -> Table:
    """One row for each step on each device. Devices without an environment are left
    out, and the note says how to make it.
    """
    rows, missing = [], {}
    for target, cases in CASES.items():
        environment = targets.environment_of(target)
        python = environment.python()
        if python is None:
            missing[environment.how_to_make()] = None
            continue
        rows += rows_of(target, QUICK if quick else cases, python)
    note = "Compiled for devices that are only described: nothing ran."
    note += "".join(f" To see more devices: `{line}`." for line in missing)
    return Table("an Adam step on GPUs and TPUs, compiled", COLUMNS, rows, note)


def rows_of(target: str, cases: Any, python: str) -> list[dict[str, Any]]:
    """The rows of one target, from a process with its packages."""
    wanted = []
    for model, dtypes, names in cases:
        wanted += [(name, model, target, dtype) for dtype in dtypes for name in names]
    variables = targets.environment_of(target).variables
    known = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        [python, "-m", "benchmarks.compiled"],
        cwd=targets.ROOT,
        env=os.environ | known | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(wanted))
    process.stdin.close()
    rows = []
    for line in process.stdout:
        rows.append(json.loads(line))
        print(f"compiled: {_shown(rows[-1])}", file=sys.stderr, flush=True)
    if process.wait():
        raise RuntimeError(f"compiling for {target} failed, see the text above")
    return rows


def _shown(row: dict[str, Any]) -> str:
    return ", ".join(str(row[column]) for column in COLUMNS)
