"""The command: see `tests/clients/__init__.py`."""

import argparse
import sys
from pathlib import Path

from .compare import row_of
from .page import page, table
from .trained import CLIENTS


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if something is wrong between two runs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients",
        description="Trains with programs of other packages, with our clip in theirs.",
    )
    parser.add_argument("packages", nargs="*", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument("--markdown", type=Path, help="where to write the page")
    options = parser.parse_args(arguments)
    chosen = options.packages or list(CLIENTS)
    unknown = set(chosen) - set(CLIENTS)
    if unknown:
        parser.error(f"no such package: {', '.join(sorted(unknown))}")
    rows = []
    for place, name in enumerate(chosen, 1):
        print(f"{name} ({place} of {len(chosen)}) ...", file=sys.stderr, flush=True)
        rows.append(row_of(name))
    print(table(rows))
    if options.markdown:
        options.markdown.write_text(page(rows))
    problems = [problem for row in rows for problem in row.problems]
    print("\n".join(problems), file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
