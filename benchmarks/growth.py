"""How the cost of clipping by the global norm, alone in a jitted and donated call,
grows with the number of parameters and of leaves.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

from . import models, timing
from .report import Table

LIBRARIES = {
    "optaxclip": optaxclip.clip_by_global_norm,
    "optax": optax.clip_by_global_norm,
}
SIZES = [(10**6, 16), (10**7, 16), (10**8, 16), (10**9, 16)]  # parameters, leaves
LEAVES = [(10**7, 10), (10**7, 100), (10**7, 1000)]
SHRINK = 0.99  # of the limit, from call to call


def table(quick: bool) -> Table:
    """Two series, each relative to its own first row."""
    series = [[(10**3, 2), (10**4, 2)]] if quick else [SIZES, LEAVES]
    rows = [row for sizes in series for row in _series(sizes, 2 if quick else 7)]
    return Table(
        "clip_by_global_norm alone, jitted and donated, float32",
        (
            "parameters",
            "leaves",
            "optaxclip",
            "optax",
            "optaxclip / optax",
            "compile, optaxclip / optax",
        ),
        rows,
        "First two: time per byte against the first row of the series. Small arrays "
        "stay in the processor's caches, so large ones cost more per byte."
        " No row has more leaves, since compiling gets too slow: at 3,000 optax's clip "
        "took 3.5 minutes of CPU time and optaxclip's was given up after as long,"
        " and at 10,000 optaxclip's was given up after 8 minutes.",
    )


def _series(sizes: list[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    programs, contestants = {}, {}
    for size in sizes:
        tree = models.equal_leaves(*size)
        for library, factory in LIBRARIES.items():
            programs[size, library] = _compile(factory, tree)
        live = {"grads": models.normal(tree), "limit": np.float32(np.sqrt(size[0]))}
        for library, factory in LIBRARIES.items():
            contestants[size, library] = _contestant(
                programs[size, library].call, factory(1.0).init(tree), live, size[0]
            )
    seconds = timing.race(contestants, rounds)
    return [_row(size, sizes[0], seconds, programs) for size in sizes]


def _compile(factory: Callable[[Any], Any], tree: Any) -> timing.Program:
    def clip(grads: Any, state: Any, limit: Any) -> tuple[Any, Any]:
        return factory(limit).update(grads, state)

    state = jax.eval_shape(factory(1.0).init, tree)
    return timing.compiled(
        clip, tree, state, jax.ShapeDtypeStruct((), jnp.float32), donate=(0, 1)
    )


def _contestant(
    call: Callable[..., Any], state: Any, live: dict[str, Any], parameters: int
) -> timing.Contestant:
    """Both libraries clip the same gradients in turns. Each call lowers the limit a
    little, so that there always is something to clip.
    """
    own = {"state": state}
    calls = max(
        1, min(20, 2 * 10**7 // parameters)
    )  # one call on a small tree is too short to be timed

    def run() -> Any:
        for _ in range(calls):
            live["limit"] *= np.float32(SHRINK)
            live["grads"], own["state"] = call(
                live["grads"], own["state"], live["limit"]
            )
        return live["grads"], own["state"]

    return timing.Contestant(run, calls=calls)


def _row(
    size: tuple[int, int], first: tuple[int, int], seconds: Any, programs: Any
) -> dict[str, Any]:
    share = size[0] / first[0]
    compile_seconds = {
        library: programs[size, library].seconds for library in LIBRARIES
    }
    return {
        "parameters": f"{size[0]:,}",
        "leaves": f"{size[1]:,}",
        **{
            library: timing.ratio(seconds[size, library], seconds[first, library])
            / share
            for library in LIBRARIES
        },
        "optaxclip / optax": timing.ratio(
            seconds[size, "optaxclip"], seconds[size, "optax"]
        ),
        "compile, optaxclip / optax": compile_seconds["optaxclip"]
        / compile_seconds["optax"],
        "clip_seconds": {library: seconds[size, library] for library in LIBRARIES},
        "compile_seconds": compile_seconds,
    }
