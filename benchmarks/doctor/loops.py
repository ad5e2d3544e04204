"""How a training is run, and the rows of its log."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

import optaxclip

STEPS = 300
BREAK_STEP = 180  # the step at which most faults begin

Rows = list[dict[str, float]]
PyTree = Any
Params = dict[str, Any]


class Problem(NamedTuple):
    """A model, and the batches that it is trained on."""

    loss: Callable[..., Array]  # (params, *batch) -> float32[]
    params: Params
    batches: tuple[np.ndarray, ...]  # [STEPS, ...] each


def recorded(core: Any, embeddings: str | tuple[()] = ()) -> Any:
    """An optimizer between two recorders, as docs/doctor.md has it."""
    record = optaxclip.record_health
    return optax.named_chain(
        ("gradients", record(embeddings=embeddings, patience=20, weights=False)),
        ("core", core),
        ("updates", record(values=False)),
    )


def rows_of(step: Callable[..., Any], carry: PyTree, inputs: PyTree) -> Rows:
    """The rows of a step that returns what it logs."""

    @jax.jit
    def columns_of(carry, inputs):
        _, columns = lax.scan(step, carry, inputs)
        return columns

    columns = jax.device_get(columns_of(carry, inputs))
    rows: Rows = [{"step": row} for row in range(STEPS)]
    for name, values in columns.items():
        for row, value in zip(rows, values):
            row[name] = float(value)
    return rows


def train(
    problem: Problem,
    core: Any,
    *,
    scale: np.ndarray | float = 1.0,
    embeddings: str | tuple[()] = (),
    logged: Callable[..., dict[str, Array]] | None = None,
) -> Rows:
    """A plain loop. `scale` [STEPS] is what gradients are multiplied by, and `logged`
    adds columns.
    """
    optimizer = recorded(core, embeddings)
    params = jax.tree.map(jnp.asarray, problem.params)

    def step(carry, inputs):
        params, state = carry
        batch, factor = inputs
        value, grads = jax.value_and_grad(problem.loss)(params, *batch)
        grads = jax.tree.map(lambda x: x * factor.astype(x.dtype), grads)
        updates, state = optimizer.update(grads, state, params)
        row = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        row |= optaxclip.metrics(state)
        if logged is not None:
            row |= logged(params, *batch)
        return (optax.apply_updates(params, updates), state), row

    factors = np.broadcast_to(float32(scale), STEPS)
    inputs = problem.batches, factors
    return rows_of(step, (params, optimizer.init(params)), inputs)


def clipped(problem: Problem, limit: float, core: Any) -> Rows:
    return train(problem, optax.chain(optaxclip.clip_by_global_norm(limit), core))


def in_dtype(problem: Problem, dtype: Any) -> Problem:
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), problem.params)
    return problem._replace(params=params)


def in_bfloat16(problem: Problem, rate: float) -> Rows:
    return train(in_dtype(problem, jnp.bfloat16), optax.adam(rate))


def loss_and_norm(rows: Rows) -> Rows:
    shortened: Rows = []
    for row in rows:
        norm = row["grad_norm"]
        shortened.append({"step": row["step"], "loss": row["loss"], "grad_norm": norm})
    return shortened


def float32(numbers: Any) -> np.ndarray:
    return np.asarray(numbers, np.float32)


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def from_step(before: float, after: float, at: int = BREAK_STEP) -> np.ndarray:
    """[STEPS]: one number before a step, and another one from it on."""
    return float32(np.where(np.arange(STEPS) < at, before, after))


def schedule(rates: np.ndarray) -> optax.Schedule:
    """The rate of each step."""
    return lambda count: jnp.asarray(rates, jnp.float32)[count]


def entries(values: Any, columns: Any) -> Array:
    """[rows]: of each row the entry in one column."""
    return jnp.take_along_axis(values, columns[:, None], 1)[:, 0]
