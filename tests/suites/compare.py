"""Counts what became of tests, and finds what differs without an explanation."""

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..packages import run_worker
from .patches import SUITES

EXPLANATIONS = json.loads(Path(__file__).with_name("explained.json").read_text())
# From a package to its tests that end differently with ours, and why.
EXPLAINED = {
    package: {test: each["why"] for each in known for test in each["tests"]}
    for package, known in EXPLANATIONS.items()
}
# What each package would choose by what else is installed, or by settings of our tests.
SETTINGS = {"KERAS_BACKEND": "jax", "JAX_NUMPY_RANK_PROMOTION": "allow"}


class Row(NamedTuple):
    package: str
    version: str
    tests: str
    theirs: str  # passed, failed and skipped, or why they did not run
    ours: str = ""
    calls: str = ""  # of our functions
    differ: Mapping[str, str] = MappingProxyType({})  # test -> why, "": nobody knows
    own: tuple[str, ...] = ()  # tests that fail without ours too


def suite_of(row: Mapping[str, Any]) -> str:
    """Which suite, or table of cases, has a row."""
    return "cases" if row["version"] == "cases" else row["package"]


def with_others(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """What was recorded, with the rows of suites that did not run as they were."""
    kept = [row for row in old["rows"] if suite_of(row) not in new["where"]]
    order = [*SUITES, "cases"]
    rows = sorted([*kept, *new["rows"]], key=lambda row: order.index(suite_of(row)))
    return {"where": old["where"] | new["where"], "rows": rows}


class Findings(NamedTuple):
    rows: list[Row]
    problems: list[str]  # each of them makes the exit status 1


def run(package: str, whose: str, *paths: str) -> dict[str, Any]:
    """What `worker.py` writes about the tests of a package."""
    return run_worker("tests.suites.worker", package, whose, *paths, **SETTINGS)


def findings(package: str, *only: str) -> Findings:
    """The tests of a package, or some files of them, with and without ours."""
    suite = SUITES[package]
    try:
        installed = distribution(suite.install)
        if suite.version not in installed.version:
            raise PackageNotFoundError(f"{suite.install} {suite.version}")
    except PackageNotFoundError:
        command = f"not installed: `pip install {suite.install}`"
        return Findings([Row(package, "", path, command) for path in suite.tests], [])
    files = [str(file) for file in installed.files or ()]
    rows = []
    shipped = []
    for path in only or suite.tests:
        if any(file == path or file.startswith(f"{path}/") for file in files):
            shipped.append(path)
        else:
            rows.append(Row(package, installed.version, path, "not shipped"))
    if not shipped:
        return Findings(rows, [])
    with ThreadPoolExecutor(2) as pool:
        runs = pool.map(lambda whose: run(package, whose, *shipped), ("theirs", "ours"))
        theirs, ours = runs
    explained = EXPLAINED.get(package, {})
    problems = []
    for path in shipped:
        both = (theirs[path], ours[path])
        row = compare(package, installed.version, path, *both, explained)
        rows.append(row)
        problems += problems_of(row, ours[path], explained)
    return Findings(rows, problems)


def compare(
    package: str,
    version: str,
    path: str,
    theirs: dict[str, Any],
    ours: dict[str, Any],
    explained: dict[str, str],
) -> Row:
    """The row of one file or folder: what became of its tests without and with ours."""
    before, after = theirs["outcomes"], ours["outcomes"]
    differ = {}
    for test in sorted({*before, *after}):
        if before.get(test) != after.get(test):
            differ[test] = explained.get(test, "")
    fail = {test for test, outcome in before.items() if outcome == "failed"}
    own = tuple(sorted(fail - set(differ)))
    counts = (counted(before), counted(after))
    return Row(package, version, path, *counts, str(ours["calls"]), differ, own)


def problems_of(row: Row, ours: dict[str, Any], explained: dict[str, str]) -> list[str]:
    """Differences without a reason, stale reasons, and rows that tested nothing."""
    problems = []
    for test, why in row.differ.items():
        if not why:
            error = ours["errors"].get(test, ours["outcomes"].get(test, "not run"))
            problems.append(f"{row.package}: {test} differs with ours: {error}")
    for test in explained:
        inside = test.startswith((f"{row.tests}:", f"{row.tests}/"))
        if inside and test not in row.differ:
            problems.append(f"{row.package}: {test} is explained, but does not differ.")
    if row.calls == "0":
        problems.append(f"{row.package}: {row.tests} calls none of our functions.")
    return problems


def counted(outcomes: dict[str, str]) -> str:
    """As in "28 / 0 / 7"."""
    values = list(outcomes.values())
    numbers = [values.count(kind) for kind in ("passed", "failed", "skipped")]
    return " / ".join(map(str, numbers))


def tables_of_cases() -> Findings:
    """The cases of `tests/references` that come from tests of other frameworks."""
    from tests.core import cases

    decided = cases.REFUSED | cases.DIFFERENT
    reasons = {number: found["why"] for number, found in decided.items()}
    problems = []
    broken = set()
    for report in run("cases", "ours").values():
        for test, error in report["errors"].items():
            problems.append(f"cases: {test} fails: {error}")
            broken.update(map(int, re.findall(r"\[(\d+)-", test)))
    groups: dict[tuple[str, str], list[int]] = {}
    for number, case in cases.CASES.items():
        if case["kind"] == "upstream_test":
            framework, _, test = case["source"].partition(": ")
            groups.setdefault((framework, test.partition("::")[0]), []).append(number)
    rows = []
    for (framework, path), numbers in sorted(groups.items()):
        differ = {f"case {n}": reasons[n] for n in numbers if n in reasons}
        same = len(set(numbers) - broken - set(reasons))
        ours = f"{same} / {len(numbers) - same} / 0"
        theirs = f"{len(numbers)} / 0 / 0"
        rows.append(Row(framework, "cases", path, theirs, ours, "", differ))
    return Findings(rows, problems)
