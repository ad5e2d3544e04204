"""The faults, as files that a person can read: `faults/core.txt` for `optaxclip/core.py`.

    tests/test_norms.py -k "unit or group"        the guards: arguments of pytest, the most telling first

    - jnp.minimum(norm, limit)                    a piece of the file, found there exactly once
    + jnp.maximum(norm, limit)                    what stands in its place
    = why no test can see it                      only where that is so

Lines that begin with # are notes.
"""

import shlex
from pathlib import Path
from typing import NamedTuple

FAULTS = Path(__file__).parent / "faults"


class Fault(NamedTuple):
    """One wrong piece of one file."""

    file: str  # as in "optaxclip/core.py"
    right: str
    wrong: str
    explained: str  # why no test can see it; empty where one must

    def within(self, text: str) -> str:
        """The text of the file with the fault in it."""
        count = text.count(self.right)
        if count != 1:
            raise ValueError(f"mutations: {self.file} must have this exactly once, but has it {count} times; write the fault anew:\n  {self.right}")
        return text.replace(self.right, self.wrong)


class Sheet(NamedTuple):
    """What is known of one file of the library."""

    file: str
    guards: list[str]  # arguments of pytest
    faults: list[Fault]


def read_sheets(files: list[str]) -> list[Sheet]:
    """The sheets of these files of the library, of all for an empty list.

    Raises:
      ValueError: a file without a sheet, a sheet without guards, or a line that does not fit.
    """
    sheets = {sheet.file: sheet for sheet in map(_read, sorted(FAULTS.rglob("*.txt")))}
    unknown = [file for file in files if file not in sheets]
    if unknown:
        raise ValueError(f"mutations: there are no faults for {', '.join(unknown)}; there are for {', '.join(sheets)}.")
    return [sheets[file] for file in files or sheets]


def _read(path: Path) -> Sheet:
    file = f"optaxclip/{path.relative_to(FAULTS).with_suffix('.py').as_posix()}"
    head: list[str] = []
    faults: list[Fault] = []
    right: str | None = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        mark, rest = line[:2].strip(), line[2:]
        if not line.strip() or mark.startswith("#"):
            continue
        if mark == "-" and right is None:
            right = rest
        elif mark == "+" and right is not None:
            faults.append(Fault(file, right, rest, ""))
            right = None
        elif mark == "=" and faults and right is None and not faults[-1].explained:
            faults[-1] = faults[-1]._replace(explained=rest)
        elif mark not in ("-", "+", "=") and not faults and right is None:
            head.append(line)
        else:
            raise ValueError(f"mutations: line {number} of {path} must be a guard, or - and + and perhaps = in this order, got {line!r}.")
    if not head or right is not None:
        raise ValueError(f"mutations: {path} must begin with its guards and end with a whole fault.")
    return Sheet(file, shlex.split(" ".join(head)), faults)
