"""From a file to rows, a dict for each line or step.

The first bytes of a file tell its format, not its name.
"""

import ast
import csv
import gzip
import io
import json
import pkgutil
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import numpy as np

from .columns import THOUSANDS, Log, Notes, Row, flattened, has_number, log_from_rows
from .norms import loss_of, norms_of

FORMATS_TEXT = (
    "The reader takes JSON lines, JSON, CSV or a Markdown table that begins with its "
    "header, printed dicts, .npy, .npz, event files of TensorBoard, each also in gzip, "
    "and text as UTF-8"
)
# What to do with a file that NumPy, gzip or protobuf cannot read.
ADVICE_FOR_BROKEN_FILE = (
    "The file is broken, or holds no numbers. A log that survives a kill has a line "
    'for each step, such as {"step": 1, "grad_norm": 2.5}'
)
# Text that is no table has names in each line: "step 1 loss 2.5".
NAMED_NUMBER = r"(?i)(loss|norm)[ :=]+[-+.\d]"
START_OF_JSON = re.compile(r'\{\s*["}]')
JSON_DECODER = json.JSONDecoder()
# A dict that Python printed. Dicts inside it hold no further dicts, and do not begin a
# line: that would be the next row.
PRINTED_DICT = re.compile(r"\{[^{}]*((?<!\n)\{[^{}]*\}[^{}]*)*\}")
# A text is a log if at least so many lines have a loss or a norm.
LEAST_LINES_OF_LOG = 3


def read_log(path: str | Path, call: str, pattern: str | None = None) -> Log:
    """Reads a log file.

    Args:
      path: the file.
      call: the function that errors name.
      pattern: a regular expression for the lines of a text. Its named groups are the
        columns. A group without a name is "grad_norm". None for other files, and for
        the pattern of the most frequent labels of a text.

    Raises:
      ValueError: the file is not a log. The text begins with the call and the path.
      OSError: the file cannot be opened.
    """
    data = Path(path).read_bytes()
    notes: Notes = []
    try:
        return log_from_rows(_rows(data, pattern, notes), notes)
    except ValueError as error:
        raise ValueError(f"{call}: {path}: {error}") from error
    # For a broken file zipfile, gzip and protobuf raise errors of many types.
    except Exception as error:
        raise ValueError(
            f"{call}: {path}: {error}. {ADVICE_FOR_BROKEN_FILE}."
        ) from error


def _rows(data: bytes, pattern: str | None, notes: Notes) -> Sequence[Row]:
    """The rows of a file, by the format that its first bytes tell."""
    if data.startswith(b"\x1f\x8b"):
        data = _unzipped(data, notes)
    if data.startswith((b"PK\3\4", b"\x93NUMPY")):
        return _rows_of_arrays(data, notes)
    # The first event of TensorBoard is the version of the file.
    if b"brain.Event:" in data[:64]:
        return _rows_of_events(data, notes)
    text = _cleaned_text(data)
    if not text:
        raise ValueError(f"the file is empty. {FORMATS_TEXT}.")
    if "\0" in text:
        raise ValueError(f"the file is binary. {FORMATS_TEXT}.")
    if pattern is not None:
        return _rows_by_given_pattern(text, pattern, notes)
    notes_on_rows: Notes = []
    rows = _rows_of_table(text, notes_on_rows) or _rows_of_dicts(text, notes_on_rows)
    # A program may print its settings as a dict, and then a text with more numbers.
    named_numbers = len(re.findall(NAMED_NUMBER, text))
    if rows and (named_numbers <= len(rows) or _has_loss_or_norm(rows)):
        notes += notes_on_rows
        return rows
    return _rows_of_text(_without_commas(text, notes), notes)


def _has_loss_or_norm(rows: Sequence[Row]) -> bool:
    """Whether a name of a column says that it is a loss or a norm of the gradient."""
    try:
        log = log_from_rows(rows, [])
    except ValueError:
        # Settings without a number are no log. Their loss is a text, such as "mse".
        return False
    return loss_of(log) is not None or bool(norms_of(log))


def _cleaned_text(data: bytes) -> str:
    """The text of a file, without marks, NUL bytes and colors, and with numbers in the
    place of printed arrays.
    """
    # Excel begins a CSV with a byte order mark.
    text = data.decode("utf-8-sig", errors="replace")
    # A crash of the machine may leave a block of zeros, and the next run writes after
    # it.
    text = re.sub("\0{3,}", "\n", text)
    # torchtitan prints in colors.
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    # NumPy, JAX and torch print np.float64(2.5), Array([1., nan], dtype=float32) and
    # tensor(2.5, grad_fn=<MeanBackward0>).
    # The search is slow. Most JSON and CSV has no parenthesis, and needs none.
    if "(" in text:
        arrays = r"\b(?:np\.\w+|[Aa]rray|tensor)\((\[[^()]*\]|[-+.\w]+)[^()]*\)"
        text = re.sub(arrays, r"\1", text)
    # Tabs stay: a tab at the end of the text marks an empty last cell.
    return text.strip("\r\n ")


