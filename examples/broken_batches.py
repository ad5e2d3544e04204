"""Trains a recurrent network on text with ten broken batches, unprotected, clipped and
with the broken steps skipped.

What it shows. Every eightieth batch from step 200 on is broken: each of its windows is
one character, over and over. Its gradient is many times as long as usual and useless
for everything else. Without protection training fails. With one line of protection the
run ends where the same run ends on clean batches. Four runs have the same seed and
learning rate: three meet the broken batches and one, drawn in grey, does not.

What it does not show. Which protection is best: `adaptive.py` compares six. Nor that
every run needs one: at half the learning rate (--lr 0.1) broken batches do little harm.

How long it takes. Half a minute on two CPU cores, compilation included.

What it prints. A line for each run as it ends, then the table of `adaptive.py`. --save
PATH draws a picture, and one for dark pages with "_dark" in its name. --table PATH
writes the table as JSON.

    python examples/broken_batches.py --save broken_batches.png
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

if __package__:  # imported from the root of the repository, as the tests do
    from . import adaptive
    from ._pictures import Look, draw_both, note, prepare
else:
    import adaptive
    from _pictures import Look, draw_both, note, prepare

TITLES = {
    "none": "no protection",
    "global norm": "clip_by_global_norm(1.0)",
    "skip_step": "skip_step(optimizer)",
}


def main(
    steps: int = 1000,
    *,
    lr: float = adaptive.LEARNING_RATE,
    seed: int = adaptive.SEED,
    save: str | Path | None = None,
    table: str | Path | None = None,
) -> list[adaptive.Row]:
    """Trains the four networks, prints the table, draws the pictures and writes the
    table if they are wanted, and returns the table.
    """
    rows, runs, broken = adaptive.compare(
        steps, lr=lr, seed=seed, only=(adaptive.CLEAN, *TITLES)
    )
    if save is not None:
        draw_both(save, (13, 4), functools.partial(draw, runs, broken))
        print(f"\nThe picture is in {save}")
    if table is not None:
        lines = [row._asdict() for row in rows]
        Path(table).write_text(json.dumps(lines, indent=1) + "\n")
    return rows


def draw(
    runs: dict[str, adaptive.Curves], broken: np.ndarray, figure: Any, look: Look
) -> None:
    """One panel for each run that met the broken batches."""
    clean = ~broken
    steps = np.flatnonzero(clean)
    losses = {name: adaptive.average(run.loss[clean]) for name, run in runs.items()}
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    for axis, name, colour in zip(panels, TITLES, (look.orange, look.blue, look.green)):
        final = runs[name].loss[clean][-50:].mean()
        axis.plot(steps, losses[adaptive.CLEAN], color=look.grey, linewidth=4)
        axis.plot(steps, losses[name], color=colour, linewidth=2)
        axis.plot(np.flatnonzero(broken), np.full(broken.sum(), 1.1), "^", c=colour)
        axis.set_title(TITLES[name], color=colour, weight="bold")
        prepare(axis, look, xlabel="step", ylim=(1.0, 4.2))
        note(axis, f"final loss {final:.2f}", (0.97, 0.93), colour)
    panels[0].set_ylabel("loss on clean batches")
    note(panels[0], "grey: no broken batches", (0.97, 0.83), look.grey)
    note(panels[0], "▲ broken batch", (0.97, 0.14), look.orange)


def command_line() -> argparse.ArgumentParser:
    """The options of the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shown = "(default: %(default)s)"
    add(
        "--steps",
        type=adaptive.char_rnn.count,
        default=1000,
        help=f"how many steps to train {shown}",
    )
    add(
        "--lr",
        type=float,
        default=adaptive.LEARNING_RATE,
        help=f"the learning rate {shown}",
    )
    add(
        "--seed",
        type=int,
        default=adaptive.SEED,
        help=f"the seed of the batches {shown}",
    )
    add(
        "--save",
        type=Path,
        metavar="PATH",
        help="draw the pictures to this path (default: no picture)",
    )
    add(
        "--table",
        type=Path,
        metavar="PATH",
        help="write the table as JSON (default: no file)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
