"""The command `python -m optaxclip.replay run.csv`."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from .._logs.after_clip import clipped_share
from .._logs.columns import (
    NO_STEPS,
    Column,
    Log,
    distance_of_rows,
    in_common,
    logging_interval,
    notes_on_distance,
    rows_kept,
)
from .._logs.files import read_log
from .._logs.norms import NOISE_SHARE, columns_named
from .._logs.output import printing, text_of
from ..doctor import Finding
from ..doctor._report import report_of
from . import plot_history, run
from ._batch import norm_ratio
from ._choice import USUAL_LIMIT, Choice, choice_of, how_it_broke, percent
from ._history import columns_of
from ._run import MAX_GUARD_RATE, MIN_NORMS

# Findings of the doctor in a run from which no limit can be chosen.
BREAKS = ("divergence", "steady growth", "vanishing")
# A bad batch broke the run if it is at most so many rows from the break.
ROWS_OF_BATCH = 20
ESTIMATES = (
    "These are estimates from the recorded norms. Clipping changes a run, so",
    "its norms will differ, and nothing here says how its loss would change.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints candidate limits for the gradient norms of a log, with the share of steps
    that each would have clipped.
    """
    # Before Python 3.14 argparse would call the program `__main__.py`.
    parser = argparse.ArgumentParser(
        prog="python -m optaxclip.replay", description=main.__doc__
    )
    add = parser.add_argument
    add("log", type=Path, help="JSON lines, JSON, CSV, event file, .npy, .npz, or text")
    add("--column", metavar="NAME", help="the norm (default: by its name)")
    add("--pattern", help="for text: a regular expression with named groups")
    add("--picture", type=Path, help="where to draw the norms and the limit to take")
    add("--batch", type=int, help="examples in a batch of the log, for --to")
    add("--to", type=int, help="examples in another batch: the limit that it needs")
    # None stands for the arguments of the command line.
    options = parser.parse_args(arguments)
    sizes = [size for size in (options.batch, options.to) if size is not None]
    if len(sizes) == 1 or any(size < 1 for size in sizes):
        parser.error("--batch and --to go together, and must be at least 1")
    try:
        with printing():
            _print_report(options)
    # A file without norms, or a picture that cannot be drawn, ends in one line on
    # stderr, without a traceback.
    except (OSError, ValueError, ImportError) as error:
        sys.exit(text_of(error, "replay"))


def _print_report(options: argparse.Namespace) -> None:
    """Prints the report, and draws the picture."""
    call = f"replay: {options.log}"
    log = read_log(options.log, "replay", options.pattern)
    columns = columns_of(log, options.column, call)
    findings: list[Finding] = []
    # The doctor may know neither loss nor norm by its name.
    with suppress(ValueError):
        findings = report_of(log, loss_name=None).findings
    lines: list[str] = []
    choices: list[Choice] = []
    for column in columns:
        choice, advice = _choice_and_advice(column, findings)
        lines += [_about_source(column, options), *advice, *_about_norms(column), ""]
        if choice is not None:
            choices.append(choice)
    if log.unit == "row":
        lines += [NO_STEPS, ""]
    if log.notes:
        lines += [*log.notes, ""]
    # Several columns are norms of an actor and a critic, for example.
    choice = choices[0] if choices and len(columns) == 1 else None
    if choices and len(columns) > 1:
        lines += [
            "If one optimizer has them all, clip_by_group_norm takes all limits.",
            "--column NAME shows the table of one.",
        ]
    if choice is not None:
        lines += [*_table(choice), "", *ESTIMATES]
    report = "\n".join(lines).strip()
    if choice is None:
        print(report)
        if options.to is not None or options.picture is not None:
            raise ValueError(
                f"{call}: --to and --picture need one column, and a limit that is "
                "recommended for it."
            )
        return
    (column,) = columns
    # Before the picture, since the log may lack the column that --to needs.
    if options.to is not None:
        report += "\n" + _at_batch(log, column, choice, options)
    # Drawn before anything is printed, since the file may have an unknown ending.
    if options.picture is not None:
        axis = plot_history(run(choice.rule, column.values), steps=column.steps)
        axis.set_title(f"norms as recorded, and {choice.suggestion.rule}")
        axis.figure.canvas.print_figure(options.picture)
    print(report)
    if options.picture is not None:
        print(f"The picture is in {options.picture}.")


def _break_found_by_doctor(column: Column, findings: Sequence[Finding]) -> str | None:
    """What the doctor says of a run whose loss diverges, or whose norms grow or vanish.
    None for other runs. None also if a bad batch broke the run: a clip helps then.
    """
    steps_of_batches: list[int] = []
    for finding in findings:
        if finding.cause == "bad batch":
            steps_of_batches = [finding.first_steps[column.name], finding.worst]
    reach = ROWS_OF_BATCH * distance_of_rows(column)
    for finding in findings:
        if finding.cause in BREAKS:
            distances = [abs(finding.step - step) for step in steps_of_batches]
            if min(distances, default=np.inf) <= reach:
                return None
            return f"from {column.unit} {finding.step} on {finding.evidence}"
    return None


