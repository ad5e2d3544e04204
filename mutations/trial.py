"""One run of some tests over a copy of the repository with one fault in it, in a process of its own.

The process is forked from one that has imported JAX but not used it, which saves the seconds that imports take; compiled programs are found again in a cache on disk.
"""

import itertools
import multiprocessing
import os
import runpy
import shutil
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from .catalogue import Fault, Sheet

ROOT = Path(__file__).parent.parent
SECONDS = itertools.count(1_000_000_000)
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")


class Outcome(NamedTuple):
    """What became of one trial."""

    sheet: Sheet
    fault: Fault | None  # None where the file was as it is
    code: int | None  # that of pytest: 0 all green, 1 red; None for no end within the limit, negative for a crash
    text: str  # the first test that was red, or the end of what pytest printed
    seconds: float


class Trial:
    """A copy of the repository, and the process that tests it."""

    def __init__(self, home: Path, sheet: Sheet, fault: Fault | None):
        self.home, self.sheet, self.fault = home, sheet, fault
        self.file, self.log = home / sheet.file, home / "trial.log"
        self.right = self.file.read_text()
        self._write(fault.within(self.right) if fault else self.right)
        self.start = time.monotonic()
        self.process = multiprocessing.get_context("fork").Process(target=_test, args=(home, sheet.guards, self.log))
        self.process.start()

    def ended(self, limit: float) -> Outcome | None:
        """What became of it, once it has ended or had its time; the file is as it was then."""
        seconds = time.monotonic() - self.start
        code = self.process.exitcode
        if code is None and seconds < limit:
            return None
        self.process.kill()
        self.process.join()
        self._write(self.right)
        return Outcome(self.sheet, self.fault, code, _told(self.log.read_text()), seconds)

    def _write(self, text: str) -> None:
        self.file.write_text(text)
        # Python knows a compiled file by the size and the second of its source: each text gets a second of its own, or the fault before might be tested again.
        second = next(SECONDS)
        os.utime(self.file, (second, second))


def run_all(work: list[tuple[Sheet, Fault | None]], homes: list[Path], limit: float):
    """Tries each (sheet, fault), as many at once as there are homes, and yields the outcomes as they come."""
    free, busy, waiting = list(homes), [], list(work)
    while waiting or busy:
        while waiting and free:
            busy.append(Trial(free.pop(), *waiting.pop(0)))
        wait([trial.process.sentinel for trial in busy], timeout=1.0)
        for trial in list(busy):
            if outcome := trial.ended(limit):
                busy.remove(trial)
                free.append(trial.home)
                yield outcome


def prepare(folder: Path, workers: int) -> list[Path]:
    """Copies of the repository, one for each worker, and a JAX that is imported but not begun."""
    homes = [folder / f"copy{number}" for number in range(workers)]
    for home in homes:
        shutil.copytree(ROOT, home, ignore=LEFT_OUT)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
    runpy.run_path(str(ROOT / "tests" / "conftest.py"))  # what must stand before JAX is imported
    for name in ("jax", "optax", "chex", "hypothesis", "pytest"):
        __import__(name)
    return homes


def _test(home: Path, guards: list[str], log: Path) -> None:
    import pytest

    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(home)
    sys.path[:] = [str(home), *(entry for entry in sys.path if entry and Path(entry).resolve() != ROOT)]
    os.environ["PYTHONPATH"] = str(home)
    code = pytest.main(
        ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-W", "ignore:Module already imported", "--tb=short", *guards]
    )
    sys.stdout.flush()
    os._exit(int(code))


def _told(log: str) -> str:
    red = [line.removeprefix("FAILED ").removeprefix("ERROR ") for line in log.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return red[0].split(" - ")[0] if red else log.strip()[-2000:]
