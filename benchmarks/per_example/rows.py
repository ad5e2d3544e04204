"""The race of all methods, model by model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from .. import timing
from ..report import Table
from . import in_torch, methods
from .losses import Case, cases

Tree = dict[str, Any]

COLUMNS = ("model", "gradient", "time", "temporary memory", "compile")


def table(quick: bool) -> Table:
    """Time, memory and compile time of each method, for each model."""
    rows = []
    for case in cases(quick):
        rows += rows_of(case, 2 if quick else 5)
    lacks = methods.missing() + in_torch.missing()
    worst = max(row.get("difference", 0) for row in rows)
    note = (
        "Against the gradient of the mean, which clips nothing, in the same framework. "
        f"All clipped gradients are within {worst:.0e} of optax's, relative to its "
        "norm."
    )
    if lacks:
        note += f" Rows are left out. To see them: `pip install {' '.join(lacks)}`."
    title = "the mean gradient with each example clipped, float32"
    return Table(title, COLUMNS, rows, note)


def rows_of(case: Case, rounds: int) -> list[dict[str, Any]]:
    """The rows of one model: all methods in turns."""
    programs = {
        name: timing.compiled(gradient, case.params, case.batch)
        for name, gradient in methods.of_jax(case).items()
    }
    runs: dict[str, Callable[[], Tree]] = {
        name: partial(program.call, case.params, case.batch)
        for name, program in programs.items()
    }
    runs |= in_torch.of_torch(case)
    differences = _differences(runs)
    contestants = {name: timing.Contestant(run) for name, run in runs.items()}
    seconds = timing.race(contestants, rounds)
    rows = []
    for name, taken in seconds.items():
        base = methods.PLAIN if name in programs else in_torch.PLAIN
        row = {"model": case.name, "gradient": name}
        row |= {"time": timing.ratio(taken, seconds[base])}
        if name in programs:
            row |= _compiled(programs[name], programs[base])
        if name in differences:
            row |= {"difference": differences[name]}
        row |= {"step_seconds": taken}
        rows.append(row)
    return _with_auto(rows, methods.chosen(case))


def _compiled(program: timing.Program, plain: timing.Program) -> dict[str, Any]:
    return {
        "temporary memory": program.temporary / plain.temporary,
        "compile": program.seconds / plain.seconds,
        "temporary_bytes": program.temporary,
    }


def _with_auto(rows: list[dict[str, Any]], chosen: str) -> list[dict[str, Any]]:
    """The rows, and one for "auto", which is the same program as what it chose."""
    (row,) = (row for row in rows if row["gradient"] == chosen)
    name = f"{methods.AUTO}: {chosen.removeprefix('optaxclip, ')}"
    return [rows[0], row | {"gradient": name}, *rows[1:]]


def _differences(runs: dict[str, Callable[[], Tree]]) -> dict[str, float]:
    """How far each clipped gradient is from optax's, relative to its norm."""
    expected = _as_torch(runs[methods.OPTAX]())
    plain = methods.PLAIN, in_torch.PLAIN
    found = {}
    for name in runs:
        if name not in plain:
            found[name] = _distance(_on_host(runs[name]()), expected)
    return found


def _on_host(grads: Tree) -> Tree:
    """A gradient of either framework, in the layout of PyTorch."""
    if any(isinstance(leaf, jax.Array) for leaf in grads.values()):
        return _as_torch(grads)
    return {name: np.asarray(leaf, np.float64) for name, leaf in grads.items()}


def _as_torch(grads: Tree) -> Tree:
    return {
        name: np.asarray(in_torch.as_in_torch(name, leaf), np.float64)
        for name, leaf in grads.items()
    }


def _distance(found: Tree, expected: Tree) -> float:
    squares = [np.sum((found[name] - expected[name]) ** 2) for name in expected]
    return (sum(squares) / sum(np.sum(leaf**2) for leaf in expected.values())) ** 0.5
