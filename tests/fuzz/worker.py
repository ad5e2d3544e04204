"""One process of the long run. It imports JAX only when its settings stand."""

import importlib
import time
import warnings
from typing import Any

PROCESSES = 2


def work(
    place: int, seed: int, seconds: float, only: str, found: Any, count: Any
) -> None:
    """Searches for so many seconds, and puts findings into the queue."""
    deadline = time.monotonic() + seconds
    importlib.import_module("tests.conftest")
    warnings.simplefilter("ignore")  # NumPy's, of overflows in the expected values
    search = importlib.import_module("tests.fuzz.search").search

    def counted():
        with count.get_lock():
            count.value += 1

    for finding in search(seed, deadline, (place, PROCESSES), counted, only):
        found.put(tuple(finding))
