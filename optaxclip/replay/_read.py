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
from typing import Any

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
    # Others with a group in front, Megatron, Lightning, Composer, Levanter.
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
# One dict for each line of a file. Entries of a CSV are text.
Rows = list[dict[str, Any]]
# The entries of each column that are not empty, in their order.
Table = dict[str, list[Any]]
# The norms of a file, their column, and the others that hold numbers.
Log = tuple[np.ndarray, str, list[str]]


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
    return read_log(path, column)[0]


def read_log(path: str | Path, column: str | None = None) -> Log:
    """Reads what `read_history` returns, with the names of columns."""
    return read_with(lambda rows: _log(rows, column), path, "read_history")


def read_with(made_of: Callable[[Rows], Any], path: str | Path, call: str) -> Any:
    """What a function makes of the rows of a log file: one dict for each line."""
    data = Path(path).read_bytes()
    # The functions below say what is wrong, and this one in which file.
    try:
        return made_of(_wide(_rows(data)))
    except UnicodeDecodeError:
        wrong = "must be a text file in UTF-8, .npy or .npz, also in gzip."
    except (EOFError, OSError, ValueError, csv.Error, zipfile.BadZipFile) as error:
        wrong = str(error)
    raise ValueError(f"{call}: {path}: {wrong}")


def _rows(data: bytes) -> Rows:
    """What a file is shows in its first bytes, whatever it is called."""
    if data.startswith(b"\x1f\x8b"):
        return _rows(gzip.decompress(data))
    if data.startswith(b"\x93NUMPY"):
        return [{"norm": norm} for norm in np.atleast_1d(np.load(io.BytesIO(data)))]
    # An Excel file is a zip file too.
    if data.startswith(b"PK") and b".npy" in data:
        arrays = np.load(io.BytesIO(data))
        columns = map(np.atleast_1d, arrays.values())
        return [dict(zip(arrays, line)) for line in zip_longest(*columns)]
    # Excel begins a CSV with a byte order mark, which "utf-8-sig" leaves out.
    text = data.decode("utf-8-sig").strip()
    return _rows_of_json(text) if text[:1] in ("{", "[") else _rows_of_csv(text)


def _rows_of_csv(text: str) -> Rows:
    begin = text.partition("\n")[0]
    mark = next((mark for mark in ",;\t" if mark in begin), ",")
    file = io.StringIO(text, newline="")
    lines = csv.reader(file, delimiter=mark, skipinitialspace=True)
    first = next(lines, [])
    header = [name.strip() for name in first]
    # Without a header csv would take the first norms for the names of columns.
    if header and all(map(is_number, header)):
        must = "must begin with names of columns, such as step,grad_norm, got the"
        raise ValueError(f"{must} numbers {listed(header)}.")
    # W&B runs may share a name, and then their columns do: name.1 and name.2.
    for name in {name for name in header if header.count(name) > 1}:
        for number in range(1, header.count(name) + 1):
            header[header.index(name)] += f".{number}"
    # Entries beyond the header have no name. A run that is resumed writes it again.
    return [dict(zip(header, line)) for line in lines if line != first]


def _rows_of_json(text: str) -> Rows:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        # An object on each line. Errors name the line.
        lines = list(filter(str.strip, text.split("\n")))
        # As of a run that was killed.
        if len(lines) > 1 and lines[-1][0] == "{" and lines[-1][-1] != "}":
            left_out = f"The last line is cut off, and left out: {lines.pop()[:60]!r}."
            warnings.warn(left_out, stacklevel=2)
        found = json.loads("[" + ",\n".join(lines) + "]")
    if isinstance(found, dict):
        # trainer_state.json of transformers, and MLflow's metrics/get-history.
        held = found.get("log_history", found.get("metrics"))
        found = held if isinstance(held, list) else [found]
    # TensorBoard's JSON has no names: [[wall time, step, value], ...].
    if all(isinstance(row, list) for row in found):
        return [dict(zip(("Wall time", "Step", "Value"), x)) for x in found]
    for row in found:
        if not isinstance(row, dict):
            must = "must hold JSON lines, or one array of objects"
            raise ValueError(f"{must}, got {str(row)[:60]!r} in it.")
    return found


def _wide(rows: Rows) -> Rows:
    """The metrics as columns, of a table with a line for each metric and step."""
    for name, run in LONG:
        # Lines whose metric has a name. 0 stands for none.
        lines = [row for row in rows if not is_number(row.get(name, 0))]
        lines = [row for row in lines if "value" in row]
        if not lines:
            continue
        is_one_run = len({row.get(run) for row in lines}) == 1
        wide: dict[Any, dict[str, Any]] = {}
        part, last = Counter[Any](), dict[Any, Any]()
        for row in lines:
            # With the run in front, as W&B does.
            column = row[name] if is_one_run else f"{row.get(run)} - {row[name]}"
            step = step_of(row) or 0
            # A run that is resumed goes back to an earlier step.
            part[column] += column in last and step <= last[column]
            last[column] = step
            wide.setdefault((part[column], step), {"step": step})[column] = row["value"]
        return [wide[place] for place in sorted(wide)]
    return rows


