"""Draws cases, one cell after the other, and has what fails shrunk.

A cell is a check of one method on one structure of trees. It keeps what it compiles, so
the search stays in one for some cases.
"""

import itertools
import random
import re
import time
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from tests.fuzz import checks, switches, trees
from tests.fuzz.cases import Case, cases
from tests.methods import ALONE, METHODS, ORDERED, Method

SHRINKING = 5.0  # seconds for each finding
CELLS_KEPT = 60  # compiled programs are forgotten after so many
OTHERS = ("mixed", "key", "float0", "python")
FINITE = (-100, 100)  # powers of 2 whose norms are finite, and whose halves are normal
LIMITS = ("1.0", "1e-20", "lambda step: 0.5 + step", "lambda step: 1.0 - step")


class Cell(NamedTuple):
    """One check, where it draws its cases from, and how many at a time."""

    name: str
    method: str
    check: Callable[[Case], None]
    drawn: Any  # a strategy of cases
    examples: int = 30


class Finding(NamedTuple):
    """What failed, without its numbers, and how to see it."""

    signature: str
    text: str


def limit_for(method: Method, limit: str) -> str | None:
    """The limit, where the method takes one and may do without."""
    if method.limit is None:
        return None
    return limit if method.schedules or limit[0].isdigit() else "1.0"


def history(
    name: str, kind: str, limits: tuple[str, ...] = LIMITS, steps: int = 3, **more: Any
) -> Any:
    """Cases of some steps with one of the limits and the usual shrink."""
    limit = st.sampled_from(limits).map(partial(limit_for, METHODS[name]))
    return limit.flatmap(
        lambda limit: cases(name, kind, steps, limit=limit, options="", **more)
    )


def equations(dice: random.Random) -> Iterator[Cell]:
    """Against float64 NumPy."""
    for name in checks.EQUATIONS:
        alone = METHODS[name].leaves == ALONE
        for kind in trees.PLAIN + (() if alone else ("mixed", "python", *trees.NARROW)):
            count = 40 if kind == "float32" else 15
            drawn = cases(name, kind)
            yield Cell(f"equation, {kind}", name, checks.equation, drawn, count)
    for name in ("clip_by_value", "clip"):
        for kind in ("float32", "sixteen", "key", "float0", *trees.INTEGERS):
            yield Cell(f"value, {kind}", name, checks.by_value, cases(name, kind), 40)


def forms(dice: random.Random) -> Iterator[Cell]:
    """What every method keeps, over leaves of all kinds, two of the many at a time."""
    for name, method in METHODS.items():
        others = (*OTHERS, dice.choice(trees.NARROW), dice.choice(trees.INTEGERS))
        for kind in trees.PLAIN + (() if method.leaves == ALONE else others):
            drawn = history(name, kind)
            yield Cell(f"form, {kind}", name, checks.invariants, drawn, 8)


def switched(dice: random.Random) -> Iterator[Cell]:
    """Under JAX's switches."""
    for name, method in METHODS.items():
        kind = "float32" if method.leaves in (ALONE, ORDERED) else "sixteen"
        for switch in switches.SWITCHES:
            drawn = history(name, kind, ("0.5",), 2, powers=FINITE)
            yield Cell(switch, name, partial(switches.under, switch=switch), drawn, 3)


def all_cells(seed: int) -> list[Cell]:
    """All cells in a random order, in which each kind has its turns."""
    dice = random.Random(seed)
    kinds = [equations, forms, switched]
    shuffled = [list(kind(dice)) for kind in kinds]
    for cells in shuffled:
        dice.shuffle(cells)
    turns = itertools.zip_longest(*shuffled)
    return [cell for turn in turns for cell in turn if cell is not None]


class _Stopped(KeyboardInterrupt):
    """Time is over: hypothesis hands it on, as it does when a user stops it."""


def search_cell(
    cell: Cell, seed: int, deadline: float, seen: Container[str] = ()
) -> Finding | None:
    """Draws the cases of one cell: the smallest that fails, or None.

    What looks like a finding that was `seen` is not shrunk.
    """
    failed: list[tuple[Any, Exception]] = []
    stop_at = [deadline]

    def check(case):
        if time.monotonic() > stop_at[0]:
            raise _Stopped
        try:
            cell.check(case)
        except Exception as error:
            if not failed:
                longest = 0.0 if signature(cell, error) in seen else SHRINKING
                stop_at[0] = min(deadline, time.monotonic() + longest)
            failed.append((case, error))
            raise

    options = settings(
        max_examples=cell.examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    try:
        seeded(seed)(options(given(cell.drawn)(check)))()
    except _Stopped:
        pass
    except Exception:
        if not failed:  # not of a case, but of the search itself
            raise
    if not failed:
        return None
    case, error = min(failed, key=lambda pair: len("".join(pair[0].steps)))
    return Finding(signature(cell, error), program(cell, case, error, seed))


def program(cell: Cell, case: Case, error: Exception, seed: int) -> str:
    """The source that shows the finding, and what went wrong."""
    return (
        "from tests.fuzz import search\nfrom tests.fuzz.cases import Case\n"
        f"cell = search.cell_of({cell.name!r}, {cell.method!r}, {seed})\n"
        f"cell.check({case!r})\n# {told(error)}"
    )


def cell_of(name: str, method: str, seed: int) -> Cell:
    """The cell of this name."""
    for cell in all_cells(seed):
        if cell.method == method and cell.name.startswith(name):
            return cell
    raise LookupError((name, method))


def told(error: BaseException) -> str:
    """What went wrong, in one line."""
    (text,) = error.args[:1] or ("",)
    text = " ".join(map(str, text)) if isinstance(text, tuple) else str(error)
    return f"{type(error).__name__}: {' '.join(text.split())[:400]}"


def signature(cell: Cell, error: BaseException) -> str:
    """What findings have in common that are probably one: no numbers in it."""
    words = re.sub(r"\(*(expected|updates).*", "", told(error))
    words = re.sub(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?|nan|inf|\[.*?\]", "", words)
    words = re.sub(r"float[^ ]*|complex[^ ]*", "", words)
    return f"{cell.name.partition(',')[0]}: {words[:70]}"


def search(seed: int, deadline: float, only: str = "") -> Iterator[Finding]:
    """The findings until time is over, each kind once.

    `only` is a part of the names of the cells that are searched: "equation", "jitted",
    "clip_by_value".
    """
    seen: set[str] = set()
    for turn in itertools.count(seed):
        cells = [c for c in all_cells(turn) if only in f"{c.name} {c.method}"]
        if not cells:
            raise LookupError(f"no cell has {only!r} in its name")
        for number, cell in enumerate(cells):
            if time.monotonic() > deadline:
                return
            finding = search_cell(cell, turn, deadline, seen)
            if finding and finding.signature not in seen:
                seen.add(finding.signature)
                yield finding
            if number % CELLS_KEPT == CELLS_KEPT - 1:
                jax.clear_caches()
