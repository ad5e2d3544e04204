"""What a step of `release` takes: time on this device, memory on an H100 and a v5e.

    PYTHONPATH=examples python -m benchmarks.release_steps
    PYTHONPATH=examples python -m benchmarks.release_steps --table memory

The transformer of examples/release.py, with float32 weights and Adam. Times are of the
networks and batches in `SIZES`. All steps of one size run in turns, and ratios are
within a turn. Memory is of 16 layers of width 1024 and 4,096 tokens, compiled for
devices that are only described: nothing runs there.

    usual             the clip of the global norm, activations kept
    remat             the same, with jax.checkpoint around each layer
    unrolled remat    the same, without a loop
    one pass          release(max_norm=...)
    two passes        release(max_norm=..., passes=2)
"""

import argparse
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any, NamedTuple

import jax
import numpy as np

from examples._shared import read_text
from examples.release import LENGTH, TRAINERS, new_params, usual

from .compiled import processes, targets
from .compiled.step import compiled_for, described
from .report import Table, all_rows
from .timing import race, ratios, repeated

LAYERS = 16  # of the compiled steps
# The last one takes minutes to compile.
COMPILED = TRAINERS | {"unrolled remat": usual(unroll=LAYERS)}
TOKENS = 4096  # in a batch of the compiled steps
SECONDS, ROUNDS = 0.05, 15


class Size(NamedTuple):
    """A network, and how many windows of `LENGTH` tokens are in its batch."""

    layers: int
    width: int
    windows: int


SIZES = (Size(4, 64, 16), Size(8, 256, 1), Size(8, 256, 4), Size(8, 256, 16))


def main() -> None:
    """Prints one of the tables."""
    tables = {"time": times, "memory": memory}
    parser = argparse.ArgumentParser("python -m benchmarks.release_steps")
    parser.add_argument(
        "--table", choices=tables, default="time", help="(default: time)"
    )
    table = tables[parser.parse_args().table]()
    print(all_rows(table.columns, table.rows))
    print(table.note)


# ------------------------------------------------------------------------------- time


def times() -> Table:
    """Steps on the device at hand."""
    rows = []
    for size in SIZES:
        rows += times_of(size)
    columns = ("step", "layers", "width", "tokens", "ms", "over remat", "middle half")
    note = f"Medians of {ROUNDS} rounds."
    return Table("time of a step", columns, rows, note)


def times_of(size: Size) -> list[dict[str, Any]]:
    """The rows of one size."""
    contestants = {name: repeated([runner(name, size)], SECONDS) for name in TRAINERS}
    seconds = race(contestants, ROUNDS)
    rows = []
    for name in TRAINERS:
        over_remat = ratios(seconds[name], seconds["remat"])
        first_quarter, _, last_quarter = quantiles(over_remat, n=4)
        rows.append(
            {
                "step": name,
                "layers": size.layers,
                "width": size.width,
                "tokens": size.windows * LENGTH,
                "ms": 1000 * median(seconds[name]),
                "over remat": median(over_remat),
                "middle half": f"{first_quarter:.2f} to {last_quarter:.2f}",
            }
        )
    return rows


def runner(name: str, size: Size) -> Callable[[], Any]:
    """Goes on training for one step, and returns the loss."""
    text = read_text()
    trainer = TRAINERS[name]
    step = jax.jit(trainer.step, donate_argnums=(0, 1))
    start_count = len(text.training) - LENGTH
    starts = np.random.default_rng(0).integers(start_count, size=size.windows)
    windows = text.training[starts[:, None] + np.arange(LENGTH + 1)]
    params = new_params(len(text.alphabet), size.layers, size.width)
    state = trainer.init(params, windows)

    def run_step() -> Any:
        nonlocal params, state
        params, state, loss = step(params, state, windows)
        return loss

    return run_step


# ----------------------------------------------------------------------------- memory


def memory() -> Table:
    """Steps compiled for an H100 and a v5e, in processes of their own."""
    cases = []
    for device in ("h100", "v5e"):
        cases.append((device, [(name, device) for name in COMPILED]))
    columns = ("step", "device", "arguments MB", "temporary MB", "GFLOP")
    return processes.table(
        "benchmarks.release_steps",
        cases,
        title="memory of a step",
        columns=columns,
        note="Compiled for devices that are only described.",
    )


def row(name: str, device: str) -> dict[str, Any]:
    """What a step takes on one device."""
    trainer = COMPILED[name]
    params = jax.eval_shape(lambda: new_params(512, LAYERS, 1024))
    batch = jax.ShapeDtypeStruct((TOKENS // LENGTH, LENGTH + 1), np.int32)
    state = jax.eval_shape(trainer.init, params, batch)
    arguments = described((params, state, batch), targets.placement(device))
    program, _ = compiled_for(device, trainer.step, *arguments, donate=(0, 1))
    sizes = program.memory_analysis()
    # XLA counts the body of a loop once.
    flops = (program.cost_analysis() or {}).get("flops", np.nan)
    return {
        "step": name,
        "device": device,
        "arguments MB": round(sizes.argument_size_in_bytes / 1e6),
        "temporary MB": round(sizes.temp_size_in_bytes / 1e6),
        "GFLOP": round(flops / 1e9, 1),
    }


if __name__ == "__main__":
    main()
