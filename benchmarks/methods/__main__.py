"""`python -m benchmarks.methods`: trains, and writes after each program what it has."""

import argparse
import itertools
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import claims, private, scores
from .clippers import METHODS
from .tasks import TASKS
from .training import FAULTS, costs, untrained

RATE_RATIO = 4  # from one rate to the next
GROUP_SIZE = 6  # methods that are trained in one program


class Size(NamedTuple):
    """How much is trained."""

    methods: list[str]
    powers: range  # of RATE_RATIO, which multiply the middle rate of a task
    seeds: int
    private_steps: int


FULL = Size(list(METHODS), range(-2, 3), seeds=5, private_steps=200)
QUICK = Size(
    ["none", "clip_by_global_norm(1.0)", "skip_step(global)"],
    range(-1, 1),
    seeds=2,
    private_steps=10,
)


def main() -> None:
    """Trains what the file does not have yet, and prints the tables."""
    parser = argparse.ArgumentParser("python -m benchmarks.methods")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few methods, short runs, to see that it works (default: off)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("methods.json"),
        help="where the costs go. A method in it is not trained again "
        "(default: methods.json)",
    )
    options = parser.parse_args()
    content = train_all(options.json, options.quick)
    if not options.quick:
        print(claims.table(content))
    print(scores.faults_table(content))


def train_all(path: Path, quick: bool) -> dict[str, Any]:
    """Trains all tasks by all methods. Returns the content of the file."""
    size = QUICK if quick else FULL
    content: dict[str, Any] = {"quick": quick, "faults": list(FAULTS), "tasks": {}}
    if path.exists():
        content = json.loads(path.read_text())
        if content["quick"] != quick:
            runs = "full runs" if quick else "quick runs"
            raise SystemExit(f"{path} is of {runs}. Give another path by --json")
    start = time.perf_counter()
    groups = []
    for first in range(0, len(size.methods), GROUP_SIZE):
        groups.append(size.methods[first : first + GROUP_SIZE])
    programs = list(itertools.product(groups, TASKS))
    for number, (group, name) in enumerate(programs, 1):
        show_progress(number, len(programs), f"{name}, {group[0]} ...", start)
        task = TASKS[name]
        if quick:
            task = task._replace(rounds=2)
        if name not in content["tasks"]:
            rates = [task.rate * RATE_RATIO**power for power in size.powers]
            content["tasks"][name] = {
                "rates": [float(f"{rate:.2g}") for rate in rates],
                "untrained": untrained(task, size.seeds),
                "costs": {},
            }
        row = content["tasks"][name]
        missing = [method for method in group if method not in row["costs"]]
        if missing:
            methods = [METHODS[method] for method in missing]
            new_costs = costs(task, methods, row["rates"], size.seeds)
            row["costs"] |= zip(missing, rounded(np.asarray(new_costs)))
            write(path, content)
    if "private" not in content:
        content["private"] = private.row(size.seeds, size.private_steps)
        write(path, content)
    print(file=sys.stderr)
    return content


def rounded(costs: np.ndarray) -> Any:
    """Lists with four digits. None stands for a cost that is NaN or inf."""
    if costs.ndim:
        return [rounded(row) for row in costs]
    return float(f"{costs:.4g}") if np.isfinite(costs) else None


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes a line for each method."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1)
    path.write_text(re.sub(r"\n *(?=[\]\[\d-]|null)", " ", text) + "\n")


def show_progress(number: int, count: int, name: str, start: float) -> None:
    """Rewrites one line of the terminal."""
    bar = "#" * (30 * number // count)
    minutes = (time.perf_counter() - start) / 60
    line = f"\r{bar:.<30} {number} of {count}, {minutes:.0f} min: {name:42}"
    print(line, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
