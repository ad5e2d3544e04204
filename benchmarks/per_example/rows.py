"""The race of all methods, model by model."""

import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np

from .. import timing
from ..report import Table
from . import methods
from .losses import Case, cases

Tree = dict[str, Any]

COLUMNS = ("model", "gradient", "time", "temporary memory", "compile")

LONG = 0.2  # seconds: a call that takes less is repeated, or its time is noise
SAME = 1e-5  # rounding is below, and a factor that is missing above


def table(quick: bool, models: Callable[[bool], list[Case]] = cases) -> Table:
    """Time, memory and compile time of each method, for each model."""
    rows = []
    for case in models(quick):
        rows += rows_of(case, 1 if quick else 3)
    lacks = methods.missing("jax_privacy", "torch", "opacus")
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
    programs = {}
    runs: dict[str, Callable[[], Tree]] = {}
    for name, gradient in methods.of_jax(case).items():
        programs[name] = timing.compiled(gradient, case.params, case.batch)
        runs[name] = partial(programs[name].call, case.params, case.batch)
    if not methods.missing("torch", "opacus"):
        from .in_torch import of_torch

        runs |= of_torch(case)
    differences = _differences(runs)
    bases = dict.fromkeys(runs, methods.PLAIN_IN_TORCH)
    bases |= dict.fromkeys(programs, methods.PLAIN)
    seconds = _raced(runs, bases, rounds)
    rows = []
    for name, base in bases.items():
        row: dict[str, Any] = {
            "model": case.name,
            "batch": case.size,
            "gradient": name,
            "time": median(timing.ratios(seconds[name], seconds[base])),
        }
        if name in programs:
            row |= _compiled(programs[name], programs[base])
        if name in differences:
            row["difference"] = differences[name]
        row["step_seconds"] = seconds[name]
        rows.append(row)
    # "auto" is the same program as what it chose, which is the second.
    rows.insert(1, rows[1] | {"gradient": methods.auto(case)})
    for row in rows:
        print(f"  {row['gradient']}: {row['time']:.2f}", file=sys.stderr, flush=True)
    return rows


def _raced(
    runs: dict[str, Callable[[], Tree]], bases: dict[str, str], rounds: int
) -> dict[str, list[float]]:
    """The seconds of all methods, in three times as many rounds for those that take at
    most three times as long as their base: small differences need more of them.
    """
    contestants = {name: timing.repeated([run], LONG) for name, run in runs.items()}
    seconds = timing.race(contestants, rounds)
    close = {}
    for name, contestant in contestants.items():
        if median(timing.ratios(seconds[name], seconds[bases[name]])) <= 3:
            close[name] = contestant
    for name, more_seconds in timing.race(close, 2 * rounds).items():
        seconds[name] += more_seconds
    return seconds


def _compiled(program: timing.Program, plain: timing.Program) -> dict[str, Any]:
    return {
        "memory": program.held / plain.held,
        "temporary memory": program.temporary / plain.temporary,
        "compile": program.seconds / plain.seconds,
        "temporary_bytes": program.temporary,
    }


def _differences(runs: dict[str, Callable[[], Tree]]) -> dict[str, float]:
    """How far each clipped gradient is from optax's, relative to its norm.

    Raises:
      ValueError: one of them is another gradient, so that its time means nothing.
    """
    expected = _as_torch(runs[methods.OPTAX]())
    differences = {}
    for name, run in runs.items():
        if name in (methods.PLAIN, methods.PLAIN_IN_TORCH):
            continue
        difference = _distance(_as_torch(run()), expected)
        if difference > SAME:
            raise ValueError(f"{name}: {difference:.1g} from optax's gradient.")
        differences[name] = difference
    return differences


def _as_torch(grads: Tree) -> Tree:
    """A gradient of either framework, in the layout of PyTorch."""
    in_torch = {}
    for name, leaf in grads.items():
        if isinstance(leaf, jax.Array):
            leaf = methods.as_in_torch(name, leaf)
        in_torch[name] = np.asarray(leaf, np.float64)
    return in_torch


def _distance(grads: Tree, expected: Tree) -> float:
    difference = 0.0
    total = 0.0
    for name, leaf in expected.items():
        difference += np.sum((grads[name] - leaf) ** 2)
        total += np.sum(leaf**2)
    return (difference / total) ** 0.5
