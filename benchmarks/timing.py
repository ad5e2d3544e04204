"""Times that can be compared: all contestants in turns in one process, medians over
rounds, ratios within a round.

A machine that slows down for a while slows all contestants of a round, so a ratio
within one round means more than two times taken apart. The first round, which warms
caches and memory, is dropped. Each round has another order, since what comes after a
step that takes much memory is slower.
"""

import gc
import itertools
import math
import random
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import jax


class Contestant(NamedTuple):
    """What is timed, in a race against others."""

    run: Callable[[], Any]  # returns what must be waited for
    calls: int = 1  # how often `run` does the work: the time is divided by it


class Program(NamedTuple):
    """A function compiled ahead of time."""

    call: jax.stages.Compiled
    seconds: float  # of processor time to trace, lower and compile it
    temporary: int  # bytes beside its arguments and results
    held: int  # bytes with its arguments and results


def repeated(runs: list[Callable[[], Any]], seconds: float) -> Contestant:
    """A contestant that in each round takes the next of several runs, as often as it
    takes to fill so many seconds.
    """
    for run in runs:
        jax.block_until_ready(run())  # compiles, or fills caches
    calls = max(1, math.ceil(seconds / _seconds(Contestant(runs[0]))))
    next_runs = itertools.cycle(runs)

    def run_all() -> Any:
        run = next(next_runs)
        for _ in range(calls - 1):
            run()
        return run()

    return Contestant(run_all, calls=calls)


def race(contestants: dict[str, Contestant], rounds: int) -> dict[str, list[float]]:
    """The seconds of each contestant in each round."""
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    for turn in range(rounds + 1):
        print(f"  round {turn} of {rounds}", file=sys.stderr, flush=True)
        for name in random.Random(turn).sample(names, len(names)):
            seconds_of_turn = _seconds(contestants[name])
            if turn:
                seconds[name].append(seconds_of_turn)
    return seconds


def ratios(seconds: list[float], base: list[float]) -> list[float]:
    """The time of one contestant over the time of another, in each round of both."""
    return [time / base_time for time, base_time in zip(seconds, base)]


def compiled(
    function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()
) -> Program:
    """Compiles a function for arguments of such shapes, with nothing remembered
    from earlier compilations.
    """
    jax.clear_caches()
    start = time.process_time()
    call = jax.jit(function, donate_argnums=donate).lower(*shapes).compile()
    seconds = time.process_time() - start
    memory: Any = call.memory_analysis()
    temporary = memory.temp_size_in_bytes
    held = temporary + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Program(call, seconds, temporary, held)


def compiled_in_turns(
    functions: dict[str, tuple[Any, ...]], donate: tuple[int, ...]
) -> dict[str, Program]:
    """Compiles functions with their arguments three times, in turns. The medians of the
    seconds count.
    """
    programs: dict[str, Program] = {}
    all_seconds: dict[str, list[float]] = {name: [] for name in functions}
    # The first one of a process also pays for what it loads.
    compiled(*next(iter(functions.values())))
    for turn in range(3):
        for name, function in functions.items():
            programs[name] = compiled(*function, donate=donate)
            all_seconds[name].append(programs[name].seconds)
            print(f"  {name}: compiled, turn {turn}", file=sys.stderr, flush=True)
    for name, seconds in all_seconds.items():
        programs[name] = programs[name]._replace(seconds=median(seconds))
    return programs


def _seconds(contestant: Contestant) -> float:
    start = time.perf_counter()
    jax.block_until_ready(contestant.run())
    return (time.perf_counter() - start) / contestant.calls
