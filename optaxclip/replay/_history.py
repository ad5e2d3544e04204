"""Recorded norms of a log file, for `read_history` and the command."""

import warnings
from pathlib import Path

import numpy as np

from .._logs.columns import Column, Log, column_called, quoted
from .._logs.files import read_log
from .._logs.norms import HEALTH_PATTERN, TENSOR_PATTERN, columns_named, norms_of

# How to get a norm into a log, for errors.
ADVICE = (
    "Log one in each step: metrics(state) with optaxclip.record_norm() in the "
    "optimizer, or optax.tree.norm(grads)"
)
ADVICE_BESIDE_HEALTH = (
    "record_health logs the norms of single tensors: for the norm of all put "
    "optaxclip.record_norm() before it in the optimizer"
)
# How to name a column, for errors of the command and of `read_history`.
COLUMN_OPTION = "--column NAME (in Python: column=NAME)"


def read_history(
    path: str | Path, column: str | None = None, *, pattern: str | None = None
) -> np.ndarray:
    """Reads the norms of a log file.

    It reads JSON lines, JSON, CSV, NumPy's files and event files of TensorBoard, and so
    what transformers, Lightning, W&B and most loops write. "Choosing a limit" in the
    documentation lists the forms.

    Args:
      path: the file, also in gzip. {"train": {"norm": 1.5}} has the column train/norm.
      column: the name to read, or its end: grad_norm reads train/grad_norm. None takes
        the one that is called a norm of the gradient: clip/norm_before, record/norm,
        grad_norm, train/grad_norm, norm and the like. In a step that a wrapper skipped,
        the norm of the clipper may be old: skip/norm counts if it is longer, or if the
        clipper repeats the norm of the step before. A step that comes twice, as in a
        run that was resumed, has its later norm. null is NaN, unless every third row or
        more has it.
      pattern: for a text, a regular expression with a named group for each column:
        "norm: (?P<grad_norm>\\S+)". None takes the most frequent labels of a loss, a
        norm and a step, such as "loss=", if most lines with a loss or a norm have them.

    Returns:
      The norms, float64[steps]. One warning says what was left out, except empty
      cells, and with which pattern a text was read.

    Raises:
      ValueError: no such column in the file, none that is called a norm of the
        gradient, or several, a negative norm, no number at all, or a file in another
        format. The text has the names and says how to choose. Only a column with "loss"
        in its name may be negative: losses are read for `spike_score`.
      OSError: the file cannot be opened.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "run.csv")
      >>> size = path.write_text("step,train/grad_norm\\n0,1.5\\n1,0.5\\n")
      >>> print(optaxclip.replay.read_history(path))
      [1.5 0.5]
    """
    call = f"read_history: {path}"
    log = read_log(path, "read_history", pattern)
    columns = columns_of(log, column, call)
    if len(columns) > 1:
        names = [column.name for column in columns]
        raise ValueError(
            f"{call}: several columns are called a norm of the gradient: "
            f"{quoted(names)}. Choose one with column={names[0]!r}."
        )
    notes = [*log.notes, *columns[0].notes]
    if notes:
        warnings.warn(f"{call}: {' '.join(notes)}", stacklevel=2)
    return columns[0].values


def columns_of(log: Log, name: str | None, call: str) -> list[Column]:
    """The column with a name, or all that are called a norm of the gradient.

    Raises:
      ValueError: there is none, or it has negative numbers.
    """
    names = quoted(list(log.columns))
    if name is None:
        columns = norms_of(log) or columns_named(TENSOR_PATTERN, log)
        if not columns:
            advice = ADVICE
            if columns_named(HEALTH_PATTERN, log):
                advice = ADVICE_BESIDE_HEALTH
            sentences = [
                f"{call}: this file has no gradient norm. {advice}. It has the columns "
                f"{names}. If one of them is a norm, name it with {COLUMN_OPTION}.",
                # Such as the pattern of a text.
                *log.notes,
            ]
            raise ValueError(" ".join(sentences))
    else:
        column = column_called(name, log)
        if column is None:
            raise ValueError(
                f"{call}: this file has no column {name!r}. Name one with "
                f"{COLUMN_OPTION}: it has {names}."
            )
        columns = [column]
    for column in columns:
        # A loss may be negative.
        is_negative = column.values < 0
        if "loss" not in column.name.lower() and is_negative.any():
            raise ValueError(
                f"{call}: the column {column.name!r} must hold norms, which are at "
                f"least 0, got {column.values[is_negative][0]}."
            )
    return columns
