"""Why does a run break? Reads the log of `record_health`, and names causes.

    python -m optaxclip.doctor run.jsonl           a table, and run_doctor.png
    python -m optaxclip.doctor run.jsonl --json    the same as JSON

    diagnose    the findings of a log: cause, step, evidence, and the page that helps

    cause             is named from the first step at which
    not finite        a tensor has an element that is NaN or inf
    bad batch         the norm is above 5 times the largest of the 20 before
    learning rate     updates are above a tenth of the weights, in the median of 5 steps
    underflow         above a quarter of the elements of a tensor that are not 0 are
                      subnormal, in the median of 5 steps
    dead embedding    above a tenth of the rows of an embedding are dead
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

from ._health import OF_VALUES, OF_WEIGHTS
from ._names import with_our_names
from .replay._read import Rows, Table, add_entries, read_with

__all__ = ["Finding", "diagnose"]

BEFORE = 20  # steps whose largest norm a step is compared with
MEDIAN = 5  # steps
STEPS = ("step", "_step", "global_step", "Step", "iteration")
# "health_2/updates/norm/blocks/w": the recorder, the sign and the tensor.
SIGNS = "|".join(("norm", "dead_rows", *OF_WEIGHTS, *OF_VALUES))
COLUMN = re.compile(rf"(health.*?)/({SIGNS})(?:/(.*))?")


class Cause(NamedTuple):
    """What a number is held against, and what helps."""

    limit: float
    evidence: str
    page: str
    advice: str


# Of the runs in tests/doctor, the healthy ones stay below about half of each limit.
CAUSES = {
    "not finite": Cause(
        0,
        "up to {value:.0f} elements of {names}; finite beside them: {beside}",
        "run_health.md",
        "skip_nonfinite, and look at the backward pass between the two",
    ),
    "bad batch": Cause(
        5,
        f"norm {{value:.3g}} times the largest of the {BEFORE} before",
        "run_health.md#rollback",
        "skip_step, and look at the batch",
    ),
    "learning rate": Cause(
        0.1,
        f"updates {{value:.2g}} of the weights, median of {MEDIAN} steps",
        "run_health.md",
        "a lower learning rate, or a longer warm-up",
    ),
    "underflow": Cause(
        0.25,
        "{value:.0%} of the elements that are not 0 are subnormal in {names}",
        "sharp_edges.md#mixed-precision-and-loss-scaling",
        "a larger loss scale, or bfloat16",
    ),
    "dead embedding": Cause(
        0.1,
        "{value:.0%} of the rows are without a gradient in {names}",
        "doctor.md#dead-rows",
        "look at the tokens, and at weight decay of rows that are not read",
    ),
    # The limit of Kimi K2.
    "attention logits": Cause(
        100,
        "{names} {value:.4g}",
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
      evidence: the number in words, with the tensors.
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


class Series(NamedTuple):
    """Numbers over the steps."""

    steps: list[int]
    names: list[str]  # of tensors, or of one column
    numbers: np.ndarray  # float64[steps, names]

    def total(self) -> np.ndarray:
        """The norm of all tensors together."""
        return np.sqrt(np.sum(self.numbers**2, axis=1, keepdims=True))


# From a recorder and a sign, such as ("health/updates", "norm"), or a column and "".
Log = dict[tuple[str, str], Series]


def diagnose(log: str | Path | Rows) -> list[Finding]:
    """Names the causes that a log shows, the earliest first.

    Args:
      log: a file that `optaxclip.replay.read_history` can read, or its rows: a dict for
        each step, such as {"step": 3, **optaxclip.metrics(state, floats=True)}. Without
        a column "step" rows are counted from 0.

    Returns:
      A `Finding` for each cause. The first one is what to look at, since later ones may
      follow from it. An empty list does not say that a run is healthy.

    Raises:
      ValueError: a log without the numbers of `record_health`, or a file that cannot be
        read. The text names it.

    Example:
      >>> from optaxclip.doctor import diagnose
      >>> rows = [{"health/norm/w": 1.0 + step % 2} for step in range(40)]
      >>> rows[30]["health/norm/w"] = 50.0
      >>> (found,) = diagnose(rows)
      >>> print(found.step, found.cause, found.evidence)
      30 bad batch norm 25 times the largest of the 20 before
    """
    if isinstance(log, (str, Path)):
        return read_with(diagnose, log, "diagnose")
    return _findings(_read(log))


def _read(rows: Rows) -> Log:
    lines: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    logged: dict[str, dict[int, None]] = {}  # the steps of each recorder
    for number, row in enumerate(rows):
        entries: Table = {}
        add_entries(entries, row)
        known = [entries[name][0] for name in STEPS if name in entries]
        step = int(float(known[0])) if known else number
        for column, (entry,) in entries.items():
            found = COLUMN.fullmatch(column)
            who, sign, name = found.groups() if found else (column, "", column)
            try:
                value = float(entry)
            except (TypeError, ValueError):  # a text
                continue
            own = lines.setdefault((who, sign), {})
            own.setdefault(step, {})[name or "the tensor"] = value
            logged.setdefault(who, {})[step] = None
    if not any(sign for _, sign in lines):
        columns = [name for name, _ in lines][:8]
        raise ValueError(
            "there must be numbers of record_health, such as 'health/norm/w', got the "
            f"columns {columns}. Put optaxclip.record_health() into the optimizer, and "
            "log metrics(state)."
        )
    log = {}
    for (who, sign), own in lines.items():
        steps = sorted(logged[who])
        names = {name for line in own.values() for name in line}
        ordered = sorted(names, key=_by_number)
        # JSON has no NaN: what is missing in a line of others was not finite.
        table = []
        for step in steps:
            line = own.get(step, {})
            table.append([line.get(name, np.nan) for name in ordered])
        log[who, sign] = Series(steps, ordered, np.array(table))
    return log


def _by_number(name: str) -> list[Any]:
    """Layers by number: "blocks/2" before "blocks/10"."""
    parts = re.split(r"(\d+)", name)
    return [int(x) if x.isdigit() else x for x in parts]


# --------------------------------------------------------------------------- the causes


def _findings(log: Log) -> list[Finding]:
    found: dict[str, Finding] = {}
    # A log may divide by 0, and have NaN, which is above no limit.
    with np.errstate(all="ignore"):
        for cause, series in _series(log):
            limit, evidence, page, advice = CAUSES[cause]
            above = series.numbers > limit
            if not above.any():
                continue
            row = int(above.any(axis=1).argmax())
            step, which = series.steps[row], above[row]
            if cause in found and found[cause].step <= step:
                continue
            padded = np.pad(which, 1)
            beside = (padded[:-2] | padded[2:]) & ~which
            value = float(series.numbers[row][which].max())
            text = evidence.format(
                value=value,
                names=_listed(series.names, which),
                beside=_listed(series.names, beside),
            )
            found[cause] = Finding(cause, step, value, limit, text, page, advice)
    return sorted(found.values(), key=lambda each: each.step)


def _series(log: Log) -> Iterator[tuple[str, Series]]:
    """The numbers that each cause is seen by."""
    for (who, sign), own in log.items():
        is_update = "update" in who
        if sign == "norm":
            broken = (~np.isfinite(own.numbers)).astype(float)
            counts = log.get((who, "nonfinite"), own._replace(numbers=broken))
            yield "not finite", counts
            weights = log.get((who, "weight_norm"))
            if not is_update:
                ratios = _over_those_before(own.total())
                yield "bad batch", own._replace(names=[who], numbers=ratios)
            elif weights:
                ratios = _medians(own.total() / weights.total())
                one = own._replace(names=[who], numbers=ratios)
                yield "learning rate", one
        elif sign == "subnormals" and not is_update:
            shares = own.numbers / (1 - log[who, "zeros"].numbers)
            yield "underflow", own._replace(numbers=_medians(shares))
        elif sign == "dead_rows":
            yield "dead embedding", own
        elif "logit" in who.lower() and not re.search("limit|factor", who):
            yield "attention logits", own


def _over_those_before(total: np.ndarray) -> np.ndarray:
    ratios = np.zeros_like(total)
    for row in range(BEFORE // 2, len(total)):
        ratios[row] = total[row] / total[max(0, row - BEFORE) : row].max()
    return ratios


def _medians(numbers: np.ndarray) -> np.ndarray:
    """The median of the last steps, 0 before there are as many."""
    found = np.zeros_like(numbers)
    for row in range(MEDIAN, len(numbers) + 1):
        found[row - 1] = np.median(numbers[row - MEDIAN : row], axis=0)
    return found


def _listed(names: list[str], which: np.ndarray) -> str:
    few = np.array(names)[which].tolist()
    more = f" and {len(few) - 8} more" if len(few) > 8 else ""
    return ", ".join(few[:8]) + more or "none"


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
        log = read_with(_read, options.log, "doctor")
    # A file that is of no use ends in one line on stderr, without a traceback.
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    findings = _findings(log)
    if options.json:
        print(json.dumps([each._asdict() for each in findings], indent=2))
        return
    print(_table(log, findings))
    path = options.log
    picture = options.picture or path.with_name(f"{path.stem}_doctor.png")
    if picture.exists() and not options.force:
        print(f"No picture: {picture} exists. --force replaces it.")
        return
    try:
        _draw(log, findings, picture)
        print(f"Picture: {picture}")
    except ImportError:
        print("No picture: matplotlib is not installed.")


def _table(log: Log, findings: list[Finding]) -> str:
    every = [step for series in log.values() for step in series.steps]
    lines = [f"Steps {min(every)} to {max(every)}.", ""]
    if not findings:
        lines.append("No number is above its limit.")
    for number, each in enumerate(findings):
        mark = "  " if number else "->"
        evidence = f"{each.evidence} (limit {each.limit:g})"
        lines.append(f"{mark} step {each.step}, {each.cause}: {evidence}")
        lines.append(f"   {each.advice}")
        lines.append(f"   {each.page}")
    if len(findings) > 1:
        lines.append("Later causes may follow from the first.")
    return "\n".join(lines)


def _draw(log: Log, findings: list[Finding], path: Path) -> None:
    """Draws norms and loss over the steps, with a line where each cause begins."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(9, 4), layout="constrained")
    axis = figure.add_subplot()
    for (who, sign), own in log.items():
        if sign == "norm" or "loss" in who.lower():
            label = f"{who}/norm" if sign else who
            axis.semilogy(own.steps, own.total(), linewidth=0.8, label=label)
    for number, each in enumerate(findings):
        axis.axvline(each.step, color="red", linestyle=":")
        # Each a little lower, so that no two names lie upon one another.
        place = {"transform": axis.get_xaxis_transform(), "color": "red"}
        axis.text(each.step, 0.95 - 0.07 * number, f" {each.cause}", **place)
    axis.set(xlabel="step")
    axis.legend(loc="lower left", framealpha=0.8, edgecolor="none")
    figure.savefig(path, dpi=120)


# A misspelt name raises an error with the right one.
with_our_names(__name__)

if __name__ == "__main__":
    main()
