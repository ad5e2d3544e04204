"""What a log has for the doctor: norms, a loss, and the numbers of `record_health`."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._logs import Column, Log, in_common, loss_of, norms_of, norms_of_tensors

# The numbers of `record_health`.
SIGNS = (
    "norm",
    "weight_norm",
    "ratio",
    "cosine",
    "rounding",
    "zeros",
    "subnormals",
    "nonfinite",
    "dead_rows",
)
HEALTH = re.compile(r"(.*[. ])?health(_\d+)?")
Tensors = dict[str, Column]  # by the name of the tensor, "" for all in one number


class Recorder(NamedTuple):
    """The columns of one `record_health`."""

    name: str  # such as health/updates
    signs: dict[str, Tensors]

    @property
    def is_of_updates(self) -> bool:
        """By the name, without what a logger puts in front."""
        place = self.name.rfind("health")
        return "update" in self.name[place:].lower()

    def tensors(self, sign: str) -> Tensors:
        """The columns of a sign, of single tensors where there are such."""
        columns = self.signs.get(sign, {})
        single = {name: column for name, column in columns.items() if name}
        return single or columns

    def total(self, sign: str) -> Column | None:
        """The norm of all tensors together. Of a summary the largest of them."""
        columns = self.signs.get(sign, {})
        summary = columns.get("")
        single = [column for name, column in columns.items() if name]
        if not single:
            return summary
        total = total_of(f"{self.name}/{sign}", single)
        if summary is not None and len(summary.steps) > len(total.steps):
            return summary
        return total


def total_of(name: str, norms: Sequence[Column]) -> Column:
    """The norm of several tensors together, in the steps that have all."""
    steps, numbers = in_common(norms)
    with np.errstate(all="ignore"):
        lengths = np.sqrt(np.sum(numbers**2, axis=0))
    return Column(name, steps, lengths)


class Signals(NamedTuple):
    """What the rules of causes look at."""

    columns: dict[str, Column]
    loss: Column | None
    norms: list[Column]  # of the gradient before clipping
    gradients: list[Recorder]
    updates: list[Recorder]


def signals_of(log: Log) -> Signals:
    """Finds the columns that say something about a run."""
    recorders = list(_recorders(log))
    gradients = [recorder for recorder in recorders if not recorder.is_of_updates]
    updates = [recorder for recorder in recorders if recorder.is_of_updates]
    norms = norms_of(log)
    if not norms:
        totals = [recorder.total("norm") for recorder in gradients]
        norms = [total for total in totals if total is not None]
    tensors = norms_of_tensors(log)
    if not norms and tensors:
        norms = [total_of("all tensors", tensors)]
    return Signals(log.columns, loss_of(log), norms, gradients, updates)


def _recorders(log: Log) -> Iterator[Recorder]:
    """The recorders of a log. One may be called like a sign, and so may a tensor:
    health/ratio/norm/w is the norm of w in a recorder "ratio", or the ratio of a tensor
    norm/w. The reading counts under which a recorder has most signs.
    """
    readings: dict[str, list[tuple[str, str, str]]] = {}
    signs_of_names: dict[str, set[str]] = defaultdict(set)
    for column in log.columns:
        for name, sign, tensor in _readings(column):
            readings.setdefault(column, []).append((name, sign, tensor))
            signs_of_names[name].add(sign)

    def rank(reading: tuple[str, str, str]) -> tuple[bool, int, int]:
        name = reading[0]
        signs = signs_of_names[name]
        # Every recorder has norms. Of equal names the shorter one is no tensor's.
        return "norm" in signs, len(signs), -len(name)

    recorders: dict[str, dict[str, Tensors]] = {}
    for column, candidates in readings.items():
        name, sign, tensor = max(candidates, key=rank)
        signs = recorders.setdefault(name, {})
        signs.setdefault(sign, {})[tensor] = log.columns[column]
    for name, signs in recorders.items():
        yield Recorder(name, signs)


def _readings(column: str) -> Iterator[tuple[str, str, str]]:
    """Recorder, sign and tensor: train/health_2/updates/norm/blocks/w."""
    parts = column.split("/")
    starts = [place for place, part in enumerate(parts) if HEALTH.fullmatch(part)]
    for place in range(starts[0] + 1 if starts else len(parts), len(parts)):
        if parts[place] in SIGNS:
            tensor = "/".join(parts[place + 1 :])
            yield "/".join(parts[:place]), parts[place], tensor


def in_order(names: Sequence[str]) -> list[str]:
    """Layers by number: "blocks/2" before "blocks/10"."""
    return sorted(names, key=_with_numbers)


def _with_numbers(name: str) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts
    ]
