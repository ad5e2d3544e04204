"""The one reader of training logs, for `replay` and `doctor`.

    bytes -> text, arrays or events -> rows (a dict for each line) -> columns

Its first bytes tell the format of a file, and not its name. What the reader leaves out
or decides is in the notes of the log, for a person to read.
"""

import ast
import csv
import importlib
import io
import json
import math
import re
import struct
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, SupportsFloat

import numpy as np

Row = Mapping[str, object]
Notes = list[str]


class Column(NamedTuple):
    """The numbers under one name."""

    name: str
    steps: np.ndarray  # int64[entries], in ascending order
    values: np.ndarray  # float64[entries], NaN and inf among them
    notes: tuple[str, ...] = ()
    empty: int = 0  # rows of a table that have no entry in it


class Log(NamedTuple):
    """The columns of numbers of a file."""

    columns: dict[str, Column]
    notes: Notes
    texts: frozenset[str] = frozenset()  # names of columns of text


# ------------------------------------------------------------------------------- files


def read_log(path: str | Path, call: str, pattern: str | None = None) -> Log:
    """Reads a log file.

    Args:
      path: the file.
      call: the function that errors name.
      pattern: a regular expression for the lines of a text, None for other files. Its
        named groups are the columns. A group without a name is "grad_norm".

    Raises:
      ValueError: the file is no log that can be read. The text begins with the call and
        the path.
      OSError: the file cannot be opened.
    """
    data = Path(path).read_bytes()
    notes: Notes = []
    try:
        return log_of(_rows(data, pattern, notes), notes)
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"{call}: {path}: {error}") from None


def _rows(data: bytes, pattern: str | None, notes: Notes) -> Sequence[Row]:
    if data.startswith(b"\x1f\x8b"):
        return _rows(_unzipped(data, notes), pattern, notes)
    # An Excel file is a zip file too.
    is_npz = data.startswith(b"PK") and b".npy" in data
    if is_npz or data.startswith(b"\x93NUMPY"):
        return _rows_of_arrays(data)
    # The first event of a file of TensorBoard.
    if b"brain.Event:" in data[:64]:
        return _rows_of_events(data, notes)
    # PowerShell writes UTF-16. Excel begins a CSV with a byte order mark.
    is_utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")
    # After a crash of the machine a file may end in bytes that were never written.
    text = text.rstrip("\0").strip()
    if "\0" in text or text.count("\ufffd") > len(text) / 10:
        raise ValueError(
            "this is no text, .npy, .npz, event file of TensorBoard, or gzip of one. "
            "Logs are read as JSON lines, JSON, CSV, or text with a pattern."
        )
    if pattern is not None:
        return _rows_of_pattern(text, pattern)
    if not text:
        raise ValueError(
            "the file is empty. A log has a line for each step, such as "
            '{"step": 0, "loss": 2.5, "grad_norm": 1.0}.'
        )
    rows = _rows_of_json(text, notes) if text[0] in "{[" else _rows_of_csv(text, notes)
    rows = rows or _rows_of_dicts(text, notes)
    if not rows:
        raise ValueError(_advice_for_text(text))
    return rows


