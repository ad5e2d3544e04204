"""The bounds that docs/numerics.md states are written in the tests that it names.

A bound is `1e-6`, or `8 eps`. It must be a number of one of the tests that stand in the
same row or sentence, or of what that test calls. Where a sentence names no test, those
of its paragraph count.
"""

import ast
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.clippers.test_spectral import ERRORS
from tests.core.test_rescale import FAR
from tests.rules.histories import RULES

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "numerics.md").read_text()
OF_EPS = re.compile(r"(?<![\w^.-])(\d+)\)? eps")
SMALL = re.compile(r"(?<![\w^.-])\d[\d.]*e-\d+")
SIMPLE = ast.Assign | ast.AugAssign | ast.Expr | ast.Assert | ast.Return
ABOUT_EPS = re.compile(r"eps|rounding|2\.0 \*\* \(?-52", re.IGNORECASE)
# Figures that are said to be measured. Their tests hold a larger bound.
MEASURED = {"8e-6", "1.2e-4", "1e-4", "4e-4", "4e-6", "4.3e-6"}
# The smallest normal float32 number.
NORMAL = {"1.2e-38"}


def definitions(path: Path) -> dict[str, ast.stmt | str]:
    """What a file defines, and the names that it has from other tests."""
    found: dict[str, ast.stmt | str] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            names = (x.id for x in ast.walk(node.targets[0]) if isinstance(x, ast.Name))
            found.update(dict.fromkeys(names, node))
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("tests"):
            for name in node.names:
                found[name.asname or name.name] = f"{node.module}.{name.name}"
    return found


FILES = {
    ".".join(path.relative_to(TESTS.parent).with_suffix("").parts): definitions(path)
    for path in TESTS.rglob("*.py")
}


def reached(module: str, name: str, seen: set[tuple[str, str]]) -> Iterator[ast.stmt]:
    """A definition, and all that it uses of the tests."""
    node = FILES.get(module, {}).get(name)
    if node is None or (module, name) in seen:
        return
    seen.add((module, name))
    if isinstance(node, str):
        yield from reached(*node.rsplit(".", 1), seen)
        return
    yield node
    for used in ast.walk(node):
        if isinstance(used, ast.Name):
            yield from reached(module, used.id, seen)
        elif isinstance(used, ast.Attribute) and isinstance(used.value, ast.Name):
            other = FILES[module].get(used.value.id)
            if isinstance(other, str):
                yield from reached(other, used.attr, seen)


@cache
def numbers_of(test: str, of_eps: bool) -> frozenset[float]:
    """The numbers of a test, or those of statements about an eps."""
    found: set[float] = set()
    for module, names in FILES.items():
        if not isinstance(names.get(test), ast.FunctionDef):
            continue
        for node in reached(module, test, set()):
            statements: Any = ast.walk(node) if of_eps else [node]
            for statement in statements:
                if of_eps and not isinstance(statement, SIMPLE):
                    continue
                if of_eps and not ABOUT_EPS.search(ast.unparse(statement)):
                    continue
                for x in ast.walk(statement):
                    if isinstance(x, ast.Constant) and isinstance(x.value, int | float):
                        found.add(float(x.value))
    return frozenset(found)


def claims() -> Iterator[tuple[str, str]]:
    """What a row or a sentence says, and the tests that it names."""
    text = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    bound = ""
    for row in rows:
        _, said, tests, *_ = [*row.strip("| ").split(" | "), "", ""]
        bound = bound if said == "the same" else said
        if "`test_" in tests:
            yield bound, tests
    for paragraph in text.split("\n\n"):
        prose = " ".join(x for x in paragraph.splitlines() if not x.startswith("|"))
        for sentence in re.split(r"(?<=[.:]) (?=[A-Za-z`*])", prose):
            if "`test_" in prose:
                yield sentence, sentence if "`test_" in sentence else prose


def unheld(said: str, tests: list[str]) -> set[str]:
    """The bounds that none of the tests holds."""
    missing = set()
    for bounds, of_eps in ((OF_EPS, True), (SMALL, False)):
        held = set().union(*(numbers_of(test, of_eps) for test in tests))
        missing |= {x for x in bounds.findall(said) if float(x) not in held}
    return missing - MEASURED - NORMAL


def test_each_bound_of_the_page_is_one_of_the_tests_beside_it():
    stated = 0
    for said, text in claims():
        tests = re.findall(r"`(test_\w+)`", text)
        assert not unheld(said, tests), (said, tests)
        stated += len(OF_EPS.findall(said) + SMALL.findall(said))
    assert stated > 25


def test_another_bound_is_seen():
    said = dict(claims())
    for bound, other in {
        "relative error below 1e-6": "relative error below 1e-7",
        "11 eps of float32": "10 eps of float32",
        "36 eps of float64": "35 eps of float64",
    }.items():
        tests = re.findall(r"`(test_\w+)`", said[bound])
        assert unheld(other, tests) and not unheld(bound, tests)


# The rules of tests/rules/histories.py that stand in each row of the page.
IN_ROWS = {
    "`windowed_quantile`, `windowed_mean` of raw norms": (
        "quantile of the past",
        "percentile of all",
        "Levanter",
        "OLMo-core",
    ),
    "`ema_ratio`": ("ratio", "raw ratio", "lifting band", "average", "growth"),
    "`z_score`, `quantile_tracker`": ("z-score", "z-score to the mean", "tracker"),
    "`log_z_score`": ("log-norm",),
}


def test_the_rules_have_the_bounds_of_the_page():
    for words, names in IN_ROWS.items():
        (bound,) = re.findall(rf"^\| {re.escape(words)}.*? \| (\d+) \|", PAGE, re.M)
        assert {RULES[name][2] for name in names} == {int(bound)}, words
    (with_target,) = re.findall(r"`ema_ratio` with a target (\d+)", PAGE)
    assert RULES["two rates"][2] == int(with_target)


def test_the_furthest_quotient_of_norms_is_that_of_the_page():
    stated = re.findall(r"quotient (?:of at least|below) 2\^(-\d+)", PAGE)
    furthest = min(limit / norm for norm, limit in FAR)
    assert {int(power) for power in stated} == {round(math.log2(furthest))}


def test_singular_values_have_the_bounds_of_the_page():
    for method, errors in ERRORS.items():
        (row,) = re.findall(rf'^\| `method="{method}"`.*?\|(.*)\|$', PAGE, re.M)
        bounds = [float(bound) for bound in row.split("|")]
        # The page says the same, or rounds up to a power of 10.
        for error, bound in zip(errors, bounds, strict=True):
            assert error <= bound <= 2 * error, method
