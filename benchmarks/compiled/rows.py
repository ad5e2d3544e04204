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
UNROLLED, SCANNED = "4 layers, unrolled", "8 layers, scanned"
# A step takes XLA 10 seconds for an H100, and a minute or more for a TPU.
CASES = [("h100", UNROLLED), ("h100", SCANNED), ("v5e", SCANNED), ("v5e:4x4", SCANNED)]


def table(quick: bool) -> Table:
    """One row for each step on each target. Targets without an environment are left
    out, and the note says how to make it.
    """
    names = ["none", "global norm", GLOBAL] if quick else step.STEPS
    rows = []
    for target, model in CASES:
        wanted = [(name, "toy" if quick else model, target) for name in names]
        for row in processes.rows_from("benchmarks.compiled", target, wanted):
            rows.append(row)
            shown = ", ".join(str(row[column]) for column in COLUMNS)
            print(f"compiled: {shown}", file=sys.stderr, flush=True)
    note = "Compiled for devices that are only described: nothing ran."
    note += processes.missing([target for target, _ in CASES])
    title = "whole training steps of a decoder on GPUs and TPUs, compiled"
    return Table(title, COLUMNS, rows, note)