def _rows_of_arrays(data: bytes) -> list[Row]:
    """The rows of an .npz, or of an .npy, whose column is called "norm"."""
    try:
        loaded = np.load(io.BytesIO(data))
        arrays = {"norm": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    # Of a broken file NumPy raises errors of many types.
    except Exception as error:
        raise ValueError(f"NumPy cannot read the file: {error}.") from None
    columns = [np.atleast_1d(array) for array in arrays.values()]
    return [dict(zip(arrays, line)) for line in zip_longest(*columns, fillvalue="")]


def _unzipped(data: bytes, notes: Notes) -> bytes:
    decoder = zlib.decompressobj(wbits=31)
    text = b""
    # Programs that append to a gzip file write one member behind the other.
    while data:
        try:
            text += decoder.decompress(data)
        except zlib.error as error:
            raise ValueError(f"the gzip file is broken: {error}.") from None
        if not decoder.eof:
            notes.append("The gzip file is cut off, and read up to there.")
            break
        data = decoder.unused_data.lstrip(b"\0")
        decoder = zlib.decompressobj(wbits=31)
    return text


def _rows_of_events(data: bytes, notes: Notes) -> list[Row]:
    event_type = None
    for package in ("tensorboard.compat", "tensorboardX"):
        try:
            event_type = importlib.import_module(f"{package}.proto.event_pb2").Event
        except ImportError:
            continue
        break
    if event_type is None:
        raise ValueError(
            "this is an event file of TensorBoard, which needs a package to read: pip "
            "install tensorboard"
        )
    decode_error = importlib.import_module("google.protobuf.message").DecodeError
    rows: list[Row] = []
    place = 0
    while place < len(data):
        # A record is its length, a checksum of 4 bytes, an event, and another one.
        start = place + 12
        length = struct.unpack("<Q", data[place : place + 8].ljust(8, b"\0"))[0]
        place = start + length + 4
        if place > len(data):
            notes.append("The event file is cut off, and read up to there.")
            break
        try:
            event = event_type.FromString(data[start : start + length])
        except decode_error:
            notes.append("The event file is broken, and read up to there.")
            break
        for value in event.summary.value:
            if value.HasField("simple_value"):
                rows.append({"step": event.step, value.tag: value.simple_value})
            # TensorFlow 2 writes scalars as tensors. 1 is float32.
            elif value.HasField("tensor") and value.tensor.dtype == 1:
                content = np.frombuffer(value.tensor.tensor_content, np.float32)
                numbers = [*value.tensor.float_val, *content]
                if len(numbers) == 1:
                    rows.append({"step": event.step, value.tag: numbers[0]})
    return rows


# -------------------------------------------------------------------------------- JSON


def _rows_of_json(text: str, notes: Notes) -> Sequence[Row]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        # JSON lines, or a file that was cut off.
        return _rows_of_dicts(text, notes)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply to be a log.") from None
    if isinstance(value, dict):
        # trainer_state.json of transformers has its rows in "log_history", and MLflow
        # in "metrics".
        tables = [table for table in value.values() if _has_rows(table)]
        if not tables:
            return _rows_of_lists(value) or [value]
        value = max(tables, key=len)
    # TensorBoard's JSON has no names: [[wall time, step, value], ...].
    if value and all(isinstance(row, list) for row in value):
        return [dict(zip(("wall time", "step", "value"), row)) for row in value]
    rows = [row for row in value if isinstance(row, dict)]
    if len(rows) < len(value):
        others = next(row for row in value if not isinstance(row, dict))
        if not rows:
            raise ValueError(
                "a list in JSON must have an object for each step, such as "
                f'{{"grad_norm": 1.0}}, got {str(others)[:60]!r} in it.'
            )
        notes.append(
            f"{len(value) - len(rows)} entries of the list are no objects and are left "
            f"out, such as {str(others)[:60]!r}."
        )
    return rows


def _has_rows(table: object) -> bool:
    return isinstance(table, list) and any(isinstance(row, dict) for row in table)


def _rows_of_lists(value: dict[str, object]) -> list[Row]:
    """The rows of {"loss": [2.5, 1.5]}, or of {"loss": {"0": 2.5, "1": 1.5}}, which
    pandas writes.
    """
    columns: dict[str, list[object]] = {}
    for name, entry in _flattened(value, keep_numbered=True):
        if isinstance(entry, list):
            columns[name] = entry
        elif isinstance(entry, dict):
            columns[name] = list(entry.values())
    return [
        dict(zip(columns, line))
        for line in zip_longest(*columns.values(), fillvalue="")
    ]


def _rows_of_dicts(text: str, notes: Notes) -> list[Row]:
    """The dicts that stand in a text, as JSON or as Python prints them."""
    decoder = json.JSONDecoder()
    rows: list[Row] = []
    broken: list[str] = []
    outside: list[str] = []  # what stands between the dicts
    end = 0
    place = text.find("{")
    while place >= 0:
        try:
            row, next_place = decoder.raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError):
            row, next_place = _printed_dict(text, place)
        if row is None:
            broken.append(text[place:].partition("\n")[0][:60])
        else:
            rows.append(row)
            outside.append(text[end:place])
            end = next_place
        place = text.find("{", next_place)
    if not rows:
        return []
    if broken and text[0] in "{[" and text[-1] not in "}]":
        notes.append(
            f"The file is cut off, and read up to there: it ends in {broken[-1]!r}."
        )
    elif broken:
        notes.append(
            f"{len(broken)} entries in braces cannot be read and are left out, such as "
            f"{broken[0]!r}."
        )
    if not broken:
        outside.append(text[end:])
    lines = [line for part in outside for line in part.splitlines()]
    texts = [line for line in lines if line.strip(" ,[]\t")]
    if texts and not broken:
        notes.append(
            f"{len(texts)} lines or parts of lines without braces are left out, such "
            f"as {texts[0].strip()[:60]!r}."
        )
    return rows


