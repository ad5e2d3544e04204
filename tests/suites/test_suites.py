"""The command that runs the tests of other packages: `python -m tests.suites`."""

from importlib.metadata import distribution

import pytest

from tests.suites.__main__ import main
from tests.suites.compare import EXPLAINED, compare, findings, problems_of, with_others
from tests.suites.patches import SUITES
from tests.suites.worker import run

FILE = "a_test.py"


def report(outcomes, calls=1, **errors):
    return {"outcomes": outcomes, "errors": errors, "calls": calls}


def problems(theirs, ours, explained):
    row = compare("a", "1.0", FILE, theirs, ours, explained)
    return problems_of(row, ours, explained)


TEST = f"{FILE}::test_x"
PASSED = report({TEST: "passed"})
FAILED = report({TEST: "failed"}, **{TEST: "no"})
PROBLEMS = {
    "unexplained": (PASSED, FAILED, {}, f"{TEST} differs with ours: no"),
    "explained": (PASSED, FAILED, {TEST: "rounding"}, None),
    "better": (FAILED, PASSED, {}, f"{TEST} differs with ours: passed"),
    "both fail": (FAILED, FAILED, {}, None),
    "not run": (PASSED, report({}), {}, f"{TEST} differs with ours: not run"),
    "stale": (
        PASSED,
        PASSED,
        {TEST: "x"},
        f"{TEST} is explained, but does not differ.",
    ),
    "of another file": (PASSED, PASSED, {"other_test.py::test_x": "rounding"}, None),
    "idle": (report({}), report({}, 0), {}, f"{FILE} calls none of our functions."),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_differs_without_an_explanation_is_a_problem(name):
    *runs, wanted = PROBLEMS[name]
    assert problems(*runs) == ([] if wanted is None else [f"a: {wanted}"])


def test_failures_of_their_own_are_listed_separately():
    both = report({"x": "failed", "y": "passed"})
    row = compare("a", "1.0", FILE, both, both, {})
    assert (row.own, row.differ, row.ours) == (("x",), {}, "1 / 1 / 0")


def test_numbers_of_suites_that_did_not_run_stay():
    def row(package, version):
        return {"package": package, "version": version}

    old = {"where": {"optax": "a", "rlax": "a", "cases": "a"}}
    old["rows"] = [row("optax", "1"), row("rlax", "1"), row("rlax", "cases")]
    new = {"where": {"rlax": "b"}, "rows": [row("rlax", "2")]}
    found = with_others(new, old)
    assert found["where"] == {"optax": "a", "rlax": "b", "cases": "a"}
    assert found["rows"] == [row("optax", "1"), row("rlax", "2"), row("rlax", "cases")]


@pytest.mark.slow
def test_the_worst_of_a_tests_reports_counts(tmp_path):
    source = "import unittest\nclass A(unittest.TestCase):\n  def test_x(self):\n"
    source += "    for i in range(2):\n      with self.subTest(i):\n"
    source += "        assert i == 1, 'zero'\n"
    (tmp_path / FILE).write_text(source)
    recorder = run(FILE, tmp_path)
    assert set(recorder.outcomes.values()) == {"failed"}
    assert any("zero" in error for error in recorder.errors.values())


def test_a_missing_package_is_shown_with_its_command(monkeypatch, capsys):
    missing = SUITES["rlax"]._replace(install="not-installed-at-all")
    monkeypatch.setitem(SUITES, "rlax", missing)
    assert main(["rlax"]) == 0
    assert "not installed: `pip install " in capsys.readouterr().out


def test_files_that_a_version_does_not_ship_are_shown():
    found = findings("optax", "optax/no_such_test.py")
    assert [row.theirs for row in found.rows] == ["not shipped"]


@pytest.mark.slow
def test_the_clipping_tests_of_optax_end_as_explained():
    path = "optax/transforms/_clipping_test.py"
    if path not in map(str, distribution("optax").files):
        pytest.skip("this optax does not ship its tests")
    found = findings("optax", path)
    assert found.problems == []
    (row,) = found.rows
    assert set(row.differ) == {test for test in EXPLAINED["optax"] if path in test}
