"""Importing the library is silent, and brings nothing that optax has not brought
already: what is slow to import comes when it is needed.
"""

import subprocess
import sys

import pytest

import optaxclip

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


LATER = """
import sys

import optaxclip

names = {"autopsy", "check", "doctor", "dropin", "per_example", "replay"}
modules = names | {"_check_step", "_logs", "_release"}
brought = {name for name in modules if f"optaxclip.{name}" in sys.modules}
offered = names & set(dir(optaxclip))
print(*sorted(brought), *sorted(offered))
print(optaxclip.doctor.diagnose.__name__, optaxclip.check.main.__name__)
from optaxclip import check_step, clipped_grad, release
print(check_step.__module__, clipped_grad.__module__, release is optaxclip.release)
"""


def test_the_tools_come_when_they_are_asked_for():
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", LATER],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines() == [
        "autopsy check doctor dropin per_example replay",
        "diagnose main",
        "optaxclip optaxclip True",
    ]


@pytest.mark.parametrize("module", ["autopsy", "check", "doctor", "replay"])
def test_a_command_is_silent_about_its_own_import(module):
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"optaxclip.{module}", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith(f"usage: python -m optaxclip.{module}")
    assert run.stderr == ""


def test_names_of_the_tools_are_found_by_their_hints():
    with pytest.raises(AttributeError, match=r"Use optaxclip\.doctor\.diagnose\.$"):
        _ = optaxclip.diagnose
