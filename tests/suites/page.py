"""The table of what ran, and the page `docs/suites.md`."""

from typing import Any

from ..packages import wrapped
from .compare import Row
from .patches import SUITES

HEAD = [
    "| package | version | tests | theirs | with ours | calls | differ |",
    "|---|---|---|---|---|---|---|",
]
INTRO = """
Other packages test their clipping functions. `python -m tests.suites` runs these tests
twice: as they are, and with our functions in place of theirs. Nearly all end alike. The
others are explained below. The command downloads nothing, and takes the versions that
are installed. It fails if a difference is not explained, if an explained difference is
gone, or if the tests of a row never call one of our functions.
"""
COLUMNS = """
`theirs` and `with ours` count the tests that passed, failed and were skipped. `calls`
says how often the tests called our functions. `differ` counts the tests that end
differently.
"""
CASES = """
Some tests are not shipped, or need another language. Their numbers were copied to
`tests/references/cases.json`, and `tests/core/test_conformance.py` compares all of
them. Their rows have `cases` in place of a version. There `theirs` counts the cases,
and a case counts as failed if we decide otherwise on purpose.
"""


def table(rows: list[Row]) -> str:
    lines = [*HEAD]
    for row in rows:
        differ = str(len(row.differ)) if row.ours else ""
        cells = (row.package, row.version, row.tests, row.theirs, row.ours, row.calls)
        lines.append("| " + " | ".join((*cells, differ)) + " |")
    return "\n".join(lines)


def differences(rows: list[Row]) -> str:
    """Each reason with the tests that it explains."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for test, why in row.differ.items():
            key = (row.package, why or "Not explained.")
            reasons.setdefault(key, []).append(test.rpartition("::")[2])
    parts = []
    for (package, why), tests in reasons.items():
        named = ", ".join(f"`{test}`" for test in tests)
        parts.append(wrapped(f"- {package}: {why} ({named})", hanging="  "))
    return "\n".join(parts)


def environments(where: dict[str, str]) -> str:
    """Each environment with the suites that ran in it."""
    parts = []
    for environment in dict.fromkeys(where.values()):
        ran = [name for name, each in where.items() if each == environment]
        parts.append(wrapped(f"- {', '.join(ran)}: {environment}.", hanging="  "))
    return "\n".join(parts)


def failures_of_their_own(rows: list[Row]) -> str:
    """Tests that fail without ours as well."""
    parts = []
    for row in rows:
        if row.own:
            named = ", ".join(f"`{test.rpartition('::')[2]}`" for test in row.own)
            parts.append(wrapped(f"- {row.package}: {named}", hanging="  "))
    return "\n".join(parts) or "None."


def page(recorded: dict[str, Any]) -> str:
    """All of `docs/suites.md`."""
    rows = [Row(**row) for row in recorded["rows"]]
    replaced = []
    for name, suite in SUITES.items():
        replaced.append(wrapped(f"- {name}: {suite.beside}.", hanging="  "))
    parts = [
        "# Tests of other packages",
        wrapped(INTRO),
        environments(recorded["where"]),
        wrapped(COLUMNS),
        table(rows),
        wrapped(CASES),
        "## Functions that are replaced",
        "\n".join(replaced),
        "## Tests that differ, and why",
        differences(rows),
        "## Tests that fail without ours too",
        failures_of_their_own(rows),
    ]
    return "\n\n".join(parts) + "\n"
