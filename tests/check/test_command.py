"""`python -m optaxclip.check` ends with 0 where all is right, with 1 for a finding, and
with 2 where it finds no step.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from optaxclip.check import main

STEPS = "tests.check.wrong_steps"


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process, which has eight devices already."""

    def run(*arguments):
        asked = {}
        monkeypatch.setattr(jax.config, "update", asked.__setitem__)
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        assert asked == {"jax_platforms": "cpu", "jax_num_cpu_devices": 8}
        return Ended(ended.value.code, *capsys.readouterr())

    return run


def run_alone(*arguments):
    # As a user has it: one CPU device, until the command asks for eight.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "optaxclip.check", *arguments],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_a_finding_ends_with_1_and_says_what_to_do(run):
    found = run(f"{STEPS}:own_factor", "--settings", "replicated", "experts")
    assert (found.returncode, found.stderr) == (1, "")
    lines = found.stdout.splitlines()
    assert lines[-1] == "right: replicated"
    (row,) = [
        line for line in lines if line.split()[:3] == ["experts", "above", "update"]
    ]
    assert row.endswith("own_factor")
    assert any(line.startswith("own_factor: ") for line in lines)


def test_a_right_step_ends_with_0(run):
    found = run("tests.check.right_steps:ours_jit", "--settings", "replicated")
    assert found == (0, "right: replicated\n", "")


def crashing(setting):
    raise KeyError("of the trainer")


def test_an_error_of_the_step_ends_with_2_and_its_traceback(run):
    found = run(f"{__name__}:crashing", "--settings", "replicated")
    assert found.returncode == 2
    assert "KeyError: 'of the trainer'" in found.stderr


@pytest.mark.slow
def test_alone_it_has_eight_devices():
    found = run_alone(f"{STEPS}:own_factor", "--settings", "experts")
    assert (found.returncode, found.stderr) == (1, "")
    found = run_alone("tests.check.right_steps:ours_jit", "--settings", "replicated")
    assert (found.returncode, found.stderr) == (0, "")


WRONG_NAMES = {
    "tests": "make_step must take a setting and return a step: <module 'tests'",
    "no trainer": "cannot import 'no trainer'",
    "no_such_module:make_step": "no module named 'no_such_module'",
    f"{STEPS}:gone": f"module '{STEPS}' has no attribute 'gone'",
}


def test_a_name_that_leads_nowhere_ends_with_2(run):
    for name, text in WRONG_NAMES.items():
        found = run(name)
        assert found.returncode == 2
        assert text.lower() in found.stderr.lower()
        # A module that is no step is found by check_step.
        assert name == "tests" or "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def make_step(", "SyntaxError"),
        ("make_step = undefined", "NameError"),
        ("import optaxclip.gone", "ModuleNotFoundError"),
    ],
)
def test_a_broken_module_ends_with_2_and_its_traceback(
    run, tmp_path, monkeypatch, source, name
):
    module = f"trainer_of_{name}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    found = run(f"{module}:make_step")
    assert found.returncode == 2
    # The line of the module, and the error.
    assert f"    {source}" in found.stderr
    assert f"{name}: " in found.stderr


def test_the_usage_shows_the_step_in_front_of_the_settings(run):
    found = run("--settings", "replicated", "tests.check.right_steps:ours_jit")
    assert found.returncode == 2
    usage = "usage: python -m optaxclip.check [-h] module:make_step [--settings NAME"
    assert found.stderr.startswith(usage)
