"""What it costs to clip each example's gradient: time and memory of a jitted gradient,
beside optax and, where it is installed, jax_privacy.
"""

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optaxclip.per_example import clipped_grad

from . import models, timing
from .report import Table

Gradient = Callable[[Any, Any], Any]  # (params, batch) -> gradient


def table(quick: bool) -> Table:
    """The mean gradient of a perceptron of three layers, each example clipped to norm
    1.
    """
    batch, microbatch, width = (8, 4, 16) if quick else (64, 8, 512)
    params = _params((784, width, width, 10))
    examples = (
        jax.random.normal(jax.random.key(1), (batch, 784)),
        jnp.arange(batch) % 10,
    )
    programs = {
        name: timing.compiled(gradient, params, examples)
        for name, gradient in _entrants(batch, microbatch).items()
    }
    contestants = {
        name: timing.Contestant(partial(program.call, params, examples))
        for name, program in programs.items()
    }
    seconds = timing.race(contestants, 2 if quick else 5)
    bytes_of_gradient = models.size_in_bytes(params)
    return Table(
        f"the gradient of a perceptron, {bytes_of_gradient // 4:,} parameters, "
        f"float32, {batch} examples, each clipped",
        ("gradient", "time", "temporary memory", "compile"),
        [_row(name, seconds, programs, bytes_of_gradient) for name in programs],
        "Time and compile: against the gradient of the mean, which clips nothing. "
        "Temporary memory: in gradients, of which all examples together have "
        f"{batch}.",
    )


def _entrants(batch: int, microbatch: int) -> dict[str, Gradient]:
    """The functions to compare: the gradient of the mean first."""
    methods = {"ghost": "ghost", "one pass": "one_pass", "two passes": "two_pass"}
    sizes: dict[str, int | None] = {
        "whole batch": None,
        f"microbatches of {microbatch}": microbatch,
    }
    entrants: dict[str, Gradient] = {
        "not clipped": jax.grad(
            lambda params, examples: jnp.mean(
                jax.vmap(_loss, (None, 0))(params, examples)
            )
        )
    }
    for size, width in sizes.items():
        for name, method in methods.items():
            gradient = clipped_grad(_loss, 1.0, microbatch=width, method=method)
            entrants[f"optaxclip, {name}, {size}"] = partial(_grads_only, gradient)
    entrants["optax, whole batch"] = partial(_with_optax, batch)
    clipping = _jax_privacy()
    if clipping is not None:
        for size, width in sizes.items():
            entrants[f"jax_privacy, {size}"] = clipping.clipped_grad(
                _loss,
                l2_clip_norm=1.0,
                keep_batch_dim=False,
                normalize_by=float(batch),
                microbatch_size=width,
            )
    return entrants


def _grads_only(gradient: Callable[..., Any], params: Any, examples: Any) -> Any:
    return gradient(params, examples).grads


def _with_optax(batch: int, params: Any, examples: Any) -> Any:
    total, _ = optax.per_example_global_norm_clip(
        jax.vmap(jax.grad(_loss), (None, 0))(params, examples), 1.0
    )
    return jax.tree.map(lambda leaf: leaf / batch, total)


def _jax_privacy() -> ModuleType | None:
    try:
        return importlib.import_module("jax_privacy.clipping")
    except ImportError:
        return None


def _params(sizes: tuple[int, ...]) -> Any:
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    return [
        {
            "w": jax.random.normal(key, (rows, columns)) / rows**0.5,
            "b": jnp.zeros(columns),
        }
        for key, rows, columns in zip(keys, sizes, sizes[1:])
    ]


def _loss(params: Any, example: Any) -> jax.Array:
    """The cross entropy of one example."""
    x, label = example
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return -jax.nn.log_softmax(x @ params[-1]["w"] + params[-1]["b"])[label]


def _row(
    name: str,
    seconds: dict[str, list[float]],
    programs: dict[str, timing.Program],
    bytes_of_gradient: int,
) -> dict[str, Any]:
    return {
        "gradient": name,
        "time": timing.ratio(seconds[name], seconds["not clipped"]),
        "temporary memory": programs[name].temporary / bytes_of_gradient,
        "compile": programs[name].seconds / programs["not clipped"].seconds,
        "step_seconds": seconds[name],
    }
