"""The command: see `tests/suites/__init__.py`."""

import argparse
import json
import sys
from pathlib import Path

from .compare import findings, tables_of_cases
from .page import differences, page, record, table
from .patches import SUITES


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if something differs that nobody has explained."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.suites",
        description="Runs the tests that other packages ship, with our functions.",
    )
    parser.add_argument("packages", nargs="*", help=f"of {', '.join(SUITES)}, cases")
    parser.add_argument("--markdown", type=Path, help="where to write the page")
    parser.add_argument("--json", type=Path, help="where to write its numbers")
    options = parser.parse_args(arguments)
    chosen = options.packages or [*SUITES, "cases"]
    unknown = set(chosen) - {*SUITES, "cases"}
    if unknown:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    found = []
    for name in chosen:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found.append(tables_of_cases() if name == "cases" else findings(name))
    rows = [row for each in found for row in each.rows]
    print(table(rows), differences(rows), sep="\n\n")
    recorded = record(rows)
    if options.markdown:
        options.markdown.write_text(page(recorded))
    if options.json:
        options.json.write_text(json.dumps(recorded, indent=1) + "\n")
    problems = [problem for each in found for problem in each.problems]
    print("\n".join(problems), file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
