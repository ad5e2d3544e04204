"""Runs a package's own tests in this process, and writes what became of them as JSON.

    python -m tests.suites.worker RESULT.json PACKAGE theirs|ours PATH ...

A process of its own, since what is replaced cannot be put back.
"""

import json
import sys
from collections import Counter
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path

import pytest

from .patches import SUITES, replace

RANK = ("passed", "skipped", "failed")


class Recorder:
    """A pytest plugin that keeps the worst outcome of each test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.errors: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._keep(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._keep(report)

    def _keep(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        before = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = max(before, report.outcome, key=RANK.index)
        if report.failed:
            self.errors[report.nodeid] = first_error(report.longreprtext)


def first_error(text: str) -> str:
    """The first line that pytest marks with an E."""
    for line in text.splitlines():
        if line.startswith("E "):
            return line[1:].strip()
    return ""


def run(path: str, root: Path) -> Recorder:
    """A file or folder, without any settings of the folder that we are in."""
    recorder = Recorder()
    arguments = [str(root / path), f"--rootdir={root}", "-c", "/dev/null"]
    arguments += ["--import-mode=importlib", "--noconftest", "-p", "no:cacheprovider"]
    pytest.main(arguments, plugins=[recorder])
    return recorder


def main(result: str, package: str, whose: str, *paths: str) -> None:
    """Writes {path: {"outcomes": ..., "errors": ..., "calls": of our functions}}."""
    calls: Counter[str] = Counter()
    if package == "cases":
        root = Path(__file__).parents[2]
        paths = ("tests/core/test_conformance.py",)
    else:
        suite = SUITES[package]
        root = Path(str(distribution(suite.install).locate_file("")))
        # In both runs, since the order of imports may matter.
        import_module(suite.install)
        if whose == "ours":
            replace(suite, calls)
    report = {}
    for path in paths:
        before = calls.total()
        recorder = run(path, root)
        report[path] = {
            "outcomes": recorder.outcomes,
            "errors": recorder.errors,
            "calls": calls.total() - before,
        }
    Path(result).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
