"""Why does a run break? Reads the log of `metrics`, and names causes.

    python -m optaxclip.doctor run.jsonl                         a table
    python -m optaxclip.doctor run.jsonl --json                  the same as JSON
    python -m optaxclip.doctor run.jsonl --picture doctor.png    norms and causes

    diagnose    the findings of a log: cause, step, evidence, and the page that helps

    cause             is named from the first step at which
    not finite        a tensor has an element that is NaN or inf
    bad batch         the norm is above 5 times the largest of the 20 before
    learning rate     updates are above a tenth of the weights, in the median of 5 steps
    underflow         above a quarter of the elements of a tensor that are not 0 are
                      subnormal, in the median of 5 steps
    dead embedding    above a tenth of the rows of an embedding are dead
    attention logits  a column with "logit" in its name is above 100
    skip behind clip  a norm that a skip judges is never above the limit of a clipper,
                      in 100 steps or more, also where that clips

What it knows is a log. A cause that leaves no mark in these numbers is not found, and
where nothing is found the run may break all the same.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, reduce
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._checks import shown
from ._health import HEALTH
from ._names import with_our_names
from .replay import _read as logs

__all__ = ["Finding", "diagnose"]

BEFORE = 20  # steps whose largest norm a step is compared with
MEDIAN = 5  # steps
SKIP_STEPS = 100  # in which a skip is compared with a clipper
ROUNDING = 0.01  # more than bfloat16 gradients lose
# "train/health_2/updates/norm/blocks/w": the recorder, the sign and the tensor.
SIGNS = "|".join(HEALTH)
COLUMN = rf"((?:.+ - )?(?:.+?[/.])??health.*?)/({SIGNS})(?:/(.*))?"
matched = cache(re.compile(COLUMN).fullmatch)
# Not the limit of a clipper, its counts, or a tensor that is called so.
LOGITS = r"(?!.*(limit|factor|count|/norm(_\w+)?/.*logit)).*logit"
# "train/skip_2/norm", and "train/clip/outer/norm_before".
SKIPS = cache(re.compile(r"(.*[/. ])?(skip|spike)(_\d+)?/(.*/)?norm").fullmatch)
CLIPS = cache(re.compile(r"(.*[/. ])?clip(_\d+)?/(.*/)?norm_before").fullmatch)
# Of each cause the limit, the evidence, the page, and what helps. Of the runs in
# tests/doctor, the healthy ones stay below about half of each limit.
CAUSES = {
    "not finite": (
        0,
        "up to {:.0f} elements of {}; finite beside them: {}",
        "run_health.md",
        "skip_nonfinite, and look at the backward pass between the two",
    ),
    "bad batch": (
        5,
        f"norm {{:.3g}} times the largest of the {BEFORE} before",
        "run_health.md#rollback",
        "skip_step, and look at the batch",
    ),
    "learning rate": (
        0.1,
        f"updates {{:.2g}} of the weights, median of {MEDIAN} steps",
        "run_health.md",
        "a lower learning rate, or a longer warm-up",
    ),
    "underflow": (
        0.25,
        "{:.0%} of the elements that are not 0 are subnormal in {}",
        "sharp_edges.md#mixed-precision-and-loss-scaling",
        "a larger loss scale, or bfloat16",
    ),
    "dead embedding": (
        0.1,
        "{:.0%} of the rows are without a gradient in {}",
        "doctor.md#dead-rows",
        "look at the tokens, and at weight decay of rows that are not read",
    ),
    # The limit of Kimi K2.
    "attention logits": (
        100,
        "{1} {0:.4g}",
        "large_models.md#attention-logits-qk-clip",
        "qk_clip after the optimizer, or a norm of queries and keys",
    ),
    "skip behind clip": (
        1,
        "{1} is at most the limit of a clipper, also of a gradient {0:.3g} times as "
        "long",
        "sharp_edges.md#a-skip-behind-a-clipper",
        "skip_step(optax.chain(clipper, optimizer)), and not the clipper in front",
    ),
}


class Finding(NamedTuple):
    """One cause, and the number that shows it.

    Attributes:
      cause: "not finite", "bad batch", "learning rate", "underflow", "dead
        embedding", "attention logits" or "skip behind clip".
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
    """Numbers over the rows of a log that have them."""

    rows: np.ndarray  # int[rows]
    steps: np.ndarray  # int[rows]
    names: np.ndarray  # str[names]: of tensors, or of one column
    numbers: np.ndarray  # float64[rows, names]

    def total(self) -> "Series":
        """The norm of all tensors together."""
        total = np.linalg.norm(self.numbers, axis=1, keepdims=True)
        return self._replace(names=np.array(["all"]), numbers=total)


