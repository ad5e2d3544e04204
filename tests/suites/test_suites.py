"""The command that runs the tests of other packages: `python -m tests.suites`."""

from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.suites.__main__ import main
from tests.suites.compare import compare, findings, problems_of
from tests.suites.explained import EXPLAINED
from tests.suites.patches import SUITES
from tests.suites.worker import run

PAGE = (Path(__file__).parents[2] / "docs" / "suites.md").read_text()
ONE_LINE = " ".join(PAGE.split())
FILE = "a_test.py"


def report(outcomes, calls=1, **errors):
    return {"outcomes": outcomes, "errors": errors, "calls": calls}


def problems(theirs, ours, explained):
    row = compare("a", "1.0", FILE, theirs, ours, explained)
    return problems_of(row, ours, explained)


@pytest.mark.parametrize("package", SUITES)
def test_the_page_names_all_tests_of_a_package(package):
    for path in SUITES[package].tests:
        assert f" | {path} | " in PAGE
    assert SUITES[package].beside in ONE_LINE


@pytest.mark.parametrize("package", EXPLAINED)
def test_the_page_has_every_explanation(package):
    for test, why in EXPLAINED[package].items():
        assert f"- {package}: {why}" in ONE_LINE
        assert f"`{test.rpartition('::')[2]}`" in ONE_LINE


def test_an_unexplained_difference_is_a_problem():
    test = f"{FILE}::test_x"
    theirs, ours = report({test: "passed"}), report({test: "failed"}, **{test: "no"})
    assert problems(theirs, ours, {}) == [f"a: {test} differs with ours: no"]
    assert problems(theirs, ours, {test: "rounding"}) == []
    assert problems(ours, theirs, {}) == [f"a: {test} differs with ours: passed"]
    assert problems(ours, ours, {}) == []


def test_a_test_that_does_not_run_is_a_problem():
    test = f"{FILE}::test_x"
    (problem,) = problems(report({test: "passed"}), report({}), {})
    assert problem == f"a: {test} differs with ours: not run"


def test_a_stale_explanation_is_a_problem():
    test = f"{FILE}::test_x"
    both = report({test: "passed"})
    (problem,) = problems(both, both, {test: "rounding"})
    assert problem == f"a: {test} is explained, but does not differ."
    assert problems(both, both, {"other_test.py::test_x": "rounding"}) == []


def test_tests_that_never_call_ours_are_a_problem():
    (problem,) = problems(report({}), report({}, calls=0), {})
    assert problem == f"a: {FILE} calls none of our functions."


def test_failures_of_their_own_are_listed_separately():
    both = report({"x": "failed", "y": "passed"})
    row = compare("a", "1.0", FILE, both, both, {})
    assert (row.own, row.differ, row.ours) == (("x",), {}, "1 / 1 / 0")


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
