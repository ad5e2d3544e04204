"""How long it takes to trace and compile an Adam step, with and without clipping."""

from statistics import median
from typing import Any

import jax
import optax

import optaxclip

from . import models, steps
from .report import Table

PAIRS = {  # by what they measure: ours, and optax's
    "global norm": (optaxclip.clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0)),
    "each tensor": (optaxclip.clip_by_block_rms(1.0), optax.clip_by_block_rms(1.0)),
    "AGC": (optaxclip.adaptive_grad_clip(0.01), optax.adaptive_grad_clip(0.01)),
}


def table(quick: bool) -> Table:
    """GPT-2's leaves, several times in turns, and 2,000 small leaves, once, since that
    takes minutes. Nothing is run, so no arrays are needed.
    """
    rows = [_row(pair, models.gpt2(quick), 1 if quick else 3) for pair in PAIRS]
    if not quick:
        rows.append(_row("global norm", models.small_leaves(2000), 1))
    return Table(
        "tracing and compiling an Adam step, clipped",
        (
            "clipped by",
            "leaves",
            "none",
            "optaxclip",
            "optax",
            "optaxclip / optax",
            "repeats",
        ),
        rows,
        "Against Adam alone, with JAX's caches cleared before each.",
    )


def _row(pair: str, tree: Any, repeats: int) -> dict[str, Any]:
    ours, theirs = PAIRS[pair]
    clippers = {"none": optax.identity(), "optaxclip": ours, "optax": theirs}
    seconds: dict[str, list[float]] = {name: [] for name in clippers}
    for _ in range(repeats):
        for name, clipper in clippers.items():
            seconds[name].append(
                steps.compile_step(clipper, optax.adam(1e-3), tree, tree).seconds
            )
    medians = {name: median(times) for name, times in seconds.items()}
    ratios = {name: medians[name] / medians["none"] for name in clippers}
    between = {"optaxclip / optax": medians["optaxclip"] / medians["optax"]}
    return {
        "clipped by": pair,
        "leaves": len(jax.tree.leaves(tree)),
        **ratios,
        **between,
        "repeats": repeats,
        "compile_seconds": seconds,
    }
