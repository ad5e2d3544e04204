"""The command `python -m optaxclip.replay run.csv`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..rules import z_score
from . import Suggestion, plot_history, read_history, run, suggest


def main(arguments: list[str] | None = None) -> None:
    """Prints the table of a log file and draws its picture beside it."""
    options = _parser().parse_args(arguments)
    try:
        norms = read_history(options.log, options.column)
        found = suggest(norms)
    except (OSError, ValueError) as error:
        sys.exit(f"{error}")
    print(table(norms, found))
    draw(norms, options.picture or options.log.with_suffix(".png"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m optaxclip.replay",
        description="Candidate rules for recorded gradient norms.",
    )
    parser.add_argument("log", type=Path, help="a CSV with a header, or JSON lines")
    parser.add_argument(
        "--column",
        help="the name of the norm (default: the name that metrics() gave it)",
    )
    parser.add_argument(
        "--picture", type=Path, help="where to draw (default: beside the log)"
    )
    return parser


def table(norms: Any, found: list[Suggestion]) -> str:
    """The suggestions as text, with what they cannot tell."""
    norms = np.asarray(norms, np.float64)
    broken = int(np.sum(~np.isfinite(norms)))
    low, middle, high = np.quantile(norms[np.isfinite(norms)], (0.0, 0.5, 1.0))
    lines = [
        f"{norms.size} steps, {broken} of them NaN or inf. Norms from {low:.4g} to "
        f"{high:.4g}, median {middle:.4g}.",
        "",
    ]
    width = max(len(row.rule) for row in found)
    heads = ("limit at the end", "steps clipped", "mean factor")
    lines.append("  ".join([f"{'rule':{width}}", *heads]))
    for row in found:
        numbers = f"{row.limit:16.4g}  {row.clip_rate:13.1%}  {row.mean_factor:11.3f}"
        lines.append(f"{row.rule:{width}}  {numbers}")
    lines += [
        "",
        "Counted on the norms as they were recorded. A run that is clipped goes "
        "another way: this cannot say how its norms, or its loss, would have been.",
    ]
    return "\n".join(lines)


def draw(norms: np.ndarray, path: Path) -> None:
    """Draws the norms and what `zclip()` would have clipped."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(
            "No picture: matplotlib is not installed (pip install 'optaxclip[plot]')."
        )
        return
    figure = Figure(figsize=(9, 4), layout="constrained")
    axis = plot_history(run(z_score(), norms), axis=figure.add_subplot())
    axis.set_title("norms as recorded, and the steps that zclip() would have clipped")
    figure.savefig(path, dpi=120)
    print(f"Picture: {path}")


if __name__ == "__main__":
    main()
