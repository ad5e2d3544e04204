"""Tables as markdown for people and as JSON for programs."""

import json
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax

import optaxclip

PACKAGES = ("jax", "jaxlib", "optax", "numpy", "torch", "jax_privacy", "opacus")


class Table(NamedTuple):
    """The rows of one benchmark. A row may hold more than the columns name, such as raw
    times: that goes to the JSON only.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]
    note: str = ""


def setting(quick: bool) -> dict[str, Any]:
    """Where and with what the numbers were taken."""
    versions = {"python": platform.python_version(), "optaxclip": optaxclip.__version__}
    for package in PACKAGES:
        versions[package] = _version(package)
    return {
        "quick": quick,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "device": f"{jax.default_backend()}: {jax.devices()[0].device_kind}",
        "versions": versions,
    }


def header(where: dict[str, Any]) -> str:
    """The lines above the first table."""
    versions = ", ".join(map(" ".join, where["versions"].items()))
    machine = f"{where['platform']}, {where['cpu_count']} CPUs, {where['device']}"
    text = f"# Benchmarks\n\n{versions}, {machine}.\n"
    if where["quick"]:
        text += "\nQUICK RUN: toy sizes, the numbers mean nothing.\n"
    return text


def markdown(name: str, table: Table, seconds: float) -> str:
    """A table to print, with the time it took to measure."""
    below = f"{table.note} Measured in {seconds:.0f} s."
    rows = all_rows(table.columns, table.rows)
    return f"## `{name}`: {table.title}\n\n{rows}\n\n{below}\n"


def shown(value: Any) -> str:
    """A number or a word in a table."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def all_rows(
    columns: Sequence[str],
    rows: list[dict[str, Any]],
    show: Callable[[Any], str] = shown,
) -> str:
    """Some columns of all rows, as markdown."""
    lines = []
    for row in rows:
        lines.append([show(row.get(column)) for column in columns])
    return grid(columns, lines)


def grid(header: Sequence[str], lines: list[list[str]]) -> str:
    """A table with its first column to the left and the others to the right."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ruler, *lines))


def write(path: Path, where: dict[str, Any], tables: dict[str, Table]) -> None:
    """Writes the tables, each with its setting. The file keeps its other tables.

    Raises:
      SystemExit: a table has no rows, and the file has some of it.
    """
    content: dict[str, Any] = {"tables": {}}
    if path.exists():
        content = json.loads(path.read_text())
    old_tables = content["tables"]
    for name, table in tables.items():
        if not table.rows and old_tables.get(name, {}).get("rows"):
            raise SystemExit(f"{path} keeps its rows of {name}: there are no new ones.")
        old_tables[name] = where | table._asdict()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