def _choice_and_advice(
    column: Column, findings: list[Finding]
) -> tuple[Choice | None, list[str]]:
    """The clipper to take, or None, and sentences that say why. `findings` are those of
    the doctor.
    """
    # Findings in other columns count only if they are about the loss or the rate.
    findings = [
        finding
        for finding in findings
        if finding.cause in ("divergence", "learning rate")
        or column.name in finding.first_steps
    ]
    what_broke = how_it_broke(column) or _break_found_by_doctor(column, findings)
    if what_broke:
        return None, [
            f"The run broke: {what_broke}. No limit can be chosen from it before the "
            "cause is known: run python -m optaxclip.doctor."
        ]
    is_norm = np.isfinite(column.values) & (column.values > 0)
    norms = rows_kept(column, is_norm)
    share_of_largest = clipped_share(norms.values)
    if share_of_largest:
        return None, [
            f"{share_of_largest:.0%} of the rows are within 0.1 % of "
            f"{norms.values.max():.4g}: these look like norms after a clip, from which "
            "no limit can be chosen. Log the norm before the clip."
        ]
    if len(norms.values) < MIN_NORMS:
        return None, [
            "Norms above 0 are too few to choose a limit from: "
            f"{len(norms.values)}. Log {MIN_NORMS} steps or more.",
            f"Until then take {USUAL_LIMIT}, the limit that most trainers use.",
        ]
    choice = choice_of(norms, logging_interval(distance_of_rows(column)))
    if choice is None:
        return None, [
            f"More than {MAX_GUARD_RATE:.0%} of the norms are above five times the "
            "median, so no limit clips accidents alone. If two networks take turns, "
            "log a column for each."
        ]
    reasons: list[str] = []
    for finding in findings:
        if finding.cause in ("learning rate", "change of scale"):
            reasons.append(
                f"Look at {column.unit} {finding.step} first: the doctor names "
                f"{finding.cause!r} there."
            )
    return choice, reasons + choice.reasons


# ---------------------------------------------------------------- lines of the report


def _about_source(column: Column, options: argparse.Namespace) -> str:
    """Which column the norms are, and why."""
    source = f"Column {column.name!r} of {options.log.name}"
    if options.column is None:
        return f"{source}, taken by its name (--column NAME takes another one):"
    return f"{source}, taken for a gradient norm, as --column says:"


def _about_norms(column: Column) -> list[str]:
    """The range of the norms, what was left out, and what they do not show."""
    is_finite = np.isfinite(column.values)
    lines = []
    if is_finite.any():
        low, middle, high = np.quantile(column.values[is_finite], (0.0, 0.5, 1.0))
        lines.append(
            f"{is_finite.sum()} finite norms from {low:.4g} to {high:.4g}, median "
            f"{middle:.4g}."
        )
    if not is_finite.all():
        lines.append(
            f"Norms that are NaN or inf: {(~is_finite).sum()} "
            f"({percent(1 - is_finite.mean())}). No clip cures them: skip_nonfinite "
            "leaves such steps out, and python -m optaxclip.doctor says what is known "
            "of them."
        )
    lines += column.notes
    if column.empty_cells:
        lines.append(f"Rows without an entry are left out: {column.empty_cells}.")
    return [*lines, *notes_on_distance(column)]


def _table(choice: Choice) -> list[str]:
    """A row for each candidate, and one for the choice. Rows are sorted by the share of
    clipped steps, the largest first, and then by the limit.
    """
    chosen = choice.suggestion
    # The usual limit may be one of the candidates, and `zclip` without a cap is one.
    rows = [row for row in choice.candidates if row.limit != chosen.limit]
    rows.append(chosen)
    rows.sort(key=lambda row: (-row.clip_rate, row.limit))
    # Each column is as wide as its head.
    lines = ["  limit (last step)  steps clipped  mean factor  clipper, as Python"]
    for row in rows:
        mark = "->" if row is chosen else "  "
        lines.append(
            f"{mark} {row.limit:16.4g}  {percent(row.clip_rate):>13}  "
            f"{row.mean_factor:11.3f}  {row.rule}"
        )
    return lines


def _at_batch(
    log: Log, column: Column, choice: Choice, options: argparse.Namespace
) -> str:
    """The limit at another batch size, from the steps that the guard does not clip."""
    share_columns = columns_named(NOISE_SHARE, log)
    if not share_columns:
        raise ValueError(
            f"replay: {options.log}: --to needs the column noise_share: log "
            "optaxclip.per_example.noise_share(norms_of_parts, norm)."
        )
    _, (norms, shares) = in_common([column, share_columns[0]])
    guard = np.inf if choice.guard is None else choice.guard.limit
    usual_norms = np.where(norms <= guard, norms, np.nan)
    ratio = norm_ratio(usual_norms, shares, options.batch, options.to)
    if isinstance(choice.rule, float):
        advice = f"start with clip_by_global_norm({ratio * choice.rule:.3g})."
    else:
        advice = f"multiply the cap by {ratio:.3g}."
    return (
        f"At batch size {options.to} norms are {ratio:.3g} times as long as at "
        f"{options.batch}: {advice}"
    )


if __name__ == "__main__":
    main()
