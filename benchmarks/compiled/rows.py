"""The table: which steps are compiled for which devices, each target in a process of
its own.
"""

import sys

from ..report import Table
from ..steps import GLOBAL
from . import processes, step

COLUMNS = (
    "device",
    "model",
    "clipped by",
    "kernels",
    "scalars",
    "GB",
    "collectives",
    "temporary MB",
    "compile",
)
TARGETS = ("h100", "v5e", "v5e:4x4")
MODELS = ("4 layers, unrolled", "8 layers, scanned")


def table(quick: bool) -> Table:
    """One row for each step on each target. Targets without an environment are left
    out, and the note says how to make it.
    """
    models = ["toy"] if quick else MODELS
    names = ["none", "global norm", GLOBAL] if quick else step.STEPS
    rows = []
    for target in TARGETS:
        wanted = [(name, model, target) for model in models for name in names]
        for row in processes.rows_from("benchmarks.compiled", target, wanted):
            rows.append(row)
            shown = ", ".join(str(row[column]) for column in COLUMNS)
            print(f"compiled: {shown}", file=sys.stderr, flush=True)
    note = "Compiled for devices that are only described: nothing ran."
    note += processes.missing(list(TARGETS))
    title = "whole training steps of a decoder on GPUs and TPUs, compiled"
    return Table(title, COLUMNS, rows, note)
