"""Which functions of a package ours stand in for, and which of its tests are run."""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import optaxclip
from optaxclip.dropin import jax_privacy as jax_privacy_style
from optaxclip.dropin import keras as keras_style
from optaxclip.dropin.tensorflow_style import clip_by_norm

Function = Callable[..., Any]


class Suite(NamedTuple):
    install: str  # what pip installs
    tests: tuple[str, ...]  # files and folders, as installed
    replaced: dict[str, Function]  # module:name of theirs -> ours
    beside: str  # what stands in for what, in words
    version: str = ""  # what is part of the version that is meant


def clip_pytree(
    pytree: Any,
    clip_norm: Any,
    rescale_to_unit_norm: bool = False,
    nan_safe: bool = True,
    return_zero: Any = False,
) -> tuple[Any, jax.Array]:
    """`jax_privacy.clipping.clip_pytree` with our clipper."""
    if nan_safe:
        pytree = jax.tree.map(_without_nonfinite, pytree)
    clipper = optaxclip.clip_by_global_norm(jnp.maximum(clip_norm, 0.0))
    clipped, state = clipper.update(pytree, clipper.init(pytree))
    if rescale_to_unit_norm:
        # Norm by limit, but 1 where the limit is 0, and 0 where it is inf.
        held = optaxclip.shrinks.hard(state.norm, state.limit) / state.limit
        unit = optaxclip.shrinks.normalize(state.norm, 1.0)
        new_norm = jnp.where(state.limit > 0, held, unit)
        clipped = optaxclip.rescale(pytree, state.norm, new_norm)
    keep = jnp.logical_not(return_zero)
    clipped = jax.tree.map(lambda x: jnp.where(keep, x, jnp.zeros_like(x)), clipped)
    return clipped, state.norm


def _without_nonfinite(x: jax.Array) -> jax.Array:
    return jnp.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def clip_gradient(x: Any, gradient_min: Any, gradient_max: Any) -> Any:
    """`rlax.clip_gradient`."""
    return optaxclip.clip_cotangent(x, max_value=gradient_max, min_value=gradient_min)


def clip_keras_gradients(optimizer: Any, grads: list[Any]) -> list[Any]:
    """`_clip_gradients` of a Keras optimizer. 0 and less are no limit there."""
    limits = {}
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        limit = getattr(optimizer, name)
        if limit is not None and limit > 0:
            limits[name] = limit
    clipper = keras_style.clip_gradients(**limits)
    clipped, _ = clipper.update(grads, clipper.init(grads))
    return jax.tree.leaves(clipped)


_KERAS = "keras.src.optimizers.base_optimizer"
_OPTAX = (
    optaxclip.adaptive_grad_clip,
    optaxclip.clip,
    optaxclip.clip_by_block_rms,
    optaxclip.clip_by_global_norm,
)
_CLIPPED_GRAD: dict[str, Function] = {
    "jax_privacy.clipping:clipped_grad": jax_privacy_style.clipped_grad
}

SUITES = {
    "optax": Suite(
        install="optax",
        beside="the four clippers of the same names",
        tests=(
            "optax/transforms/_clipping_test.py",
            "optax/transforms/_monitoring_test.py",
            "optax/schedules/_inject_test.py",
            "optax/_src/float64_test.py",
        ),
        replaced={f"optax:{ours.__name__}": ours for ours in _OPTAX},
    ),
    "jax_privacy": Suite(
        install="jax_privacy",
        beside=(
            "`clip_pytree`: `clip_by_global_norm` and `rescale`; `clipped_grad`: "
            "`dropin.jax_privacy.clipped_grad`, also in its Keras models"
        ),
        tests=(
            "tests/clipping_test.py",
            "tests/gradient_clipping_test.py",
            "tests/experimental/execution_plan_test.py",
            "tests/keras_api_test.py",
        ),
        replaced={"jax_privacy.clipping:clip_pytree": clip_pytree, **_CLIPPED_GRAD},
    ),
    "jax_privacy_main": Suite(
        install="jax_privacy",
        beside=(
            "`clipped_grad`: `dropin.jax_privacy.clipped_grad`, also in its trainer "
            "and Keras models. Installed from its repository at 8967688, with optax's "
            "at 2edbcbe2"
        ),
        tests=(
            "tests/clipping_test.py",
            "tests/gradient_clipping_test.py",
            "tests/execution_plan_test.py",
            "tests/training_test.py",
            "tests/keras_api_test.py",
        ),
        replaced=_CLIPPED_GRAD,
        version="dev",
    ),
    "keras": Suite(
        install="keras",
        beside="`_clip_gradients` of every optimizer: `dropin.keras.clip_gradients`",
        tests=("keras/src/optimizers",),
        replaced={f"{_KERAS}:BaseOptimizer._clip_gradients": clip_keras_gradients},
    ),
    "rlax": Suite(
        install="rlax",
        beside=(
            "`clip_gradient`: `clip_cotangent`; the clipping in `dpg_loss`: "
            "`dropin.tensorflow_style.clip_by_norm`"
        ),
        tests=("rlax/_src/clipping_test.py", "rlax/_src/policy_gradients_test.py"),
        replaced={
            "rlax:clip_gradient": clip_gradient,
            "rlax._src.policy_gradients:_clip_by_l2_norm": clip_by_norm,
        },
    ),
}


def replace(suite: Suite, calls: Counter[str]) -> None:
    """Puts our functions where theirs are, and counts how often they are called."""
    for place, ours in suite.replaced.items():
        module, _, path = place.partition(":")
        holder, _, name = path.rpartition(".")
        owner = import_module(module)
        owner = getattr(owner, holder) if holder else owner
        theirs = getattr(owner, name)
        counted = _counted(name, ours, calls)
        setattr(owner, name, counted)
        _replace_everywhere(module.partition(".")[0], theirs, counted)


def _replace_everywhere(package: str, theirs: Any, ours: Any) -> None:
    """Modules that have imported a function by its name hold it themselves."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != package:
            continue
        for key, value in list(vars(module).items()):
            if value is theirs:
                setattr(module, key, ours)


def _counted(name: str, function: Function, calls: Counter[str]) -> Function:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return counted