# Part of the log (a run that is resumed goes back to an earlier step), recorder, sign
# and tensors, such as (0, "health/updates", "norm", ("w",)), or a column with "".
Key = tuple[int, str, str, tuple[str, ...]]
Log = dict[Key, Series]


def diagnose(log: str | Path | logs.Rows) -> list[Finding]:
    """Names the causes that a log shows, the earliest first.

    Args:
      log: a file that `optaxclip.replay.read_history` can read, or its rows: a dict for
        each step, such as {"step": 3, **optaxclip.metrics(state, floats=True)}. Without
        a column "step" rows are counted from 0.

    Returns:
      A `Finding` for each cause. The first one is what to look at, since later ones may
      follow from it. An empty list does not say that a run is healthy.

    Raises:
      ValueError: a log without the numbers of `record_health` or of a skip, or a file
        in a format that is not known. The text names it.
      TypeError: a log that is neither a file nor rows.
      OSError: a file that cannot be opened.

    Example:
      >>> from optaxclip.doctor import diagnose
      >>> rows = [{"health/norm/w": 1.0 + step % 2} for step in range(40)]
      >>> rows[30]["health/norm/w"] = 50.0
      >>> (found,) = diagnose(rows)
      >>> print(found.step, found.cause, found.evidence)
      30 bad batch norm 25 times the largest of the 20 before
    """
    if isinstance(log, (str, Path)):
        return logs.read_with(diagnose, log, "diagnose")
    rows: list[Any] = [*log] if isinstance(log, Iterable) else [log]
    if not all(isinstance(row, Mapping) for row in rows):
        must = "a file, or a list with a dict for each step"
        raise TypeError(f"diagnose: log must be {must}, got {shown(log)}.")
    return _findings(_read(rows))


def _read(rows: logs.Rows) -> Log:
    found: dict[Key, list[tuple[int, int, list[float]]]] = {}
    part, last = 0, -math.inf
    for number, row in enumerate(rows):
        known = logs.step_of(row)
        step = number if known is None else known
        part += known is not None and known < last
        last = last if known is None else known
        together: dict[tuple[str, str, bool], dict[str, float]] = {}
        logged = set()
        for column, entry in logs.entries_of(row):
            match = matched(column)
            who, sign, name = match.groups() if match else (column, "", column)
            # JSON has no NaN: what is empty beside others was not finite.
            value = math.nan
            if logs.is_number(entry):
                value = float(entry)
                logged.add((who, name is None))
            elif not logs.is_empty(entry):
                continue
            # A summary has no name.
            own = together.setdefault((who, sign, name is None), {})
            own[name or "the tensor"] = value
        for (who, sign, is_summary), own in together.items():
            # Those of each tensor may be logged more rarely.
            if (who, is_summary) in logged:
                line = number, step, [*own.values()]
                found.setdefault((part, who, sign, tuple(own)), []).append(line)
    if not any(sign or SKIPS(who) for _, who, sign, _ in found):
        columns = list(dict.fromkeys(who for _, who, _, _ in found))
        raise ValueError(
            "there must be numbers of record_health, such as 'health/norm/w', got the "
            f"columns {logs.listed(columns)}. Put optaxclip.record_health() into the "
            "optimizer, and log metrics(state)."
        )
    log = {}
    for key, lines in found.items():
        numbers, steps, values = map(np.array, zip(*lines))
        pairs = sorted((_by_number(name), place) for place, name in enumerate(key[-1]))
        order = [place for _, place in pairs]
        log[key] = Series(numbers, steps, np.array(key[-1])[order], values[:, order])
    return log


