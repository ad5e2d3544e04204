"""Recorded norms, from a log file."""

import csv
import io
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._columns import TENSORBOARD, column_of_norms, listed

# What `metrics` writes for a clipper, and for a wrapper that skips steps.
CLIPPER, SKIPPER, SKIPPED = "clip/norm_before", "skip/norm", "skip/skipped"
# One dict for each step: {"step": "0", "grad_norm": "1.5"}. Entries of a CSV are text.
Rows = list[dict[str, Any]]


class Log(NamedTuple):
    """The norms of a log file, and where in it they were."""

    norms: np.ndarray  # float64[steps]
    column: str
    others: list[str]  # the other columns


def read_history(path: str | Path, column: str | None = None) -> np.ndarray:
    """Reads the norms of a log file.

    Args:
      path: a CSV with a header, as W&B and TensorBoard export it, or JSON: one object
        for each step, on lines of their own or in an array, or the array of
        TensorBoard. {"train": {"norm": 1.5}} has the column train/norm.
      column: the name to read. None takes what `metrics` and loggers call the norm:
        clip/norm_before, grad_norm, train/grad_norm, norm and the like. Where steps
        were skipped with the clipper, it takes skip/norm, which has the norms of
        those too. Steps without an entry are left out.

    Returns:
      The norms, float64[steps].

    Raises:
      ValueError: no such column in the file, or several that it could be, an entry that
        is not a number, no entry at all, a file without names of columns, an empty one,
        one that is not UTF-8, or a CSV without commas. The text has the names and says
        how to choose.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "run.csv")
      >>> size = path.write_text("step,train/grad_norm\\n0,1.5\\n1,0.5\\n")
      >>> print(optaxclip.replay.read_history(path))
      [1.5 0.5]
    """
    return read_log(path, column).norms


def read_log(path: str | Path, column: str | None = None) -> Log:
    """Reads what `read_history` returns, with the name of its column."""
    path = Path(path)
    text = _text(path)
    # A CSV begins with a name, whatever the file is called.
    is_json = text.lstrip().startswith(("{", "["))
    is_json = is_json or path.suffix.lower() in (".json", ".jsonl", ".ndjson")
    rows = (
        list(map(_flat, _rows_of_json(path, text)))
        if is_json
        else _csv(path, text)
    )
    names = _names_of(rows)
    if not names:
        raise ValueError(
            f"read_history: {path} must hold a row for each step, got 0."
        )
    if column is None:
        column = column_of_norms(path, names)
        column = _of_every_step(path, rows, column)
    if column not in names:
        raise ValueError(
            f"read_history: column={column!r} is not in {path}, which has "
            f"{listed(names)}. Name the column of the gradient norm."
        )
    others = [name for name in names if name != column]
    return Log(_numbers(path, rows, column), column, others)


def _names_of(rows: Rows) -> list[str]:
    """The names of all columns, in the order of their appearance."""
    # A dict keeps the order, which a set would lose. Rows of JSON may differ in keys.
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    # A CSV that pandas wrote begins with a column without a name.
    return [name for name in names if name]


def _of_every_step(path: Path, rows: Rows, column: str) -> str:
    """The column of a wrapper that skips steps, where it has norms that a clipper
    inside it has not: in a skipped step the clipper keeps the norm of an earlier one.
    """
    begin = column.removesuffix(CLIPPER)
    own, flag = begin + SKIPPER, begin + SKIPPED
    # metrics(floats=True) leaves out a norm that is NaN.
    filled = [{own: "nan"} | row for row in rows]
    known = [row for row in filled if _is_known(row, column, own, flag)]
    # Without the clipper's name in front, no such column belongs to it.
    is_there = any(own in row for row in rows)
    if not column.endswith(CLIPPER) or not known or not is_there:
        return column
    each = (column, own, flag)
    clipper, skipper, skipped = (_numbers(path, known, name) for name in each)
    larger = np.isfinite(clipper) & ~(skipper <= 1.001 * clipper)
    # A wrapper behind the clipper has norms after clipping: smaller ones, or also
    # larger ones, as of `normalize`, and then in steps that were not skipped too.
    is_behind = (larger & (skipped == 0)).any()
    return own if larger.any() and not is_behind else column


