"""Recorded norms, from a log file."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = ("clip/norm_before", "norm_before", "grad_norm", "skip/norm", "norm", "gnorm")
OF_METRICS = re.compile(
    r"clip(_\d+)?/(.+/)?norm_before(/.+)?|skip(_\d+)?/(.+/)?norm|"
    r"(norm_before|grad_norm|norm)/.+"
)


def read_history(path: str | Path, column: str | None = None) -> np.ndarray:
    """Reads the norms of a log file.

    Args:
      path: a CSV with a header, or JSON lines (`.jsonl`, `.json`, `.ndjson`): one
        object for each step.
      column: the name to read. None takes what `metrics` and loggers call the norm:
        clip/norm_before, grad_norm, norm and the like. Steps without it are left out.

    Returns:
      The norms, float64[steps].

    Raises:
      ValueError: no such column in the file, or several that it could be, an entry that
        is not a number, or a file that is not UTF-8. The text has the names.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "run.csv")
      >>> size = path.write_text("step,grad_norm\\n0,1.5\\n1,0.5\\n")
      >>> print(optaxclip.replay.read_history(path))
      [1.5 0.5]
    """
    path = Path(path)
    rows, names = _rows(path)
    if column is None:
        column = _column_of_norms(path, names)
    if column not in names:
        raise ValueError(
            f"read_history: column={column!r} is not in {path}, which has "
            f"{', '.join(map(repr, names))}. Name the column of the gradient norm."
        )
    entries = [row.get(column) for row in rows]
    known = [entry for entry in entries if entry not in (None, "")]
    try:
        return np.asarray([float(entry) for entry in known])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"read_history: the column {column!r} of {path} must hold numbers: {error}."
        ) from None


def _column_of_norms(path: Path, names: list[str]) -> str | None:
    """The first of the usual names, or else the one that `metrics` gives where clippers
    have titles, numbers or a norm for each tensor.
    """
    usual = [name for name in COLUMNS if name in names]
    found = [name for name in names if OF_METRICS.fullmatch(name)]
    if not usual and len(found) > 1:
        raise ValueError(
            f"read_history: column must be given: {path} has several norms, "
            f"{', '.join(map(repr, found))}."
        )
    return next(iter(usual + found), None)


def _rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The steps of a log file, and the names in it in the order of their appearance."""
    try:
        # Excel begins a CSV with a byte order mark, which "utf-8-sig" leaves out.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"read_history: {path} must be a text file in UTF-8: {error}."
        ) from None
    lines = io.StringIO(text, newline="")
    rows: list[dict[str, Any]]
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
        rows = [_parsed(path, *each) for each in numbered]
    else:
        rows = list(csv.DictReader(lines))
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    return rows, [name for name in names if name is not None]


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    """One line of JSON."""
    where = f"read_history: line {number} of {path} must be a JSON object"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {error}.") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}, got {line.strip()[:60]!r}.")
    return row
