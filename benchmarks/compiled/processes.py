"""Rows from processes that have the packages of a described device."""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

from . import targets


def missing(names: list[str]) -> str:
    """Sentences that say how to see the devices that are left out."""
    found = {}
    for name in names:
        environment = targets.environment_of(name)
        if environment.python() is None:
            found[environment.how_to_make()] = None
    return "".join(f" To see more devices: `{line}`." for line in found)


def rows_from(module: str, target: str, wanted: Any) -> Iterator[dict[str, Any]]:
    """What `python -m module` prints as lines of JSON, given `wanted` as JSON. Nothing
    where the environment of the target is not there.
    """
    environment = targets.environment_of(target)
    python = environment.python()
    if python is None:
        return
    known = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        [python, "-m", module],
        cwd=targets.ROOT,
        env=os.environ | known | environment.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(wanted))
    process.stdin.close()
    yield from map(json.loads, process.stdout)
    if process.wait():
        raise RuntimeError(f"compiling for {target} failed, see the text above")
