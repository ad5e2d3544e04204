"""Recorded norms, from the files of loggers."""

import csv
import gzip
import io
import json
import math
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Names of norms, the surest first.
NAMES = (
    "(clip/)?norm_before",
    "record/norm",
    "grad_norm",
    "skip/norm",
    "norm",
    "gnorm",
    # MaxText: before clipping. Its learning/grad_norm is after.
    r"(.+/)?raw_grad_norm",
    # `metrics`, for clippers with names, numbers or a norm for each tensor.
    r"clip(_\d+)?/(.+/)?norm_before(/.+)?|record(_\d+)?/(.+/)?norm(/.+)?"
    r"|skip(_\d+)?/(.+/)?norm"
    r"|(norm_before|grad_norm|norm)/.+"
    # Names with a group in front. Megatron, Lightning, Composer, Levanter.
    r"|.+/(grad_norm|gnorm|norm_before)"
    r"|(.+/)?(grad-norm|gradient_norm|grad_[\w.]+_norm_total)"
    r"|l2_norm/grad/global|grad/norm/total",
    # A file of one series: TensorBoard and Aim.
    "[Vv]alue",
)
# Tables with a line for each metric and step: the columns of its name and its run.
# MLflow's page of a metric and its REST interface, MLflow's charts, Aim's data frames.
LONG = (("key", "run_id"), ("metric", "Run ID"), ("metric.name", "run.hash"))
STEPS = ("step", "_step", "global_step", "Step", "iteration")
# How names end that are the norm of all tensors.
TOTAL_NORMS = ("norm_before", "/norm")
# One dict for each line of a file. Entries of a CSV are text.
Rows = list[dict[str, Any]]
# For each column its entries that are not empty, in the order of the file.
Table = dict[str, list[Any]]


class Log(NamedTuple):
    """The norms of a file."""

    norms: np.ndarray  # float64[steps]
    column: str  # their name in the file
    other_columns: list[str]  # those that hold numbers as well


def read_history(path: str | Path, column: str | None = None) -> np.ndarray:
    """Reads the norms of a log file.

    It reads what transformers, Lightning, W&B, TensorBoard, MLflow and Aim write or
    export. "Choosing a limit" in the documentation lists their files.

    Args:
      path: a CSV with a header, JSON (an object for each step, on lines of their own or
        in an array), .npy, .npz, or one of these in gzip. {"train": {"norm": 1.5}} has
        the column train/norm. A table with a line for each metric and step has the
        metrics as columns.
      column: the name to read. None takes what `metrics` and loggers call the norm:
        clip/norm_before, record/norm, grad_norm, train/grad_norm, norm and the like.
        Where steps were skipped with the clipper, it takes skip/norm, which has the
        norms of those too. Steps without an entry are left out, and so is a last line
        of JSON that is cut off, with a warning. Beside a `nonfinite_count` of `metrics`
        an empty entry, or null, is NaN.

    Returns:
      The norms, float64[steps].

    Raises:
      ValueError: no such column in the file, or several that it could be, an entry that
        is not a number, a negative norm, no entry at all, a file without names of
        columns, an empty one, or one in another format. The text has the names and says
        how to choose. Only a column with "loss" in its name may be negative: losses are
        read for `spike_score`.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "run.csv")
      >>> size = path.write_text("step,train/grad_norm\\n0,1.5\\n1,0.5\\n")
      >>> print(optaxclip.replay.read_history(path))
      [1.5 0.5]
    """
    return read_log(path, column).norms


def read_log(path: str | Path, column: str | None = None) -> Log:
    """Reads the norms that `read_history` returns, with the names of columns."""
    return read_with(lambda rows: _log(rows, column), path, "read_history")


def read_with(function: Callable[[Rows], Any], path: str | Path, call: str) -> Any:
    """The result of a function of the rows of a log file.

    Raises:
      ValueError: the file cannot be read, or the function raised one. The text begins
        with the call and the path.
    """
    data = Path(path).read_bytes()
    try:
        return function(_wide(_rows(data)))
    except UnicodeDecodeError:
        problem = "must be a text file in UTF-8, .npy or .npz, also in gzip."
    except (EOFError, OSError, ValueError, csv.Error, zipfile.BadZipFile) as error:
        problem = str(error)
    raise ValueError(f"{call}: {path}: {problem}")


def _rows(data: bytes) -> Rows:
    """The rows of a file. Its first bytes tell the format, and not its name."""
    if data.startswith(b"\x1f\x8b"):
        return _rows(gzip.decompress(data))
    if data.startswith(b"\x93NUMPY"):
        return [{"norm": norm} for norm in np.atleast_1d(np.load(io.BytesIO(data)))]
    # An Excel file is a zip file too.
    if data.startswith(b"PK") and b".npy" in data:
        arrays = np.load(io.BytesIO(data))
        columns = [np.atleast_1d(array) for array in arrays.values()]
        return [dict(zip(arrays, line)) for line in zip_longest(*columns)]
    # Excel begins a CSV with a byte order mark, which "utf-8-sig" leaves out.
    text = data.decode("utf-8-sig").strip()
    return _rows_of_json(text) if text[:1] in ("{", "[") else _rows_of_csv(text)


