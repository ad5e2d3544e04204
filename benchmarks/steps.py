"""The training steps that are compared: Adam alone, and with each clip of both
libraries.
"""

from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import jax
import optax

import optaxclip

from . import timing

Make = Callable[[], optax.GradientTransformation]

GLOBAL = "optax, global norm"


def _before_adam(clipper: optax.GradientTransformation) -> Make:
    return lambda: optax.chain(clipper, optax.adam(1e-3))


def _after_adam(clipper: optax.GradientTransformation) -> Make:
    return lambda: optax.chain(optax.adam(1e-3), clipper)


# A name with "optax" in front is that library's counterpart of the name behind it.
STEPS: dict[str, Make] = {
    "none": lambda: optax.adam(1e-3),
    "global norm": _before_adam(optaxclip.clip_by_global_norm(1.0)),
    GLOBAL: _before_adam(optax.clip_by_global_norm(1.0)),
    "tensor norm": _before_adam(optaxclip.clip_by_tensor_norm(0.1)),
    "tensor RMS": _before_adam(optaxclip.clip_by_tensor_rms(1.0)),
    "optax, tensor RMS": _before_adam(optax.clip_by_block_rms(1.0)),
    "AGC": _before_adam(optaxclip.adaptive_grad_clip(0.01)),
    "optax, AGC": _before_adam(optax.adaptive_grad_clip(0.01)),
    "by value": _before_adam(optaxclip.clip_by_value(0.01)),
    "optax, by value": _before_adam(optax.clip(0.01)),
    "skip": lambda: optaxclip.skip_nonfinite(optax.adam(1e-3), 5),
    "optax, skip": lambda: optax.apply_if_finite(optax.adam(1e-3), 5),
    "zclip": _before_adam(optaxclip.zclip()),
    "tensor RMS, after Adam": _after_adam(optaxclip.clip_by_tensor_rms(1.0)),
    "optax, tensor RMS, after Adam": _after_adam(optax.clip_by_block_rms(1.0)),
}
# The nearest that optax has.
NEAREST = {"zclip": GLOBAL, "tensor norm": "optax, tensor RMS"}


def counterpart(name: str) -> str | None:
    """The step of optax that one of ours is compared with."""
    name_in_optax = NEAREST.get(name, f"optax, {name}")
    return name_in_optax if name_in_optax in STEPS else None


def whole_step(
    loss: Callable[..., jax.Array], optimizer: optax.GradientTransformation
) -> Callable[..., Any]:
    """Forward, backward, clip, Adam: (weights, state, *batch) becomes (weights, state,
    loss).
    """

    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def raced(
    programs: dict[str, timing.Program],
    contestants: dict[str, timing.Contestant],
    rounds: int,
) -> list[dict[str, Any]]:
    """Runs all steps in turns. Returns a row for each: its time over that of no clip,
    the middle half of that ratio's rounds, its time over that of optax's global norm,
    temporary memory, and the seconds to compile over those of optax's counterpart.
    """
    seconds = timing.race(contestants, rounds)
    rows = []
    for name, program in programs.items():
        ratios = timing.ratios(seconds[name], seconds["none"])
        lower, middle, upper = quantiles(ratios, n=4, method="inclusive")
        other = counterpart(name)
        compile_ratio = None
        if other in programs:
            compile_ratio = program.seconds / programs[other].seconds
        rows.append(
            {
                "clipped by": name,
                "time": middle,
                "middle half": f"{lower:.2f} to {upper:.2f}",
                "over optax's": median(timing.ratios(seconds[name], seconds[GLOBAL])),
                "temporary MB": program.temporary / 1e6,
                "compile": compile_ratio,
                "step_seconds": seconds[name],
                "compile_seconds": program.seconds,
            }
        )
    return rows
