"""The day a GPU or TPU is at hand: `python -m benchmarks.on_device`.

    python -m benchmarks.on_device            tests of norms, contract and sharding on
                                              the device, then an Adam step with each
                                              clipper beside optax's
    python -m benchmarks.on_device --quick    a few tests and toy sizes: it works
    python -m benchmarks.on_device --no-tests

It writes benchmarks/results/CHIP.md and .json, with the name of the chip. With fewer
than eight devices the tests that need a mesh of them are skipped or fail: the table
shows how many.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

import jax

from . import report, steps

ROOT = Path(__file__).parent.parent
PROMISES = ("contract", "limits_and_breaks", "wrapped", "programs")
SUITES = ["tests/norms", *(f"tests/core/test_{name}.py" for name in PROMISES)]
TABLES = {"step": steps.step, "bfloat16": steps.bfloat16}


def main() -> None:
    """Runs the tests and the tables, and writes both."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_device")
    parser.add_argument("--quick", action="store_true", help="a few tests, toy sizes")
    parser.add_argument("--no-tests", action="store_true", help="only the tables")
    options = parser.parse_args()
    # The tests first: this process would hold the device's memory from them.
    results = {} if options.no_tests else {path: _run(path, options) for path in SUITES}
    setting = report.setting(options.quick) | {"tests": results}
    text = [report.header(setting)]
    text += [f"{path}: {line}\n" for path, line in results.items()]
    tables = {}
    for name, measure in TABLES.items():
        start = time.perf_counter()
        tables[name] = measure(options.quick)
        text.append(report.markdown(name, tables[name], time.perf_counter() - start))
        print(text[-1], flush=True)
    chip = re.sub(r"\W+", "_", jax.devices()[0].device_kind).strip("_").lower()
    place = Path(__file__).parent / "results" / f"{chip}.md"
    place.parent.mkdir(exist_ok=True)
    place.write_text("\n".join(text))
    report.write(place.with_suffix(".json"), setting, tables)
    print(f"Written to {place}")


def _run(path: str, options: argparse.Namespace) -> str:
    """The last line of what pytest says about some tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", path]
    if options.quick:
        command += ["-k", "empty_tree"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().split("\n")
    failed = [line for line in lines if line.startswith("FAILED")]
    print("\n".join([path, *failed, lines[-1]]), flush=True)
    return lines[-1]


if __name__ == "__main__":
    main()
