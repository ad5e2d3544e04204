"""The version is the same wherever it stands, and links on PyPI lead somewhere."""

import re
import runpy
from pathlib import Path

import pytest

import optaxclip

ROOT = Path(__file__).parents[2]
ADDRESS = "https://example.org/me/optaxclip"


def test_the_changelog_has_one_section_for_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE)
    assert sections[0] == optaxclip.__version__
    assert len(sections) == len(set(sections))


def test_the_citation_has_the_version():
    citation = ROOT / "CITATION.cff"
    if citation.exists():  # It is not beside the tests of an installed wheel.
        assert f"\nversion: {optaxclip.__version__}\n" in citation.read_text()


def metadata(address):
    """What the package says of itself, with this address of the repository."""
    pytest.importorskip("hatchling")
    hook = runpy.run_path(str(ROOT / "docs/_site/pypi.py"))["RepositoryMetadata"]
    found = {}
    hook(str(ROOT), {"repository": address}).update(found)
    return found["readme"]["text"], found["urls"]


def test_without_an_address_the_readme_is_as_it_is():
    assert metadata("") == ((ROOT / "README.md").read_text(), {})


def test_with_an_address_every_link_on_pypi_is_whole():
    text, urls = metadata(ADDRESS)
    targets = re.findall(r"\]\(([^)]*)\)", text)
    targets += re.findall(r'(?:src|srcset)="(.*?)"', text)
    assert f"{ADDRESS}/blob/main/docs/faq.md" in targets
    assert f"{ADDRESS}/raw/main/docs/broken_batches.png" in targets
    assert [each for each in targets if not each.startswith(("https://", "#"))] == []
    assert urls["Source"] == ADDRESS and f"{ADDRESS}/actions/" in text


def test_the_conda_recipe_has_the_version_and_the_packages():
    recipe = ROOT / ".github/conda/recipe.yaml"
    if recipe.exists():
        text, project = recipe.read_text(), (ROOT / "pyproject.toml").read_text()
        assert f'version: "{optaxclip.__version__}"' in text
        needed = re.search(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
        assert needed
        for package in re.findall(r'"(.*?)"', needed[1]):
            assert f"    - {package.replace('>=', ' >=')}\n" in text
