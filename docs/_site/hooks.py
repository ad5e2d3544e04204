"""What mkdocs does not know about this repository.

    README.md       is index.md
    CHANGELOG.md    is changelog.md
    examples/*.py   are sections of gallery.md: docstring, picture and code
    docs/api/*.md   are also the lines of names.md: each public name and its sentence
    other files     are links into the repository, once it has an address
    formulas        are MathML, which browsers show without a script

mkdocs calls the functions whose names begin with `on_`.
"""

import ast
import functools
import html
import posixpath
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
# A picture, which has a `!` in front, is no link.
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(
    r'<picture>.*?alt="(.*?)" src="(?:docs/)?(\w+)\.png">.*?</picture>', re.DOTALL
)
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL
)
FOLDED = re.compile(r'<details (class="(?:example|mkdocstrings-source)")')
# What a page of names says where its docstrings are not shown.
NOT_ON_THE_SITE = re.compile(r"^> On GitHub .*\n(> .*\n)*\n", re.MULTILINE)
PARTS = re.compile(
    r"^(What it shows|What it does not show|How long it takes|What it prints)\.",
    re.MULTILINE,
)


def repository() -> str:
    """The address of the repository, or an empty string."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]


def on_config(config: Any) -> None:
    """Shows the repository, and "edit this page", where there is an address."""
    if address := repository():
        config.repo_url = address
        config.edit_uri = "edit/main/docs/"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made of files outside docs/."""
    for source, page in PAGES.items():
        file = File.generated(config, page, content=(ROOT / source).read_text())
        file.edit_uri = f"../{source}"
        files.append(file)
    files.append(File.generated(config, "gallery.md", content=gallery()))
    reference = re.findall(r"api/\w+\.md", str(config.nav))
    files.append(File.generated(config, "names.md", content=names(reference)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, **_: Any) -> str:
    """Leads links to where the site has what they name, and sets the page's boost."""
    markdown = NOT_ON_THE_SITE.sub("", markdown)
    here = page.file.src_uri
    boost = config.extra["boosts"].get(here, 1)
    page.meta.setdefault("search", {"boost": boost})
    folder = ROOT if here in PAGES.values() else ROOT / "docs" / posixpath.dirname(here)

    def lead(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = (folder / target).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return link[0]  # mkdocs warns of it
        place = _place(path.relative_to(ROOT).as_posix(), anchor)
        if place is None:
            return text
        if not place.startswith("http"):
            place = posixpath.relpath(place, posixpath.dirname(here) or ".")
        return f"[{text}]({place})"

    return LINK.sub(lead, PICTURE.sub(r"\n" + _picture(r"\2", r"\1"), markdown))


def _place(path: str, anchor: str) -> str | None:
    """Where the site has a file of the repository, None for nowhere."""
    if path in PAGES:
        return PAGES[path] + anchor
    if path.startswith("docs/"):
        return path.removeprefix("docs/") + anchor
    if path == "examples":
        return "gallery.md"
    if path.startswith("examples/") and path.endswith(".py"):
        return f"gallery.md#{Path(path).stem}"
    return f"{repository()}/blob/main/{path}{anchor}" if repository() else None


def on_page_content(html_text: str, **_: Any) -> str:
    """Turns formulas into MathML, and keeps code that is folded out of the search.

    The search has the docstring of that code already.
    """
    html_text = FOLDED.sub(r"<details data-search-exclude \1", html_text)
    return FORMULA.sub(_formula, html_text)


def _formula(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    # Bars as delimiters: alone, the converter gives the index to the closing bar.
    latex = html.unescape(found[2]).replace(r"\lVert", r"\left\|")
    formula = convert(latex.replace(r"\rVert", r"\right\|"), display=display)
    return f'<div class="formula">{formula}</div>' if found[1] == "div" else formula


def gallery() -> str:
    """A section for each program: its picture, its code folded, its docstring."""
    lines = ["# Gallery", "", "Complete programs. Each runs on a CPU, on data that is"]
    lines += ["at hand: `pip install -e '.[examples]'` in a clone brings the rest.", ""]
    for path in sorted(ROOT.glob("examples/[a-z]*.py")):
        code = path.read_text()
        docstring = ast.get_docstring(ast.parse(code)) or ""
        docstring = docstring.replace("<", "&lt;").replace("*", r"\*")
        lines += [f"## {path.stem}", ""]
        if (ROOT / "docs" / f"{path.stem}.png").exists():
            lines += [_picture(path.stem, path.stem), ""]
        lines += [f'??? example "The code: `python examples/{path.name}`"', ""]
        lines += [textwrap.indent(f"````python\n{code}````", "    "), ""]
        lines += [PARTS.sub(r"**\1.**", docstring), ""]
    return "\n".join(lines)


def names(reference: list[str]) -> str:
    """A line for each name of these pages: a link, and what its docstring begins with.

    The search has the names already, with their whole docstrings.
    """
    lines = ["---", "search: {exclude: true}", "---", "# All names", ""]
    lines += ["Every public name, in the groups of the reference.", ""]
    for page in reference:
        text = (ROOT / "docs" / page).read_text()
        lines += [text.partition("\n")[0].replace("#", "##"), ""]
        for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
            lines += _lines_of_names(name)
        lines.append("")
    return "\n".join(lines)


def _lines_of_names(name: str) -> list[str]:
    """The line of one name. A module has a line for each of its functions as well."""
    package, _, rest = name.partition(".")
    try:
        described = _package(package)[rest]
    except KeyError:
        return []  # mkdocstrings warns of it
    docstring = described.docstring.value if described.docstring else ""
    sentence = re.split(r"(?<=[.:])\s", " ".join(docstring.split()), maxsplit=1)[0]
    lines = [f"- [`{rest}`][{name}]: {sentence.rstrip(':.')}."]
    if described.is_module:
        for export in described.exports or ():
            lines += _lines_of_names(f"{name}.{export}")
    return lines


@functools.cache
def _package(name: str) -> Any:
    return griffe.load(name, search_paths=[ROOT])


def _picture(name: str, text: str) -> str:
    """A picture for each background, in a paragraph that scrolls on a phone."""
    light, dark = f"{name}.png#only-light", f"{name}_dark.png#only-dark"
    return f"![{text}]({light})\n![{text}]({dark})\n{{ .picture }}"