def _rows_of_csv(text: str) -> Rows:
    text_of_header = text.partition("\n")[0]
    delimiter = next((mark for mark in ",;\t" if mark in text_of_header), ",")
    file = io.StringIO(text, newline="")
    lines = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
    first_line = next(lines, [])
    header = [name.strip() for name in first_line]
    # Without a header csv would take the first norms for the names of columns.
    if header and all(map(is_number, header)):
        raise ValueError(
            "must begin with names of columns, such as step,grad_norm, got the numbers "
            f"{listed(header)}."
        )
    # W&B runs may share a name, and then their columns do: name.1 and name.2.
    duplicates = {name for name in header if header.count(name) > 1}
    for name in duplicates:
        for number in range(1, header.count(name) + 1):
            header[header.index(name)] = f"{name}.{number}"
    # Entries beyond the header have no name. A run that is resumed writes the header
    # again.
    return [dict(zip(header, line)) for line in lines if line != first_line]


def _rows_of_json(text: str) -> Rows:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError:
        # An object on each line. Errors name the line.
        lines = list(filter(str.strip, text.split("\n")))
        # The last line of a run that was killed may be cut off.
        if len(lines) > 1 and lines[-1][0] == "{" and lines[-1][-1] != "}":
            last_line = lines.pop()
            warnings.warn(
                f"The last line is cut off, and left out: {last_line[:60]!r}.",
                stacklevel=2,
            )
        rows = json.loads("[" + ",\n".join(lines) + "]")
    if isinstance(rows, dict):
        # trainer_state.json of transformers, and MLflow's metrics/get-history.
        history = rows.get("log_history", rows.get("metrics"))
        rows = history if isinstance(history, list) else [rows]
    # TensorBoard's JSON has no names: [[wall time, step, value], ...].
    if all(isinstance(row, list) for row in rows):
        return [dict(zip(("Wall time", "Step", "Value"), row)) for row in rows]
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(
                "must hold JSON lines, or one array of objects, got "
                f"{str(row)[:60]!r} in it."
            )
    return rows


def _wide(rows: Rows) -> Rows:
    """The rows. Of a table with a line for each metric and step, rows with the metrics
    as columns.
    """
    for name_column, run_column in LONG:
        # The default is a number, and so not the name of a metric.
        named_rows = [row for row in rows if not is_number(row.get(name_column, 0))]
        long_rows = [row for row in named_rows if "value" in row]
        if long_rows:
            return _rows_of_metrics(long_rows, name_column, run_column)
    return rows


def _rows_of_metrics(long_rows: Rows, name_column: str, run_column: str) -> Rows:
    """One row for each step, from one row for each metric and step."""
    is_one_run = len({row.get(run_column) for row in long_rows}) == 1
    wide_rows: dict[tuple[int, int], dict[str, Any]] = {}  # by restart and step
    restarts = Counter[str]()  # how often each metric went back to an earlier step
    last_steps: dict[str, int] = {}
    for row in long_rows:
        metric = row[name_column]
        if not is_one_run:
            # With the run in front, as W&B does.
            metric = f"{row.get(run_column)} - {metric}"
        step = step_of(row) or 0
        # A run that is resumed goes back to an earlier step.
        if metric in last_steps and step <= last_steps[metric]:
            restarts[metric] += 1
        last_steps[metric] = step
        wide_row = wide_rows.setdefault((restarts[metric], step), {"step": step})
        wide_row[metric] = row["value"]
    return [wide_rows[key] for key in sorted(wide_rows)]


def step_of(row: dict[str, Any]) -> int | None:
    """The step of a row, None if it has none."""
    for name in STEPS:
        entry = row.get(name, math.nan)
        if is_number(entry) and math.isfinite(float(entry)):
            return int(float(entry))
    return None


def entries_of(row: dict[str, Any], begin: str = "") -> Iterator[tuple[str, Any]]:
    """The columns of a row. {"train": {"loss": 1}} has train/loss."""
    for name, entry in row.items():
        if isinstance(entry, dict):
            yield from entries_of(entry, f"{begin}{name}/")
        # The index of pandas has no name. W&B adds minimum and maximum of each column.
        elif name and not name.endswith(("__MIN", "__MAX")):
            yield f"{begin}{name}", entry


def is_empty(entry: Any) -> bool:
    return str(entry).strip() in ("", "None")


