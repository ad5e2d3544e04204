"""The command `python -m optaxclip.replay run.csv`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from . import Suggestion, plot_history, run, suggest
from ._batch import norm_at_batch
from ._read import listed, read_log
from ._run import history_of


def main(arguments: list[str] | None = None) -> None:
    """Prints candidate limits for the gradient norms of a log, with the share of steps
    that each would have clipped, and draws the recommended one.
    """
    # Before Python 3.14 argparse would call the program `__main__.py`.
    parser = argparse.ArgumentParser("python -m optaxclip.replay", None, main.__doc__)
    add = parser.add_argument
    add("log", type=Path, help="CSV, JSON, .npy or .npz, also in gzip")
    add("--column", metavar="NAME", help="the norm (default: by its name)")
    add("--picture", type=Path, help="where to draw (default: beside the log)")
    add("--batch", type=int, help="examples in a batch of the log, for --to")
    add("--to", type=int, help="examples in another batch: what limit it needs")
    add("--force", action="store_true", help="replace a picture that exists")
    # None stands for the arguments of the command line.
    options = parser.parse_args(arguments)
    if (options.batch is None) != (options.to is None):
        parser.error("--batch and --to go together: batch sizes of the log and to come")
    try:
        norms, column, others = read_log(options.log, options.column)
        found = suggest(norms)
        best = next(row for row in found if row.recommended)
        at_batch = ""
        if options.to is not None:
            at_batch = _at_batch(options, norms, best.limit)
    # A file that is of no use ends in one line on stderr, without a traceback.
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    source = f"Norms: column {column!r} of {options.log.name}"
    # The surest name was taken, so the file may have other norms too.
    if options.column is None and others:
        source += ", taken by its name.\n--column NAME takes another one: "
        source += listed(others)
    print(f"{source}.\n{_table(norms, found, best)}")
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
        axis: Any = plot_history(run(best.limit, norms))
        axis.set_title(f"norms as recorded, and the recommended limit {best.limit:.4g}")
        # 1080 x 480 pixels.
        axis.figure.savefig(picture, dpi=120)
        print(f"Picture: {picture}")
    except ImportError:
        print("No picture: matplotlib is not installed.")
    # Such as a folder that is not there, or a suffix that is no kind of picture.
    except (OSError, ValueError) as error:
        sys.exit(f"No picture: {error}")


def _at_batch(options: argparse.Namespace, norms: Any, limit: float) -> str:
    """The limit at another batch size, from steps that the limit leaves as they are."""
    try:
        shares = read_log(options.log, "noise_share").norms
    except ValueError as error:
        advice = "log optaxclip.per_example.noise_share(norms_of_parts, norm) for --to"
        raise ValueError(f"{error} Then {advice}.") from None
    usual_norms = np.where(norms <= limit, norms, np.nan)
    ratio = norm_at_batch(usual_norms, shares, options.batch, options.to)
    return (
        f"At batch size {options.to} norms are {ratio:.3g} times as long as at "
        f"{options.batch}: start with clip_by_global_norm({ratio * limit:.3g})."
    )


def _table(norms: Any, found: list[Suggestion], best: Suggestion) -> str:
    """The suggestions as text, with what they cannot tell."""
    # With inf for what is beyond float32. `suggest` has raised where all are broken.
    norms = np.asarray(history_of("suggest", norms), np.float64)
    finite = norms[np.isfinite(norms)]
    low, middle, high = np.quantile(finite, (0.0, 0.5, 1.0))
    lines = [
        f"{norms.size} steps, {norms.size - finite.size} of them NaN or inf. "
        f"Norms from {low:.4g} to {high:.4g}, median {middle:.4g}.",
        "",
        "   limit at the end  steps clipped  mean factor  clipper, as Python",
    ]
    # Each column is as wide as its head.
    for row in found:
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
