"""Which column of a log holds the gradient norm."""

import re
from collections.abc import Sequence
from pathlib import Path

# What `metrics` writes for clippers with names, numbers or a norm for each tensor, and
# what loggers write with the name of a group in front: train/grad_norm.
OF_METRICS = (
    r"clip(_\d+)?/(.+/)?norm_before(/.+)?|skip(_\d+)?/(.+/)?norm|"
    r"(norm_before|grad_norm|norm)/.+"
)
OF_LOGGERS = r".+/(grad_norm|gradient_norm|gnorm|norm_before)"
# Names of norms, the surest first.
NAMES = (
    "clip/norm_before",
    "norm_before",
    "grad_norm",
    "skip/norm",
    "norm",
    "gnorm",
    f"{OF_METRICS}|{OF_LOGGERS}",
)
# TensorBoard exports one series to a file, whose name has the tag.
TENSORBOARD = ["Wall time", "Step", "Value"]
# W&B exports each series with its smallest and largest value of a pixel of the plot.
RANGE_OF_WANDB = re.compile(r"__(MIN|MAX)$")


def column_of_norms(path: Path, names: Sequence[str]) -> str:
    """Returns the name of the one column that can be the norm, or raises."""
    found = ["Value"] if list(names) == TENSORBOARD else _candidates(names)
    if not found:
        raise ValueError(
            f"read_history: no column of {path} has the name of a gradient norm, such "
            f"as 'grad_norm' or 'train/grad_norm'. It has {listed(names)}. "
            f"{_how_to_choose(names[-1])}"
        )
    if len(found) > 1:
        raise ValueError(
            f"read_history: column must be given: {path} has several norms, "
            f"{listed(found)}. {_how_to_choose(found[0])}"
        )
    return found[0]


def listed(names: Sequence[str], most: int = 12) -> str:
    """Names in quotes, at most so many."""
    left_out = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(repr, names[:most]))}{left_out}"


def _candidates(names: Sequence[str]) -> list[str]:
    """All columns with the surest of the names that are there."""
    # W&B writes the name of the run first: "lively-sun-7 - train/grad_norm".
    written = {name: name.rpartition(" - ")[2] for name in names}
    series = [name for name in names if not RANGE_OF_WANDB.search(name)]
    for pattern in NAMES:
        found = [
            name for name in series if re.fullmatch(pattern, written[name])
        ]
        if found:
            return found
    return []


def _how_to_choose(name: str) -> str:
    return f"Choose one with column={name!r}, on the command line --column {name!r}."
