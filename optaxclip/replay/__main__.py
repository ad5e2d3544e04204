"""The command `python -m optaxclip.replay run.csv`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from . import Suggestion, plot_history, run, suggest
from ._columns import listed
from ._history import Log, read_log
from ._replay import array_of_norms

# Each column of `_line` is as wide as its head: 16, 13 and 11 characters.
HEADS = ("limit at the end", "steps clipped", "mean factor")


def main(arguments: list[str] | None = None) -> None:
    """Prints the table of a log file and draws its picture beside it."""
    # None stands for the arguments of the command line.
    options = _parser().parse_args(arguments)
    try:
        log = read_log(options.log, options.column)
        norms = array_of_norms("suggest", log.norms)
        found = suggest(norms)
    # A file that is of no use ends in one line on stderr, without a traceback.
    except (OSError, ValueError) as error:
        sys.exit(f"{error}")
    print(source(log, options.log, guessed=options.column is None))
    print(table(norms, found))
    # runs/a.csv is drawn to runs/a.png.
    picture = options.picture or options.log.with_suffix(".png")
    try:
        draw(norms, found, picture, replace=options.force)
    # Such as a folder that is not there, or a suffix that is no kind of picture.
    except (OSError, ValueError) as error:
        sys.exit(f"No picture: {error}")


def _parser() -> argparse.ArgumentParser:
    # Before Python 3.14 argparse would call the program `__main__.py`.
    parser = argparse.ArgumentParser(
        prog="python -m optaxclip.replay",
        description="Prints candidate limits for recorded gradient norms, with the "
        "share of steps that each would have clipped, and draws the recommended one.",
    )
    parser.add_argument(
        "log",
        type=Path,
        help="a CSV with a header, JSON lines or an array of JSON, also as W&B and "
        "TensorBoard export them",
    )
    parser.add_argument(
        "--column",
        metavar="NAME",
        help="the name of the norm (default: the column that is called like a norm, "
        "such as clip/norm_before, grad_norm or train/grad_norm)",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="PATH",
        help="where to draw (default: beside the log, with the suffix .png)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace the picture if it exists (default: leave it as it is)",
    )
    return parser


def source(log: Log, path: Path, *, guessed: bool) -> str:
    """Which column was read, and how to read another."""
    text = f"Norms: column {log.column!r} of {path.name}"
    if not guessed:
        return f"{text}."
    # The surest name was taken, so the file may have other norms too.
    if not log.others:
        return f"{text}, the only one."
    return (
        f"{text}, taken by its name.\n"
        f"--column NAME takes another one: {listed(log.others)}."
    )


def table(norms: Any, found: list[Suggestion]) -> str:
    """The suggestions as text, with what they cannot tell."""
    norms = np.asarray(norms, np.float64)
    broken = int(np.sum(~np.isfinite(norms)))
    # `suggest` has raised where no norm is finite. With NaN all three would be NaN.
    low, middle, high = np.quantile(norms[np.isfinite(norms)], (0.0, 0.5, 1.0))
    best = next(row for row in found if row.recommended)
    return "\n".join(
        [
            f"{norms.size} steps, {broken} of them NaN or inf. Norms from {low:.4g} to "
            f"{high:.4g}, median {middle:.4g}.",
            "",
            f"   {'  '.join(HEADS)}  clipper, as Python",
            *map(_line, found),
            "",
            f"-> Start with {best.rule}: it clips {best.clip_rate:.1%} of these steps.",
            "These are estimates from the recorded norms. Clipping changes a run, so",
            "its norms will differ, and nothing here says how its loss would change.",
        ]
    )


def _line(row: Suggestion) -> str:
    mark = "->" if row.recommended else "  "
    numbers = (
        f"{row.limit:16.4g}  {row.clip_rate:13.1%}  {row.mean_factor:11.3f}"
    )
    return f"{mark} {numbers}  {row.rule}"


def draw(
    norms: np.ndarray, found: list[Suggestion], path: Path, *, replace: bool
) -> None:
    """Draws the norms, the recommended limit and the steps that it would have
    clipped.
    """
    # A picture beside the log may be the user's own, so only --force replaces it.
    if path.exists() and not replace:
        print(
            f"No picture: {path} exists. --force replaces it, --picture PATH draws to "
            "another place."
        )
        return
    try:
        # Figure and not pyplot: no window system is asked for, and nothing is kept.
        from matplotlib.figure import Figure
    except ImportError:
        print(
            "No picture: matplotlib is not installed (pip install matplotlib)."
        )
        return
    best = next(row for row in found if row.recommended)
    # The recommended row is a fixed limit, so its number is its rule.
    figure = Figure(figsize=(9, 4), layout="constrained")
    axis = plot_history(run(best.limit, norms), axis=figure.add_subplot())
    axis.set_title(
        f"norms as recorded, and the recommended limit {best.limit:.4g}"
    )
    # 1080 x 480 pixels.
    figure.savefig(path, dpi=120)
    print(f"Picture: {path}")


if __name__ == "__main__":
    main()
