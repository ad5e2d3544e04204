"""The same gradients, compiled for a GPU and a TPU that are only described."""

from itertools import product
from typing import Any

from ..compiled import processes, program, step, targets
from ..report import Table
from . import methods
from .losses import Case, cases, in_bfloat16

COLUMNS = ("device", "model", "gradient", "kernels", "GB", "temporary MB")
DEVICES = ("h100", "v5e")


def table(quick: bool) -> Table:
    """What the plain and the clipped gradient read and write, and keep meanwhile."""
    numbers = range(len(_chosen(quick)))
    cases = []
    for target in DEVICES:
        arguments = product([target], [quick], numbers, [False, True])
        cases.append((target, list(arguments)))
    note = (
        "Compiled for devices that are only described: nothing ran. GB are what the "
        "program reads and writes in main memory, temporary MB what it keeps there "
        "beside arguments and results. What fits a TPU's on-chip memory is in neither."
    )
    title = "the mean gradient with each example clipped, on a GPU and a TPU"
    return processes.table(__name__, cases, title, COLUMNS, note)


def _chosen(quick: bool) -> list[Case]:
    """The larger batch of two, the wider of two transformers, also in bfloat16, and the
    convolution.
    """
    models = cases(quick)
    if quick:
        return models[:1]
    _, perceptron, transformer, _, convolution = models
    return [perceptron, transformer, in_bfloat16(transformer), convolution]


def row(target: str, quick: bool, number: int, is_clipped: bool) -> dict[str, Any]:
    """One gradient of one model, in a process that has the packages of the target."""
    case = _chosen(quick)[number]
    if is_clipped:
        name = methods.auto(case)
        gradient = methods.ours(case, "auto")
    else:
        name = methods.PLAIN
        gradient = methods.plain(case)
    place = targets.placement(target)
    params, batch = step.described((case.params, case.batch), place)
    compiled_gradient, _ = step.compiled_for(target, gradient, params, batch)
    counts = program.counts_of(compiled_gradient.as_text())
    temporary = compiled_gradient.memory_analysis().temp_size_in_bytes
    return {
        "device": target,
        "model": case.name,
        "gradient": name,
        "kernels": counts.kernels,
        "GB": round(counts.gigabytes, 4),
        "temporary MB": round(temporary / 1e6, 2),
    }
