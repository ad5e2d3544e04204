"""The same gradients, compiled for a GPU and a TPU that are only described."""

import sys
from typing import Any

from ..compiled import processes, program, step, targets
from ..report import Table
from . import methods
from .losses import Case, cases, in_bfloat16

COLUMNS = ("device", "model", "gradient", "kernels", "GB", "temporary MB")
DEVICES = ("h100", "v5e")


def table(quick: bool) -> Table:
    """What the plain and the clipped gradient read and write, and keep meanwhile."""
    rows = []
    for target in DEVICES:
        wanted = [(target, number, quick) for number in range(len(_chosen(quick)))]
        for row in processes.rows_from("benchmarks.per_example", target, wanted):
            rows.append(row)
            shown = ", ".join(str(row[column]) for column in COLUMNS)
            print(f"compiled: {shown}", file=sys.stderr, flush=True)
    note = (
        "Compiled for devices that are only described: nothing ran. GB are what the "
        "program reads and writes in main memory, temporary MB what it keeps there "
        "beside arguments and results. What fits a TPU's on-chip memory is in neither."
    )
    title = "the mean gradient with each example clipped, on a GPU and a TPU"
    return Table(title, COLUMNS, rows, note + processes.missing(list(DEVICES)))


def _chosen(quick: bool) -> list[Case]:
    """The larger batch of two, the wider of two transformers, also in bfloat16, and the
    convolution.
    """
    found = cases(quick)
    if quick:
        return found[:1]
    return [found[1], found[2], in_bfloat16(found[2]), found[4]]


def rows_of(target: str, number: int, quick: bool) -> list[dict[str, Any]]:
    """The rows of one model, in a process that has the packages of the target."""
    case = _chosen(quick)[number]
    chosen = f"{methods.AUTO}: {methods.chosen(case).removeprefix('optaxclip, ')}"
    gradients = {methods.PLAIN: methods.plain(case), chosen: methods.ours(case, "auto")}
    return [
        {"device": target, "model": case.name, "gradient": name}
        | _compiled(case, gradient, target)
        for name, gradient in gradients.items()
    ]


def _compiled(case: Case, gradient: methods.Gradient, target: str) -> dict[str, Any]:
    place = targets.placement(target)
    params, batch = step.described((case.params, case.batch), place)
    found, _ = step.compiled_for(target, gradient, params, batch)
    counts = program.counts_of(found.as_text())
    temporary = found.memory_analysis().temp_size_in_bytes
    return {
        "kernels": counts.kernels,
        "GB": round(counts.gigabytes, 4),
        "temporary MB": round(temporary / 1e6, 2),
    }
