"""docs/recipes.md: each recipe fails when its essential line is taken out."""

import ast
from contextlib import chdir

import jax
import pytest

from tests.docs.test_docs import DOCS, assert_as_shown, blocks_of, names, run

PAGE = "recipes.md"
MARK = "# essential"
RECIPES = list(blocks_of(PAGE))
SECTIONS = [
    line[3:]
    for line in (DOCS / PAGE).read_text().splitlines()
    if line.startswith("## ")
]


def does_what_it_shows(recipe, folder):
    """Runs a recipe alone, and raises AssertionError if it prints anything else."""
    with chdir(folder), jax.numpy_rank_promotion("allow"):
        printed = run(recipe, PAGE, names())
    assert_as_shown(recipe.printed, printed, f"docs/{PAGE}, line {recipe.line},")


def without_the_line(source):
    """The source with `pass` in the place of its essential statement."""
    lines = source.splitlines()
    (marked,) = (number for number, line in enumerate(lines, 1) if MARK in line)
    statements = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= marked <= node.end_lineno
    ]
    own = max(statements, key=lambda node: node.lineno)
    lines[own.lineno - 1 : own.end_lineno] = [" " * own.col_offset + "pass"]
    return "\n".join(lines) + "\n"


def test_every_section_has_one_recipe_that_prints():
    assert len(RECIPES) == len(SECTIONS)
    for recipe in RECIPES:
        assert recipe.printed and recipe.source.count(MARK) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RECIPES)), ids=SECTIONS)
def test_a_recipe_without_its_essential_line_fails(number, tmp_path):
    recipe = RECIPES[number]
    does_what_it_shows(recipe, tmp_path)
    shorter = recipe._replace(source=without_the_line(recipe.source))
    # A TypeError is the library's own: the loss has another name.
    with pytest.raises((AssertionError, TypeError)) as raised:
        does_what_it_shows(shorter, tmp_path)
    if raised.type is TypeError:
        assert "skip_step: update has no argument 'loss'" in str(raised.value)
