"""From rows to columns of numbers.

Notes say what the reader left out or decided.
"""

import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

Row = Mapping[str, object]  # cells by name: numbers, texts or None
Notes = list[str]


class Column(NamedTuple):
    """The numbers under one name."""

    name: str
    steps: np.ndarray  # int64[entries], in ascending order
    values: np.ndarray  # float64[entries], NaN and inf among them
    notes: Sequence[str] = ()
    empty_cells: int = 0  # left out, and not in the notes
    unit: str = "step"  # what `steps` counts, or "row" as in `Log`


class Log(NamedTuple):
    """The columns of numbers of a file."""

    columns: dict[str, Column]
    notes: Notes
    unit: str  # "step", or "row" if steps are the numbers of the rows, from 0


NO_STEPS = "There is no column of steps, so rows are counted, from 0."
# The logging interval of transformers. Steps that are further apart count environment
# steps or tokens: CleanRL logs PPO every 512 environment steps or more.
LARGEST_INTERVAL = 500
# Rows that are more distances apart than this are said to lack rows between them.
WIDE_GAP = 10
# A column of steps has an entry in at least this share of the rows.
LEAST_SHARE_OF_STEPS = 0.1
# Names of the column that says which metric a row has, where each has its own row.
NAMES_OF_METRIC = ("metric", "name", "key", "tag", "variable")
# A number with commas between thousands. Without a decimal point behind them a comma
# may be the decimal one.
THOUSANDS = r"[-+]?\d{1,3}(?:,\d{3})+\.\d+"
# Names of columns of steps, the surest first.
STEP_NAMES = (
    # Of optax.MultiSteps. It counts optimizer steps, and "step" those of the loop.
    "gradient_step",
    "step",
    "Step",
    "_step",
    "global_step",
    "train/global_step",
    "trainer/global_step",
    "iteration",
    "iter",
    "Iteration",
    "iterations",
    "train_step",
    "train/step",
    "global_steps",
    "current_steps",  # LLaMA-Factory
    "num_updates",
    "index",
)


def log_from_rows(rows: Sequence[Row], notes: Notes) -> Log:
    """The columns of rows.

    Raises:
      ValueError: there is no number in them, or a row for each metric.
    """
    flat_rows = [flattened(row) for row in rows]
    step_name, begins_again = _name_of_steps(flat_rows)
    _check_one_row_a_step(flat_rows, step_name)
    unit = "step"
    if step_name is None:
        unit = "row"
        steps = range(len(rows))
    else:
        steps = _take_out_steps(flat_rows, step_name, begins_again)
    if begins_again:
        notes.append(
            f"The column {step_name!r} begins again, as in each epoch, and is counted "
            "on. If the run was started anew, delete the rows of earlier ones."
        )
    entries_by_name: dict[str, list[Entry]] = defaultdict(list)
    for step, row in zip(steps, flat_rows):
        for name, cell in row.items():
            entries_by_name[name].append((step, cell))
    columns: dict[str, Column] = {}
    for name, entries in entries_by_name.items():
        column = _column(name, entries)
        # W&B writes the extremes of each number beside it.
        if column.steps.size and not name.endswith(("__MIN", "__MAX")):
            columns[name] = column._replace(unit=unit)
        elif not column.steps.size and name.lower().endswith(("loss", "norm")):
            # Strict JSON writes null for NaN.
            reason = f"Entries that are empty or null: {column.empty_cells}."
            if column.notes:
                reason = column.notes[0]
            notes.append(f"The column {name!r} has no number. {reason}")
    if not columns:
        sentences = [
            "there is no number in it. A log has a row for each step, with a number "
            'under each name, such as {"loss": 2.5, "grad_norm": 1.0}.',
            *notes,
        ]
        raise ValueError(" ".join(sentences))
    return Log(columns, notes, unit)


def _check_one_row_a_step(rows: Sequence[Row], step_name: str | None) -> None:
    """Raises ValueError for a table such as `step,metric,value`, in which each loss and
    each norm has a row of its own.
    """
    names = {name.lower(): name for row in rows[:1] for name in row}
    metric_names = [names[name] for name in NAMES_OF_METRIC if name in names]
    is_long_format = step_name is not None and "value" in names and metric_names
    if not is_long_format or any(map(_is_loss_or_norm, names)):
        return
    metrics = {str(row.get(metric_names[0])).lower() for row in rows}
    if any(map(_is_loss_or_norm, metrics)):
        raise ValueError(
            "it has a row for each metric. Make one row for each step first, in "
            f"pandas: df.pivot(index={step_name!r}, columns={metric_names[0]!r}, "
            f"values={names['value']!r}).to_csv('wide.csv', na_rep='nan')"
        )


