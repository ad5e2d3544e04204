"""Writes examples/getting_started.ipynb from the page "Getting started".

python docs/_site/notebook.py
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/getting_started.md"
NOTEBOOK = ROOT / "examples/getting_started.ipynb"
# A block of code, and one of what it prints.
BLOCK = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```\n)?", re.DOTALL)


def notebook(page: str) -> dict[str, Any]:
    """The page as a notebook: its text, its code, and what the code prints."""
    # Links are written from docs/.
    page = re.sub(r"\]\((\w+\.md)", r"](../docs/\1", page)
    cells, end = [], 0
    for block in BLOCK.finditer(page):
        code, printed = block.groups()
        cells += [text_cell(page[end : block.start()]), code_cell(code, printed)]
        end = block.end()
    cells.append(text_cell(page[end:]))
    for number, cell in enumerate(cells):
        cell.update(id=f"cell-{number}", metadata={})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text_cell(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "source": lines(text)}


def code_cell(code: str, printed: str | None) -> dict[str, Any]:
    outputs = []
    if printed:
        text = lines(printed)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    cell = {"cell_type": "code", "source": lines(code), "outputs": outputs}
    return cell | {"execution_count": None}


def lines(text: str) -> list[str]:
    """A text as notebooks have it."""
    return text.strip("\n").splitlines(keepends=True)


def written(page: str) -> str:
    """The file of the notebook."""
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(written(PAGE.read_text()))
