"""What mkdocs does not know: which files outside docs/ are pages, what links to them
become, and formulas.

    README.md            is index.md
    CHANGELOG.md         is changelog.md
    examples/*.py        are sections of gallery.md, from their docstrings
    optaxclip.__all__    is the reference, api/*.md

mkdocs calls the functions whose names begin with `on_`.
"""

import ast
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(ROOT.glob("examples/[a-z]*.py"))
PROGRAM = re.compile(r"\]\((?:\.\./)?examples/(\w+)\.py\)")
OUTSIDE = re.compile(r"\]\((?:\.\./)?(CONTRIBUTING\.md|benchmarks/[\w.]+)\)")
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL
)
PICTURE = re.compile(
    r'<picture>.*?alt="(.*?)" src="(?:docs/)?(\w+)\.png">.*?</picture>', re.DOTALL
)
REFERENCE = {
    "clippers": "Clippers",
    "wrappers": "Wrappers and metrics",
    "rules": "Rules and shrinks",
    "kernel": "Norms and the kernel",
    "per_example": "Each example separately",
    "replay": "Replay",
    "dropin": "Other frameworks",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made of files outside docs/."""
    pages = {
        "index.md": _from_the_root((ROOT / "README.md").read_text()),
        "changelog.md": _from_the_root((ROOT / "CHANGELOG.md").read_text()),
        "gallery.md": gallery(),
    }
    pages |= {f"api/{name}.md": reference(name) for name in REFERENCE}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links to files outside docs/ into links to their pages, and shows each
    picture on the background that it is for.
    """
    markdown = PICTURE.sub(lambda found: _picture(found[2], found[1]), markdown)
    markdown = PROGRAM.sub(r"](gallery.md#\1)", markdown)
    markdown = markdown.replace("](../CHANGELOG.md)", "](changelog.md)")
    return re.sub(r"\[([^\]]*)" + OUTSIDE.pattern, r"\1", markdown)


def on_page_content(html_text: str, **_: Any) -> str:
    """Turns formulas into MathML, which browsers show without a script."""
    return FORMULA.sub(_formula, html_text)


def _formula(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    # Bars as delimiters: alone, the converter gives the index to the closing bar.
    latex = html.unescape(found[2]).replace(r"\lVert", r"\left\|")
    formula = convert(latex.replace(r"\rVert", r"\right\|"), display=display)
    return f'<div class="formula">{formula}</div>' if found[1] == "div" else formula


def _from_the_root(text: str) -> str:
    """A text of the root of the repository, with its links as pages have them."""
    moved = {"docs/": "", "CHANGELOG.md": "changelog.md", "examples)": "gallery.md)"}
    for before, after in moved.items():
        text = text.replace(f"]({before}", f"]({after}")
    return text


def gallery() -> str:
    """A section for each program: its docstring, and its picture where it has one."""
    lines = ["# Gallery", "", "Complete programs. Each runs on a CPU, on data that is"]
    lines += ["at hand: `pip install -e '.[examples]'` in a clone brings the rest.", ""]
    for path in EXAMPLES:
        lines += [f"## {path.stem}", ""]
        if (ROOT / "docs" / f"{path.stem}.png").exists():
            lines += [_picture(path.stem, path.stem), ""]
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines += [f"`python examples/{path.name}`", "", *_as_markdown(docstring), ""]
    return "\n".join(lines)


def _picture(name: str, text: str) -> str:
    """A picture for each background, in a paragraph that scrolls on a phone."""
    light, dark = f"{name}.png#only-light", f"{name}_dark.png#only-dark"
    return f"![{text}]({light})\n![{text}]({dark})\n{{ .picture }}"


def _as_markdown(docstring: str) -> Iterator[str]:
    """A docstring, the first words of each paragraph in bold."""
    openings = "What it shows|What it does not show|How long it takes|What it prints"
    docstring = docstring.replace("<", "&lt;").replace("*", r"\*")
    yield re.sub(rf"^({openings})\.", r"**\1.**", docstring, flags=re.MULTILINE)


def reference(name: str) -> str:
    """A page of the reference: one directive for each public name."""
    lines = [f"# {REFERENCE[name]}", ""]
    for path in public_names(name):
        lines += [f"::: {path}", ""]
    return "\n".join(lines)


def public_names(page: str) -> list[str]:
    """The dotted names that a page of the reference describes."""
    if page in ("per_example", "replay", "rules"):
        own = [f"optaxclip.{page}.{name}" for name in exported(page)]
        return own + (_shrinks() if page == "rules" else [])
    if page == "dropin":
        modules = sorted((ROOT / "optaxclip/dropin").glob("[a-z]*.py"))
        return [f"optaxclip.dropin.{path.stem}" for path in modules]
    return [f"optaxclip.{name}" for name in exported("") if _page_of(name) == page]


def _shrinks() -> list[str]:
    return [f"optaxclip.shrinks.{name}" for name in exported("shrinks")]


def _page_of(name: str) -> str | None:
    """The page of a name of the package itself, None for its modules."""
    if name in ("dropin", "per_example", "replay", "rules", "shrinks", "clipped_grad"):
        return None
    if name.endswith("_norm") and not name.startswith(("clip_by", "record")):
        return "kernel"
    if name in ("clip_by", "rescale", "ClipState", "check_replicated", "Heads"):
        return "kernel"
    wrappers = ("skip_", "carry_", "reset_", "metrics", "record_", "SkipState")
    return "wrappers" if name.startswith(wrappers) else "clippers"


def exported(module: str) -> list[str]:
    """`__all__` of a module of the package, in its order."""
    path = ROOT / "optaxclip" / module
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"{path} has no __all__")
