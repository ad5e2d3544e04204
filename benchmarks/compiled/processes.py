"""Rows from processes that have the packages of a described device."""

import json
import os
import subprocess
from collections.abc import Iterable
from typing import Any

from ..report import Table
from . import targets


def table(
    module: str,
    cases: Iterable[tuple[str, list[Any]]],
    title: str,
    columns: tuple[str, ...],
    note: str,
) -> Table:
    """The rows that `row` of a module gives for the arguments of each target, in a
    process of its own. Targets without an environment are left out, and the note says
    how to make it.
    """
    rows = []
    missing = {}
    for target, arguments in cases:
        environment = targets.environment_of(target)
        python = environment.python()
        if python is None:
            missing[environment.how_to_make()] = None
            continue
        quiet = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        process = subprocess.run(
            [python, "-m", "benchmarks.compiled", module],
            cwd=targets.ROOT,
            env=os.environ | quiet | environment.variables,
            input=json.dumps(arguments),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        rows += json.loads(process.stdout)
    note += "".join(f" To see more devices: `{line}`." for line in missing)
    return Table(title, columns, rows, note)
