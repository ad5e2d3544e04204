"""The table: which training steps are compiled for which devices, and what they become
there.
"""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax

from ..networks import COMPILED, SCANNED, SMALL, UNROLLED, decoder_of_128_tensors
from ..report import Table
from ..steps import GLOBAL, STEPS, whole_step
from . import processes, program, targets

Shapes = list[tuple[int, ...]]

# Without forward and backward pass: what is left are clip and Adam of many tensors.
GIVEN = "128 tensors, given gradients"

# A step takes XLA 10 seconds for an H100, and a minute or more for a TPU.
CASES = [
    ("h100", SMALL),
    ("h100", UNROLLED),
    ("h100", SCANNED),
    ("v5e", SCANNED),
    ("v5e:4x4", SCANNED),
    ("v5e:4x4", GIVEN),
]
COLUMNS = (
    "device",
    "model",
    "clipped by",
    "arguments",
    "kernels",
    "scalars",
    "GB",
    "collectives",
    "temporary MB",
    "compile",
)


def table(quick: bool) -> Table:
    """One row for each step on each target."""
    names = ["none", "global norm", GLOBAL] if quick else list(STEPS)
    cases = []
    for target, model in CASES:
        chosen_model = "toy" if quick else model
        cases.append((target, [(name, chosen_model, target) for name in names]))
    title = "whole training steps of a decoder on GPUs and TPUs, compiled"
    note = "Compiled for devices that are only described: nothing ran."
    return processes.table(__name__, cases, title, COLUMNS, note)


def row(name: str, model: str, target: str) -> dict[str, Any]:
    """What one step becomes on one target."""
    optimizer = STEPS[name]()
    if model == GIVEN:
        place = targets.placement(target, splits_vectors=True)
        params = described(arrays_of(decoder_of_128_tensors(), "float32"), place)
        batch = (params,)
        step = step_by_gradients(optimizer)
    else:
        network = COMPILED[model]
        place = targets.placement(target, is_stacked=True)
        params = described(network.params, place)
        batch = network.draw(np.random.default_rng(0))
        batch = described(batch, targets.placement_of_batch(target))
        step = whole_step(network.loss, optimizer)
    state = described(jax.eval_shape(optimizer.init, params), place)
    compiled_step, seconds = compiled_for(
        target, step, params, state, *batch, donate=(0, 1)
    )
    counts = program.counts_of(compiled_step.as_text())
    memory = compiled_step.memory_analysis()
    return {
        "device": target,
        "model": model,
        "clipped by": name,
        "arguments": len(jax.tree.leaves((params, state, batch))),
        "kernels": counts.kernels,
        "scalars": counts.scalars,
        "GB": round(counts.gigabytes, 3),
        "collectives": counts.collectives,
        "temporary MB": round(memory.temp_size_in_bytes / 1e6, 1),
        "compile": round(seconds, 1),
        "float64": counts.float64,
        "copies": counts.copies,
        "state": len(jax.tree.leaves(state)),
    }


def compiled(
    transformation: optax.GradientTransformation,
    shapes: Shapes,
    target: str,
    dtype: str,
) -> tuple[Any, float]:
    """Compiles the update by given gradients of a dtype: (the program, processor
    seconds).
    """
    place = targets.placement(target)
    params = described(arrays_of(shapes, "float32"), place)
    grads = described(arrays_of(shapes, dtype), place)
    state = described(jax.eval_shape(transformation.init, params), place)
    step = step_by_gradients(transformation)
    return compiled_for(target, step, params, state, grads, donate=(0, 1))


def arrays_of(shapes: Shapes, dtype: str) -> list[jax.ShapeDtypeStruct]:
    """Descriptions of arrays."""
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def step_by_gradients(
    transformation: optax.GradientTransformation,
) -> Callable[..., Any]:
    """(weights, state, gradients) becomes (weights, state)."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def compiled_for(
    target: str,
    function: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
) -> tuple[Any, float]:
    """Compiles a function of described arrays: (the program, processor seconds)."""
    jax.clear_caches()
    platform = targets.environment_of(target).platform
    start = time.process_time()
    # `clipped_grad` asks for the backend. It is told the target's.
    with mock.patch("jax.default_backend", lambda: platform):
        traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
    # Named, since JAX looks for the platform of a GPU among devices that are there.
    lowered = traced.lower(lowering_platforms=(platform,))
    return lowered.compile(), time.process_time() - start


def described(tree: Any, place: targets.Place) -> Any:
    """Shapes, dtypes and places of arrays, or of descriptions of arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x.shape)), tree
    )
