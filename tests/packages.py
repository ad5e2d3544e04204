"""The command line of `tests.clients` and `tests.suites`: packages and a page."""

import argparse
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Options(NamedTuple):
    """What the command line asked for."""

    chosen: list[str]
    markdown: Path | None

    def run(self, one: Callable[[str], T]) -> list[T]:
        """What `one` makes of each package, with a line of progress before each."""
        found = []
        for place, name in enumerate(self.chosen, 1):
            progress = f"{name} ({place} of {len(self.chosen)}) ..."
            print(progress, file=sys.stderr, flush=True)
            found.append(one(name))
        return found

    def finish(self, page: str, problems: list[str]) -> int:
        """Writes the page if one is wanted. Returns the exit status: 1 for problems."""
        if self.markdown:
            self.markdown.write_text(page)
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
    options = parser.parse_args(arguments)
    unknown = set(options.packages) - set(known)
    if unknown:
        names = ", ".join(sorted(unknown))
        parser.error(f"no such package: {names}: there is {', '.join(known)}")
    return Options(options.packages or list(known), options.markdown)
