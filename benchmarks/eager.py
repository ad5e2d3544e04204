"""Clipping without jit, as in a notebook or a loop under `optax.inject_hyperparams`,
and whether later steps compile anything.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import optax

import optaxclip

from . import models, timing
from .report import Table

COMPILED = "/jax/core/compile/backend_compile_duration"
LIMITS = optax.linear_schedule(1.0, 0.5, 100)
CLIPPERS = {
    "optaxclip": lambda: optaxclip.clip_by_global_norm(1.0),
    "optax": lambda: optax.clip_by_global_norm(1.0),
    "optaxclip, inject_hyperparams": lambda: optax.inject_hyperparams(
        optaxclip.clip_by_global_norm
    )(max_norm=LIMITS),
    "optax, inject_hyperparams": lambda: optax.inject_hyperparams(
        optax.clip_by_global_norm
    )(max_norm=LIMITS),
}


def table(quick: bool) -> Table:
    """`update` of each clipper, called eagerly, against optaxclip's inside one jit."""
    grads = models.normal(models.gpt2(quick))
    updates = {name: _updater(make(), grads) for name, make in CLIPPERS.items()}
    counts = {name: _compilations(update) for name, update in updates.items()}
    updates["optaxclip, jitted"] = _updater(
        optaxclip.clip_by_global_norm(1.0), grads, jax.jit
    )
    seconds = timing.race(
        {name: timing.Contestant(update) for name, update in updates.items()},
        2 if quick else 7,
    )
    return Table(
        f"clip_by_global_norm without jit, {len(jax.tree.leaves(grads))} leaves",
        ("clipper", "time", "compilations in the 2nd call", "in the 3rd"),
        [
            _row(name, times, seconds["optaxclip, jitted"], counts.get(name))
            for name, times in seconds.items()
        ],
        "Time: against the same clipper inside one jit. Under inject_hyperparams the "
        "limit follows a schedule and changes in each call.",
    )


def _row(
    name: str, times: list[float], base: list[float], counts: list[int] | None
) -> dict[str, Any]:
    second, third = counts or (None, None)
    return {
        "clipper": name,
        "time": timing.ratio(times, base),
        "compilations in the 2nd call": second,
        "in the 3rd": third,
        "update_seconds": times,
    }


def _updater(
    clipper: Any, grads: Any, wrap: Callable[[Any], Any] = lambda update: update
) -> Callable[[], Any]:
    kept = {"state": clipper.init(grads)}
    update = wrap(clipper.update)

    def run() -> Any:
        updates, kept["state"] = update(grads, kept["state"])
        return updates, kept["state"]

    return run


def _compilations(update: Callable[[], Any]) -> list[int]:
    """How much is compiled in the second and third call."""
    jax.block_until_ready(update())
    counts = []
    with _listening() as compiled:
        for _ in range(2):
            compiled.clear()
            jax.block_until_ready(update())
            counts.append(len(compiled))
    return counts


@contextmanager
def _listening() -> Iterator[list[float]]:
    compiled: list[float] = []

    def hear(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)
