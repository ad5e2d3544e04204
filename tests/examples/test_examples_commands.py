"""Each program explains its options, names the extra of a missing package, and writes
nothing unless it is told to.
"""

import ast
import importlib
import inspect
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.pictures import PICTURES

FOLDER = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
NEIGHBOURS = {path.stem for path in FOLDER.glob("*.py")}
# What every environment of the library has.
ALWAYS = {"jax", "numpy", "optax", "optaxclip"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_list_of_programs_says_what_each_says_of_itself(name):
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    first = " ".join(docstring.split("\n\n")[0].split())
    row = f"| [{name}.py]({name}.py) | {first} |"
    assert row in (FOLDER / "README.md").read_text().splitlines()


def program(name):
    try:
        return importlib.import_module(f"examples.{name}")
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def imported(name):
    """The packages that a program imports, other than those that are always there."""
    nodes = list(ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())))
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    packages = {module.split(".")[0] for module in names if module}
    return sorted(packages - ALWAYS - sys.stdlib_module_names - NEIGHBOURS)


NEEDED = [
    (name, package)
    for name in PROGRAMS
    for package in imported(name)
    if package != "examples"
]
OPTIONAL = {("logging_metrics", "tensorboardX")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_option_has_help_and_its_default(name):
    for option in program(name).command_line()._actions[1:]:
        assert option.help and "default" in option.help, option.option_strings


@pytest.mark.parametrize("name", ["adaptive", "broken_batches", "char_rnn", "qk_clip"])
@pytest.mark.parametrize("steps", ["0", "-3"])
def test_a_run_without_steps_is_refused(name, steps, capsys):
    with pytest.raises(SystemExit):
        program(name).command_line().parse_args([f"--steps={steps}"])
    wanted = f"argument --steps: must be at least 1, got {steps}\n"
    assert capsys.readouterr().err.endswith(wanted)


def test_a_mistyped_protection_lists_what_there_is(capsys):
    with pytest.raises(SystemExit):
        program("adaptive").command_line().parse_args(["--only", "zclipp"])
    assert "invalid choice: 'zclipp' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_shows_the_whole_docstring(name):
    module = program(name)
    assert (module.__doc__ or "-").strip() in module.command_line().format_help()


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_path_is_written_by_default(name):
    module = program(name)
    options = vars(module.command_line().parse_args([]))
    defaults = inspect.signature(module.main).parameters.values()
    values = [*options.values(), *(parameter.default for parameter in defaults)]
    assert not [
        value
        for value in values
        if isinstance(value, str | Path) and Path(value).suffix
    ]


@pytest.mark.parametrize(("name", "package"), NEEDED)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name, package):
    hidden = [module for module in sys.modules if module.split(".")[0] == package]
    for module in {package, *hidden}:
        monkeypatch.setitem(sys.modules, module, None)
    # As Python does for a program, which imports its neighbours by their bare names.
    monkeypatch.syspath_prepend(FOLDER)
    for neighbour in NEIGHBOURS:
        monkeypatch.delitem(sys.modules, neighbour, raising=False)
    if (name, package) in OPTIONAL:
        runpy.run_path(str(FOLDER / f"{name}.py"))
        return
    with pytest.raises(ModuleNotFoundError) as raised:
        runpy.run_path(str(FOLDER / f"{name}.py"))
    assert 'pip install -e ".[examples]"' in "".join(raised.value.__notes__)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_without_the_clone_on_the_path(name):
    assert "examples" not in imported(name)


@pytest.mark.slow
def test_help_names_a_missing_package_too():
    hide = "import runpy, sys; sys.modules['sklearn'] = None; sys.argv[1:] = ['--help']"
    run = f"runpy.run_path({str(FOLDER / 'digits.py')!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}; {run}"], capture_output=True, text=True
    )
    assert done.stderr.endswith('needs: pip install -e ".[examples]"\n')


def test_one_command_draws_every_picture_of_the_docs():
    found = {path.stem for path in (FOLDER.parent / "docs").glob("*.png")}
    wanted = {*PICTURES, *(f"{name}_dark" for name in PICTURES)}
    assert found == wanted
    for name, arguments in PICTURES.items():
        options = program(name).command_line().parse_args(["--save", "x", *arguments])
        assert options.save == Path("x")
