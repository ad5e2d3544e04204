"""Draws the pictures of README.md and docs/, and writes the numbers beside them.

    python -m benchmarks.pictures

Each picture is drawn by the program of its name in examples/, with the arguments below,
once for light and once for dark pages. Takes a few minutes.
"""

import subprocess
import sys

from . import pages

NUMBERS = pages.RESULTS / "broken_batches.json"
PICTURES = {"adaptive": [], "broken_batches": ["--table", str(NUMBERS)], "digits": []}


def main() -> None:
    """Runs one program after the other, and then writes the pages."""
    for name, arguments in PICTURES.items():
        program = str(pages.ROOT / "examples" / f"{name}.py")
        picture = str(pages.ROOT / "docs" / f"{name}.png")
        command = [sys.executable, program, "--save", picture, *arguments]
        subprocess.run(command, check=True)
    pages.main()


if __name__ == "__main__":
    main()
