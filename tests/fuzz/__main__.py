"""The long run: `python -m tests.fuzz --minutes 30 --seed 1`."""

import argparse
import multiprocessing
import queue
import sys
import time
from typing import Any

from tests.fuzz.worker import PROCESSES, work


def collect(found: Any, workers: list[Any], deadline: float) -> dict[str, list[str]]:
    """Prints each kind of finding once. Returns its methods by its signature."""
    seen: dict[str, list[str]] = {}
    while time.monotonic() < deadline and any(worker.is_alive() for worker in workers):
        try:
            signature, method, text = found.get(timeout=0.2)
        except queue.Empty:
            continue
        if signature not in seen:
            print(f"\n== {method}, {signature}\n{text}", flush=True)
        seen.setdefault(signature, []).append(method)
    return seen


def main() -> int:
    """Runs both processes until time is over.

    Returns 1 if anything was found, 2 if a process fell.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names of cells")
    options = parser.parse_args()
    seconds = 60 * options.minutes
    deadline = time.monotonic() + seconds

    context = multiprocessing.get_context("spawn")
    found, count = context.Queue(), context.Value("q", 0)
    arguments = (options.seed, seconds, options.only, found, count)
    shares = [(place, *arguments) for place in range(PROCESSES)]
    workers = [context.Process(target=work, args=share) for share in shares]
    for worker in workers:
        worker.start()
    seen = collect(found, workers, deadline)
    fell = [worker.exitcode for worker in workers if worker.exitcode]
    for worker in workers:
        worker.terminate()
        worker.join()

    for signature, methods in seen.items():
        print(f"{len(methods):4} {signature} | {', '.join(sorted(set(methods)))}")
    print(f"{count.value} cases, {len(seen)} findings, seed {options.seed}")
    return 2 if fell else int(bool(seen))


if __name__ == "__main__":
    sys.exit(main())
