"""The command line: chooses tables, prints each as soon as it is measured, and writes
all of them as JSON.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from . import compiled, per_example, report, whole_step

TABLES: dict[str, Callable[[bool], report.Table]] = {
    "whole_step": whole_step.table,
    "whole_step_compiled": compiled.table,
    "per_example": per_example.rows.table,
    "per_example_auto": partial(
        per_example.rows.table, models=per_example.losses.each_kind
    ),
    "per_example_unseen": partial(
        per_example.rows.table, models=per_example.unseen.unseen
    ),
    "per_example_compiled": per_example.devices.table,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and reports.

    Args:
      argv: the arguments of the command line. None takes them from the process.
    """
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="What clipping costs: ratios of times, memory, compilation.",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="toy sizes: shows that everything runs, measures nothing (default: off)",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=TABLES,
        help="a table to run, may be repeated (default: all)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path(__file__).with_name("results.json"),
        help="where the numbers go (default: results.json beside this program)",
    )
    options = parser.parse_args(argv)
    chosen = [name for name in TABLES if not options.only or name in options.only]
    setting = report.setting(options.quick)
    print(report.header(setting), flush=True)
    for number, name in enumerate(chosen, 1):
        # To stderr, so that the tables alone can be sent to a file.
        print(f"{name} ({number} of {len(chosen)}) ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        table = TABLES[name](options.quick)
        seconds = time.perf_counter() - start
        print(report.markdown(name, table, seconds), flush=True)
        # After each table, so that a run that is stopped leaves those it finished.
        report.write(options.json, setting, {name: table})
    print(f"Written to {options.json}")