def _by_number(name: str) -> list[Any]:
    """Layers by number: "blocks/2" before "blocks/10"."""
    parts = re.split(r"(\d+)", name)
    return [int(x) if x.isdigit() else x for x in parts]


# --------------------------------------------------------------------------- the causes


def _findings(log: Log) -> list[Finding]:
    # A log may divide by 0, and have NaN, which is above no limit.
    with np.errstate(all="ignore"):
        found = [_finding(*each) for each in _series(log)]
    first: dict[str, Finding] = {}
    for _, each in sorted(filter(None, found), key=itemgetter(0)):
        first.setdefault(each.cause, each)
    return list(first.values())


def _finding(cause: str, series: Series) -> tuple[int, Finding] | None:
    """The row, and what it shows."""
    limit, evidence, page, advice = CAUSES[cause]
    above = series.numbers > limit
    if not above.any():
        return None
    row = int(above.any(axis=1).argmax())
    which = above[row]
    padded = np.pad(which, 1)
    beside = (padded[:-2] | padded[2:]) & ~which
    value = float(series.numbers[row][which].max())
    names = series.names
    nothing = "not known from a summary" if "the tensor" in names else "none"
    few = [logs.listed(names[x].tolist()) or nothing for x in (which, beside)]
    text = evidence.format(value, *few)
    own = cause, int(series.steps[row]), value, limit, text, page, advice
    return int(series.rows[row]), Finding(*own)


def _series(log: Log) -> Iterator[tuple[str, Series]]:
    """The numbers that each cause is seen by."""
    for (part, who, sign, names), own in log.items():
        is_update = _is_of_updates(who)
        if sign == "norm":
            broken = own._replace(numbers=1.0 * ~np.isfinite(own.numbers))
            yield "not finite", log.get((part, who, "nonfinite", names), broken)
            weights = log.get((part, who, "weight_norm", names))
            if not is_update:
                yield "bad batch", _leaps(own.total())
            elif weights:
                ratios = _ratios(own.total(), weights.total())
                yield "learning rate", _medians(ratios)
        elif sign == "subnormals" and not is_update:
            zeros = log.get((part, who, "zeros", names))
            if zeros:
                others = zeros._replace(numbers=1 - zeros.numbers)
                yield "underflow", _medians(_ratios(own, others))
        elif sign == "dead_rows":
            yield "dead embedding", own
        elif re.match(LOGITS, who.lower()):
            yield "attention logits", own
    for own in _skips_behind_clips(log):
        yield "skip behind clip", own


def _skips_behind_clips(log: Log) -> Iterator[Series]:
    """Norms of gradients over the limit of a clipper, in steps in which a skip saw what
    the clipper left of them, and let that pass.
    """
    columns: dict[tuple[int, str], Series] = {}
    for (part, column, sign, _), own in log.items():
        if not sign:
            columns[part, column] = own
    skips = [key for key in columns if SKIPS(key[1])]
    clips = [key for key in columns if CLIPS(key[1])]
    for (part, skip), (part_of_clip, clip) in product(skips, clips):
        skip_limit = part, f"{skip.removesuffix('norm')}limit"
        clip_limit = part, f"{clip.removesuffix('norm_before')}limit"
        if part != part_of_clip or not {skip_limit, clip_limit} <= columns.keys():
            continue
        keys = (part, skip), skip_limit, (part, clip), clip_limit
        rows, steps, numbers = _in_all_rows([columns[key] for key in keys])
        seen, highest, raw, limit = numbers
        most = (1 + ROUNDING) * limit
        # A skip around the clipper sees the raw norm. Where both are the same number,
        # the skip is behind the clipper, and the clipper is not one of other leaves.
        is_clipped = (raw > most) & np.isclose(seen, limit, rtol=ROUNDING)
        is_skipped = seen > (1 + ROUNDING) * highest
        if len(rows) >= SKIP_STEPS and not (is_skipped | (seen > most)).any():
            # A rule that has not seen enough steps has no limit yet.
            ratios = np.where(is_clipped & np.isfinite(highest), raw / limit, 0.0)
            yield Series(rows, steps, np.array([skip]), ratios[:, None])