def _without_commas(text: str, notes: Notes) -> str:
    """A text such as "loss 2,5 norm 0,83" with points in the place of commas, or one
    such as "loss 850 norm 1,250" without commas. A text in which a loss or a norm has a
    decimal point is returned as it is.
    """
    numbers = re.findall(r"(?i)(?:loss|norm)[ :=]+[-+]?(\d[\d.,]*|\.\d+)", text)
    numbers = [number.rstrip(".,") for number in numbers]
    numbers_with_comma = [number for number in numbers if "," in number]
    if not numbers_with_comma or any("." in number for number in numbers):
        return text
    # Decimal commas with three digits after them look like thousands separators, but
    # then every number has one.
    may_be_thousands = len(numbers_with_comma) < len(numbers)
    with_thousands = re.compile(r"[1-9]\d{0,2}(,\d{3})+")
    if may_be_thousands and all(map(with_thousands.fullmatch, numbers_with_comma)):
        notes.append("Commas between digits are read as thousands separators.")
        return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    notes.append("Commas between digits are read as decimal points.")
    return re.sub(r"(?<=\d),(?=\d)", ".", text)


def _unzipped(data: bytes, notes: Notes) -> bytes:
    """The content of a gzip file, up to where it is cut off."""
    file = gzip.GzipFile(fileobj=io.BytesIO(data))
    content = bytearray()
    try:
        # `read1` returns what is there, also of a file that ends too early.
        while chunk := file.read1(2**20):
            content += chunk
    except EOFError:
        notes.append("The gzip file is cut off, and read up to there.")
    return bytes(content)


def _rows_of_arrays(data: bytes, notes: Notes) -> Sequence[Row]:
    """The rows of an .npz, with a column for each array, or of an .npy, whose only
    column is "norm".
    """
    try:
        loaded = np.load(io.BytesIO(data))
        arrays = {"norm": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except ValueError as error:
        raise ValueError(f"{error}. {ADVICE_FOR_BROKEN_FILE}.") from error
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
    return _rows_of_single_dict(columns)


def _rows_of_events(data: bytes, notes: Notes) -> list[Row]:
    """A row for each scalar of an event file of TensorBoard."""
    event_type = None
    for package in ("tensorboard.compat", "tensorboardX"):
        with suppress(ImportError):
            event_type = pkgutil.resolve_name(f"{package}.proto.event_pb2:Event")
            break
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
        if row is None:
            columns = _columns_up_to_cut(text) if start == 0 else {}
            if columns:
                notes.append("The JSON is cut off, and read up to there.")
                return _rows_of_single_dict(columns)
            other_text += text[end:end_of_row]
        else:
            other_text += f"{text[end:start]}\n"
            dicts.append(row)
        end = end_of_row
    other_text += text[end:]
    # An empty dict is no row.
    rows: Sequence[Row] = [row for row in dicts if row]
    if len(rows) == 1:
        rows = _rows_of_single_dict(rows[0])
    # Without any number the braces are code, or other text.
    if not any(has_number(flattened(row).values()) for row in rows):
        return []
    left_out = [line for line in other_text.splitlines() if line.strip("\t ,[]")]
    if left_out:
        notes.append(
            "Pieces of text outside of complete {...} are left out: "
            f"{len(left_out)}. The last one is {left_out[-1].strip()[:60]!r}."
        )
    return rows


def _rows_of_single_dict(content: Row) -> Sequence[Row]:
    """The rows of a file that is a single dict: trainer_state.json, pandas, or a dict
    of lists. Any other dict is one row.
    """
    rows_of_pandas = _rows_of_pandas(content)
    if rows_of_pandas:
        return rows_of_pandas
    tables: list[Sequence[Row]] = []
    lists: dict[str, list[object]] = {}
    for name, cell in flattened(content).items():
        if isinstance(cell, list) and cell:
            lists[name] = cell
            if isinstance(cell[0], dict):
                tables.append(cell)
    if tables:
        return max(tables, key=len)
    if lists:
        # A list that is shorter than others ends in empty cells.
        tuples = zip_longest(*lists.values(), fillvalue="")
        rows = [dict(zip(lists, cells)) for cells in tuples]
        # Numbers beside the lists stand in the first row.
        return [flattened(content) | rows[0], *rows[1:]]
    return [content]


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


def _columns_up_to_cut(text: str) -> Row:
    """The columns of a text such as `{"step": [1, 2], "loss": [2.5, 1`, whose end is
    missing. An empty dict for another text.
    """
    # The last number, or the last name, may be cut in two.
    whole_entries, _, _ = text.rpartition(",")
    # The cut is in a list or after it, in the outermost dict or in one group of it.
    for closing in ("]}", "}", "]}}", "}}"):
        with suppress(json.JSONDecodeError, RecursionError):
            return json.loads(whole_entries + closing)
    return {}


def _dict_at(text: str, start: int) -> tuple[Row | None, int]:
    """The dict that begins with the brace at `start`, and where it ends. If the brace
    begins no dict, None and the next place.
    """
    # Python's quotes are not read as JSON: the error would count all lines before them.
    if START_OF_JSON.match(text, start):
        with suppress(json.JSONDecodeError, RecursionError):
            return JSON_DECODER.raw_decode(text, start)
    printed = PRINTED_DICT.match(text, start)
    if printed is None:
        return None, start + 1
    try:
        literal = _WithLiterals().visit(ast.parse(printed[0], mode="eval"))
        row = ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError):
        row = None
    # Other text has braces too, and a set prints like a dict.
    return (row, printed.end()) if isinstance(row, dict) else (None, start + 1)


