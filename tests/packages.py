"""The command line of `tests.clients` and `tests.suites`: packages, a page and its
numbers as JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Options(NamedTuple):
    """What the command line asked for."""

    chosen: list[str]
    markdown: Path | None
    json: Path | None

    def run(self, one: Callable[[str], T]) -> list[T]:
        """What `one` makes of each package, with a line of progress before each."""
        found = []
        for place, name in enumerate(self.chosen, 1):
            progress = f"{name} ({place} of {len(self.chosen)}) ..."
            print(progress, file=sys.stderr, flush=True)
            found.append(one(name))
        return found

    def finish(
        self,
        page: Callable[[dict[str, Any]], str],
        recorded: dict[str, Any],
        problems: list[str],
    ) -> int:
        """Writes the page and its numbers where they are wanted. Returns the exit
        status: 1 for problems.
        """
        if self.markdown:
            self.markdown.write_text(page(recorded))
        if self.json:
            # Reasons are a read-only mapping, which JSON does not know.
            text = json.dumps(recorded, indent=1, default=dict)
            self.json.write_text(text + "\n")
        print("\n".join(problems), file=sys.stderr)
        return int(bool(problems))


def options_of(
    arguments: list[str] | None, module: str, description: str, known: Collection[str]
) -> Options:
    """Reads the command line of `python -m module`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description
    )
    parser.add_argument("packages", nargs="*", help=f"of {', '.join(known)}")
    parser.add_argument("--markdown", type=Path, help="where to write the page")
    parser.add_argument("--json", type=Path, help="where to write its numbers")
    options = parser.parse_args(arguments)
    unknown = set(options.packages) - set(known)
    if unknown:
        names = ", ".join(sorted(unknown))
        parser.error(f"no such package: {names}: there is {', '.join(known)}")
    return Options(options.packages or list(known), options.markdown, options.json)


def record(rows: Sequence[Any], environment: str) -> dict[str, Any]:
    """What a page is made of: named tuples, and where and when they were taken."""
    plain = [row._asdict() for row in rows]
    return {"where": f"{date.today()}, {environment}", "rows": plain}
