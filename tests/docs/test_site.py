"""The pages of the site: every method has a section, every public name a reference."""

import re
from pathlib import Path

import pytest

import optaxclip
from tests.methods import METHODS

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "mkdocs.yml").read_text()
PAGE = (ROOT / "docs" / "each_method.md").read_text()
SECTIONS = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
NAMES = [section.split("\n")[0] for section in SECTIONS]
# Other names of methods that have a section, and functions of their own page.
OTHER_NAMES = {"clip", "clip_by_block_rms", "per_example_global_norm_clip"}


def test_every_method_has_a_section():
    methods = {method.function.__name__ for method in METHODS.values()}
    assert methods - OTHER_NAMES <= set(NAMES)
    assert [name for name in NAMES if not hasattr(optaxclip, name)] == []


@pytest.mark.parametrize("section", SECTIONS, ids=NAMES)
def test_a_section_has_equation_defaults_reasons_and_two_lines(section):
    assert section.count("$$") == 2
    for word in ("Defaults", "When", "When not"):
        assert f"**{word}:**" in " ".join(section.split())
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(code) == 1 and code[0].count("\n") == 2


def test_every_page_is_in_the_navigation():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(r": (\w+\.md)$", CONFIG, re.MULTILINE))


def test_every_public_name_is_in_the_reference():
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    from website import hooks

    described = {name for page in hooks.REFERENCE for name in hooks.public_names(page)}
    modules = {"dropin", "per_example", "replay", "rules", "shrinks"}
    wanted = {f"optaxclip.{name}" for name in set(optaxclip.__all__) - modules}
    # It is described on the page of its module.
    described |= {"optaxclip.clipped_grad"}
    assert wanted <= described
    assert "optaxclip.per_example.clipped_grad" in described


def test_no_page_asks_another_server_for_anything():
    assert "font: false" in CONFIG
    assert "http" not in (ROOT / "docs/assets/site.css").read_text()
    assert "extra_javascript" not in CONFIG


def test_the_front_page_leads_to_what_users_ask():
    assert "](docs/faq.md)" in (ROOT / "README.md").read_text()
    answers = (ROOT / "docs" / "faq.md").read_text()
    for question in (
        "How do I log the norm?",
        "Which limit?",
        "My loss spikes. What helps?",
        "Is it right under FSDP?",
        "Does it cost anything on my GPU?",
    ):
        assert f"\n## {question}\n" in answers
