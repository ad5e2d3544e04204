"""What a limit that learns costs over a fixed one, and what it costs to be able to
skip a step: in a jitted, donated Adam step.
"""

from functools import partial
from typing import Any

import jax
import optax

import optaxclip

from . import models, steps, timing
from .report import Table

# Each clipper, and the fixed one of the same scope that it is compared with.
CLIPPERS = {
    "clip_by_global_norm": (optaxclip.clip_by_global_norm, None),
    "zclip": (lambda limit: optaxclip.zclip(cap=limit), "clip_by_global_norm"),
    "autoclip": (lambda limit: optaxclip.autoclip(), "clip_by_global_norm"),
    "windowed_mean": (
        lambda limit: optaxclip.clip_by_global_norm(optaxclip.rules.windowed_mean()),
        "clip_by_global_norm",
    ),
    "clip_by_tensor_norm": (optaxclip.clip_by_tensor_norm, None),
    "adagc": (lambda limit: optaxclip.adagc(max_norm=limit), "clip_by_tensor_norm"),
    "zclip of tensors": (
        lambda limit: optaxclip.zclip(scope="tensor"),
        "clip_by_tensor_norm",
    ),
    "autoclip of tensors, window 1000": (
        lambda limit: optaxclip.autoclip(window=1000, scope="tensor"),
        "clip_by_tensor_norm",
    ),
}
SKIPS = {
    "skip_nonfinite": optaxclip.skip_nonfinite,
    "skip_spikes(z_score())": partial(
        optaxclip.skip_spikes, rule=optaxclip.rules.z_score()
    ),
    "optax.apply_if_finite": partial(optax.apply_if_finite, max_consecutive_errors=10),
}


def table(quick: bool) -> Table:
    """Adam with each clipper that learns, and inside each wrapper that skips."""
    tree = models.gpt2(quick)
    adam = optax.adam(1e-3)
    entrants = steps.field(adam, CLIPPERS, tree)
    skips = {
        name: steps.compile_step(optax.identity(), wrap(adam), tree, tree)
        for name, wrap in SKIPS.items()
    }
    contestants = {
        key: run for key, run in entrants.contestants.items() if key[1] == "active"
    }
    for name, program in skips.items():
        contestants[name, "active"] = steps.alone(
            program, SKIPS[name](adam), tree, tree
        )
    seconds = timing.race(contestants, 2 if quick else 7)
    programs = entrants.programs | skips
    fixed = {name: counterpart for name, (_, counterpart) in CLIPPERS.items()}
    return Table(
        f"a jitted, donated Adam step, {len(jax.tree.leaves(tree))} leaves, float32: "
        "limits that learn, and steps that may be skipped",
        (
            "clipper or wrapper",
            "time",
            "time over the fixed one",
            "temporary memory",
            "compile",
        ),
        [
            _row(name, seconds, programs, fixed.get(name), models.size_in_bytes(tree))
            for name in programs
        ],
        "Time: against Adam alone, then against the fixed limit of the same scope. "
        "Temporary memory: share of the gradients' bytes. Compile: against Adam alone.",
    )


def _row(
    name: str,
    seconds: Any,
    programs: dict[str, timing.Program],
    fixed: str | None,
    grad_bytes: int,
) -> dict[str, Any]:
    own = seconds[name, "active"]
    return {
        "clipper or wrapper": name,
        "time": timing.ratio(own, seconds["none", "active"]),
        "time over the fixed one": timing.ratio(own, seconds[fixed, "active"])
        if fixed
        else None,
        "temporary memory": programs[name].temporary / grad_bytes,
        "compile": programs[name].seconds / programs["none"].seconds,
        "step_seconds": own,
    }
