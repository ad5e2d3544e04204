"""The command `python -m optaxclip.check module:make_step`."""

import argparse
import importlib
import json
import math
import sys
from typing import Any

import jax

from ._check_step import DEVICES, KINDS, SETTINGS, Finding, check_step


def main(arguments: list[str] | None = None) -> None:
    """Checks norm and clip of a training step on eight CPU devices. Ends with 1 if
    something is wrong, and with 2 if there is no such step.
    """
    # Before Python 3.14 argparse would call the program `check.py`.
    parser = argparse.ArgumentParser(
        prog="python -m optaxclip.check", description=main.__doc__
    )
    add = parser.add_argument
    add("step", metavar="module:make_step", help="see help(check_step)")
    add("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    add("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    # Before the module of the step computes anything.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    module, _, name = options.step.partition(":")
    if not module or not name:
        parser.error(
            f"the step must be module:function, got {options.step!r}."
        )
    try:
        make_step = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        parser.error(f"{error}.")
    except AttributeError:
        parser.error(f"module {module!r} has no {name!r}.")
    findings = check_step(make_step, settings=options.settings)
    if options.json:
        report = {
            "step": options.step,
            "settings": list(options.settings),
            "findings": [_as_json(row) for row in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        print(table(options.settings, findings))
    sys.exit(1 if findings else 0)


def table(settings: Any, findings: list[Finding]) -> str:
    """The findings as text, with what each kind means."""
    lines = ["setting      gradients  what      wanted     found  ratio  kind"]
    for name in settings:
        rows = [row for row in findings if row.setting == name]
        if not rows:
            lines.append(f"{name:12} right")
        lines += map(_line, rows)
    kinds = dict.fromkeys(row.kind for row in findings)
    lines += [f"\n{kind}: {KINDS[kind]}" for kind in kinds]
    return "\n".join(lines)


def _line(row: Finding) -> str:
    numbers = (
        f"{row.wanted:9.4g} {row.found:9.4g} {row.found / row.wanted:6.3g}"
    )
    return f"{row.setting:12} {row.gradients:10} {row.what:6} {numbers}  {row.kind}"


def _as_json(row: Finding) -> dict[str, Any]:
    found = row._asdict() | {"meaning": row.meaning}
    # JSON has no NaN and no inf.
    for name, value in found.items():
        if isinstance(value, float) and not math.isfinite(value):
            found[name] = str(value)
    return found


if __name__ == "__main__":
    main()