def _printed_dict(text: str, place: int) -> tuple[dict[str, object] | None, int]:
    """A dict that Python printed, and where it ends: {'loss': nan, 'step': 3}."""
    match = re.compile(r"\{[^{}\n]*\}").match(text, place)
    if match is None:
        return None, place + 1
    # NumPy 2 prints np.float64(2.5). NaN and inf have no literal.
    plain = re.sub(r"\bnp\.\w+\(([^()]*)\)", r"\1", match[0])
    quoted = re.sub(r"-?\b(nan|inf)\b", r"'\g<0>'", plain)
    try:
        row = ast.literal_eval(quoted)
    # Such as the braces of other text.
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None, place + 1
    if not isinstance(row, dict):
        return None, place + 1
    return {str(name): entry for name, entry in row.items()}, match.end()


# ----------------------------------------------------------------------- CSV and text


def _rows_of_csv(text: str, notes: Notes) -> list[Row]:
    """The rows of a table, and none where the text is no table."""
    # stable-baselines begins with a comment. Of NumPy's savetxt it has the names.
    comments = []
    while text.startswith("#"):
        comment, _, text = text.partition("\n")
        comments.append(comment.strip("# \r"))
    first_line = text.partition("\n")[0]
    delimiter = max(",;\t", key=first_line.count)
    if delimiter in first_line:
        file = io.StringIO(text, newline="")
        lines = list(csv.reader(file, delimiter=delimiter, skipinitialspace=True))
    else:
        lines = [line.split() for line in text.splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return []
    if all(is_number(name) for name in lines[0]):
        if not comments:
            raise ValueError(
                "must begin with names of columns, such as step,grad_norm, got the "
                f"numbers {listed(lines[0])}."
            )
        lines.insert(0, re.split(r"[,;\s]+", comments[-1]))
    header = [name.strip() for name in lines[0]]
    # A run that is resumed writes the header again.
    lines = [line for line in lines[1:] if line[0].strip() != header[0]]
    whole_lines = [line for line in lines if len(line) == len(header)]
    numbers = [line for line in whole_lines if any(map(is_number, map(_plain, line)))]
    if 2 * len(numbers) < len(lines) or any(map(is_number, header)):
        return []
    if lines and len(lines[-1]) < len(header) and len(whole_lines) == len(lines) - 1:
        notes.append(f"The last line is cut off, and left out: {lines.pop()}.")
    # W&B runs may share a name, and then their columns do: name.1 and name.2.
    for name in {name for name in header if header.count(name) > 1}:
        for number in range(1, header.count(name) + 1):
            header[header.index(name)] = f"{name}.{number}"
    if delimiter == ",":
        return [dict(zip(header, line)) for line in lines]
    return [dict(zip(header, map(_plain, line))) for line in lines]


def _plain(entry: str) -> str:
    """An entry with a decimal point in the place of a decimal comma."""
    entry = entry.strip()
    return entry.replace(",", ".") if re.fullmatch(r"-?\d+,\d+", entry) else entry


def _rows_of_pattern(text: str, pattern: str) -> list[Row]:
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"pattern must be a regular expression, got {pattern!r}: {error}."
        ) from None
    if not regex.groups:
        raise ValueError(
            "pattern must have a group for each column, such as "
            f"'norm: (?P<grad_norm>\\S+)', got {pattern!r}."
        )
    rows: list[Row] = []
    for line in text.splitlines():
        row: dict[str, object] = {}
        for match in regex.finditer(line):
            groups = match.groupdict() or {"grad_norm": match[1]}
            for name, entry in groups.items():
                if entry is not None:
                    row[name] = entry.strip(",;:|()[]%")
        if row:
            rows.append(row)
    if not rows:
        raise ValueError(f"pattern {pattern!r} fits no line. {_advice_for_text(text)}")
    return rows


NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
# "norm: 1.5", "loss=2" and "step 3".
LABELED = re.compile(rf"([A-Za-z][\w./-]*?)(\s*[:=]\s*|\s+)(?={NUMBER})")


def _advice_for_text(text: str) -> str:
    """What to do with a text, with a pattern for its most frequent line of numbers."""
    shapes: dict[str, list[str]] = {}
    for line in text.splitlines():
        if LABELED.search(line):
            shapes.setdefault(re.sub(NUMBER, "#", line), []).append(line)
    advice = (
        "this is text, and no table. JSON lines, JSON, CSV with a header, printed "
        "dicts, .npy and .npz are read as they are"
    )
    if not shapes:
        return f"{advice}. There is no line of names and numbers in it."
    # A line with a norm is what is looked for, also where others are more frequent.
    words = ("norm", "loss")
    ranks = {
        shape: ([word in shape for word in words], len(lines))
        for shape, lines in shapes.items()
    }
    line = shapes[max(ranks, key=lambda shape: ranks[shape])][0]
    parts: dict[str, str] = {}
    for label, separator in LABELED.findall(line):
        name = _name_of_label(label)
        spaced = re.sub(r"\s+", r"\\s*", separator)
        parts.setdefault(name, rf"\b{re.escape(label)}{spaced}(?P<{name}>[^\s,;]+)")
    wanted = [name for name in ("step", "loss", "grad_norm") if name in parts]
    if not {"loss", "grad_norm"} & parts.keys():
        return f"{advice}. No line of it names a loss or a norm."
    pattern = "|".join(parts[name] for name in wanted)
    return f"{advice}. For others give a pattern, here --pattern '{pattern}'"


def _name_of_label(label: str) -> str:
    label = label.lower()
    if "norm" in label:
        return "grad_norm"
    if label in ("s", "it", "iter", "iters", "iteration", "step", "steps", "update"):
        return "step"
    if label in ("loss", "trl", "train_loss", "train-loss", "train/loss", "lm_loss"):
        return "loss"
    return re.sub(r"\W", "_", label)


# ----------------------------------------------------------------------------- columns

# The step of a row, the surest name first.
STEPS = ("step", "_step", "global_step", "train/global_step", "iteration", "iter")
# Tables with a line for each metric and step have its name here: MLflow, Aim, tbparse.
METRICS = ("key", "metric", "metric.name", "tag")
RUNS = ("run_id", "Run ID", "run.hash")


