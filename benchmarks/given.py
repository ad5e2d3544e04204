"""Adam on given gradients, with and without a clip: what is left of a training step
when its network is taken away, and most of it is memory traffic.

All steps work on the same weights, moments and gradients: each donates these arrays and
hands them on to the next. So all of them together fit in 2.5 GB. Only the state of its
clip belongs to a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import networks, steps, timing
from .report import Table

COLUMNS = ("clipped by", "time", "middle half", "temporary", "compile")
SHOWN = [
    "none",
    "global norm",
    steps.GLOBAL,
    "tensor norm",
    "optax, tensor RMS",
    "AGC",
    "optax, AGC",
    "by value",
    "optax, by value",
]


@jax.tree_util.register_dataclass
@dataclass
class Arrays:
    """The arrays that all steps share, and that each hands on to the next."""

    params: list[jax.Array]
    adam: Any  # the state of Adam
    grads: list[jax.Array]


def table(quick: bool) -> Table:
    """GPT-2 small. The quick one has two matrices and a few clips."""
    shapes = [(128, 32)] * 2 if quick else networks.gpt2_small()
    params = _filled(shapes, 0.02)
    adam = optax.adam(1e-3).init(params)
    arrays = Arrays(params, adam, grads=_filled(shapes, 1.0))
    functions = {}
    contestants = {}
    for name in SHOWN[:3] if quick else SHOWN:
        optimizer = steps.STEPS[name]()
        if name == "none":  # with a state in two parts, like the others
            optimizer = optax.chain(optax.identity(), optimizer)
        state: Any = optimizer.init(params)
        functions[name] = _step(optimizer), params, state, arrays.grads
    programs = timing.compiled_in_turns(functions, donate=(0, 1, 2))
    for name, (_, _, (clip_state, _), _) in functions.items():
        training = Training(programs[name].call, clip_state, arrays)
        contestants[name] = timing.Contestant(training.step)
    rows = steps.raced(programs, contestants, 2 if quick else 31)
    size = sum(leaf.nbytes for leaf in arrays.grads)
    for row in rows:
        row["temporary"] = 1e6 * row["temporary MB"] / size
    title = f"Adam on given gradients, {len(shapes)} tensors, {size / 4e6:.3g} M"
    note = (
        "Time: against Adam alone, of gradients above every limit. Temporary memory: "
        "share of the gradients' bytes. Compile: processor time, over that of optax's "
        "clip of the same kind, for the tensor norm of its RMS."
    )
    return Table(title, COLUMNS, rows, note)


def _filled(shapes: list[tuple[int, ...]], scale: float) -> list[jax.Array]:
    """Random normal numbers. A large array repeats a million of them, since drawing
    takes long.
    """
    block = scale * np.random.default_rng(0).standard_normal(10**6, np.float32)
    # A copy: JAX may share memory with NumPy, and what is shared cannot be donated.
    return [jnp.array(np.resize(block, shape), copy=True) for shape in shapes]


def _step(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    return step


class Training:
    """Steps with a clip, on the arrays that all steps share."""

    def __init__(
        self, call: Callable[..., Any], clip_state: Any, arrays: Arrays
    ) -> None:
        self.call = call
        # Copied: a state may hold one array twice, which cannot be donated.
        self.clip_state = jax.tree.map(jnp.copy, clip_state)
        self.arrays = arrays

    def step(self) -> Arrays:
        """Takes a step. Returns what has to be waited for."""
        arrays = self.arrays
        state = self.clip_state, arrays.adam
        arrays.params, state, arrays.grads = self.call(
            arrays.params, state, arrays.grads
        )
        self.clip_state, arrays.adam = state
        return arrays
