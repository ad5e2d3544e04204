"""Draws the pictures of README.md and docs/, and writes the numbers beside them.

    python -m benchmarks.pictures

Each picture is drawn by the program of its name in examples/, with the arguments below,
once for light and once for dark pages. Takes a few minutes. `which_clip_helps` is drawn
from results/methods.json.
"""

import subprocess
import sys

from . import pages
from .methods import picture

NUMBERS = pages.RESULTS / "broken_batches.json"
PICTURES = {"adaptive": [], "broken_batches": ["--table", str(NUMBERS)], "digits": []}
SCORES = "which_clip_helps.png"


def main() -> None:
    """Runs one program after the other, and then writes the pages."""
    for name, arguments in PICTURES.items():
        program = str(pages.ROOT / "examples" / f"{name}.py")
        path = str(pages.ROOT / "docs" / f"{name}.png")
        command = [sys.executable, program, "--save", path, *arguments]
        subprocess.run(command, check=True)
    picture.draw(pages.RESULTS / "methods.json", pages.ROOT / "docs" / SCORES)
    pages.main()


if __name__ == "__main__":
    main()
