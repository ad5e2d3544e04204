"""The version is the same wherever it stands."""

import re
from pathlib import Path

import optaxclip

ROOT = Path(__file__).parents[2]


def test_the_changelog_has_a_section_for_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{optaxclip.__version__}]" in changelog


def test_the_citation_has_the_version():
    citation = ROOT / "CITATION.cff"
    if citation.exists():  # It is not beside the tests of an installed wheel.
        assert f"\nversion: {optaxclip.__version__}\n" in citation.read_text()


def test_types_are_marked():
    assert Path(optaxclip.__file__).with_name("py.typed").exists()


def test_minimum_versions_are_given():
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
    assert needed and all(">=" in one for one in needed[1].split(","))
