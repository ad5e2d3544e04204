"""A whole optimizer step, jitted and donated, with and without a clipper: what a user pays.

The clippers all work on the same weights, optimizer state and gradients: each step donates these arrays and hands them on to the next contestant. So 15 contestants of 124 M
parameters fit in 2 GB, and only a clipper's own small state is its own. The gradients are returned as they came, so the next contestant sees the same ones.
"""

from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optaxclip

from . import models, timing
from .report import Table

LIMITS = {"active": 0.01, "inactive": 1e6}  # every norm measured here lies far between them

# Each clipper, by the name that tables show, and the one of optax it is compared with. clip_by_tensor_norm has none: the nearest also measures each leaf.
GLOBAL = {
    "optaxclip.clip_by_global_norm": (optaxclip.clip_by_global_norm, "optax.clip_by_global_norm"),
    "optax.clip_by_global_norm": (optax.clip_by_global_norm, "optax.clip_by_global_norm"),
}
OTHERS = {
    "optaxclip.clip_by_tensor_norm": (optaxclip.clip_by_tensor_norm, "optax.clip_by_block_rms"),
    "optaxclip.clip_by_tensor_rms": (optaxclip.clip_by_tensor_rms, "optax.clip_by_block_rms"),
    "optax.clip_by_block_rms": (optax.clip_by_block_rms, "optax.clip_by_block_rms"),
    "optaxclip.adaptive_grad_clip": (optaxclip.adaptive_grad_clip, "optax.adaptive_grad_clip"),
    "optax.adaptive_grad_clip": (optax.adaptive_grad_clip, "optax.adaptive_grad_clip"),
}
OPTIMIZERS = {
    "Adam": (optax.adam(1e-3), GLOBAL | OTHERS),
    "SGD": (optax.sgd(1e-3), GLOBAL),
    "momentum": (optax.sgd(1e-3, momentum=0.9), GLOBAL),
    "AdamW": (optax.adamw(1e-3), GLOBAL),
}


class Field(NamedTuple):
    """The contestants of one optimizer, by clipper and limit: ("none", ""), ("optax.clip_by_global_norm", "active")."""

    contestants: dict[tuple[str, str], timing.Contestant]
    programs: dict[tuple[str, str], timing.Program]


def step(quick: bool) -> Table:
    """Each clipper with Adam, and the global norm with other optimizers, in float32."""
    tree = models.gpt2(quick)
    rows = []
    for name in ["Adam", "SGD"] if quick else OPTIMIZERS:
        rows += [{"optimizer": name} | row for row in _rows(*OPTIMIZERS[name], tree, quick)]
    return Table(
        f"a jitted, donated optimizer step, {_described(tree)}, float32",
        ("optimizer", "clipper", "time, clipping", "time, not clipping", "temporary memory", "compile"),
        rows,
        "Time: against the optimizer alone. Temporary memory: share of the gradients' bytes. Compile: tracing and compiling the step, against optax's counterpart"
        " (for clip_by_tensor_norm the nearest, clip_by_block_rms).",
    )


def bfloat16(quick: bool) -> Table:
    """The global norm with Adam where gradients have 16 bits and weights 32."""
    tree = models.gpt2(quick)
    return Table(
        f"a jitted, donated Adam step, {_described(tree)}, bfloat16 gradients and float32 weights",
        ("clipper", "time, clipping", "time, not clipping", "temporary memory"),
        _rows(optax.adam(1e-3), GLOBAL, tree, quick, jnp.bfloat16),
        "Time: against Adam alone. Temporary memory: share of the gradients' bytes, which are half of the weights'.",
    )


def field(optimizer: Any, clippers: dict[str, Any], tree: Any, *, limits: Iterable[str] = LIMITS, dtype: Any = jnp.float32) -> Field:
    """Compiles the step without a clipper and with each clipper at each limit, and gives all of them the same arrays."""
    grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)
    transforms = {("none", ""): optax.identity()}
    transforms |= {(name, limit): factory(LIMITS[limit]) for name, (factory, _) in clippers.items() for limit in limits}
    compile_step(optax.identity(), optimizer, tree, grads)  # the first compilation of a process also pays for what is loaded once
    programs = {key: compile_step(clipper, optimizer, tree, grads) for key, clipper in transforms.items()}
    live = {"params": models.normal(tree, 0.02), "grads": models.normal(grads)}
    live["optimizer"] = optimizer.init(live["params"])
    runs = {key: timing.Contestant(_stepper(programs[key].call, clipper.init(live["params"]), live)) for key, clipper in transforms.items()}
    return Field(runs, programs)


def compile_step(clipper: Any, optimizer: Any, params: Any, grads: Any) -> timing.Program:
    """The step from weights, state and gradients to new weights, state and the same gradients, with all of them donated."""
    transform = optax.chain(clipper, optimizer)

    def one_step(params: Any, state: Any, grads: Any) -> tuple[Any, Any, Any]:
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    return timing.compiled(one_step, params, jax.eval_shape(transform.init, params), grads, donate=(0, 1, 2))


def _stepper(call: Callable[..., Any], clip_state: Any, live: dict[str, Any]) -> Callable[[], Any]:
    own = {"clip": clip_state}

    def run() -> Any:
        params, (own["clip"], inner), grads = call(live["params"], (own["clip"], live["optimizer"]), live["grads"])
        live.update(params=params, optimizer=inner, grads=grads)
        return live

    return run


def _rows(optimizer: Any, clippers: dict[str, Any], tree: Any, quick: bool, dtype: Any = jnp.float32) -> list[dict[str, Any]]:
    entrants = field(optimizer, clippers, tree, limits=["active"] if quick else LIMITS, dtype=dtype)
    seconds = timing.race(entrants.contestants, 2 if quick else 7)
    grad_bytes = models.size_in_bytes(tree) * jnp.dtype(dtype).itemsize // 4
    row = partial(_row, seconds, entrants.programs, grad_bytes)
    return [row("none", None), *(row(name, counterpart) for name, (_, counterpart) in clippers.items())]


def _row(seconds: Any, programs: Any, grad_bytes: int, name: str, counterpart: str | None) -> dict[str, Any]:
    keys = {limit: (name, limit if counterpart else "") for limit in LIMITS}
    keys = {limit: key for limit, key in keys.items() if key in programs}
    ratios = {limit: timing.ratio(seconds[key], seconds["none", ""]) for limit, key in keys.items()}
    return {
        "clipper": name,
        "time, clipping": ratios.get("active"),
        "time, not clipping": ratios.get("inactive"),
        "temporary memory": max(programs[key].temporary for key in keys.values()) / grad_bytes,
        "compile": _compile_seconds(programs, name) / _compile_seconds(programs, counterpart) if counterpart else None,
        "counterpart": counterpart,
        "step_seconds": {limit: seconds[key] for limit, key in keys.items()},
        "compile_seconds": {limit: programs[key].seconds for limit, key in keys.items()},
        "temporary_bytes": {limit: programs[key].temporary for limit, key in keys.items()},
    }


def _compile_seconds(programs: Any, name: str) -> float:
    return median(program.seconds for (clipper, _), program in programs.items() if clipper == name)


def _described(tree: Any) -> str:
    return f"{len(jax.tree.leaves(tree))} leaves, {models.size_in_bytes(tree) / 4e6:.3g} M parameters"
