"""The command `python -m optaxclip.check module:make_step`."""

import argparse
import json
import pkgutil
import sys
from types import ModuleType

import jax

from ._check_step import DEVICES, KINDS, SETTINGS, check_step


def main(arguments: list[str] | None = None) -> None:
    """Checks norm and clip of a training step on eight CPU devices. Ends with 1 if
    something is wrong, and with 2 if there is no such step.
    """
    # Before Python 3.14 argparse would call the program `check.py`.
    parser = argparse.ArgumentParser("python -m optaxclip.check", None, main.__doc__)
    add = parser.add_argument
    add("step", metavar="module:make_step", help="see help(optaxclip.check_step)")
    add("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    add("--json", action="store_true", help="print a list of findings as JSON")
    options = parser.parse_args(arguments)
    # Before the module of the step computes anything.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    try:
        make_step = pkgutil.resolve_name(options.step)
        if isinstance(make_step, ModuleType):
            raise ValueError("it must be module:make_step")
    except (AttributeError, ImportError, ValueError) as error:
        parser.error(f"there is no step {options.step!r}: {error}.")
    findings = check_step(make_step, settings=options.settings)
    if options.json:
        rows = [row._asdict() for row in findings]
        # JSON has no inf and no NaN.
        text = json.dumps(rows, indent=2).replace(": Infinity,", ': "inf",')
        print(text.replace(": NaN,", ': "nan",'))
    else:
        print("setting      gradients  what      wanted     found  kind")
        for row in findings:
            place = f"{row.setting:12} {row.gradients:10} {row.what:6}"
            print(f"{place} {row.wanted:9.4g} {row.found:9.4g}  {row.kind}")
        for kind in dict.fromkeys(row.kind for row in findings):
            print(f"{kind}: {KINDS[kind]}")
        names = {row.setting for row in findings}
        right = [name for name in options.settings if name not in names]
        print(f"right: {', '.join(right) or 'none'}")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
