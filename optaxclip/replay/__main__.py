"""The command `python -m optaxclip.replay run.csv`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .._logs import Column, Log, clipped_share, distance_of_steps, in_common, read_log
from . import Suggestion, plot_history, run, suggest
from ._batch import norm_ratio
from ._history import columns_of, named_norms
from ._run import LEAST_NORMS

# Most trainers clip the global norm to it.
USUAL_LIMIT = 1.0
# A limit that clips a larger share of the steps is no guard.
MOST_STEPS = 0.5
# The first fifth of the norms over the last one, in medians. From this on the limit of
# all norms hardly clips in the end.
FALL = 2.0
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
    add("--picture", type=Path, help="where to draw the norms and the guard")
    add("--batch", type=int, help="examples in a batch of the log, for --to")
    add("--to", type=int, help="examples in another batch: the limit that it needs")
    # None stands for the arguments of the command line.
    options = parser.parse_args(arguments)
    sizes = [size for size in (options.batch, options.to) if size is not None]
    if len(sizes) == 1 or any(size < 1 for size in sizes):
        parser.error("--batch and --to go together, and must be at least 1")
    try:
        _print_report(options)
    # A file that is of no use, or a picture that cannot be drawn, ends in one line on
    # stderr, without a traceback.
    except (OSError, ValueError, ImportError) as error:
        sys.exit(str(error))


def _print_report(options: argparse.Namespace) -> None:
    """Prints the report, and draws the picture."""
    call = f"replay: {options.log}"
    log = read_log(options.log, "replay", options.pattern)
    column, *other_columns = columns_of(log, options.column, call)
    guard = None
    if other_columns:
        lines = _about_columns(log, [column, *other_columns])
    else:
        suggestions = _suggestions_for(column)
        guard = _guard_of(suggestions)
        lines = [
            *_about_source(log, column, options),
            *_notes_on(column),
            _range_of(column),
            "",
            *_table(suggestions),
            *_advice(column, guard),
        ]
    if guard is not None:
        lines += ESTIMATES
    print("\n".join(lines))
    if options.to is None and options.picture is None:
        return
    if guard is None:
        raise ValueError(
            f"{call}: --to and --picture need one column, and a limit that is "
            "recommended for it."
        )
    if options.to is not None:
        print(_at_batch(log, column, guard.limit, options))
    if options.picture is not None:
        axis = plot_history(run(guard.limit, column.values), steps=column.steps)
        axis.set_title(f"norms as recorded, and a guard of {guard.limit:.4g}")
        axis.figure.canvas.print_figure(options.picture)
        print(f"The picture is in {options.picture}.")


def _suggestions_for(column: Column) -> list[Suggestion]:
    """The candidates: none for few norms, and for norms after a clip."""
    norms = _norms_above_0(column)
    if len(norms) < LEAST_NORMS or clipped_share(norms):
        return []
    return suggest(column.values, every=distance_of_steps(column))


def _norms_above_0(column: Column) -> np.ndarray:
    return column.values[np.isfinite(column.values) & (column.values > 0)]


def _guard_of(suggestions: Sequence[Suggestion]) -> Suggestion | None:
    return next((row for row in suggestions if row.recommended), None)


# ---------------------------------------------------------------- lines of the report


def _about_source(log: Log, column: Column, options: argparse.Namespace) -> list[str]:
    """Which column it is, and why."""
    lines = [f"Norms: column {column.name!r} of {options.log.name}."]
    if options.column is None:
        lines.append("It is taken by its name. --column NAME takes another one.")
    # A log of this column alone, since the log may have a surer name.
    elif not named_norms(log._replace(columns={column.name: column})):
        lines.append("Its name does not say so, but it is taken for a gradient norm.")
    return [*lines, *log.notes]


def _notes_on(column: Column) -> list[str]:
    """What was left out of a column, and what it does not show."""
    lines = list(column.notes)
    if column.empty_cells:
        lines.append(f"{column.empty_cells} rows have no entry, and are left out.")
    distance = distance_of_steps(column)
    if distance > 1:
        lines.append(
            f"The rows are {distance} steps apart, and the norms between are not seen "
            "(transformers: logging_steps=1). Windows of rules are counted in steps."
        )
    is_finite = np.isfinite(column.values)
    if not is_finite.all():
        lines.append(
            f"{1 - is_finite.mean():.1%} of the norms are NaN or inf, which no clip "
            "cures: skip_nonfinite leaves such steps out, and python -m "
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


def _table(suggestions: Sequence[Suggestion]) -> list[str]:
    """A row for each candidate, and nothing without any."""
    if not suggestions:
        return []
    # Each column is as wide as its head.
    lines = ["  limit (last step)  steps clipped  mean factor  clipper, as Python"]
    for suggestion in suggestions:
        mark = "->" if suggestion.recommended else "  "
        shares = f"{suggestion.clip_rate:13.1%}  {suggestion.mean_factor:11.3f}"
        lines.append(f"{mark} {suggestion.limit:16.4g}  {shares}  {suggestion.rule}")
    return [*lines, ""]


def _advice(column: Column, guard: Suggestion | None) -> list[str]:
    """The limit to take, or why none is recommended."""
    norms = _norms_above_0(column)
    share_of_largest = clipped_share(norms)
    if share_of_largest:
        return [
            f"{share_of_largest:.0%} of the rows are exactly {norms.max():.4g}: "
            "these look like norms after a clip, from which no limit can be chosen. "
            "Log the norm before the clip."
        ]
    if guard is None:
        return [
            f"{len(norms)} norms above 0 are too few to choose a limit from. Log "
            f"{LEAST_NORMS} steps or more.",
            f"Until then take {USUAL_LIMIT}, the limit that most trainers use.",
        ]
    first_norms, *_, last_norms = np.array_split(norms, 5)
    early = np.median(first_norms)
    late = np.median(last_norms)
    lines = _choice(guard, float(np.mean(norms > USUAL_LIMIT)))
    if early >= FALL * late:
        lines += [
            f"But norms fall: from a median of {early:.3g} in the first fifth of the "
            f"log to {late:.3g} in the last.",
            "A fixed limit then clips ever less. A rule that learns or a schedule can "
            "follow the norms.",
        ]
    return lines


def _choice(guard: Suggestion, usual_share: float) -> list[str]:
    """The usual limit or the guard, by the share of steps that the usual one clips."""
    the_guard = f"{guard.rule}, a guard that clips {guard.clip_rate:.1%}"
    # One step of a long run is not 0.0 %.
    usual_percent = f"{100 * usual_share:.3g}%"
    if usual_share == 0:
        return [f"Take {the_guard} of these steps. The usual {USUAL_LIMIT} clips none."]
    if usual_share > MOST_STEPS:
        return [
            f"Take {the_guard} of these steps. The usual {USUAL_LIMIT} clips "
            f"{usual_percent}.",
            f"With Adam {USUAL_LIMIT} may stay, if most steps are to be clipped.",
        ]
    return [
        f"Take {USUAL_LIMIT}, as most trainers do: it clips {usual_percent} of these "
        "steps, neither none nor more than half.",
        f"If accidents alone are to be clipped, take {the_guard}.",
    ]


def _about_columns(log: Log, columns: Sequence[Column]) -> list[str]:
    """A row for each of several norms, such as of an actor and a critic."""
    lines = [f"{len(columns)} columns are called a gradient norm.", *log.notes]
    for column in columns:
        guard = _guard_of(_suggestions_for(column))
        advice, *further_advice = _advice(column, guard)
        lines.append(f"{column.name}: {_range_of(column)} {advice}")
        lines += [f"  {line}" for line in [*further_advice, *_notes_on(column)]]
    lines.append("If one optimizer has them all, clip_by_group_norm takes all limits.")
    return [*lines, f"--column {columns[0].name!r} shows its table."]


def _at_batch(
    log: Log, column: Column, limit: float, options: argparse.Namespace
) -> str:
    """The limit at another batch size, from steps that the limit leaves as they are."""
    if "noise_share" not in log.columns:
        raise ValueError(
            f"replay: {options.log}: --to needs the column noise_share: log "
            "optaxclip.per_example.noise_share(norms_of_parts, norm)."
        )
    _, (norms, shares) = in_common([column, log.columns["noise_share"]])
    usual_norms = np.where(norms <= limit, norms, np.nan)
    ratio = norm_ratio(usual_norms, shares, options.batch, options.to)
    return (
        f"At batch size {options.to} norms are {ratio:.3g} times as long as at "
        f"{options.batch}: start with clip_by_global_norm({ratio * limit:.3g})."
    )


if __name__ == "__main__":
    main()
