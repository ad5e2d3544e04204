"""docs/recipes.md: each recipe fails when its essential line is wrong or missing."""

import ast
from contextlib import chdir

import jax
import pytest

from tests.docs.test_docs import DOCS, assert_as_shown, blocks_of, run

PAGE = "recipes.md"
MARK = "# essential"
IMPORTS, *RECIPES = blocks_of(PAGE)
SECTIONS = [
    line[3:]
    for line in (DOCS / PAGE).read_text().splitlines()
    if line.startswith("## ")
]
# From a section to the fault that stands in the place of its essential statement. The
# statement of any other section is left out.
FAULTS = {
    "Gradient accumulation weighted by tokens": "count = len(tokens)",
    "Skip microbatches with NaN, clip whole batches": "optimizer = optax.MultiSteps("
    "inner, every_k_schedule=2)",
    "Compute something only on a spike": "norms = zeros",
    "Find the examples that made a spike": "examples = nobody",
    "Find whether one microbatch made a spike": "share = norms.std() / norms.mean()",
    "fp8 statistics in the tree": "optimizer = of_weights",
    "Frozen leaves and LoRA inside `skip_spikes`": "optimizer = of_lora",
    "Experts": "clipper = optaxclip.clip_by_tensor_norm(1.0)",
    "Limits in RL fine-tuning": "clip = optax.identity()",
    "Flax's logical partitioning": "return optaxclip.global_norm(grads)",
    "Loss and norm, under MaxText's names": "optimizer = skip",
}


def does_what_it_shows(recipe, folder):
    """Runs a recipe behind the imports of the page, and raises AssertionError if it
    prints anything else.
    """
    namespace = {"__name__": "docs"}
    with chdir(folder), jax.numpy_rank_promotion("allow"):
        run(IMPORTS, PAGE, namespace)
        printed = run(recipe, PAGE, namespace)
    assert_as_shown(recipe.printed, printed, f"docs/{PAGE}, line {recipe.line},")


def with_fault(source, fault):
    """The source with the fault in the place of its essential statement."""
    lines = source.splitlines()
    (marked,) = (number for number, line in enumerate(lines, 1) if MARK in line)
    statements = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= marked <= node.end_lineno
    ]
    essential = max(statements, key=lambda node: node.lineno)
    indent = " " * essential.col_offset
    lines[essential.lineno - 1 : essential.end_lineno] = [indent + fault]
    return "\n".join(lines) + "\n"


def test_every_section_has_one_recipe_that_prints():
    assert len(RECIPES) == len(SECTIONS)
    for recipe in RECIPES:
        assert recipe.printed and recipe.source.count(MARK) == 1


def test_every_fault_belongs_to_a_section():
    assert FAULTS.keys() <= set(SECTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RECIPES)), ids=SECTIONS)
def test_a_recipe_with_a_fault_in_its_essential_line_fails(number, tmp_path):
    recipe = RECIPES[number]
    does_what_it_shows(recipe, tmp_path)
    fault = FAULTS.get(SECTIONS[number], "pass")
    faulty = recipe._replace(source=with_fault(recipe.source, fault))
    # A TypeError is the library's own: the loss has another name.
    with pytest.raises((AssertionError, TypeError)) as raised:
        does_what_it_shows(faulty, tmp_path)
    if raised.type is TypeError:
        assert "skip_step: update has no argument 'loss'" in str(raised.value)
