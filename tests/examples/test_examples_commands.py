"""Each program is short, explains its options, and names the extra of a missing
package.
"""

import ast
import runpy
import sys
from pathlib import Path

import jax
import pytest

from benchmarks.pictures import PICTURES, SCORES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
NEIGHBOURS = {path.stem for path in FOLDER.glob("*.py")}
# What every environment of the library has.
ALWAYS = {"jax", "numpy", "optax", "optaxclip"}
# Where a package has another name on PyPI.
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "sklearn": "scikit-learn"}


def text_of(name):
    return (FOLDER / f"{name}.py").read_text()


def imported_modules(name):
    """The first parts of the names of all modules that a program imports."""
    modules = set()
    for node in ast.walk(ast.parse(text_of(name))):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module.split(".")[0])
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
    return modules


def imported(name):
    """The packages that a program imports, other than those that are always there."""
    always = ALWAYS | sys.stdlib_module_names | NEIGHBOURS
    return imported_modules(name) - always


def run(name, *arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    # As Python does for a program, which imports its neighbours by their bare names.
    monkeypatch.syspath_prepend(FOLDER)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_list_of_programs_says_what_each_says_of_itself(name):
    docstring = ast.get_docstring(ast.parse(text_of(name)))
    first = " ".join(docstring.split("\n\n")[0].split())
    row = f"| [{name}.py]({name}.py) | {first} |"
    assert row in (FOLDER / "README.md").read_text().splitlines()


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_shows_docstring_and_default_of_every_option(name, monkeypatch, capsys):
    for package in imported(name):
        pytest.importorskip(package)
    monkeypatch.setenv("COLUMNS", "200")
    # Devices can only be set before JAX starts, which it did for the tests.
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    with pytest.raises(SystemExit):
        run(name, "--help", monkeypatch=monkeypatch)
    shown = capsys.readouterr().out
    assert ast.get_docstring(ast.parse(text_of(name))) in shown
    options = shown.partition("options:")[2]
    assert options.count("(default: ") == options.count("  --")


@pytest.mark.parametrize(
    ("option", "text", "error"),
    [
        ("--steps", "0", "must be at least 1, got 0"),
        ("--steps", "many", "invalid int value: 'many'"),
        ("--lr", "-0.1", "must be at least 0, got -0.1"),
        ("--lr", "nan", "must be at least 0, got nan"),
    ],
)
def test_a_number_out_of_range_is_refused(option, text, error, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run("broken_batches", option, text, monkeypatch=monkeypatch)
    assert capsys.readouterr().err.endswith(f"argument {option}: {error}\n")


def hide(package, monkeypatch):
    hidden = [module for module in sys.modules if module.split(".")[0] == package]
    for module in {package, *hidden}:
        monkeypatch.setitem(sys.modules, module, None)


def command_of(name):
    """The line of a docstring that installs what its program needs."""
    docstring = ast.get_docstring(ast.parse(text_of(name)))
    lines = [line.strip() for line in docstring.splitlines()]
    (command,) = [line for line in lines if line.startswith("pip install ")]
    return command


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_docstring_says_what_a_program_needs(name):
    """Packages of a program that stands alone, and else the code that it shares."""
    docstring = ast.get_docstring(ast.parse(text_of(name)))
    neighbours = imported_modules(name) & NEIGHBOURS
    for neighbour in neighbours:
        assert f"`{neighbour}.py`" in docstring
    packages = imported(name)
    if not neighbours and packages:
        distributions = {DISTRIBUTIONS.get(package, package) for package in packages}
        assert set(command_of(name).split()[2:]) == distributions


@pytest.mark.parametrize(
    "name",
    [x for x in PROGRAMS if imported(x) and not imported_modules(x) & NEIGHBOURS],
)
def test_a_program_that_stands_alone_says_what_to_install(name, monkeypatch):
    for package in imported(name):
        hide(package, monkeypatch)
    with pytest.raises(ModuleNotFoundError) as raised:
        run(name, monkeypatch=monkeypatch)
    assert command_of(name) in "".join(raised.value.__notes__)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    hide("sklearn", monkeypatch)
    with pytest.raises(ModuleNotFoundError) as raised:
        run("digits", monkeypatch=monkeypatch)
    assert 'pip install -e ".[examples]"' in "".join(raised.value.__notes__)


def test_one_command_draws_every_picture_of_the_docs():
    pictures = {path.stem for path in (ROOT / "docs").glob("*.png")}
    drawn = {*PICTURES, SCORES.removesuffix(".png")}
    assert pictures == {*drawn, *(f"{name}_dark" for name in drawn)}
    assert set(PICTURES) <= set(PROGRAMS)