def log_of(rows: Sequence[Row], notes: Notes) -> Log:
    """The columns of rows.

    Raises:
      ValueError: there is no number in them.
    """
    flat_rows = [dict(_flattened(row)) for row in rows]
    flat_rows = _wide(flat_rows)
    name_of_steps = _name_of_steps(flat_rows)
    steps = _steps_of(flat_rows, name_of_steps, notes)
    entries: dict[str, list[tuple[int, object]]] = {}
    for step, row in zip(steps, flat_rows):
        for name, entry in row.items():
            # Where a norm is NaN or inf, `metrics(json=True)` has null, and a CSV an
            # empty entry. The column `counter` counts them.
            if "norm" in name and _is_empty(entry):
                counter = re.sub("norm(_before)?", "nonfinite_count", name, count=1)
                entry = math.nan if is_number(row.get(counter)) else entry
            entries.setdefault(name, []).append((step, entry))
    columns: dict[str, Column] = {}
    repeated: set[int] = set()
    for name, pairs in entries.items():
        # W&B adds the extremes of each number.
        is_left_out = name == name_of_steps or name.endswith(("__MIN", "__MAX"))
        if not is_left_out and any(is_number(entry) for _, entry in pairs):
            columns[name] = _column(name, pairs, repeated)
    if not columns:
        raise ValueError(
            f"there is no number in it. It has {len(rows)} rows with "
            f"{listed(list(entries)) or 'no names'}."
        )
    if repeated:
        notes.append(
            f"Steps {min(repeated)} to {max(repeated)} come twice, as in a run that "
            "was resumed: the later entries count."
        )
    texts = {
        name
        for name, pairs in entries.items()
        if name not in columns and not all(_is_empty(entry) for _, entry in pairs)
    }
    return Log(columns, notes, frozenset(texts))


def _flattened(
    row: Row, begin: str = "", keep_numbered: bool = False
) -> Iterator[tuple[str, object]]:
    """The entries of a row. {"train": {"loss": 1}} has train/loss.

    `keep_numbered`: whether a dict whose names are numbers is one entry.
    """
    for name, entry in row.items():
        is_numbered = isinstance(entry, dict) and all(
            str(key).isdigit() for key in entry
        )
        is_left = keep_numbered and is_numbered
        if isinstance(entry, dict) and entry and not is_left:
            yield from _flattened(entry, f"{begin}{name}/", keep_numbered)
        else:
            yield f"{begin}{name}", entry


