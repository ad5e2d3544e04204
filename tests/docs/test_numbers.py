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


def test_a_changed_number_is_seen():
    page = "ends at <!-- number: broken_batches/none/final_loss -->9.99<!-- end -->."
    assert pages.render(page) != page


def test_a_changed_table_is_seen():
    right = pages.render("<!-- table: each_package --><!-- end -->")
    assert pages.render(right) == right
    assert pages.render(right.replace("perceptron", "network")) == right


def test_a_table_without_results_stays_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    page = "<!-- table: costs -->\nNot measured yet.\n<!-- end -->"
    assert pages.render(page) == page


def test_the_readme_shows_the_costs_and_both_losses():
    readme = (pages.ROOT / "README.md").read_text()
    names = {found[1] for found in pages.BLOCK.findall(readme)}
    # Without protection the loss is another on each machine.
    losses = {
        f"broken_batches/{run}/final_loss" for run in ("global norm", "skip_step")
    }
    assert names == {"costs", "each_package", *losses}


@pytest.mark.parametrize(("name", "of"), [("clients", clients), ("suites", suites)])
def test_a_page_that_a_command_writes_is_made_of_its_json(name, of):
    page = (pages.ROOT / "docs" / f"{name}.md").read_text()
    assert of.page(pages.results(name)) == page


def test_every_command_for_numbers_is_beside_them():
    for page in pages.PAGES:
        text = Path(page).read_text()
        tables = re.findall(r"<!-- table: (\w+) -->", text)
        for name in tables:
            file = "per_example" if name.startswith("each_") else "costs"
            command = f"benchmarks/results/{file}.json"
            assert command in text or not pages.results(file), (page, name)


def test_no_number_begins_a_line():
    """A comment at the beginning of a line ends the paragraph, on GitHub too."""
    for page in pages.PAGES:
        assert not re.search(r"^<!-- number", page.read_text(), re.MULTILINE), page