def _is_loss_or_norm(name: str) -> bool:
    return "loss" in name or "norm" in name


def _take_out_steps(
    rows: Sequence[dict[str, object]], step_name: str, begins_again: bool
) -> Sequence[int]:
    """Takes the column of steps out of the rows, and returns the step of each row."""
    steps: list[int] = []
    step = 0
    offset = 0  # of the current epoch
    for row in rows:
        number = _number(row.pop(step_name, None))
        # A row without a step has the step of the row before.
        if number is not None and math.isfinite(number):
            if begins_again and offset + number < step:
                offset = step + 1 - int(number)
            step = offset + int(number)
        steps.append(step)
    return steps


def _name_of_steps(rows: Sequence[Row]) -> tuple[str | None, bool]:
    """The name of the column of steps, and whether they begin again in each epoch.

    A column whose steps do not begin again comes before the others. Among equals the
    surest name counts. None if no column has steps.
    """
    surest_name = None
    for name in STEP_NAMES:
        numbers = [_number(row[name]) for row in rows if name in row]
        steps = [number for number in numbers if number is not None]
        # A column that only evaluations have, or the last row, says nothing of the
        # other rows.
        if not steps or LEAST_SHARE_OF_STEPS * len(rows) > len(steps):
            continue
        if not _begin_again(steps):
            return name, False
        if surest_name is None:
            surest_name = name
    return surest_name, surest_name is not None


def _begin_again(steps: Sequence[float]) -> bool:
    """Whether steps fall back to the first step, or below. A resumed run falls back to
    a later step. The second row does not count: it may be late, as in steps 1, 0, 2.
    """
    first = steps[0]
    return any(step <= first and step < before for before, step in pairwise(steps[1:]))


def flattened(row: Row, group: str = "") -> dict[str, object]:
    """The cells of a row. {"train": {"loss": 1}} has train/loss."""
    cells: dict[str, object] = {}
    for name, cell in row.items():
        if isinstance(cell, Mapping):
            cells |= flattened(cell, f"{group}{name}/")
        else:
            # Rows share their names, which saves memory.
            cells[sys.intern(f"{group}{name}")] = cell
    return cells


# The step of a cell, and the cell. A long log has millions, for which a record of its
# own would be slow.
Entry = tuple[int, object]


def _column(name: str, entries: Sequence[Entry]) -> Column:
    """The numbers of a column, with notes on the cells that it reads otherwise or
    leaves out.
    """
    nulls = 0
    if _are_nulls_nan(entries):
        entries, nulls = _nulls_as_nan(entries)
    numbers: list[tuple[int, float]] = []  # each with its step
    texts: list[str] = []
    empty_cells = 0
    for step, cell in entries:
        number = _number(cell)
        if number is not None:
            numbers.append((step, number))
        elif cell is None or not str(cell).strip():
            empty_cells += 1
        else:
            texts.append(str(cell)[:40])
    values_by_step, replaced_steps = _by_step(numbers)
    values = np.array(list(values_by_step.values()))
    notes: Notes = []
    is_minus_one = (values == -1) & ("norm" in name.lower())
    if is_minus_one.any():
        values[is_minus_one] = math.nan
        notes.append(
            "Norms of -1 are read as NaN, because DeepSpeed logs NaN and inf so: "
            f"{is_minus_one.sum()}."
        )
    if replaced_steps:
        notes.append(
            f"Steps {min(replaced_steps)} to {max(replaced_steps)} come twice "
            f"(entries: {len(replaced_steps)}), as in a run that was resumed: the "
            "later entries count."
        )
    if nulls:
        notes.append(f"Null is read as NaN. Rows with null there: {nulls}.")
    if texts:
        notes.append(f"Text is left out. Entries: {len(texts)}, {quoted(texts)}.")
    return Column(
        name,
        steps=np.array(list(values_by_step)),
        values=values,
        notes=notes,
        empty_cells=empty_cells,
    )


