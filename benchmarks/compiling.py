"""How long it takes to trace and compile an Adam step, with and without clipping by the global norm."""

from statistics import median
from typing import Any

import jax
import optax

import optaxclip

from . import models, steps
from .report import Table

CLIPPERS = {"none": optax.identity(), "optaxclip": optaxclip.clip_by_global_norm(1.0), "optax": optax.clip_by_global_norm(1.0)}


def table(quick: bool) -> Table:
    """GPT-2's leaves, several times in turns; and 2,000 small leaves, once, since that takes minutes. Nothing is run, so no arrays are needed."""
    rows = [_row(models.gpt2(quick), 1 if quick else 3)]
    if not quick:
        rows.append(_row(models.small_leaves(2000), 1))
    return Table(
        "tracing and compiling an Adam step, clip_by_global_norm",
        ("leaves", "none", "optaxclip", "optax", "optaxclip / optax", "repeats"),
        rows,
        "Against Adam alone, with JAX's caches cleared before each.",
    )


def _row(tree: Any, repeats: int) -> dict[str, Any]:
    optimizer = optax.adam(1e-3)
    seconds: dict[str, list[float]] = {name: [] for name in CLIPPERS}
    for _ in range(repeats):
        for name, clipper in CLIPPERS.items():
            seconds[name].append(steps.compile_step(clipper, optimizer, tree, tree).seconds)
    medians = {name: median(times) for name, times in seconds.items()}
    ratios = {name: medians[name] / medians["none"] for name in CLIPPERS}
    between = {"optaxclip / optax": medians["optaxclip"] / medians["optax"]}
    return {"leaves": len(jax.tree.leaves(tree)), **ratios, **between, "repeats": repeats, "compile_seconds": seconds}
