"""Functions from parameters and a batch to the mean gradient with each example clipped:
ours, optax's and, where it is installed, jax_privacy's.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optaxclip.per_example import clipped_grad, explain_clipped_grad

from .losses import Case, Params

Batch = tuple[jax.Array, ...]
Gradient = Callable[[Params, Batch], Params]  # (params, batch) -> gradient

PLAIN = "not clipped"
PLAIN_IN_TORCH = "torch, not clipped"
OPTAX = "optax, all at once"
MICROBATCH = 8  # examples at once, in methods that make their gradients


def of_jax(case: Case) -> dict[str, Gradient]:
    """All methods for one model. The gradient of the mean, which clips nothing, is the
    first, and what "auto" chooses is the second.
    """
    width = min(MICROBATCH, case.size // 2)
    gradients = {
        PLAIN: plain(case),
        chosen(case): ours(case, "auto"),
        named("ghost", None): ours(case, "ghost"),
        named("one_pass", width): ours(case, "one_pass", width),
        OPTAX: partial(_with_optax, case),
    }
    if not missing("jax_privacy"):
        clipping = import_module("jax_privacy.clipping")
        for size in (None, width):
            gradients[f"jax_privacy, {_at_once(size)}"] = clipping.clipped_grad(
                lambda params, batch: case.loss(params, *batch),
                l2_clip_norm=case.limit,
                keep_batch_dim=False,
                normalize_by=float(case.size),
                microbatch_size=size,
            )
    return gradients


def plain(case: Case) -> Gradient:
    """The gradient of the mean loss."""

    def mean(params: Params, batch: Batch) -> jax.Array:
        return jnp.mean(jax.vmap(partial(case.loss, params))(*batch))

    return jax.grad(mean)


def ours(case: Case, method: str, microbatch: int | None = None) -> Gradient:
    """The gradient by `clipped_grad`."""
    clipped = clipped_grad(case.loss, case.limit, method=method, microbatch=microbatch)
    return lambda params, batch: clipped(params, *batch).grads


def named(method: str, microbatch: int | None) -> str:
    """The name of one of our methods in the tables."""
    size = "" if microbatch is None else f", {_at_once(microbatch)}"
    return f"optaxclip, {method.replace('_', ' ')}{size}"


def chosen(case: Case) -> str:
    """The name of the method that "auto" chooses."""
    choice = explain_clipped_grad(case.loss)(case.params, *case.batch)
    return named(choice.method, choice.microbatch)


def auto(case: Case) -> str:
    """The name of "auto", with what it chooses."""
    return f"optaxclip, auto: {chosen(case).removeprefix('optaxclip, ')}"


def missing(*packages: str) -> list[str]:
    """Those that are not installed."""
    return [name for name in packages if find_spec(name) is None]


def as_in_torch(name: str, x: ArrayLike) -> np.ndarray:
    """A parameter, or a gradient by it, in the layout of PyTorch."""
    x = np.array(x)
    if name in ("words.weight", "places.weight"):
        return x
    return x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T


def _at_once(size: int | None) -> str:
    return "all at once" if size is None else f"{size} at once"


def _with_optax(case: Case, params: Params, batch: Batch) -> Params:
    grads = jax.vmap(partial(jax.grad(case.loss), params))(*batch)
    total, _ = optax.per_example_global_norm_clip(grads, case.limit)
    return jax.tree.map(lambda leaf: leaf / case.size, total)
