"""The command line of `tests.clients` and `tests.suites`: packages, a page and its
numbers as JSON.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import optaxclip

ROOT = Path(__file__).parents[1]
T = TypeVar("T")


def run_worker(module: str, *arguments: str, **settings: str) -> Any:
    """What `python -m module ARGUMENTS RESULT.json` writes, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, "-m", module, str(result), *arguments],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | settings,
            capture_output=True,
            text=True,
        )
        if not result.exists():
            raise RuntimeError(f"{' '.join(arguments)} did not run.\n{done.stderr}")
        return json.loads(result.read_text())


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


def record(rows: Sequence[Any], packages: Sequence[str]) -> dict[str, Any]:
    """What a page is made of: named tuples, and where and when they were taken."""
    named = [f"optaxclip {optaxclip.__version__}"]
    for name in packages:
        with suppress(PackageNotFoundError):
            named.append(f"{name} {version(name)}")
    where = f"on a CPU with Python {platform.python_version()}, {', '.join(named)}"
    plain = [row._asdict() for row in rows]
    return {"where": f"{date.today()}, {where}", "rows": plain}


def wrapped(text: str, hanging: str = "") -> str:
    """The text in lines of a page."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    words = " ".join(text.split())
    return textwrap.fill(words, 88, subsequent_indent=hanging, **options)
