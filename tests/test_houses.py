"""Three houses, one direction: the core needs neither per-example clipping nor tools,
per-example clipping needs no tools, and tools compute by public names of the core.
"""

import ast
from pathlib import Path

import optaxclip

PACKAGE = Path(optaxclip.__file__).parent
PER_EXAMPLE = {"per_example"}
TOOLS = {"_check_step", "_logs", "_release", "autopsy", "check", "doctor", "replay"}
OTHER_NAMES = {"dropin"}  # of other libraries
# Modules that clip nothing, and that every house may use. They check arguments and word
# errors, register states, name leaves, and read traced programs and types.
SHARED = ("_arguments", "_devices.mesh_types", "_jaxpr", "_state.interop", "_trees")
TYPES = {"Limit", "Number", "Shrink"}  # of public arguments
# Private names by which a tool computes what a clipper does, number for number. They
# take what no user has, such as the name of the call for an error.
AS_CLIPPERS = {
    # A limit for a history of norms, and the factor and the shrink that follow.
    ("replay", "factor_between"),
    ("replay", "limit_and_memory_of"),
    ("replay", "rule_of_norm_alone"),
    ("replay", "shrink_of"),
    ("replay", "shrunk_by"),
    # The rules of `skip_step` and `record_spikes`.
    ("replay", "spike_rule"),
    ("replay", "skip_step_rule"),
    # The clipper of `release`, whose errors name `release`.
    ("_release", "GlobalNorm"),
    ("_release", "make_clipper"),
    ("_release", "rule_of_norm_alone"),
}


def names_imported(path):
    """Pairs of a name that a file imports from optaxclip, and its module, without
    "optaxclip." Both are the same for a module of the top.
    """
    parents = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                package, *parts = name.name.split(".")
                if package == "optaxclip" and parts:
                    yield parts[0], ".".join(parts)
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".") if node.module else []
            if node.level:
                parts = [*parents[: len(parents) - node.level + 1], *parts]
            elif parts[:1] == ["optaxclip"]:
                parts = parts[1:]
            else:
                continue
            for name in node.names:
                yield name.name, ".".join(parts) or name.name


def imports_of(path):
    """The first parts of the modules of optaxclip that a file imports."""
    return {module.partition(".")[0] for _, module in names_imported(path)}


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
        for name in imports_of(path) & forbidden:
            yield str(relative), name


def private_names_of_core():
    """Pairs of a tool and a private name of the core that it imports."""
    public = {*optaxclip.__all__, *optaxclip.rules.__all__, *optaxclip.shrinks.__all__}
    for path in PACKAGE.rglob("*.py"):
        tool = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if tool not in TOOLS:
            continue
        for name, module in names_imported(path):
            is_of_tools = module.partition(".")[0] in TOOLS
            is_of_core = not is_of_tools and not module.startswith(SHARED)
            if is_of_core and name not in public | TYPES:
                yield tool, name


def test_core_needs_neither_examples_nor_tools():
    assert list(wrong_imports()) == []
    # The reader of imports sees those that there are.
    assert "per_example" in imports_of(PACKAGE / "dropin/jax_privacy.py")
    assert "_norm_clipper" in imports_of(PACKAGE / "_release/__init__.py")
    assert "rules" in imports_of(PACKAGE / "_norm_clipper.py")


def test_tools_compute_by_public_names():
    # A name that no tool needs any more leaves the list.
    assert set(private_names_of_core()) == AS_CLIPPERS
