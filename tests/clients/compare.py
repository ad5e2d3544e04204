"""The runs of a package, and what is wrong between them."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

from ..packages import run_worker
from .trained import CLIENTS

# The factor ends up to 4 eps of float32 below the quotient, and training carries that
# on. Runs of a few dozen steps that differ by more do something else.
TOLERANCE = 1e-5
# Whose clip a run has: optax's, ours, or none.
RUNS = ("theirs", "ours", "none")


class Row(NamedTuple):
    """One package."""

    client: str
    version: str  # or how to install it
    difference: float = np.nan  # largest of the losses, relative, ours against optax's
    without: float = np.nan  # the same, no clip against optax's
    clipped: int = 0  # steps that ours clipped, out of the train state
    restored: bool = False  # whether the checkpoint is the state, bit for bit
    problems: tuple[str, ...] = ()


def row_of(client: str) -> Row:
    """Runs a package three times and compares."""
    try:
        installed = version(CLIENTS[client].install)
    except PackageNotFoundError:
        return Row(client, f"not installed: `pip install {CLIENTS[client].install}`")
    try:
        runs = {
            whose: run_worker(
                "tests.clients.worker", client, whose, TF_CPP_MIN_LOG_LEVEL="3"
            )
            for whose in RUNS
        }
    except RuntimeError as error:
        return Row(client, installed, problems=(str(error),))
    return compare(client, installed, runs)


def compare(client: str, installed: str, runs: dict[str, dict[str, Any]]) -> Row:
    theirs, ours, none = (runs[whose] for whose in RUNS)
    counts = [
        value
        for name, value in ours["metrics"].items()
        if name.endswith("clipped_count")
    ]
    row = Row(
        client,
        installed,
        difference=largest_difference(theirs["losses"], ours["losses"]),
        without=largest_difference(theirs["losses"], none["losses"]),
        clipped=int(sum(counts)),
        restored=ours["restored"],
    )
    return row._replace(problems=tuple(problems_of(row, theirs["restored"])))


def problems_of(row: Row, theirs_restored: bool) -> list[str]:
    """What must not be. A run that no clip changes would show nothing."""
    wrong = {
        f"losses differ by {row.difference:.1e}": not row.difference <= TOLERANCE,
        f"losses without a clip differ by {row.without:.1e} only": not (
            row.without > 100 * max(row.difference, TOLERANCE)
        ),
        "metrics found no clipped step in the train state": row.clipped == 0,
        "the restored state is not the saved one": not row.restored,
        "optax's restored state is not the saved one": not theirs_restored,
    }
    return [f"{row.client}: {text}" for text, is_so in wrong.items() if is_so]


def largest_difference(losses: list[float], others: list[float]) -> float:
    """The largest relative difference, inf where it is not a number."""
    if len(losses) != len(others) or not losses:
        return np.inf
    wide = np.asarray(losses), np.asarray(others)
    # Losses that cross zero have no meaningful ratio of their own.
    size = np.maximum(np.abs(wide[0]), np.mean(np.abs(wide[0])))
    return float(np.max(np.nan_to_num(np.abs(wide[1] - wide[0]) / size, nan=np.inf)))
