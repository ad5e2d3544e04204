"""Makes small faults in one module and looks whether its tests turn red.

    python -m mutations optaxclip/_norms/_three_sums.py --sample 50 --seed 1 --workers 4

Each fault is made in a copy of the repository, by a process that runs the tests of the
module until one is red. A fault that leaves all of them green survives. The exit status
is 1 if one does. The survivors that `explained.toml` explains are not tried again.
"""

import argparse
import os
import random
import re
import runpy
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from fnmatch import translate
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from .mutants import Mutant, mutants

ROOT = Path(__file__).parent.parent
# Failed first: what has killed one mutant often kills the next.
PYTEST = "-x -q -n 0 --failed-first -p no:hypothesispytest -W ignore:Module"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutations")
    parser.add_argument("file", help="a module of the library")
    parser.add_argument("--sample", type=int, help="how many mutants, default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the order, default: 0")
    parser.add_argument("--workers", type=int, default=2, help="default: 2")
    options = parser.parse_args()
    file, source = options.file, (ROOT / options.file).read_text()
    explained = re.compile("|".join(map(translate, _table("explained.toml"))))
    queue = [mutant for mutant in mutants(source) if not explained.match(mutant.name)]
    random.Random(options.seed).shuffle(queue)
    queue = queue[: options.sample]
    with tempfile.TemporaryDirectory() as folder:
        homes = _copies(Path(folder), options.workers)
        if _survivors(_runs(file, [Mutant("no fault", "", source)], homes)) == 0:
            return 2
        survivors = _survivors(_runs(file, queue, homes))
    print(f"{file}: {survivors} of {len(queue)} mutants survive")
    return int(survivors > 0)


def _survivors(runs: Iterator[tuple[Mutant, int, str]]) -> int:
    """Shows what became of each mutant and counts the survivors."""
    survivors = 0
    for mutant, code, log in runs:
        if code:  # a red test, tests that cannot be imported, a crash, or no end
            red = "".join(re.findall(r"\n(?:FAILED|ERROR) .*", log))
            print(f"killed    {mutant.name}{red}", flush=True)
        else:
            survivors += 1
            print(f"SURVIVED  {mutant.name}\n{mutant.diff}", flush=True)
    return survivors


def _copies(folder: Path, workers: int) -> list[Path]:
    """Copies the repository and imports JAX, which all mutants then share."""
    ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
    homes = [folder / str(number) for number in range(workers)]
    for home in homes:
        shutil.copytree(ROOT, home, ignore=ignore)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
    runpy.run_path(str(ROOT / "tests" / "conftest.py"))
    # No array is made: a JAX that has started its threads cannot be forked.
    for name in ("jax", "optax", "chex", "hypothesis"):
        __import__(name)
    return homes


def _runs(file: str, queue: list[Mutant], homes: list[Path]) -> Iterator:
    """Yields each mutant with the exit status of pytest and what it printed."""
    waiting, idle, busy = list(queue), list(homes), {}
    while waiting or busy:
        while waiting and idle:
            mutant, home = waiting.pop(0), idle.pop()
            (home / file).write_text(mutant.source)
            # Python tells sources apart by size and second, too coarse for mutants.
            Path(cache_from_source(str(home / file))).unlink(missing_ok=True)
            child = os.fork()
            if child == 0:
                try:
                    _test(home, _tests_of(file))
                finally:
                    os._exit(3)  # or the child would go on as its parent
            busy[child] = mutant, home
        child, status = os.wait()
        mutant, home = busy.pop(child)
        idle.append(home)
        yield mutant, os.waitstatus_to_exitcode(status), (home / "log").read_text()


def _test(home: Path, tests: list[str]) -> None:
    """Ends this process with the exit status of pytest."""
    signal.alarm(1800)  # seconds; ends the process even where compiled code hangs
    os.chdir(home)
    os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    sys.path[0] = str(home)  # instead of the repository, from where -m starts
    os.environ["PYTHONPATH"] = str(home)  # for tests that start processes
    code = pytest.main([*PYTEST.split(), *tests])
    sys.stdout.flush()
    os._exit(code)


def _tests_of(file: str) -> list[str]:
    """Returns the module, for its examples, the tests of its name, and the table's."""
    table, module = _table("tests.toml"), Path(file)
    name, folder = module.stem.lstrip("_"), module.parent.name
    entries = sorted(filter(file.startswith, table), key=len, reverse=True)
    patterns = [f"**/test_{name}", f"**/test_{name}_*", f"{folder}/test_*"]
    patterns += [pattern for entry in entries for pattern in table[entry].split()]
    found = [file] if ">>>" in (ROOT / file).read_text() else []
    for pattern in patterns:
        found += map(str, sorted((ROOT / "tests").glob(f"{pattern}.py")))
    return [path.removeprefix(f"{ROOT}/") for path in dict.fromkeys(found)]


def _table(name: str) -> dict:
    return tomllib.loads((Path(__file__).parent / name).read_text())


if __name__ == "__main__":
    sys.exit(main())
