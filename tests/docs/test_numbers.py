"""Numbers in README.md and docs/ are those of the JSON in benchmarks/results/."""

import re
from pathlib import Path

import pytest

from benchmarks import pages
from tests.clients import page as clients
from tests.suites import page as suites

NAMES = [str(page.relative_to(pages.ROOT)) for page in pages.PAGES]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_the_numbers_of_the_results(name):
    text = (pages.ROOT / name).read_text()
    assert pages.render(text) == text, "run: python -m benchmarks.pages"


def test_a_changed_table_is_seen():
    right = pages.render("<!-- table: each_package --><!-- end -->")
    assert pages.render(right) == right
    assert pages.render(right.replace("perceptron", "network")) == right


@pytest.mark.parametrize("name", NAMES)
def test_no_number_begins_a_line(name):
    """On GitHub and on the site a comment that begins a line ends the paragraph."""
    text = (pages.ROOT / name).read_text()
    assert re.findall(r"^ *<!-- number:.*", text, re.MULTILINE) == []


@pytest.mark.parametrize(("name", "of"), [("clients", clients), ("suites", suites)])
def test_a_page_that_a_command_writes_is_made_of_its_json(name, of):
    page = (pages.ROOT / "docs" / f"{name}.md").read_text()
    assert of.page(pages.results(name)) == page


def test_every_command_for_numbers_is_beside_them():
    for page in pages.PAGES:
        text = Path(page).read_text()
        if "(docs/costs.md#measure-it-yourself)" in text:
            text += (pages.ROOT / "docs/costs.md").read_text()
        tables = re.findall(r"<!-- table: (\w+) -->", text)
        for name in tables:
            if name == "whole_step_gpu":
                file = "gpu"
            elif name.startswith("each_"):
                file = "per_example"
            elif name.startswith("methods"):
                file = "methods"
            else:
                file = "costs"
            command = f"benchmarks/results/{file}.json"
            assert command in text or not pages.results(file), (page, name)