def _in_all_rows(series: list[Series]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, steps and numbers [columns, rows] of the rows that have all columns."""
    rows = reduce(np.intersect1d, [own.rows for own in series])
    numbers = [own.numbers[np.isin(own.rows, rows), 0] for own in series]
    first = series[0]
    return rows, first.steps[np.isin(first.rows, rows)], np.stack(numbers)


def _is_of_updates(who: str) -> bool:
    """By the name of the recorder, without what a logger puts in front."""
    return bool(re.search(r"(^|[/. ])health.*update", who.lower()))


def _ratios(own: Series, other: Series) -> Series:
    """Their quotient, in the rows of both."""
    both, beside = np.isin(own.rows, other.rows), np.isin(other.rows, own.rows)
    ratios = own.numbers[both] / other.numbers[beside]
    # NaN is above no limit.
    ratios = np.where(np.isfinite(ratios), ratios, np.nan)
    return Series(own.rows[both], own.steps[both], own.names, ratios)


def _leaps(norms: Series) -> Series:
    """Norms over the largest of those before them."""
    # What is not finite is another cause.
    finite = np.where(np.isfinite(norms.numbers), norms.numbers, 0.0)
    most = np.zeros_like(finite)
    for row in range(BEFORE // 2, len(finite)):
        most[row] = finite[max(0, row - BEFORE) : row].max()
    return _ratios(norms._replace(numbers=finite), norms._replace(numbers=most))


def _medians(own: Series) -> Series:
    """The median of the last steps, 0 before there are as many."""
    found = np.zeros_like(own.numbers)
    for row in range(MEDIAN, len(found) + 1):
        found[row - 1] = np.median(own.numbers[row - MEDIAN : row], axis=0)
    return own._replace(numbers=found)


# -------------------------------------------------------------------------- the command


def main(arguments: list[str] | None = None) -> None:
    """Says what the log of a run shows: causes, since when, and with which evidence."""
    # Before Python 3.14 argparse would call the program `doctor.py`.
    parser = argparse.ArgumentParser("python -m optaxclip.doctor", None, main.__doc__)
    add = parser.add_argument
    add("log", type=Path, help="CSV or JSON, also in gzip")
    add("--json", action="store_true", help="print JSON")
    add("--picture", type=Path, help="where to draw (needs matplotlib)")
    options = parser.parse_args(arguments)
    try:
        log = logs.read_with(_read, options.log, "doctor")
    # A file that is of no use ends in one line on stderr, without a traceback.
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    findings = _findings(log)
    if options.json:
        text = json.dumps([each._asdict() for each in findings], indent=2)
        # JSON has no inf.
        print(text.replace(": Infinity,", ': "inf",'))
    else:
        for each in findings:
            evidence = f"{each.evidence} (limit {each.limit:g})"
            print(f"step {each.step:6}  {each.cause:16}  {evidence}")
            print(f"{'':13}{each.advice}: {each.page}")
        if not findings:
            print("No number is above its limit.")
        if not any(_is_of_updates(who) for _, who, _, _ in log):
            print('Learning rate not judged: no recorder has "update" in its name.')
    try:
        if options.picture:
            _draw(log, findings, options.picture)
    # Such as a folder that is not there, or a suffix that is no kind of picture.
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"No picture: {error}")


def _draw(log: Log, findings: list[Finding], path: Path) -> None:
    """Draws norms over the steps, with a line where each cause begins."""
    from matplotlib.figure import Figure

    axis: Any = Figure(figsize=(9, 4), layout="constrained").add_subplot()
    for (_, who, sign, _), own in log.items():
        if sign == "norm":
            axis.semilogy(own.steps, own.total().numbers, linewidth=0.8, label=who)
    for number, each in enumerate(findings):
        axis.axvline(each.step, color=f"C{number + 2}", ls=":", label=each.cause)
    axis.set(xlabel="step", ylabel="norm")
    axis.legend()
    axis.figure.savefig(path, dpi=120)


# A misspelt name raises an error with the right one.
with_our_names(__name__)

if __name__ == "__main__":
    main()
