"""A whole optimizer step, jitted and donated, with and without a clipper: what a user
pays.

The clippers all work on the same weights, optimizer state and gradients: each step
donates these arrays and hands them on to the next contestant. So all contestants of 124
M parameters together fit in 2.5 GB. Only its own small state belongs to a clipper. The
gradients are returned as they came, so the next contestant sees the same ones. There
are two of them, one long and one short, so that the same program is timed while it
clips and while it does not.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optaxclip

from . import models, timing
from .report import Table

LIMIT = 0.01
GRADS = {
    "active": 1.0,
    "inactive": 1e-9,
    # sizes of the numbers in the gradients: every norm is far above the limit, or far
    # below
}

# Each clipper, by the name that tables show, and the one of optax it is compared with.
# clip_by_tensor_norm has none: the nearest also measures each leaf.
GLOBAL = {
    "optaxclip.clip_by_global_norm": (
        optaxclip.clip_by_global_norm,
        "optax.clip_by_global_norm",
    ),
    "optax.clip_by_global_norm": (
        optax.clip_by_global_norm,
        "optax.clip_by_global_norm",
    ),
}
OTHERS = {
    "optaxclip.clip_by_tensor_norm": (
        optaxclip.clip_by_tensor_norm,
        "optax.clip_by_block_rms",
    ),
    "optaxclip.clip_by_tensor_rms": (
        optaxclip.clip_by_tensor_rms,
        "optax.clip_by_block_rms",
    ),
    "optax.clip_by_block_rms": (optax.clip_by_block_rms, "optax.clip_by_block_rms"),
    "optaxclip.adaptive_grad_clip": (
        optaxclip.adaptive_grad_clip,
        "optax.adaptive_grad_clip",
    ),
    "optax.adaptive_grad_clip": (optax.adaptive_grad_clip, "optax.adaptive_grad_clip"),
}
OPTIMIZERS = {
    "Adam": (optax.adam(1e-3), GLOBAL | OTHERS),
    "SGD": (optax.sgd(1e-3), GLOBAL),
    "momentum": (optax.sgd(1e-3, momentum=0.9), GLOBAL),
    "AdamW": (optax.adamw(1e-3), GLOBAL),
}


class Field(NamedTuple):
    """The contestants of one optimizer: without a clipper, named "none", and with
    each.
    """

    contestants: dict[
        tuple[str, str], timing.Contestant
    ]  # by clipper and by which of the two gradients
    programs: dict[str, timing.Program]  # by clipper


def step(quick: bool) -> Table:
    """Each clipper with Adam, and the global norm with other optimizers, in float32."""
    tree = models.gpt2(quick)
    rows = []
    for name in ["Adam"] if quick else OPTIMIZERS:
        rows += [
            {"optimizer": name} | row for row in _rows(*OPTIMIZERS[name], tree, quick)
        ]
    return Table(
        f"a jitted, donated optimizer step, {_described(tree)}, float32",
        (
            "optimizer",
            "clipper",
            "time, clipping",
            "time, not clipping",
            "temporary memory",
            "compile",
        ),
        rows,
        "Time: against the optimizer alone. Temporary memory: share of the gradients' "
        "bytes. Compile: tracing and compiling the step once, against optax's"
        " counterpart (for clip_by_tensor_norm the nearest, clip_by_block_rms).",
    )


def bfloat16(quick: bool) -> Table:
    """The global norm with Adam where gradients have 16 bits and weights 32."""
    tree = models.gpt2(quick)
    return Table(
        f"a jitted, donated Adam step, {_described(tree)}, bfloat16 gradients and "
        "float32 weights",
        ("clipper", "time, clipping", "time, not clipping", "temporary memory"),
        _rows(optax.adam(1e-3), GLOBAL, tree, quick, jnp.bfloat16),
        "Time: against Adam alone. Temporary memory: share of the gradients' bytes, "
        "which are half of the weights'.",
    )


def field(
    optimizer: Any, clippers: dict[str, Any], tree: Any, dtype: Any = jnp.float32
) -> Field:
    """Compiles the step without a clipper and with each, and gives all of them the same
    arrays.
    """
    grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)
    transforms = {"none": optax.identity()} | {
        name: factory(LIMIT) for name, (factory, _) in clippers.items()
    }
    compile_step(
        optax.identity(), optimizer, tree, grads
    )  # the first compilation of a process also pays for what is loaded once
    programs = {
        name: compile_step(clipper, optimizer, tree, grads)
        for name, clipper in transforms.items()
    }
    live = {"params": models.normal(tree, 0.02)} | {
        size: models.normal(grads, scale) for size, scale in GRADS.items()
    }
    live["optimizer"] = optimizer.init(live["params"])
    contestants = {
        (name, size): timing.Contestant(
            _stepper(programs[name].call, clipper.init(live["params"]), live, size)
        )
        for name, clipper in transforms.items()
        for size in GRADS
    }
    return Field(contestants, programs)


def compile_step(
    clipper: Any, optimizer: Any, params: Any, grads: Any
) -> timing.Program:
    """The step from weights, state and gradients to new weights, state and the same
    gradients, with all of them donated.
    """
    transform = optax.chain(clipper, optimizer)

    def one_step(params: Any, state: Any, grads: Any) -> tuple[Any, Any, Any]:
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    return timing.compiled(
        one_step,
        params,
        jax.eval_shape(transform.init, params),
        grads,
        donate=(0, 1, 2),
    )


def alone(
    program: timing.Program, optimizer: Any, tree: Any, grads: Any
) -> timing.Contestant:
    """A contestant with weights and an optimizer state of its own, for an optimizer
    whose state no other can use.
    """
    params = models.normal(tree, 0.02)
    live = {
        "params": params,
        "optimizer": optimizer.init(params),
        "active": models.normal(grads, GRADS["active"]),
    }
    return timing.Contestant(
        _stepper(program.call, optax.identity().init(params), live, "active")
    )


def _stepper(
    call: Callable[..., Any], clip_state: Any, live: dict[str, Any], size: str
) -> Callable[[], Any]:
    own = {"clip": clip_state}

    def run() -> Any:
        params, (own["clip"], inner), grads = call(
            live["params"], (own["clip"], live["optimizer"]), live[size]
        )
        live.update({"params": params, "optimizer": inner, size: grads})
        return live

    return run


def _rows(
    optimizer: Any,
    clippers: dict[str, Any],
    tree: Any,
    quick: bool,
    dtype: Any = jnp.float32,
) -> list[dict[str, Any]]:
    entrants = field(optimizer, clippers, tree, dtype)
    seconds = timing.race(entrants.contestants, 2 if quick else 7)
    grad_bytes = models.size_in_bytes(tree) * jnp.dtype(dtype).itemsize // 4
    counterparts = {"none": None} | {
        name: counterpart for name, (_, counterpart) in clippers.items()
    }
    return [
        _row(seconds, entrants.programs, grad_bytes, name, counterpart)
        for name, counterpart in counterparts.items()
    ]


def _row(
    seconds: Any,
    programs: dict[str, timing.Program],
    grad_bytes: int,
    name: str,
    counterpart: str | None,
) -> dict[str, Any]:
    program = programs[name]
    return {
        "clipper": name,
        "time, clipping": timing.ratio(
            seconds[name, "active"], seconds["none", "active"]
        ),
        "time, not clipping": timing.ratio(
            seconds[name, "inactive"], seconds["none", "inactive"]
        ),
        "temporary memory": program.temporary / grad_bytes,
        "compile": program.seconds / programs[counterpart].seconds
        if counterpart
        else None,
        "counterpart": counterpart,
        "step_seconds": {size: seconds[name, size] for size in GRADS},
        "compile_seconds": program.seconds,
        "temporary_bytes": program.temporary,
    }


def _described(tree: Any) -> str:
    leaves, millions = len(jax.tree.leaves(tree)), models.size_in_bytes(tree) / 4e6
    return f"{leaves} leaves, {millions:.3g} M parameters"
