"""The table: which steps are compiled for which devices, each target in a process of
its own.
"""

import sys
from typing import Any

from ..report import Table
from . import processes, step

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
        ("Llama 3 8B, 1 layer", ["float32"], MAIN),
        ("actor and critic", ["float32"], SMALL),
    ],
    "h100:8": [("GPT-2, 4 layers", ["float32", "bfloat16"], MAIN)],
    "v5e": [
        ("GPT-2 small", ["float32"], EVERY),
        ("GPT-2 small", ["bfloat16"], MAIN),
        ("Llama 3 8B, 1 layer", ["float32"], MAIN),
        ("GPT-2, 2 layers", ["float32"], [SPECTRAL]),
    ],
    "v5e:4x4": [
        ("GPT-2 small", ["float32"], EVERY),
        ("GPT-2 small", ["bfloat16"], MAIN),
        ("Llama 3 8B, 1 layer", ["float32"], MAIN),
    ],
}
QUICK = [("toy", ["float32"], SMALL)]


def table(quick: bool) -> Table:
    """One row for each step on each device. Devices without an environment are left
    out, and the note says how to make it.
    """
    rows = []
    for target, cases in CASES.items():
        rows += rows_of(target, QUICK if quick else cases)
    note = "Compiled for devices that are only described: nothing ran."
    note += processes.missing(list(CASES))
    return Table("an Adam step on GPUs and TPUs, compiled", COLUMNS, rows, note)


def rows_of(target: str, cases: Any) -> list[dict[str, Any]]:
    """The rows of one target, from a process with its packages."""
    wanted = []
    for model, dtypes, names in cases:
        wanted += [(name, model, target, dtype) for dtype in dtypes for name in names]
    rows = []
    for row in processes.rows_from("benchmarks.compiled", target, wanted):
        rows.append(row)
        print(f"compiled: {_shown(row)}", file=sys.stderr, flush=True)
    return rows


def _shown(row: dict[str, Any]) -> str:
    return ", ".join(str(row[column]) for column in COLUMNS)
