"""Why does a run break? Reads the log of `record_health`, and names causes.

    python -m optaxclip.doctor run.jsonl           a table, and run_doctor.png
    python -m optaxclip.doctor run.jsonl --json    the same as JSON

    diagnose    the findings of a log: cause, step, evidence, and the page that helps

    cause             is named from the first step at which
    not finite        a tensor has an element that is NaN or inf
    bad batch         the norm is 5 times the largest of the 20 before
    learning rate     updates are a tenth of the weights, in the median of 5 steps
    underflow         a quarter of the elements of a tensor that are not 0 are
                      subnormal, in the median of 5 steps
    dead embedding    a tenth of the rows of an embedding are dead
    attention logits  a column with "logit" in its name is above 100

What it knows is a log. A cause that leaves no mark in these numbers is not found, and
where nothing is found the run may break all the same.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._health import HEALTH
from ._names import with_our_names
from .replay._read import Rows, Table, add_entries, read_with

__all__ = ["Finding", "diagnose"]

# What a number is held against. Of six small runs that break and six that do not
# (tests/doctor), the healthy ones stay below half of each.
SPIKE = 5.0  # times the largest of the last norms
BEFORE = 20  # how many
UPDATE = 0.1  # of the norm of the weights
SUBNORMAL = 0.25  # of the elements that are not 0
DEAD = 0.1  # of the rows of an embedding
LOGIT = 100.0  # as in Kimi K2
MEDIAN = 5  # steps
STEPS = ["step", "_step", "global_step", "Step", "iteration"]
# "health_2/updates/norm/blocks/w": the recorder, the sign and the tensor.
COLUMN = re.compile(rf"(health.*?)/({'|'.join(HEALTH)})(?:/(.*))?")
ADVICE = {
    "not finite": (
        "run_health.md",
        "leave such steps out with skip_nonfinite, and look at the backward pass "
        "between the tensors that are finite and those that are not",
    ),
    "bad batch": (
        "run_health.md#rollback",
        "leave such steps out with skip_step, and look at the batch",
    ),
    "learning rate": (
        "run_health.md",
        "a lower learning rate, or a longer warm-up",
    ),
    "underflow": (
        "sharp_edges.md#loss-scaling",
        "a larger loss scale, or bfloat16",
    ),
    "dead embedding": (
        "doctor.md#dead-rows",
        "look at the tokens of the batches, and at weight decay on rows that "
        "are not read",
    ),
    "attention logits": (
        "large_models.md#attention-logits-qk-clip",
        "qk_clip after the optimizer, or a norm of queries and keys",
    ),
}


class Finding(NamedTuple):
    """One cause, and the number that shows it.

    Attributes:
      cause: "not finite", "bad batch", "learning rate", "underflow", "dead embedding"
        or "attention logits".
      step: the first one that shows it.
      value: the number that was seen there.
      limit: what it was held against.
      evidence: both in words, with the tensors.
      page: of the documentation, with the section.
      advice: what to do, in a line.
    """

    cause: str
    step: int
    value: float
    limit: float
    evidence: str
    page: str
    advice: str


class Recorder(NamedTuple):
    """What one `record_health` wrote. Each sign has a column for each tensor."""

    name: str
    steps: np.ndarray
    signs: dict[
        str, tuple[list[str], np.ndarray]
    ]  # tensors, float64[steps, N]

    def total(self, sign: str) -> np.ndarray:
        """The norm of all tensors together."""
        squares = self.signs[sign][1] ** 2
        return np.sqrt(squares.sum(axis=1))


def diagnose(log: str | Path | Rows) -> list[Finding]:
    """Names the causes that a log shows, the earliest first.

    Args:
      log: a file that `optaxclip.replay.read_history` can read, or its rows: a dict for
        each step, such as {"step": 3, **optaxclip.metrics(state, floats=True)}. Without
        a column "step" rows are counted from 0.

    Returns:
      A `Finding` for each cause. The first one is what to look at, since later ones may
      follow from it. None of them says that a run is healthy.

    Raises:
      ValueError: a log without the numbers of `record_health`, or a file that cannot be
        read. The text names it.

    Example:
      >>> rows = [{"health/norm/w": 1.0 + step % 2} for step in range(40)]
      >>> rows[30]["health/norm/w"] = 50.0
      >>> (found,) = optaxclip.doctor.diagnose(rows)
      >>> print(found.step, found.cause, found.evidence)
      30 bad batch norm 50, 25 times the largest of the 20 before
    """
    if isinstance(log, (str, Path)):
        return read_with(diagnose, log, "diagnose")
    return _findings(*_read(log))


# -------------------------------------------------------------------------- the columns


def _read(rows: Rows) -> tuple[list[Recorder], Table]:
    """The recorders of a log, and its other columns: {name: [(step, number), ...]}."""
    columns: Table = {}
    lines: dict[str, dict[Any, dict[Any, float]]] = {}
    for number, row in enumerate(rows):
        entries: Table = {}
        add_entries(entries, row)
        known = [entries[name][0] for name in STEPS if name in entries]
        step = int(float(known[0])) if known else number
        for column, (entry,) in entries.items():
            try:
                value = float(entry)
            except (TypeError, ValueError):  # a text
                continue
            found = COLUMN.fullmatch(column)
            if found:
                recorder, *key = found.groups()
                own = lines.setdefault(recorder, {}).setdefault(step, {})
                own[tuple(key)] = value
            else:
                columns.setdefault(column, []).append((step, value))
    if not lines:
        raise ValueError(
            "diagnose: there must be numbers of record_health in the log, such as "
            f"'health/norm/w', got the columns {list(columns)[:8]}. Put "
            "optaxclip.record_health() into the optimizer, and log metrics(state)."
        )
    return [_recorder(*pair) for pair in lines.items()], columns


def _recorder(name: str, lines: dict[Any, dict[Any, float]]) -> Recorder:
    keys = dict.fromkeys(key for line in lines.values() for key in line)
    signs = {}
    for sign in dict.fromkeys(sign for sign, _ in keys):
        tensors = [tensor for own, tensor in keys if own == sign]
        # Layers by number: "blocks/2" before "blocks/10".
        tensors.sort(key=_by_number)
        # JSON has no NaN: what is missing in a line of others was not finite.
        table = []
        for line in lines.values():
            table.append([line.get((sign, x), np.nan) for x in tensors])
        signs[sign] = [x or "" for x in tensors], np.array(table)
    return Recorder(name, np.array(list(lines)), signs)


def _by_number(tensor: str | None) -> list[Any]:
    parts = re.split(r"(\d+)", tensor or "")
    return [int(x) if x.isdigit() else x for x in parts]


# --------------------------------------------------------------------------- the causes


def _findings(recorders: list[Recorder], columns: Table) -> list[Finding]:
    found = list(_of_logits(columns))
    for own in recorders:
        found += _of_finite(own)
        if "update" in own.name:
            found += _of_updates(own)
        else:
            found += _of_batches(own)
            found += _of_shares(own)
    first: dict[str, Finding] = {}
    for finding in sorted(found, key=lambda each: each.step):
        # Two recorders may see one cause.
        first.setdefault(finding.cause, finding)
    return list(first.values())


def _first(
    cause: str, own: Recorder, numbers: np.ndarray, limit: float, text: str
) -> Iterator[Finding]:
    """The first step at which a number is above its limit."""
    above = np.flatnonzero(numbers > limit)
    if above.size:
        step, value = own.steps[above[0]], float(numbers[above[0]])
        evidence = text.format(value, row=above[0])
        yield Finding(cause, int(step), value, limit, evidence, *ADVICE[cause])


def _of_finite(own: Recorder) -> Iterator[Finding]:
    tensors, norms = own.signs["norm"]
    counts = (~np.isfinite(norms)).astype(float)
    if "nonfinite" in own.signs:
        tensors, counts = own.signs["nonfinite"]
    rows = np.flatnonzero((counts > 0).any(axis=1))
    if not rows.size:
        return
    broken = counts[rows[0]] > 0
    # Those beside a broken one, in the order of their names.
    padded = np.pad(broken, 1)
    beside = (padded[:-2] | padded[2:]) & ~broken
    lists = []
    for which in (broken, beside):
        lists.append(", ".join(np.array(tensors)[which][:8]) or "none")
    text = (
        f"{broken.sum()} of {broken.size} tensors are not finite: {lists[0]}. "
        f"Finite beside them: {lists[1]}"
    )
    yield from _first("not finite", own, counts.max(axis=1), 0.0, text)


def _of_batches(own: Recorder) -> Iterator[Finding]:
    total = own.total("norm")
    ratios = np.zeros(len(total))
    for row in range(BEFORE // 2, len(total)):
        ratios[row] = total[row] / total[max(0, row - BEFORE) : row].max()
    text = f"{{:.3g}} times the largest of the {BEFORE} before"
    for finding in _first("bad batch", own, ratios, SPIKE, text):
        norm = total[list(own.steps).index(finding.step)]
        evidence = f"norm {norm:.3g}, {finding.evidence}"
        yield finding._replace(evidence=evidence)


def _of_updates(own: Recorder) -> Iterator[Finding]:
    if "weight_norm" in own.signs:
        ratios = own.total("norm") / own.total("weight_norm")
        text = "updates {:.2g} times as long as the weights, median of 5 steps"
        yield from _first("learning rate", own, _medians(ratios), UPDATE, text)


def _of_shares(own: Recorder) -> Iterator[Finding]:
    if "subnormals" in own.signs:
        tensors, small = own.signs["subnormals"]
        alive = 1 - own.signs["zeros"][1]
        shares = np.where(alive > 0, small / np.where(alive > 0, alive, 1), 0)
        medians = np.stack([_medians(x) for x in shares.T], axis=1)
        text = "{:.0%} of the elements that are not 0 are subnormal, in "
        yield from _worst("underflow", own, tensors, medians, SUBNORMAL, text)
    if "dead_rows" in own.signs:
        text = "{:.0%} of the rows had no gradient for long, in "
        tables = own.signs["dead_rows"]
        yield from _worst("dead embedding", own, *tables, DEAD, text)


def _worst(
    cause: str,
    own: Recorder,
    tensors: list[str],
    numbers: np.ndarray,
    limit: float,
    text: str,
) -> Iterator[Finding]:
    """The first step at which the largest number of all tensors is above its limit."""
    for finding in _first(cause, own, numbers.max(axis=1), limit, text):
        row = list(own.steps).index(finding.step)
        tensor = tensors[int(numbers[row].argmax())]
        yield finding._replace(evidence=finding.evidence + tensor)


def _of_logits(columns: Table) -> Iterator[Finding]:
    for name, pairs in columns.items():
        # The limit of a clipper is not its logit.
        if "logit" in name.lower() and not re.search("/(limit|factor)", name):
            steps, numbers = np.array(pairs).T
            own = Recorder(name, steps, {})
            text = f"{name} is {{:.4g}}"
            yield from _first("attention logits", own, numbers, LOGIT, text)


def _medians(numbers: np.ndarray) -> np.ndarray:
    """The median of the last steps, 0 before there are as many."""
    found = np.zeros(len(numbers))
    for row in range(MEDIAN, len(numbers) + 1):
        found[row - 1] = np.median(numbers[row - MEDIAN : row])
    return found


# -------------------------------------------------------------------------- the command


def main(arguments: list[str] | None = None) -> None:
    """Says what the log of a run shows: causes, since when, and with which evidence."""
    parser = argparse.ArgumentParser(
        prog="python -m optaxclip.doctor", description=main.__doc__
    )
    add = parser.add_argument
    add("log", type=Path, help="CSV or JSON, also in gzip")
    add("--json", action="store_true", help="print JSON, and draw nothing")
    add("--picture", type=Path, help="where to draw (default: beside the log)")
    add("--force", action="store_true", help="replace a picture that exists")
    options = parser.parse_args(arguments)
    try:
        recorders, columns = read_with(_read, options.log, "doctor")
    # A file that is of no use ends in one line on stderr, without a traceback.
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    findings = _findings(recorders, columns)
    extremes = _extremes(recorders)
    if options.json:
        causes = [each._asdict() for each in findings]
        report = {"findings": causes, "largest": extremes}
        print(json.dumps(report, indent=2))
        return
    print(_table(recorders, findings, extremes))
    log = options.log
    picture = options.picture or log.with_name(f"{log.stem}_doctor.png")
    if picture.exists() and not options.force:
        print(f"No picture: {picture} exists. --force replaces it.")
        return
    try:
        _draw(recorders, columns, findings, picture)
    except ImportError:
        print("No picture: matplotlib is not installed.")


def _extremes(recorders: list[Recorder]) -> list[dict[str, Any]]:
    """The largest size of each sign, with its tensor and step."""
    found = []
    for own in recorders:
        for sign, (tensors, numbers) in own.signs.items():
            sizes = np.where(np.isfinite(numbers), np.abs(numbers), -1)
            row, column = np.unravel_index(sizes.argmax(), sizes.shape)
            entry = {
                "sign": f"{own.name}/{sign}",
                "value": float(numbers[row, column]),
                "step": int(own.steps[row]),
                "tensor": tensors[column],
            }
            if sizes[row, column] >= 0:
                found.append(entry)
    return found


def _table(
    recorders: list[Recorder],
    findings: list[Finding],
    extremes: list[dict[str, Any]],
) -> str:
    steps = np.concatenate([own.steps for own in recorders])
    lines = [f"Steps {steps.min()} to {steps.max()}.", ""]
    if not findings:
        lines.append("No cause is above its limit in these steps.")
    for number, each in enumerate(findings):
        mark = "  " if number else "->"
        head = f"{mark} step {each.step:6}  {each.cause:16}"
        lines.append(f"{head}  {each.evidence} (limit {each.limit:g})")
        lines.append(f"{'':32}{each.advice}: {each.page}")
    if len(findings) > 1:
        lines += ["", "Later causes may follow from the first."]
    lines += ["", f"{'largest':32}   value    step  tensor"]
    for each in extremes:
        number = f"{each['value']:8.3g}{each['step']:8}"
        lines.append(f"{each['sign']:32}{number}  {each['tensor']}")
    return "\n".join(lines)


def _draw(
    recorders: list[Recorder],
    columns: Table,
    findings: list[Finding],
    path: Path,
) -> None:
    """Draws norms and loss over the steps, with a line where each cause begins."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(9, 4), layout="constrained")
    axis = figure.add_subplot()
    for own in recorders:
        label = f"{own.name}: norm of all tensors"
        axis.semilogy(own.steps, own.total("norm"), linewidth=0.8, label=label)
    losses = [name for name in columns if "loss" in name.lower()]
    for name in losses[:1]:
        axis.semilogy(*zip(*columns[name]), color="0.55", label=name)
    for number, each in enumerate(findings):
        axis.axvline(each.step, color="red", linestyle=":")
        # Each a little lower, so that no two names lie upon one another.
        place = {"transform": axis.get_xaxis_transform(), "color": "red"}
        axis.text(each.step, 0.95 - 0.07 * number, f" {each.cause}", **place)
    axis.set(xlabel="step")
    axis.legend(loc="lower left", framealpha=0.8, edgecolor="none")
    figure.savefig(path, dpi=120)
    print(f"Picture: {path}")


# A misspelt name raises an error with the right one.
with_our_names(__name__)

if __name__ == "__main__":
    main()