def step_of(row: dict[str, Any]) -> int | None:
    """The step of a row, None if it has none."""
    known = [float(row[name]) for name in STEPS if is_number(row.get(name))]
    return next((int(step) for step in known if math.isfinite(step)), None)


def entries_of(row: dict[str, Any], begin: str = "") -> Iterator[tuple[str, Any]]:
    """The columns of a row. {"train": {"loss": 1}} has train/loss."""
    for name, entry in row.items():
        if isinstance(entry, dict):
            yield from entries_of(entry, f"{begin}{name}/")
        # The index of pandas has no name. W&B adds the least and most of each entry.
        elif name and not name.endswith(("__MIN", "__MAX")):
            yield f"{begin}{name}", entry


def is_empty(entry: Any) -> bool:
    return str(entry).strip() in ("", "None")


def _log(rows: Rows, column: str | None) -> Log:
    table: Table = {}
    for row in rows:
        entries = dict(entries_of(row))
        for name, entry in entries.items():
            # `metrics(json=True)` has null for NaN and inf, and a CSV nothing. Beside
            # it is a count of them.
            count = re.sub("norm(_before)?", "nonfinite_count", name, count=1)
            if is_empty(entry) and count != name and is_number(entries.get(count)):
                entry = math.nan
            if not is_empty(entry):
                table.setdefault(name, []).append(entry)
    numeric = [name for name, found in table.items() if any(map(is_number, found))]
    if not numeric:
        raise ValueError(f"must hold numbers, got {len(rows)} rows without any.")
    if column is None:
        # The norm of one tensor, with `summary=True`. Of one norm the name is empty.
        begins = [x.removesuffix("worst_name") for x in table if "worst_name" in x]
        of_one = [begin + norm for begin in begins for norm in ("norm_before", "norm")]
        names = [name for name in numeric if name not in of_one]
        column = _of_every_step(table, _column_of_norms(names))
    if column not in table:
        must = f"column={column!r} is not in this file, which has"
        raise ValueError(f"{must} {listed(numeric)}.")
    norms = _floats(table, column)
    # A loss may be negative.
    if "loss" not in column.lower() and (norms < 0).any():
        must = f"the column {column!r} must hold norms, which are at least 0"
        raise ValueError(f"{must}, got {norms[norms < 0][0]}.")
    return norms, column, [name for name in numeric if name != column]


def _column_of_norms(names: list[str]) -> str:
    """The one column that can be the norm."""
    found: list[str] = []
    for pattern in NAMES:
        # W&B writes the name of the run first: "lively-sun-7 - train/grad_norm".
        named = re.compile(rf"(.+ - )?({pattern})")
        found = found or list(filter(named.fullmatch, names))
    # Of a wrapper that skips, and of the clipper or recorder in it, that inside.
    wrappers = [_of_wrapper(name) for name in found]
    found = [name for name in found if name not in wrappers]
    if len(found) == 1:
        return found[0]
    others = [name for name in names if name not in STEPS]
    norms = [name for name in names if "norm" in name]
    # Rather than that of one tensor.
    whole = [name for name in found if name.endswith(("norm_before", "/norm"))]
    likely = [*whole, *found, *norms, *others[-1:], "NAME"][0]
    problem = "several columns have" if found else "no column of numbers has"
    raise ValueError(
        f"{problem} the name of a gradient norm, such as 'train/grad_norm'. There are "
        f"{listed(found or names)}. Choose one with column={likely!r}, on the command "
        f"line --column {likely!r}."
    )


def listed(names: list[str]) -> str:
    """Names in quotes, at most twelve."""
    left_out = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"{', '.join(map(repr, names[:12]))}{left_out}"


def _of_every_step(table: Table, column: str) -> str:
    """The column of a wrapper that skips steps, where it has norms that a clipper
    inside it has not: in a skipped step the clipper keeps the norm of an earlier one.
    """
    own = _of_wrapper(column)
    if own not in table:
        return column
    both = [_floats(table, name) for name in (column, own)]
    clipper, wrapper = [norms[np.isfinite(norms)] for norms in both]
    # Between both, a loss may be scaled, or gradients accumulated. In a step that was
    # skipped for its loss the norm may be the smallest.
    flags = table.get(f"{own.removesuffix('norm')}skipped", [])
    passed = [is_number(flag) and float(flag) == 0 for flag in flags]
    taken = both[1][passed] if len(passed) == both[1].size else wrapper
    smallest = [min(norms[norms > 0], default=0.0) for norms in (clipper, taken)]
    if not np.isclose(*smallest, rtol=1e-3, atol=0):
        return column
    # A clipper in front of a wrapper has the larger norms. One inside it has not seen
    # those that were skipped: NaN, inf, or the largest.
    largest = 1.001 * max(clipper, default=0.0)
    is_larger = max(wrapper, default=0.0) > largest
    return own if is_larger or len(wrapper) < len(clipper) else column


def _of_wrapper(column: str) -> str:
    """The column of a wrapper that skips steps, beside that of a clipper or recorder
    with the same name in front, and "" beside another column.
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
