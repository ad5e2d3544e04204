"""Importing the library is silent, and brings nothing that optax has not brought
already: what is slow to import comes when it is needed.
"""

import subprocess
import sys

PROGRAM = """
import sys

import optax

before = set(sys.modules)
import optaxclip

brought = set(sys.modules) - before
print(*sorted(name for name in brought if name.partition(".")[0] != "optaxclip"))
"""


def test_importing_is_silent_and_brings_only_the_library_itself():
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (run.stdout.strip(), run.stderr) == ("", "")
