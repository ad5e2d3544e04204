"""The command `python -m optaxclip.doctor run.jsonl`."""

import argparse
import sys
from pathlib import Path

from .._logs.columns import NO_STEPS
from .._logs.output import printing, text_of
from ._causes import Finding
from ._report import Report, read_and_judge


def main(arguments: list[str] | None = None) -> None:
    """Names the causes that the log of a training run shows, the earliest first, and
    says what could not be judged.
    """
    # Before Python 3.14 argparse would call the program `__main__.py`.
    parser = argparse.ArgumentParser(
        prog="python -m optaxclip.doctor", description=main.__doc__
    )
    add = parser.add_argument
    add("log", type=Path, help="JSON lines, JSON, CSV, event file, or text, also gzip")
    add("--loss", help="the column of the loss, where its name does not say so")
    add("--pattern", help="for text: a regular expression with named groups")
    # None stands for the arguments of the command line.
    options = parser.parse_args(arguments)
    try:
        report = read_and_judge(
            "doctor", options.log, pattern=options.pattern, loss=options.loss
        )
    # A file that is of no use ends in one line on stderr, without a traceback.
    except (OSError, ValueError) as error:
        sys.exit(text_of(error, "doctor"))
    with printing():
        print(_text(report))


def _text(report: Report) -> str:
    lines: list[str] = []
    for finding in report.findings:
        lines += _lines_of(finding, report.unit)
    if not report.findings:
        see_notes = ": see the notes" if report.notes else ""
        lines.append(
            f"Nothing found. That does not say that the run is healthy{see_notes}."
        )
    lines += ["", f"Looked at {', '.join(report.looked_at)}."]
    if report.unit == "row":
        lines.append(f"Note: {NO_STEPS}")
    for note in report.notes:
        lines.append(f"Note: {note}")
    if report.not_judged:
        lines.append("Not judged, because the log lacks columns or rows:")
    for lacking, causes in report.not_judged.items():
        lines.append(f"  {', '.join(causes)}: needs {lacking}")
    return "\n".join(lines)


def _lines_of(finding: Finding, unit: str) -> list[str]:
    # The texts of all lines begin below the name of the cause.
    indent = 13 * " "
    line = f"{unit:4} {finding.step:6}  {finding.cause:18}{finding.evidence}"
    # A limit of 0 says no more than the text does.
    if finding.limit > 0:
        worst = ""
        if finding.worst != finding.step:
            worst = f"at {unit} {finding.worst}, "
        line += f" ({worst}limit {finding.limit:.3g})"
    lines = [line]
    if finding.rows > 1:
        steps = ", ".join(map(str, finding.early_steps))
        others = ", ..." if finding.rows > len(finding.early_steps) else ""
        lines.append(f"{indent}{finding.rows} rows show it: {steps}{others}")
    # Names that the first line does not have, or whose step it does not have.
    starts = [
        f"{name!r} from {step}"
        for name, step in finding.first_steps.items()
        if repr(name) not in finding.evidence or step != finding.step
    ]
    if starts:
        # The earliest ones: a NaN spreads to hundreds of tensors.
        others = f" and {len(starts) - 12} more" if len(starts) > 12 else ""
        lines.append(f"{indent}{', '.join(starts[:12])}{others}")
    return [*lines, f"{indent}{finding.advice}", f"{indent}see {finding.page}"]


if __name__ == "__main__":
    main()