def _log(rows: Rows, column: str | None) -> Log:
    """The norms of a column, None for the column whose name says that it is a norm."""
    table = _table(rows)
    numeric = [name for name, entries in table.items() if any(map(is_number, entries))]
    if not numeric:
        raise ValueError(f"must hold numbers, got {len(rows)} rows without any.")
    if column is None:
        # With `summary=True` these are norms of one tensor, whose name is beside them.
        # A clipper with one norm has no such name.
        norms_of_worst = []
        for name in table:
            if "worst_name" in name:
                group = name.removesuffix("worst_name")
                norms_of_worst += [f"{group}norm_before", f"{group}norm"]
        candidates = [name for name in numeric if name not in norms_of_worst]
        column = _of_every_step(table, _column_of_norms(candidates))
    if column not in table:
        raise ValueError(
            f"column={column!r} is not in this file, which has {listed(numeric)}."
        )
    norms = _floats(table, column)
    # A loss may be negative.
    if "loss" not in column.lower() and (norms < 0).any():
        raise ValueError(
            f"the column {column!r} must hold norms, which are at least 0, got "
            f"{norms[norms < 0][0]}."
        )
    return Log(norms, column, [name for name in numeric if name != column])


def _table(rows: Rows) -> Table:
    table: Table = {}
    for row in rows:
        entries = dict(entries_of(row))
        for name, entry in entries.items():
            # Where a norm is NaN or inf, `metrics(json=True)` has null, and a CSV an
            # empty entry. The column `counter` counts them.
            counter = re.sub("norm(_before)?", "nonfinite_count", name, count=1)
            if is_empty(entry) and counter != name and is_number(entries.get(counter)):
                entry = math.nan
            if not is_empty(entry):
                table.setdefault(name, []).append(entry)
    return table


def _column_of_norms(names: list[str]) -> str:
    """The one column that can be the norm."""
    candidates: list[str] = []
    for pattern in NAMES:
        # W&B writes the name of the run first: "lively-sun-7 - train/grad_norm".
        regex = re.compile(rf"(.+ - )?({pattern})")
        candidates = [name for name in names if regex.fullmatch(name)]
        if candidates:
            break
    # Where a wrapper that skips has a clipper or recorder in it, the inner norm counts.
    wrappers = [_of_wrapper(name) for name in candidates]
    candidates = [name for name in candidates if name not in wrappers]
    if len(candidates) == 1:
        return candidates[0]
    # The error suggests the norm of all tensors, before the norm of one tensor.
    total_norms = [name for name in candidates if name.endswith(TOTAL_NORMS)]
    norms = [name for name in names if "norm" in name]
    not_steps = [name for name in names if name not in STEPS]
    suggestion = [*total_norms, *candidates, *norms, *not_steps[-1:], "NAME"][0]
    problem = "several columns have" if candidates else "no column of numbers has"
    raise ValueError(
        f"{problem} the name of a gradient norm, such as 'train/grad_norm'. There are "
        f"{listed(candidates or names)}. Choose one with column={suggestion!r}, on the "
        f"command line --column {suggestion!r}."
    )


def listed(names: list[str]) -> str:
    """Names in quotes, at most twelve."""
    left_out = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"{', '.join(map(repr, names[:12]))}{left_out}"


def _of_every_step(table: Table, column: str) -> str:
    """The column of a wrapper that skips steps, if it has norms that are missing in the
    column of the clipper inside: in a skipped step the clipper keeps an earlier norm.
    """
    wrapper_column = _of_wrapper(column)
    if wrapper_column not in table:
        return column
    clipper_norms = _floats(table, column)
    wrapper_norms = _floats(table, wrapper_column)
    in_clipper = clipper_norms[np.isfinite(clipper_norms)]
    in_wrapper = wrapper_norms[np.isfinite(wrapper_norms)]
    # A step that was skipped for its loss may have the smallest norm of all.
    skipped = table.get(f"{wrapper_column.removesuffix('norm')}skipped", [])
    is_taken = [is_number(flag) and float(flag) == 0 for flag in skipped]
    taken = in_wrapper
    if len(is_taken) == wrapper_norms.size:
        taken = wrapper_norms[is_taken]
    smallest = min(in_clipper[in_clipper > 0], default=0.0)
    smallest_taken = min(taken[taken > 0], default=0.0)
    # Between both the loss may be scaled, or gradients accumulated. Then their norms
    # are of different gradients.
    if not np.isclose(smallest, smallest_taken, rtol=1e-3, atol=0):
        return column
    # A clipper in front of a wrapper has the larger norms. A clipper inside it has not
    # seen the skipped norms: NaN, inf, or the largest.
    largest = 1.001 * max(in_clipper, default=0.0)
    has_larger = max(in_wrapper, default=0.0) > largest
    if has_larger or len(in_wrapper) < len(in_clipper):
        return wrapper_column
    return column


def _of_wrapper(column: str) -> str:
    """The column of a wrapper that skips steps, for the column of a clipper or recorder
    with the same name in front. "" for another column.
    """
    wrapper = re.sub("(clip|record)/(.*?)norm(_before)?$", r"skip/\2norm", column)
    return "" if wrapper == column else wrapper


def _floats(table: Table, column: str) -> np.ndarray:
    try:
        # float() also reads "NaN" and "Infinity", which some loggers write as text.
        return np.array([float(entry) for entry in table[column]])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the column {column!r} must hold numbers: {error}.") from None


def is_number(entry: Any) -> bool:
    try:
        float(entry)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
