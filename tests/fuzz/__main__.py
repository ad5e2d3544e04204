"""The long run: `python -m tests.fuzz --minutes 30 --seed 1`. Each process runs one."""

import argparse
import importlib
import sys
import time
import warnings


def main() -> int:
    """Prints each kind of finding once. Returns 1 if there was any."""
    # Settings that must stand before JAX is imported.
    importlib.import_module("tests.conftest")
    search = importlib.import_module("tests.fuzz.search").search

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names of cells")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # NumPy's, of overflows in the expected values
    deadline = time.monotonic() + 60 * options.minutes
    seen = []
    for finding in search(options.seed, deadline, options.only):
        print(f"\n== {finding.signature}\n{finding.text}", flush=True)
        seen.append(finding)
    print(f"{len(seen)} findings, seed {options.seed}")
    return int(bool(seen))


if __name__ == "__main__":
    sys.exit(main())
