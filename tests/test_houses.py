"""Three houses, one direction: the core needs neither per-example clipping nor tools,
and per-example clipping needs no tools.
"""

import ast
from pathlib import Path

import optaxclip

PACKAGE = Path(optaxclip.__file__).parent
PER_EXAMPLE = {"per_example"}
TOOLS = {"_check_step", "_logs", "_release", "autopsy", "check", "doctor", "replay"}
OTHER_NAMES = {"dropin"}  # of other libraries


def imports_of(path):
    """The first parts of the modules of optaxclip that a file imports."""
    parents = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                package, *parts = name.name.split(".")
                if package == "optaxclip" and parts:
                    yield parts[0]
        elif isinstance(node, ast.ImportFrom):
            names = [name.name for name in node.names]
            parts = (node.module or "").split(".") if node.module else []
            if node.level:
                parts = [*parents[: len(parents) - node.level + 1], *parts]
            elif parts[:1] == ["optaxclip"]:
                parts = parts[1:]
            else:
                continue
            yield from parts[:1] or names


def wrong_imports():
    """Pairs of a file and what it must not import."""
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        house = relative.parts[0].removesuffix(".py")
        # `__init__` shows all, and imports most of it at its first use.
        if house in TOOLS | OTHER_NAMES | {"__init__"}:
            continue
        forbidden = TOOLS | OTHER_NAMES
        if house not in PER_EXAMPLE:
            forbidden |= PER_EXAMPLE
        for name in set(imports_of(path)) & forbidden:
            yield str(relative), name


def test_core_needs_neither_examples_nor_tools():
    assert list(wrong_imports()) == []
    # The reader of imports sees those that there are.
    assert "per_example" in imports_of(PACKAGE / "dropin/jax_privacy.py")
    assert "_kernel" in imports_of(PACKAGE / "_release/__init__.py")
    assert "rules" in imports_of(PACKAGE / "_kernel.py")
