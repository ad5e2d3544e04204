"""Draws cases in the cells, one after the other, and has what fails shrunk."""

import itertools
import time
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import jax
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.fuzz import report
from tests.fuzz.cells import Cell, all_cells

SHRINKING = 5.0  # seconds for each finding
CELLS_KEPT = 60  # compiled programs are forgotten after so many


class Finding(NamedTuple):
    """What failed, for whom, and how to see it."""

    signature: str
    method: str
    text: str


class _Stopped(KeyboardInterrupt):
    """Time is over: hypothesis hands it on, as it does when a user stops it."""


def search_cell(
    cell: Cell,
    seed: int,
    deadline: float,
    counted: Callable[[], Any] = int,
    seen: Container[str] = (),
) -> Finding | None:
    """Draws the cases of one cell: the smallest that fails, or None.

    What looks like a finding that was `seen` is not shrunk.
    """
    failed: list[tuple[Any, Exception]] = []
    stop_at = [deadline]

    def check(case):
        if time.monotonic() > stop_at[0]:
            raise _Stopped
        counted()
        try:
            cell.check(case)
        except Exception as error:
            if not failed:
                known = report.signature(cell, error) in seen
                longest = 0.0 if known else SHRINKING
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
    text = f"{report.program(cell, case)}\n# {report.told(error)}"
    return Finding(report.signature(cell, error), cell.method, text)


def search(
    seed: int,
    deadline: float,
    share: tuple[int, int],
    counted: Callable[[], Any],
    only: str = "",
) -> Iterator[Finding]:
    """The findings of one process of several, until time is over.

    `share` is the number of the process and how many there are. `only` is a part of the
    names of the cells that are searched: "equation", "jitted", "clip_by_value".
    """
    seen: set[str] = set()
    for turn in itertools.count(seed):
        wanted = [c for c in all_cells(turn) if only in f"{c.name} {c.method}"]
        if not wanted:
            raise LookupError(f"no cell has {only!r} in its name")
        cells = wanted[share[0] :: share[1]]
        for number, cell in enumerate(cells):
            if time.monotonic() > deadline:
                return
            finding = search_cell(cell, turn, deadline, counted, seen)
            if finding:
                seen.add(finding.signature)
                yield finding
            if number % CELLS_KEPT == CELLS_KEPT - 1:
                forget()


def forget() -> None:
    """Frees what was compiled."""
    from tests.fuzz import cells

    cells.pair.cache_clear()
    jax.clear_caches()