class _WithLiterals(ast.NodeTransformer):
    """Replaces the names nan and inf by numbers. ValueError for any other name."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(float(node.id))


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
    for punctuation in " ,;\t|":
        if all(punctuation in line for line in first_lines):
            delimiter = punctuation
    if delimiter == " " and re.search(NAMED_NUMBER, first_lines[-1]):
        return []
    if delimiter == ";":
        # Spreadsheets write semicolons if their numbers have decimal commas.
        text = text.replace(",", ".")
    if delimiter == "|":
        # Markdown puts a line of dashes under the header, and bars around each line.
        lines = []
        for line in text.splitlines():
            if line.strip("-|: \t"):
                lines.append(line.strip().removeprefix("|").removesuffix("|"))
        text = "\n".join(lines)
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
    # The header ",0" is of pandas: an index without a name, and a series called 0.
    has_header = not names[0] or not has_number(names)
    rows = [dict(zip(names, line)) for line in lines if len(line) == len(names)]
    rows_with_numbers = sum(has_number(row.values()) for row in rows)
    # Most lines of a text that is no table have no number.
    if 2 * rows_with_numbers < len(lines) or not has_header:
        return []
    left_out = len(lines) - len(rows)
    if left_out:
        notes.append(
            f"Lines that do not have {len(names)} entries are left out: {left_out}."
        )
    # Runs of W&B may share a name, and so their columns do.
    if len(set(names)) < len(names):
        notes.append("Of columns with the same name the last one counts.")
    return rows


def _rows_by_given_pattern(text: str, pattern: str, notes: Notes) -> list[Row]:
    """The rows of a text by a pattern of the user's.

    Raises:
      ValueError: the pattern is no regular expression with groups, or fits no line.
    """
    expected = (
        "pattern must be a regular expression with a group for each column, such as "
        f"'norm: (?P<grad_norm>\\S+)', got '{pattern}'."
    )
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{expected} Python says: {error}.") from None
    if not regex.groups:
        raise ValueError(expected)
    notes_on_commas: Notes = []
    text_without_commas = _without_commas(text, notes_on_commas)
    rows = _rows_of_pattern(text_without_commas, regex)
    if rows:
        notes += notes_on_commas
        return rows
    # The pattern may have the commas itself.
    rows = _rows_of_pattern(text, regex)
    if not rows:
        advice = _advice_for_text(_pattern_of_frequent_labels(text_without_commas))
        raise ValueError(f"pattern '{pattern}' fits no line. {advice}")
    return rows


def _rows_of_pattern(text: str, regex: re.Pattern[str]) -> list[Row]:
    """A row for each step in a line that a pattern fits. A line may have several."""
    rows: list[Row] = []
    for line in text.splitlines():
        row: dict[str, object] = {}
        for match in regex.finditer(line):
            groups = match.groupdict() or {"grad_norm": match[1]}
            for name, cell in groups.items():
                # A group that fits no character begins no new step.
                if cell is None or (name in row and not cell):
                    continue
                if name in row:
                    rows.append(row)
                    row = {}
                row[name] = cell.strip(",;:|()[]%")
        if row:
            rows.append(row)
    return rows


# How a line of text may name a step, a learning rate, a loss or a norm: a lookbehind
# for what may not stand before the label, and the pattern of the label. "tokens/s: 512"
# has no step. nanoGPT prints "train loss 4.2, val loss 4.3" now and then, among lines
# with "loss 4.1".
LABELS = {
    "step": (
        r"(?<![/\w])",
        r"(global[ _])?steps?|iteration|iter(\(train\))?|it|num_updates"
        r"|total_timesteps|s",
    ),
    "lr": (r"(?<![/\w])", "lr|learning[ _]rate"),
    "loss": (
        r"(?i:(?<!train[ /])(?<!val[ /])(?<!validation[ /])(?<!test[ /]))\b",
        "((train|training|lm|total|avg|step|batch)[ _/-])?(ce |crossentropy)?loss"
        "( train)?|trl",
    ),
    # verl prints actor/grad_norm and critic/grad_norm, Lightning grad_2.0_norm_total,
    # and ENAS |g|. Megatron prints the norm of the weights as well, "params norm".
    "grad_norm": (
        r"(?<!\w)(?i:(?<!params )(?<!param )(?<!weight )(?<!update )"
        r"(?<!clipped )(?<!max ))",
        r"(\w+/)*((total|global|gradient|grad|g|2\.0)[ _/-]?)*norm(_total)?"
        r"|\|+(g|grad|gradient)\|+|grdn",
    ),
}
# Other numbers are no step: DeepSpeed prints the time of one, "step: 1172.5", lerobot
# "step:2K", and tqdm "Steps: 10%".
STEP_NUMBER = r"\d+\b(?!%|[.,]\d)"


def _shortest_pattern(
    column: str, label_pattern: str, lookbehind: str, text: str
) -> str:
    """The simplest pattern that finds the numbers after a label in a text.
    `label_pattern` and `lookbehind` are patterns too.
    """
    # A number ends with a letter or a digit, and not with the full stop of a sentence.
    # The simple pattern also takes words, such as "scale" in "loss scale 65536".
    simple_number = r"\S*\w"
    number = rf"(?:{THOUSANDS}\b|(?i:[-+.]*(?:\d|nan|inf)[-+.\w]*)\b)"
    # A step has only digits: the label "s" also fits the end of "iterations", before a
    # word.
    if column == "step":
        simple_number = r"\d+"
        number = STEP_NUMBER
    pattern = f"{lookbehind}{label_pattern}(?P<{column}>{number})"
    numbers = re.findall(pattern, text)
    for shorter_pattern in (
        f"{label_pattern}(?P<{column}>{simple_number})",
        f"{lookbehind}{label_pattern}(?P<{column}>{simple_number})",
        f"{label_pattern}(?P<{column}>{number})",
    ):
        if re.findall(shorter_pattern, text) == numbers:
            return shorter_pattern
    return pattern


def _pattern_of_label(label: str) -> str:
    """The pattern of a label, with any number of blanks in it and after it. Programs
    pad numbers with blanks: "norm=   2.5", and then "norm=1000.5".
    """
    label = label.rstrip()
    # After a word at least one blank: "loss" would fit the beginning of Swin's
    # "loss_scale".
    blanks = r"\s+" if label[-1].isalnum() else r"\s*"
    return re.sub(r"(\\ )+", r"\\s*", re.escape(label)) + blanks


def _rows_of_text(text: str, notes: Notes) -> list[Row]:
    """The rows of a text that is no table, by the pattern of its most frequent labels.

    Raises:
      ValueError: the pattern finds few of the losses and norms.
    """
    pattern = _pattern_of_frequent_labels(text)
    reason = ""
    if pattern:
        rows = _rows_of_pattern(text, re.compile(pattern))
        # Documents and programs name losses and norms, mostly without a number.
        naming_lines = re.findall(r"(?im)^.*(?:loss|norm)", text)
        losses_and_norms = [
            [cell for name, cell in row.items() if name not in ("step", "lr")]
            for row in rows
        ]
        count = sum(map(has_number, losses_and_norms))
        if count >= LEAST_LINES_OF_LOG and 2 * count > len(naming_lines):
            notes.append(
                f"The text is read with --pattern '{pattern}' (in Python: "
                "pattern=...). Give another one if numbers are missing or wrong."
            )
            return rows
        reason = (
            f". It is not taken by itself, since it finds {count} rows, and "
            f"{len(naming_lines)} lines name a loss or a norm"
        )
    advice = _advice_for_text(pattern)
    raise ValueError(f"there is no table of numbers in it. {advice}{reason}")


def _advice_for_text(pattern: str) -> str:
    """What to do with a text that is no table and has this frequent pattern, or none:
    give a --pattern.
    """
    if not pattern:
        return (
            f"{FORMATS_TEXT}. No line of this text has a number behind loss or norm. "
            "For another name give a pattern (in Python: pattern=...), such as "
            r"--pattern 'NAME\s*(?P<grad_norm>\S+)'"
        )
    return (
        "Such text needs a pattern (in Python: pattern=...), here --pattern "
        f"'{pattern}'"
    )


def _pattern_of_frequent_labels(text: str) -> str:
    """The pattern of the most frequent labels of a text. It is empty if no number has
    the label of a loss or a norm.
    """
    label_counts = {quantity: _label_patterns_in(quantity, text) for quantity in LABELS}
    # How often the most frequent label of a quantity is used.
    uses = {
        quantity: max(counts.values(), default=0)
        for quantity, counts in label_counts.items()
    }
    loss_or_norm_count = max(uses["loss"], uses["grad_norm"])
    if loss_or_norm_count == 0:
        return ""
    # If a step or a rate has its label in less than half as many places as the loss or
    # the norm, it stands in other lines, such as "saved step 100".
    least_uses = loss_or_norm_count / 2
    patterns: dict[str, str] = {}  # by column
    for quantity, (lookbehind, _) in LABELS.items():
        if quantity in ("step", "lr") and uses[quantity] < least_uses:
            continue
        by_column = _label_pattern_by_column(quantity, label_counts[quantity])
        for column, label_pattern in by_column.items():
            patterns[column] = _shortest_pattern(
                column, label_pattern, lookbehind, text
            )
    if uses["step"] < least_uses:
        net_rises, pattern = _steps_without_label(text)
        if net_rises >= least_uses:
            patterns["step"] = pattern
    return "|".join(patterns.values())


def _label_patterns_in(quantity: str, text: str) -> Counter[str]:
    """The labels of a quantity in a text, each as a pattern, and how often each stands
    before a number.
    """
    lookbehind, any_label = LABELS[quantity]
    # A run may have NaN from its first line on.
    number = STEP_NUMBER if quantity == "step" else r"[-+]?(\.?\d|nan\b|inf\b)"
    # mmdet prints "Iter [50/900]", and stable-baselines "loss | 2.5".
    gap = rf"[ :=|]+\[? *(?={number})"
    matches = re.finditer(rf"(?i){lookbehind}({any_label}){gap}", text)
    return Counter(_pattern_of_label(match[0]) for match in matches)


def _label_pattern_by_column(
    quantity: str, label_counts: Counter[str]
) -> dict[str, str]:
    """The columns of a quantity with the patterns of their labels: one column with the
    most frequent label, or one for each optimizer.
    """
    if not label_counts:
        return {}
    most_frequent, most_uses = label_counts.most_common(1)[0]
    # Each of several optimizers has a group, as in critic/grad_norm. verl leaves out
    # the actor's norm in the first steps.
    patterns_with_group = {
        _column_name(label_pattern): label_pattern
        for label_pattern, uses in label_counts.items()
        if "/" in label_pattern and uses >= most_uses / 2
    }
    if len(patterns_with_group) > 1:
        return patterns_with_group
    return {quantity: most_frequent}


def _column_name(label_pattern: str) -> str:
    """The name of a group for the pattern of a label. It may not begin with a digit."""
    name = re.sub(r"(\\s[*+]|\W)+", "_", label_pattern).strip("_")
    return f"_{name}" if name[0].isdigit() else name


def _steps_without_label(text: str) -> tuple[float, str]:
    """(net_rises, pattern): the pattern of steps without a label, such as the 250 of
    "250/400", and how often these numbers rise, less how often they fall. The pattern
    with the most net rises is taken: an epoch stays the same for many lines, and
    "45/64 right" rises and falls.
    """
    totals = Counter(re.findall(r"\d+/(\d+)\b", text))
    patterns = [rf"\b(?P<step>\d+)/{total}\b" for total, _ in totals.most_common(5)]
    # clu prints "logging_writer.py:48] [250]".
    patterns.append(r"\] \[(?P<step>\d+)\]")
    candidates: list[tuple[float, str]] = []
    for pattern in patterns:
        steps = np.array(re.findall(pattern, text), float)
        net_rises = np.sign(np.diff(steps)).sum()
        candidates.append((net_rises, pattern))
    return max(candidates)
