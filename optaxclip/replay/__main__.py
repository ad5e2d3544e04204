"""The command `python -m optaxclip.replay run.csv`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .._logs.after_clip import clipped_share
from .._logs.columns import Column, Log, in_common, logging_interval
from .._logs.files import read_log
from .._logs.norms import NOISE_SHARE, columns_named
from .._logs.output import printing
from . import plot_history, run
from ._batch import norm_ratio
from ._choice import USUAL_LIMIT, Choice, choice_of, percent
from ._history import columns_of
from ._run import MIN_NORMS

ESTIMATES = (
    "",
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
        sys.exit(str(error))


def _print_report(options: argparse.Namespace) -> None:
    """Prints the report, and draws the picture."""
    call = f"replay: {options.log}"
    log = read_log(options.log, "replay", options.pattern)
    column, *other_columns = columns_of(log, options.column, call)
    choice = None
    if other_columns:
        lines = _about_columns(log, [column, *other_columns])
    else:
        choice = _choice_for(column)
        lines = [
            *_about_source(log, column, options),
            *_notes_on(column),
            _range_of(column),
            *_about_limit_of_run(log, column),
            "",
        ]
        if choice is not None:
            lines += _table(choice)
        lines += _advice(column, choice)
    print("\n".join(lines))
    if options.to is None and options.picture is None:
        return
    if choice is None:
        raise ValueError(
            f"{call}: --to and --picture need one column, and a limit that is "
            "recommended for it."
        )
    if options.to is not None:
        print(_at_batch(log, column, choice, options))
    if options.picture is not None:
        axis = plot_history(run(choice.rule, column.values), steps=column.steps)
        axis.set_title(f"norms as recorded, and {choice.suggestion.rule}")
        axis.figure.canvas.print_figure(options.picture)
        print(f"The picture is in {options.picture}.")


def _choice_for(column: Column) -> Choice | None:
    norms = _norms_above_0(column)
    if len(norms) < MIN_NORMS:
        return None
    return choice_of(norms, logging_interval(column))


def _norms_above_0(column: Column) -> np.ndarray:
    return column.values[np.isfinite(column.values) & (column.values > 0)]


# ---------------------------------------------------------------- lines of the report


def _about_source(log: Log, column: Column, options: argparse.Namespace) -> list[str]:
    """Which column the norms are, and why."""
    lines = [f"Norms: column {column.name!r} of {options.log.name}."]
    if options.column is None:
        lines.append("It is taken by its name. --column NAME takes another one.")
    else:
        lines.append("It is taken for a gradient norm, as --column says.")
    return [*lines, *log.notes]


def _notes_on(column: Column) -> list[str]:
    """What was left out of a column, and what it does not show."""
    lines = list(column.notes)
    if column.empty_cells:
        lines.append(f"{column.empty_cells} rows have no entry, and are left out.")
    interval = logging_interval(column)
    if interval > 1:
        lines.append(
            f"The rows are {interval} steps apart, and the norms between are not seen "
            "(transformers: logging_steps=1). Windows of rules are counted in steps."
        )
    is_finite = np.isfinite(column.values)
    if not is_finite.all():
        lines.append(
            f"{percent(1 - is_finite.mean())} of the norms are NaN or inf, which no "
            "clip cures: skip_nonfinite leaves such steps out, and python -m "
            "optaxclip.doctor says what is known of them."
        )
    return lines


def _range_of(column: Column) -> str:
    finite = column.values[np.isfinite(column.values)]
    count = column.values.size
    if not finite.size:
        return f"{count} steps, all of them NaN or inf."
    low, middle, high = np.quantile(finite, (0.0, 0.5, 1.0))
    return (
        f"{count} steps, {count - finite.size} of them NaN or inf. "
        f"Norms from {low:.4g} to {high:.4g}, median {middle:.4g}."
    )


def _about_limit_of_run(log: Log, column: Column) -> list[str]:
    """What the limit of the run did, if a clipper of this library logged it."""
    limit = log.columns.get(f"{column.name.removesuffix('norm_before')}limit")
    if limit is None:
        return []
    steps, (norms, limits) = in_common([column, limit])
    if not steps.size:
        return []
    share = np.mean(norms > limits)
    return [f"The limits of the run clipped {share:.1%} of the steps."]


def _table(choice: Choice) -> list[str]:
    """A row for each candidate, and one for the choice. Rows are sorted by the share of
    clipped steps, the largest first, and then by the limit.
    """
    chosen = choice.suggestion
    # The chosen row replaces candidates that do the same to the norms.
    effect = (chosen.limit, chosen.clip_rate)
    rows = [row for row in choice.candidates if (row.limit, row.clip_rate) != effect]
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
    return [*lines, *ESTIMATES, ""]


def _advice(column: Column, choice: Choice | None) -> list[str]:
    """The clipper to take, or why none is recommended."""
    if choice is not None:
        return choice.reasons
    norms = _norms_above_0(column)
    share_of_largest = clipped_share(norms)
    if share_of_largest:
        return [
            f"{share_of_largest:.0%} of the rows are within 0.1 % of "
            f"{norms.max():.4g}: these look like norms after a clip, from which no "
            "limit can be chosen. Log the norm before the clip."
        ]
    return [
        f"{len(norms)} norms above 0 are too few to choose a limit from. Log "
        f"{MIN_NORMS} steps or more.",
        f"Until then take {USUAL_LIMIT}, the limit that most trainers use.",
    ]


def _about_columns(log: Log, columns: Sequence[Column]) -> list[str]:
    """A line for each of several norms, such as an actor's and a critic's."""
    lines = [f"{len(columns)} columns are called a gradient norm.", *log.notes]
    for column in columns:
        advice, *further_advice = _advice(column, _choice_for(column))
        lines.append(f"{column.name}: {_range_of(column)} {advice}")
        lines += [f"  {line}" for line in [*further_advice, *_notes_on(column)]]
    lines.append("If one optimizer has them all, clip_by_group_norm takes all limits.")
    return [*lines, f"--column {columns[0].name!r} shows its table."]


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
    usual_norms = np.where(norms <= choice.guard.limit, norms, np.nan)
    ratio = norm_ratio(usual_norms, shares, options.batch, options.to)
    if isinstance(choice.rule, float):
        advice = f"start with clip_by_global_norm({ratio * choice.rule:.3g})."
    else:
        advice = "multiply the cap by this."
    return (
        f"At batch size {options.to} norms are {ratio:.3g} times as long as at "
        f"{options.batch}: {advice}"
    )


if __name__ == "__main__":
    main()