def _by_step(
    numbers: Sequence[tuple[int, float]],
) -> tuple[dict[int, float], list[int]]:
    """Numbers by ascending step, and the steps whose numbers a resumed run replaced."""
    values: dict[int, float] = {}
    replaced_steps: list[int] = []
    for step, number in numbers:
        # A step that comes again is of a resumed run, which replaces this step and all
        # rows since then. Other rows may come late: jax.debug.callback may write the
        # steps 1, 3, 2.
        while step in values:
            last_step, _ = values.popitem()
            replaced_steps.append(last_step)
        values[step] = number
    return dict(sorted(values.items())), replaced_steps


def _are_nulls_nan(entries: Sequence[Entry]) -> bool:
    """Whether null stands for NaN, as in strict JSON. If a third or more of the entries
    up to the last number are null, it stands for an empty cell instead: the column is
    logged more rarely than others.
    """
    if all(cell is not None for _, cell in entries):
        return False
    nulls = 0
    numbers = 0
    nulls_before_number = 0
    for _, cell in entries:
        if cell is None:
            nulls += 1
        elif _number(cell) is not None:
            numbers += 1
            nulls_before_number = nulls
    return 2 * nulls_before_number < numbers


def _nulls_as_nan(entries: Sequence[Entry]) -> tuple[list[Entry], int]:
    """Entries with NaN in the place of null, and how many NaN these are. A step may
    have several rows. Where one of them has a number, null in another one stays an
    empty cell: pandas writes it in the row of an evaluation.
    """
    new_entries: list[Entry] = []
    nans = 0
    for step, entries_of_step in groupby(entries, key=itemgetter(0)):
        cells = [cell for _, cell in entries_of_step]
        if all(cell is None for cell in cells):
            cells = [math.nan]
            nans += 1
        new_entries += [(step, cell) for cell in cells]
    return new_entries, nans


def _number(cell: Any) -> float | None:
    """The number in a cell, also in a text such as "NaN" or "1,234.5". None if there is
    none.
    """
    try:
        return float(cell)
    except (TypeError, OverflowError):
        return None
    except ValueError:
        if isinstance(cell, str) and re.fullmatch(THOUSANDS, cell.strip()):
            return float(cell.replace(",", ""))
        return None


def has_number(cells: Iterable[object]) -> bool:
    """Whether one of the cells has a number."""
    return any(_number(cell) is not None for cell in cells)


def quoted(names: Sequence[str]) -> str:
    """Names in quotes, at most twelve."""
    left_out = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"{', '.join(map(repr, names[:12]))}{left_out}"


def column_called(name: str, log: Log) -> Column | None:
    """The column with a name, or the only one whose name ends in it: "value_loss" is
    train/value_loss. None if there is none, or more than one.
    """
    if name in log.columns:
        return log.columns[name]
    full_names = [full for full in log.columns if full.endswith(f"/{name}")]
    return log.columns[full_names[0]] if len(full_names) == 1 else None


def rows_kept(column: Column, is_kept: np.ndarray) -> Column:
    """A column without the rows that are not kept."""
    return column._replace(steps=column.steps[is_kept], values=column.values[is_kept])


def in_common(columns: Sequence[Column]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all columns have, and the numbers there, [columns, steps]."""
    steps = reduce(np.intersect1d, [column.steps for column in columns])
    rows = [column.values[np.isin(column.steps, steps)] for column in columns]
    return steps, np.array(rows)


def distance_of_rows(column: Column) -> int:
    """The median number of steps from one row to the next. 1 for a single row."""
    if len(column.steps) < 2:
        return 1
    return int(np.median(np.diff(column.steps)))


def logging_interval(distance: int) -> int:
    """The distance of rows in optimizer steps. 1 also if it is too large for them, and
    counts something else.
    """
    return distance if distance <= LARGEST_INTERVAL else 1


def notes_on_distance(column: Column) -> Notes:
    """What the steps of a column say about steps that it does not have."""
    distance = distance_of_rows(column)
    notes: Notes = []
    if distance > LARGEST_INTERVAL:
        notes.append(
            f"The rows are {distance} steps apart, as where steps count environment "
            "steps or tokens, so each row counts as one step. If they are optimizer "
            "steps, what happened between is not seen."
        )
    elif distance > 1:
        notes.append(
            f"The rows are {distance} steps apart. What happened between is not seen. "
            "Log or export each step (transformers: logging_steps=1)."
        )
    gaps = np.diff(column.steps)
    if gaps.size and gaps.max() > WIDE_GAP * distance:
        row = int(np.argmax(gaps))
        start, end = column.steps[row : row + 2]
        notes.append(f"{column.name!r} has no row between steps {start} and {end}.")
    return notes