def _is_known(row: dict[str, Any], *columns: str) -> bool:
    """Whether there are entries: not None, as in JSON, and not empty, as in a CSV."""
    entries = [row.get(column) for column in columns]
    return all(x is not None and str(x).strip() for x in entries)


def _numbers(path: Path, rows: Rows, column: str) -> np.ndarray:
    # Steps without a norm are left out.
    known = [row[column] for row in rows if _is_known(row, column)]
    where = f"read_history: the column {column!r} of {path} must hold numbers"
    if not known:
        raise ValueError(f"{where}, got empty entries only.")
    try:
        # float() also reads "NaN" and "Infinity", which some loggers write as text.
        return np.asarray([float(entry) for entry in known])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}.") from None


def _text(path: Path) -> str:
    try:
        # Excel begins a CSV with a byte order mark, which "utf-8-sig" leaves out.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"read_history: {path} must be a text file in UTF-8: {error}."
        ) from None


def _csv(path: Path, text: str) -> Rows:
    # A note may be longer than the module csv takes for a mistake.
    before = csv.field_size_limit(len(text) + 1)
    try:
        lines = iter(list(csv.reader(io.StringIO(text, newline=""))))
    finally:
        csv.field_size_limit(before)
    # Lines without an entry may stand before the header, too.
    header = [name.strip() for name in next(filter(None, lines), [])]
    # Without a header csv would take the first norms for the names of columns.
    if header and all(map(_is_number, header)):
        raise ValueError(
            f"read_history: {path} must begin with the names of its columns, got the "
            f"numbers {listed(header)}. Put a line such as 'step,grad_norm' first."
        )
    # "step;grad_norm" would be one column, whose name says nothing.
    if len(header) == 1 and re.search(r"[;\t]", header[0]):
        raise ValueError(
            f"read_history: {path} must have commas between its columns, got "
            f"{header[0]!r}."
        )
    names = _numbered(header)
    # Empty lines are no steps, and entries beyond the header have no name.
    return [dict(zip(names, line)) for line in lines if line]


def _numbered(header: list[str]) -> list[str]:
    """The names of columns. Those of the same name become name.1 and name.2."""
    counts, names = Counter(header), []
    for name in header:
        numbered = (f"{name}.{k}" for k in itertools.count(1))
        # A name that the header has already is no number of another.
        free = (x for x in numbered if x not in counts and x not in names)
        names.append(name if counts[name] == 1 or not name else next(free))
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _rows_of_json(path: Path, text: str) -> Rows:
    """JSON lines, or one array."""
    if text.lstrip().startswith("["):
        return _rows_of_array(path, text)
    # Numbered from 1, as editors do, for errors. Empty lines are left out.
    lines = [
        line for line in enumerate(io.StringIO(text), 1) if line[1].strip()
    ]
    return [_row_of_line(path, *line) for line in lines]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Nested objects as columns: {"train": {"loss": 1}} is {"train/loss": 1}."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= {f"{name}/{key}": x for key, x in _flat(value).items()}
        else:
            found[name] = value
    return found


def _rows_of_array(path: Path, text: str) -> Rows:
    where = (
        f"read_history: {path} must hold JSON lines, or one array of objects"
    )
    try:
        array = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {error}.") from None
    if all(isinstance(entry, dict) for entry in array):
        return array
    if all(isinstance(entry, list) and len(entry) == 3 for entry in array):
        # TensorBoard writes [[wall time, step, value], ...].
        return [dict(zip(TENSORBOARD, entry)) for entry in array]
    wrong = next(entry for entry in array if not isinstance(entry, dict))
    raise ValueError(f"{where}, got {str(wrong)[:60]!r} in it.")


def _row_of_line(path: Path, number: int, line: str) -> dict[str, Any]:
    where = f"read_history: line {number} of {path} must be a JSON object"
    try:
        # Python's json also reads NaN and Infinity, which json.dumps writes.
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {error}.") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}, got {line.strip()[:60]!r}.")
    return row
