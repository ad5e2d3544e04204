"""Tests the generator of mutants, and the table of their tests."""

import fnmatch
import tomllib
from pathlib import Path

import pytest

import optaxclip
from mutations.mutants import mutants

ROOT = Path(__file__).parents[1]


def _texts(source):
    return {mutant.name.split(": ", 1)[1] for mutant in mutants(source)}


@pytest.mark.parametrize(
    ("expression", "texts"),
    [
        ("a < b", {"a <= b"}),
        ("a + b", {"a - b"}),
        ("a and b", {"a or b"}),
        ("f(not a)", {"f(a)"}),
        ("f(-a)", {"f(a)"}),
        ("[True, 0]", {"[False, 0]", "[True, 1]"}),
        ("[1, 0.5]", {"[0, 0.5]", "[1, 1.5]"}),
        ("f(a, b, c=d)", {"f(a, c=d)", "f(a, b)"}),
        ("f(a)", set()),
    ],
)
def test_each_part_of_an_expression_is_changed(expression, texts):
    assert _texts(f"value = {expression}") == texts


def test_statements_are_dropped():
    source = """
def f(x):
    'Text.'
    x += y
    x, z = g(x)
    if x:
        h()
    return x, z
"""
    dropped = {"x += y", "x, z = g(x)", "if x:", "h()"}
    assert _texts(source) == {"x -= y", *(f"without {text}" for text in dropped)}


def test_first_assignments_stay():
    assert _texts("def f(x):\n    y = g(x)\n    return y") == set()


def test_types_and_error_texts_stay():
    source = "def f(x: A | 1) -> 2:\n    raise E(f'{x + 1}', 3)\n    y: B[4] = x"
    assert _texts(source) == set()


def test_a_mutant_differs_in_its_place_only():
    source = "def f(x):\n    return x + 2\n\nclass C:\n\n    def g():\n        return 1"
    first, second, third = mutants(source)
    assert first.source == source.replace("+", "-")
    assert second.source == source.replace("2", "3")
    assert third.source == source.replace("1", "0")
    assert (first.name, third.name) == ("f: x - 2", "C.g: return 0")
    assert second.diff == "-    return x + 2\n+    return x + 3"


def test_the_table_names_files_that_are_there():
    table = tomllib.loads((ROOT / "mutations" / "tests.toml").read_text())
    # The library may be installed elsewhere.
    library = Path(optaxclip.__file__).parents[1]
    assert [module for module in table if not (library / module).exists()] == []
    for pattern in " ".join(table.values()).split():
        assert list((ROOT / "tests").glob(f"{pattern}.py")), pattern


@pytest.mark.slow
def test_what_is_explained_can_still_happen():
    table = tomllib.loads((ROOT / "mutations" / "explained.toml").read_text())
    sources = [
        path.read_text() for path in Path(optaxclip.__file__).parent.rglob("*.py")
    ]
    names = [mutant.name for source in sources for mutant in mutants(source)]
    for pattern in table:
        assert fnmatch.filter(names, pattern), pattern