def _wide(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Rows with a column for each metric, of rows with a line for each metric."""
    for name_of_metric in METRICS:
        long_rows = [
            row
            for row in rows
            if isinstance(row.get(name_of_metric), str) and "value" in row
        ]
        if not long_rows:
            continue
        runs = [name for name in RUNS if name in long_rows[0]]
        is_one_run = len({row.get(run) for run in runs for row in long_rows}) <= 1
        wide: list[dict[str, object]] = []
        for row in long_rows:
            metric = row[name_of_metric]
            if not is_one_run:
                # With the run in front, as W&B does.
                metric = f"{row[runs[0]]} - {metric}"
            wide.append({"step": row.get("step"), str(metric): row["value"]})
        # In the order of metrics, as in MLflow's files, each metric begins anew.
        names = [next(reversed(row)) for row in wide]
        order = sorted(range(len(wide)), key=lambda place: names[place])
        return [wide[place] for place in order]
    return rows


def _name_of_steps(rows: list[dict[str, object]]) -> str:
    """The column with the step of most rows, "" where there is none."""
    counts = Counter[str]()
    for row in rows:
        for name, entry in row.items():
            if name.lower() in STEPS and _is_finite(entry):
                counts[name] += 1
    names = sorted(counts, key=lambda name: STEPS.index(name.lower()))
    return max(names, key=lambda name: counts[name], default="")


def _steps_of(rows: list[dict[str, object]], name: str, notes: Notes) -> list[int]:
    """The step of each row: the number of the row where the log has no steps."""
    if not name:
        return list(range(len(rows)))
    steps: list[int] = []
    epoch = -math.inf
    for row in rows:
        # A row without a step belongs to the row before.
        step = steps[-1] if steps else 0
        if _is_finite(row.get(name)):
            step = int(number_of(row[name]))
        epoch_before = epoch
        if _is_finite(row.get("epoch")):
            epoch = number_of(row["epoch"])
        if steps and step < steps[-1] and epoch > epoch_before:
            notes.append(f"{name!r} begins anew in each epoch, so rows are counted.")
            return list(range(len(rows)))
        steps.append(step)
    return steps


def _column(name: str, pairs: list[tuple[int, object]], repeated: set[int]) -> Column:
    """The numbers of a column, which has at least one."""
    numbers: dict[int, float] = {}  # by step, in the order of the log
    nulls: list[int] = []
    texts: list[str] = []
    empty = 0
    several = 0
    last = -math.inf
    for step, entry in pairs:
        if is_number(entry):
            several += step == last
            # A run that is resumed goes back to an earlier step.
            while step < last and numbers and next(reversed(numbers)) >= step:
                repeated.add(numbers.popitem()[0])
            # float() also reads "NaN" and "Infinity", which some loggers write.
            numbers[step] = number_of(entry)
            last = step
        elif entry is None:
            nulls.append(step)
        elif _is_empty(entry):
            empty += 1
        elif isinstance(entry, str):
            texts.append(entry)
    notes: list[str] = []
    if several:
        notes.append(f"{several} entries are followed by another one of their step.")
    nulls = [step for step in dict.fromkeys(nulls) if step not in numbers]
    # null is NaN in strict JSON. Where every third entry or more has it, as long as
    # there are numbers, the column is logged more rarely than the row.
    is_sparse = 2 * sum(step < last for step in nulls) >= len(numbers)
    if nulls and is_sparse:
        notes.append(f"{len(nulls)} rows have null there, and are left out.")
    elif nulls:
        notes.append(f"{len(nulls)} rows have null there, which is read as NaN.")
        numbers |= dict.fromkeys(nulls, math.nan)
    if texts:
        notes.append(
            f"{len(texts)} entries are text and left out, such as {texts[0][:40]!r}."
        )
    steps = sorted(numbers)
    values = [numbers[step] for step in steps]
    return Column(name, np.array(steps), np.array(values), tuple(notes), empty)


def number_of(entry: object) -> float:
    """The number in an entry, also in a text. NaN is one.

    Raises:
      TypeError, ValueError, OverflowError: there is none.
    """
    # A protocol is slow to ask, and most entries are of these types.
    if isinstance(entry, (float, int, str, SupportsFloat)):
        return float(entry)
    raise TypeError("no number")


def is_number(entry: object) -> bool:
    try:
        number_of(entry)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _is_finite(entry: object) -> bool:
    return is_number(entry) and math.isfinite(number_of(entry))


def _is_empty(entry: object) -> bool:
    return entry is None or (isinstance(entry, str) and not entry.strip())


def listed(names: Sequence[str]) -> str:
    """Names in quotes, at most twelve."""
    left_out = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"{', '.join(map(repr, names[:12]))}{left_out}"


# ------------------------------------------------------------------- norms and losses

# Words of names that are no norm of the gradient of all weights before clipping.
NO_NORM = re.compile(
    r"(^|[^a-z])(args?|config|cfg|hparams?|max|min|clip|clipped|clipping|after|post"
    r"|params?|parameters?|weights?|residual|loss|limit|threshold|target|ratio|scale"
    r"|ema|std|var|ms|time|count|nonfinite|update|updates|moment|adam|noise|diff"
    r"|relative|coef|penalty|layer|batch|rms)([^a-z]|$)"
)
GRADIENT = r"(gradients?|grads?)"
# Names of norms, the surest first. They are held against the name in lower case.
NORMS = [
    re.compile(pattern)
    for pattern in (
        r"(.+/)?clip(_\d+)?/(.+/)?norm_before|(clip/)?norm_before",
        r"(.+/)?record(_\d+)?/(.+/)?norm",
        # MaxText and others: before clipping, beside the same name after it.
        r"(.+[/._ ])?(raw|unclipped|total|global|pre_clip)"
        rf"[/._ -]{GRADIENT}[._ -]?norm",
        rf"(.+[/._ -])?({GRADIENT}|g)[/._ -]?(l2|2\.0|inf|global)?[/._ -]?norm"
        r"([/._ -](total|global|all|l2|before|before_clip|pre_clip|preclip))?",
        rf"(.+/)?(l2_norm/{GRADIENT}/global|{GRADIENT}/norm/total|global_norm)",
        r"(.+/)?skip(_\d+)?/(.+/)?norm",
        r"norm|(train|training)[/._]norm",
    )
]
TENSORS = re.compile(
    r"(.+[/._ -])?(norm_before|record(_\d+)?/(.+/)?norm"
    rf"|{GRADIENT}[._ ]?(2\.0_)?norm)/.+"
)
LOSSES = re.compile(r"(.*[/._])?(train|training|tr)[/._]loss|loss|(.+/)?(total_)?loss")


def norms_of(log: Log) -> list[Column]:
    """The columns whose names say that they are norms of the gradient: one, or one of
    each optimizer.
    """
    names = {name: _plain_name(name) for name in log.columns}
    for regex in NORMS:
        columns = [
            log.columns[name]
            for name, plain in names.items()
            if regex.fullmatch(plain) and not _is_no_norm(name, log.texts)
        ]
        if columns:
            return [_of_every_step(log, column) for column in columns]
    return []


def norms_of_tensors(log: Log) -> list[Column]:
    """The columns whose names say that they are norms of single tensors."""
    return [
        column
        for name, column in log.columns.items()
        if TENSORS.match(_plain_name(name))
    ]


def _plain_name(name: str) -> str:
    """Without the run that W&B writes first, and without the number of a repeated name:
    "lively-sun-7 - train/grad_norm.1".
    """
    return re.sub(r"\.\d+$", "", name.rpartition(" - ")[2].lower())


def _is_no_norm(name: str, texts: Collection[str]) -> bool:
    # The norm of the worst tensor, as in `metrics(summary=True)`.
    if re.sub("norm(_before)?$", "worst_name", name) in texts:
        return True
    ours = re.sub(r"clip(_\d+)?/|(before|pre)_?clip", "", _plain_name(name))
    return NO_NORM.search(ours) is not None


def _of_every_step(log: Log, column: Column) -> Column:
    """The norms of a wrapper that skips steps, if it saw the gradients of this column:
    in a skipped step a clipper inside the wrapper keeps an earlier norm.
    """
    name = re.sub("(clip|record)/(.*?)norm(_before)?$", r"skip/\2norm", column.name)
    skipped = log.columns.get(f"{name.removesuffix('norm')}skipped")
    if name not in log.columns or name == column.name or skipped is None:
        return column
    wrapper = log.columns[name]
    _, (seen, norms, flags) = in_common([wrapper, column, skipped])
    is_skipped = flags != 0
    # A clipper in front of the wrapper sees a new norm in each step.
    is_kept = np.append(False, norms[1:] == norms[:-1])
    same = np.isclose(seen, norms, rtol=1e-3, atol=0, equal_nan=True)
    is_inside = is_kept[is_skipped].all() and same[~is_skipped].all()
    return wrapper if is_inside else column


def loss_of(log: Log) -> Column | None:
    """The column of the training loss, if its name says so."""
    names = {name: _plain_name(name) for name in log.columns}
    losses = [
        column
        for name, column in log.columns.items()
        if LOSSES.fullmatch(names[name])
        and not re.search("val|eval|test|aux", names[name])
    ]
    return max(losses, key=lambda column: len(column.steps), default=None)


def in_common(columns: Sequence[Column]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all columns have, and their numbers, [columns, steps]."""
    steps = columns[0].steps
    for column in columns[1:]:
        steps = np.intersect1d(steps, column.steps)
    rows = [column.values[np.isin(column.steps, steps)] for column in columns]
    return steps, np.array(rows)


def distance_of_steps(column: Column) -> int:
    """How many steps lie between two rows, 1 where all are logged."""
    if len(column.steps) < 2:
        return 1
    return max(1, int(np.median(np.diff(column.steps))))


def clipped_share(values: np.ndarray) -> float:
    """The share of norms that are the largest, where that looks like norms after a
    clip, and 0 elsewhere.
    """
    finite = values[np.isfinite(values) & (values > 0)]
    if len(finite) < 5:
        return 0.0
    # bfloat16 has two to three digits.
    is_largest = finite >= finite.max() * (1 - 1e-3)
    share = float(is_largest.mean())
    # Norms with few digits are often equal, also below the largest.
    digits = Counter(finite[~is_largest].tolist()).most_common(1)
    most_frequent = digits[0][1] / len(finite) if digits else 0.0
    return share if share >= 0.05 and share > 3 * most_frequent else 0.0
