"""The notebook is what the page says, and all of its cells run."""

import importlib.util
import json
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.docs.test_docs import assert_as_shown

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/getting_started.ipynb"


def test_the_notebook_is_made_of_the_page():
    path = ROOT / "docs/_site/notebook.py"
    spec = importlib.util.spec_from_file_location("notebook", path)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = script.written(script.PAGE.read_text())
    assert NOTEBOOK.read_text() == made, "run python docs/_site/notebook.py"


@pytest.mark.slow
@pytest.mark.usefixtures("as_programs_run")
def test_every_cell_runs_and_prints_what_it_shows(tmp_path):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    namespace = {"__name__": "notebook"}
    with chdir(tmp_path):
        for cell in code:
            out = StringIO()
            with redirect_stdout(out):
                exec("".join(cell["source"]), namespace)
            shown = "".join(line for x in cell["outputs"] for line in x["text"])
            assert_as_shown(shown, out.getvalue(), cell["id"])
