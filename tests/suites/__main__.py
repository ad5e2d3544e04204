"""The command: see `tests/suites/__init__.py`."""

import json
import sys

from ..packages import options_of, record
from .compare import Findings, findings, tables_of_cases, with_others
from .page import differences, page, table
from .patches import SUITES


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if something differs that nobody has explained."""
    options = options_of(
        arguments,
        "tests.suites",
        "Runs the tests that other packages ship, with our functions.",
        [*SUITES, "cases"],
    )
    found = options.run(_findings_of)
    rows = [row for each in found for row in each.rows]
    print(table(rows), differences(rows), sep="\n\n")
    problems = [problem for each in found for problem in each.problems]
    recorded = record(rows, ("jax", "optax", "numpy", "pytest"))
    recorded["where"] = dict.fromkeys(options.chosen, recorded["where"])
    if options.json and options.json.exists():
        recorded = with_others(recorded, json.loads(options.json.read_text()))
    return options.finish(page, recorded, problems)


def _findings_of(name: str) -> Findings:
    return tables_of_cases() if name == "cases" else findings(name)


if __name__ == "__main__":
    sys.exit(main())
