"""The command `python -m optaxclip.replay run.csv`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .._logs import (
    Column,
    Log,
    clipped_share,
    distance_of_steps,
    in_common,
    listed,
    read_log,
)
from .._logs import norms_of as norms_by_name
from . import Suggestion, plot_history, run, suggest
from ._batch import norm_at_batch
from ._history import columns_of
from ._run import history_of

FEW = 20  # steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints candidate limits for the gradient norms of a log, with the share of steps
    that each would have clipped, and draws the recommended one.
    """
    # Before Python 3.14 argparse would call the program `__main__.py`.
    parser = argparse.ArgumentParser("python -m optaxclip.replay", None, main.__doc__)
    add = parser.add_argument
    add("log", type=Path, help="JSON lines, JSON, CSV, event file, .npy, .npz, or text")
    add("--column", metavar="NAME", help="the norm (default: by its name)")
    add("--pattern", help="for text: a regular expression with named groups")
    add("--picture", type=Path, help="where to draw (default: beside the log)")
    add("--batch", type=int, help="examples in a batch of the log, for --to")
    add("--to", type=int, help="examples in another batch: what limit it needs")
    add("--force", action="store_true", help="replace a picture that exists")
    # None stands for the arguments of the command line.
    options = parser.parse_args(arguments)
    if (options.batch is None) != (options.to is None):
        parser.error("--batch and --to go together: batch sizes of the log and to come")
    try:
        log = read_log(options.log, "replay", options.pattern)
        columns = columns_of(log, options.column, f"replay: {options.log}")
        if len(columns) > 1:
            print(_rows_of_columns(log, columns, options.log.name))
            return
        column = columns[0]
        distance = distance_of_steps(column)
        suggestions = suggest(column.values, every=distance)
        best = next((row for row in suggestions if row.recommended), None)
        at_batch = ""
        if options.to is not None and best is not None:
            at_batch = _at_batch(log, column, best.limit, options)
    # A file that is of no use ends in one line on stderr, without a traceback.
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(_source(log, column, options.column, options.log.name))
    if best is None:
        print(_about_clipped_norms(column))
        return
    print(_table(column, suggestions, best))
    if at_batch:
        print(at_batch)
    # runs/a.csv is drawn to runs/a.png.
    picture = options.picture or options.log.with_suffix(".png")
    # A picture beside the log may be the user's own.
    if picture.exists() and not options.force:
        advice = "--force replaces it, --picture PATH draws to another place"
        print(f"No picture: {picture} exists. {advice}.")
        return
    try:
        from matplotlib.figure import Figure

        # 1080 x 480 pixels.
        figure = Figure(figsize=(9, 4), layout="constrained")
        result = run(best.limit, column.values)
        axis = plot_history(result, steps=column.steps, axis=figure.add_subplot())
        axis.set_title(f"norms as recorded, and the recommended limit {best.limit:.4g}")
        figure.savefig(picture, dpi=120)
        print(f"Picture: {picture}")
    except ImportError:
        print("No picture: matplotlib is not installed.")
    # Such as a folder that is not there, or a suffix that is no kind of picture.
    except (OSError, ValueError) as error:
        sys.exit(f"No picture: {error}")


def _source(log: Log, column: Column, name: str | None, file: str) -> str:
    """Which column it is, and what a reader should know of it."""
    lines = [f"Norms: column {column.name!r} of {file}."]
    if name is None:
        lines[0] = f"Norms: column {column.name!r} of {file}, taken by its name."
        others = [other for other in log.columns if other != column.name]
        if others:
            lines.append(f"--column NAME takes another one: {listed(others)}.")
    elif column.name not in [norm.name for norm in norms_by_name(log)]:
        lines.append("Its name does not say so, but it is taken for a gradient norm.")
    lines += [*log.notes, *(f"{column.name!r}: {note}" for note in column.notes)]
    if column.empty:
        lines.append(f"{column.empty} rows have no entry in it, and are left out.")
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
    if is_finite.sum() < FEW:
        lines.append(f"{is_finite.sum()} norms are too few to choose a limit from.")
    return "\n".join(lines)


def _about_clipped_norms(column: Column) -> str:
    share = clipped_share(column.values)
    largest = np.max(column.values[np.isfinite(column.values)])
    return (
        f"{share:.0%} of the rows are exactly {largest:.4g}: these look like norms "
        "after a clip, from which no limit can be chosen. Log the norm before the clip."
    )


def _rows_of_columns(log: Log, columns: Sequence[Column], file: str) -> str:
    """A row for each of several norms, as of an actor and a critic."""
    lines = [
        f"{len(columns)} columns of {file} are called a gradient norm.",
        *log.notes,
        "",
        "     steps      median     largest  limit that clips about 1%",
    ]
    for column in columns[:12]:
        finite = column.values[np.isfinite(column.values)]
        limit = "none"
        if (finite > 0).sum() > 1:
            suggestions = suggest(column.values, every=distance_of_steps(column))
            best = [row for row in suggestions if row.recommended]
            limit = f"{best[0].limit:.4g}" if best else "none: norms after a clip"
        median = np.median(finite) if finite.size else np.nan
        largest = finite.max(initial=0.0)
        numbers = f"{len(column.steps):10}  {median:10.4g}  {largest:10.4g}"
        lines.append(f"{numbers}  {limit}  {column.name}")
    if len(columns) > 12:
        lines.append(f"and {len(columns) - 12} more.")
    lines += ["", f"--column {columns[0].name!r} shows its table and a picture."]
    return "\n".join(lines)


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
    ratio = norm_at_batch(usual_norms, shares, options.batch, options.to)
    return (
        f"At batch size {options.to} norms are {ratio:.3g} times as long as at "
        f"{options.batch}: start with clip_by_global_norm({ratio * limit:.3g})."
    )


def _table(column: Column, suggestions: Sequence[Suggestion], best: Suggestion) -> str:
    """The suggestions as text, with what they cannot tell."""
    # With inf for what is beyond float32. `suggest` has raised where all are broken.
    norms = np.asarray(history_of("suggest", column.values), np.float64)
    finite = norms[np.isfinite(norms)]
    low, middle, high = np.quantile(finite, (0.0, 0.5, 1.0))
    lines = [
        f"{norms.size} steps, {norms.size - finite.size} of them NaN or inf. "
        f"Norms from {low:.4g} to {high:.4g}, median {middle:.4g}.",
        "",
        "   limit at the end  steps clipped  mean factor  clipper, as Python",
    ]
    # Each column is as wide as its head.
    for row in suggestions:
        mark = "->" if row.recommended else "  "
        shares = f"{row.clip_rate:13.1%}  {row.mean_factor:11.3f}"
        lines.append(f"{mark} {row.limit:16.4g}  {shares}  {row.rule}")
    lines += [
        "",
        f"-> Start with {best.rule}: it clips {best.clip_rate:.1%} of these steps.",
        "These are estimates from the recorded norms. Clipping changes a run, so",
        "its norms will differ, and nothing here says how its loss would change.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
