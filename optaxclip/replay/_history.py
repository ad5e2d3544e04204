"""Recorded norms, out of a log file."""

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
    """The norms of a log file, float64[steps].

    Args:
      path: a CSV with a header, or JSON lines (`.jsonl`, `.json`, `.ndjson`): one
        object for each step.
      column: the name to read; None takes what `metrics` and loggers call the norm:
        clip/norm_before, grad_norm, norm and the like. Steps without it are left out.

    Raises:
      ValueError: no such column in the file, or several that it could be; an entry that
        is no number; a file that is not UTF-8. The text has the names.
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
    try:
        return np.asarray(
            [float(row[column]) for row in rows if row.get(column) not in (None, "")]
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"read_history: the column {column!r} of {path} must hold numbers: {error}."
        ) from None


def _column_of_norms(path: Path, names: list[str]) -> str | None:
    """The first of the usual names; or else the one that `metrics` gives where clippers
    have titles, numbers or a norm for each tensor.
    """
    usual = next((name for name in COLUMNS if name in names), None)
    found = [name for name in names if OF_METRICS.fullmatch(name)]
    if usual is None and len(found) > 1:
        raise ValueError(
            f"read_history: column must be given: {path} has several norms, "
            f"{', '.join(map(repr, found))}."
        )
    return usual or next(iter(found), None)


def _rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The steps of a log file and the names in it, in the order of their first
    appearance.
    """
    try:
        # Excel begins a CSV with a byte order mark, which "utf-8-sig" leaves out.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"read_history: {path} must be a text file in UTF-8: {error}."
        ) from None
    lines = io.StringIO(text, newline="")
    rows = (
        [
            _parsed(path, number, line)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        if path.suffix in (".jsonl", ".json", ".ndjson")
        else list(csv.DictReader(lines))
    )
    return rows, list(
        dict.fromkeys(name for row in rows for name in row if name is not None)
    )


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"read_history: line {number} of {path} must be a JSON object: {error}."
        ) from None
    if not isinstance(row, dict):
        raise ValueError(
            f"read_history: line {number} of {path} must be a JSON object, got "
            f"{line.strip()[:60]!r}."
        )
    return row
