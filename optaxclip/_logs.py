"""The one reader of training logs, for `replay` and `doctor`.

    bytes -> rows, a dict for each line or step -> columns of numbers

The first bytes of a file tell its format, not its name. Notes say what the reader left
out or decided.
"""

import ast
import csv
import io
import json
import math
import pkgutil
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from itertools import groupby, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Row = Mapping[str, object]  # cells by name: numbers, texts or None
Notes = list[str]


class Entry(NamedTuple):
    """A cell of a column, and its step."""

    step: int
    cell: object


class Column(NamedTuple):
    """The numbers under one name."""

    name: str
    steps: np.ndarray  # int64[entries], in ascending order
    values: np.ndarray  # float64[entries], NaN and inf among them
    notes: Sequence[str] = ()
    empty_cells: int = 0  # left out, and not in the notes


class Log(NamedTuple):
    """The columns of numbers of a file."""

    columns: dict[str, Column]
    notes: Notes


# ------------------------------------------------------------------------------- files

FORMATS_TEXT = (
    "The reader takes JSON lines, JSON, CSV with a header, printed dicts, .npy, .npz, "
    "event files of TensorBoard, each also in gzip, and text as UTF-8"
)


def read_log(path: str | Path, call: str, pattern: str | None = None) -> Log:
    """Reads a log file.

    Args:
      path: the file.
      call: the function that errors name.
      pattern: a regular expression for the lines of a text, None for other files. Its
        named groups are the columns. A group without a name is "grad_norm".

    Raises:
      ValueError: the file is not a log. The text begins with the call and the path.
      OSError: the file cannot be opened. The text begins likewise.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise type(error)(
            f"{call}: {str(path)[:200]}: {error.strerror}. Give the path of a log "
            f"file. A relative path begins in {Path.cwd()}."
        ) from error
    notes: Notes = []
    try:
        return log_of(_rows(data, pattern, notes), notes)
    # For a broken file NumPy, gzip and protobuf raise errors of many types.
    except Exception as error:
        raise ValueError(f"{call}: {path}: {error}") from error


def _rows(data: bytes, pattern: str | None, notes: Notes) -> Sequence[Row]:
    """The rows of a file, by the format that its first bytes tell."""
    if data.startswith(b"\x1f\x8b"):
        data = _unzipped(data, notes)
    if data.startswith((b"PK", b"\x93NUMPY")):
        return _rows_of_arrays(data, notes)
    # The first event of TensorBoard is the version of the file.
    if b"brain.Event:" in data[:64]:
        return _rows_of_events(data, notes)
    text = _cleaned_text(data)
    if not text or "\0" in text:
        raise ValueError(f"the file is empty or binary. {FORMATS_TEXT}.")
    if pattern is not None:
        return _rows_of_pattern(text, pattern)
    rows = _rows_of_table(text, notes) or _rows_of_dicts(text, notes)
    if not rows:
        raise ValueError(
            f"there is no table of numbers in it. {_advice_for_text(text)}"
        )
    return rows


def _cleaned_text(data: bytes) -> str:
    # Excel begins a CSV with a byte order mark.
    text = data.decode("utf-8-sig", errors="replace")
    # A crash of the machine may leave a block of zeros. Rows follow it if the run went
    # on.
    text = re.sub("\0{3,}", "\n", text)
    # torchtitan prints in colors.
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    # Tabs stay: a tab at the end of the text marks an empty last cell.
    return text.strip("\r\n ")


def _unzipped(data: bytes, notes: Notes) -> bytes:
    content = b""
    # A gzip file that was appended to has several members.
    while data:
        member = zlib.decompressobj(wbits=31)  # 31 stands for gzip.
        content += member.decompress(data)
        # A crash of the machine may leave zeros behind it.
        data = member.unused_data.lstrip(b"\0")
        if not member.eof:
            notes.append("The gzip file is cut off, and read up to there.")
    return content


def _rows_of_arrays(data: bytes, notes: Notes) -> Sequence[Row]:
    """The rows of an .npz, with a column for each array, or of an .npy, whose only
    column is "norm".
    """
    loaded = np.load(io.BytesIO(data))
    arrays = {"norm": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    columns: dict[str, object] = {}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(
                "it is a zip file without arrays, such as a spreadsheet or a "
                f"checkpoint. Save a spreadsheet as CSV. {FORMATS_TEXT}."
            )
        if array.ndim > 1:
            notes.append(
                f"{name!r} has the shape {array.shape}, which is not one number for "
                "each step, and is left out."
            )
        else:
            columns[name] = array.tolist()
    return _rows_in(columns)


def _rows_of_events(data: bytes, notes: Notes) -> list[Row]:
    event_type = None
    for package in ("tensorboard.compat", "tensorboardX"):
        with suppress(ImportError):
            event_type = pkgutil.resolve_name(f"{package}.proto.event_pb2:Event")
    if event_type is None:
        raise ValueError(
            "this is an event file of TensorBoard, which needs a package to read: pip "
            "install tensorboard"
        )
    rows: list[Row] = []
    end = 0
    while end < len(data):
        # A record is its length, a checksum of 4 bytes, an event, and another checksum.
        start = end + 12
        length = int.from_bytes(data[end : end + 8], "little")
        end = start + length + 4
        if end > len(data):
            notes.append("The event file is cut off, and read up to there.")
            break
        event = event_type.FromString(data[start : start + length])
        for value in event.summary.value:
            if value.HasField("simple_value"):
                rows.append({"step": event.step, value.tag: value.simple_value})
            # TensorFlow 2 writes scalars as tensors. 1 is float32.
            elif value.tensor.dtype == 1:
                content = np.frombuffer(value.tensor.tensor_content, np.float32)
                numbers = [*value.tensor.float_val, *content]
                if len(numbers) == 1:
                    rows.append({"step": event.step, value.tag: numbers[0]})
    return rows


# ------------------------------------------------------------------------------- dicts


def _rows_of_dicts(text: str, notes: Notes) -> Sequence[Row]:
    """The dicts that stand in a text, as JSON or as Python prints them."""
    dicts: list[Row] = []
    other_text = ""
    end = 0
    while (start := text.find("{", end)) >= 0:
        row, end_of_row = _dict_at(text, start)
        if row:
            dicts.append(row)
            other_text += f"{text[end:start]}\n"
        else:
            other_text += text[end:end_of_row]
        end = end_of_row
    other_text += text[end:]
    rows: Sequence[Row] = dicts
    if len(dicts) == 1:
        rows = _rows_in(dicts[0])
    # Without any number the braces are code, or other text.
    if not any(_has_number(_flattened(row).values()) for row in rows):
        return []
    left_out = [line for line in other_text.splitlines() if line.strip("\t ,[]")]
    if left_out:
        notes.append(
            f"{len(left_out)} lines or parts of lines are not in whole braces and are "
            f"left out. The last one is {left_out[-1].strip()[:60]!r}."
        )
    return rows


def _rows_in(row: Row) -> Sequence[Row]:
    """The rows of a whole file in one dict: trainer_state.json, pandas, or a dict of
    lists. Any other dict is one row.
    """
    rows_of_pandas = _rows_of_pandas(row)
    if rows_of_pandas:
        return rows_of_pandas
    tables: list[Sequence[Row]] = []
    lists: dict[str, list[object]] = {}
    for name, cell in _flattened(row).items():
        if isinstance(cell, list) and cell:
            lists[name] = cell
            if isinstance(cell[0], dict):
                tables.append(cell)
    if tables:
        return max(tables, key=len)
    if lists:
        # A list that is shorter than others ends in empty cells.
        tuples = zip_longest(*lists.values(), fillvalue="")
        return [dict(zip(lists, cells)) for cells in tuples]
    return [row]


def _rows_of_pandas(table: Row) -> list[Row]:
    """The rows of {"loss": {"0": 2.5, "1": 2.0}}, as `to_json` of pandas writes columns
    by default. No rows for another dict.
    """
    rows: dict[object, dict[str, object]] = defaultdict(dict)  # by index
    for name, cells in table.items():
        if not isinstance(cells, dict):
            return []
        for index, cell in cells.items():
            if not str(index).isdecimal():
                return []
            rows[index][name] = cell
    return [{"index": index, **row} for index, row in rows.items()]


def _dict_at(text: str, start: int) -> tuple[Row, int]:
    """The dict that begins at `start`, and where it ends. If no dict begins there, an
    empty dict and the next place.
    """
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (json.JSONDecodeError, RecursionError):
        # Python printed it. A printed dict may hold dicts, which hold no further dicts.
        printed = re.compile(r"\{([^{}\n]|\{[^{}\n]*\})*\}").match(text, start)
    if printed is None:
        return {}, start + 1
    # torch prints tensor(2.5, grad_fn=<MeanBackward0>).
    source = re.sub(r", grad_fn=<\w+>", "", printed[0])
    try:
        literal = _WithLiterals().visit(ast.parse(source, mode="eval"))
        return dict(ast.literal_eval(literal)), printed.end()
    except (ValueError, SyntaxError, TypeError, IndexError):
        # Braces of other text.
        return {}, start + 1


class _WithLiterals(ast.NodeTransformer):
    """Replaces the names nan and inf by numbers, and calls by their first arguments.
    NumPy and JAX print np.float64(2.5) and Array([1., nan], dtype=float32).
    """

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(float(node.id))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self.visit(node.args[0])


# ----------------------------------------------------------------------- CSV and text


def _rows_of_table(text: str, notes: Notes) -> Sequence[Row]:
    """The rows of a table whose first line has the names. No rows for another text."""
    # stable-baselines begins with a comment.
    comment = ""
    while text.startswith("#"):
        comment, _, text = text.partition("\n")
    # np.savetxt writes the names as a comment.
    if comment and re.match(r"[-+.\d]", text):
        text = f"{comment.lstrip('# ')}\n{text}"
    if text.startswith(("{", "[")):
        return []
    # The delimiter is in both of the first lines. A blank in the first line alone may
    # belong to the name of a single column.
    first_lines = text.splitlines()[:2]
    delimiter = ","
    for mark in " ,;\t":
        if all(mark in line for line in first_lines):
            delimiter = mark
    # Text that is no table has names in each line: "step 1 loss 2.5".
    named_number = r"(?i)(loss|norm)[ :=]+[-+.\d]"
    if delimiter == " " and re.search(named_number, first_lines[-1]):
        return []
    if delimiter == ";":
        # Spreadsheets write semicolons if their numbers have decimal commas.
        text = text.replace(",", ".")
    reader = csv.reader(
        text.splitlines(keepends=True), delimiter=delimiter, skipinitialspace=True
    )
    try:
        lines = [line for line in reader if line]
    except csv.Error:
        # In other text a quote may never close. All that follows it is then one cell,
        # which is too large for the reader.
        return []
    if not lines:
        return []
    names = [name.strip() for name in lines.pop(0)]
    # In ",0" pandas leaves out the name of the index, and calls a series 0.
    has_header = not names[0] or not _has_number(names)
    rows = [dict(zip(names, line)) for line in lines if len(line) == len(names)]
    rows_with_numbers = sum(_has_number(row.values()) for row in rows)
    # Most lines of a text that is no table have no number.
    if 2 * rows_with_numbers < len(lines) or not has_header:
        return []
    left_out = len(lines) - len(rows)
    if left_out:
        notes.append(
            f"{left_out} lines do not have {len(names)} entries and are left out."
        )
    # Runs of W&B may share a name, and so their columns do.
    if len(set(names)) < len(names):
        notes.append("Of columns with the same name the last one counts.")
    return rows


def _rows_of_pattern(text: str, pattern: str) -> list[Row]:
    expected = (
        "pattern must be a regular expression with a group for each column, such as "
        f"'norm: (?P<grad_norm>\\S+)', got {pattern!r}."
    )
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{expected} Python says: {error}.") from None
    if not regex.groups:
        raise ValueError(expected)
    rows: list[Row] = []
    for line in text.splitlines():
        row: dict[str, object] = {}
        for match in regex.finditer(line):
            groups = match.groupdict() or {"grad_norm": match[1]}
            for name, cell in groups.items():
                if cell is not None:
                    row[name] = cell.strip(",;:|()[]%")
        if row:
            rows.append(row)
    if not rows:
        raise ValueError(f"pattern {pattern!r} fits no line. {_advice_for_text(text)}")
    return rows


# How a line of text may name a step, a loss or a norm. For each, the first pattern says
# what may not stand before the label, and the second one is the label. "tokens/s: 512"
# has no step. nanoGPT prints "train loss 4.2, val loss 4.3" now and then, among lines
# with "loss 4.1".
LABELS = {
    "step": (r"(?<![/\w])", "step|iteration|iter|s"),
    "loss": (
        r"(?i:(?<!train[ /])(?<!val[ /])(?<!validation[ /])(?<!test[ /]))\b",
        "((train|training|lm)[ _/-])?loss|trl",
    ),
    "grad_norm": (r"\b", "((total|global|gradient|grad|g)[ _/-]?)*norm"),
}


def _advice_for_text(text: str) -> str:
    """Advises on a text that is no table: a --pattern with its most frequent labels."""
    patterns: dict[str, str] = {}
    counts = dict.fromkeys(LABELS, 0)
    for column, (before, label) in LABELS.items():
        matches = re.finditer(rf"(?i){before}({label})[ :=]+(?=[-+]?\.?\d)", text)
        labels = Counter(re.sub(" +", r"\\s*", match[0]) for match in matches)
        if labels:
            most_frequent, counts[column] = labels.most_common(1)[0]
            # A full stop at the end of a line is not in the number.
            patterns[column] = rf"{before}{most_frequent}(?P<{column}>[-+.\w]*\w)"
    count = max(counts["loss"], counts["grad_norm"])
    if count == 0:
        return f"{FORMATS_TEXT}. No line of this text names a loss or a norm."
    # Steps that are rarer than that stand in other lines, such as "saved step 100".
    if counts["step"] < count / 2:
        patterns.pop("step", None)
    pattern = "|".join(patterns.values())
    return (
        f"{FORMATS_TEXT}. Other text needs a pattern (in Python: pattern=...), here "
        f"--pattern '{pattern}'"
    )


# ----------------------------------------------------------------------------- columns

# Names of columns of steps, the surest first.
STEP_NAMES = (
    # Of optax.MultiSteps, where a row is written in every k-th step of the loop.
    "gradient_step",
    "step",
    "Step",
    "_step",
    "global_step",
    "train/global_step",
    "trainer/global_step",
    "iteration",
    "iter",
    "num_updates",
    "index",
)


def log_of(rows: Sequence[Row], notes: Notes) -> Log:
    """The columns of rows.

    Raises:
      ValueError: there is no number in them.
    """
    flat_rows = [_flattened(row) for row in rows]
    steps = _popped_steps(flat_rows, notes)
    entries_of: dict[str, list[Entry]] = defaultdict(list)  # by name
    for step, row in zip(steps, flat_rows):
        for name, cell in row.items():
            entries_of[name].append(Entry(step, cell))
    columns: dict[str, Column] = {}
    for name, entries in entries_of.items():
        column = _column(name, entries)
        # W&B writes the extremes of each number beside it.
        if column.steps.size and not name.endswith(("__MIN", "__MAX")):
            columns[name] = column
    if not columns:
        sentences = [
            f"there is no number in it. It has {len(rows)} rows with "
            f"{listed(list(entries_of)) or 'no names'}. A log has a row for each step, "
            'with a number under each name, such as {"loss": 2.5, "grad_norm": 1.0}.',
            *notes,
        ]
        raise ValueError(" ".join(sentences))
    return Log(columns, notes)


def _popped_steps(rows: Sequence[dict[str, object]], notes: Notes) -> Sequence[int]:
    """Takes the column of steps out of the rows, and returns the step of each row.
    Without such a column rows are counted.
    """
    step_name, begins_again = _name_of_steps(rows)
    if step_name is None:
        return range(len(rows))
    if begins_again:
        notes.append(
            f"The column {step_name!r} begins again, as in each epoch, and is counted "
            "on. If the run was started anew, delete the rows of earlier ones."
        )
    steps: list[int] = []
    step = 0
    steps_before = 0  # in earlier epochs
    for row in rows:
        number = _number(row.pop(step_name, None))
        # A row without a step has the step of the row before.
        if number is not None and math.isfinite(number):
            if begins_again and steps_before + number < step:
                steps_before = step + 1
            step = steps_before + int(number)
        steps.append(step)
    return steps


def _name_of_steps(rows: Sequence[Row]) -> tuple[str | None, bool]:
    """The column of steps, and whether they begin again in each epoch.

    A column whose steps do not begin again comes before the others. Among equals the
    surest name counts. None if no column has steps.
    """
    surest_name = None
    for name in STEP_NAMES:
        numbers = [_number(row.get(name)) for row in rows]
        steps = [number for number in numbers if number is not None]
        if steps and not _begin_again(steps):
            return name, False
        if steps and surest_name is None:
            surest_name = name
    return surest_name, surest_name is not None


def _begin_again(steps: Sequence[float]) -> bool:
    """Whether steps fall back to the first step, or below. A resumed run falls back to
    a later step. The second row does not count: it may be late, as in steps 1, 0, 2.
    """
    first = steps[0]
    return any(step <= first and step < before for before, step in pairwise(steps[1:]))


def _flattened(row: Row, group: str = "") -> dict[str, object]:
    """The cells of a row. {"train": {"loss": 1}} has train/loss."""
    cells: dict[str, object] = {}
    for name, cell in row.items():
        if isinstance(cell, Mapping):
            cells |= _flattened(cell, f"{group}{name}/")
        else:
            cells[f"{group}{name}"] = cell
    return cells


def _column(name: str, entries: Sequence[Entry]) -> Column:
    """The numbers of a column, with notes on the cells that it reads otherwise or
    leaves out.
    """
    nulls_are_nan = _are_nulls_nan(entries)
    numbers: list[tuple[int, float]] = []  # each with its step
    texts: list[str] = []
    nulls = 0
    empty_cells = 0
    for step, entries_of_step in groupby(entries, key=lambda entry: entry.step):
        cells = [entry.cell for entry in entries_of_step]
        # Null is an empty cell if another row of the step has a number: pandas writes
        # null in the row of an evaluation.
        if nulls_are_nan and all(cell is None for cell in cells):
            cells = [math.nan]
            nulls += 1
        for cell in cells:
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
    is_broken = (values == -1) & ("norm" in name.lower())
    if is_broken.any():
        values[is_broken] = math.nan
        notes.append(
            f"{is_broken.sum()} norms are -1, as DeepSpeed logs NaN and inf, and are "
            "read as NaN."
        )
    if replaced_steps:
        notes.append(
            f"Steps {min(replaced_steps)} to {max(replaced_steps)} come twice "
            f"({len(replaced_steps)} entries), as in a run that was resumed: the "
            "later entries count."
        )
    if nulls:
        notes.append(f"{nulls} rows have null there, which is read as NaN.")
    if texts:
        notes.append(f"{len(texts)} entries are text, and left out: {listed(texts)}.")
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
        # A resumed run goes back to an earlier step, and replaces all numbers that were
        # logged since. A new step below the last one is only late: jax.debug.callback
        # may write the steps 1, 3, 2.
        late_rows: list[tuple[int, float]] = []
        while step in values:
            last_step, last_number = values.popitem()
            if last_step < step:
                late_rows.append((last_step, last_number))
            else:
                replaced_steps.append(last_step)
        values.update(reversed(late_rows))
        values[step] = number
    return dict(sorted(values.items())), replaced_steps


def _are_nulls_nan(entries: Sequence[Entry]) -> bool:
    """Whether null stands for NaN, as in strict JSON. If a third or more of the entries
    up to the last number are null, it stands for an empty cell: the column is logged
    more rarely than others.
    """
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


def _number(cell: Any) -> float | None:
    """The number in a cell, also in a text such as "NaN". None if it has no number."""
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def _has_number(cells: Iterable[object]) -> bool:
    return any(_number(cell) is not None for cell in cells)


def listed(names: Sequence[str]) -> str:
    """Names in quotes, at most twelve."""
    left_out = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"{', '.join(map(repr, names[:12]))}{left_out}"


# ------------------------------------------------------------------- norms and losses

# Patterns of norms of the gradient, the surest first. They fit names in lower case, in
# which a blank replaces all signs.
NORM_PATTERNS = (
    # clip/norm_before, record/norm, of this library
    r"((.* )?clip( \d+)?( .*)? )?norm before",
    r"(.* )?record( \d+)?( .*)? norm",
    # learning/raw_grad_norm. MaxText and others log the norm after clipping beside it,
    # under a shorter name.
    r"(.* )?(raw|unclipped|total|global|pre clip) (gradient|grad) ?norm",
    # train/grad_norm, gnorm, grad_2.0_norm_total, grad_norm_before_clipping,
    # l2_norm/grad/global
    r"(.* )?(gradients?|grads?|g) ?(l2|2 0|inf|global)? ?norm"
    r"( (total|global|all|l2|step|before|(before|pre) ?clip(ping)?( step)?))?"
    r"|(.* )?(l2 norm grad global|(global|total) norm)",
    # skip/norm, norm
    r"(.* )?skip( \d+)?( .*)? norm",
    r"(train |training )?norm",
)
# Words in names of settings, of norms after clipping, and of norms of other things.
OTHER_WORDS = re.compile(
    r"\b(args?|config|cfg|hparams?|max|min|target|limit|threshold"
    r"|clip|clipped|clipping|after|post"
    r"|params?|parameters?|weights?|updates?|moment|adam|layer|batch|loss|residual"
    r"|noise|diff|relative|coef|penalty|ema|rms|std|var|scale|ratio"
    r"|time|ms|count|nonfinite)\b"
)
# record/norm/w, grad_2.0_norm/w, and not grad_norm/clipped or grad_norm/max
TENSOR_PATTERN = re.compile(
    r"(.*/)?(norm_before|record(_\d+)?/(.+/)?norm|(gradient|grad)s?(_2\.0)?_norm)/"
    r"(?!clipped$|after_|(min|max|mean|std|ema)$).+"
)
# train/loss, total_loss, train_loss_step, Loss/train
LOSS_PATTERN = re.compile(
    r"(?!.*(?<![a-z])(val|eval|test|aux))"
    r"((.*/)?((train|training|tr|total|lm)[/._ ])?loss(_step)?|(.*/)?loss/train)"
)
# Norms of record_health: health/norm, health/gradients/norm/w
HEALTH_PATTERN = re.compile(r"(.*[/. ])?health(_\d+)?/(.*/)?norm(/.*)?")


def norms_of(log: Log) -> list[Column]:
    """The columns whose names say that they are norms of the gradient: one, or one for
    each optimizer. Only the surest pattern that fits a name counts.
    """
    names = [name for name in log.columns if not _is_other_norm(name, log)]
    for pattern in NORM_PATTERNS:
        norms = [name for name in names if re.fullmatch(pattern, _words_of(name))]
        if norms:
            return [_with_skipped_steps(log, log.columns[name]) for name in norms]
    return []


def _without_run(name: str) -> str:
    """A name without the run that W&B writes first: "sun-7 - train/grad_norm"."""
    return name.rpartition(" - ")[2].lower()


def _words_of(name: str) -> str:
    """The words of a name: "train grad norm"."""
    return re.sub("[^a-z0-9]+", " ", _without_run(name)).strip()


def _is_other_norm(name: str, log: Log) -> bool:
    """Whether a column is a setting, or the norm of something else."""
    # record_health has norms of tensors, and in a summary the largest of them.
    if HEALTH_PATTERN.fullmatch(name):
        return True
    # metrics(summary=True) logs the norm of the worst tensor only, and which tensor it
    # is in worst_index. If that is always 0, there is probably only one tensor.
    prefix = name.removesuffix("_before").removesuffix("norm")
    worst_index = log.columns.get(f"{prefix}worst_index")
    if worst_index is not None and worst_index.values.any():
        return True
    # In Loss/grad_norm, "Loss" is a group of TensorBoard. In clip/norm_before, "clip"
    # is the name of a clipper.
    words = re.sub(
        r"clip( \d+)?(?=( .*)? norm before)|\b(before|pre) clip(ping)?\b",
        "",
        _words_of(re.sub("(?i)(?<![^/ ])loss/", "", name)),
    )
    return OTHER_WORDS.search(words) is not None


def _with_skipped_steps(log: Log, column: Column) -> Column:
    """The norms of a clipper, also in steps that a wrapper skipped.

    A clipper inside the wrapper does not see a skipped step, and logs its earlier norm
    again. A wrapper behind the clipper logs the norm after the clip, which is shorter.
    So in a skipped step the norm of the wrapper counts if it is longer, or if the
    clipper repeats its norm.
    """
    clipper = r"(clip|record)(_\d+)?/(.*?)norm(_before)?$"
    prefix = re.sub(clipper, r"skip\2/\3", column.name)
    wrapper = log.columns.get(f"{prefix}norm")
    flags = log.columns.get(f"{prefix}skipped")
    if wrapper is None or flags is None:
        return column
    steps, (norms_of_wrapper, norms, skipped) = in_common([wrapper, column, flags])
    is_repeated = np.append(False, norms[1:] == norms[:-1])[: len(norms)]
    # NaN counts as longer.
    is_longer = ~(norms_of_wrapper <= norms)
    is_old = (skipped > 0) & (is_repeated | is_longer)
    values = column.values.copy()
    values[np.isin(column.steps, steps)] = np.where(is_old, norms_of_wrapper, norms)
    return column._replace(values=values)


def losses_of(log: Log) -> list[Column]:
    """The column of the training loss, by its name: the longest one, or none."""
    losses = columns_named(LOSS_PATTERN, log)
    losses.sort(key=lambda column: len(column.steps), reverse=True)
    return losses[:1]


def columns_named(pattern: re.Pattern[str], log: Log) -> list[Column]:
    """The columns whose names, in lower case, fit a pattern."""
    return [
        column
        for name, column in log.columns.items()
        if pattern.fullmatch(_without_run(name))
    ]


def rows_kept(column: Column, is_kept: np.ndarray) -> Column:
    return column._replace(steps=column.steps[is_kept], values=column.values[is_kept])


def in_common(columns: Sequence[Column]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all columns have, and the numbers there, [columns, steps]."""
    steps = reduce(np.intersect1d, [column.steps for column in columns])
    rows = [column.values[np.isin(column.steps, steps)] for column in columns]
    return steps, np.array(rows)


def distance_of_steps(column: Column) -> int:
    """How many steps a row comes after the row before, 1 if each step is logged."""
    if len(column.steps) < 2:
        return 1
    return int(np.median(np.diff(column.steps)))


def clipped_share(values: np.ndarray) -> float:
    """The share of norms that are the largest, or 0 if it is too low for norms that
    were clipped.
    """
    norms = values[np.isfinite(values) & (values > 0)]
    if len(norms) < 5:
        return 0.0
    is_largest = are_largest(norms)
    share = float(is_largest.mean())
    # Norms that are logged with few digits are often equal, also below the largest.
    _, counts = np.unique(norms[~is_largest], return_counts=True)
    share_of_next = counts.max(initial=0) / len(norms)
    looks_clipped = share >= 0.05 and share > 3 * share_of_next
    return share if looks_clipped else 0.0


def are_largest(norms: np.ndarray) -> np.ndarray:
    """Which norms are the largest, to 0.1 %: bfloat16 has two to three digits."""
    return norms >= norms.max() * (1 - 1e-3)
